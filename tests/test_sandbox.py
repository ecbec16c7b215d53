"""Attacks on the sandbox, each with what must stay true. Without bubblewrap they fail: an untested cage is no cage."""

import contextlib
import logging
import os
import shutil
import site
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from ragen2_trl.envs.deepcoder import sandbox as module
from ragen2_trl.envs.deepcoder.sandbox import Limits, Sandbox, SandboxUnavailableError

QUICK = Limits(cpu_seconds=1, wall_seconds=3.0, memory_bytes=256 << 20, file_bytes=1 << 20, output_bytes=64 << 10)
SHORT = Limits(wall_seconds=0.7)
SECRET = "hunter2-do-not-tell"


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(Limits(wall_seconds=10.0))


@pytest.fixture(scope="module")
def quick():
    return Sandbox(QUICK)


@pytest.fixture(scope="module")
def short():
    return Sandbox(SHORT)


@pytest.fixture
def leftovers(monkeypatch):
    """A function that counts the processes of this test's runs that are alive once they had a second to die."""
    mark = f"# {uuid.uuid4()}"
    monkeypatch.setattr(module, "_RUNNER", f"{module._RUNNER}\n{mark}\n")

    def count():
        found = 0
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
                found += mark in path.read_text(errors="replace")
        return found

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


# What it is for


def test_a_program_reads_stdin_and_its_output_comes_back(sandbox):
    outcome = sandbox.run("import sys\nprint(int(input()) + 1)\nprint('note', file=sys.stderr)", "41\n")
    assert (outcome.stdout, outcome.stderr, outcome.returncode, outcome.ended) == ("42\n", "note\n", 0, "exit")


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
    assert sandbox.run("import sys; sys.exit(3)").returncode == 3
    assert sandbox.run("import ctypes; ctypes.string_at(0)").returncode == 128 + 11


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


# Network


def test_no_network_is_reachable(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=5).close()  # the server is there
        connect = attempt(f"socket.create_connection(('127.0.0.1', {port}), timeout=1)")
        assert sandbox.run(connect).stdout != "done\n"
    interfaces = sandbox.run("print([line.split(':')[0].strip() for line in open('/proc/net/dev')][2:])")
    assert interfaces.stdout == "['lo']\n"


@pytest.mark.parametrize("family", ["AF_INET", "AF_UNIX", "AF_NETLINK", "AF_VSOCK", "AF_ALG"])
def test_no_socket_can_be_made(sandbox, family):
    assert sandbox.run(attempt(f"socket.socket(socket.{family}, socket.SOCK_STREAM)")).stdout == "PermissionError\n"


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
    tools = {shutil.which("setpriv"), shutil.which("unshare")} if os.geteuid() == 0 else set()
    assert set(files) - {"/etc/ld.so.cache"} == {module._PYTHON} | tools


@pytest.mark.parametrize("name", ["checkout", "package", "venv", "temporary", "shadow", "passwd"])
def test_files_outside_cannot_be_opened(sandbox, tmp_path, name):
    temporary = tmp_path / "file"
    temporary.write_text("outside")
    path = {
        "checkout": Path(__file__),
        "package": Path(module.__file__),
        "venv": Path(pytest.__file__),
        "temporary": temporary,
        "shadow": Path("/etc/shadow"),
        "passwd": Path("/etc/passwd"),
    }[name]
    assert path.exists()
    assert sandbox.run(attempt(f"open({str(path)!r})")).stdout == "FileNotFoundError\n"


def test_no_installed_package_can_be_imported(sandbox):
    folders = {*site.getsitepackages(), *site.getsitepackages([sys.base_prefix])}
    program = f"import os, sys\nprint([f for f in {folders} if os.path.isdir(f) and os.listdir(f)])\nimport pytest"
    outcome = sandbox.run(program)
    assert outcome.stdout == "[]\n"
    assert "ModuleNotFoundError" in outcome.stderr


@pytest.mark.parametrize(
    "folder",
    ["/", "/dev", "/dev/shm", "/etc", "/usr/lib", "/proc", "/proc/sys/kernel", str(Path(module._PYTHON).parent)],
)
def test_nothing_can_be_written_but_tmp(sandbox, folder):
    write = "open('{}/new', 'w').write('x')"
    assert sandbox.run(attempt(write.format(folder))).stdout in (
        "OSError\n",
        "PermissionError\n",
        "FileNotFoundError\n",
    )
    assert sandbox.run(attempt(write.format("/tmp"))).stdout == "done\n"


def test_files_end_with_their_run(sandbox):
    program = "import os; print(os.listdir()); open('note', 'w').write('for later'); print(os.getcwd())"
    assert [sandbox.run(program).stdout for _ in range(2)] == ["[]\n/tmp\n"] * 2


def test_the_disk_cannot_be_filled(quick):
    outcome = quick.run("""
total = 0
try:
    for number in range(100):
        with open(str(number), "wb", buffering=0) as file:
            for _ in range(16):
                total += file.write(bytes(1 << 16))
except OSError as error:
    print(error.strerror)
print(total)
""")
    message, total = outcome.stdout.splitlines()
    assert message == "No space left on device"
    assert int(total) <= QUICK.file_bytes


