"""Does `ragen2-trl what-if` foretell what a remedy then costs and buys?

    python -m research.benchmarks.what_if    # half an hour on two cores

In each cell (a shape of the batch, a share of dead prompts) the tiny model is trained on FrozenLake as TRL does, with
its completions logged at every step. From this log alone remedies are predicted; then each is run on the same tasks.
Dead prompts give no reward whatever is answered. The learning rate is TRL's default, too small to change the policy in
so few steps. Writes `research/benchmarks/results/what_if.{json,md}`.
"""

import argparse
import ast
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, what_if
from ragen2_trl.envs import make_env
from ragen2_trl.record.cost import cost_of
from ragen2_trl.remedies import Remedy, WhatIf
from ragen2_trl.rollout_events import extend
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.benchmarks.measuring import machine

RESULTS = Path(__file__).parent / "results"
SHAPES = ((4, 8), (4, 64), (8, 8), (8, 32), (16, 8), (16, 16))  # completions of a prompt, prompts of a step
DEAD = (0.0, 0.3, 0.5, 0.7)
EPOCH = 4  # steps
# For each remedy, the number of its row that a run can be held to, and the settings of the run.
COMPARED = {
    "lossless": "shared_prompts",
    "nonzero": "kept",
    "dynamic sampling": "completions",
    "pilots, G0 = 2": "completions",
    "prompt selection": "live",
}


class Spending(SNRFilteredGRPOTrainer):
    """Sums of what a run has sampled, trained on and spent."""

    held = 0.0  # reward variance of the rows in the loss
    kept = 0  # groups in the loss
    sampling_seconds = 0.0  # of CPU time

    def _select(self, *args: Any) -> Any:
        selection = super()._select(*args)
        kept = selection.kept.any(dim=1)
        self.held += float(selection.rewards[kept].var(dim=1).sum())
        self.kept += int(kept.sum())
        return selection

    def timed(self, generate: Any, *args: Any) -> Any:
        start = time.process_time()
        completions = generate(*args)
        self.sampling_seconds += time.process_time() - start
        return completions


def trained(size: int, prompts: int, dead_share: float, steps: int, seed: int, folder: str, **settings: Any) -> Any:
    """A run of one cell, over `EPOCH` steps' prompts again and again."""
    env = make_env("frozen_lake")
    rows = env.dataset(EPOCH * prompts, seed=seed)
    rng = random.Random(seed)
    rows = rows.add_column("dead", [rng.random() < dead_share for _ in range(len(rows))])

    def reward(completions: list[Any], dead: list[bool], **columns: Any) -> list[float]:
        rewards = env.success_func(completions=completions, **columns)
        return [0.0 if is_dead else value for value, is_dead in zip(rewards, dead, strict=True)]

    args = SNRFilteredGRPOConfig(
        folder,
        num_generations=size,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=size * prompts // 32,
        max_completion_length=64,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        snr_max_empty_steps=0,
        seed=seed,
        **settings,
    )
    trainer = Spending(str(TINY_MODEL_PATH), reward, args, rows)
    trainer.remove_callback(transformers.PrinterCallback)
    extend(trainer, "_generate", trainer.timed)
    trainer.train()
    return trainer


def measured(trainer: Any) -> dict[str, float]:
    """What a run used, by the names of the numbers that `what_if` predicts."""
    rows = [row for row in trainer.state.log_history if "snr/kept_fraction" in row]
    cost = cost_of(rows)
    assert cost is not None
    later = rows[EPOCH:] or rows
    waiting = rows[-1].get("snr/waiting_groups", 0.0)
    return {
        "completions": cost.sampled / max(1.0, trainer.kept + waiting),
        "shared_prompts": cost.update_ratio or 0.0,
        "kept": statistics.mean(row["snr/kept_fraction"] for row in rows),
        "live": 1 - statistics.mean(row["snr/zero_variance_fraction"] for row in later),
        "variance": trainer.held,
        "sampled": cost.sampled,
        "cpu_seconds": rows[-1]["cost/cpu_seconds"],
        "sampling_seconds": trainer.sampling_seconds,
    }


