"""Does `ragen2-trl what-if` foretell what a remedy then costs and buys?

    python -m research.benchmarks.what_if    # two hours on one core; goes on where it was stopped

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
from hashlib import sha256
from pathlib import Path
from typing import Any

import transformers

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, estimates, remedies, what_if
from ragen2_trl.envs import make_env
from ragen2_trl.record.cost import cost_of
from ragen2_trl.remedies import Remedy, WhatIf
from ragen2_trl.rollout_events import extend
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.benchmarks.bench import BASE, RESULTS, save, table
from research.benchmarks.measuring import machine

SHAPES = ((4, 8), (4, 64), (8, 8), (8, 32), (16, 8), (16, 16))  # completions of a prompt, prompts of a step
DEAD = (0.5, 0.0, 0.7, 0.3)
EPOCH = 4  # steps
UNITS = {"completion": "a sampled completion", "cpu": "a second of CPU time"}
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

    def reward(completions: list[Any], dead: list[bool], **columns: Any) -> list[float | None]:
        rewards = env.success_func(completions=completions, **columns)
        return [0.0 if is_dead else value for value, is_dead in zip(rewards, dead, strict=True)]

    args = SNRFilteredGRPOConfig(
        **{**BASE, "output_dir": folder, "bf16": False, "logging_strategy": "steps"},
        num_generations=size,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=size * prompts // 32,
        max_completion_length=64,
        max_steps=steps,
        logging_steps=1,
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
        share = {"completion": 1.0, "cpu": plain["sampling_seconds"] / plain["cpu_seconds"]}
        given: dict[str, Any] = {"tokenizer": str(TINY_MODEL_PATH), "micro_batch": 32}
        by_unit = {unit: what_if(folder, sampling_share=share[unit], **given) for unit in UNITS}
    found = by_unit["cpu"]
    made: dict[str, Any] = {"plain": plain, "sampling_share": share["cpu"], "advice": found.advice, "remedies": {}}
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
            "gain": {unit: gain_of(by_unit[unit], name) for unit in UNITS},
            "measured_gain": {unit: bought / cost for unit, cost in of_plain.items()},
        }
    made["named_first"] = {unit: named_first(by_unit[unit], made["remedies"]) for unit in UNITS}
    return made


def gain_of(found: WhatIf, name: str) -> float:
    gain = next(one.gain for one in found.remedies if one.name == name)
    assert gain is not None  # all that are compared have one
    return gain.value


def named_first(found: WhatIf, run: dict[str, Any]) -> str:
    """The remedy that stands first, of those that were run."""
    return next((one.name for one in found.remedies if one.name in run and one.gain is not None), "none")


def markdown(results: dict[str, Any]) -> list[str]:
    cells = results["cells"].values()
    rows = []
    for name, number in COMPARED.items():
        found = [one["remedies"][name] for one in cells if name in one["remedies"]]
        if found:
            errors = [abs(row["predicted"][0] / row["measured"] - 1) for row in found if row["measured"]]
            inside = sum(row["predicted"][1] <= row["measured"] <= row["predicted"][2] for row in found)
            close, median = str(sum(error <= 0.1 for error in errors)), f"{statistics.median(errors):.1%}"
            rows.append([name, number.replace("_", " "), str(len(found)), close, median, str(inside)])
    lines = table(["remedy", "number", "cells", "within 10 %", "median error", "in the interval"], rows)
    lines += ["", "Is the remedy named first the one that then bought most reward variance for its cost?", ""]
    rows = []
    for unit, words in UNITS.items():
        shares = []
        for one in cells:
            bought = {name: row["measured_gain"][unit] for name, row in one["remedies"].items()}
            shares.append(bought[one["named_first"][unit]] / max(bought.values()))
        good = (sum(share >= least for share in shares) for least in (1, 0.9))
        rows.append([words, str(len(shares)), *map(str, good), f"{statistics.median(shares):.2f}"])
    lines += table(["cost", "cells", "best", "within 10 %", "median share of the best's"], rows)
    lines += ["", "Reward variance of trained rows for a unit of cost, plain TRL's being 1; *first*: named first.", ""]
    rows = []
    for case, one in results["cells"].items():
        for name, row in one["remedies"].items():
            value, low, high = row["predicted"]
            gains = [
                f"{row['gain'][unit]:.2f}, {row['measured_gain'][unit]:.2f}"
                + " first" * (name == one["named_first"][unit])
                for unit in UNITS
            ]
            rows.append([case, name, f"{value:.2f} ({low:.2f} to {high:.2f})", f"{row['measured']:.2f}", *gains])
    header = ["G, prompts, dead", "remedy", "predicted", "run", "gain a completion, run", "gain a CPU second, run"]
    return [*lines, *table(header, rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run (default: 8)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    RESULTS.mkdir(exist_ok=True)
    of_predictions = [Path(str(module.__file__)).read_bytes() for module in (estimates, remedies)]
    code = sha256(b"".join(of_predictions)).hexdigest()[:12]
    asked = {"steps": arguments.steps, "seed": arguments.seed, "remedies": code, "machine": machine()}
    stored = RESULTS / "what_if.json"
    results: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    if any(results.get(name) != value for name, value in asked.items()):
        results = {**asked, "cells": {}}
    for dead in DEAD:
        for size, prompts in SHAPES:
            case = f"{size}, {prompts}, {dead:.0%}"
            if case in results["cells"]:
                continue
            results["cells"][case] = made = cell(size, prompts, dead, arguments.steps, arguments.seed)
            print(case, made["named_first"], flush=True)
            stored.write_text(json.dumps(results, indent=2) + "\n")
    save("what_if", "Predicted by what-if, and run", results, markdown(results))


if __name__ == "__main__":
    main()
