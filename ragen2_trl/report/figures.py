"""The figures of runs: what they have logged over their optimizer steps, and what one measurement says.

Each function returns a matplotlib `Figure`, which notebooks show and `save_figure` and `svg` write; its label says in
words what it shows. The look of all of them is in `style`.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ragen2_trl.instrument.diagnosis import Measurement
from ragen2_trl.instrument.health import is_number
from ragen2_trl.messages import counted
from ragen2_trl.metrics import (
    ACCURACY,
    CHANCE,
    COMPUTE,
    ENTROPY,
    FIRST_TURN,
    KEPT,
    REWARD,
    ZERO_VARIANCE,
    label,
)
from ragen2_trl.record.held_out import HeldOutCurve
from ragen2_trl.record.run import Run, mean_span, step_of
from ragen2_trl.record.saved_measurement import SavedMeasurement, read_measurement
from ragen2_trl.report.card import FIGURES, caption
from ragen2_trl.report.style import (
    BLUE,
    GUIDE_LINE,
    LIGHT_GREY,
    MARKERS,
    ORANGE,
    THIN,
    WIDTH,
    drawn_in_style,
    legend_above,
    legend_outside,
    look,
    make_panels,
    number_steps,
    plain_name,
    save_figure,
    whole_numbers,
)

Rows: TypeAlias = Sequence[Mapping[str, Any]]
Series: TypeAlias = list[tuple[float, float]]  # (optimizer step, value)
Point: TypeAlias = tuple[float, float, str]

FRACTIONS = (-0.03, 1.03)  # a scale from 0 to 1 that cuts no line in half
MOST = 600  # points of a line, about one for each pixel of a small screen
MANY = 24  # points of a line, beyond which some are marked alone
# Share of the matrix below the end of its colour scale: one absurd pair must not bleach all others.
CLIPPED = 0.05
# Shortest colour scale in nats per token: rounding errors must not look like structure.
MIN_COLOUR_RANGE = 0.01
# Where the regimes of arXiv 2604.06268, Section 2.2 lie in the plane: (x, y) of the corner, in fractions of the axes.
REGIME_CORNERS = {
    "Diverse reasoning": (1, 1),
    "Template collapse": (1, 0),
    "Compressed reasoning": (0, 1),
    "Low-entropy collapse": (0, 0),
}
MIN_ENTROPY_RANGE = 0.5  # nats per token: a run of low entropy belongs to the left, whatever its own largest value


# Which figures a run has data for


def draw_figures(run: Run, folder: Path) -> None:
    """Write each figure that the run has data for as PNG and SVG, and remove what an earlier run left of others."""
    drawn = {name: figure for name, _, figure in figures_of(run)}
    for name in FIGURES:
        if name in drawn:
            save_figure(drawn[name], folder / name)
        else:
            for suffix in (".png", ".svg"):
                (folder / name).with_suffix(suffix).unlink(missing_ok=True)


def figures_of(run: Run, measurements: Sequence[SavedMeasurement] | None = None) -> Iterator[tuple[str, str, Figure]]:
    """(name, caption, figure) for all that there are data for.

    Args:
        run: The run; rows without a step are left out.
        measurements: Whose matrices to draw, and of the last its groups; by default the last that the run has saved.
    """
    if measurements is None:
        measurements = [read_measurement(path) for path in run.measurements[-1:]]
    if run.held_out:
        yield "held_out", caption("held_out", run), plot_held_out(run.held_out)
    if with_steps(run.rows) and not run.is_diagnosed:
        yield "training", caption("training", run), plot_training(run.rows, run.success_metric)
    for name, figure in _quadrant(run):
        yield name, caption(name, run), figure
    for measurement in measurements:
        for name, figure in _matrix(measurement):
            yield name, caption(name, run, measurement.step), figure
    for measurement in measurements[-1:]:
        for name, figure in _groups(run, measurement):
            yield name, caption(name, run, measurement.step), figure


def measurement_figures(run: Run, measurement: SavedMeasurement) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of what one of a run's measurements says: the path up to it, its matrix, its groups."""
    return chain(_quadrant(run), _matrix(measurement), _groups(run, measurement))