def settings_of(remedy: Remedy) -> dict[str, Any]:
    """The settings that a row of the table names."""
    call = ast.parse(f"dict({remedy.setting})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}


def cell(size: int, prompts: int, dead: float, steps: int, seed: int) -> dict[str, Any]:
    """Predictions of one cell beside the runs that they are of."""
    shape = size, prompts, dead, steps, seed
    with tempfile.TemporaryDirectory() as folder:
        logs = {"log_completions": True, "num_completions_to_print": 0}
        plain = measured(trained(*shape, folder, snr_strategy="all", **logs))
        share = plain["sampling_seconds"] / plain["cpu_seconds"]
        found = what_if(folder, tokenizer=str(TINY_MODEL_PATH), micro_batch=32, sampling_share=share)
    made: dict[str, Any] = {"plain": plain, "sampling_share": share, "advice": found.advice, "remedies": {}}
    for name, number in COMPARED.items():
        remedy = next((one for one in found.remedies if one.name == name and one.is_known), None)
        if remedy is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = measured(trained(*shape, folder, **settings_of(remedy)))
        of_plain = {"completion": run["sampled"] / plain["sampled"], "cpu": run["cpu_seconds"] / plain["cpu_seconds"]}
        bought = run["variance"] / plain["variance"] if plain["variance"] else float("nan")
        predicted = remedy.numbers[number]
        made["remedies"][name] = {
            "predicted": [predicted.value, predicted.low, predicted.high],
            "measured": run[number],
            "gain": None if remedy.gain is None else remedy.gain.value,
            "measured_gain": {unit: bought / cost for unit, cost in of_plain.items()},
        }
    made["named_first"] = named_first(found, made["remedies"])
    return made


def named_first(found: WhatIf, run: dict[str, Any]) -> str:
    """The remedy that stands first, of those that were run."""
    return next((one.name for one in found.remedies if one.name in run and one.gain is not None), "none")


def markdown(results: dict[str, Any]) -> str:
    lines = ["# Predicted by what-if, and run", ""]
    lines += ["Made by `python -m research.benchmarks.what_if`, which says what is measured.", ""]
    lines += [", ".join(f"{name} {value}" for name, value in results["machine"].items()), ""]
    lines += [
        "| remedy | number | cells | within 10 % | median error | in the interval |",
        "|---|---|---|---|---|---|",
    ]
    for name, number in COMPARED.items():
        rows = [one["remedies"][name] for one in results["cells"].values() if name in one["remedies"]]
        if not rows:
            continue
        errors = [abs(row["predicted"][0] / row["measured"] - 1) for row in rows if row["measured"]]
        inside = [row["predicted"][1] <= row["measured"] <= row["predicted"][2] for row in rows]
        lines.append(
            f"| {name} | {number.replace('_', ' ')} | {len(rows)} | {sum(error <= 0.1 for error in errors)} | "
            f"{statistics.median(errors):.1%} | {sum(inside)} |"
        )
    for unit in ("completion", "cpu"):
        best = [
            max(one["remedies"], key=lambda name: one["remedies"][name]["measured_gain"][unit])
            for one in results["cells"].values()
        ]
        right = sum(name == one["named_first"] for name, one in zip(best, results["cells"].values(), strict=True))
        what = {"completion": "sampled completion", "cpu": "unit of CPU time"}[unit]
        lines += ["", f"The remedy named first bought most reward variance a {what} in {right} of {len(best)} cells."]
    lines += ["", "| G, prompts, dead | remedy | predicted | run | gain | a completion | a CPU second |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for case, one in results["cells"].items():
        for name, row in one["remedies"].items():
            value, low, high = row["predicted"]
            mark = " (first)" if name == one["named_first"] else ""
            gains = [row["measured_gain"][unit] for unit in ("completion", "cpu")]
            lines.append(
                f"| {case} | {name}{mark} | {value:.2f} ({low:.2f} to {high:.2f}) | {row['measured']:.2f} | "
                f"{row['gain']:.2f} | {gains[0]:.2f} | {gains[1]:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run (default: 8)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    RESULTS.mkdir(exist_ok=True)
    results: dict[str, Any] = {"machine": machine(), "cells": {}}
    for size, prompts in SHAPES:
        for dead in DEAD:
            case = f"{size}, {prompts}, {dead:.0%}"
            results["cells"][case] = made = cell(size, prompts, dead, arguments.steps, arguments.seed)
            print(case, made["named_first"], flush=True)
            (RESULTS / "what_if.json").write_text(json.dumps(results, indent=2) + "\n")
    (RESULTS / "what_if.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
