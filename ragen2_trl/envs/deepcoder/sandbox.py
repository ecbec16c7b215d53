"""Run Python programs that a model wrote where they can do no harm.

Each run is a process of its own under bubblewrap: no network, no files but Python's standard library and shared
libraries, no environment, no other process in reach, no identity outside, and the system calls of a short list. The
kernel bounds its CPU time, memory, threads and files; this module bounds its output, and its wall clock generously.

    sandbox = Sandbox(SandboxLimits(cpu_seconds=5))
    sandbox.run("print(int(input()) + 1)", "41\\n").stdout  # "42\\n"

`sandbox_runner.py` is what happens inside, `sandbox_syscalls.py` the list of calls, `sandbox_machine.py` what all runs
share: a limit for all processes of a machine, and control groups where they can be had.
"""

import json
import logging
import os
import platform
import selectors
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from ragen2_trl.envs.deepcoder.sandbox_machine import Cgroup, CgroupParent, cgroup, find_parent, slot
from ragen2_trl.envs.deepcoder.sandbox_syscalls import ARCHITECTURES, seccomp_filter

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

Ended = Literal["exit", "wall", "cpu", "memory", "output", "infrastructure"]

_RUNNER = Path(__file__).with_name("sandbox_runner.py").read_text(encoding="utf-8")
PYTHON = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
_NOBODY = 65534
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# Bubblewrap gets no other: what a process was started with stays readable in /proc for all of its user.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
# What the kernel would keep for a program: queued signals and messages, memory that cannot be swapped.
_NO_KERNEL_MEMORY = {"RLIMIT_SIGPENDING": 64, "RLIMIT_MSGQUEUE": 0, "RLIMIT_MEMLOCK": 0}
_OVERHEAD_BYTES = 64 << 20  # of a control group's memory: bubblewrap, the guard, page tables, buffers
_OWN_PROCESSES = 8  # of a control group: bubblewrap, the guard, and what starts them


@dataclass(frozen=True)
class SandboxLimits:
    """What one run may use; all positive.

    A sandboxed program can start threads but no processes, so that `memory_bytes` bounds all of a run. Verdicts rest
    on `cpu_seconds`, which do not pass while others have the processor; `wall_seconds` is for programs that wait.

    Raises:
        ValueError: If a limit is not positive.
    """

    cpu_seconds: int = 10
    wall_seconds: float = 100.0
    memory_bytes: int = 1 << 30  # address space
    threads: int = 16  # the first one included
    file_bytes: int = 16 << 20  # a file, and all files together
    files: int = 1024  # files, folders and links together
    output_bytes: int = 1 << 20  # stdout and stderr each

    def __post_init__(self) -> None:
        for option in fields(self):
            if not getattr(self, option.name) > 0:
                raise ValueError(f"`{option.name}` must be positive, got {getattr(self, option.name)}.")

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
class ProgramResult:
    """How a run ended.

    `stdout` and `stderr` hold at most `SandboxLimits.output_bytes` each, undecodable bytes replaced. `exit_status` is
    the program's own, `None` where a signal ended it, which then is `signal`. `ended` names the limit that ended the
    run: `wall`, `cpu`, `memory` (of a control group) or `output`; `exit` if it ended by itself. `infrastructure` says
    nothing of the program: the run could not begin, or something outside ended it; the cause is in `stderr`.
    `cpu_seconds` is what the program used, at most, and `wall_seconds` what passed from its start to its end, both
    with what earlier attempts used that the kernel ended, and the pauses after them.
    """

    stdout: str
    stderr: str
    exit_status: int | None
    signal: int | None
    ended: Ended
    cpu_seconds: float = field(default=0.0, compare=False)
    wall_seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class ProgramJob:
    """A program and what it is given; see `Sandbox.run`."""

    program: str
    stdin: str
    call: tuple[str, Sequence[Any]] | None
    limits: SandboxLimits


