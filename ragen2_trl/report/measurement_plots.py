"""Figures of what a run has measured: how its prompts explain its reasoning, and rewards of groups.

Figures of what it logs at each step are in `plots`, the look of all of them is in `style`.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ragen2_trl.messages import counted
from ragen2_trl.report.style import (
    BLUE,
    GREEN,
    GUIDE_LINE,
    ORANGE,
    WIDTH,
    drawn_in_style,
    legend_above,
    make_panels,
    plain_name,
    whole_numbers,
)

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

LIGHT_GREY = "#B8B8B8"  # groups left out, far lighter than kept ones in greyscale too
FEW_GROUPS = 64  # that are told apart by a gap between them

LOOKS = ((BLUE, "-"), (ORANGE, "--"), (GREEN, "-."))  # early, midway and late

Point: TypeAlias = tuple[float, float, str]


class Matrix(Protocol):
    """What `plot_matrix` needs of a measurement."""

    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def cross_logps(self) -> torch.Tensor: ...
    @property
    def lengths(self) -> torch.Tensor: ...
    @property
    def prompt_index(self) -> torch.Tensor: ...


@drawn_in_style
def plot_matrix(measurement: Matrix) -> Figure:
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
        cmap="viridis",
        vmin=min(low, -MIN_COLOUR_RANGE),
        vmax=0,
        aspect="auto",
        interpolation="none",
        extent=(0.5, columns + 0.5, rows + 0.5, 0.5),  # numbers from 1
    )
    own, first, count = _runs(measurement.prompt_index[order])
    for column, row, height in zip(own, first, count, strict=True):
        frame = Rectangle((column + 0.5, row + 0.5), 1, height, fill=False, edgecolor=ORANGE, linewidth=1.2)
        axes.add_patch(frame)
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

    Several points are the path of a run: a line through all of them, the first and the last with their labels. The
    corners name regimes and draw no borders between them: the paper gives no thresholds.

    Args:
        points: for each measurement (`conditional_entropy_token`, `mi_seq`, label): H(Z|X) in nats per token, and
            I(X;Z) in nats.
        upper_bound: `mi_upper_bound`, the log of the number of prompts in nats, of the last measurement.

    Raises:
        ValueError: if there is no point.
    """
    if not points:
        raise ValueError("points must hold at least one measurement, got none")
    entropies, gains = zip(*(point[:2] for point in points), strict=True)
    figure = Figure(figsize=(WIDTH, 5), layout="constrained")
    axes = figure.subplots()
    # Strips above log N and below 0, where no estimate should be, keep the names of the regimes free of the data.
    axes.set_ylim(min(0, *gains) - 0.15 * upper_bound, max(upper_bound, *gains) + 0.15 * upper_bound)
    largest = max(MIN_ENTROPY_RANGE, 1.25 * max(entropies))
    axes.set_xlim(-0.16 * largest, largest)  # room for a label left of a low entropy
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= largest])
    axes.axhline(upper_bound, **GUIDE_LINE)
    grey: dict[str, Any] = {"textcoords": "offset points", "color": "#606060", "fontsize": 10}
    above: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "center", "va": "bottom"}
    axes.annotate("log N", (0.5, upper_bound), (0, 4), **above, **grey)
    for regime, (x, y) in REGIME_CORNERS.items():
        inwards = (6 - 12 * x, 6 - 12 * y)
        aligned: dict[str, Any] = {"ha": ("left", "right")[x], "va": ("bottom", "top")[y]}
        axes.annotate(regime, (x, y), inwards, xycoords="axes fraction", **aligned, **grey)
    draw_path(axes, points)
    axes.set_xlabel("entropy of reasoning given its prompt,\nH(Z|X) (nats per token)")
    axes.set_ylabel("mutual information with the prompt,\nI(X;Z) (nats)")
    figure.set_label(
        f"Regime of {plain_name(points[-1][2])}: H(Z|X) = {entropies[-1]:.2f} nats per token, "
        f"I(X;Z) = {gains[-1]:.2f} of at most {upper_bound:.2f} nats."
    )
    return figure


