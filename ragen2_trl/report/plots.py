"""Figures of what runs have logged over their optimizer steps; those of what they measured are in `measurement_plots`.

Each function returns a matplotlib `Figure`, which notebooks show and `save_figure` and `svg` write; its label says in
words what it shows. The look of all of them is in `style`. Figures of the paper (arXiv 2604.06268) among them: 13
(arrows from the start to the end of runs) and 14 (the proxies).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ragen2_trl.instrument.health import is_number
from ragen2_trl.metrics import (
    ACCURACY,
    CHANCE,
    COMPUTE,
    CONDITIONAL_ENTROPY,
    ENTROPY,
    INFORMATION,
    KEPT,
    REWARD,
    ZERO_VARIANCE,
    label,
)
from ragen2_trl.record.held_out import HeldOutCurve
from ragen2_trl.record.run import mean_span, step_of
from ragen2_trl.report.style import (
    BLUE,
    GREEN,
    GREY,
    GUIDE_LINE,
    LINE_COLOURS,
    LINE_STYLES,
    LINE_WIDTH,
    MARKERS,
    ORANGE,
    THIN,
    WIDTH,
    drawn_in_style,
    legend_above,
    make_panels,
    plain_name,
    whole_numbers,
)

Rows: TypeAlias = Sequence[Mapping[str, Any]]
Series: TypeAlias = list[tuple[float, float]]  # (optimizer step, value)

FRACTIONS = (-0.03, 1.03)  # a scale from 0 to 1 that cuts no line in half
MARKS = {"-": "o", "--": "x", ":": "."}  # none hides another
FEW, MANY = 16, 64  # up to the first all points of a run are marked, beyond the second those of no measurement
MARK_HEIGHTS = (0.5, 0.68, 0.32, 0.86, 0.14)  # of names beside one another, as fractions
MOST = 600  # points of a line, about one for each pixel of a small screen
FEW_EVALUATIONS = 24  # of a held-out curve, up to which each is marked
LETTERS = 60  # of a row of a legend
SCOPES: dict[str, tuple[str, str, Any, str]] = {  # log prefix to name and look
    "mi/first_turn": ("first turns", BLUE, "-", "o"),
    "mi/trajectory": ("all turns, each by itself", ORANGE, "--", "s"),
}
# The six of Table 1: title, for which layouts make no room, key, key of chance or of the bound.
PROXIES = (
    ("retrieval accuracy", "retrieval_accuracy", "retrieval_chance"),
    ("own prompt among best 4", "retrieval_accuracy@4", "retrieval_chance@4"),
    ("MI (nats)", "mi_seq", "mi_upper_bound"),
    ("MI per token, tempered", "mi_token_tempered", None),
    ("MI z-score", "mi_zscore_seq", None),
    ("MI z-score, running", "mi_zscore_ema_seq", None),
)
INFORMATION_LABEL, ENTROPY_LABEL = f"{label(INFORMATION)} (nats)", f"{label(CONDITIONAL_ENTROPY)} (nats per token)"


@dataclass(frozen=True)
class Line:
    """One quantity of a run; `measured` ones are sparse and are drawn as they are."""

    label: str
    points: Series
    colour: str
    style: Any  # of matplotlib: a name, or an offset with dashes
    measured: bool = False


@dataclass(frozen=True)
class Arrow:
    """A run from its first to its last measurement.

    Args:
        information: I(X;Z) in nats, first and last.
        entropy: H(Z|X) in nats per token, first and last.
        height: success, or reward, around the two.
    """

    information: tuple[float, float]
    entropy: tuple[float, float]
    height: tuple[float, float]


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
    success = Line("success in training", points_of(log_history, success_metric), ORANGE, "--")
    accuracy = Line(label(ACCURACY), points_of(log_history, ACCURACY), BLUE, "-", measured=True)
    chance = Line(label(CHANCE), points_of(log_history, CHANCE), GREY, ":", measured=True)
    entropy = Line("entropy", points_of(log_history, ENTROPY), ORANGE, "-")
    kept = Line(label(KEPT), points_of(log_history, KEPT), GREEN, "-")
    flat = points_of(log_history, ZERO_VARIANCE, "frac_reward_zero_std")  # the second is that of the stock trainer
    no_variance = Line("zero-variance groups", flat, GREY, ":")
    compute = Line(label(COMPUTE), points_of(log_history, COMPUTE), BLUE, "--")
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
        "fraction of completions kept": {name: points_of(rows, KEPT) for name, rows in histories.items()},
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
        span = mean_span(min(len(points) for points in series.values() if points))  # the same for all lines
        marks = 0
        for number, (name, points) in enumerate(series.items()):
            if points:
                drawn[name] = _draw_run(axes, points if measured else _means(_thin_out(points), span), number)
            if measured and collapses and name in collapses:
                step, text = collapses[name]
                _mark(axes, step, text, _colour(number), MARK_HEIGHTS[marks % len(MARK_HEIGHTS)])
                marks += 1
        axes.set_title(title)
        if measured or title == "fraction of completions kept":
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


@drawn_in_style
def plot_held_out(curves: Mapping[str, HeldOutCurve]) -> Figure:
    """Draw success on held-out tasks against optimizer steps, with the band of its 95 % interval, one line a task.

    A dotted line is the success of the random baseline, where evaluations have it.

    Args:
        curves: by task, those of `Run.held_out`.

    Raises:
        ValueError: if there is no curve.
    """
    if not curves:
        raise ValueError("curves must hold at least one task, got none")
    names = [
        f"{plain_name(curve.task)}{f' ({curve.tasks})' if curve.tasks else ''}, best {curve.peak.success:.0%} "
        f"at step {curve.peak.step}"
        for curve in curves.values()
    ]
    columns = max(1, min(len(names), LETTERS // (max(map(len, names)) + 5)))
    figure, (axes,) = make_panels(1, height=2.4, extra=0.6 + 0.2 * -(-len(names) // columns))
    for number, (curve, name) in enumerate(zip(curves.values(), names, strict=True)):
        steps = [point.step for point in curve.points]
        success, low, high = zip(*((point.success, point.low, point.high) for point in curve.points), strict=True)
        colour = LINE_COLOURS[number % len(LINE_COLOURS)]
        marker = MARKERS[number % len(MARKERS)] if len(steps) <= FEW_EVALUATIONS else None
        axes.plot(steps, success, LINE_STYLES[number % len(LINE_STYLES)], color=colour, marker=marker, label=name)
        if len(steps) > 1:
            axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
        else:  # a band of no width
            axes.vlines(steps, low, high, color=colour)
        if curve.random_baseline is not None:
            axes.axhline(curve.random_baseline, **GUIDE_LINE | {"color": colour, "zorder": 1})
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("held-out success")
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(whole_numbers())
    left, right = axes.get_xlim()
    if right - left < 1:
        axes.set_xlim(left - 1, right + 1)
    figure.legend(loc="outside upper left", ncols=columns, handlelength=3.2)
    figure.set_label(f"Held-out success over the steps, with 95 % intervals: {'; '.join(names)}.")
    return figure


@drawn_in_style
def plot_proxies(log_history: Rows) -> Figure:
    """Draw the six proxies of the mutual information over a run (paper, Table 1 and Figure 14).

    Dotted is chance, or the bound; where it differs between scopes, each has its own.

    Args:
        log_history: `trainer.state.log_history`.

    Raises:
        ValueError: if there is no measurement in it.
    """
    scopes = [scope for scope in SCOPES if points_of(log_history, f"{scope}/mi_seq")]
    if not scopes:
        raise ValueError(
            f"log_history has {len(log_history)} rows, but none with a measurement, such as {INFORMATION!r}."
        )
    figure = Figure(figsize=(WIDTH, 6.2 + 0.2 * len(scopes)), layout="constrained")
    panels = figure.subplots(3, 2, sharex=True).flat
    for axes, (title, name, bound) in zip(panels, PROXIES, strict=True):
        for scope in scopes:
            _, colour, line, marker = SCOPES[scope]
            _draw_measured(
                axes, points_of(log_history, f"{scope}/{name}"), color=colour, linestyle=line, marker=marker
            )
            if bound and (points := points_of(log_history, f"{scope}/{bound}")):
                axes.plot(*zip(*points, strict=True), **GUIDE_LINE | {"color": colour})
        axes.set_title(title)
        if name.startswith("retrieval"):
            axes.set_ylim(FRACTIONS)
        else:
            axes.set_ylim(*_with_room(*axes.get_ylim()))
        if axes.get_subplotspec().is_last_row():
            number_steps(axes)
    # Named by lines of their own: not every panel has all of them.
    named = [
        Line2D([], [], label=name, color=colour, linestyle=line, marker=marker)
        for name, colour, line, marker in map(SCOPES.__getitem__, scopes)
    ]
    figure.legend(handles=named, loc="outside upper left", ncols=1, handlelength=3.2, borderpad=0.6)
    names = ", ".join(SCOPES[scope][0] for scope in scopes)
    figure.set_label(f"Six proxies of the mutual information over training: {names}.")
    return figure


@drawn_in_style
def plot_arrows(runs: Mapping[str, Arrow], height_label: str = "success") -> Figure:
    """Draw each run as an arrow from its first to its last measurement (paper, Figure 13).

    Args:
        runs: by name.
        height_label: what the vertical axis is.

    Raises:
        ValueError: if there is no run.
    """
    if not runs:
        raise ValueError("runs must hold at least one run, got none")
    names = {name: plain_name(name) for name in runs}
    columns = max(1, min(3, len(names), 60 // (max(map(len, names.values())) + 5)))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(WIDTH, 3.4 + 0.25 * rows), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    handles = []
    for number, arrow in enumerate(runs.values()):
        colour, line = LINE_COLOURS[number % len(LINE_COLOURS)], LINE_STYLES[number % len(LINE_STYLES)]
        marker = MARKERS[number % len(MARKERS)]
        for axes, across in ((left, arrow.information), (right, arrow.entropy)):
            start, end = zip(across, arrow.height, strict=True)
            look: dict[str, Any] = {"color": colour, "linestyle": line, "marker": marker}
            (drawn,) = axes.plot(*zip(start, end, strict=True), markevery=[0], **look)
            # The head alone: a line that is drawn with it gives it its dashes.
            head = {"arrowstyle": "-|>", "mutation_scale": 16, "linewidth": 0, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", end, start, arrowprops={"color": colour, **head})
        handles.append(drawn)
    for axes, title in ((left, INFORMATION_LABEL), (right, ENTROPY_LABEL)):
        axes.margins(0.12)
        axes.set_xlim(*_with_room(*axes.get_xlim()))
        axes.set_xlabel(title)
    left.set_ylabel(f"{height_label} (the marker is the start)")
    figure.legend(handles, names.values(), loc="outside upper left", ncols=columns, handlelength=3.2, borderpad=0.6)
    figure.set_label(f"From the first to the last measurement of {', '.join(names.values())}: {height_label}.")
    return figure


def arrow_of(log_history: Rows, height: Series) -> Arrow | None:
    """A run's arrow, where it has two measurements; at each the mean of the ten values of `height` nearest to it."""
    gains, entropies = (dict(points_of(log_history, key)) for key in (INFORMATION, CONDITIONAL_ENTROPY))
    steps = [step for step in gains if step in entropies]
    if len(steps) < 2 or not height:
        return None
    ends = (steps[0], steps[-1])
    first, last = (_around(height, step) for step in ends)
    information, entropy = ((values[ends[0]], values[ends[1]]) for values in (gains, entropies))
    return Arrow(information, entropy, (first, last))