@dataclass(frozen=True)
class Isolation:
    """What keeps programs from the rest of the machine; `bwrap` is bubblewrap's path."""

    bwrap: str
    parent: CgroupParent | None


_READY = ProgramJob("print('ready')", "", None, SandboxLimits(wall_seconds=60.0))
# Pauses after a run that failed for reasons outside the program: half a minute in all.
_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8.0, 10.0)
_PROBE_PAUSES = _PAUSES[:3]  # a machine that forbids namespaces says so at once
_working: dict[str, Isolation] = {}  # what has been seen to work in this process, by bubblewrap's path


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


class SandboxFailedError(RuntimeError):
    """The machine can no longer run programs, and not because of the program: no verdict would be fair."""


class Sandbox:
    """Runs program texts in isolation.

    Args:
        limits: What each run may use.
        allow_unsafe: Where bubblewrap cannot work, run programs with the caller's rights instead of raising: only the
            limits of `limits` then hold, per process, and a program can do what you can do.
        workers: Runs at a time in `map`; the number of CPUs by default.
        places: Programs that run at a time on this machine, over all threads and processes of the user; the number of
            CPUs by default. Who asks for fewer uses the first of them.

    Raises:
        SandboxUnavailableError: If bubblewrap cannot work here and `allow_unsafe` is not set.
        ValueError: If `workers` or `places` is not positive.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        allow_unsafe: bool = False,
        workers: int | None = None,
        places: int | None = None,
    ):
        self.limits = limits or SandboxLimits()
        self.workers = workers if workers is not None else os.cpu_count() or 1
        self.places = places if places is not None else os.cpu_count() or 1
        for name in ("workers", "places"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be positive, got {getattr(self, name)}.")
        found = _isolation(self.places)
        self.isolation = found if isinstance(found, Isolation) else None
        if isinstance(found, str):
            if not allow_unsafe:
                raise SandboxUnavailableError(found)
            logger.warning("Programs run without isolation, with the rights of this process: %s", found)

    def run(
        self,
        program: str,
        stdin: str = "",
        *,
        call: tuple[str, Sequence[Any]] | None = None,
        cpu_seconds: int | None = None,
        wall_seconds: float | None = None,
    ) -> ProgramResult:
        """Run a program to its end, once it has one of the machine's places.

        What fails for reasons outside the program is tried again, with pauses that grow to seconds. If it fails to the
        end while another program runs, the outcome says `infrastructure`. What attempts used in which the program had
        begun is counted in the outcome.

        Args:
            program: Python source.
            stdin: What it reads on standard input.
            call: A function of the program, or of its class `Solution`, and JSON arguments: `stdout` then is the JSON
                of what the function returns, and what the program prints is in `stderr`.
            cpu_seconds: Less CPU time than the limits give.
            wall_seconds: Less of the wall clock than the limits give.

        Raises:
            SandboxFailedError: If no program can be run here any more; it names the cause.
            ValueError: If `cpu_seconds` or `wall_seconds` is not positive.
        """
        limits = self.limits
        if cpu_seconds is not None:
            limits = replace(limits, cpu_seconds=min(limits.cpu_seconds, cpu_seconds))
        if wall_seconds is not None:
            limits = replace(limits, wall_seconds=min(limits.wall_seconds, wall_seconds))
        job = ProgramJob(program, stdin, call, limits)
        outcome = _persist(self.isolation, self.places, job, _PAUSES)
        if outcome.ended == "infrastructure":
            control = _persist(self.isolation, self.places, _READY, _PAUSES)
            if control.stdout != "ready\n":
                raise SandboxFailedError(
                    f"Programs can no longer be run here: {outcome.stderr} ({len(_PAUSES) + 1} attempts; "
                    f"`ragen2-trl check-sandbox` tries again)."
                )
            logger.warning("A program could not be run, though others can: %s", outcome.stderr)
        return outcome

    def map(self, work: Callable[[T], R], jobs: Iterable[T]) -> list[R]:
        """`work` of each job, in order, `workers` at a time; `work` is `run`, or a function that calls it."""
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(work, jobs))


def _persist(isolation: Isolation | None, places: int, job: ProgramJob, pauses: Sequence[float]) -> ProgramResult:
    cpu_seconds = wall_seconds = 0.0  # of attempts in which the program had begun, with the pauses after them
    for pause in (*pauses, None):
        outcome = attempt(isolation, places, job)
        if outcome.ended != "infrastructure" or pause is None:
            break
        logger.info("A run failed and is tried again in %g s: %s", pause, outcome.stderr)
        time.sleep(pause)
        if outcome.wall_seconds > 0:
            cpu_seconds += outcome.cpu_seconds
            wall_seconds += outcome.wall_seconds + pause
    return replace(
        outcome,
        cpu_seconds=outcome.cpu_seconds + cpu_seconds,
        wall_seconds=outcome.wall_seconds + wall_seconds,
    )


def _isolation(places: int) -> Isolation | str:
    """What isolates programs here, or why nothing can. Only what works is remembered, since the rest may pass."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "bubblewrap (`bwrap`) is not on PATH."
    if platform.machine() not in ARCHITECTURES:
        return f"no system call filter for {platform.machine()!r}, only for {sorted(ARCHITECTURES)}."
    if bwrap not in _working:
        isolation = Isolation(bwrap, find_parent())
        outcome = _persist(isolation, places, _READY, _PROBE_PAUSES)
        if outcome.stdout != "ready\n":
            return f"{outcome.stderr.strip()} (ended by: {outcome.ended})."
        _working[bwrap] = isolation
    return _working[bwrap]


