"""How tests start a script of `distributed/` on several processes, and what is told when one of them fails."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent


def launch(script: str, processes: int, *arguments: Any) -> None:
    """Run a script to its end.

    Raises:
        AssertionError: If a process fails: with its exit code or signal, and the end of what each wrote to stderr.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONFAULTHANDLER": "1",  # where it was when a signal ended it
        "PYTHONPATH": str(HERE.parent),  # of `research`, whose selectors settings name
    }
    with TemporaryDirectory() as logs:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        start += ["--log-dir", logs, "--redirects", "2", str(HERE / "distributed" / script)]
        done = subprocess.run(
            [*start, *map(str, arguments)], stderr=subprocess.PIPE, text=True, timeout=900, env=environment
        )
        if done.returncode:
            told = {path.parent.name: path.read_text()[-4000:] for path in sorted(Path(logs).rglob("stderr.log"))}
            ends = "\n".join(f"--- process {process}\n{text}" for process, text in told.items())
            raise AssertionError(f"{script} ended with {done.returncode}\n{ends}\n--- launcher\n{done.stderr[-4000:]}")
