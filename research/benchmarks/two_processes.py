"""What two processes make of the filter and of cross-scoring.

    python -m research.benchmarks.two_processes    # about five minutes on two cores

Each process has one thread. Four measurements:

1. *Update time* of `drop` under DDP as a fraction of plain TRL's, by kept fraction, on replayed completions.
2. *Bytes that change process* as a fraction of what sending every kept row to every other process would take, on the
   rows of such a run and, as tokens, for random generation batches on two to eight processes.
3. *Imbalance* of the dealt rows: tokens of the fuller process over their mean, less 1, for random lengths.
4. *Cross-scoring* of 16 prompts x 64 traces on two processes as a fraction of one process's time.

Writes `research/benchmarks/results/two_processes.{json,md}`.
"""

import argparse
import io
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
from accelerate.utils import gather_object, recursively_apply

from ragen2_trl import cross_score
from ragen2_trl.tiny import TINY_MODEL_PATH
from ragen2_trl.trainers import plans, processes
from ragen2_trl.trainers.batches import take
from ragen2_trl.trainers.dealing import deal_rows
from research.benchmarks.cross_score import make_case
from research.benchmarks.filter_step_time import FRACTIONS, StepTimes, make_trainer
from research.benchmarks.measuring import machine, now

RESULTS = Path(__file__).parent / "results"
LENGTHS = [100, [40, 200]]
ROWS, STEPS, ROUNDS = 4, 6, 2
MOVING_STEPS = 24
COLUMNS = 16


def worker(folder: str) -> None:
    """On each process: medians of update times, and the time to score; process 0 writes them."""
    state = PartialState(cpu=not torch.cuda.is_available())
    cases = [("plain", 1.0), *(("drop", fraction) for fraction in FRACTIONS)]
    seconds: dict[tuple[str, float], list[float]] = {case: [] for case in cases}
    for _ in range(ROUNDS):
        for variant, fraction in cases:
            times = StepTimes()
            make_trainer(variant, str(TINY_MODEL_PATH), ROWS, STEPS, fraction, LENGTHS, times).train()
            seconds[variant, fraction] += times.updates[1:]
    moved = {fraction: moved_bytes(fraction) for fraction in FRACTIONS if state.num_processes > 1}
    moved = {fraction: {name: sum(gather_object([of[name]])) for name in of} for fraction, of in moved.items()}
    model, prompts, traces = make_case("64 x 64", "hidden 256, 4 layers", 8_192)
    scoring = []
    for _ in range(ROUNDS):
        if state.num_processes > 1:
            dist.barrier()
        start = now()
        cross_score(model, prompts[:COLUMNS], traces, split_over_processes=state.num_processes > 1)
        scoring.append(now() - start)
    if state.is_main_process:
        updates = {
            f"{variant} {fraction}": statistics.median(values) for (variant, fraction), values in seconds.items()
        }
        result = {"processes": state.num_processes, "updates": updates, "moved": moved, "scoring": min(scoring)}
        (Path(folder) / f"{state.num_processes}.json").write_text(json.dumps(result))


def moved_bytes(fraction: float) -> dict[str, int]:
    """Bytes that this process sends in steps of the above, and those of its kept rows for every other process."""
    count = {"moved": 0, "every kept row": 0}
    exchange, exchange_rows = processes.exchange, processes.exchange_rows

    def counted(parcels, device):
        count["moved"] += sum(size_of(parcel) for parcel in parcels if parcel is not None)
        return exchange(parcels, device)

    def counted_rows(rows, kept, deal, accelerator, *arguments):
        if kept:
            count["every kept row"] += (accelerator.num_processes - 1) * size_of(take(rows, kept))
        return exchange_rows(rows, kept, deal, accelerator, *arguments)

    processes.exchange, vars(plans)["exchange_rows"] = counted, counted_rows
    make_trainer("drop", str(TINY_MODEL_PATH), ROWS, MOVING_STEPS, fraction, LENGTHS, StepTimes()).train()
    processes.exchange, vars(plans)["exchange_rows"] = exchange, exchange_rows
    return count


