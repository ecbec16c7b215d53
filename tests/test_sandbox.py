"""What the sandbox is for, what no program can do in it, what it tells of a machine. Without bubblewrap they fail."""

import errno
import functools
import logging
import os
import shutil
import site
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from sandboxes import LIGHTLY, QUICK, SECRET, SHORT, attempt
from sandboxes import leftovers_fixture as leftovers_fixture
from sandboxes import quick_fixture as quick_fixture
from sandboxes import sandbox_fixture as sandbox_fixture
from sandboxes import short_fixture as short_fixture

from ragen2_trl import cli
from ragen2_trl.envs.deepcoder import sandbox as module
from ragen2_trl.envs.deepcoder import sandbox_machine
from ragen2_trl.envs.deepcoder.sandbox import Sandbox, SandboxLimits, SandboxUnavailableError
from ragen2_trl.envs.deepcoder.sandbox_defences import find_defences
from ragen2_trl.envs.deepcoder.sandbox_syscalls import ARCHITECTURES, allowed_calls, seccomp_filter

pytestmark = pytest.mark.needs("bubblewrap")


# What it is for


def test_a_program_reads_stdin_and_its_output_comes_back(sandbox):
    outcome = sandbox.run("import sys\nprint(int(input()) + 1)\nprint('note', file=sys.stderr)", "41\n")
    assert (outcome.stdout, outcome.stderr, outcome.exit_status, outcome.ended) == ("42\n", "note\n", 0, "exit")


def test_runs_are_reproducible_whatever_the_hash_seed_outside(sandbox, monkeypatch):
    program = "print({str(i) for i in range(50)}, hash('x'))"
    first = sandbox.run(program)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert sandbox.run(program) == first


def test_a_crash_is_told_by_its_status(sandbox):
    ends = {"sys.exit(3)": (3, None), "sys.exit(137)": (137, None), "ctypes.string_at(0)": (None, 11)}
    outcomes = [sandbox.run(f"import ctypes, sys\n{program}") for program in ends]
    assert [(outcome.exit_status, outcome.signal) for outcome in outcomes] == list(ends.values())
    assert {outcome.ended for outcome in outcomes} == {"exit"}


# Memory, time and output


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
@pytest.mark.parametrize("program", ["time.sleep(60)", "os.closerange(0, 64)\ntime.sleep(60)"])
def test_waiting_past_the_wall_clock_is_ended_and_leaves_nobody(short, leftovers, program):
    outcome = short.run("import os, signal, threading, time\nprint('begun', flush=True)\n" + program)
    assert (outcome.ended, outcome.stdout) == ("wall", "begun\n")
    assert leftovers() == 0


TRAINER = f"""{LIGHTLY}
from ragen2_trl.envs.deepcoder import sandbox
sandbox._RUNNER = sys.argv[1]
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


def test_no_network_is_reachable(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=5).close()  # the server is there
        connect = attempt(f"socket.create_connection(('127.0.0.1', {port}), timeout=1)")
        assert sandbox.run(connect).stdout != "done\n"
    interfaces = sandbox.run("print([line.split(':')[0].strip() for line in open('/proc/net/dev')][2:])")
    assert interfaces.stdout == "['lo']\n"


def test_an_event_loop_still_runs(sandbox):
    assert sandbox.run("import asyncio\nasync def f(): print('ran')\nasyncio.run(f())").stdout == "ran\n"


# Files


def test_only_python_and_its_libraries_are_in_sight(sandbox):
    libraries = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"]
    files = sandbox.run(f"""
import os
for folder, folders, files in os.walk("/"):
    folders[:] = [name for name in folders if os.path.join(folder, name) not in {["/proc", "/dev", *libraries]}]
    for name in files:
        print(os.path.join(folder, name))
