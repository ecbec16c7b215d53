"""What a checkpoint costs beside plain TRL's.

    python -m research.benchmarks.checkpoint_cost    # minutes on two cores

Plain TRL, the filter, and the filter with the callback train the tiny model on FrozenLake with a checkpoint at every
step; one of each in turn, as often as `--rounds` says. A checkpoint is all that happens in `_save_checkpoint`: card,
weights, optimizer, state, and what is ours. As all of a log is written with each, rows are repeated until the log is
as long as that of 140 steps, and for the second half of the run as that of 2,000; every tenth row has a measurement.
The first checkpoint of a run is left out. The ending is from the last step to the end of `train()`, where figures are
drawn. CPU seconds say the same where a machine is shared. Writes
`research/benchmarks/results/checkpoint_cost.{json,md}`.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import transformers
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.benchmarks.measuring import machine, now

RESULTS = Path(__file__).parent / "results"
VARIANTS = ("plain TRL", "filter", "filter + callback")
STEPS = 8
LENGTHS = {"short": 140, "long": 2000}  # rows of the log, in the first half of a run and in the second
EVERY = 10  # rows between two with a measurement, as by the callback's defaults
TARGET = 0.3  # seconds over plain TRL's


class LongLog(TrainerCallback):
    """Makes the log of a short run as long as that of a long one."""

    def __init__(self):
        self.begun = {1: LENGTHS["short"], STEPS // 2: LENGTHS["long"]}

    def on_step_begin(self, args, state, control, **kwargs):
        history = state.log_history
        wanted = self.begun.get(state.global_step, 0) - len(history)
        measured = dict(history[0]) if history else {}
        plain = {key: value for key, value in measured.items() if not key.startswith("mi/")}
        history[:0] = [dict(plain if number % EVERY else measured) for number in range(wanted)]


class Ending(TrainerCallback):
    """When the last checkpoint is done; the first of the callbacks that hear of the end."""

    def on_train_end(self, args, state, control, **kwargs):
        self.since = clocks()


def clocks() -> tuple[float, float]:
    """Seconds of the wall clock, and of the CPU."""
    return now(), time.process_time()


def since(start: tuple[float, float]) -> dict[str, float]:
    seconds, cpu_seconds = (end - begin for begin, end in zip(start, clocks(), strict=True))
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}


def train(variant: str) -> dict[str, list[dict[str, float]]]:
    """Seconds of each checkpoint, with a log of either length, and of the ending."""
    env = make_env("frozen_lake")
    common: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 48,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_steps": 1,
        "save_total_limit": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    dataset = env.dataset(256, seed=0)
    reward_funcs: list[Any] = env.reward_funcs
    trainer: Any
    if variant == "plain TRL":
        trainer = GRPOTrainer(str(TINY_MODEL_PATH), reward_funcs, GRPOConfig(**common), dataset)
    else:
        args = SNRFilteredGRPOConfig(**common)
        trainer = SNRFilteredGRPOTrainer(str(TINY_MODEL_PATH), reward_funcs, args, dataset)
    if variant == "filter + callback":
        trainer.add_callback(MutualInformationCallback(trainer))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(LongLog())
    ending = Ending()
    trainer.callback_handler.callbacks.insert(0, ending)
    done = []
    save = trainer._save_checkpoint

    def timed(*arguments, **keywords):
        start = clocks()
        save(*arguments, **keywords)
        done.append(since(start))

    trainer._save_checkpoint = timed
    trainer.train()
    return {"short": done[1 : STEPS // 2], "long": done[STEPS // 2 :], "ending": [since(ending.since)]}


def markdown(results: dict) -> str:
    lines = [
        "# Checkpoints",
        "",
        "Made by `python -m research.benchmarks.checkpoint_cost`, which says what is measured.",
        "",
    ]
    lines += [", ".join(f"{name} {value}" for name, value in results["machine"].items()), ""]
    lines += [
        f"Medians over {results['rounds']} rounds, in seconds; in brackets, CPU seconds. Target: less than {TARGET} s "
        "over plain TRL's after 140 steps.",
        "",
        "| | after 140 steps | over plain TRL | of plain TRL | after 2,000 steps | over plain TRL | of plain TRL "
        "| ending, with figures |",
        "|---" * 8 + "|",
    ]
    plain = results["medians"]["plain TRL"]
    for name, medians in results["medians"].items():
        cells = [name]
        for length in LENGTHS:
            (wall, cpu), (plain_wall, plain_cpu) = medians[length].values(), plain[length].values()
            cells += [f"{wall:.3f} ({cpu:.3f})", f"{wall - plain_wall:+.3f} ({cpu - plain_cpu:+.3f})"]
            cells += [f"{wall / plain_wall:.2f} ({cpu / plain_cpu:.2f})"]
        wall, cpu = medians["ending"].values()
        lines.append(f"| {' | '.join(cells)} | {wall:.3f} ({cpu:.3f}) |")
    return "\n".join(lines) + "\n"


def medians_of(runs: list[dict]) -> dict[str, dict[str, float]]:
    return {
        part: {
            clock: statistics.median(one[clock] for run in runs for one in run[part])
            for clock in ("seconds", "cpu_seconds")
        }
        for part in (*LENGTHS, "ending")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    runs: dict[str, list[dict]] = {name: [] for name in VARIANTS}
    for _ in range(arguments.rounds):
        for name in VARIANTS:
            runs[name].append(train(name))
    medians = {name: medians_of(done) for name, done in runs.items()}
    results = {"machine": machine(), "rounds": arguments.rounds, "lengths": LENGTHS, "medians": medians}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "checkpoint_cost.json").write_text(json.dumps({**results, "runs": runs}, indent=2) + "\n")
    (RESULTS / "checkpoint_cost.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