# One run


def attempt(isolation: Isolation | None, places: int, job: ProgramJob) -> ProgramResult:
    """Run a program once it has one of the machine's `places`. A shortage of anything is an outcome, too."""
    try:
        with slot(places) as number, ExitStack() as stack:
            group = None
            if isolation and isolation.parent:
                memory = job.limits.memory_bytes + 2 * job.limits.file_bytes + _OVERHEAD_BYTES
                processes = job.limits.threads + _OWN_PROCESSES
                group = stack.enter_context(cgroup(isolation.parent, number, memory, processes))
            return _run(isolation, group, job)
    except OSError as error:
        return _failure(f"{type(error).__name__}: {error}")


def _failure(cause: str, cpu_seconds: float = 0.0, wall_seconds: float = 0.0) -> ProgramResult:
    return ProgramResult("", cause, None, None, "infrastructure", cpu_seconds, wall_seconds)


def _run(isolation: Isolation | None, group: Cgroup | None, job: ProgramJob) -> ProgramResult:
    limits = job.limits
    given = json.dumps({**_task(isolation, limits), "program": job.program, "call": job.call})
    with (
        _folder(isolation) as folder,
        _file(given.encode(), sealed=True) as job_fd,
        _file(job.stdin.encode(errors="surrogatepass"), sealed=True) as stdin_fd,
        _file(b"", sealed=False) as report_fd,
    ):
        # Without `site`, so that no installed package can be imported.
        command = [PYTHON, "-s", "-S", "-c", _RUNNER, str(job_fd), str(report_fd)]
        command = [*_isolated(isolation.bwrap, limits), *command] if isolation else command
        started = time.monotonic()
        with subprocess.Popen(
            group.entering(command) if group else command,
            stdin=stdin_fd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=_ENVIRONMENT,
            pass_fds=(job_fd, report_fd),
            start_new_session=True,  # without a terminal, and a group to be killed at every moment of its start
        ) as process:
            try:
                stdout, stderr, ended = _follow(process, limits.output_bytes, started + limits.wall_seconds)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # the guard dies with bubblewrap, and all else with it
                if group:
                    group.kill()
        report = json.loads(os.pread(report_fd, 1 << 16, 0) or b"{}")
    out, err = (stream.decode(errors="replace") for stream in (stdout, stderr))
    elapsed = time.monotonic() - started
    if group and group.ran_out_of_memory():
        ended = "memory"
    if ended != "exit":
        used = min(float(limits.cpu_seconds), elapsed)
        return ProgramResult(out, err, None, signal.SIGKILL, ended, used, elapsed)
    if "cpu_seconds" not in report:
        return _failure(report.get("failed") or f"{err.strip()[-1000:]} (exit status {process.returncode})")
    used = report["cpu_seconds"]
    if report["signal"] == signal.SIGKILL:
        # The kernel's signal, since the filter lets no program send it: at the end of its time, or to free memory.
        # The clock of the limit counts in ticks and runs fast or slow where many share a processor.
        if isolation and used < 0.5 * limits.cpu_seconds:
            cause = "the kernel killed the program within its limits, as it does where memory runs out"
            return _failure(cause, used, elapsed)
        ended, used = "cpu", max(used, float(limits.cpu_seconds))
    return ProgramResult(out, err, report["exit_status"], report["signal"], ended, used, elapsed)


