"""TRL's metrics of one generation that took several calls, as means over what the calls speak for.

A generation with further rounds of dynamic sampling or with pilots calls TRL's methods several times, for unequal
numbers of rows. TRL averages the values of a name; here each value is weighted by its rows first. Rewards are
captured, and their metrics computed once over all completions that were scored.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from trl.trainer.utils import nanstd

from ragen2_trl.rollout_events import group_rewards

TOKEN_MEANS = ("kl", "sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/mean")
"""Means over the trainable tokens of a batch: RLOO's distance to the reference, and vLLM's to the policy."""


class RowMeans:
    """The values that the calls of one generation append to TRL's metrics.

    Args:
        metrics: TRL's lists of values by name, for the next log row.
    """

    def __init__(self, metrics: dict[str, list[float]]):
        self.metrics = metrics
        self.start = {name: len(values) for name, values in metrics.items()}
        # What the calls speak for, in the order of their ends: numbers of values by then, rows, and others by name.
        self.calls: list[tuple[dict[str, int], float, Mapping[str, float]]] = []
        self.scored: list[Tensor] = []  # (rows, F) rewards by function over all processes, of each round

    def add(self, rows: float, by_name: Mapping[str, float] | None = None) -> None:
        """A call has ended: what it appended, and no call inside it, speaks for this many rows; others by name."""
        self.calls.append(({name: len(values) for name, values in self.metrics.items()}, rows, by_name or {}))

    def end_round(self, per_func: Tensor, tokens: int, rows: int) -> None:
        """TRL has made its batch of a round.

        Args:
            per_func: (rows, F) rewards by function, of all completions that were scored.
            tokens: of the batch that are trainable.
            rows: of the batch on this process.
        """
        self.scored.append(per_func)
        self.add(len(per_func), {"frac_reward_zero_std": rows, **dict.fromkeys(TOKEN_MEANS, tokens)})

    def close(self, weights: Tensor, names: Sequence[str]) -> None:
        """Replace the values of each name by one: their mean over rows, or for `min` and `max` their extreme.

        Args:
            weights: (F,) of the reward functions.
            names: of the reward functions.
        """
        exact = reward_metrics(torch.cat(self.scored), weights, names)
        for name, own in {name: self._weights_of(name) for name in self.metrics}.items():
            values, start = self.metrics[name], self.start.get(name, 0)
            if not own or len(values) != start + len(own):
                continue
            valid = [(one, w) for one, w in zip(values[start:], own, strict=True) if w > 0 and not math.isnan(one)]
            if name in exact:
                values[start:] = exact[name]
            elif len(own) > 1 and valid:
                values[start:] = [_joined(name, *zip(*valid, strict=True))]

    def _weights_of(self, name: str) -> list[float]:
        """Of each value of a metric, what it speaks for."""
        start, weights = self.start.get(name, 0), list[float]()
        for counts, rows, by_name in self.calls:
            new = counts.get(name, 0) - start - len(weights)
            if new:
                weights += [by_name.get(name, rows * self._part(name, counts))] * new
        return weights

    def _part(self, name: str, counts: Mapping[str, int]) -> float:
        """The part of a call's rows, or of its rows' tool calls, that a metric is about: TRL logs it, too."""
        if name.startswith("completions/") and name.endswith("_terminated_length"):
            return 1 - self.metrics["completions/clipped_ratio"][counts["completions/clipped_ratio"] - 1]
        if name == "tools/failure_frequency":
            return self.metrics["tools/call_frequency"][counts["tools/call_frequency"] - 1]
        return 1


def reward_metrics(per_func: Tensor, weights: Tensor, names: Sequence[str]) -> dict[str, list[float]]:
    """TRL's metrics of rewards, by name.

    Args:
        per_func: (rows, F) rewards by function, NaN where there is none.
        weights: (F,).
        names: of the functions, of which two may have the same.
    """
    found: dict[str, list[float]] = defaultdict(list)
    sums = group_rewards(per_func, weights, 1).flatten()
    keys = [("reward", "reward_std"), *((f"rewards/{name}/mean", f"rewards/{name}/std") for name in names)]
    for (mean, std), values in zip(keys, (sums, *per_func.T), strict=True):
        found[mean].append(values.nanmean().item())
        found[std].append(nanstd(values).item())
    return found


def _joined(name: str, values: tuple[float, ...], weights: tuple[float, ...]) -> float:
    """
    >>> _joined("odd", (1.0, 0.0), (1, 3)), _joined("completions/max_length", (1.0, 3.0), (1, 3))
    (0.25, 3.0)
    """
    kind = name.rpartition("/")[2].partition("_")[0]
    if kind in ("min", "max"):
        return {"min": min, "max": max}[kind](values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
