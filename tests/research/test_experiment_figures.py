"""Figures of experiments: readable in grey print and without all colours, on the axes that were asked for."""

from pathlib import Path

import pytest
from experiment_results import curves_of, write_results

from research.drawing import MOST_SEEDS, looks
from research.figures import draw, validate
from research.measures import COSTS, read_finished
from research.page import read_grid
from research.plan import read_experiment
from research.store import Store

FOLDER = Path(__file__).parents[2] / "research" / "experiments"


def figure_of(folder, name, number=0, seeds=100, simulate=curves_of, ran=(), **changes):
    """One of an experiment's figures, once some of its seeds have run, maybe at some levels alone."""
    experiment = read_experiment(FOLDER / f"{name}.yaml")
    spec = {**experiment.figures[number], **changes}
    where = (spec.get("where", {}) | dict(ran)).items()
    planned_runs = [
        planned for planned in experiment.planned_runs() if planned.seed <= seeds and where <= planned.levels.items()
    ]
    write_results(folder, planned_runs, simulate)
    finished = read_finished(Store(folder), [planned.key for planned in planned_runs])
    return draw(read_grid(experiment, finished, "tiny", False), spec)


def means(axes):
    return [line for line in axes.lines if not line.get_label().startswith("_")]


def seeds_in(axes):
    return len(axes.lines) - len(means(axes))


def test_looks_differ_by_dashes_or_marks_alone():
    seen = [(str(look["linestyle"]), look["marker"]) for look in looks()]
    assert len(set(seen)) == len(seen) >= 14


def test_lines_are_told_apart_without_colour_also_over_costs(tmp_path):
    figure = figure_of(tmp_path, "ours2", 1)
    assert [axes.get_xlabel() for axes in figure.axes] == ["CPU time (s)", "FLOPs of the update"]
    for axes in figure.axes:
        marked = [line.get_marker() for line in means(axes)]
        assert len(set(marked)) == len(marked) == 6 and not {"", "None", None} & set(marked)
    (legend,) = figure.legends
    assert [handle.get_marker() for handle in legend.get_lines()] == marked


def test_the_names_of_lines_fit_into_the_figure(tmp_path):
    figure = figure_of(tmp_path, "ours2")
    figure.canvas.draw()
    (legend,) = figure.legends
    assert legend.get_window_extent().x1 <= figure.bbox.x1


def test_a_legend_of_many_rows_takes_no_height_from_the_panels(tmp_path):
    figure = figure_of(tmp_path, "impossible", seeds=111)
    figure.canvas.draw()
    assert len(figure.legends[0].get_texts()) == 6
    assert min(axes.get_window_extent().height for axes in figure.axes) > 1.5 * figure.dpi


def test_lines_have_their_names_where_the_first_panel_is_empty(tmp_path):
    figure = figure_of(tmp_path, "mechanism", seeds=301, ran={"beta": "0.1"})
    assert [one.get_text() for one in figure.legends[0].get_texts()] == ["all", "with variance", "as many at random"]


def test_many_seeds_are_a_band_alone(tmp_path):
    for name, number, methods, thin in (("tab7", 1, 4, 0), ("tab6", 1, 4, 20)):
        for axes in figure_of(tmp_path / name, name, number).axes:
            assert len(means(axes)) == len(axes.collections) == methods
            assert seeds_in(axes) == thin <= MOST_SEEDS


def test_seeds_too_few_for_an_interval_are_drawn_however_many_are_to_come(tmp_path):
    for axes in figure_of(tmp_path, "tab7", 1, seeds=2).axes:
        assert seeds_in(axes) == 4 * 2 and not axes.collections


@pytest.mark.parametrize("cost", COSTS)
def test_every_cost_can_be_an_axis(tmp_path, cost):
    (axes,) = figure_of(tmp_path, "tab7", 1, seeds=1, x=[cost]).axes
    costs = curves_of(next(iter(read_experiment(FOLDER / "tab7.yaml").planned_runs())))[f"cost/{cost}"]
    assert [line.get_xdata()[-1] for line in means(axes)] == pytest.approx([max(costs.values())] * 4)


def test_one_entropy_that_explodes_does_not_flatten_the_others(tmp_path):
    """Its band comes down to 0.01 and then goes below zero, which no logarithmic axis has."""

    def exploding(planned):
        first = planned.levels["method"] == "entropy bonus" and planned.seed == 1
        heights = (0.4, 1.5, 6.0) if first else (0.4, 0.4, 0.4)
        entropy = dict(zip((1, 21, 41), heights, strict=True))
        return {**curves_of(planned), "mi/first_turn/conditional_entropy_token": entropy}

    *_, axes, _ = figure_of(tmp_path, "fig5", simulate=exploding).axes
    low, high = axes.get_ylim()
    assert axes.get_yscale() == "log" and 0.3 < low < 0.4 and high > 6
    assert min(path.get_extents().y0 for band in axes.collections for path in band.get_paths()) < 0


def test_the_levels_of_an_axis_have_a_name(tmp_path):
    for name in ("fig6", "tab5"):
        (axes,) = figure_of(tmp_path / name, name).axes
        assert axes.get_ylabel() in ("keep rate", "completions of a prompt")
        assert axes.get_xlabel() == "held-out success, last fifth of the steps"


def test_a_metric_that_the_store_drops_is_refused():
    validate({"kind": "curves", "metrics": ["success", "retrieval/impossible"], "lines": "method"}, "here")
    with pytest.raises(ValueError, match=r"here: metrics='dropped/by_store' is not supported; allowed: log keys"):
        validate({"kind": "curves", "metrics": ["success", "dropped/by_store"], "lines": "method"}, "here")


def test_a_logarithm_of_what_is_not_drawn_is_refused():
    spec = {"kind": "curves", "metrics": ["success"], "lines": "method", "log": ["entropy"]}
    with pytest.raises(ValueError, match=r"log='entropy' is not drawn; allowed: success"):
        validate(spec, "here")
    with pytest.raises(ValueError, match=r"log='success' is not drawn; allowed: mi/mean"):
        validate({"kind": "scatter", "x": ["mi/mean"], "y": "success/last", "log": ["success"]}, "here")


@pytest.mark.parametrize("name", ["metrics", "x", "log"])
def test_what_must_be_a_list_of_names_is_refused_if_it_is_not(name):
    spec = {"kind": "curves", "metrics": ["success"], "lines": "method"}
    for value in ("success", [1]):
        with pytest.raises(ValueError, match=f"here: {name} must be a list of names, got "):
            validate({**spec, name: value}, "here")
    with pytest.raises(ValueError, match="here: caption must be a text, got 3"):
        validate({**spec, "caption": 3}, "here")