def _quadrant(run: Run) -> Iterator[tuple[str, Figure]]:
    names = ("conditional_entropy_token", "mi_seq", "mi_upper_bound")
    entropies, gains, bounds = (dict(points_of(run.rows, f"{FIRST_TURN}/{name}")) for name in names)
    steps = [step for step in entropies if step in gains and step in bounds]
    if steps:
        points = [(entropies[step], gains[step], f"step {step}") for step in steps]
        yield "quadrant", plot_quadrant(points, bounds[steps[-1]])


def _matrix(measurement: SavedMeasurement) -> Iterator[tuple[str, Figure]]:
    if measurement.cross_logps.isfinite().all():  # not those of a model that has diverged
        yield "cross_scores", plot_matrix(measurement)


def _groups(run: Run, measurement: SavedMeasurement) -> Iterator[tuple[str, Figure]]:
    if measurement.scores.numel():
        kept = None if measurement.kept is None else measurement.kept.tolist()
        score = str(run.settings.get("snr_score", "reward_variance"))
        yield "reward_variance", plot_reward_variance(measurement.scores.tolist(), kept, score)


# Over the optimizer steps


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
    # Unit, limits, and by its name the log keys of each line: the first that was logged is drawn.
    panels: list[tuple[str, tuple[float | None, float | None], dict[str, tuple[str | None, ...]]]] = [
        ("reward", (None, None), {"reward": (REWARD,), "success in training": (success_metric,)}),
        ("fraction", FRACTIONS, {label(key): (key,) for key in (ACCURACY, CHANCE)}),
        ("nats per token", (0, None), {"entropy": (ENTROPY,)}),
        (
            "fraction",
            FRACTIONS,
            {
                label(KEPT): (KEPT,),
                "zero-variance groups": (ZERO_VARIANCE, "frac_reward_zero_std"),  # the stock trainer's
                label(COMPUTE): (COMPUTE,),
            },
        ),
    ]
    drawn = [
        (unit, limits, {name: points for name, keys in lines.items() if (points := points_of(rows, *keys))})
        for unit, limits, lines in panels
    ]
    shown = [panel for number, panel in enumerate(drawn) if number == 0 or panel[2]]
    figure, axes_of = make_panels(len(shown), height=1.75)
    for axes, (unit, limits, lines) in zip(axes_of, shown, strict=True):
        for number, (name, points) in enumerate(lines.items()):
            is_measured = name in (label(ACCURACY), label(CHANCE))
            style = {**look(number), **(GUIDE_LINE if name == label(CHANCE) else {})}
            _draw_line(axes, points, name, style, is_measured)
        axes.set_ylim(*limits)
        axes.set_ylabel(unit)
        legend_above(axes)
    if not axes_of[0].lines:
        axes_of[0].text(0.5, 0.5, "no finite reward", ha="center", va="center", transform=axes_of[0].transAxes)
    number_steps(axes_of[-1])
    names = ", ".join(name for _, _, lines in shown for name in lines)
    figure.set_label(f"Training up to step {max(row['step'] for row in rows)}: {names}.")
    return figure


