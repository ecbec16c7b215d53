"""Figures of runs: what was logged, over the optimizer steps. Those of one measurement are in `measurement_plots.py`.

Each function returns a matplotlib `Figure`, which notebooks show and `save_figure` and `svg` write; its label says in
words what it shows. The look of all of them is in `style.py`.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ragen2_trl.reporting.card import WINDOW
from ragen2_trl.reporting.measurement_plots import plot_matrix, plot_quadrant, plot_reward_variance
from ragen2_trl.reporting.records import is_number
from ragen2_trl.reporting.style import (
    BLUE,
    GREEN,
    GREY,
    LINE_COLOURS,
    LINE_STYLES,
    LINE_WIDTH,
    MARKERS,
    ORANGE,
    REFERENCE,
    THIN,
    drawn_in_style,
    legend_above,
    make_panels,
    plain_name,
    save_figure,
    svg,
    whole_numbers,
)

__all__ = [
    "plot_comparison",
    "plot_compute",
    "plot_matrix",
    "plot_quadrant",
    "plot_reward_variance",
    "plot_training",
    "save_figure",
    "svg",
]

Rows: TypeAlias = Sequence[Mapping[str, Any]]
Series: TypeAlias = list[tuple[float, float]]  # (optimizer step, value)

REWARD, ENTROPY = "reward", "entropy"
ACCURACY, CHANCE = "mi/first_turn/retrieval_accuracy", "mi/first_turn/retrieval_chance"
KEPT, COMPUTE = "snr/kept_fraction", "snr/update_compute_fraction"
# The second is TRL's name, for a history of the stock trainer.
ZERO_VARIANCE = ("snr/zero_variance_fraction", "frac_reward_zero_std")

FRACTIONS = (-0.03, 1.03)  # a scale from 0 to 1 that cuts no line in half
MARKS = {"-": "o", "--": "x", ":": "."}  # none hides another
FEW, MANY = 16, 64  # up to the first all points of a run are marked, beyond the second those of no measurement
MARK_HEIGHTS = (0.5, 0.68, 0.32, 0.86, 0.14)  # of names beside one another, as fractions
MOST = 600  # points of a line, about one for each pixel of a small screen


@dataclass(frozen=True)
class Line:
    """One quantity of a run; `measured` ones are sparse and are drawn as they are."""

    label: str
    points: Series
    colour: str
    style: str
    measured: bool = False


@drawn_in_style
def plot_training(log_history: Rows, success_metric: str | None = None) -> Figure:
    """Draw reward and success, retrieval accuracy with its chance, TRL's entropy, and what the filter kept.

    Thin lines are single steps, thick ones running means over up to 10 of them, which end at the last number of the
    model card; of more than 600 steps, neighbours are drawn as their mean. Measurements of retrieval are sparse and
    are drawn as they are. What was not logged gets no panel, and rows without a step are left out.

    Args:
        log_history: `trainer.state.log_history`, of the stock `GRPOTrainer` too.
        success_metric: log key of the success rate, if there is one.

    Raises:
        ValueError: if the history has no row with a step and a reward.
    """
    rows = with_steps(log_history)
    if all(row.get(REWARD) is None for row in rows):
        raise ValueError(f"log_history has {len(log_history)} rows, but none has a 'reward' to plot at its 'step'.")
    reward = Line("reward", points_of(log_history, REWARD), BLUE, "-")
    success = Line("success", points_of(log_history, success_metric), ORANGE, "--")
    accuracy = Line("retrieval accuracy", points_of(log_history, ACCURACY), BLUE, "-", measured=True)
    chance = Line("chance", points_of(log_history, CHANCE), GREY, ":", measured=True)
    entropy = Line("entropy", points_of(log_history, ENTROPY), ORANGE, "-")
    kept = Line("groups kept", points_of(log_history, KEPT), GREEN, "-")
    no_variance = Line("zero-variance groups", points_of(log_history, *ZERO_VARIANCE), GREY, ":")
    compute = Line("update compute", points_of(log_history, COMPUTE), BLUE, "--")
    panels = [
        ("reward", (None, None), [reward, success]),
        ("fraction", FRACTIONS, [accuracy, chance]),
        ("nats per token", (0, None), [entropy]),
        ("fraction", FRACTIONS, [kept, no_variance, compute]),
    ]
    shown = [panel for panel in panels if reward in panel[2] or any(line.points for line in panel[2])]
    figure, axes_of = make_panels(len(shown), height=1.75)
    for axes, (unit, limits, lines) in zip(axes_of, shown, strict=True):
        for line in lines:
            draw_line(axes, line)
        axes.set_ylim(*limits)
        axes.set_ylabel(unit)
        legend_above(axes)
    if not axes_of[0].lines:
        axes_of[0].text(0.5, 0.5, "no finite reward", ha="center", va="center", transform=axes_of[0].transAxes)
    number_steps(axes_of[-1])
    names = [line.label for _, _, lines in shown for line in lines if line.points]
    figure.set_label(f"Training up to step {max(row['step'] for row in rows)}: {', '.join(names)}.")
    return figure


@drawn_in_style
def plot_compute(log_history: Rows) -> Figure:
    """Draw what updates compute as a fraction of plain TRL's, step by step, and the share that is saved so far.

    Thin and thick lines as in `plot_training`.

    Args:
        log_history: `trainer.state.log_history` of an `SNRFilteredGRPOTrainer`.

    Raises:
        ValueError: if no row says what its update computed.
    """
    points = points_of(log_history, COMPUTE)
    if not points:
        raise ValueError(
            f"log_history has {len(log_history)} rows, but none has a finite {COMPUTE!r}, "
            "which SNRFilteredGRPOTrainer logs."
        )
    steps, fractions = zip(*points, strict=True)
    # Nothing is saved where nothing was trained.
    trained = accumulate(float(fraction > 0) for fraction in fractions)
    saved = [1 - total / count if count else 0.0 for count, total in zip(trained, accumulate(fractions), strict=True)]
    figure, (above, below) = make_panels(2, height=1.9)
    above.axhline(1, label="plain TRL", **REFERENCE)
    draw_line(above, Line("update compute", points, BLUE, "-"))
    above.set_ylim(0, 1.08 * max(1, *fractions))
    label = f"saved so far: {saved[-1]:.0%} at step {steps[-1]:.0f}"
    draw_line(below, Line(label, _thin_out(list(zip(steps, saved, strict=True))), GREEN, "-", measured=True))
    below.set_ylim(min(FRACTIONS[0], *saved), FRACTIONS[1])
    for axes in (above, below):
        axes.set_ylabel("fraction")
        legend_above(axes)
    number_steps(below)
    figure.set_label(f"Update compute as a fraction of plain TRL's; {label}.")
    return figure


@drawn_in_style
def plot_comparison(
    histories: Mapping[str, Rows],
    success_metrics: Mapping[str, str | None],
    collapses: Mapping[str, tuple[int, str]] | None = None,
) -> Figure:
    """Draw several runs over each other: success, retrieval accuracy with its chance, entropy and kept fraction.

    Where a run has no success rate, reward gets a panel too. Lines are the running means of `plot_training`, and
    measurements as they are. What no run has logged gets no panel, a run that has logged nothing of it no line.

    Args:
        histories: name of each run and its `trainer.state.log_history`.
        success_metrics: by the same names, the log key of the success rate, if there is one.
        collapses: by the same names, the optimizer step at which a run collapsed and what to call it, marked beside
            its retrieval accuracy.

    Raises:
        ValueError: if there is no run, or none has anything to plot.
    """
    if not histories:
        raise ValueError("histories must hold at least one run, got none")
    success = {name: points_of(rows, success_metrics.get(name)) for name, rows in histories.items()}
    rewards = {name: points_of(rows, REWARD) for name, rows in histories.items()}
    panels = {
        "success": success,
        "reward": rewards if not all(success.values()) else {},
        "retrieval accuracy (dotted: chance)": {name: points_of(rows, ACCURACY) for name, rows in histories.items()},
        "entropy (nats per token)": {name: points_of(rows, ENTROPY) for name, rows in histories.items()},
        "fraction of groups kept": {name: points_of(rows, KEPT) for name, rows in histories.items()},
    }
    shown = {title: series for title, series in panels.items() if any(series.values())}
    if not shown:
        raise ValueError(f"histories of {len(histories)} runs have nothing to plot: no reward and no entropy")
    names = {name: plain_name(name) for name in histories}
    columns = max(1, min(3, len(names), 60 // (max(map(len, names.values())) + 5)))
    legend_rows = math.ceil(len(names) / columns)
    figure, axes_of = make_panels(len(shown), height=1.65, extra=0.6 + 0.2 * legend_rows)
    drawn: dict[str, Line2D] = {}
    for axes, (title, series) in zip(axes_of, shown.items(), strict=True):
        measured = title.startswith("retrieval")
        if measured:
            _draw_chances(axes, [points_of(rows, CHANCE) for rows in histories.values()])
        window = _window(min(len(points) for points in series.values() if points))  # the same for all lines
        marks = 0
        for number, (name, points) in enumerate(series.items()):
            if points:
                drawn[name] = _draw_run(axes, points if measured else _means(_thin_out(points), window), number)
            if measured and name in (collapses or {}):
                _mark(axes, *collapses[name], _colour(number), MARK_HEIGHTS[marks % len(MARK_HEIGHTS)])
                marks += 1
        axes.set_title(title)
        if measured or title == "fraction of groups kept":
            axes.set_ylim(FRACTIONS)
    number_steps(axes_of[-1])
    figure.legend(
        [drawn[name] for name in names if name in drawn],
        [plain for name, plain in names.items() if name in drawn],
        loc="outside upper left",
        ncols=columns,
        handlelength=3.2,
        borderpad=0.6,
    )
    figure.set_label(f"Comparison of {', '.join(names.values())}: {', '.join(shown)}.")
    return figure


def draw_line(axes: Axes, line: Line) -> None:
    if not line.points:
        return
    steps, values = zip(*line.points, strict=True)
    look: dict[str, Any] = {"color": line.colour, "linestyle": line.style, "label": line.label}
    if line.measured or len(steps) == 1:
        axes.plot(steps, values, marker=MARKS[line.style] if len(steps) <= MANY else None, **look)
        return
    points = _thin_out(line.points)
    means = _means(points)
    if means != points:
        axes.plot(*zip(*points, strict=True), color=line.colour, alpha=0.3, linewidth=THIN)
    axes.plot(*zip(*means, strict=True), **look)


def _mark(axes: Axes, step: int, text: str, colour: Any, height: float) -> None:
    """A line at a step with its name: behind it, where accuracy has fallen, unless the panel ends there."""
    low, high = axes.dataLim.intervalx
    on_left = step > low + 0.65 * (high - low)
    axes.axvline(step, color=colour, linewidth=1.2)
    offset, aligned = (-4, "right") if on_left else (4, "left")
    axes.annotate(
        text,
        (step, height),
        (offset, 0),
        textcoords="offset points",
        ha=aligned,
        va="center",
        color=colour,
        fontsize=10,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
    )


def _draw_run(axes: Axes, points: Series, number: int) -> Line2D:
    """The line of the run `number`: its colour, its style and its marker, of which a long line has about eight."""
    (line,) = axes.plot(
        *zip(*points, strict=True),
        color=_colour(number),
        linestyle=LINE_STYLES[number % len(LINE_STYLES)],
        marker=MARKERS[number % len(MARKERS)],
        markevery=None if len(points) <= FEW else len(points) // 8,
        linewidth=0.9 * LINE_WIDTH,
    )
    return line


def _draw_chances(axes: Axes, chances: Sequence[Series]) -> None:
    """Grey where chance is the same for all runs, otherwise each run's in its colour."""
    levels = {value for points in chances for _, value in points}
    if len(levels) == 1:
        axes.axhline(levels.pop(), **REFERENCE)
        return
    for number, points in enumerate(chances):
        if points:
            axes.plot(*zip(*points, strict=True), **REFERENCE | {"color": _colour(number)})