def _task(isolation: Isolation | None, limits: SandboxLimits) -> dict[str, Any]:
    if isolation is None:
        return {"limits": limits.resources, "isolation": None}
    # The kernel does not count root's threads, so that root's programs become somebody else's.
    user = _NOBODY if os.geteuid() == 0 else None
    sealed = {"inodes": limits.files, "devices": _DEVICES, "user": user, "filter": seccomp_filter().hex()}
    return {"limits": {**limits.resources, **_NO_KERNEL_MEMORY}, "isolation": sealed}


@contextmanager
def _folder(isolation: Isolation | None) -> Iterator[str]:
    """Where a program starts; a sandboxed one has a `/tmp` of its own, which leaves nothing behind."""
    if isolation:
        yield "/"
        return
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@contextmanager
def _file(content: bytes, sealed: bool) -> Iterator[int]:
    """Descriptor of a file without a name: unlike a pipe, it needs nobody to feed it, and it has a size.

    On Linux it is memory, which nobody can change once it is sealed.
    """
    in_memory = sys.platform == "linux"
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING if in_memory else 0
    with os.fdopen(os.memfd_create("ragen2-trl", flags), "w+b") if in_memory else tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        file.seek(0)
        if sealed and in_memory:
            import fcntl

            seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
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


def _isolated(bwrap: str, limits: SandboxLimits) -> list[str]:
    """The command that runs the rest of its line in isolation, as the first process of namespaces of its own."""
    base = sys.base_prefix
    visible = [PYTHON, f"{base}/lib", f"{base}/lib64", "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache"]
    hidden = [path for path in site.getsitepackages([base]) if Path(path).is_dir()]
    parents = {str(parent) for path in visible for parent in Path(path).parents if parent != Path("/")}
    if os.geteuid() == 0:  # root makes the mounts, which lets Python live in root's home
        namespaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        rights = ["CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID"]
    else:
        namespaces = ["--unshare-all", "--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY)]
        rights = ["CAP_SYS_ADMIN"]  # over its own namespaces; the runner gives it up before there is a program
    streams = {"/dev/fd": "", "/dev/stdin": "/0", "/dev/stdout": "/1", "/dev/stderr": "/2"}
    return [
        *(bwrap, *namespaces, "--as-pid-1", "--die-with-parent", "--hostname", "sandbox", "--cap-drop", "ALL"),
        *(word for right in rights for word in ("--cap-add", right)),
        *("--perms", "1777", "--size", str(limits.file_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *(word for path in sorted({*parents, "/dev"}) for word in ("--perms", "0755", "--dir", path)),
        *(word for path in dict.fromkeys(visible) for word in ("--ro-bind-try", path, path)),
        *(word for path in hidden for word in ("--tmpfs", path, "--remount-ro", path)),
        *(word for path in _DEVICES for word in ("--dev-bind", path, path)),
        *(word for name, end in streams.items() for word in ("--symlink", f"/proc/self/fd{end}", name)),
        *("--proc", "/proc", "--remount-ro", "/", "--"),
    ]