@drawn_in_style
def plot_comparison(histories: Mapping[str, Rows], success_metrics: Mapping[str, str | None]) -> Figure:
    """Draw several runs over each other: success, retrieval accuracy with its chance, entropy and kept fraction.

    Where a run has no success rate, reward gets a panel too. Lines are the running means of `plot_training`, and
    measurements as they are. What no run has logged gets no panel, a run that has logged nothing of it no line.

    Args:
        histories: name of each run and its `trainer.state.log_history`.
        success_metrics: by the same names, the log key of the success rate, if there is one.

    Raises:
        ValueError: if there is no run, or none has anything to plot.
    """
    if not histories:
        raise ValueError("histories must hold at least one run, got none")

    def series(key: str) -> dict[str, Series]:
        return {name: points_of(rows, key) for name, rows in histories.items()}

    success = {name: points_of(rows, success_metrics.get(name)) for name, rows in histories.items()}
    panels = {
        "success": success,
        "reward": series(REWARD) if not all(success.values()) else {},
        "retrieval accuracy (dotted: chance)": series(ACCURACY),
        "entropy (nats per token)": series(ENTROPY),
        "fraction of completions kept": series(KEPT),
    }
    shown = {title: lines for title, lines in panels.items() if any(lines.values())}
    if not shown:
        raise ValueError(f"histories of {len(histories)} runs have nothing to plot: no reward and no entropy")
    names = [plain_name(name) for name in histories]
    figure, axes_of = make_panels(len(shown), 1.65, names)
    for axes, (title, lines) in zip(axes_of, shown.items(), strict=True):
        measured = title.startswith("retrieval")
        span = mean_span(min(len(points) for points in lines.values() if points))  # the same for all lines
        for number, (name, points) in enumerate(lines.items()):
            if measured and (chance := points_of(histories[name], CHANCE)):
                axes.plot(*zip(*chance, strict=True), **GUIDE_LINE | {"color": look(number)["color"]})
            if points:
                drawn = points if measured else _means(_thin_out(points), span)
                marks: dict[str, Any] = {
                    "marker": MARKERS[number % len(MARKERS)],
                    "markevery": max(1, len(drawn) // 8),
                }
                axes.plot(*zip(*drawn, strict=True), label=names[number], **look(number), **marks)
        axes.set_title(title)
        if measured or title == "fraction of completions kept":
            axes.set_ylim(FRACTIONS)
    number_steps(axes_of[-1])
    legend_outside(figure, names)
    figure.set_label(f"Comparison of {', '.join(names)}: {', '.join(shown)}.")
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
    figure, (axes,) = make_panels(1, 2.4, names)
    for number, (curve, name) in enumerate(zip(curves.values(), names, strict=True)):
        steps = [point.step for point in curve.points]
        success, low, high = zip(*((point.success, point.low, point.high) for point in curve.points), strict=True)
        style = look(number)
        axes.plot(
            steps, success, label=name, marker=MARKERS[number % len(MARKERS)] if len(steps) <= MANY else None, **style
        )
        if len(steps) > 1:
            axes.fill_between(steps, low, high, color=style["color"], alpha=0.18, linewidth=0)
        else:  # a band of no width
            axes.vlines(steps, low, high, color=style["color"])
        if curve.random_baseline is not None:
            axes.axhline(curve.random_baseline, **GUIDE_LINE | {"color": style["color"]})
    axes.set_ylim(FRACTIONS)
    axes.set_ylabel("held-out success")
    number_steps(axes)
    legend_outside(figure, names)
    figure.set_label(f"Held-out success over the steps, with 95 % intervals: {'; '.join(names)}.")
    return figure


def _draw_line(axes: Axes, points: Series, name: str, style: Mapping[str, Any], is_measured: bool) -> None:
    """Single steps thin and their running means thick; measurements as they are, each marked where they are few."""
    if is_measured or len(points) == 1:
        marker = MARKERS[len(axes.lines) % len(MARKERS)] if len(points) <= MANY else None
        axes.plot(*zip(*points, strict=True), label=name, marker=marker, **style)
        return
    points = _thin_out(points)
    means = _means(points)
    if means != points:
        axes.plot(*zip(*points, strict=True), color=style["color"], linestyle="-", alpha=0.3, linewidth=THIN)
    axes.plot(*zip(*means, strict=True), label=name, **style)


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


# Of measurements


@drawn_in_style
def plot_matrix(measurement: Measurement | SavedMeasurement) -> Figure:
    """Draw how well each reasoning trace is explained by each prompt, next to the prompt that explains it best.

    Rows are reasoning traces, sorted by their own prompt; columns are prompts in that same order; the own one is
    framed. Colour is log p(Z|x_n) minus its maximum over the row, in nats per token: 0 is the best prompt. Reasoning
    that depends on its prompt shows as a bright diagonal; a template gives rows of one colour. The darkest twentieth
    of the pairs is drawn as equal.

    Args:
        measurement: from `measure_first_turn`, `measure_trajectory` or `read_measurement`.
    """
    order = measurement.prompt_index.argsort(stable=True)
    logps = measurement.cross_logps.double()[order]  # (B, N)
    gaps = (logps - logps.amax(dim=1, keepdim=True)) / measurement.lengths[order, None]  # (B, N) nats per token
    rows, columns = gaps.shape
    # By counting and not by interpolation, so that the scale ends at a value that occurs.
    low = gaps.flatten().sort().values[int(CLIPPED * gaps.numel())].item()

    figure = Figure(figsize=(WIDTH, 5), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        gaps.numpy(),
        vmin=min(low, -MIN_COLOUR_RANGE),
        vmax=0,
        aspect="auto",
        interpolation="none",
        extent=(0.5, columns + 0.5, rows + 0.5, 0.5),  # numbers from 1
    )
    own, counts = measurement.prompt_index[order].unique_consecutive(return_counts=True)
    for column, end, height in zip(own.tolist(), counts.cumsum(0).tolist(), counts.tolist(), strict=True):
        corner = column + 0.5, end - height + 0.5
        axes.add_patch(Rectangle(corner, 1, height, fill=False, edgecolor=ORANGE, linewidth=1.2))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(whole_numbers())
    axes.grid(False)
    axes.set_xlabel("prompt")
    axes.set_ylabel("reasoning trace, in the order of its own prompt (framed)")
    bar = figure.colorbar(image, extend="min")
    bar.set_label("log-probability below the best prompt's\n(nats per token)")
    metrics = measurement.metrics
    title = (
        f"own prompt explains best: {metrics['retrieval_accuracy']:.0%} of reasoning traces\n"
        f"(chance {metrics['retrieval_chance']:.1%})"
    )
    axes.set_title(title)
    scored = f"{counted(rows, 'reasoning trace')} scored under {columns} prompts"
    figure.set_label(f"{scored}; {title.replace(chr(10), ' ')}.")
    return figure


@drawn_in_style
def plot_quadrant(points: Sequence[Point], upper_bound: float) -> Figure:
    """Draw where reasoning stands between the four regimes of arXiv 2604.06268, Section 2.2.

    Several points are the path of a run: a line through all of them, the first and the last named above. The corners
    name regimes and draw no borders between them: the paper gives no thresholds.

    Args:
        points: for each measurement (`conditional_entropy_token`, `mi_seq`, label): H(Z|X) in nats per token, and
            I(X;Z) in nats.
        upper_bound: `mi_upper_bound`, the log of the number of prompts in nats, of the last measurement.

    Raises:
        ValueError: if there is no point.
    """
    if not points:
        raise ValueError("points must hold at least one measurement, got none")
    entropies, gains, names = zip(*points, strict=True)
    figure, (axes,) = make_panels(1, 4.4)
    # Strips above log N and below 0, where no estimate should be, keep the names of the regimes free of the data.
    axes.set_ylim(min(0, *gains) - 0.15 * upper_bound, max(upper_bound, *gains) + 0.15 * upper_bound)
    axes.set_xlim(0, max(MIN_ENTROPY_RANGE, 1.25 * max(entropies)))
    axes.axhline(upper_bound, **GUIDE_LINE)
    grey: dict[str, Any] = {"textcoords": "offset points", "color": "#606060", "fontsize": 10}
    above: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "center", "va": "bottom"}
    axes.annotate("log N", (0.5, upper_bound), (0, 4), **above, **grey)
    for regime, (x, y) in REGIME_CORNERS.items():
        inwards = (6 - 12 * x, 6 - 12 * y)
        aligned: dict[str, Any] = {"ha": ("left", "right")[x], "va": ("bottom", "top")[y]}
        axes.annotate(regime, (x, y), inwards, xycoords="axes fraction", **aligned, **grey)
    axes.plot(entropies, gains, color=BLUE, linewidth=1.2, marker="o", markersize=4)
    ends: list[tuple[int, dict[str, Any]]] = [(0, {"color": BLUE, "fillstyle": "none"}), (-1, {"color": ORANGE})]
    for end, style in ends[len(points) == 1 :]:
        name = plain_name(names[end], max_chars=24)
        axes.plot([entropies[end]], [gains[end]], linestyle="none", marker="o", markersize=10, label=name, **style)
    legend_above(axes)
    axes.set_xlabel("entropy of reasoning given its prompt,\nH(Z|X) (nats per token)")
    axes.set_ylabel("mutual information with the prompt,\nI(X;Z) (nats)")
    figure.set_label(
        f"Regime of {plain_name(names[-1])}: H(Z|X) = {entropies[-1]:.2f} nats per token, "
        f"I(X;Z) = {gains[-1]:.2f} of at most {upper_bound:.2f} nats."
    )
    return figure


