"""Run Python programs that a model wrote where they can do no harm.

Each run is a process of its own under bubblewrap: no network, no files but Python's standard library and shared
libraries, no environment, no other process in reach, no identity outside. The kernel bounds its CPU time, memory,
threads and files; this module bounds its wall clock and its output.

    sandbox = Sandbox(Limits(wall_seconds=5.0))
    sandbox.run("print(int(input()) + 1)", "41\\n").stdout  # "42\\n"
"""

import errno
import json
import logging
import math
import os
import platform
import selectors
import shutil
import signal
import site
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
Ended = Literal["exit", "wall", "cpu", "output"]

_RUNNER = Path(__file__).with_name("sandbox_runner.py").read_text(encoding="utf-8")
_PYTHON = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
_NOBODY = "65534"
# Bubblewrap gets no other: what a process was started with stays readable in /proc for all of its user.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}


class SandboxUnavailableError(RuntimeError):
    """bubblewrap is missing, or the system does not let it make namespaces.

    Args:
        reason: What is in the way.
        option: The name under which a user sets `allow_unsafe`.
    """

    def __init__(self, reason: str, option: str = "allow_unsafe"):
        super().__init__(
            f"Programs cannot be isolated here: {reason}\nInstall bubblewrap 0.8 or later "
            f"(`apt-get install bubblewrap`, `dnf install bubblewrap`), or pass `{option}=True` to run programs "
            "with your own rights."
        )
        self.reason = reason


