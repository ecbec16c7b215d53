"""The figure of what completions earn, early, midway and late in a run (arXiv 2604.06268, Figure 11)."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ragen2_trl.reporting.group_rewards import GroupRewards, early_middle_late
from ragen2_trl.reporting.style import BLUE, ORANGE, WIDTH, drawn_in_style

BINS = 20


@drawn_in_style
def plot_reward_distribution(records: Sequence[GroupRewards]) -> Figure:
    """Draw how rewards of completions and reward variances of groups are distributed, early, midway and late.

    Each row is of up to ten generations.

    Args:
        records: of one run, by step.

    Raises:
        ValueError: if there is none, or none with a reward.
    """
    parts = early_middle_late(records)
    rewards = [[reward for one in part for group in one.rewards for reward in group] for part in parts]
    if not any(rewards):
        raise ValueError(f"records must hold at least one reward, got {len(records)} generations without any")
    variances = [[value for one in part for value in one.variances] for part in parts]
    figure = Figure(figsize=(WIDTH, 0.9 + 1.35 * len(parts)), layout="constrained")
    panels = figure.subplots(len(parts), 2, sharex="col", sharey="col", squeeze=False)
    for column, values in enumerate((rewards, variances)):
        low, high = min(map(min, filter(None, values))), max(map(max, filter(None, values)))
        room = 0.5 * (high == low)  # a single value
        edges = [low - room + i * (high - low + 2 * room) / BINS for i in range(BINS + 1)]
        for axes, shown in zip(panels[:, column], values, strict=True):
            _draw(axes, shown, edges)
    for axes, part in zip(panels[:, 0], parts, strict=True):
        first, last = part[0].step, part[-1].step
        axes.set_ylabel(f"step\n{first}" if first == last else f"steps\n{first} to {last}")
    for axes, title in zip(panels[0], ("share of completions", "share of groups"), strict=True):
        axes.set_title(title)
    for axes, below in zip(panels[-1], ("reward\n(dashed: mean)", "reward variance\n(dashed: mean)"), strict=True):
        axes.set_xlabel(below)
    spans = "; ".join(axes.get_ylabel().replace("\n", " ") for axes in panels[:, 0])
    figure.set_label(f"Rewards of completions and reward variances of groups: {spans}.")
    return figure


def _draw(axes: Axes, values: Sequence[float], edges: Sequence[float]) -> None:
    if not values:
        return
    axes.hist(values, bins=edges, weights=[1 / len(values)] * len(values), color=BLUE)
    axes.axvline(sum(values) / len(values), color=ORANGE, linestyle="--", linewidth=1.4)
