"""The figure of gradients by reward variance (arXiv 2604.06268, Figure 3)."""

import math
from collections.abc import Callable, Sequence

from matplotlib.figure import Figure

from ragen2_trl.instrument.gradients import WHOLE, BucketGradients, GradientMeasurement
from ragen2_trl.reporting.style import (
    BLUE,
    GREEN,
    MARKERS,
    ORANGE,
    REFERENCE,
    drawn_in_style,
    legend_above,
    make_panels,
    whole_numbers,
)

LOOKS = ((BLUE, "-"), (ORANGE, "--"), (GREEN, "-."))

Value = Callable[[BucketGradients], float]


@drawn_in_style
def plot_gradients(measurements: Sequence[GradientMeasurement]) -> Figure:
    """Draw gradients of the mean sample of each bucket of reward variance, early, midway and late in a run.

    From above: norm of the task's gradient; the same without its noise (0 where that estimate is negative); norms of
    the regularisers, summed as in the paper, where the loss has any; cosine between the gradients of the two halves of
    a bucket.

    Args:
        measurements: of one run, in the order of their steps; the first, the middle and the last are drawn.

    Raises:
        ValueError: if there is none.
    """
    if not measurements:
        raise ValueError("measurements must hold at least one measurement of gradients, got none")
    middle = (len(measurements) - 1) // 2
    shown = [measurements[i] for i in sorted({0, middle, len(measurements) - 1})]
    panels: list[tuple[str, Value]] = [
        ("task:\nnorm", lambda bucket: bucket.parts["task"][WHOLE].norm),
        ("task: norm\nless noise", _debiased_norm),
        ("task: cosine\nof halves", lambda bucket: bucket.parts["task"][WHOLE].half_cosine),
    ]
    if any(len(one.whole.parts) > 1 for one in shown):
        panels.insert(2, ("regularisers:\nnorm", _regularisers))
    figure, axes_of = make_panels(len(panels), height=1.5)
    for axes, (label, value) in zip(axes_of, panels, strict=True):
        for (colour, line), marker, one in zip(LOOKS, MARKERS, shown, strict=False):
            numbers = range(1, len(one.buckets) + 1)
            look = {"color": colour, "linestyle": line, "marker": marker}
            axes.plot(numbers, [value(bucket) for bucket in one.buckets], label=f"step {one.step}", **look)
        axes.set_ylabel(label)
        if "cosine" in label:
            axes.axhline(0, **REFERENCE)
        else:
            axes.set_ylim(bottom=0)
    legend_above(axes_of[0])
    axes_of[-1].set_xlabel("bucket, from the lowest reward variance up")
    axes_of[-1].xaxis.set_major_locator(whole_numbers())
    steps = ", ".join(str(one.step) for one in shown)
    figure.set_label(f"Gradients of the mean sample by reward variance at steps {steps}.")
    return figure


def _debiased_norm(bucket: BucketGradients) -> float:
    return math.sqrt(max(0.0, bucket.parts["task"][WHOLE].squared_norm_debiased))


def _regularisers(bucket: BucketGradients) -> float:
    return sum(statistics[WHOLE].norm for part, statistics in bucket.parts.items() if part != "task")
