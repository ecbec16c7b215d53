"""Kinds of checks: from the runs of an experiment to an estimate with its interval.

All but the correlations come down to one number a seed, whose mean has Student's t interval.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ragen2_trl.messages import counted
from research.grid import Grid, Levels, Notes, by_seed, named, pairs, runs_of, some
from research.measures import OF_PAIRS, FinishedRun, fall, on_common_steps, statistic, success_at, total
from research.statistics import IntervalEstimate, correlation_interval, mean_interval
from research.store import WEIGHTS

Check = Mapping[str, Any]

FRACTIONS = (
    "success",
    "training_success",
    "retrieval",
    "valid_thinking",
    "kept",
    "zero_variance",
    "update_compute",
    "clipped",
    "random_baseline",
)

Evaluated = tuple[IntervalEstimate, str, int]


def _over_seeds(
    values: Mapping[int, float], check: Check, null: float = 0.0, within: float | None = None
) -> IntervalEstimate:
    margin = float(check.get("within", 0.0)) if within is None else within
    return mean_interval(list(values.values()), null, check["expects"], margin)


def unit_of(name: str) -> str:
    """Of a statistic."""
    return "points" if name.startswith(OF_PAIRS) or name.partition("/")[0] in FRACTIONS else "number"


def timed(check: Check) -> bool:
    """Whether times of different runs are compared."""
    return "seconds" in str(check["statistic"])


def paired_difference(runs: Sequence[FinishedRun], name: str) -> float:
    """Of a statistic of two runs; `at_equal/<axis>` is held-out success when both had spent all that the cheaper one
    did."""
    if not name.startswith(OF_PAIRS):
        return statistic(runs[0], name) - statistic(runs[1], name)
    axis = name.removeprefix(OF_PAIRS)
    spent = min(total(run, axis) for run in runs)
    return success_at(runs[0], axis, spent) - success_at(runs[1], axis, spent)


def differences(grid: Grid, check: Check, notes: Notes) -> dict[int, float]:
    """The paired difference of a check, a number a seed: the mean over the axes that it leaves free."""
    found = pairs(grid, check["of"], check["against"])
    values = by_seed(grid, found, partial(paired_difference, name=check["statistic"]), notes, timed(check))
    return {seed: float(np.mean(numbers)) for seed, numbers in values.items()}


def _difference(grid: Grid, check: Check, notes: Notes) -> Evaluated:
    values = differences(grid, check, notes)
    return _over_seeds(values, check, float(check.get("than", 0.0))), unit_of(check["statistic"]), len(values)


def _trend(grid: Grid, check: Check, notes: Notes) -> Evaluated:
    """Slope of the paired difference over the numbers that the levels of an axis are, seed by seed."""
    found = pairs(grid, check["of"], check["against"])
    x = np.array([float(side[check["axis"]]) for side, _ in found])
    values = by_seed(grid, found, partial(paired_difference, name=check["statistic"]), notes, timed(check))
    slopes = {
        seed: float(np.polyfit(x, numbers, 1)[0]) for seed, numbers in values.items() if len(numbers) == len(x) > 1
    }
    if values and not slopes:
        notes.others.append("A trend needs all levels of the axis.")
    return _over_seeds(slopes, check), unit_of(check["statistic"]), len(slopes)


def _mean(grid: Grid, check: Check, notes: Notes) -> Evaluated:
    """A statistic itself, less another one of the same runs (`minus`), against a number (`than`)."""
    settings = [[levels] for levels in grid.settings if check.get("of", {}).items() <= dict(levels).items()]

    def number(runs: Sequence[FinishedRun]) -> float:
        less = statistic(runs[0], check["minus"]) if "minus" in check else 0.0
        return statistic(runs[0], check["statistic"]) - less

    values = by_seed(grid, settings, number, notes)
    means = {seed: float(np.mean(numbers)) for seed, numbers in values.items()}
    return _over_seeds(means, check, float(check.get("than", 0.0))), unit_of(check["statistic"]), len(means)


def _ratio(grid: Grid, check: Check, notes: Notes) -> Evaluated:
    """Of two runs' costs, on the scale of logarithms.

    A run that never reached its target counts with all it has cost, a lower bound: what this could favour stays
    inconclusive.
    """
    name, targets = check["statistic"], check.get("target")
    found = [list(pair) for pair in pairs(grid, check["of"], check["against"])]
    if isinstance(targets, Mapping):
        found = [[*pair, {**pair[0], **targets}] for pair in found]
    censored = [0, 0]
    below: set[int] = set()

    def log_ratio(runs: Sequence[FinishedRun]) -> float:
        target = statistic(runs[2], "success/last_fifth") if len(runs) > 2 else float(targets or math.nan)
        numbers = [statistic(run, name, target) for run in runs[:2]]
        if 0.0 in numbers:
            below.add(runs[0].seed)
            return math.nan
        for side, run in enumerate(runs[:2]):
            if math.isinf(numbers[side]):
                censored[side] += 1
                numbers[side] = total(run, name.removesuffix("_to_reach"))
        return math.log(numbers[0] / numbers[1]) if min(numbers) > 0 else math.nan

    values = by_seed(grid, found, log_ratio, notes, timed(check))
    means = {seed: float(np.mean(numbers)) for seed, numbers in values.items()}
    within = math.log(1 + float(check.get("within", 0.0)))
    null = math.log(float(check.get("than", 1.0)))
    log = _over_seeds(means, check, null, within)
    for side, which in enumerate(("of", "against")):
        if censored[side]:
            whose = some([f"{axis} {level}" for axis, level in check[which].items()])
            notes.others.append(
                f"{counted(censored[side], 'run')} of {whose} never reached the target; the whole cost counts "
                f"instead, so the ratio can only be {('larger', 'smaller')[side]}."
            )
    if below:
        notes.others.append(
            f"{counted(len(below), 'seed')} left out: at the target before training, which leaves no time to compare."
        )
    favoured = (log.value < null and censored[0]) or (log.value > null and censored[1]) or all(censored)
    favoured = favoured or (check["expects"] == "=" and any(censored))
    found_log = replace(log, p=1.0) if favoured and not math.isnan(log.p) else log
    low, value, high = (math.exp(x) if math.isfinite(x) else math.nan for x in (log.low, log.value, log.high))
    bound = "?" if all(censored) else ">=" if censored[0] else "<=" if censored[1] else ""
    return replace(found_log, value=value, low=low, high=high, bound=bound), "ratio", len(means)


def _earlier(grid: Grid, check: Check, notes: Notes) -> Evaluated:
    """By how much of the run one metric falls for good before another does, either at the last step that
    both have at the latest."""
    settings = [[levels] for levels in grid.settings if check["of"].items() <= dict(levels).items()]
    share = float(check.get("fall", 0.2))
    falls: list[tuple[float, float]] = []

    def lag(runs: Sequence[FinishedRun]) -> float:
        first, then = (runs[0].curve(check[name]) for name in ("first", "then"))
        if first is None or then is None:
            return math.nan
        curves = on_common_steps(first, then)
        earlier, later = (fall(curve, share) / runs[0].planned_steps for curve in curves)
        falls.append((earlier, later))
        end = curves[0].steps[-1] / runs[0].planned_steps
        return float(min(later, end) - min(earlier, end))

    values = by_seed(grid, settings, lag, notes)
    means = {seed: float(np.mean(numbers)) for seed, numbers in values.items()}
    for n, name in enumerate(("first", "then") if falls else ()):
        fell = sum(math.isfinite(one[n]) for one in falls)
        notes.others.append(
            f"{check[name]} fell by {100 * share:g} % of its peak for good in {fell} of {len(falls)} runs."
        )
    return _over_seeds(means, check), "points", len(means)


def _correlation(grid: Grid, check: Check, notes: Notes) -> Evaluated:
    """Spearman's over runs, except those of some levels (`without`); with `of` and `against`, of the paired gain with
    what the run it is compared with says."""
    rows: list[tuple[float, ...]] = []
    settings: list[str] = []
    seen: set[tuple[str, ...]] = set()
    names = [check["x"], *([check["than"]] if "than" in check else [])]
    seeds = 0

    def left_out(levels: Levels) -> bool:
        return bool(check.get("without")) and check["without"].items() <= dict(levels).items()

    for one in grid.others or (grid,):
        of = check.get("of")
        found: list[tuple[Levels, ...]] = [(levels,) for levels in one.settings]
        if of:
            found = list(pairs(one, of, check["against"]))
        found = [sides for sides in found if not any(map(left_out, sides))]
        seeds_here = set()
        for setting, seed in product(found, one.seeds):
            runs = runs_of(one, setting, seed, notes)
            key = tuple(run.key for run in runs or ())
            if runs is None or key in seen:
                continue
            seen.add(key)
            y = paired_difference(runs, check["y"]) if of else statistic(runs[0], check["y"])
            row = (*(statistic(runs[-1], name) for name in names), y)
            if any(map(math.isnan, row)):
                notes.without[runs[0].key] = f"{one.experiment.id} {named(one, runs[0].levels, seed)}"
                continue
            rows.append(row)
            settings.append(f"{one.experiment.id} {setting[0]}")
            seeds_here.add(seed)
        seeds = max(seeds, len(seeds_here))
    if len(rows) < 3:
        return IntervalEstimate(math.nan, math.nan, math.nan, math.nan, 0, 0), "correlation", seeds
    x, *than, success = (np.array(column) for column in zip(*rows, strict=True))
    estimate = correlation_interval(x, success, settings, check["expects"], than[0] if than else None)
    notes.others.append(f"{len(rows)} runs of {estimate.n} settings.")
    return estimate, "correlation", seeds


@dataclass(frozen=True)
class Kind:
    evaluate: Callable[[Grid, Check, Notes], Evaluated]
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    pairs: bool = False


def _apart(grid: Grid, check: Check, notes: Notes) -> Evaluated:
    """The largest difference of the parameters that two runs ended with, as a power of ten: of those that the store
    has a sample of."""

    def exponent(runs: Sequence[FinishedRun]) -> float:
        one, other = (
            {name: c.values[-1] for name, c in run.curves.items() if name.startswith(WEIGHTS)} for run in runs
        )
        if not one or one.keys() != other.keys():
            return math.nan
        largest = max(abs(one[name] - other[name]) for name in one)
        return math.log10(max(largest, float(np.finfo(np.float32).tiny)))

    values = by_seed(grid, pairs(grid, check["of"], check["against"]), exponent, notes)
    means = {seed: float(np.mean(numbers)) for seed, numbers in values.items()}
    return _over_seeds(means, check, float(check["than"])), "number", len(means)


KINDS = {
    "difference": Kind(_difference, ("statistic", "of", "against"), ("than",), True),
    "trend": Kind(_trend, ("statistic", "axis", "of", "against"), (), True),
    "mean": Kind(_mean, ("statistic",), ("of", "minus", "than")),
    "ratio": Kind(_ratio, ("statistic", "of", "against"), ("target", "than")),
    "apart": Kind(_apart, ("of", "against", "than")),
    "earlier": Kind(_earlier, ("first", "then", "of"), ("fall",)),
    "correlation": Kind(_correlation, ("x", "y"), ("of", "against", "without")),
    "stronger_correlation": Kind(_correlation, ("x", "y", "than"), ("of", "against", "without")),
}
