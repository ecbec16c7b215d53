"""Runs the runs of experiments: each a process of its own, as many at a time as asked for, and every one resumable.

A run is `ragen2-trl train` with a file of settings in a folder that has the run's key for a name, so that anybody
can repeat it in a line. Its lock is held by the process that trains: no two commands run one run, also where the one
that began it was killed and its process lives on.

The model of a run with a warm start is made first, once for all runs that ask for the same one, in a folder with a
lock of its own.
"""

import fcntl
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from ragen2_trl.record.files import HISTORY_FILE, read_json, write_private
from research.commands import (
    CONFIG,
    ROOT,
    QueuedRun,
    command_of,
    model_folder,
    runnable,
    warm_start_command,
    write_config,
    write_warm_start,
)
from research.settings import WARM_START, Fields, as_stored, json_text
from research.store import VERSIONS, Store, where_it_ran, where_it_runs

LOG, LOCK, SUMMARY = "output.log", ".lock", "summary.json"
MADE = "made"  # empty file beside a model that a warm start has made to its end
KEPT = (CONFIG, LOG, HISTORY_FILE, SUMMARY, VERSIONS)  # of a run whose numbers are in the store
GRACE = 10.0  # seconds that a process has to end in
POLL = 0.2  # seconds

# One core a run.
ONE_CORE = {
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
WIDE = {"COLUMNS": "500"}  # what is said in one line is one in the log
STEP = re.compile(r"step (\d+)/(\d+)")


@dataclass(frozen=True)
class Failure:
    """A run whose training ended with an error."""

    job: QueuedRun
    command: str
    reason: str


@dataclass(frozen=True)
class Progress:
    """How far a run of runs is; `seconds_left` is `None` as long as nothing tells."""

    done: int
    failed: int
    total: int
    running: tuple[str, ...]
    seconds_left: float | None


@dataclass
class RunnerOutcome:
    """What became of the runs."""

    done: list[QueuedRun] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    left: list[QueuedRun] = field(default_factory=list)


@dataclass
class RunningProcess:
    """A run and the process that trains it, or makes the model that its training begins with."""

    job: QueuedRun
    process: subprocess.Popen[bytes]
    lock: IO[str]
    folder: Path
    resumed: bool = False
    makes_model: bool = False
    started: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.time)  # on the clock of files

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


