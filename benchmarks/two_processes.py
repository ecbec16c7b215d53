"""What two processes make of the filter and of cross-scoring.

    python benchmarks/two_processes.py    # about five minutes on two cores

Each process has one thread. Three measurements:

1. *Update time* of `drop` under DDP as a fraction of plain TRL's, by kept fraction, on replayed completions.
2. *Imbalance* of the dealt rows: tokens of the fuller process over their mean, less 1, for random lengths.
3. *Cross-scoring* of 16 prompts x 64 reasonings on two processes as a fraction of one process's time.

Writes `benchmarks/results/two_processes.{json,md}`.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from cross_score import make_case
from filter_step_time import FRACTIONS, StepTimes, make_trainer
from measuring import machine, now

from ragen2_trl import cross_score
from ragen2_trl.tiny import TINY_MODEL_PATH
from ragen2_trl.trainers.dealing import deal_rows

RESULTS = Path(__file__).parent / "results"
LENGTHS = [100, [40, 200]]
ROWS, STEPS, ROUNDS = 4, 6, 2
COLUMNS = 16


def worker(folder: str) -> None:
    """On each process: medians of update times, and the time to score; process 0 writes them."""
    state = PartialState(cpu=not torch.cuda.is_available())
    cases = [("plain", 1.0), *(("drop", fraction) for fraction in FRACTIONS)]
    seconds = {case: [] for case in cases}
    for _ in range(ROUNDS):
        for variant, fraction in cases:
            times = StepTimes()
            make_trainer(variant, str(TINY_MODEL_PATH), ROWS, STEPS, fraction, LENGTHS, times).train()
            seconds[variant, fraction] += times.updates[1:]
    model, prompts, reasonings = make_case("64 x 64", "hidden 256, 4 layers", 8_192)
    scoring = []
    for _ in range(ROUNDS):
        if state.num_processes > 1:
            dist.barrier()
        start = now()
        cross_score(model, prompts[:COLUMNS], reasonings, split_over_processes=state.num_processes > 1)
        scoring.append(now() - start)
    if state.is_main_process:
        updates = {
            f"{variant} {fraction}": statistics.median(values) for (variant, fraction), values in seconds.items()
        }
        result = {"processes": state.num_processes, "updates": updates, "scoring": min(scoring)}
        (Path(folder) / f"{state.num_processes}.json").write_text(json.dumps(result))


def imbalance(draws: int) -> dict[str, float]:
    """Over random generation batches of 128 completions, half of them kept, for two and eight processes."""
    rng = random.Random(0)
    result = {}
    for processes in (2, 8):
        values = []
        for _ in range(draws):
            lengths = [max(8, round(rng.gammavariate(6, 50))) for _ in range(64)]
            steps = deal_rows(lengths, [16 // processes * 2], 4, processes)
            tokens = [sum(lengths[row] for step in steps for row in step[process]) for process in range(processes)]
            values.append(max(tokens) / statistics.mean(tokens) - 1)
        result[f"{processes} processes, mean"] = statistics.mean(values)
        result[f"{processes} processes, worst"] = max(values)
    return result


def run(processes: int, folder: str) -> dict:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    subprocess.run([*command, __file__, "--worker", folder], check=True, env=environment)
    return json.loads((Path(folder) / f"{processes}.json").read_text())


def markdown(results: dict) -> str:
    two = results["two"]
    plain = two["updates"]["plain 1.0"]
    lines = ["# Two processes", "", "Made by `python benchmarks/two_processes.py`, which says what is measured.", ""]
    lines += [", ".join(f"{name} {value}" for name, value in results["machine"].items()), ""]
    lines += ["| kept fraction | update time, of plain TRL's on two processes |", "|---|---|"]
    for fraction in FRACTIONS:
        lines.append(f"| {fraction:.2f} | {two['updates'][f'drop {fraction}'] / plain:.3f} |")
    lines += ["", "| tokens of the fullest process over the mean, less 1 | |", "|---|---|"]
    lines += [f"| {name} | {value:.2%} |" for name, value in results["imbalance"].items()]
    ratio = two["scoring"] / results["one"]["scoring"]
    lines += ["", f"Cross-scoring on two processes takes {ratio:.2f} of the time on one, one thread each."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.worker:
        worker(arguments.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = {"machine": machine(), "two": run(2, folder), "one": run(1, folder), "imbalance": imbalance(200)}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "two_processes.json").write_text(json.dumps(results, indent=2) + "\n")
    (RESULTS / "two_processes.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
