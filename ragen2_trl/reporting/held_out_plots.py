"""Success on held-out tasks over the steps of a training, as a figure."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from ragen2_trl.reporting.held_out import Curve
from ragen2_trl.reporting.style import (
    LINE_COLOURS,
    LINE_STYLES,
    MARKERS,
    REFERENCE,
    drawn_in_style,
    make_panels,
    plain_name,
    whole_numbers,
)

FEW = 24  # points of a line, up to which each is marked
LETTERS = 60  # of a row of the legend


@drawn_in_style
def plot_held_out(curves: Mapping[str, Curve]) -> Figure:
    """Draw success on held-out tasks against optimizer steps, with the band of its 95 % interval, one line a task.

    A dotted line is the success of a player who guesses, where evaluations have it.

    Args:
        curves: by task, those of `Run.held_out`.

    Raises:
        ValueError: if there is no curve.
    """
    if not curves:
        raise ValueError("curves must hold at least one task, got none")
    names = [
        f"{plain_name(curve.task)}, best {curve.peak.success:.0%} at step {curve.peak.step}"
        for curve in curves.values()
    ]
    columns = max(1, min(len(names), LETTERS // (max(map(len, names)) + 5)))
    figure, (axes,) = make_panels(1, height=2.4, extra=0.6 + 0.2 * -(-len(names) // columns))
    for number, (curve, name) in enumerate(zip(curves.values(), names, strict=True)):
        steps = [point.step for point in curve.points]
        success, low, high = zip(*((point.success, point.low, point.high) for point in curve.points), strict=True)
        colour = LINE_COLOURS[number % len(LINE_COLOURS)]
        marker = MARKERS[number % len(MARKERS)] if len(steps) <= FEW else None
        axes.plot(steps, success, LINE_STYLES[number % len(LINE_STYLES)], color=colour, marker=marker, label=name)
        if len(steps) > 1:
            axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
        else:  # a band of no width
            axes.vlines(steps, low, high, color=colour)
        if curve.floor is not None:
            axes.axhline(curve.floor, **REFERENCE | {"color": colour, "zorder": 1})
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