def draw_line(axes: Axes, line: Line) -> None:
    if not line.points:
        return
    steps, values = zip(*line.points, strict=True)
    look: dict[str, Any] = {"color": line.colour, "linestyle": line.style, "label": line.label}
    if line.measured or len(steps) == 1:
        axes.plot(steps, values, marker=MARKS.get(line.style, "o") if len(steps) <= MANY else None, **look)
        return
    points = _thin_out(line.points)
    means = _means(points)
    if means != points:
        axes.plot(*zip(*points, strict=True), color=line.colour, alpha=0.3, linewidth=THIN)
    axes.plot(*zip(*means, strict=True), **look)


def _mark(axes: Axes, step: int, text: str, colour: Any, height: float) -> None:
    """Draw a line at a step with its name: behind it, where accuracy has fallen, unless the panel ends there."""
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
        axes.axhline(levels.pop(), **GUIDE_LINE)
        return
    for number, points in enumerate(chances):
        if points:
            axes.plot(*zip(*points, strict=True), **GUIDE_LINE | {"color": _colour(number)})


def _colour(number: int) -> str:
    return LINE_COLOURS[number % len(LINE_COLOURS)]


def _thin_out(points: Series) -> Series:
    """Means of as many neighbours as it takes to have no more than `MOST` points."""
    size = math.ceil(len(points) / MOST)
    blocks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(step for step, _ in block), fmean(value for _, value in block)) for block in blocks]


