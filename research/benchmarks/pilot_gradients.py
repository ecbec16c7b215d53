"""Whether going on with some groups alone bends the gradient: bandits whose gradient is known.

    python -m research.benchmarks.pilot_gradients    # a minute

64 bandits of six arms, each under a softmax policy of its own. The gradient of the expected reward is known. Beside it
the mean of what groups of eight contribute, of all of them, of those that pilots of two go on with, and of those with
the larger half of the reward variances (as a filter keeps them). Told is the cosine of both, which is 1 where a
selection only scales a prompt's gradient; for all groups it says what the simulation's own noise is. Writes
`research/benchmarks/results/pilot_gradients.{json,md}`.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from ragen2_trl.trainers.pilots import worth_going_on
from ragen2_trl.trainers.posterior import RewardPosterior

RESULTS = Path(__file__).parent / "results"
BANDITS, ARMS, SIZE, FIRST = 64, 6, 8, 2
# What an arm pays: of two values the higher one by a chance of its own, one of several values, or a normal number.
REWARDS = ("two values", "0, 0.1 or 1", "normal, one spread", "normal, each arm its spread")


def paid(kind: str, arms: np.ndarray, means: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(n, G) rewards of arms that were pulled, (n, G); `means` is (ARMS,), between 0 and 1."""
    if kind == "two values":
        return (rng.random(arms.shape) < means[arms]).astype(float)
    if kind == "0, 0.1 or 1":
        levels = np.array([0.0, 0.1, 1.0])
        first, second = means, np.roll(means, 1) / 2
        return levels[(rng.random(arms.shape) < first[arms]).astype(int) + (rng.random(arms.shape) < second[arms])]
    spreads = np.full(ARMS, 0.3) if kind == "normal, one spread" else np.roll(means, 2)
    return means[arms] + spreads[arms] * rng.normal(size=arms.shape)


def expected_rewards(kind: str, means: np.ndarray) -> np.ndarray:
    """(ARMS,)"""
    if kind != "0, 0.1 or 1":
        return means
    second = np.roll(means, 1) / 2
    return 0.1 * (means * (1 - second) + second * (1 - means)) + means * second


def of_groups(arms: np.ndarray, rewards: np.ndarray, scaled: bool) -> np.ndarray:
    """(n, ARMS) what groups contribute to the gradient by the policy's logits; `scaled` by their standard deviation,
    as GRPO does."""
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    if scaled:
        advantages = advantages / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    # Advantages sum to zero, so that the policy's own part of each score goes.
    return np.stack([(advantages * (arms == arm)).sum(axis=1) for arm in range(ARMS)], axis=1)


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


def measured(kind: str, groups: int, seed: int) -> dict[str, dict[str, float]]:
    """Cosines over bandits, by which groups count."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[float]] = {}
    pulls = []
    for _ in range(BANDITS):
        policy = np.exp(rng.normal(size=ARMS))
        policy /= policy.sum()
        means = rng.random(ARMS)
        arms = rng.choice(ARMS, size=(groups, SIZE), p=policy)
        pulls.append((policy, means, arms, paid(kind, arms, means, rng)))
    posterior = RewardPosterior(0, 1.0)
    pilots = np.concatenate([rewards[:100, :FIRST] for *_, rewards in pulls])
    posterior.see(pilots)
    posterior.learn_prior(pilots)
    threshold = worth_going_on(posterior.group_variance(pilots, SIZE - FIRST), FIRST, SIZE)
    half = np.median(np.concatenate([rewards[:100].var(axis=1) for *_, rewards in pulls]))
    for policy, means, arms, rewards in pulls:
        expected = expected_rewards(kind, means)
        gradient = policy * (expected - policy @ expected)
        counts = {
            "all": np.ones(groups, dtype=bool),
            "pilots": posterior.group_variance(rewards[:, :FIRST], SIZE - FIRST) >= threshold,
            "filter": rewards.var(axis=1) >= half,
        }
        for scaled in (False, True):
            each = of_groups(arms, rewards, scaled)
            for name, counted in counts.items():
                if counted.sum() > groups // 100:
                    found.setdefault(f"{name}{', scaled by group' if scaled else ''}", []).append(
                        cosine(each[counted].mean(axis=0), gradient)
                    )
    return {name: {"mean": float(np.mean(values)), "least": min(values)} for name, values in found.items()}


def markdown(results: dict) -> str:
    lines = ["# Pilots and the direction of the gradient", ""]
    lines += ["Made by `python -m research.benchmarks.pilot_gradients`, which says what is measured.", ""]
    lines += ["Cosine with the known gradient, mean over the bandits (least of them):", ""]
    names = list(next(iter(results.values())))
    lines += ["| rewards | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for kind, found in results.items():
        cells = [f"{found[name]['mean']:.3f} ({found[name]['least']:.3f})" for name in names]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=40_000, help="groups of each bandit")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    results = {kind: measured(kind, arguments.groups, arguments.seed) for kind in REWARDS}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "pilot_gradients.json").write_text(json.dumps(results, indent=2) + "\n")
    (RESULTS / "pilot_gradients.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
