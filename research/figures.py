"""The figures of the claims: the seeds, and their mean with its 95 % interval, in the look of all figures.

A figure is a mapping under `figures:` of an experiment's file, with a `kind` of `FIGURES` and what that asks for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ragen2_trl.report.style import (
    GUIDE_LINE,
    THIN,
    drawn_in_style,
)
from research.drawing import (
    AXIS_LABELS,
    METRIC_LABELS,
    POINTS,
    draw_band,
    draw_estimate,
    format_axis,
    in_points,
    label_of,
    legend,
    looks,
    make_grid_of_panels,
    make_logarithmic,
    start_above_zero,
)
from research.grid import Grid, Levels, Notes, pairs, runs_of
from research.kinds import FRACTIONS, differences, paired_difference, unit_of
from research.measures import COSTS, METRICS, FinishedRun, gradient_points, is_metric, statistic

Spec = Mapping[str, Any]


def _seeds(grid: Grid, levels: Levels) -> list[FinishedRun]:
    runs = (grid.run(levels, seed) for seed in grid.seeds)
    return [run for run in runs if run is not None]


@drawn_in_style
def draw_curves(grid: Grid, spec: Spec) -> Figure:
    """Metrics over what a run has spent: a row a metric, a column a level of another axis or a way to count.

    `metrics`, `lines` (an axis), and `x` (of `steps` and the costs) or `columns` (an axis); `where` fixes levels;
    `log` are metrics on a logarithmic scale.
    """
    metrics, where = spec["metrics"], spec.get("where", {})
    counted = spec.get("x", ["steps"])
    split = spec.get("columns")
    columns = [(counted[0], level) for level in _levels(grid, split, where)] if split else [(x, "") for x in counted]
    lines = _levels(grid, spec["lines"], where)
    figure, panels = make_grid_of_panels(len(metrics), len(columns), 1.9, sharey="row", sharex="col")
    for (row, metric), (column, (axis, level)) in product(enumerate(metrics), enumerate(columns)):
        axes = panels[row, column]
        for look, line in zip(looks(), lines, strict=False):
            levels = {**where, spec["lines"]: line, **({split: level} if split else {})}
            _draw_line(axes, grid, levels, metric, axis, look, line, len(lines) * len(grid.seeds))
        if row == 0 and split:
            axes.set_title(level)
        if row == len(metrics) - 1:
            axes.set_xlabel(AXIS_LABELS[axis])
            axes.xaxis.set_major_locator(MaxNLocator(5 if len(columns) < 3 else 3))
        if column == 0:
            axes.set_ylabel(METRIC_LABELS.get(metric, metric))
        format_axis(axes.yaxis, metric)
        format_axis(axes.xaxis, axis)
    for metric, of_metric in zip(metrics, panels, strict=True):  # once all columns are drawn, which share the axis
        if metric in FRACTIONS:
            low, high = of_metric[0].get_ylim()
            of_metric[0].set_ylim(max(low, -0.02), min(high, 1.02))
        if metric in spec.get("log", []):
            make_logarithmic(of_metric[0].yaxis)
            start_above_zero(of_metric)
    legend(figure)
    return figure


def _draw_line(
    axes: Axes, grid: Grid, levels: Levels, metric: str, axis: str, look: Mapping[str, Any], label: str, crowd: int
) -> None:
    drawn = []
    for run in _seeds(grid, levels):
        curve = run.curve(metric)
        spent = None if curve is None else run.spent(axis, curve.steps)
        if curve is not None and spent is not None:
            drawn.append((spent, curve.values))
    if not drawn:
        return
    if axis == "steps":
        x = np.unique(np.concatenate([spent for spent, _ in drawn]))
    else:  # up to where every seed has been
        x = np.linspace(0, min(spent[-1] for spent, _ in drawn), POINTS)
    draw_band(axes, x, [np.interp(x, *one) for one in drawn], look, label, crowd)


def _levels(grid: Grid, axis: str, where: Levels) -> list[str]:
    """Of an axis, in the file's order; those with `where` alone if it fixes that axis."""
    return [where[axis]] if axis in where else list(grid.experiment.axes[axis])


