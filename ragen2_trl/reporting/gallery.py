"""The figures of a run, by the names that they have in its folder, on its card and in its report."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from matplotlib.figure import Figure

from ragen2_trl.reporting.card import FIGURES, caption
from ragen2_trl.reporting.gradient_plots import plot_gradients
from ragen2_trl.reporting.held_out_plots import plot_held_out
from ragen2_trl.reporting.plots import (
    COMPUTE,
    plot_compute,
    plot_matrix,
    plot_quadrant,
    plot_reward_variance,
    plot_training,
    points_of,
    save_figure,
    with_steps,
)
from ragen2_trl.reporting.run import FIRST_TURN, Run
from ragen2_trl.reporting.saved_gradients import read_gradients
from ragen2_trl.reporting.saved_measurement import SavedMeasurement, read_measurement


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
    if rows:
        yield "training", caption("training", run), plot_training(rows, run.success_metric)
    if run.held_out:
        yield "held_out", caption("held_out", run), plot_held_out(run.held_out)
    for name, figure in _quadrant(run):
        yield name, caption(name, run), figure
    for measurement in measurements:
        for name, figure in _matrix(measurement):
            yield name, caption(name, run, measurement.step), figure
    for measurement in measurements[-1:]:
        for name, figure in _groups(run, measurement):
            yield name, caption(name, run, measurement.step), figure
    if run.gradients:
        yield "gradients", caption("gradients", run), plot_gradients([read_gradients(path) for path in run.gradients])
    if points_of(rows, COMPUTE):
        yield "compute", caption("compute", run), plot_compute(rows)


def measurement_figures(run: Run, measurement: SavedMeasurement) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of what one of a run's measurements says: the path up to it, its matrix, its groups."""
    return chain(_quadrant(run), _matrix(measurement), _groups(run, measurement))


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