def test_a_file_behind_stdin_cannot_grow_beyond_the_limit(quick):
    program = "import os\nprint(sum(os.pwrite(0, bytes(1 << 16), n << 16) for n in range(64)))"
    outcome = quick.run(program, "x")
    assert "File too large" in outcome.stderr


def test_symlinks_lead_nowhere(sandbox):
    program = "import os\nos.symlink('/etc/passwd', 'stdout')\nos.symlink('/etc/passwd', 'result.json')\n"
    outcome = sandbox.run(program + "print(open('stdout').read())")
    assert outcome.stdout == ""
    assert "FileNotFoundError" in outcome.stderr


# Other processes


def test_no_other_process_is_in_sight_but_the_first_of_the_namespace(sandbox):
    outcome = sandbox.run("import os; print(os.getpid(), [p for p in os.listdir('/proc') if p.isdigit()])")
    assert outcome.stdout in ("1 ['1']\n", "2 ['1', '2']\n")


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


def test_the_first_process_of_the_namespace_cannot_be_taken_over(sandbox):
    """It has the limits and the filter of the program, or else another user."""
    outcome = sandbox.run("""
import os
if os.getpid() == 1:
    print("refused")
try:
    open("/proc/1/mem", "r+b")
except PermissionError:
    print("refused")
""")
    assert outcome.stdout == "refused\n"


def test_a_program_is_nobody_without_rights(sandbox):
    status = sandbox.run(
        "import os; print(os.getuid(), os.getgid(), os.getgroups()); print(open('/proc/self/status').read())"
    )
    assert status.stdout.startswith("65534 65534 ")
    fields = dict(line.split(":\t", 1) for line in status.stdout.splitlines()[1:] if ":\t" in line)
    assert {int(fields[name], 16) for name in ("CapPrm", "CapEff", "CapAmb")} == {0}
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")


def test_signals_reach_nobody_outside(sandbox):
    with subprocess.Popen(["sleep", "60"]) as bystander:
        outcome = sandbox.run(f"""
import os
for target in ({os.getpid()}, {bystander.pid}, -1, 1, -{os.getpgid(0)}):
    try:
        os.kill(target, 9)
    except OSError:
        pass
print("still here")
""")
        assert bystander.poll() is None
        bystander.kill()
    assert outcome.stdout == "still here\n"


@pytest.mark.parametrize(
    "statement",
    [
        "os.fork()",
        "subprocess.run([sys.executable])",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "check(libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 17, 0, 0, 0, 0))",  # clone(SIGCHLD)
        "check(libc.syscall(435, 0, 0))",  # clone3
        "check(libc.unshare(0x10000000))",  # a user namespace
        "check(libc.setns(0, 0))",
        "check(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))",
        "os.setuid(0)",
        "os.chroot('/tmp')",
    ],
)
def test_no_process_and_no_namespace_can_be_made(sandbox, statement):
    assert sandbox.run("import sys\n" + attempt(statement)).stdout in ("OSError\n", "PermissionError\n")


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
    outcome = Sandbox(Limits(cpu_seconds=1, wall_seconds=30.0)).run(
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    )
    assert (outcome.ended, outcome.returncode) == ("cpu", 128 + 9)


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
    started = time.monotonic()
    outcome = short.run("import os, signal, threading, time\nprint('begun', flush=True)\n" + program)
    assert (outcome.ended, outcome.stdout) == ("wall", "begun\n")
    assert time.monotonic() - started < SHORT.wall_seconds + 2
    assert leftovers() == 0


def test_a_run_dies_with_the_process_that_started_it(leftovers):
    folder = str(Path(module.__file__).parent)  # without the package, which takes its time to import
    program = f"import sys; sys.path.append({folder!r}); import sandbox; sandbox._RUNNER = {module._RUNNER!r}\n"
    program += "sandbox.Sandbox().run('while True: pass')"
    with subprocess.Popen([sys.executable, "-c", program]) as parent:
        deadline = time.monotonic() + 60
        while (alive := leftovers.now()) < 3 and time.monotonic() < deadline:  # the parent, bubblewrap, the program
            time.sleep(0.1)
        assert alive >= 3
        parent.kill()
    assert leftovers() == 0


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


def test_unsafe_runs_are_possible_when_asked_for_and_say_so_once(monkeypatch, caplog):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with caplog.at_level(logging.WARNING):
        unsafe = Sandbox(QUICK, allow_unsafe=True)
        assert SECRET not in unsafe.run("import os; print(os.environ)").stdout
        assert unsafe.run("def f(x): return 2 * x", call=("f", [2])).stdout == "4"
        assert unsafe.run(attempt("bytearray(1 << 30)")).stdout == "MemoryError\n"
        assert unsafe.run("while True: pass").ended in ("cpu", "wall")
        assert unsafe.run("import time; time.sleep(60)", wall_seconds=0.5).ended == "wall"
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "Programs run without isolation, with the rights of this process"
    ]


def test_bad_limits_are_named():
    with pytest.raises(ValueError, match="`cpu_seconds` must be positive, got 0"):
        Limits(cpu_seconds=0)
    with pytest.raises(ValueError, match="`workers` must be positive, got 0"):
        Sandbox(workers=0)