class Runner:
    """Trains runs and adds each to the store when it ends.

    Args:
        store: Takes their numbers; it says which are done.
        runs: Folder with a folder for each run.
        at_once: How many are trained at the same time.
        on_added: Is told of each run that the store has taken over.
        on_progress: Is told how far it is, several times a second.
        limit: Seconds after which a process that has not ended is ended, and its run counts as failed.
    """

    def __init__(
        self,
        store: Store,
        runs: Path,
        at_once: int,
        on_added: Callable[[QueuedRun], None],
        on_progress: Callable[[Progress], None],
        limit: float = math.inf,
    ):
        self.store = store
        self.runs = runs
        self.at_once = at_once
        self.on_added = on_added
        self.on_progress = on_progress
        self.limit = limit

    def run(self, jobs: Sequence[QueuedRun]) -> RunnerOutcome:
        """Run what is not done.

        Ctrl-C and SIGTERM end the processes, whose runs go on from their last checkpoints next time.

        Raises:
            KeyboardInterrupt: After such a signal, once all processes have ended.
        """
        self._outcome, self._estimate = RunnerOutcome(), TimeLeft(self.store)
        self._running: list[RunningProcess] = []
        done = self.store.done()
        self._outcome.done = [job for job in jobs if job.planned.key in done]
        for job in self._outcome.done:
            self.on_added(job)
        self._outcome.left = [job for job in jobs if job.planned.key not in done]
        with _stop_asked() as asked:
            try:
                while (self._outcome.left or self._running) and not asked:
                    self._step(len(jobs))
                    time.sleep(POLL)
            finally:
                self._stop()
        if asked:
            raise KeyboardInterrupt
        self._tell(len(jobs))
        return self._outcome

    def _step(self, total: int) -> None:
        for job in list(self._outcome.left):
            if len(self._running) >= self.at_once:
                break
            self._begin(job)
        hanging = [one for one in self._running if one.seconds > self.limit and one.process.poll() is None]
        _end_processes(hanging)
        for one in list(self._running):
            if one.process.poll() is not None:
                self._running.remove(one)
                self._end(one, f"ended after its limit of {self.limit:g} s" if one in hanging else "")
        self._tell(total)

    def _begin(self, job: QueuedRun) -> None:
        """Start a run, unless another command is at it."""
        folder = self.runs / job.planned.key
        model = model_folder(folder, job.planned)
        if model is not None and is_locked(model):  # is being made
            return
        lock = _take_lock(folder)
        if lock is None:
            return
        ended = job.planned.key in self.store.done() or (folder / SUMMARY).exists()
        if model is not None and not ended and not (model / MADE).exists():
            lock.close()
            self._begin_model(job, model)
            return
        self._outcome.left.remove(job)
        if job.planned.key in self.store.done():  # by another command, meanwhile
            lock.close()
            self._outcome.done.append(job)
            self.on_added(job)
        elif (folder / SUMMARY).exists():  # trained, and the command killed before the store had it
            with lock:
                self._add(job, math.nan)
        else:
            self._running.append(self._start(job, folder, lock))

    def _begin_model(self, job: QueuedRun, folder: Path) -> None:
        """Start the warm start of a run, which is left until that has ended, unless another process is at it."""
        lock = _take_lock(folder)
        if lock is None:
            return
        if (folder / MADE).exists():  # by another command, meanwhile
            lock.close()
            return
        self._outcome.left.remove(job)
        _trim(folder, (LOCK,))
        process = _process(warm_start_command(write_warm_start(folder, job)), folder, lock, ONE_CORE)
        self._running.append(RunningProcess(job, process, lock, folder, makes_model=True))

    def _start(self, job: QueuedRun, folder: Path, lock: IO[str]) -> RunningProcess:
        resumed = any(folder.glob("checkpoint-*"))
        if not resumed:
            _trim(folder, (LOG, LOCK))
        versions = where_it_ran(read_json(folder / VERSIONS, dict), where_it_runs())
        write_private(folder / VERSIONS, json.dumps(versions))
        command = command_of(write_config(folder, job), job)
        process = _process(command, folder, lock, ONE_CORE if job.launch is None else {})
        return RunningProcess(job, process, lock, folder, resumed)

    def _end(self, one: RunningProcess, reason: str = "") -> None:
        with one.lock:
            if one.process.returncode != 0:
                key = one.job.planned.model_key if one.makes_model else None
                alike = [job for job in self._outcome.left if key is not None and job.planned.model_key == key]
                self._outcome.left = [job for job in self._outcome.left if job not in alike]
                for job in (one.job, *alike):
                    why = reason or _last_line(one.folder / LOG)
                    self._fail(job, why, one.process.returncode, one.makes_model)
            elif one.makes_model:
                (one.folder / MADE).touch()
                self._outcome.left.insert(0, one.job)
            else:
                self._add(one.job, math.nan if one.resumed else one.seconds)

    def _add(self, job: QueuedRun, seconds: float) -> None:
        folder = self.runs / job.planned.key
        try:
            self.store.add(folder, job.planned, seconds)
        except ValueError as error:
            self._fail(job, str(error), 0)
            return
        self._estimate.add(job, seconds)
        self._outcome.done.append(job)
        self.on_added(job)
        if job.launch is None:  # at the paper's scale, weights are worth keeping
            _trim(folder, (*KEPT, LOCK))

    def _fail(self, job: QueuedRun, reason: str, code: int, in_warm_start: bool = False) -> None:
        folder = self.runs / job.planned.key
        model = model_folder(folder, job.planned)
        if in_warm_start and model is not None:
            command = shlex.join(warm_start_command(model / CONFIG))
        else:
            command = shlex.join(command_of(folder / CONFIG, job))
        ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        self._outcome.failed.append(Failure(job, command, f"{reason or 'no output'} ({ended})"))

    def _stop(self) -> None:
        _end_processes(self._running)
        for one in self._running:
            one.lock.close()

    def _tell(self, total: int) -> None:
        outcome = self._outcome
        running = [(one.job, one.seconds, self._whole(one)) for one in self._running]
        self.on_progress(
            Progress(
                len(outcome.done),
                len(outcome.failed),
                total,
                tuple(one.job.name for one in self._running),
                self._estimate.seconds_left(outcome.left, running, self.at_once),
            )
        )

    def _whole(self, one: RunningProcess) -> float | None:
        """Seconds that a run will have taken, by the last line about steps in its log and when that was written."""
        log = one.folder / LOG
        steps = [] if one.resumed or one.makes_model else STEP.findall(_tail(log))
        if not steps:
            return None
        made, of_all = map(int, steps[-1])
        return max(0.0, log.stat().st_mtime - one.began) * of_all / made


