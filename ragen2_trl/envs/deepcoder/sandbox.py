"""Run Python programs that a model wrote where they can do no harm.

Each run is a process of its own under bubblewrap: no network, no files but Python's standard library and shared
libraries, no environment, no other process in reach, no identity outside, and the system calls of a short list. The
kernel bounds its CPU time, memory, threads and files; this module bounds its output, and its wall clock generously.

    sandbox = Sandbox(SandboxLimits(cpu_seconds=5))
    sandbox.run("print(int(input()) + 1)", "41\\n").stdout  # "42\\n"

`sandbox_process.py` is one run, `sandbox_runner.py` what happens inside, `sandbox_syscalls.py` the list of calls,
`sandbox_cgroup.py` control groups where they can be had, `sandbox_slots.py` the limit for all processes of a machine.
"""

import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from ragen2_trl.envs.deepcoder.sandbox_cgroup import find_parent
from ragen2_trl.envs.deepcoder.sandbox_process import Isolation, ProgramJob, ProgramResult, SandboxLimits, attempt
from ragen2_trl.envs.deepcoder.sandbox_syscalls import ARCHITECTURES

__all__ = ["ProgramResult", "Sandbox", "SandboxFailedError", "SandboxLimits", "SandboxUnavailableError"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

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
        outcome = self._persist(job)
        if outcome.ended == "infrastructure":
            control = self._persist(_READY)
            if control.stdout != "ready\n":
                raise SandboxFailedError(
                    f"Programs can no longer be run here: {outcome.stderr} ({len(_PAUSES) + 1} attempts; "
                    f"`ragen2-trl check-sandbox` tries again)."
                )
            logger.warning("A program could not be run, though others can: %s", outcome.stderr)
        return outcome

    def _persist(self, job: ProgramJob) -> ProgramResult:
        return _persist(self.isolation, self.places, job, _PAUSES)

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