@drawn_in_style
def draw_levels(grid: Grid, spec: Spec) -> Figure:
    """A statistic of each setting: a row a setting, a dot a seed, the mean with its interval.

    `statistic`, `rows` (axes whose combinations are the rows), `marks` and `columns` (axes), `label` of the rows.
    """
    marks, split = spec.get("marks"), spec.get("columns")
    rows = [
        levels
        for levels in product(*(_levels(grid, axis, spec.get("where", {})) for axis in spec["rows"]))
        if any(dict(zip(spec["rows"], levels, strict=True)).items() <= dict(one).items() for one in grid.settings)
    ]
    columns = _levels(grid, split, spec.get("where", {})) if split else [""]
    kinds = list(grid.experiment.axes[marks]) if marks else [""]
    step = 0.8 / len(kinds)
    figure, panels = make_grid_of_panels(1, len(columns), 0.3 + len(rows) * max(0.24, 0.17 * len(kinds)), sharey=True)
    name = spec["statistic"]
    for axes, column in zip(panels[0], columns, strict=True):
        for number, (look, kind) in enumerate(zip(looks(), kinds, strict=False)):
            first = True
            for y, row in enumerate(rows):
                levels = {**dict(zip(spec["rows"], row, strict=True)), **spec.get("where", {})}
                levels |= ({marks: kind} if marks else {}) | ({split: column} if split else {})
                numbers = [value for run in _seeds(grid, levels) if math.isfinite(value := statistic(run, name))]
                if numbers:
                    at = y - 0.4 + step * (number + 0.5)
                    draw_estimate(axes, numbers, at, look, kind if first else "")
                    first = False
        axes.set_title(column)
        format_axis(axes.xaxis, name)
        axes.xaxis.set_major_locator(MaxNLocator(5 if len(columns) < 3 else 3))
    if len(columns) > 1:
        figure.supxlabel(label_of(name), fontsize=11)
    else:
        panels[0, 0].set_xlabel(label_of(name))
    panels[0, 0].set_ylabel(spec.get("label", ""))
    panels[0, 0].set_yticks(range(len(rows)), [", ".join(row) for row in rows])
    panels[0, 0].set_ylim(len(rows) - 0.5, -0.5)
    legend(figure)
    return figure