class TimeLeft:
    """Seconds that runs take: as long as those with the same settings took, or else by the steps that they have and
    what a step took with the same model and task.

    Args:
        store: Of finished runs.
    """

    def __init__(self, store: Store):
        self._same: dict[str, list[float]] = {}
        self._alike: dict[str, list[tuple[float, int]]] = {}
        for fields, seconds, steps in store.finished()[["fields", "wall_seconds", "steps"]].itertuples(index=False):
            self._note(json.loads(fields), seconds, steps)

    def add(self, job: QueuedRun, seconds: float) -> None:
        """A run has ended after so many seconds, or NaN where they are not those of all of it."""
        self._note(job.planned.fields, seconds, job.max_steps)

    def _note(self, fields: Fields, seconds: float, steps: int) -> None:
        if math.isfinite(seconds) and steps > 0:
            self._same.setdefault(_text(fields), []).append(seconds)
            self._alike.setdefault(_model_and_task(fields), []).append((seconds, steps))

    def of(self, job: QueuedRun) -> float | None:
        """Seconds from a run's beginning to its end; `None` where no run with its model and task has ended."""
        if (same := self._same.get(_text(job.planned.fields))) is not None:
            return sum(same) / len(same)
        if (alike := self._alike.get(_model_and_task(job.planned.fields))) is not None:
            return sum(seconds for seconds, _ in alike) / sum(steps for _, steps in alike) * job.max_steps
        return None

    def seconds_left(
        self, waiting: Sequence[QueuedRun], running: Sequence[tuple[QueuedRun, float, float | None]], at_once: int
    ) -> float | None:
        """Until all have ended; `None` where nothing tells. Runs of which nothing tells take as long as the others.

        Args:
            waiting: Runs that have not begun.
            running: Those that have, each with its seconds so far and those that it will have taken, if something
                tells.
            at_once: How many are trained at the same time.
        """
        to_come = [self.of(job) for job in waiting]
        under_way = [whole if (known := self.of(job)) is None else known for job, _, whole in running]
        told = [whole for whole in (*to_come, *under_way) if whole is not None]
        if not told:
            return None
        mean = sum(told) / len(told)
        after = sum(mean if whole is None else whole for whole in to_come)
        left = [
            max(0.0, (mean if whole is None else whole) - seconds)
            for whole, (_, seconds, _) in zip(under_way, running, strict=True)
        ]
        return max([(after + sum(left)) / at_once, *left])


def _text(fields: Fields) -> str:
    return json_text(as_stored(fields))


def _model_and_task(fields: Fields) -> str:
    return json_text({name: fields.get(name) for name in (WARM_START, "model", "env_name")})


def _take_lock(folder: Path) -> IO[str] | None:
    """The lock of a folder, or `None` where a process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _process(command: Sequence[str], folder: Path, lock: IO[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """One that writes to the log of a folder and holds its lock as long as it lives."""
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            runnable(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **WIDE, **env, "PYTHONPATH": _python_path()},
            pass_fds=[lock.fileno()],
            process_group=0,  # Ctrl-C in a terminal is for this process, which then ends them
        )


def _python_path() -> str:
    """With this checkout first, so that a training finds the selectors of `research` wherever it was begun."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def is_locked(folder: Path) -> bool:
    """Whether a process trains the run of this folder, or makes its model."""
    path = folder / LOCK
    if not path.exists():
        return False
    with path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def _stop_asked() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM, as a list that then is not empty: neither comes during the start of a process."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_processes(running: Sequence[RunningProcess]) -> None:
    """First kindly, and after a while whatever it takes."""
    for one in running:
        _signal_group(one.process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for one in running:
        try:
            one.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal_group(one.process, signal.SIGKILL)
            one.process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)  # with what it has started


def _trim(folder: Path, kept: Iterable[str]) -> None:
    """Remove everything else from a run's folder."""
    for path in folder.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        return file.read().decode(errors="replace")


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in _tail(path).splitlines() if line.strip()]
    return lines[-1] if lines else ""
