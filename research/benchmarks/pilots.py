"""What it costs to find groups with reward variance: whole groups, or pilots first.

    python -m research.benchmarks.pilots    # about ten minutes on two cores

First a simulation of rewards of two values: reward variance per sampled completion, over that of plain sampling, where
so many prompts are dead and the others' chances are Beta(1.2, 1.2). Beside our rule, which goes on with the prompts
worth it, the one that goes on where a pilot's rewards vary. Then the tiny model on FrozenLake, of whose prompts none
or 70 % give no reward whatever is answered: completions that dynamic sampling scores for each group it trains on.
Writes `research/benchmarks/results/pilots.{json,md}`.
"""

import argparse
import random
import tempfile
from typing import Any

import numpy as np
import transformers

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.sampling.policy import RECENT, least_worth
from ragen2_trl.sampling.posterior import RewardPosterior
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.benchmarks.bench import BASE, save, table
from research.benchmarks.measuring import machine, now

COUNTED = ((16, 0.0), (16, 0.7), (8, 0.0), (8, 0.7))  # G and the share of dead prompts
SHARES = (0.0, 0.3, 0.5, 0.7)  # of dead prompts
CASES = ((16, 3), (8, 3), (16, 2), (8, 2))  # G and G0
ROUNDS = {"whole groups": 0, "pilots of 3": 3, "pilots of 2": 2}


def simulated(
    size: int, first: int, dead: float, prompts: int = 64, rounds: int = 400, seed: int = 0
) -> dict[str, float]:
    """Reward variance per completion, over that of plain sampling, by rule; rounds of so many prompts, whose first
    fifth is for learning the prior."""
    rng = np.random.default_rng(seed)
    posterior, recent = RewardPosterior(0, 1.0), np.zeros(0)
    held = dict.fromkeys(("ours", "those that vary", "plain"), 0.0)
    paid = dict.fromkeys(held, 0)
    for number in range(rounds):
        chances = np.where(rng.random(prompts) < dead, 0.0, rng.beta(1.2, 1.2, prompts))
        rewards = (rng.random((prompts, size)) < chances[:, None]).astype(float)
        variances, pilots = rewards.var(axis=1, ddof=1), rewards[:, :first]
        posterior.see(pilots)
        posterior.learn_prior(pilots)
        expected = posterior.group_variance(pilots, size - first)
        recent = np.concatenate([recent, expected])[-RECENT:]
        if number < rounds // 5:
            continue
        rules = {"ours": expected >= least_worth(recent, first, size), "those that vary": pilots.std(axis=1) > 0}
        for name, committed in rules.items():
            held[name] += variances[committed].sum()
            paid[name] += prompts * first + committed.sum() * (size - first)
        held["plain"] += variances.sum()
        paid["plain"] += prompts * size
    plain = held.pop("plain") / paid["plain"]
    return {name: float(value / paid[name] / plain) for name, value in held.items()}


class Counting(SNRFilteredGRPOTrainer):
    held = 0.0  # reward variance of the groups that were kept

    def _select(self, *args: Any) -> Any:
        selection = super()._select(*args)
        self.held += float(selection.rewards[selection.kept.any(dim=1)].var(dim=1).sum())
        return selection


def counted(size: int, dead_share: float, pilots: int, steps: int, seed: int) -> dict[str, float]:
    """Completions that dynamic sampling has scored, and groups that it has trained on."""
    env = make_env("frozen_lake")
    dataset = env.dataset(2048, seed=seed)
    rng = random.Random(seed)
    dataset = dataset.add_column("dead", [rng.random() < dead_share for _ in range(len(dataset))])
    scored = 0

    def reward(completions, dead, **columns):
        nonlocal scored
        scored += len(completions)
        rewards = env.success_func(completions=completions, **columns)
        return [0.0 if is_dead else value for value, is_dead in zip(rewards, dead, strict=True)]

    args = SNRFilteredGRPOConfig(
        **{**BASE, "output_dir": tempfile.mkdtemp(), "bf16": False, "logging_strategy": "steps"},
        num_generations=size,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=4,  # 8 groups of 16, or 16 of 8
        snr_strategy="nonzero",
        snr_dynamic_sampling_rounds=20,
        snr_pilot_generations=pilots,
        max_completion_length=64,
        learning_rate=1e-4,
        max_steps=steps,
        logging_steps=1,
        seed=seed,
    )
    trainer = Counting(str(TINY_MODEL_PATH), reward, args, dataset)
    trainer.remove_callback(transformers.PrinterCallback)
    start = now()
    trainer.train()
    rows = [row for row in trainer.state.log_history if "snr/trained_groups" in row]
    groups = sum(row["snr/trained_groups"] for row in rows) + rows[-1]["snr/waiting_groups"]
    return {
        "completions": scored,
        "groups": groups,
        "completions_per_group": scored / groups,
        "variance_per_completion": trainer.held / scored,
        "rounds": sum(row["snr/sampling_rounds"] for row in rows) / len(rows),
        "missed": rows[-1].get("snr/missed_variance", float("nan")),
        "seconds": now() - start,
    }


def markdown(results: dict) -> list[str]:
    told = "Reward variance per completion, over that of plain sampling (simulated); in brackets, going on where a"
    rows = [
        [case, *(f"{found['ours']:.2f} ({found['those that vary']:.2f})" for found in of_shares)]
        for case, of_shares in results["simulated"].items()
    ]
    lines = [f"{told} pilot's rewards vary:", "", *table(["G, G0", *(f"{share:.0%} dead" for share in SHARES)], rows)]
    header = ["", "", "completions scored", "full groups", "a group", "of whole groups'"]
    rows = []
    for case, runs in results["counted"].items():
        whole = runs["whole groups"]
        for name, run in runs.items():
            a_group, bought = run["completions_per_group"], run["variance_per_completion"]
            of_whole = f"{a_group / whole['completions_per_group']:.2f}"
            cells = [case, name, str(run["completions"]), f"{run['groups']:.0f}", f"{a_group:.1f}", of_whole]
            rows.append([*cells, f"{bought:.4f}", f"{bought / whole['variance_per_completion']:.2f}"])
    header += ["reward variance a completion", "of whole groups'"]
    return [*lines, "", "Dynamic sampling of the tiny model:", "", *table(header, rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each run")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results: dict[str, Any] = {"machine": machine(), "simulated": {}, "counted": {}}
    for size, first in CASES:
        found = [simulated(size, first, dead, seed=arguments.seed) for dead in SHARES]
        results["simulated"][f"{size}, {first}"] = found
    for size, dead_share in COUNTED:
        of_case = results["counted"].setdefault(f"G = {size}, {dead_share:.0%} dead", {})
        for name, pilots in ROUNDS.items():
            of_case[name] = counted(size, dead_share, pilots, arguments.steps, arguments.seed)
            print(size, dead_share, name, of_case[name])
    save("pilots", "Pilots", results, markdown(results))


if __name__ == "__main__":
    main()