@drawn_in_style
def plot_reward_variance(
    scores: Sequence[float], kept: Sequence[bool] | None = None, score: str = "reward_variance"
) -> Figure:
    """Draw how the signal of a batch is spread over its groups: their scores from the largest down, kept ones dark,
    with the share of the summed score that they hold, where there is such a share (no score is below 0).

    Args:
        scores: of each group; what is not finite counts as 0.
        kept: which groups the filter kept; `None` if there was no filter.
        score: name of the score, from `snr_score`.

    Raises:
        ValueError: if there is no group, or `kept` is not of the same length.
    """
    if not scores:
        raise ValueError("scores must hold at least one group, got none")
    if kept is not None and len(kept) != len(scores):
        raise ValueError(f"kept must have one value for each of the {len(scores)} scores, got {len(kept)}")
    marks = [True] * len(scores) if kept is None else list(map(bool, kept))
    finite = [value if math.isfinite(value) else 0.0 for value in scores]
    ranked = sorted(zip(finite, marks, strict=True), reverse=True)
    name, groups, total = plain_name(score.replace("_", " ")), counted(len(ranked), "group"), sum(finite)
    held = sum(value for value, mark in ranked if mark)
    share = f", {held / total:.0%} of the sum" if min(finite) >= 0 and total > 0 else ""
    shown = groups if kept is None else f"kept: {sum(marks)} of {groups}{share}"
    figure, (axes,) = make_panels(1, height=2.4)
    edges = [number + 0.5 for number in range(len(ranked) + 1)]
    for mark, text, colour in ((True, shown, BLUE), (False, f"left out: {marks.count(False)}", LIGHT_GREY)):
        if mark in marks or mark:
            heights = [value if one == mark else 0 for value, one in ranked]
            axes.stairs(heights, edges, fill=True, color=colour, linewidth=0, label=text)
    if not any(finite):
        axes.set(ylim=(0, 1), yticks=[0])
        axes.text(0.5, 0.5, f"the {name} of all groups is 0", ha="center", va="center", transform=axes.transAxes)
    axes.set_ylabel(name)
    axes.set_xlim(0.5, len(ranked) + 0.5)
    axes.xaxis.set_major_locator(whole_numbers())
    axes.set_xlabel(f"group, from the largest {name} down")
    legend_above(axes)
    figure.set_label(f"{name.capitalize()} of {groups}" + ("." if kept is None else f"; {shown}."))
    return figure