@dataclass(frozen=True)
class Limits:
    """What one run may use; all positive.

    A sandboxed program can start threads but no processes, so that `memory_bytes` bounds all of a run.

    Raises:
        ValueError: If a limit is not positive.
    """

    cpu_seconds: int = 10
    wall_seconds: float = 15.0
    memory_bytes: int = 1 << 30  # address space
    threads: int = 16  # the first one included
    file_bytes: int = 16 << 20  # a file, and all files together
    output_bytes: int = 1 << 20  # stdout and stderr each

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"`{field.name}` must be positive, got {getattr(self, field.name)}.")

    @property
    def resources(self) -> dict[str, int]:
        """The limits that the kernel enforces, by their names in the `resource` module."""
        return {
            "RLIMIT_CPU": self.cpu_seconds,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_NPROC": self.threads,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    `stdout` and `stderr` hold at most `Limits.output_bytes` each, undecodable bytes replaced. `returncode` is 128 + n
    for signal n. `ended` names the limit that ended the run: `wall`, `cpu` or `output`; `exit` if it ended by itself.
    """

    stdout: str
    stderr: str
    returncode: int
    ended: Ended


class Sandbox:
    """Runs program texts in isolation.

    Args:
        limits: What each run may use.
        allow_unsafe: Where bubblewrap cannot work, run programs with the caller's rights instead of raising: only the
            limits of `limits` then hold, per process, and a program can do what you can do.
        workers: Runs at a time in `map`; the number of CPUs by default.

    Raises:
        SandboxUnavailableError: If bubblewrap cannot work here and `allow_unsafe` is not set.
        ValueError: If `workers` is not positive.
    """

    def __init__(self, limits: Limits | None = None, *, allow_unsafe: bool = False, workers: int | None = None):
        self.limits = limits or Limits()
        self.workers = workers if workers is not None else os.cpu_count() or 1
        if self.workers < 1:
            raise ValueError(f"`workers` must be positive, got {self.workers}.")
        self._bwrap = shutil.which("bwrap")
        obstacle = _obstacle(self._bwrap)
        if obstacle is not None:
            self._bwrap = None
            if not allow_unsafe:
                raise SandboxUnavailableError(obstacle)
            logger.warning("Programs run without isolation, with the rights of this process: %s", obstacle)

    def run(
        self,
        program: str,
        stdin: str = "",
        *,
        call: tuple[str, Sequence[Any]] | None = None,
        wall_seconds: float | None = None,
    ) -> Outcome:
        """Run a program to its end.

        Args:
            program: Python source.
            stdin: What it reads on standard input.
            call: A function of the program, or of its class `Solution`, and JSON arguments: `stdout` then is the JSON
                of what the function returns, and what the program prints is in `stderr`.
            wall_seconds: A shorter wall clock than that of the limits.
        """
        seconds = min(self.limits.wall_seconds, math.inf if wall_seconds is None else wall_seconds)
        return _run(self._bwrap, self.limits, program, stdin, call, seconds)

    def map(self, work: Callable[[T], R], jobs: Iterable[T]) -> list[R]:
        """`work` of each job, in order, `workers` at a time; `work` is `run`, or a function that calls it."""
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(work, jobs))


@cache
def _obstacle(bwrap: str | None) -> str | None:
    """Why programs cannot be isolated here; None if they can. Tried once a process."""
    if bwrap is None:
        return "bubblewrap (`bwrap`) is not on PATH."
    if platform.machine() not in _AUDIT_ARCHITECTURES:
        return f"no system call filter for {platform.machine()!r}, only for {sorted(_AUDIT_ARCHITECTURES)}."
    outcome = _run(bwrap, Limits(), "print('ready')", "", None, seconds=10.0)
    return None if outcome.stdout == "ready\n" else f"{outcome.stderr.strip()} (exit status {outcome.returncode})."


def _run(
    bwrap: str | None,
    limits: Limits,
    program: str,
    stdin: str,
    call: tuple[str, Sequence[Any]] | None,
    seconds: float,
) -> Outcome:
    deadline = time.monotonic() + seconds
    job = json.dumps({"program": program, "call": call, "limits": limits.resources})
    with (
        tempfile.TemporaryDirectory() as scratch,
        _file(job.encode()) as job_fd,
        _file(stdin.encode(errors="surrogatepass")) as stdin_fd,
        _file(_seccomp_filter() if bwrap else b"") as filter_fd,
    ):
        isolation = _isolation(bwrap, limits, filter_fd) if bwrap else []
        # Without `site`, so that no installed package can be imported.
        command = [*isolation, _PYTHON, "-s", "-S", "-c", _RUNNER, str(job_fd)]
        with subprocess.Popen(
            command,
            stdin=stdin_fd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=scratch,
            env=_ENVIRONMENT,
            pass_fds=(job_fd, filter_fd),
            start_new_session=True,  # without a terminal, and a group to be killed at every moment of its start
        ) as process:
            try:
                stdout, stderr, ended = _follow(process, limits.output_bytes, deadline)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # bubblewrap's death takes its process namespace along
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if ended == "exit" and code == 128 + signal.SIGKILL:
        ended = "cpu"  # the kernel's signal, or the program's own: nobody else is there to send it
    return Outcome(stdout.decode(errors="replace"), stderr.decode(errors="replace"), code, ended)


@contextmanager
def _file(content: bytes) -> Iterator[int]:
    """Descriptor of an unlinked file: unlike a pipe, it needs nobody to feed it, and it has a size."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file.fileno()


def _follow(process: subprocess.Popen[bytes], cap: int, deadline: float) -> tuple[bytes, bytes, Ended]:
    """Read both streams until the process ends, the deadline passes, or a stream has more than `cap` bytes."""
    assert process.stdout and process.stderr
    stdout, stderr = bytearray(), bytearray()
    ended: Ended = "exit"
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, stdout)
        selector.register(process.stderr, selectors.EVENT_READ, stderr)
        while selector.get_map() and ended == "exit":
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                piece = os.read(key.fd, 1 << 16)
                key.data.extend(piece)
                if not piece:
                    selector.unregister(key.fileobj)
            if max(len(stdout), len(stderr)) > cap:
                ended = "output"
            elif time.monotonic() >= deadline:
                ended = "wall"
    if ended == "exit":
        try:  # a process may close its streams and live on
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            ended = "wall"
    return bytes(stdout[:cap]), bytes(stderr[:cap]), ended


