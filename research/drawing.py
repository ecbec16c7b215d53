"""What the figures of experiments are made of: labels, panels, a curve with its seeds, a number with its interval."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from ragen2_trl.report.style import LINE_COLOURS, LINE_STYLES, LINE_WIDTH, MARKERS, THIN, WIDTH
from research.kinds import unit_of
from research.measures import COSTS, OF_CURVES
from research.statistics import mean_band, mean_interval

Array = NDArray[np.float64]

METRIC_LABELS = {
    "success": "held-out success",
    "training_success": "success in training",
    "retrieval": "retrieval accuracy",
    "entropy": "entropy\n(nats per token)",
    "conditional_entropy": "H(Z|X)\n(nats per token)",
    "marginal_entropy": "H(Z)\n(nats per token)",
    "mi": "I(X;Z) (nats)",
    "mi_zscore": "z-score of I(X;Z)",
    "reward_std_spread": "spread of reward std\n(std over mean)",
    "zero_variance": "groups without\nreward variance",
    "kl": "KL from the reference\n(nats per token)",
    "kept": "kept fraction",
    "valid_thinking": "valid reasoning",
}
AXIS_LABELS = {
    "steps": "optimizer step",
    "seconds": "training time (s)",
    "cpu_seconds": "CPU time (s)",
    "sampled_tokens": "sampled tokens",
    "update_tokens": "tokens of the update",
    "update_flops": "FLOPs of the update",
}
WHAT_LABELS = {
    "first": "first measurement",
    "last_fifth": "last fifth of the steps",
    "area": "mean over the steps",
    "mean": "mean over the steps",
}
MIN_SEEDS = 3  # for an interval: that of two is as wide as any figure
POINTS = 60  # of a mean over a cost, which has no common points
MOST_SEEDS = 20  # thin lines of a panel: more of them hide the means


def looks() -> list[dict[str, Any]]:
    return [
        {"color": colour, "linestyle": line, "marker": marker}
        for colour, line, marker in zip(LINE_COLOURS * 2, cycle(LINE_STYLES), cycle(MARKERS), strict=False)
    ]


def label_of(name: str) -> str:
    metric, _, what = name.rpartition("/")
    if metric in COSTS and what == "last":
        return f"{AXIS_LABELS[metric]}, all steps"
    if what not in OF_CURVES:
        return name.replace("_", " ")
    return f"{METRIC_LABELS.get(metric, metric)}, {WHAT_LABELS.get(what, what)}"


def make_grid_of_panels(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, NDArray[Any]]:
    figure = Figure(figsize=(WIDTH, rows * height + 0.8), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def legend(figure: Figure) -> None:
    """Of all panels, above them, in as few rows as the names need; lines long enough to tell their dashes apart.

    The figure grows with the rows, which would otherwise take their height from the panels.
    """
    named = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    handles, labels = [*named.values()], [*named]
    if len(handles) > 1:
        length = (
            4.0 if any(isinstance(one, Line2D) and one.get_linestyle() != "None" for one in handles) else 1.0
        )  # in letters' heights
        widths = [0.3 + 0.14 * length + 0.085 * len(label) for label in labels]  # inches
        # A column is as wide as its widest name; names go down the columns.
        fits = (n for n in range(len(widths), 1, -1) if sum(max(part) for part in np.array_split(widths, n)) <= WIDTH)
        columns = next(fits, 1)
        figure.set_figheight(figure.get_figheight() + 0.22 * max(0, math.ceil(len(labels) / columns) - 2))
        options: dict[str, Any] = {"ncols": columns, "handlelength": length}
        figure.legend(handles, labels, loc="outside upper left", **options)


def format_axis(axis: Axis, name: str) -> None:
    """How numbers of a metric or statistic are written: fractions in per cent, costs with k, M and so on."""
    metric = name.partition("/")[0]
    if unit_of(name) == "points":
        axis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    elif metric in COSTS:
        axis.set_major_formatter(EngFormatter(sep=""))


def make_logarithmic(axis: Axis) -> None:
    scale = "xscale" if isinstance(axis, XAxis) else "yscale"
    axis.axes.set(**{scale: "log"})
    axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def start_above_zero(row: Sequence[Axes]) -> None:
    """A logarithmic axis that panels share begins at the least that a line has: a band may go below zero."""
    drawn = [np.asarray(line.get_ydata(), dtype=float) for axes in row for line in axes.lines]
    if above := [float(values[values > 0].min()) for values in drawn if (values > 0).any()]:
        row[0].set_ylim(bottom=0.9 * min(above))


def in_points(value: float, _: int) -> str:
    return f"{100 * value:+.3g}" if value else "0"


def draw_band(axes: Axes, x: Array, curves: Sequence[Array], look: Mapping[str, Any], label: str, crowd: int) -> None:
    """The mean of seeds and its interval at each point, and every seed thin, unless they are too many.

    Args:
        crowd: lines of seeds that the panel would have in all.
    """
    light, has_band = crowd > MOST_SEEDS / 2, len(curves) >= MIN_SEEDS
    if crowd <= MOST_SEEDS or not has_band:
        for curve in curves:
            alpha = 0.25 if light else 0.45
            axes.plot(x, curve, color=look["color"], linestyle=look["linestyle"], linewidth=THIN, alpha=alpha)
    # On a line of many points, marks at equal distances along it: they tell it apart where there is no colour.
    apart = None if len(x) <= 20 else (0.05, 0.11)
    axes.plot(x, np.mean(curves, axis=0), label=label, linewidth=LINE_WIDTH, markevery=apart, **look)
    if has_band:
        low, high = mean_band(curves)
        axes.fill_between(x, low, high, color=look["color"], alpha=0.07 if light else 0.14, linewidth=0)


def draw_estimate(axes: Axes, numbers: Sequence[float], y: float, look: Mapping[str, Any], label: str) -> None:
    found = mean_interval(numbers)
    axes.plot(numbers, [y] * len(numbers), "|", color=look["color"], alpha=0.6, markersize=7, markeredgewidth=1)
    if len(numbers) >= MIN_SEEDS:
        axes.plot([found.low, found.high], [y, y], color=look["color"], linewidth=LINE_WIDTH)
    axes.plot([found.value], [y], look["marker"], color=look["color"], label=label, markersize=6)
