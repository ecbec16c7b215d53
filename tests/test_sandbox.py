"""What the sandbox is for, and attacks on its limits. Without bubblewrap they fail: an untested cage is no cage."""

import logging
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from sandboxes import LIGHTLY, QUICK, SECRET, SHORT, attempt
from sandboxes import leftovers_fixture as leftovers_fixture
from sandboxes import quick_fixture as quick_fixture
from sandboxes import sandbox_fixture as sandbox_fixture
from sandboxes import short_fixture as short_fixture

from ragen2_trl.envs.deepcoder import sandbox_process as module
from ragen2_trl.envs.deepcoder.sandbox import Sandbox, SandboxLimits, SandboxUnavailableError

pytestmark = pytest.mark.needs("bubblewrap")

# What it is for


def test_a_program_reads_stdin_and_its_output_comes_back(sandbox):
    outcome = sandbox.run("import sys\nprint(int(input()) + 1)\nprint('note', file=sys.stderr)", "41\n")
    assert (outcome.stdout, outcome.stderr, outcome.exit_status, outcome.ended) == ("42\n", "note\n", 0, "exit")


@pytest.mark.parametrize(
    "reader", ["os.read(0, os.fstat(0).st_size)", "open(0, 'rb').read()", "sys.stdin.buffer.read()"]
)
def test_every_way_to_read_stdin_finds_all_of_it(sandbox, reader):
    text = "1 2 3\n" * 50_000
    assert sandbox.run(f"import os, sys\nprint(len({reader}))", text).stdout == f"{len(text)}\n"


def test_a_program_that_never_reads_blocks_nobody(quick):
    assert quick.run("print('done')", "x" * (8 << 20)).stdout == "done\n"


def test_unicode_comes_through_and_binary_is_replaced(sandbox):
    assert sandbox.run("print(input())", "käse 🧀\n").stdout == "käse 🧀\n"
    assert sandbox.run("import sys\nsys.stdout.buffer.write(b'\\xff\\x00ok')").stdout == "\ufffd\x00ok"


def test_runs_are_reproducible_whatever_the_hash_seed_outside(sandbox, monkeypatch):
    program = "print({str(i) for i in range(50)}, hash('x'))"
    first = sandbox.run(program)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert sandbox.run(program) == first


def test_a_thread_with_a_large_stack_is_allowed(sandbox):
    program = "import threading\nthreading.stack_size(1 << 28)\nt = threading.Thread(target=print, args=('deep',))\n"
    assert sandbox.run(program + "t.start()\nt.join()").stdout == "deep\n"


def test_a_crash_is_told_by_its_status(sandbox):
    ends = {"sys.exit(3)": (3, None), "sys.exit(137)": (137, None), "ctypes.string_at(0)": (None, 11)}
    outcomes = [sandbox.run(f"import ctypes, sys\n{program}") for program in ends]
    assert [(outcome.exit_status, outcome.signal) for outcome in outcomes] == list(ends.values())
    assert {outcome.ended for outcome in outcomes} == {"exit"}


def test_at_most_workers_run_at_a_time_and_as_many_do(sandbox):
    running, peak, lock = 0, 0, threading.Lock()
    pool = Sandbox(QUICK, workers=3)

    def work(number):
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        outcome = pool.run(f"import time; time.sleep(0.1); print({number})")
        with lock:
            running -= 1
        return int(outcome.stdout)

    assert pool.map(work, range(9)) == list(range(9))
    assert peak == 3


# Memory, time and output


@pytest.mark.parametrize("hoard", ["bytearray(1 << 30)", "mmap.mmap(-1, 1 << 30)"])
def test_memory_is_bounded(quick, hoard):
    assert quick.run(attempt(hoard)).stdout in ("MemoryError\n", "OSError\n")
    assert quick.run(attempt("bytearray(64 << 20)")).stdout == "done\n"


@pytest.mark.parametrize("statement", ["os.memfd_create('hoard')", "check(libc.shmget(0, 1 << 20, 0o1600))"])
def test_no_memory_can_be_had_that_is_not_counted(quick, statement):
    assert quick.run(attempt(statement)).stdout == "PermissionError\n"


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_CPU", "RLIMIT_FSIZE"])
def test_no_limit_can_be_raised(sandbox, name):
    limit = f"__import__('resource').{name}"
    assert (
        sandbox.run(attempt(f"__import__('resource').setrlimit({limit}, (1 << 40, 1 << 40))")).stdout == "ValueError\n"
    )


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_of_output_is_cut_off(quick, stream):
    outcome = quick.run(f"import sys\nwhile True: sys.{stream}.write('x' * 4096)")
    assert outcome.ended == "output"
    assert len(getattr(outcome, stream)) == QUICK.output_bytes


