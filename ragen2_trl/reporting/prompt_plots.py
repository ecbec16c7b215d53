"""Figures of prompts that were chosen before they were sampled: what was expected of them, and what came."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ragen2_trl.reporting.group_rewards import GroupRewards
from ragen2_trl.reporting.plots import FRACTIONS, ZERO_VARIANCE, Line, Rows, draw_line, number_steps, points_of
from ragen2_trl.reporting.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    REFERENCE,
    WIDTH,
    drawn_in_style,
    legend_above,
    make_panels,
)

PREDICTED, REALISED = "snr/predicted_variance", "snr/realised_variance"
CORRELATION, SKIPPED = "snr/prediction_rank_correlation", "snr/skipped_prompts"
BINS = 10


@drawn_in_style
def plot_prompts(log_history: Rows) -> Figure:
    """Draw, step by step, the reward variance that was expected of the prompts sampled and what they had, how well
    the two are in the same order, the share of zero-variance groups, and how many candidates were passed over.

    Thin and thick lines as in `plot_training`.

    Args:
        log_history: `trainer.state.log_history` of a run with `snr_prompt_selection`.

    Raises:
        ValueError: if no row has a prediction.
    """
    if not points_of(log_history, PREDICTED):
        raise ValueError(
            f"log_history has {len(log_history)} rows, but none has a finite {PREDICTED!r}, "
            "which trainers with snr_prompt_selection log."
        )
    panels = [
        ("reward\nvariance", (0, None), [("expected", PREDICTED, ORANGE, "--"), ("found", REALISED, BLUE, "-")]),
        ("fraction", FRACTIONS, [("zero-variance groups", ZERO_VARIANCE[0], GREY, "-")]),
        ("rank\ncorrelation", (None, None), [("expected and found, latest 256 groups", CORRELATION, BLUE, "-")]),
        ("prompts", (0, None), [("passed over", SKIPPED, GREEN, "-")]),
    ]
    shown = [panel for panel in panels if any(points_of(log_history, key) for _, key, *_ in panel[2])]
    figure, axes_of = make_panels(len(shown), height=1.5)
    for axes, (unit, limits, lines) in zip(axes_of, shown, strict=True):
        for label, key, colour, style in lines:
            draw_line(axes, Line(label, points_of(log_history, key), colour, style))
        axes.set_ylim(*limits)
        axes.set_ylabel(unit)
        legend_above(axes)
    number_steps(axes_of[-1])
    last = max(step for step, _ in points_of(log_history, PREDICTED))
    figure.set_label(f"Prompts chosen by expected reward variance, up to step {last:.0f}.")
    return figure


@drawn_in_style
def plot_calibration(records: Sequence[GroupRewards]) -> Figure:
    """Draw the reward variance of groups over what was expected of their prompts.

    Points are means of bins of equally many groups, with 95 % intervals. On the dotted line, expectations came true.

    Args:
        records: of one run; those without predictions are left out.

    Raises:
        ValueError: if none has a prediction.
    """
    pairs = [
        pair for one in records if one.predicted is not None for pair in zip(one.predicted, one.variances, strict=True)
    ]
    if not pairs:
        raise ValueError(f"records must hold at least one prediction, got {len(records)} generations without any")
    expected, found = np.array(sorted(pairs)).T
    bins = [part for part in np.array_split(np.arange(len(pairs)), BINS) if len(part)]
    means = np.array([(expected[part].mean(), found[part].mean()) for part in bins])
    errors = [1.96 * found[part].std(ddof=1) / len(part) ** 0.5 if len(part) > 1 else 0.0 for part in bins]
    figure = Figure(figsize=(WIDTH, 0.62 * WIDTH), layout="constrained")
    axes = figure.subplots()
    largest = 1.08 * max(float((means[:, 1] + errors).max()), float(means.max()), 1e-6)
    axes.plot([0, largest], [0, largest], label="as expected", **REFERENCE)
    axes.errorbar(*means.T, yerr=errors, color=BLUE, marker="o", linestyle="none", label="groups", capsize=2)
    axes.set_xlim(0, largest)
    axes.set_ylim(0, largest)
    axes.set_xlabel("expected reward variance")
    axes.set_ylabel("reward variance")
    legend_above(axes)
    figure.set_label(f"Reward variance of {len(pairs)} groups over what was expected of their prompts.")
    return figure
