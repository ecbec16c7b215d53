"""Figures of experiments: readable in grey print and without all colours, on the axes that were asked for."""

from pathlib import Path

import pytest
from experiment_results import curves_of, write_results

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


def test_lines_are_told_apart_without_colour_also_over_costs(tmp_path):
    figure = figure_of(tmp_path, "ours2", 1)
    assert [axes.get_xlabel() for axes in figure.axes] == ["CPU time (s)", "FLOPs of the update"]
    for axes in figure.axes:
        marked = [line.get_marker() for line in means(axes)]
        assert len(set(marked)) == len(marked) == 6 and not {"", "None", None} & set(marked)
    (legend,) = figure.legends
    assert [handle.get_marker() for handle in legend.get_lines()] == marked


@pytest.mark.parametrize("cost", COSTS)
def test_every_cost_can_be_an_axis(tmp_path, cost):
    (axes,) = figure_of(tmp_path, "tab7", 1, seeds=1, x=[cost]).axes
    costs = curves_of(next(iter(read_experiment(FOLDER / "tab7.yaml").planned_runs())))[f"cost/{cost}"]
    assert [line.get_xdata()[-1] for line in means(axes)] == pytest.approx([max(costs.values())] * 4)


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
