"""Figures of the paper (arXiv 2604.06268) that follow its proxies through a run, or through several.

Figure 12 (format validity), Figure 13 (arrows from the start to the end of runs) and Figure 14 (the proxies).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ragen2_trl.reporting.measurement_plots import draw_path
from ragen2_trl.reporting.plots import FEW, FRACTIONS, Rows, Series, number_steps, points_of
from ragen2_trl.reporting.style import (
    BLUE,
    GREEN,
    LINE_COLOURS,
    LINE_STYLES,
    MARKERS,
    ORANGE,
    REFERENCE,
    WIDTH,
    drawn_in_style,
    make_panels,
    plain_name,
)

SCOPES = {  # log prefix to name and look
    "mi/first_turn": ("first turns", BLUE, "-", "o"),
    "mi/trajectory": ("all turns, each by itself", ORANGE, "--", "s"),
    "mi/trajectory_reference": ("all turns together (reference)", GREEN, "-.", "^"),
}
# The six of Table 1: title, key, key of what guessing gives or of the bound.
PROXIES = (
    ("retrieval accuracy", "retrieval_accuracy", "retrieval_chance"),
    ("own prompt among the best 4", "retrieval_accuracy@4", "retrieval_chance@4"),
    ("MI (nats)", "mi_seq", "mi_upper_bound"),
    ("MI per token, tempered", "mi_token_tempered", None),
    ("MI z-score", "mi_zscore_seq", None),
    ("MI z-score, running", "mi_zscore_ema_seq", None),
)
VALIDITY = "mi/valid_thinking_rate"
INFORMATION, ENTROPY = "mi/first_turn/mi_seq", "mi/first_turn/conditional_entropy_token"
INFORMATION_LABEL, ENTROPY_LABEL = "I(X;Z) (nats)", "H(Z|X) (nats per token)"


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
def plot_proxies(log_history: Rows) -> Figure:
    """Draw the six proxies of the mutual information over a run (paper, Table 1 and Figure 14).

    Dotted is what guessing gives, or the bound; where it differs between scopes, each has its own.

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
    for axes, (title, name, reference) in zip(panels, PROXIES, strict=True):
        for scope in scopes:
            _, colour, line, marker = SCOPES[scope]
            _draw_measured(
                axes, points_of(log_history, f"{scope}/{name}"), color=colour, linestyle=line, marker=marker
            )
            if reference and (points := points_of(log_history, f"{scope}/{reference}")):
                axes.plot(*zip(*points, strict=True), **REFERENCE | {"color": colour})
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
def plot_validity(log_history: Rows) -> Figure:
    """Draw the share of turns with valid thinking against mutual information and against entropy (paper, Figure 12).

    A path through all measurements, the first and the last with their steps. A collapse with valid reasoning runs
    straight down on the right; one of the format runs to the left.

    Args:
        log_history: `trainer.state.log_history`.

    Raises:
        ValueError: if no row has all three.
    """
    path = path_of(log_history)
    if not path:
        raise ValueError(f"log_history has {len(log_history)} rows, but none with {VALIDITY!r} and a measurement.")
    figure, axes_of = make_panels(2, height=2.5)
    steps, valid, gains, entropies = zip(*path, strict=True)
    for axes, label, drawn in zip(axes_of, (INFORMATION_LABEL, ENTROPY_LABEL), (gains, entropies), strict=True):
        axes.set_xlim(-0.3, 1.3)  # with room for the names of both ends
        axes.set_xticks([i / 5 for i in range(6)])
        room = 0.15 * (max(drawn) - min(0, *drawn)) or 0.1
        axes.set_ylim(min(0, *drawn) - room, max(drawn) + room)
        axes.set_ylabel(label)
        names = [f"step {step:.0f}" for step in steps]
        draw_path(axes, list(zip(valid, drawn, names, strict=True)))
    axes_of[-1].set_xlabel("share of turns with valid thinking")
    figure.set_label(
        f"Valid thinking against mutual information and entropy, from step {steps[0]:.0f} ({valid[0]:.0%} valid) to "
        f"step {steps[-1]:.0f} ({valid[-1]:.0%})."
    )
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
    for axes, label in ((left, INFORMATION_LABEL), (right, ENTROPY_LABEL)):
        axes.margins(0.12)
        axes.set_xlim(*_with_room(*axes.get_xlim()))
        axes.set_xlabel(label)
    left.set_ylabel(f"{height_label} (the marker is the start)")
    figure.legend(handles, names.values(), loc="outside upper left", ncols=columns, handlelength=3.2, borderpad=0.6)
    figure.set_label(f"From the first to the last measurement of {', '.join(names.values())}: {height_label}.")
    return figure


def path_of(log_history: Rows) -> list[tuple[float, float, float, float]]:
    """(step, share of valid thinking, I(X;Z), H(Z|X)) of each measurement that has all."""
    valid, gains, entropies = (dict(points_of(log_history, key)) for key in (VALIDITY, INFORMATION, ENTROPY))
    return [(step, valid[step], gains[step], entropies[step]) for step in valid if step in gains and step in entropies]


def arrow_of(log_history: Rows, height: Series) -> Arrow | None:
    """A run's arrow, where it has two measurements; at each the mean of the ten values of `height` nearest to it."""
    gains, entropies = (dict(points_of(log_history, key)) for key in (INFORMATION, ENTROPY))
    steps = [step for step in gains if step in entropies]
    if len(steps) < 2 or not height:
        return None
    ends = (steps[0], steps[-1])
    first, last = (_around(height, step) for step in ends)
    information, entropy = ((values[ends[0]], values[ends[1]]) for values in (gains, entropies))
    return Arrow(information, entropy, (first, last))


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
