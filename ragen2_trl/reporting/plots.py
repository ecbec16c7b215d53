"""Figures of a run, readable in print and for colour-blind people."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart for every kind of colour vision.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#808080"
SMOOTHING = 10  # log rows


def plot_training(log_history: Sequence[Mapping[str, Any]], path: Path, success_metric: str | None = None) -> None:
    """Draw reward and success above, kept fraction, zero-variance fraction and update compute below.

    Thin lines are single log rows, thick ones running means over up to 10 of them.

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
    # A figure of its own, without pyplot: no global state, no display needed.
    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _draw(above, rows, "reward", "reward", BLUE, "-")
    if success_metric is not None:
        _draw(above, rows, success_metric, "success", ORANGE, "--")
    above.set_ylabel("training reward")
    _draw(below, rows, "snr/kept_fraction", "groups kept", GREEN, "-")
    _draw(below, rows, "snr/zero_variance_fraction", "groups without variance", GREY, ":")
    _draw(below, rows, "snr/update_compute_fraction", "update compute", BLUE, "--")
    below.set_ylim(0, 1)
    below.set_ylabel("fraction")
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, rows: Sequence[Mapping[str, Any]], key: str, label: str, colour: str, style: str) -> None:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None and math.isfinite(row[key])]
    if not points:
        return
    steps, values = zip(*points, strict=True)
    means = [sum(values[max(0, i - SMOOTHING + 1) : i + 1]) / min(i + 1, SMOOTHING) for i in range(len(values))]
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(steps, means, color=colour, linestyle=style, linewidth=1.8, label=label)
