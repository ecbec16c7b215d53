"""Sandboxes with the limits of tests, and how an attack is tried in them."""

import contextlib
import glob
import time
import uuid
from pathlib import Path

import pytest

from ragen2_trl.envs.deepcoder import sandbox as module
from ragen2_trl.envs.deepcoder.sandbox import Sandbox, SandboxLimits

QUICK = SandboxLimits(
    cpu_seconds=1, wall_seconds=3.0, memory_bytes=256 << 20, file_bytes=1 << 20, output_bytes=64 << 10
)
SHORT = SandboxLimits(wall_seconds=1.5)
SECRET = "hunter2-do-not-tell"
ROOT = str(Path(module.__file__).parents[3])
# The beginning of a program that uses the sandbox, without what else the package imports, which takes its time.
LIGHTLY = f"""
import sys, types
for name in ("ragen2_trl", "ragen2_trl.envs", "ragen2_trl.envs.deepcoder"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [{ROOT!r} + "/" + name.replace(".", "/")]
sys.path[:0] = [{ROOT!r}, {ROOT!r} + "/tests"]
"""


@pytest.fixture(scope="module", name="sandbox")
def sandbox_fixture():
    return Sandbox(SandboxLimits(wall_seconds=10.0))


@pytest.fixture(scope="module", name="quick")
def quick_fixture():
    return Sandbox(QUICK)


@pytest.fixture(scope="module", name="short")
def short_fixture():
    return Sandbox(SHORT)


@pytest.fixture(name="leftovers")
def leftovers_fixture(monkeypatch):
    """A function that counts the processes of this test's runs that are alive once they had a second to die."""
    mark = f"# {uuid.uuid4()}"
    monkeypatch.setattr(module, "_RUNNER", f"{module._RUNNER}\n{mark}\n")

    def count():
        found = set()
        for name in glob.glob("/proc/[0-9]*/task/[0-9]*/cmdline"):  # a first thread that ended tells nothing
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
                if mark in Path(name).read_text(errors="replace"):
                    found.add(name.split("/")[2])
        return len(found)

    def settled():
        deadline = time.monotonic() + 1
        while count() and time.monotonic() < deadline:
            time.sleep(0.02)
        return count()

    settled.now = count
    return settled


def attempt(statement):
    """A program that prints `done` if the statement succeeds, and else the name of its exception."""
    return f"""
import ctypes, mmap, os, socket, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
try:
    {statement}
    print("done")
except Exception as error:
    print(type(error).__name__)
"""
