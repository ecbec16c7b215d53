"""Which figures a run has data for, by the names that they have in its folder, on its card and in its report."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

from markupsafe import Markup
from matplotlib.figure import Figure

from ragen2_trl.metrics import FIRST_TURN, INFORMATION, REWARD
from ragen2_trl.record.run import Run
from ragen2_trl.record.saved_measurement import SavedMeasurement, read_measurement
from ragen2_trl.report.card import FIGURES, caption
from ragen2_trl.report.measurement_plots import (
    plot_matrix,
    plot_quadrant,
    plot_reward_variance,
)
from ragen2_trl.report.plots import (
    arrow_of,
    plot_arrows,
    plot_held_out,
    plot_proxies,
    plot_training,
    points_of,
    with_steps,
)
from ragen2_trl.report.style import save_figure, svg


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
    rows = with_steps(run.rows)
    if run.held_out:
        yield "held_out", caption("held_out", run), plot_held_out(run.held_out)
    if rows and not run.is_diagnosed:
        yield "training", caption("training", run), plot_training(rows, run.success_metric)
    for name, figure in _quadrant(run):
        yield name, caption(name, run), figure
    if len(points_of(rows, INFORMATION)) > 1:
        yield "proxies", caption("proxies", run), plot_proxies(rows)
    for measurement in measurements:
        for name, figure in _matrix(measurement):
            yield name, caption(name, run, measurement.step), figure
    for measurement in measurements[-1:]:
        for name, figure in _groups(run, measurement):
            yield name, caption(name, run, measurement.step), figure


def measurement_figures(run: Run, measurement: SavedMeasurement) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of what one of a run's measurements says: the path up to it, its matrix, its groups."""
    return chain(_quadrant(run), _matrix(measurement), _groups(run, measurement))


def arrows_of(runs: Mapping[str, Run]) -> Figure | None:
    """Runs by name from their first to their last measurement; `None` with fewer than two that have both.

    Over success, or over reward where none of them has a success rate.
    """
    rows = {name: with_steps(run.rows) for name, run in runs.items()}
    with_success = any(run.success_metric for run in runs.values())
    heights = {name: run.success_metric if with_success else REWARD for name, run in runs.items()}
    arrows = {name: arrow for name in runs if (arrow := arrow_of(rows[name], points_of(rows[name], heights[name])))}
    return plot_arrows(arrows, "success" if with_success else "reward") if len(arrows) > 1 else None


class Labelled(Protocol):
    """A run with the name that a page gives it."""

    @property
    def label(self) -> str: ...
    @property
    def run(self) -> Run: ...


def arrows_svg(parts: Sequence[Labelled]) -> Markup | None:
    """`arrows_of` for a page."""
    figure = arrows_of({part.label: part.run for part in parts})
    return None if figure is None else Markup(svg(figure, "arrows"))


def _quadrant(run: Run) -> Iterator[tuple[str, Figure]]:
    entropies, gains, bounds = (
        dict(points_of(run.rows, f"{FIRST_TURN}/{key}"))
        for key in ("conditional_entropy_token", "mi_seq", "mi_upper_bound")
    )
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
        yield "reward_variance", plot_reward_variance(measurement.scores.tolist(), kept, _score(run))


def _score(run: Run) -> str:
    """What groups were ranked by, or would have been."""
    return str(run.settings.get("snr_score", "reward_variance"))
