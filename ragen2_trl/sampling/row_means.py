"""TRL's metrics of one generation that took several calls, as means over what the calls speak for.

A generation with further rounds of dynamic sampling or with pilots calls TRL's methods several times, for unequal
numbers of rows. TRL averages the values of a name; here each value is weighted by its rows first. Rewards are
captured, and their metrics computed once over all completions that were scored.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from trl.trainer.utils import nanstd

TOKEN_MEANS = ("kl", "sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/mean")
"""Means over the trainable tokens of a batch: RLOO's distance to the reference, and vLLM's to the policy."""


class Call(NamedTuple):
    """A call of TRL's methods that has ended: the values that it appended, and no call inside it, speak for its rows.

    Args:
        counts: numbers of values by then, by the name of the metric. The first of a generation's tells where it began.
        rows: of the call.
        by_name: other numbers than `rows`, by the name of the metric.
    """

    counts: Mapping[str, int]
    rows: float
    by_name: Mapping[str, float] = {}


def average(
    metrics: dict[str, list[float]], calls: Sequence[Call], per_func: Tensor, sums: Tensor, names: Sequence[str]
) -> None:
    """Replace a generation's values of each metric by one: their mean over rows, or for `min` and `max` their extreme.

    Args:
        metrics: TRL's lists of values by name, for the next log row.
        calls: in the order of their ends.
        per_func: (rows, F) rewards by function, of all completions that were scored; NaN where there is none.
        sums: (rows,) their weighted sums, NaN where there is none.
        names: of the reward functions, of which two may have the same.
    """
    exact: dict[str, list[float]] = defaultdict(list)
    keys = [("reward", "reward_std"), *((f"rewards/{name}/mean", f"rewards/{name}/std") for name in names)]
    for (mean, std), of_all in zip(keys, (sums, *per_func.T), strict=True):
        exact[mean].append(of_all.nanmean().item())
        exact[std].append(nanstd(of_all).item())
    for name, own in {name: _weights_of(name, metrics, calls) for name in metrics}.items():
        values, start = metrics[name], calls[0].counts.get(name, 0)
        if not own or len(values) != start + len(own):
            continue
        valid = [(one, w) for one, w in zip(values[start:], own, strict=True) if w > 0 and not math.isnan(one)]
        if name in exact:
            values[start:] = exact[name]
        elif len(own) > 1 and valid:
            values[start:] = [_joined(name, *zip(*valid, strict=True))]


def _weights_of(name: str, metrics: Mapping[str, list[float]], calls: Sequence[Call]) -> list[float]:
    """Of each value of a metric, what it speaks for."""
    start, weights = calls[0].counts.get(name, 0), list[float]()
    for call in calls[1:]:
        new = call.counts.get(name, 0) - start - len(weights)
        if new:
            weights += [call.by_name.get(name, call.rows * _part(name, metrics, call.counts))] * new
    return weights


def _part(name: str, metrics: Mapping[str, list[float]], counts: Mapping[str, int]) -> float:
    """The part of a call's rows, or of its rows' tool calls, that a metric is about: TRL logs it, too."""
    if name.startswith("completions/") and name.endswith("_terminated_length"):
        return 1 - metrics["completions/clipped_ratio"][counts["completions/clipped_ratio"] - 1]
    if name == "tools/failure_frequency":
        return metrics["tools/call_frequency"][counts["tools/call_frequency"] - 1]
    return 1


def _joined(name: str, values: tuple[float, ...], weights: tuple[float, ...]) -> float:
    """
    >>> _joined("odd", (1.0, 0.0), (1, 3)), _joined("completions/max_length", (1.0, 3.0), (1, 3))
    (0.25, 3.0)
    """
    kind = name.rpartition("/")[2].partition("_")[0]
    if kind in ("min", "max"):
        return {"min": min, "max": max}[kind](values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