def _isolation(bwrap: str, limits: Limits, filter_fd: int) -> list[str]:
    """The command that runs the rest of its line in isolation."""
    base = sys.base_prefix
    visible = [_PYTHON, f"{base}/lib", f"{base}/lib64", "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache"]
    hidden = [path for path in site.getsitepackages([base]) if Path(path).is_dir()]
    demotion = []
    if os.geteuid() == 0:
        # The kernel does not count root's threads, not even under a mapped uid. So root makes the mounts, which lets
        # Python live in root's home, and then becomes nobody, in a user namespace of its own where threads are counted
        # apart from other runs and from which, without a mapped uid, no other namespace can be made.
        setpriv, unshare = (shutil.which(name) or name for name in ("setpriv", "unshare"))
        visible += [setpriv, unshare]
        demotion = [setpriv, "--reuid", _NOBODY, "--regid", _NOBODY, "--clear-groups", "--bounding-set", "-all"]
        demotion += ["--", unshare, "--user", "--"]
        namespaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        rights = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        namespaces = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", _NOBODY, "--gid", _NOBODY]
        # No process beside the program: bubblewrap's own would have its user, but neither its limits nor its filter.
        rights = ["--cap-drop", "ALL", "--as-pid-1"]
    parents = sorted({str(parent) for path in visible for parent in Path(path).parents if parent != Path("/")})
    return [
        *(bwrap, *namespaces, *rights, "--die-with-parent", "--hostname", "sandbox"),
        *("--seccomp", str(filter_fd)),
        *("--perms", "1777", "--size", str(limits.file_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *(word for path in parents for word in ("--perms", "0755", "--dir", path)),
        *(word for path in dict.fromkeys(visible) for word in ("--ro-bind-try", path, path)),
        *(word for path in hidden for word in ("--tmpfs", path, "--remount-ro", path)),
        *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/", "--", *demotion),
    ]


_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# What a program is refused: processes, memory that no limit counts, keys of the session, and sockets, since not every
# family of them (vsock) heeds a network namespace.
_REFUSED = {
    "x86_64": {"fork": 57, "vfork": 58}
    | {"shmget": 29, "semget": 64, "msgget": 68, "memfd_create": 319, "memfd_secret": 447, "io_uring_setup": 425}
    | {"add_key": 248, "request_key": 249, "keyctl": 250, "socket": 41},
    "aarch64": {"shmget": 194, "semget": 190, "msgget": 186, "memfd_create": 279, "memfd_secret": 447}
    | {"io_uring_setup": 425, "add_key": 217, "request_key": 218, "keyctl": 219, "socket": 198},
}
_CLONE = {"x86_64": 56, "aarch64": 220}


def _seccomp_filter() -> bytes:
    """A program for the kernel's packet filter that lets threads begin but no process; see seccomp(2)."""
    load, equal, at_least, bits, verdict = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD, BPF_JEQ, BPF_JGE, BPF_JSET, BPF_RET
    allow, kill, refuse, absent = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    machine, clone3, clone_thread, x32 = platform.machine(), 435, 0x10000, 0x40000000
    program = [
        *((load, 0, 0, 4), (equal, 1, 0, _AUDIT_ARCHITECTURES[machine]), (verdict, 0, 0, kill)),
        *((load, 0, 0, 0), (at_least, 0, 1, x32), (verdict, 0, 0, kill)),
        *(step for number in _REFUSED[machine].values() for step in ((equal, 0, 1, number), (verdict, 0, 0, refuse))),
        # Its flags are out of a filter's reach; libc falls back to `clone`.
        *((equal, 0, 1, clone3), (verdict, 0, 0, absent)),
        *((equal, 1, 0, _CLONE[machine]), (verdict, 0, 0, allow)),
        *((load, 0, 0, 16), (bits, 1, 0, clone_thread), (verdict, 0, 0, refuse), (verdict, 0, 0, allow)),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in program)
