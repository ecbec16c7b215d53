"""Trains the runs of experiments as `make -j` would: each in a process and a folder of its own, where it goes on.

A run is `ragen2-trl train` with a file of settings in a folder that has the run's key for a name, so that anybody
can repeat it in a line. Commands with the same folder of runs share the work. The model of a run with a warm start is
made first, once for all runs that ask for the same one.
"""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

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
from research.store import VERSIONS, Store, where_it_ran, where_it_runs

LOG, LOCK, SUMMARY = "output.log", ".lock", "summary.json"
MADE = "made"  # empty file beside a model that a warm start has made to its end
KEPT = (CONFIG, LOG, LOCK, HISTORY_FILE, SUMMARY, VERSIONS)  # of a run whose numbers are in the store
POLL = 0.2  # seconds

# One core a run.
ONE_CORE = {
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
WIDE = {"COLUMNS": "500"}  # what is said in one line is one in the log


@dataclass(frozen=True)
class Failure:
    """A run whose training ended with an error."""

    job: QueuedRun
    command: str
    reason: str


class StoppedError(Exception):
    """A process was ended because the command was, and not by an error of its own."""


@dataclass
class Runner:
    """Trains runs and adds each to the store when it ends.

    Args:
        store: Takes their numbers; it says which are done.
        runs: Folder with a folder for each run.
        at_once: How many are trained at the same time.
        on_added: Is told of each run that the store has taken over.
        on_progress: Is told in words how far it is, several times a second.
        limit: Seconds after which a process that has not ended is killed, and its run counts as failed.
    """

    store: Store
    runs: Path
    at_once: int
    on_added: Callable[[QueuedRun], None]
    on_progress: Callable[[str], None]
    limit: float = math.inf
    done: list[QueuedRun] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)

    def run(self, jobs: Sequence[QueuedRun]) -> None:
        """Run what is not done; `done` and `failed` say what became of the runs.

        Ctrl-C and SIGTERM end the processes, whose runs go on from their last checkpoints next time.

        Raises:
            KeyboardInterrupt: After such a signal, once all processes have ended.
        """
        done = self.store.done()
        self._left = [job for job in jobs if job.planned.key not in done]
        self._mutex, self._stopping = threading.RLock(), False
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for job in jobs:
            if job.planned.key in done:
                self._end(job)
        with ThreadPoolExecutor(self.at_once) as pool, _terminated_as_by_ctrl_c():
            workers = [pool.submit(self._work) for _ in range(self.at_once)]
            try:
                while wait(workers, POLL).not_done:
                    self.on_progress(self._told(len(jobs)))
            except BaseException:
                self._stop()
                raise
        self.on_progress(self._told(len(jobs)))
        for worker in workers:
            worker.result()

    def _told(self, total: int) -> str:
        parts = [f"{len(self.done)}/{total} runs done", f"{len(self._running)} running"]
        return ", ".join([*parts, *([f"{len(self.failed)} failed"] if self.failed else [])])

    def _work(self) -> None:
        """Train one run after another until none is left; one that another command trains is asked for again."""
        while self._left and not self._stopping:
            for job in list(self._left):
                try:
                    with _locked(self.runs / job.planned.key):
                        with self._mutex:
                            if job not in self._left or self._stopping:
                                continue
                            self._left.remove(job)
                        self._train(job)
                        break
                except Timeout:
                    continue
                except StoppedError:
                    return
            else:
                time.sleep(POLL)

    def _train(self, job: QueuedRun) -> None:
        """What a run still needs: its model, its training, its place in the store."""
        folder, started = self.runs / job.planned.key, math.nan
        if job.planned.key in self.store.done():  # by another command, meanwhile
            self._end(job)
            return
        if not (folder / SUMMARY).exists():  # else trained, and the command ended before the store had it
            if not self._make_model(job):
                return
            if not any(folder.glob("checkpoint-*")):
                _trim(folder, (LOG, LOCK))
                started = time.monotonic()
            versions = where_it_ran(read_json(folder / VERSIONS, dict), where_it_runs())
            write_private(folder / VERSIONS, json.dumps(versions))
            command = command_of(write_config(folder, job), job)
            if not self._run_process(job, command, folder, ONE_CORE if job.launch is None else {}):
                return
        try:
            self.store.add(folder, job.planned, time.monotonic() - started)
        except ValueError as error:
            self._fail(job, command_of(folder / CONFIG, job), str(error))
            return
        self._end(job)
        if job.launch is None:  # at larger scales, weights are worth keeping
            _trim(folder, KEPT)

    def _make_model(self, job: QueuedRun) -> bool:
        """Whether the model of a run's warm start is there, once another command or another run has made it."""
        model = model_folder(self.runs / job.planned.key, job.planned)
        if model is None:
            return True
        model.mkdir(parents=True, exist_ok=True)
        with FileLock(model / LOCK):
            if (model / MADE).exists():
                return True
            _trim(model, (LOCK,))
            made = self._run_process(job, warm_start_command(write_warm_start(model, job)), model, ONE_CORE)
            if made:
                (model / MADE).touch()
            return made

    def _run_process(self, job: QueuedRun, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> bool:
        """Whether a command ended well, which writes to the log of a folder.

        Raises:
            StoppedError: If it was stopped.
        """
        with self._mutex, (folder / LOG).open("ab") as log:
            if self._stopping:
                raise StoppedError
            process = subprocess.Popen(
                runnable(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **WIDE, **env, "PYTHONPATH": _python_path()},
                process_group=0,  # Ctrl-C in a terminal is for this process, which then ends them
            )
            self._running[job.planned.key] = process
        ended = ""
        try:
            code = process.wait(None if math.isinf(self.limit) else self.limit)
        except subprocess.TimeoutExpired:
            ended = f"ended after its limit of {self.limit:g} s"
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        with self._mutex:
            del self._running[job.planned.key]
        if self._stopping:
            raise StoppedError
        if code != 0:
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            self._fail(job, command, f"{ended or _last_line(folder / LOG) or 'no output'} ({how})")
        return code == 0

    def _end(self, job: QueuedRun) -> None:
        with self._mutex:
            self.done.append(job)
            self.on_added(job)

    def _fail(self, job: QueuedRun, command: Sequence[str], reason: str) -> None:
        with self._mutex:
            self.failed.append(Failure(job, shlex.join(command), reason))

    def _stop(self) -> None:
        with self._mutex:
            self._stopping = True
            for process in self._running.values():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)  # with what it has started


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A run's folder for this command alone.

    Raises:
        Timeout: If another one has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / LOCK, blocking=False):
        yield


@contextmanager
def _terminated_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM raises a `KeyboardInterrupt`, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _python_path() -> str:
    """With this checkout first, so that a training finds the selectors of `research` wherever it was begun."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _trim(folder: Path, kept: Iterable[str]) -> None:
    """Remove everything else from a run's folder."""
    for path in folder.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")