def test_an_endless_loop_runs_out_of_cpu_time():
    outcome = Sandbox(SandboxLimits(cpu_seconds=1, wall_seconds=30.0)).run(
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    )
    assert (outcome.ended, outcome.exit_status, outcome.signal) == ("cpu", None, 9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "time.sleep(60)",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)",
        "os.closerange(0, 64)\ntime.sleep(60)",
        "os.read(os.pipe()[0], 1)",
        "threading.Thread(target=time.sleep, args=(60,)).start()",
    ],
)
def test_waiting_past_the_wall_clock_is_ended_and_leaves_nobody(short, leftovers, program):
    outcome = short.run("import os, signal, threading, time\nprint('begun', flush=True)\n" + program)
    assert (outcome.ended, outcome.stdout) == ("wall", "begun\n")
    assert leftovers() == 0


TRAINER = f"""{LIGHTLY}
from ragen2_trl.envs.deepcoder import sandbox, sandbox_process
sandbox_process._RUNNER = sys.argv[1]
sandbox.Sandbox().run(sys.argv[2])
"""
HOSTILE = """
import ctypes, os, re, sys, threading, time
libc = ctypes.CDLL(None)
def become():  # with the mark by which it is found
    mark = re.findall("# [0-9a-f-]{{36}}", open("/proc/self/cmdline").read())
    os.execv(sys.executable, [sys.executable, "-c", "while True: pass", *mark])
try:
    exec({way!r})
except OSError:
    pass
while True:
    time.sleep(1)
"""
STAYERS = {
    "spins": "while True: pass",
    "no parent's death signal": "libc.prctl(1, 0, 0, 0, 0)",
    "a session of its own": "os.setsid()",
    "both": "libc.prctl(1, 0, 0, 0, 0)\nos.setsid()",
    "from a thread that outlives the first": "t = threading.Thread(target=time.sleep, args=(60,))\nt.start()\n"
    "libc.pthread_exit(0)",
    "as another program": "become()",
    "as another program from a thread": "t = threading.Thread(target=become)\nt.start()\nt.join()",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", STAYERS)
def test_a_run_dies_with_the_process_that_started_it_and_leaves_no_folder(leftovers, way, tmp_path):
    hostile = HOSTILE.format(way=STAYERS[way])
    command = [sys.executable, "-c", TRAINER, module._RUNNER, hostile]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}) as parent:
        deadline = time.monotonic() + 60
        while (alive := leftovers.now()) < 4 and time.monotonic() < deadline:  # parent, bubblewrap, guard, program
            time.sleep(0.05)
        assert alive >= 4
        time.sleep(0.3)  # for what the program does first
        parent.kill()
    assert leftovers() == 0
    assert list(tmp_path.iterdir()) == []


# Where there is no isolation


def test_without_bubblewrap_nothing_runs(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        SandboxUnavailableError, match=r"not on PATH[\s\S]*apt-get install bubblewrap[\s\S]*dnf install"
    ):
        Sandbox()


def test_the_reason_is_told_where_namespaces_are_forbidden(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'No permissions to create a new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(SandboxUnavailableError, match=r"No permissions to create a new namespace \(exit status 1\)"):
        Sandbox()


@pytest.mark.slow
def test_unsafe_runs_are_possible_when_asked_for_and_each_sandbox_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with caplog.at_level(logging.WARNING):
        unsafe = Sandbox(QUICK, allow_unsafe=True)
        assert SECRET not in unsafe.run("import os; print(os.environ)").stdout
        assert unsafe.run("def f(x): return 2 * x", call=("f", [2])).stdout == "4"
        assert unsafe.run(attempt("bytearray(1 << 30)")).stdout == "MemoryError\n"
        assert unsafe.run("while True: pass").ended in ("cpu", "wall")
        short = Sandbox(SHORT, allow_unsafe=True)
        assert short.run("import time; time.sleep(60)").ended == "wall"
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "Programs run without isolation, with the rights of this process"
    ] * 2


def test_bad_limits_are_named():
    with pytest.raises(ValueError, match="`cpu_seconds` must be positive, got 0"):
        SandboxLimits(cpu_seconds=0)
    with pytest.raises(ValueError, match="`workers` must be positive, got 0"):
        Sandbox(workers=0)
    with pytest.raises(ValueError, match="`places` must be positive, got 0"):
        Sandbox(places=0)