""").stdout.split()
    assert set(files) - {"/etc/ld.so.cache"} == {module.PYTHON}


def test_no_installed_package_can_be_imported(sandbox):
    folders = {*site.getsitepackages(), *site.getsitepackages([sys.base_prefix])}
    program = f"import os, sys\nprint([f for f in {folders} if os.path.isdir(f) and os.listdir(f)])\nimport pytest"
    outcome = sandbox.run(program)
    assert outcome.stdout == "[]\n"
    assert "ModuleNotFoundError" in outcome.stderr


def test_a_secret_in_the_environment_outside_is_not_to_be_found(sandbox, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    outcome = sandbox.run("""
import glob, os
print(os.environ)
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/task/*/environ"):
    try:
        print(path, open(path, errors="replace").read())
    except PermissionError:
        pass
""")
    assert "/proc/self/environ" in outcome.stdout
    assert SECRET not in outcome.stdout
    assert "pytest" not in outcome.stdout


def test_bubblewrap_itself_gets_no_secret(monkeypatch):
    """Its environment is in /proc for every process of its user."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    given = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **kwargs: given.append(kwargs["env"]) or popen(*args, **kwargs)
    )
    Sandbox(QUICK).run("print(1)")
    assert given
    assert SECRET not in str(given)


def test_a_program_is_nobody_without_rights(sandbox):
    status = sandbox.run(
        "import os; print(os.getuid(), os.getgid(), os.getgroups()); print(open('/proc/self/status').read())"
    )
    assert status.stdout.startswith("65534 65534 ")
    fields = dict(line.split(":\t", 1) for line in status.stdout.splitlines()[1:] if ":\t" in line)
    assert {int(fields[name], 16) for name in ("CapPrm", "CapEff", "CapAmb")} == {0}
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")


def test_a_fork_bomb_ends_leaves_nobody_and_disturbs_nobody(short, sandbox, leftovers):
    bomb = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    outcomes = sandbox.map(
        lambda program: (short if program is bomb else sandbox).run(program), [bomb, "print(1)", bomb, "print(2)"]
    )
    assert [outcome.ended for outcome in outcomes] == ["wall", "exit", "wall", "exit"]
    assert (outcomes[1].stdout, outcomes[3].stdout) == ("1\n", "2\n")
    assert leftovers() == 0


def test_a_thread_bomb_stays_within_its_own_limit(sandbox):
    bomb = """
import _thread, time
count = 1
try:
    while True:
        _thread.start_new_thread(time.sleep, (0.5,))
        count += 1
except RuntimeError:
    print(count)
"""
    for outcome in Sandbox(workers=3).map(sandbox.run, [bomb] * 3):
        assert 2 < int(outcome.stdout) <= sandbox.limits.threads


EVERYWHERE = ("system calls", "processes", "rights", "network", "files", "size of /tmp", "limits")


def rows(text):
    cells = [[cell.strip() for cell in line.strip("│ \n").split("│")] for line in text.splitlines() if "│" in line]
    return {name: (active, detail) for name, active, detail in cells if name}


@pytest.mark.needs("bubblewrap")
def test_the_table_shows_what_holds_here(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    cli.main(["check-sandbox"])
    shown = rows(capsys.readouterr().out)
    assert {name: shown[name][0] for name in EVERYWHERE} == dict.fromkeys(EVERYWHERE, "yes")
    parent = sandbox_machine.find_parent()
    assert shown["control group"][0] == ("yes" if parent else "no")
    for name in ("memory", "pids") if parent else ():
        assert shown[f"control group: {name}"][0] == ("yes" if name in parent.controllers else "no")


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize("missing", ["system calls", "size of /tmp"])
def test_a_defence_that_does_not_hold_is_told(monkeypatch, missing):
    """What is seen inside decides, not what was asked for."""
    task = module._task

    def lax(isolation, limits):
        found = task(isolation, limits)
        found["isolation"] |= {
            "system calls": {"filter": struct.pack("HBBI", 6, 0, 0, 0x7FFF0000).hex()},  # allows every call
            "size of /tmp": {"inodes": 5000},
        }[missing]
        return found

    assert {defence.name: defence.active for defence in find_defences()}[missing]
    monkeypatch.setattr(module, "_task", lax)
    active = {defence.name: defence.active for defence in find_defences()}
    assert [name for name in EVERYWHERE if not active[name]] == [missing]


@pytest.fixture(name="parent")
def parent_fixture():
    found = sandbox_machine.find_parent()
    if found is None:
        pytest.skip("no cgroup v2 in which this user may make groups")
    return found


def test_what_a_killed_trainer_left_in_a_control_group_ends_with_the_next_run(parent):
    place = 100_000 + os.getpid()  # nobody else's
    group = sandbox_machine.Cgroup(parent.path / f"ragen2-trl-{os.getuid()}-{place}")
    group.path.mkdir()
    left = subprocess.Popen(group.entering(["/bin/sleep", "60"]), start_new_session=True)
    while left.pid not in map(int, (group.path / "cgroup.procs").read_text().split()):
        assert left.poll() is None
    with sandbox_machine.cgroup(parent, place + 1_000_000, 1 << 30, 100):
        assert left.poll() is None  # others are let alone
    with sandbox_machine.cgroup(parent, place, 1 << 30, 100):
        assert left.wait(60) == -9
    assert not group.path.exists()


ALLOWED, KILLED = 0x7FFF0000, 0x80000000


REFUSALS = {0x50000 | number for number in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)}


FILES = ("system_calls.yaml", "arguments.yaml")


CALLS = [call for name in FILES for call in yaml.safe_load((Path(__file__).parent / "attacks" / name).read_text())]


@functools.cache
def steps_of(machine):
    return list(struct.iter_unpack("HBBI", seccomp_filter(machine)))


def answer(machine, number, arguments=(0,) * 6, architecture=None):
    """What the filter says to a call: classic BPF over the kernel's `struct seccomp_data`."""
    steps = steps_of(machine)
    given = [*arguments, *[0] * (6 - len(arguments))]
    architecture = ARCHITECTURES[machine][0] if architecture is None else architecture
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(value % 2**64 for value in given))
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, operand = steps[at]
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x06:
            return operand
        else:
            holds = {0x15: accumulator == operand, 0x35: accumulator >= operand}[operation]
            at += if_true if holds else if_false
        at += 1


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_attack_by_a_system_call_is_refused(machine):
    calls = [call for call in CALLS if machine in call]
    assert len(calls) > 150
    assert [call for call in calls if answer(machine, call[machine], call.get("arguments", ())) not in REFUSALS] == []


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 56), ("aarch64", 220)])
def test_threads_can_be_started_and_processes_cannot(machine, number):
    for flags in (0x3D0F00, 0x7D0F00):  # as glibc does, as musl does
        assert answer(machine, number, [flags]) == ALLOWED
        for bit in (1 << position for position in range(32) if position != 22):
            assert answer(machine, number, [flags ^ bit]) in REFUSALS
    assert answer(machine, 435) == 0x50000 | errno.ENOSYS  # clone3: the C library falls back to clone


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_of_other_architectures_end_the_program(machine):
    for other in (0x40000003, 0x40000028, 0):  # 32-bit x86 and ARM
        assert answer(machine, 1, architecture=other) == KILLED
    if machine == "x86_64":
        assert answer(machine, 0x40000000 | 39) == KILLED  # x32


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_is_on_no_list_is_refused_whatever_its_number(machine):
    passed = [number for number in range(1500) if answer(machine, number, [2**32 - 1] * 6) == ALLOWED]
    assert len(passed) <= len(allowed_calls(machine))
    assert not [number for number in range(437, 1500) if number != 439 and answer(machine, number) == ALLOWED]


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_a_filter_fits_the_kernel(machine):
    assert len(seccomp_filter(machine)) // 8 <= 4096  # BPF_MAXINSNS