def size_of(batch) -> int:
    buffer = io.BytesIO()
    torch.save(recursively_apply(torch.clone, batch), buffer)
    return buffer.tell()


def random_deals(num_processes: int, fraction: float, draws: int):
    """Deals of the kept ones of 16 groups of 8 random lengths, 4 rows a micro-batch, and those lengths by process."""
    rng = random.Random(0)
    for _ in range(draws):
        groups = [[max(8, round(rng.gammavariate(6, 50))) for _ in range(8)] for _ in range(16)]
        kept = set(rng.sample(range(16), round(fraction * 16)))
        lengths: list[list[int]] = [[] for _ in range(num_processes)]
        for number in sorted(kept):
            lengths[number * num_processes // 16] += groups[number]
        yield deal_rows(lengths, [32 // num_processes], ROWS), lengths


def imbalance(draws: int) -> dict[str, float]:
    """Over random generation batches of 128 completions, half of them kept, for two and eight processes."""
    result = {}
    for num_processes in (2, 8):
        values = []
        for deal, lengths in random_deals(num_processes, 0.5, draws):
            tokens = [
                sum(lengths[home][number] for shares in deal for home, number in shares[process])
                for process in range(num_processes)
            ]
            values.append(max(tokens) / statistics.mean(tokens) - 1)
        result[f"{num_processes} processes, mean"] = statistics.mean(values)
        result[f"{num_processes} processes, worst"] = max(values)
    return result


def moved_tokens(draws: int) -> dict[str, dict[str, float]]:
    """Tokens that change process over those of every kept row for every other process, in such batches."""
    result: dict[str, dict[str, float]] = {}
    for num_processes in (2, 4, 8):
        result[str(num_processes)] = of_fraction = {}
        for fraction in FRACTIONS:
            moved = before = 0
            for deal, lengths in random_deals(num_processes, fraction, draws):
                rows = [(p, *row) for shares in deal for p, share in enumerate(shares) for row in share]
                moved += sum(lengths[home][number] for process, home, number in rows if home != process)
                before += (num_processes - 1) * sum(map(sum, lengths))
            of_fraction[str(fraction)] = moved / before
    return result


def run(num_processes: int, folder: str) -> dict:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={num_processes}", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    subprocess.run(
        [*command, "-m", "research.benchmarks.two_processes", "--worker", folder], check=True, env=environment
    )
    return json.loads((Path(folder) / f"{num_processes}.json").read_text())


def markdown(results: dict) -> str:
    two = results["two"]
    plain = two["updates"]["plain 1.0"]
    lines = [
        "# Two processes",
        "",
        "Made by `python -m research.benchmarks.two_processes`, which says what is measured.",
        "",
    ]
    lines += [", ".join(f"{name} {value}" for name, value in results["machine"].items()), ""]
    lines += ["| kept fraction | update time, of plain TRL's on two processes |", "|---|---|"]
    for fraction in FRACTIONS:
        lines.append(f"| {fraction:.2f} | {two['updates'][f'drop {fraction}'] / plain:.3f} |")
    lines += ["", "| kept fraction | bytes that change process, of every kept row to every other process |"]
    lines += ["|---|---|"]
    for fraction, count in two["moved"].items():
        lines.append(f"| {float(fraction):.2f} | {count['moved'] / count['every kept row']:.1%} |")
    lines += ["", "| tokens that change process, likewise |" + "".join(f" kept {f:.2f} |" for f in FRACTIONS)]
    lines.append("|---" * (1 + len(FRACTIONS)) + "|")
    for number, shares in results["moved tokens"].items():
        lines.append(f"| {number} processes |" + "".join(f" {share:.1%} |" for share in shares.values()))
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
        results = {"machine": machine(), "two": run(2, folder), "one": run(1, folder)}
    results |= {"moved tokens": moved_tokens(200), "imbalance": imbalance(200)}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "two_processes.json").write_text(json.dumps(results, indent=2) + "\n")
    (RESULTS / "two_processes.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
