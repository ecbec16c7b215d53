"""What a run is judged by: one number of its curves.

A *statistic* is named `<metric>/<what of it>`, such as `success/last_fifth`. Metrics are short names of `METRICS` or
keys of log rows. A run that ended before its planned steps has its last value from there on, that of the model that
its user is left with; `Run.ended_early` tells, and so does the page.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import trapezoid

from ragen2_trl.instrument.health import Health, health
from research.plan import PlannedRun
from research.store import KEPT, Store

Array = NDArray[np.float64]

_FORMS = ("mi/trajectory/", "mi/first_turn/")  # over all turns where there are several
# Short name -> patterns of keys in log rows, of which the first that a run has counts.
METRICS: dict[str, tuple[str, ...]] = {
    "success": (r"eval/env/[^/]+/success",),
    "random_baseline": (r"eval/env/[^/]+/random_success",),  # of random actions on the same tasks
    "training_success": (r"env/[^/]+/success",),
    "reward": ("reward",),
    "entropy": ("entropy",),  # of the policy, nats per token
    "retrieval": tuple(f"{form}retrieval_accuracy" for form in _FORMS),
    "mi": tuple(f"{form}mi_seq" for form in _FORMS),  # nats
    "mi_zscore": tuple(f"{form}mi_zscore_token_tempered" for form in _FORMS),  # the form the reference code logs
    "conditional_entropy": tuple(f"{form}conditional_entropy_token" for form in _FORMS),  # H(Z|X), nats per token
    "marginal_entropy": tuple(f"{form}marginal_entropy_token" for form in _FORMS),  # H(Z)
    "valid_thinking": ("mi/valid_thinking_rate",),
    "length": ("completions/mean_length",),
    "kept": ("snr/kept_fraction",),
    "zero_variance": ("snr/zero_variance_fraction", "frac_reward_zero_std"),
    "update_compute": ("snr/update_compute_fraction",),
    "clipped": ("grad_norm",),  # whether a step's gradient was above `max_grad_norm`
    "reward_std_spread": ("snr/reward_std_spread",),  # Table 8's std/mean
    "seconds": ("cost/seconds",),
    "cpu_seconds": ("cost/cpu_seconds",),
    "sampled_tokens": ("cost/sampled_tokens",),
    "update_tokens": ("cost/update_tokens",),
    "update_flops": ("cost/update_flops",),
}
COSTS = ("seconds", "cpu_seconds", "sampled_tokens", "update_tokens", "update_flops")
OF_CURVES = ("first", "last", "last_fifth", "area", "peak", "mean", "median", "change")
OF_PAIRS = "at_equal/"
OF_GRADIENTS = "gradient/"
PARTS = ("task", "kl", "entropy", "regularisers")
_TO_REACH = re.compile("|".join(f"{axis}_to_reach" for axis in ("steps", *COSTS)))
_BUCKET = re.compile(r"grad/bucket_(\d+)/reward_std")


@dataclass(frozen=True)
class MetricCurve:
    """A metric over the optimizer steps of a run, in their order; at least one point."""

    steps: Array
    values: Array

    def at(self, steps: Array) -> Array:
        """Values between points by straight lines, beyond them by the nearest."""
        return np.asarray(np.interp(steps, self.steps, self.values))


@dataclass(frozen=True)
class FinishedRun:
    """A finished run.

    Args:
        key: Of the run.
        seed: Of the run.
        levels: Axis -> level.
        planned_steps: Optimizer steps it was to have.
        done: Those it had.
        curves: Log key -> curve.
        record: The row of the run in the store.
    """

    key: str
    seed: int
    levels: Mapping[str, str]
    planned_steps: int
    done: int
    curves: Mapping[str, MetricCurve]
    record: Mapping[str, Any]

    @property
    def host(self) -> str:
        """Of the machine, as far as the store knows it; or `SEVERAL`."""
        return str(_where(self).get("host", ""))

    @property
    def processor(self) -> str:
        """Model of the CPU; empty where it was not recorded."""
        return str(_where(self).get("processor", ""))

    @property
    def max_grad_norm(self) -> float:
        """Gradient norm above which steps were clipped: 1 where the settings do not say, infinite where none was."""
        limit = float(json.loads(self.record["fields"]).get("max_grad_norm", 1.0))
        return limit if limit > 0 else math.inf

    @property
    def ended_early(self) -> bool:
        return self.done < self.planned_steps

    @property
    def health(self) -> Health:
        """The states of the training, by its curves."""
        rows: dict[float, dict[str, float]] = {}
        for key, curve in self.curves.items():
            for step, value in zip(curve.steps.tolist(), curve.values.tolist(), strict=True):
                rows.setdefault(step, {"step": step})[key] = value
        return health(rows[step] for step in sorted(rows))

    def curve(self, metric: str) -> MetricCurve | None:
        """Of a short name or a log key, up to the planned steps; None where the run has no such metric."""
        for pattern in METRICS.get(metric, (re.escape(metric),)):
            if found := sorted(key for key in self.curves if re.fullmatch(pattern, key)):
                curve = self._whole(self._mean([self.curves[key] for key in found]))
                if metric == "clipped":
                    return MetricCurve(curve.steps, (curve.values > self.max_grad_norm).astype(float))
                return curve
        return None

    def _mean(self, curves: Sequence[MetricCurve]) -> MetricCurve:
        """Of several tasks, at the steps of the first."""
        first = curves[0]
        return MetricCurve(first.steps, np.mean([one.at(first.steps) for one in curves], axis=0))

    def _whole(self, curve: MetricCurve) -> MetricCurve:
        if not self.ended_early or curve.steps[-1] >= self.planned_steps:
            return curve
        return MetricCurve(np.append(curve.steps, self.planned_steps), np.append(curve.values, curve.values[-1]))

    def spent(self, axis: str, steps: Array) -> Array | None:
        """What the run had cost after each of these steps: the steps themselves, or one of `COSTS`."""
        if axis == "steps":
            return steps
        cost = self.curve(axis)
        if cost is None:
            return None
        # Nothing is spent before the first step.
        return MetricCurve(np.append(0, cost.steps), np.append(0, cost.values)).at(steps)


def is_metric(name: str) -> bool:
    """Whether it is a short name, or a log key that the store keeps."""
    return name in METRICS or KEPT.fullmatch(name) is not None


def check_statistic(name: str, of_pairs: bool = False) -> None:
    """Raise a `ValueError` that names what is allowed, if there is no such statistic."""
    metric, _, what = name.rpartition("/")
    if name.startswith(OF_GRADIENTS):
        fine = name in {f"{OF_GRADIENTS}{part}/slope" for part in PARTS}
    elif name.startswith(OF_PAIRS):
        fine = of_pairs and what in ("steps", *COSTS)
    else:
        fine = bool(_TO_REACH.fullmatch(name)) or (what in OF_CURVES and is_metric(metric))
    if not fine:
        raise ValueError(
            f"statistic={name!r} is not supported; allowed: <metric>/<one of {', '.join(OF_CURVES)}> with a log key "
            f"that the store keeps or one of {', '.join(METRICS)}; <one of steps, {', '.join(COSTS)}>_to_reach; "
            f"of differences {OF_PAIRS}<the same>; {OF_GRADIENTS}<one of {', '.join(PARTS)}>/slope"
        )


def statistic(run: FinishedRun, name: str, target: float = math.nan) -> float:
    """One number of a run; NaN where it has no such metric, infinite where a target was never reached.

    Args:
        name: See `check_statistic`.
        target: Held-out success, for `<axis>_to_reach`.
    """
    check_statistic(name)
    if name.startswith(OF_GRADIENTS):
        return gradient_slope(run, name.split("/")[1])
    if _TO_REACH.fullmatch(name):
        return spent_to_reach(run, name.removesuffix("_to_reach"), target)
    metric, _, what = name.rpartition("/")
    curve = run.curve(metric)
    return math.nan if curve is None else of_curve(curve, what)


def of_curve(curve: MetricCurve, what: str) -> float:
    """One of `OF_CURVES`.

    `last_fifth` is the mean of the points in the last fifth of the steps, of which the last is one; `area` that under
    the curve by the trapezoid rule, divided by the steps; `change` is `last_fifth` less `first`.
    """
    steps, values = curve.steps, curve.values
    if what == "last_fifth":
        return float(values[steps >= 0.8 * steps[-1]].mean())
    if what == "area":
        span = steps[-1] - steps[0]
        return float(trapezoid(values, steps) / span) if span > 0 else float(values[-1])
    if what == "change":
        return of_curve(curve, "last_fifth") - float(values[0])
    if what == "median":
        return float(np.median(values))
    return float({"first": values[0], "last": values[-1], "peak": values.max(), "mean": values.mean()}[what])


def spent_to_reach(run: FinishedRun, axis: str, target: float) -> float:
    """What a run had spent when its held-out success first was at `target`, by straight lines between evaluations;
    infinite if it never was, NaN without a curve or a target."""
    curve = run.curve("success")
    if curve is None or math.isnan(target):
        return math.nan
    spent = run.spent(axis, curve.steps)
    if spent is None:
        return math.nan
    above = np.flatnonzero(curve.values >= target)
    if len(above) == 0:
        return math.inf
    n = above[0]
    if n == 0:
        return float(spent[0])
    share = (target - curve.values[n - 1]) / (curve.values[n] - curve.values[n - 1])
    return float(spent[n - 1] + share * (spent[n] - spent[n - 1]))


def success_at(run: FinishedRun, axis: str, spent: float) -> float:
    """Held-out success when a run had spent so much, as the mean over the last fifth of it; NaN without curves."""
    curve = run.curve("success")
    if curve is None:
        return math.nan
    costs = run.spent(axis, curve.steps)
    if costs is None:
        return math.nan
    inside = costs[(costs > 0.8 * spent) & (costs < spent)]
    knots = np.concatenate([[0.8 * spent], inside, [spent]])
    values = np.interp(knots, costs, curve.values)
    return float(trapezoid(values, knots) / (0.2 * spent)) if spent > 0 else float(values[-1])


def total(run: FinishedRun, axis: str) -> float:
    """What the whole run has cost; NaN where that was not logged."""
    if axis == "steps":
        return float(run.done)
    curve = run.curve(axis)
    return math.nan if curve is None else float(curve.values[-1])


@dataclass(frozen=True)
class GradientPoints:
    """Gradients of the buckets of one measurement, without those that hold a group of no reward variance: it adds
    nothing to the task's gradient.

    Args:
        step: Optimizer step.
        reward_std: (buckets,) mean over a bucket's groups.
        norms: (buckets,) of the mean sample's gradient.
    """

    step: float
    reward_std: Array
    norms: Array


def gradient_points(run: FinishedRun, part: str) -> list[GradientPoints]:
    """What `MeasuresGradients` logged of a part of the loss; `regularisers` are those there are, norms summed as in
    the paper."""
    parts = ("kl", "entropy") if part == "regularisers" else (part,)
    buckets = sorted(int(match[1]) for key in run.curves if (match := _BUCKET.fullmatch(key)))
    rows: dict[float, list[tuple[float, float]]] = {}
    for bucket in buckets:
        spread = run.curves[f"grad/bucket_{bucket}/reward_std"]
        lowest = run.curves.get(f"grad/bucket_{bucket}/min_reward_std", spread)
        norms = [run.curves[key] for one in parts if (key := f"grad/bucket_{bucket}/{one}/norm") in run.curves]
        for step, deviation in zip(spread.steps, spread.values, strict=True):
            at_step = [float(norm.values[norm.steps == step][0]) for norm in norms if step in norm.steps]
            if at_step and lowest.at(np.array([step]))[0] > 0:
                rows.setdefault(float(step), []).append((float(deviation), sum(at_step)))
    return [
        GradientPoints(step, *(np.array(column) for column in zip(*points, strict=True)))
        for step, points in sorted(rows.items())
    ]


def gradient_slope(run: FinishedRun, part: str) -> float:
    """Slope of log norm on log reward standard deviation over the buckets of all measurements, each with an intercept
    of its own: 1 is a gradient in proportion to it, 0 one that does not know of it. NaN with too few buckets."""
    products = squares = 0.0
    for points in gradient_points(run, part):
        kept = points.norms > 0
        if kept.sum() < 2:
            continue
        x, y = np.log(points.reward_std[kept]), np.log(points.norms[kept])
        products += float((x - x.mean()) @ (y - y.mean()))
        squares += float((x - x.mean()) @ (x - x.mean()))
    return products / squares if squares > 0 else math.nan


def on_common_steps(one: MetricCurve, other: MetricCurve) -> tuple[MetricCurve, MetricCurve]:
    """Both at the steps of the one with fewer points, from where the other has any: its latest value by then.

    What is measured more often would otherwise be seen to fall sooner.
    """
    few, many = sorted((one, other), key=lambda curve: len(curve.steps))
    steps = few.steps[few.steps >= many.steps[0]]
    if len(steps) == 0:
        return one, other
    latest = MetricCurve(steps, many.values[np.searchsorted(many.steps, steps, side="right") - 1])
    kept = MetricCurve(steps, few.values[-len(steps) :])
    return (kept, latest) if few is one else (latest, kept)


def fall(curve: MetricCurve, share: float) -> float:
    """The step by which a metric has fallen for good: the first point after which it never again is above (1 - share)
    of its peak. Infinite if it does not fall."""
    above = np.flatnonzero(curve.values > (1 - share) * curve.values.max())
    if len(above) == 0 or above[-1] == len(curve.values) - 1:  # never above 0, or not fallen
        return math.inf
    return float(curve.steps[above[-1] + 1])


@dataclass(frozen=True)
class Finished:
    """What a store has: curves and rows of runs, by key."""

    curves: Mapping[str, Mapping[str, MetricCurve]]
    records: Mapping[str, Mapping[str, Any]]

    def runs(self, planned_runs: Iterable[PlannedRun]) -> dict[str, FinishedRun]:
        """Those of some runs that have run, by key."""
        return {
            planned.key: FinishedRun(
                planned.key,
                planned.seed,
                planned.levels,
                int(planned.fields.get("max_steps", self.records[planned.key]["steps"])),
                int(self.records[planned.key]["steps"]),
                self.curves.get(planned.key, {}),
                self.records[planned.key],
            )
            for planned in planned_runs
            if planned.key in self.records
        }


def read_finished(store: Store, keys: Iterable[str]) -> Finished:
    """What a store has of some runs; of a step that was logged twice, the last value."""
    records = {row["key"]: row for row in store.finished().to_dict("records")}
    curves: dict[str, dict[str, MetricCurve]] = {}
    table = store.curves(sorted(set(keys) & records.keys()))
    table = table[np.isfinite(table["value"])].sort_values("step", kind="stable")
    table = table.drop_duplicates(["key", "metric", "step"], keep="last")
    for (key, metric), points in table.groupby(["key", "metric"], observed=True, sort=False):
        curve = MetricCurve(points["step"].to_numpy(float), points["value"].to_numpy(float))
        curves.setdefault(str(key), {})[str(metric)] = curve
    return Finished(curves, records)


def versions(run: FinishedRun) -> dict[str, str]:
    """Of Python and packages, as the store has them."""
    return {name: str(value) for name, value in _where(run).items() if name not in ("host", "processor")}


def _where(run: FinishedRun) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.record.get("versions") or "{}")
    return found
