"""Held-out success over the steps of a training, as its log rows have it."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ragen2_trl.instrument.health import is_number

PREFIX = "eval/env/"  # of the keys in `log_history`, then the task
# The same as it is logged: transformers writes the part before the first underscore as a group of its own, so that
# trackers show `eval/env/<task>/success`, and not `train/eval/env/<task>/success`.
LOGGED = "eval_env/"
# Standard normal quantiles of a two-sided test at 5 %, and of 80 % power.
LEVEL, POWER = 1.96, 0.842
_SUCCESS = re.compile(f"{PREFIX}([^/]+)/success")


def differ(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether the success of two evaluations differs by more than chance explains, as of tasks that know nothing of
    each other: Newcombe's interval of the difference (method 10), made of their 95 % intervals, leaves out 0."""
    low, high = sorted((one, other), key=lambda metrics: metrics["success"])
    gained, spread = high["success"] - low["success"], (low["success_ci_high"] - low["success"])
    return gained > math.hypot(high["success"] - high["success_ci_low"], spread)


def tasks_to_tell(one: float, other: float) -> int | None:
    """Tasks of each of two evaluations that would find such a difference at the 5 % level in 80 of 100 cases (two
    proportions, normal approximation); `None` where there is no difference, or no spread to compute with.

    >>> tasks_to_tell(0.46, 0.59)
    228
    """
    spread = one * (1 - one) + other * (1 - other)
    return math.ceil((LEVEL + POWER) ** 2 * spread / (one - other) ** 2) if spread and one != other else None


def tasks_of(evaluations: Iterable[Mapping[str, float]]) -> str:
    """On how many tasks these evaluations stand, in words; nothing where they do not tell.

    >>> tasks_of([{"success": 0.5, "num_prompts": 256.0}])
    '256 tasks'
    """
    known = [metrics["num_prompts"] for metrics in evaluations if is_number(metrics.get("num_prompts"))]
    counts = dict.fromkeys(f"{count:,.0f}" for count in (min(known), max(known))) if known else ()
    return f"{' to '.join(counts)} tasks" if counts else ""


@dataclass(frozen=True)
class HeldOutPoint:
    """One evaluation: optimizer steps before it, success and the bounds of its 95 % interval, and all metrics."""

    step: int
    success: float
    low: float
    high: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class HeldOutCurve:
    """Held-out success of one task over the steps of a run, in their order; at least one point."""

    task: str
    points: list[HeldOutPoint]

    @property
    def first(self) -> HeldOutPoint:
        return self.points[0]

    @property
    def last(self) -> HeldOutPoint:
        return self.points[-1]

    @property
    def peak(self) -> HeldOutPoint:
        """The best, the earliest of equals."""
        return max(self.points, key=lambda point: point.success)

    @property
    def area(self) -> float:
        """Area under success against steps by the trapezoid rule, divided by the steps: the mean over the run."""
        span = self.last.step - self.first.step
        if span == 0:
            return self.last.success
        areas = ((b.step - a.step) * (a.success + b.success) / 2 for a, b in pairwise(self.points))
        return sum(areas) / span

    @property
    def random_baseline(self) -> float | None:
        """Success of random play on these tasks, where the evaluation has measured it."""
        return self.last.metrics.get("random_success")

    def end(self, loaded: int | None) -> HeldOutPoint:
        """The evaluation of the weights that training has ended with: the last, or that of a step that was loaded."""
        return next((point for point in self.points if point.step == loaded), self.last)

    @property
    def tasks(self) -> str:
        """On how many tasks its points stand, in words; nothing where it is not known."""
        return tasks_of(point.metrics for point in self.points)


def curves_of(log_history: Sequence[Mapping[str, Any]]) -> dict[str, HeldOutCurve]:
    """The held-out curves in the rows of a log, by task; rows that anyone may have written and that hold something
    else than fractions are left out.
    """
    points: dict[str, dict[int, HeldOutPoint]] = {}
    for row in log_history:
        step = row.get("step")
        if not is_number(step):
            continue
        for task in [match[1] for key in row if (match := _SUCCESS.fullmatch(key))]:
            prefix = f"{PREFIX}{task}/"
            found = {key.removeprefix(prefix): row[key] for key in row if key.startswith(prefix)}
            metrics = {name: value for name, value in found.items() if is_number(value)}
            success, low, high = (metrics.get(f"success{bound}", -1.0) for bound in ("", "_ci_low", "_ci_high"))
            if all(0 <= value <= 1 for value in (success, low, high)):
                points.setdefault(task, {})[int(step)] = HeldOutPoint(int(step), success, low, high, metrics)
    return {task: HeldOutCurve(task, [by_step[step] for step in sorted(by_step)]) for task, by_step in points.items()}
