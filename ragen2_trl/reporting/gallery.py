"""The figures of a run, by the names that they have in its folder, on its card and in its report."""

from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from ragen2_trl.reporting.plots import (
    plot_compute,
    plot_matrix,
    plot_quadrant,
    plot_reward_variance,
    plot_training,
    save_figure,
)
from ragen2_trl.reporting.run import FIRST_TURN, Run, SavedMeasurement, read_measurement

NAMES = ("training", "quadrant", "cross_scores", "reward_variance", "compute")


def draw_figures(run: Run, folder: Path) -> None:
    """Write each figure that the run has data for as PNG and SVG, and remove what an earlier run left of others."""
    drawn = dict(figures_of(run))
    for name in NAMES:
        if name in drawn:
            save_figure(drawn[name], folder / name)
        else:
            for suffix in (".png", ".svg"):
                (folder / name).with_suffix(suffix).unlink(missing_ok=True)


def figures_of(run: Run) -> Iterator[tuple[str, Figure]]:
    """(name, figure) for all that there are data for."""
    if run.points("reward"):
        yield "training", plot_training(run.log_history, run.success_metric)
    if run.points(f"{FIRST_TURN}/mi_seq"):
        yield "quadrant", quadrant_figure(run)
    if run.measurements:
        yield from measurement_figures(run, read_measurement(run.measurements[-1]))
    if run.points("snr/update_compute_fraction"):
        yield "compute", plot_compute(run.log_history)


def measurement_figures(run: Run, measurement: SavedMeasurement) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of one of a run's measurements."""
    yield "cross_scores", plot_matrix(measurement)
    kept = None if measurement.kept is None else measurement.kept.tolist()
    yield (
        "reward_variance",
        plot_reward_variance(measurement.scores.tolist(), kept, run.settings.get("snr_score", "reward_variance")),
    )


def quadrant_figure(run: Run) -> Figure:
    """The path of a run that has been measured at least once."""
    gains = dict(run.points(f"{FIRST_TURN}/mi_seq"))
    entropies = run.points(f"{FIRST_TURN}/conditional_entropy_token")
    points = [(entropy, gains[step], f"step {step}") for step, entropy in entropies if step in gains]
    return plot_quadrant(points, run.points(f"{FIRST_TURN}/mi_upper_bound")[-1][1])