@drawn_in_style
def draw_differences(grid: Grid, spec: Spec) -> Figure:
    """The paired differences in points that the checks are about: a row a check, a tick a seed, the mean with its
    interval."""
    checks = [
        check
        for check in grid.experiment.checks
        if check["kind"] == "difference" and unit_of(check["statistic"]) == "points"
    ]
    figure, panels = make_grid_of_panels(1, 1, 0.3 + 0.5 * len(checks))
    axes = panels[0, 0]
    for y, check in enumerate(checks):
        if numbers := list(differences(grid, check, Notes()).values()):
            draw_estimate(axes, numbers, y, looks()[0], "")
    axes.axvline(0, **GUIDE_LINE)
    axes.set_yticks(range(len(checks)), [fill(str(check["name"]), 34) for check in checks])
    axes.set_ylim(len(checks) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(in_points)
    axes.set_xlabel("difference (points)")
    return figure


@drawn_in_style
def draw_scatter(grid: Grid, spec: Spec) -> Figure:
    """One statistic against others, a dot a run; with `of` and `against`, the paired gain against what the run it is
    compared with says.

    `x` (a list, a panel each), `y`, `marks` (an axis), `log` (those of `x` on a logarithmic scale).
    """
    names = spec["x"]
    figure, panels = make_grid_of_panels(1, len(names), 2.9, sharey=True)
    grids = grid.others or (grid,)
    groups: dict[str, list[tuple[float, ...]]] = {}
    seen = set()
    for one in grids:
        of = spec.get("of")
        settings = pairs(one, of, spec["against"]) if of else [(levels,) for levels in one.settings]
        for setting, seed in product(settings, one.seeds):
            runs = runs_of(one, setting, seed, Notes())
            if runs is None or (key := tuple(run.key for run in runs)) in seen:
                continue
            seen.add(key)
            y = paired_difference(runs, spec["y"]) if of else statistic(runs[0], spec["y"])
            group = setting[0].get(spec.get("marks", ""), one.experiment.id if grid.others else "")
            groups.setdefault(group, []).append((*(statistic(runs[-1], name) for name in names), y))
    for look, (group, rows) in zip(looks(), groups.items(), strict=False):
        columns = list(zip(*rows, strict=True))
        for axes, x in zip(panels[0], columns[:-1], strict=True):
            face = look["color"] if look["linestyle"] == "-" else "none"
            axes.plot(
                x, columns[-1], look["marker"], color=look["color"], markerfacecolor=face, alpha=0.8, label=group
            )
    for axes, name in zip(panels[0], names, strict=True):
        axes.set_xlabel(label_of(name).replace(", ", ",\n"))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        if name in spec.get("log", []):
            make_logarithmic(axes.xaxis)
        if spec.get("of"):
            axes.axhline(0, **GUIDE_LINE)
    metric = METRIC_LABELS.get(spec["y"].partition("/")[0], spec["y"])
    panels[0, 0].set_ylabel(
        f"gain in {metric} (points)" if spec.get("of") else label_of(spec["y"]).replace(", ", ",\n")
    )
    if spec.get("of"):
        panels[0, 0].yaxis.set_major_formatter(in_points)
    else:
        format_axis(panels[0, 0].yaxis, spec["y"])
    legend(figure)
    return figure


@drawn_in_style
def draw_gradients(grid: Grid, spec: Spec) -> Figure:
    """Norms of the gradients of parts of the loss against the reward standard deviation of their bucket, both on
    logarithmic scales, early, midway and late: a row a level of `rows`, a column a measurement.

    `parts`, `rows` (an axis).
    """
    levels = _levels(grid, spec["rows"], {})
    steps = sorted({
        points.step for run in grid.runs.values() for points in gradient_points(run, spec["parts"][0])
    })  # fmt: skip
    shown = [steps[i] for i in sorted({0, len(steps) // 2, len(steps) - 1})] if steps else [0.0]
    figure, panels = make_grid_of_panels(len(levels), len(shown), 2.1, sharex=True, sharey=True)
    for (row, level), (column, step) in product(enumerate(levels), enumerate(shown)):
        axes = panels[row, column]
        for look, part in zip(looks(), spec["parts"], strict=False):
            _draw_buckets(axes, _seeds(grid, {spec["rows"]: level}), part, step, look)
        make_logarithmic(axes.xaxis)
        make_logarithmic(axes.yaxis)
        if row == 0:
            axes.set_title(f"logged at step {step:.0f}")
        if column == 0:
            axes.set_ylabel(f"{level}\ngradient norm")
        if row == len(levels) - 1:
            axes.set_xlabel("reward std")
    legend(figure)
    return figure


def _draw_buckets(axes: Axes, runs: Sequence[FinishedRun], part: str, step: float, look: Mapping[str, Any]) -> None:
    x: list[float] = []
    y: list[float] = []
    for run in runs:
        for points in gradient_points(run, part):
            if points.step == step:
                axes.plot(points.reward_std, points.norms, color=look["color"], linewidth=THIN, alpha=0.5)
                x.extend(points.reward_std)
                y.extend(points.norms)
    axes.plot(x, y, look["marker"], color=look["color"], markersize=4, label=part)


Draw = Callable[[Grid, Spec], Figure]
# Kind -> what draws it, what it asks for, what it takes besides.
FIGURES: dict[str, tuple[Draw, tuple[str, ...], tuple[str, ...]]] = {
    "curves": (draw_curves, ("metrics", "lines"), ("x", "columns", "where", "log")),
    "levels": (draw_levels, ("statistic", "rows"), ("marks", "columns", "where", "label")),
    "differences": (draw_differences, (), ()),
    "scatter": (draw_scatter, ("x", "y"), ("marks", "of", "against", "log")),
    "gradients": (draw_gradients, ("parts", "rows"), ()),
}
LISTS, TEXTS = {"metrics", "x", "log", "parts"}, {"statistic", "y", "label", "caption"}  # the plan checks the rest


def draw(grid: Grid, spec: Spec) -> Figure | None:
    """A figure of an experiment; None while no run has anything for it."""
    figure = FIGURES[spec["kind"]][0](grid, spec)
    # What was measured is in the units of the data; a line across the panel, such as zero, is not.
    measured = (
        len(np.atleast_1d(line.get_xdata()))
        for axes in figure.axes
        for line in axes.lines
        if line.get_transform() is axes.transData
    )
    return figure if any(measured) else None


def validate(spec: Spec, where: str) -> None:
    """Raise a `ValueError` that names what is allowed, if a figure cannot be read."""
    if spec.get("kind") not in FIGURES:
        raise ValueError(f"{where}: kind={spec.get('kind')!r} is not supported; allowed: {', '.join(FIGURES)}")
    _, required, optional = FIGURES[spec["kind"]]
    allowed = {"kind", "caption", *required, *optional}
    for names, what in ((set(required) - spec.keys(), "is missing"), (spec.keys() - allowed, "is not known")):
        if names:
            raise ValueError(f"{where}: {min(names)} {what}; allowed: {', '.join(sorted(allowed))}")
    for name in LISTS & spec.keys():
        if not isinstance(spec[name], list) or not all(isinstance(one, str) for one in spec[name]):
            raise ValueError(f"{where}: {name} must be a list of names, got {spec[name]!r}")
    for name in TEXTS & spec.keys():
        if not isinstance(spec[name], str):
            raise ValueError(f"{where}: {name} must be a text, got {spec[name]!r}")
    drawn = spec.get("metrics" if spec["kind"] == "curves" else "x", [])
    if unknown := set(spec.get("log", [])) - set(drawn):
        raise ValueError(f"{where}: log={min(unknown)!r} is not drawn; allowed: {', '.join(drawn)}")
    if spec["kind"] != "curves":
        return
    if unknown := {one for one in drawn if not is_metric(one)}:
        raise ValueError(
            f"{where}: metrics={min(unknown)!r} is not supported; allowed: log keys that the store keeps, "
            f"{', '.join(METRICS)}"
        )
    if unknown := set(spec.get("x", [])) - {"steps", *COSTS}:
        raise ValueError(f"{where}: x={min(unknown)!r} is not supported; allowed: steps, {', '.join(COSTS)}")