def _colour(number: int) -> str:
    return LINE_COLOURS[number % len(LINE_COLOURS)]


def _thin_out(points: Series) -> Series:
    """Means of as many neighbours as it takes to have no more than `MOST` points."""
    size = math.ceil(len(points) / MOST)
    blocks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(step for step, _ in block), fmean(value for _, value in block)) for block in blocks]


def _window(count: int) -> int:
    """Of running means, as on the model card."""
    return max(1, min(WINDOW, count // 2))


def _means(points: Series, window: int | None = None) -> Series:
    """Running means, over what there is at the beginning."""
    steps, values = zip(*points, strict=True)
    window = window or _window(len(points))
    return [(step, fmean(values[max(0, i - window + 1) : i + 1])) for i, step in enumerate(steps)]


def with_steps(log_history: Rows) -> Rows:
    """The rows that say of which optimizer step they are."""
    return [row for row in log_history if is_number(row.get("step"))]


def points_of(log_history: Rows, *keys: str | None) -> Series:
    """The finite values of the first of `keys` that has any; one for each step, where several rows have that step."""
    for key in keys:
        values = defaultdict(list)
        for row in with_steps(log_history):
            value = row.get(key)
            if is_number(value):
                values[row["step"]].append(value)
        if values:
            return [(step, fmean(values[step])) for step in sorted(values)]
    return []


def number_steps(axes: Axes) -> None:
    """Names the horizontal axis, which has optimizer steps."""
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(whole_numbers())
    left, right = axes.get_xlim()
    if right - left < 1:  # a single step
        axes.set_xlim(left - 1, right + 1)