@drawn_in_style
def plot_reward_variance(
    scores: Sequence[float], kept: Sequence[bool] | None = None, score: str = "reward_variance"
) -> Figure:
    """Draw how the signal of a batch is spread over its groups, and where the filter cut.

    Above, the scores of the groups from the largest down, kept ones dark; below, the share of the summed score that
    the groups up to there hold, left out where there is no such share (all scores are 0, or some below it).

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
    finite = [value if math.isfinite(value) else 0.0 for value in scores]
    ranked = _rank(finite, [True] * len(finite) if kept is None else kept)
    values = [value for value, _ in ranked]
    count, num_kept, total = len(values), sum(mark for _, mark in ranked), sum(values)
    name = plain_name(score.replace("_", " "))
    has_shares = min(values) >= 0 and total > 0
    figure, axes_of = make_panels(2 if has_shares else 1, height=2.1)
    above, below = axes_of[0], axes_of[-1]
    groups = counted(count, "group")
    shown = groups if kept is None else f"kept: {num_kept} of {groups}"
    _bars(above, [value if mark else 0 for value, mark in ranked], shown, BLUE)
    if num_kept < count:
        _bars(above, [0 if mark else value for value, mark in ranked], f"left out: {count - num_kept}", LIGHT_GREY)
    above.set_ylabel(name)
    if not any(values):
        above.set(ylim=(0, 1), yticks=[0])
        above.text(0.5, 0.5, f"the {name} of all groups is 0", ha="center", va="center", transform=above.transAxes)
    cut_label = None
    if has_shares:
        shares = [0.0, *(part / total for part in accumulate(values))]
        below.plot([i + 0.5 for i in range(count + 1)], shares, color=BLUE, label="cumulative share")
        below.set_ylim(-0.03, 1.03)
        below.set_ylabel(f"share of summed\n{name}")
        cut_label = f"cut: kept groups hold {sum(value for value, mark in ranked if mark) / total:.0%}"
    cuts = _cuts(ranked)
    # More than the two ends of one block: kept by something else than this score.
    for number, cut in enumerate(cuts if len(cuts) <= 2 else []):
        for axes in axes_of:
            label = cut_label if axes is below and number == 0 else None
            axes.axvline(cut, color=ORANGE, linestyle="--", linewidth=1.4, label=label)
    for axes in axes_of:
        legend_above(axes)
    below.set_xlim(0.5, count + 0.5)
    below.xaxis.set_major_locator(whole_numbers())
    below.set_xlabel(f"group, from the largest {name} down")
    figure.set_label(f"{name.capitalize()} of {groups}" + ("." if kept is None else f"; {shown}."))
    return figure


def _rank(scores: Sequence[float], kept: Sequence[bool]) -> list[tuple[float, bool]]:
    """Groups from the largest score down; of equal ones the kept first or last, whichever needs fewer cuts."""
    groups = list(zip(scores, map(bool, kept), strict=True))
    ranked = [sorted(groups, key=lambda group: (-group[0], group[1] != first)) for first in (True, False)]
    return min(ranked, key=lambda ranked: len(_cuts(ranked)))


def _cuts(ranked: Sequence[tuple[float, bool]]) -> list[float]:
    """Where kept groups end or begin, on the axis where the first group is at 1."""
    return [i + 0.5 for i in range(1, len(ranked)) if ranked[i][1] != ranked[i - 1][1]]


def _bars(axes: Axes, heights: Sequence[float], label: str, colour: str) -> None:
    """Bars at 1, 2, ... as one shape, which stays small with hundreds of groups."""
    if len(heights) > FEW_GROUPS:
        edges = [i + 0.5 for i in range(len(heights) + 1)]
    else:
        edges = [i + side for i in range(1, len(heights) + 1) for side in (-0.4, 0.4)]
        heights = [height for value in heights for height in (value, 0)][:-1]  # back to 0 between two bars
    axes.stairs(heights, edges, fill=True, color=colour, linewidth=0, label=label)


def draw_path(axes: Axes, points: Sequence[Point]) -> None:
    """A line through measurements, the first and the last with their labels, in axes whose limits are set."""
    across, up = zip(*(point[:2] for point in points), strict=True)
    axes.plot(across, up, color=BLUE, linewidth=1.2, marker="o", markersize=4)
    axes.plot(across[-1:], up[-1:], color=ORANGE, linestyle="none", marker="o", markersize=10)
    first, last = points[0], points[-1]
    if len(points) > 1 and _are_close(axes, first, last):
        last = (*last[:2], f"{first[2]} to {last[2]}")
    elif len(points) > 1:
        _label(axes, first, points[1], fontsize=10)
    _label(axes, last, points[-2] if len(points) > 1 else None, fontweight="bold")


def _are_close(axes: Axes, one: Point, other: Point) -> bool:
    """Whether the labels of two points would lie on each other."""
    widths = [high - low for low, high in (axes.get_xlim(), axes.get_ylim())]
    return abs(one[0] - other[0]) < 0.25 * widths[0] and abs(one[1] - other[1]) < 0.06 * widths[1]


def _label(axes: Axes, point: Point, neighbour: Point | None, **style: Any) -> None:
    """Writes a point's label away from the line to its neighbour, and towards the middle of the plane's height."""
    x, y, text = point
    middle = [sum(axes.get_xlim()) / 2, sum(axes.get_ylim()) / 2]
    to_right = x < middle[0] if neighbour is None else x >= neighbour[0]
    above = y < middle[1]
    axes.annotate(
        plain_name(text, max_chars=24),
        (x, y),
        (8 if to_right else -8, 6 if above else -6),
        textcoords="offset points",
        ha="left" if to_right else "right",
        va="bottom" if above else "top",
        **style,
    )


def _runs(values: torch.Tensor) -> tuple[list[int], list[int], list[int]]:
    """Value, start and length of each run of equal values."""
    distinct, counts = values.unique_consecutive(return_counts=True)
    return distinct.tolist(), (counts.cumsum(0) - counts).tolist(), counts.tolist()
