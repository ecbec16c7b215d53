"""What a machine runs short of says nothing of a program: seen through DeepCoder's reward."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading

import pytest
from deepcoder_programs import DOUBLE, HIDDEN, answer, play
from sandboxes import LIGHTLY, QUICK

from ragen2_trl.envs.deepcoder import sandbox as module
from ragen2_trl.envs.deepcoder import sandbox_machine
from ragen2_trl.envs.deepcoder.environment import DeepCoder
from ragen2_trl.envs.deepcoder.program_tests import Case, run_tests
from ragen2_trl.envs.deepcoder.sandbox import Sandbox, SandboxFailedError, SandboxUnavailableError
from ragen2_trl.envs.deepcoder.sandbox_machine import runtime_folder, slot

pytestmark = [pytest.mark.slow, pytest.mark.needs("bubblewrap")]

FAILURES = {
    "no namespace": "echo 'bwrap: Creating new namespace failed: Resource temporarily unavailable' >&2; exit 1",
    "it dies": "kill -9 $$",
    "it ends as if all were well": "exit 0",
    "it starts another program": "echo 42; echo 62674; exit 0",
}


@pytest.fixture(name="quickly")
def quickly_fixture(monkeypatch):
    """Attempts follow one another at once, as many as ever."""
    monkeypatch.setattr(module, "_PAUSES", (0.0,) * len(module._PAUSES))
    monkeypatch.setattr(module, "_PROBE_PAUSES", (0.0,) * len(module._PROBE_PAUSES))


@pytest.fixture(name="failing")
def failing_fixture(tmp_path, monkeypatch, quickly):
    """`failing(how, times)`: from now on bubblewrap fails, so many times, and then works."""
    monkeypatch.setattr(module, "_working", {})
    real = shutil.which("bwrap")

    def fail(how, times):
        left = tmp_path / "left"
        left.write_text("x" * times)
        fake = tmp_path / "bwrap"
        fake.write_text(
            f'#!/bin/sh\nif [ -s {left} ]; then left=$(cat {left}); printf %s "${{left#x}}" > {left}\n'
            f'{FAILURES[how]}\nfi\nexec {real} "$@"\n'
        )
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return fail


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[] if how == "no namespace" else [pytest.mark.slow]) for how in FAILURES]
)
def test_a_right_program_keeps_its_reward_when_the_sandbox_fails_for_a_while(failing, how):
    failing(how, 0)
    env = DeepCoder(workers=1)
    failing(how, 4)
    assert play(env, HIDDEN, answer(DOUBLE))[0].outcome.episode_return == 1.0


def test_a_sandbox_that_never_works_again_is_an_exception_with_the_cause(failing):
    failing("no namespace", 0)
    env = DeepCoder(workers=1)
    failing("no namespace", 1000)
    with pytest.raises(SandboxFailedError, match="Creating new namespace failed: Resource temporarily unavailable"):
        play(env, HIDDEN, answer(DOUBLE))


def test_a_program_that_alone_fails_ends_no_training(monkeypatch, quickly, caplog):
    """Whatever it did to look like a shortage, others can be run: it fails its test, and the log says so."""
    env = DeepCoder(workers=1)
    attempt = module.attempt

    def fail(isolation, places, job):
        broken = "cursed" in job.program
        return module._failure("it broke") if broken else attempt(isolation, places, job)

    monkeypatch.setattr(module, "attempt", fail)
    with caplog.at_level(logging.WARNING):
        assert play(env, HIDDEN, answer(f"{DOUBLE} # cursed"))[0].outcome.episode_return == 0.0
        assert play(env, HIDDEN, answer(DOUBLE))[0].outcome.episode_return == 1.0
    assert [record.message for record in caplog.records] == ["A program could not be run, though others can: it broke"]


def test_attempts_that_the_kernel_ends_are_counted_and_the_program_gets_no_further_case(monkeypatch, quickly):
    """Each case would cost as many attempts, and half a minute of pauses."""
    attempt, tries = module.attempt, []

    def end(isolation, places, job):
        if "cursed" not in job.program:
            return attempt(isolation, places, job)
        tries.append(job.stdin)
        return module._failure("the kernel killed it", 0.25, 0.5)

    sandbox = Sandbox(QUICK)
    monkeypatch.setattr(module, "attempt", end)
    outcome = sandbox.run("cursed")
    assert (outcome.cpu_seconds, outcome.wall_seconds) == (0.25 * len(tries), 0.5 * len(tries))
    tries.clear()
    results = run_tests(sandbox, "cursed", [Case(given, "") for given in "abc"])
    assert [result.verdict for result in results] == ["error", "timeout", "timeout"]
    assert set(tries) == {"a"}


def test_a_forced_time_out_of_the_probe_is_not_remembered(monkeypatch, quickly):
    monkeypatch.setattr(module, "_working", {})
    with monkeypatch.context() as patch:
        patch.setattr(module, "_READY", module.ProgramJob("import time; time.sleep(60)", "", None, QUICK))
        with pytest.raises(SandboxUnavailableError, match="wall"):
            Sandbox(QUICK)
    assert Sandbox(QUICK).run("print(1)").stdout == "1\n"


SHORT_OF_DESCRIPTORS = f"""{LIGHTLY}
import os, resource, threading
from deepcoder_programs import DOUBLE, HIDDEN, answer, play
from ragen2_trl.envs.deepcoder.environment import DeepCoder
env = DeepCoder(workers=1)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True: taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError: pass
threading.Timer(0.5, lambda: [os.close(number) for number in taken]).start()
print(play(env, HIDDEN, answer(DOUBLE))[0].outcome.episode_return)
"""


def test_a_shortage_of_descriptors_that_passes_costs_no_reward():
    done = subprocess.run([sys.executable, "-c", SHORT_OF_DESCRIPTORS], capture_output=True, text=True, check=False)
    assert done.stdout == "1.0\n", done.stderr


def test_threads_and_processes_share_the_places_of_a_machine():
    """Two processes with four threads each never have more than two programs running."""
    program = "import time\nprint(time.monotonic())\ntime.sleep(0.1)\nprint(time.monotonic())"
    code = f"""{LIGHTLY}
import json
from ragen2_trl.envs.deepcoder.sandbox import Sandbox
pool = Sandbox(workers=4, places=2)
print(json.dumps(pool.map(lambda _: pool.run({program!r}).stdout.split(), range(5))))
"""
    trainers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    runs = [tuple(map(float, run)) for trainer in trainers for run in json.loads(trainer.communicate()[0])]
    assert len(runs) == 10
    assert max(sum(begun <= start < end for begun, end in runs) for start, _ in runs) <= 2


def test_a_place_comes_back_from_the_dead():
    code = f"""{LIGHTLY}
import time
from ragen2_trl.envs.deepcoder.sandbox_machine import slot
with slot(1):
    print("mine", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "mine\n"
        got = threading.Event()

        def take():
            with slot(1):
                got.set()

        waiting = threading.Thread(target=take)
        waiting.start()
        assert not got.wait(0.3)
        holder.kill()
        assert got.wait(60)
        waiting.join()


def test_the_folder_of_the_places_is_the_users_alone(monkeypatch, tmp_path):
    folder = runtime_folder()
    assert folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o077
    monkeypatch.setattr(sandbox_machine, "Path", lambda text: tmp_path / text.lstrip("/"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / f"ragen2-trl-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / "tmp" / f"ragen2-trl-{os.getuid()}").chmod(0o777)
    with pytest.raises(PermissionError, match="must be a folder that belongs to you and is closed to others"):
        runtime_folder()


# Load
