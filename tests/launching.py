"""How tests run scripts in processes of their own, one or several, and what is told when one of them fails.

The processes are forked from a server that has imported what most need, which takes ten seconds. torchrun, which
starts each anew, runs a script where its own part matters.
"""

import faulthandler
import functools
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import time
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets

HERE = Path(__file__).parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "PYTHONFAULTHANDLER": "1",  # where it was when a signal ended it
    # of `research`, whose selectors settings name, and of what scripts share
    "PYTHONPATH": os.pathsep.join(map(str, (HERE.parent, HERE, HERE / "distributed"))),
}
SECONDS = 900  # that a script may take
# What the server imports: nothing that changes settings, as `conftest` does, and TRL before deepspeed.
IMPORTED = [
    *(f"trl.trainer.{name}_trainer" for name in ("grpo", "rloo")),
    *(f"ragen2_trl.{name}" for name in ("trainers.rloo", "trainers.ppo", "callbacks.run_record", "report.page")),
    *("peft", "deepspeed"),
]


def launch(script: str, processes: int, *arguments: Any) -> None:
    """Run a script of `distributed/` to its end.

    Raises:
        AssertionError: If a process fails: with the exit codes (of signals negative), and the end of what each wrote.
    """
    run(HERE / "distributed" / script, *arguments, processes=processes)


def run(*command: Any, processes: int = 1, folder: Any = None, path: Any = ()) -> str:
    """Run a file, or after "-m" a module, to its end; gives what the first process wrote.

    Args:
        *command: the file or module, and its arguments.
        processes: of one group, if there are several, as torchrun makes them.
        folder: where it runs.
        path: folders of modules that it may import.

    Raises:
        AssertionError: as `launch`.
    """
    given = {**os.environ, **ENVIRONMENT}
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        given |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    with TemporaryDirectory() as written:
        logs = {rank: Path(written) / str(rank) for rank in range(processes)}
        running = []
        for rank, log in logs.items():
            own = given | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {})
            arguments = (list(map(str, command)), own, log, folder, list(map(str, path)))
            running.append(fork_server().Process(target=_be, args=arguments))
            running[-1].start()
        try:
            codes = _codes(running)
        finally:
            for process in running:
                process.kill()
                process.join()
        told = {rank: log.read_text() if log.exists() else "" for rank, log in logs.items()}
    if any(code != 0 for code in codes):
        raise AssertionError(_failure(command[0], codes, told))
    return told[0]


@functools.cache
def fork_server() -> Any:
    """Start the server, with the packages imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _be(command: list[str], environment: dict[str, str], log: Path, folder: Any, path: list[str]) -> None:
    """Be one of the processes."""
    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder or os.getcwd())
    datasets.config.HF_DATASETS_CACHE = log.parent / "datasets"  # nothing that another run has left
    faulthandler.enable()
    sys.argv = command[command[0] == "-m" :]
    sys.path[:0] = [str(Path(sys.argv[0]).parent), *path, str(HERE)]
    if command[0] == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def _codes(processes: list[Any]) -> list[int | None]:
    """Exit codes once all have ended, or one has failed; None of those that still run."""
    until = time.monotonic() + SECONDS
    running = list(processes)
    while running and wait([one.sentinel for one in running], max(0.0, until - time.monotonic())):
        running = [one for one in running if one.exitcode is None]
        if any(one.exitcode for one in processes):
            break
    return [one.exitcode for one in processes]


def launch_with_torchrun(script: str, processes: int, *arguments: Any) -> None:
    """As `launch`; what torchrun said is told, too."""
    with TemporaryDirectory() as logs:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        start += ["--log-dir", logs, "--redirects", "2", str(HERE / "distributed" / script)]
        done = subprocess.run(
            [*start, *map(str, arguments)],
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
            env={**os.environ, **ENVIRONMENT},
        )
        if done.returncode:
            told = {path.parent.name: path.read_text() for path in sorted(Path(logs).rglob("stderr.log"))}
            raise AssertionError(_failure(script, done.returncode, {**told, "launcher": done.stderr}))


def _failure(script: Any, code: Any, told: dict[Any, str]) -> str:
    ends = "\n".join(f"--- {process}\n{text[-4000:]}" for process, text in told.items())
    return f"{script} ended with {code}\n{ends}"