def _means(points: Series, span: int | None = None) -> Series:
    """Running means over `span` points, by default as on the model card; over what there is at the beginning."""
    steps, values = zip(*points, strict=True)
    span = span or mean_span(len(points))
    return [(step, fmean(values[max(0, i - span + 1) : i + 1])) for i, step in enumerate(steps)]


def with_steps(log_history: Rows) -> Rows:
    """The rows that say of which optimizer step they are."""
    return [row for row in log_history if is_number(row.get("step"))]


def points_of(log_history: Rows, *keys: str | None) -> Series:
    """The finite values of the first of `keys` that has any; one for each step, where several rows have that step."""
    for key in filter(None, keys):
        values = defaultdict(list)
        for row in with_steps(log_history):
            value = row.get(key)
            if is_number(value):
                values[step_of(row, key)].append(value)
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


def _with_room(low: float, high: float) -> tuple[float, float]:
    """Limits that are not so narrow that rounding errors look like changes, or ticks need an offset."""
    lacking = max(0.0, 0.05 * max(abs(low), abs(high), 0.2) - (high - low))
    return low - lacking / 2, high + lacking / 2


def _around(points: Sequence[tuple[float, float]], step: float) -> float:
    count = max(1, min(10, len(points) // 2))
    nearest = sorted(points, key=lambda point: abs(point[0] - step))[:count]
    return math.fsum(value for _, value in nearest) / count


def _draw_measured(axes: Axes, points: Series, **look: Any) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), markevery=None if len(points) <= FEW else len(points) // 8, **look)
