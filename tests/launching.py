"""How tests run a script of `distributed/` on several processes, and what is told when one of them fails.

The processes are forked from a server that has imported what they need: each would take ten seconds to. torchrun, which
is slower by that, runs a script where it is its part that matters.
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

HERE = Path(__file__).parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "PYTHONFAULTHANDLER": "1",  # where it was when a signal ended it
    # of `research`, whose selectors settings name, and of what scripts share
    "PYTHONPATH": os.pathsep.join(map(str, (HERE.parent, HERE, HERE / "distributed"))),
}
SECONDS = 900  # that a script may take


def launch(script: str, processes: int, *arguments: Any) -> None:
    """Run a script to its end.

    Raises:
        AssertionError: If a process fails: with its exit code or signal, and the end of what each wrote.
    """
    with TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        given = {**os.environ, **ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        given |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
        free.close()
        command = [str(HERE / "distributed" / script), *map(str, arguments)]
        logs = {rank: Path(folder) / str(rank) for rank in range(processes)}
        context = fork_server()
        running = [
            context.Process(target=_run, args=(command, {**given, "RANK": str(rank), "LOCAL_RANK": str(rank)}, log))
            for rank, log in logs.items()
        ]
        for process in running:
            process.start()
        try:
            codes = _codes(running)
        finally:
            for process in running:
                process.kill()
                process.join()
        if any(codes):
            told = {rank: log.read_text()[-4000:] if log.exists() else "" for rank, log in logs.items()}
            raise AssertionError(_failure(script, codes, told))


@functools.cache
def fork_server() -> Any:
    """Start the server, with the packages imported."""
    context = multiprocessing.get_context("forkserver")
    # `backends` imports TRL, as has to be done before deepspeed is.
    context.set_forkserver_preload(["backends", "deepspeed"])
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _run(command: list[str], environment: dict[str, str], log: Path) -> None:
    """Be one of the processes."""
    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()
    sys.argv = command
    sys.path[:0] = [str(Path(command[0]).parent), str(HERE)]
    runpy.run_path(command[0], run_name="__main__")


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
            told = {path.parent.name: path.read_text()[-4000:] for path in sorted(Path(logs).rglob("stderr.log"))}
            raise AssertionError(_failure(script, done.returncode, {**told, "launcher": done.stderr[-4000:]}))


def _failure(script: str, code: Any, told: dict[Any, str]) -> str:
    ends = "\n".join(f"--- {process}\n{text}" for process, text in told.items())
    return f"{script} ended with {code}\n{ends}"
