"""How much time `snr_strategy="lossless"` takes of plain TRL's, and how far apart the two end.

    python -m research.benchmarks.lossless    # some minutes on two cores

The tiny model samples 16 prompts x 8 completions of FrozenLake a step. Rewards are given so that a known share of the
groups has no variance. Plain `trl.GRPOTrainer` and lossless take turns, so that a slow minute hits both; they sample
for themselves, and the largest difference of their parameters at the end stands beside the times. Update time is a
step less generation and rewards: packing, forward, backward, optimizer. Times are CPU seconds of the process, which
others on the machine change least.

Writes `research/benchmarks/results/lossless.md`.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.benchmarks.filter_step_time import BASE, StepTimes
from research.benchmarks.measuring import machine

RESULTS = Path(__file__).parent / "results" / "lossless.md"
SHARES = (0.25, 0.5, 0.75)  # of groups without reward variance
PROMPTS, GROUP_SIZE = 16, 8
SETTINGS = {
    **BASE,
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 4,
    "num_generations": GROUP_SIZE,
    "max_completion_length": 64,
    "learning_rate": 3e-5,
    "weight_decay": 0.1,
}


class BeforeTraining(TrainerCallback):
    """The parameters that a run begins with."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.parameters = [parameter.detach().clone() for parameter in model.parameters()]


def train(plain: bool, share: float, seed: int, steps: int) -> tuple[StepTimes, list[torch.Tensor], float]:
    """Times, the parameters at the end, and how far the farthest of them has come."""
    env = make_env("frozen_lake")
    dataset = env.dataset(PROMPTS, seed=0)
    flat = {row["seed"] for row in dataset.select(range(round(share * PROMPTS)))}

    def reward(completions, seed, **columns):
        """1, 0, 1, 0 in a group, or 0 for all of it."""
        return [float(one not in flat and number % 2 == 0) for number, one in enumerate(seed)]

    settings = {**SETTINGS, "output_dir": tempfile.mkdtemp(), "max_steps": steps, "seed": seed}
    args = GRPOConfig(**settings) if plain else SNRFilteredGRPOConfig(**settings, snr_strategy="lossless")
    times, before = StepTimes(time.process_time), BeforeTraining()
    trainer_class = GRPOTrainer if plain else SNRFilteredGRPOTrainer
    trainer = trainer_class(str(TINY_MODEL_PATH), reward, args, dataset, callbacks=[times, before])
    trainer.remove_callback(transformers.PrinterCallback)
    times.watch(trainer)
    trainer.train()
    model: Any = trainer.model
    after = [parameter.detach().clone() for parameter in model.parameters()]
    return times, after, largest_difference(before.parameters, after)


def largest_difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(first, second, strict=True))


def measure(share: float, rounds: int, steps: int) -> dict[str, float]:
    """Medians over the steps of all rounds but the first of each, which warms up."""
    seconds: dict[tuple[bool, str], list[float]] = {}
    apart, moved = [], []
    for seed in range(rounds):
        ends = {}
        for plain in (True, False):
            times, ends[plain], distance = train(plain, share, seed, steps)
            seconds.setdefault((plain, "update"), []).extend(times.updates[1:])
            seconds.setdefault((plain, "step"), []).extend(times.steps[1:])
        apart.append(largest_difference(ends[True], ends[False]))
        moved.append(distance)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    return {
        "plain_update": medians[True, "update"],
        "update": medians[False, "update"] / medians[True, "update"],
        "plain_step": medians[True, "step"],
        "step": medians[False, "step"] / medians[True, "step"],
        "apart": max(apart),
        "moved": min(moved),
    }


def markdown(rows: dict[float, dict[str, float]], steps: int, note: str) -> str:
    lines = ["# Lossless", "", "Made by `python -m research.benchmarks.lossless`.", ""]
    lines += [
        ", ".join(f"{name} {value}" for name, value in machine().items()) + ("" if not note else f". {note}"),
        "",
    ]
    lines += [
        f"Tiny model, {PROMPTS} prompts x {GROUP_SIZE} completions, float32, {steps} steps of Adam. CPU time of "
        "lossless as a fraction of plain TRL's; largest difference of a parameter between both at the end, and how "
        "far the farthest parameter moved.",
        "",
        "| groups without variance | TRL's update | lossless, update | TRL's step | lossless, step "
        "| parameters differ by | and moved by |",
        "|---" * 7 + "|",
    ]
    for share, row in rows.items():
        lines.append(
            f"| {share:.2f} | {row['plain_update']:.2f} s | {row['update']:.3f} | {row['plain_step']:.2f} s "
            f"| {row['step']:.3f} | {row['apart']:.1e} | {row['moved']:.1e} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of a run")
    parser.add_argument("--note", default="", help="what else is to be known of the machine")
    arguments = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = {}
    for share in SHARES:
        rows[share] = measure(share, arguments.rounds, arguments.steps)
        print(f"  {share:.2f} without variance", rows[share])
    RESULTS.write_text(markdown(rows, arguments.steps, arguments.note))
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
