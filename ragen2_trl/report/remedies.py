"""Which remedy would pay off, as a web page: the table of remedies and how groups fared."""

from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from ragen2_trl.record.completions import CompletionLog
from ragen2_trl.remedies import WhatIf, live_groups
from ragen2_trl.report.style import BLUE, GREY, drawn_in_style, html_templates, make_panels, svg

TEMPLATE = "what_if.html.jinja"
BARS = 21  # of the histogram


def page(found: WhatIf) -> str:
    """One HTML page that works offline: advice, problems, the table, and a histogram of group means."""
    figure = Markup(svg(plot_group_means(found.log))) if np.isfinite(found.log.rewards).any() else None
    return html_templates().get_template(TEMPLATE).render(found=found, name=Path(found.log.name).name, figure=figure)


@drawn_in_style
def plot_group_means(log: CompletionLog) -> Figure:
    """Draw how many groups have which mean reward, those whose rewards vary apart from the others."""
    known = np.isfinite(log.rewards).any(axis=1)
    means, live = np.nanmean(log.rewards[known], axis=1), live_groups(log)[known]
    figure, (axes,) = make_panels(1, 2.4)
    figure.set_label("Groups by their mean reward")
    axes.hist(
        [means[~live], means[live]],
        bins=BARS,
        stacked=True,
        color=[GREY, BLUE],
        label=["all rewards equal", "rewards vary"],
    )
    axes.set_xlabel("mean reward of a group")
    axes.set_ylabel("groups")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure
