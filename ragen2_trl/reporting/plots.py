"""Figures of a run, readable in print and for colour-blind people."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ragen2_trl.diagnosis import Measurement

# Okabe and Ito's colours, which stay apart for every kind of colour vision.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#808080"
SMOOTHING = 10  # log rows
SECOND_SCALE = 1.15  # where a legend starts beside a scale at the right, in widths of the axes

RETRIEVAL_ACCURACY, RETRIEVAL_CHANCE = "mi/first_turn/retrieval_accuracy", "mi/first_turn/retrieval_chance"

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
Point: TypeAlias = tuple[float, float, str]
MIN_ENTROPY_RANGE = 0.5  # nats per token: a run of low entropy belongs to the left, whatever its own largest value


def plot_training(log_history: Sequence[Mapping[str, Any]], path: Path, success_metric: str | None = None) -> None:
    """Draw reward and success above, kept fraction, zero-variance fraction and update compute below.

    Thin lines are single log rows, thick ones running means over up to 10 of them. Where retrieval accuracy was
    measured, a third panel has it with its chance and, on a scale of its own, TRL's entropy in nats per token.
    Measurements are sparse and are drawn as they are.

    Args:
        log_history: `trainer.state.log_history`.
        path: where to write; the suffix chooses the format.
        success_metric: log key of the success rate, if there is one.

    Raises:
        ValueError: if the history has no row with a reward.
    """
    rows = [row for row in log_history if row.get("reward") is not None]
    if not rows:
        raise ValueError(f"log_history has {len(log_history)} rows, but none has a 'reward' to plot.")
    measured = bool(_points(rows, RETRIEVAL_ACCURACY))
    # A figure of its own, without pyplot: no global state, no display needed.
    figure = Figure(figsize=(7, 7) if measured else (7, 5), layout="constrained")
    panels = figure.subplots(3 if measured else 2, 1, sharex=True)
    above, below = panels[:2]
    _draw(above, rows, "reward", "reward", BLUE, "-")
    if success_metric is not None:
        _draw(above, rows, success_metric, "success", ORANGE, "--")
    above.set_ylabel("training reward")
    _draw(below, rows, "snr/kept_fraction", "groups kept", GREEN, "-")
    _draw(below, rows, "snr/zero_variance_fraction", "groups without variance", GREY, ":")
    _draw(below, rows, "snr/update_compute_fraction", "update compute", BLUE, "--")
    below.set_ylim(0, 1)
    below.set_ylabel("fraction")
    panels[-1].set_xlabel("optimizer step")
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (above, below):
        _legend(axes, axes.get_legend_handles_labels()[0], left=1.0)
    if measured:
        _legend(panels[-1], _draw_dependence(panels[-1], rows), left=SECOND_SCALE)
    figure.savefig(path, dpi=150)


def plot_matrix(measurement: Measurement, path: Path) -> None:
    """Draw how well each reasoning is explained by each prompt, next to the prompt that explains it best.

    Rows are reasonings, sorted by their own prompt; columns are prompts in that same order; the own one is framed.
    Colour is log p(Z|x_n) minus its maximum over the row, in nats per token: 0 is the best prompt. Reasoning that
    depends on its prompt shows as a bright diagonal; a template gives rows of one colour. The darkest twentieth of
    the pairs is drawn as equal.

    Args:
        measurement: from `measure_first_turn` or `measure_trajectory`.
        path: where to write; the suffix chooses the format.
    """
    order = measurement.prompt_index.argsort(stable=True)
    logps = measurement.cross_logps.double()[order]  # (B, N)
    gaps = (logps - logps.amax(dim=1, keepdim=True)) / measurement.lengths[order, None]  # (B, N) nats per token
    rows, columns = gaps.shape
    # By counting and not by interpolation, so that the scale ends at a value that occurs.
    low = gaps.flatten().sort().values[int(CLIPPED * gaps.numel())].item()

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        gaps.numpy(),
        cmap="viridis",
        vmin=min(low, -MIN_COLOUR_RANGE),
        vmax=0,
        aspect="auto",
        interpolation="nearest",
        extent=(0.5, columns + 0.5, rows + 0.5, 0.5),  # numbers from 1
    )
    own, first, count = _runs(measurement.prompt_index[order])
    for column, row, height in zip(own, first, count, strict=True):
        frame = Rectangle((column + 0.5, row + 0.5), 1, height, fill=False, edgecolor=ORANGE, linewidth=1.2)
        axes.add_patch(frame)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.set_xlabel("prompt")
    axes.set_ylabel("reasoning, in the order of its own prompt (framed)")
    bar = figure.colorbar(image, extend="min")
    bar.set_label("log-probability below the best prompt's (nats per token)")
    metrics = measurement.metrics
    axes.set_title(
        f"own prompt explains best: {metrics['retrieval_accuracy']:.0%} of reasonings "
        f"(chance {metrics['retrieval_chance']:.1%})",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def plot_quadrant(points: Sequence[Point], path: Path, upper_bound: float) -> None:
    """Draw where reasoning stands between the four regimes of arXiv 2604.06268, Section 2.2.

    Several points are the path of a run: a line through all of them, the first and the last with their labels. The
    corners name regimes and draw no borders between them: the paper gives no thresholds.

    Args:
        points: for each measurement (`conditional_entropy_token`, `mi_seq`, label): H(Z|X) in nats per token, and
            I(X;Z) in nats.
        path: where to write; the suffix chooses the format.
        upper_bound: `mi_upper_bound`, the log of the number of prompts in nats, of the last measurement.

    Raises:
        ValueError: if there is no point.
    """
    if not points:
        raise ValueError("points must hold at least one measurement, got none")
    entropies, gains = zip(*(point[:2] for point in points), strict=True)
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    # Strips above log N and below 0, where no estimate should be, keep the names of the regimes free of the data.
    axes.set_ylim(min(0, *gains) - 0.15 * upper_bound, max(upper_bound, *gains) + 0.15 * upper_bound)
    axes.set_xlim(0, max(MIN_ENTROPY_RANGE, 1.25 * max(entropies)))
    axes.axhline(upper_bound, color=GREY, linestyle="--", linewidth=1)
    grey = {"textcoords": "offset points", "color": GREY, "fontsize": "small"}
    axes.annotate("log N", (0, upper_bound), (6, -4), xycoords=("axes fraction", "data"), va="top", **grey)
    for regime, (x, y) in REGIME_CORNERS.items():
        inwards = (6 - 12 * x, 6 - 12 * y)
        aligned = {"ha": ("left", "right")[x], "va": ("bottom", "top")[y]}
        axes.annotate(regime, (x, y), inwards, xycoords="axes fraction", **aligned, **grey)
    axes.plot(entropies, gains, color=BLUE, linewidth=1.2, marker="o", markersize=4)
    axes.plot(entropies[-1:], gains[-1:], color=ORANGE, linestyle="none", marker="o", markersize=10)
    _label(axes, points[-1], points[-2] if len(points) > 1 else None, fontweight="bold")
    if len(points) > 1:
        _label(axes, points[0], points[1], fontsize="small")
    axes.set_xlabel("entropy of reasoning given its prompt, H(Z|X) (nats per token)")
    axes.set_ylabel("mutual information with the prompt, I(X;Z) (nats)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _legend(axes: Axes, lines: Sequence[Line2D], left: float) -> None:
    if lines:
        axes.legend(handles=lines, frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(left, 1.0))


def _label(axes: Axes, point: Point, neighbour: Point | None, **style: Any) -> None:
    """Writes a point's label away from the line to its neighbour, and towards the middle of the plane's height."""
    x, y, text = point
    middle = [sum(axes.get_xlim()) / 2, sum(axes.get_ylim()) / 2]
    to_right = x < middle[0] if neighbour is None else x >= neighbour[0]
    above = y < middle[1]
    axes.annotate(
        text,
        (x, y),
        (8 if to_right else -8, 6 if above else -6),
        textcoords="offset points",
        ha="left" if to_right else "right",
        va="bottom" if above else "top",
        parse_math=False,  # labels may hold a dollar sign
        **style,
    )


def _draw_dependence(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> list[Line2D]:
    """Retrieval accuracy and its chance on [0, 1], entropy on a scale at the right; the lines for one legend."""
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("retrieval accuracy")
    lines = []
    for key, label, style in (
        (RETRIEVAL_ACCURACY, "retrieval accuracy", {"color": BLUE, "linestyle": "-", "marker": "o"}),
        (RETRIEVAL_CHANCE, "chance", {"color": GREY, "linestyle": ":", "marker": "."}),
    ):
        points = _points(rows, key)
        if points:
            lines += axes.plot(*zip(*points, strict=True), label=label, linewidth=1.8, markersize=4, **style)
    entropies = [value for _, value in _points(rows, "entropy")]
    if not entropies:
        return lines
    right = axes.twinx()
    _draw(right, rows, "entropy", "entropy (right scale)", ORANGE, "--")
    # High enough that entropy stays clear of accuracies close to 1.
    right.set_ylim(0, 1.6 * max(entropies) or 1)
    right.set_ylabel("nats per token")
    right.spines["top"].set_visible(False)
    return lines + right.get_legend_handles_labels()[0]


def _draw(axes: Axes, rows: Sequence[Mapping[str, Any]], key: str, label: str, colour: str, style: str) -> None:
    points = _points(rows, key)
    if not points:
        return
    steps, values = zip(*points, strict=True)
    means = [sum(values[max(0, i - SMOOTHING + 1) : i + 1]) / min(i + 1, SMOOTHING) for i in range(len(values))]
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(steps, means, color=colour, linestyle=style, linewidth=1.8, label=label)


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value) of the rows that have a finite value."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None and math.isfinite(row[key])]


def _runs(values: torch.Tensor) -> tuple[list[int], list[int], list[int]]:
    """Value, start and length of each run of equal values."""
    distinct, counts = values.unique_consecutive(return_counts=True)
    return distinct.tolist(), (counts.cumsum(0) - counts).tolist(), counts.tolist()
