"""Attacks on the network, on files and on other processes. Without bubblewrap they fail."""

import os
import site
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sandboxes import QUICK, SECRET, attempt
from sandboxes import leftovers_fixture as leftovers_fixture
from sandboxes import quick_fixture as quick_fixture
from sandboxes import sandbox_fixture as sandbox_fixture
from sandboxes import short_fixture as short_fixture

from ragen2_trl.envs.deepcoder import sandbox_process as module
from ragen2_trl.envs.deepcoder.sandbox import Sandbox

pytestmark = [pytest.mark.slow, pytest.mark.needs("bubblewrap")]

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
    assert set(files) - {"/etc/ld.so.cache"} == {module.PYTHON}


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
    ["/", "/dev", "/dev/shm", "/etc", "/usr/lib", "/proc", "/proc/sys/kernel", str(Path(module.PYTHON).parent)],
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
    assert "PermissionError" in outcome.stderr


def test_symlinks_lead_nowhere(sandbox):
    program = "import os\nos.symlink('/etc/passwd', 'stdout')\nos.symlink('/etc/passwd', 'result.json')\n"
    outcome = sandbox.run(program + "print(open('stdout').read())")
    assert outcome.stdout == ""
    assert "FileNotFoundError" in outcome.stderr


# Other processes


def test_no_other_process_is_in_sight_but_the_first_of_the_namespace(sandbox):
    outcome = sandbox.run("import os; print(os.getpid(), [p for p in os.listdir('/proc') if p.isdigit()])")
    assert outcome.stdout == "2 ['1', '2']\n"


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
