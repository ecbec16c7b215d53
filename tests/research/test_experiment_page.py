"""The page of results: from a store of runs whose truth is known, and the files of the claims."""

import re
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from experiment_results import curves_of, write_results

from research.figures import draw, validate
from research.measures import COSTS, read_finished
from research.page import analyse, read_grid
from research.plan import read_experiment, read_experiments
from research.store import Store

FOLDER = Path(__file__).parents[2] / "research" / "experiments"
FILES = sorted(FOLDER.glob("*.yaml"))


def page_of(folder, *names):
    """The text of the first page and of those of claims."""
    return "\n".join((folder / f"{name}.md").read_text() for name in ("README", "all", "method", *names))


def row_of(folder, name):
    """The claim's row among all: claim, verdict, number."""
    rows = (folder / "all.md").read_text().splitlines()
    return next(row for row in rows if f"]({name}.md)" in row).strip("| ").split(" | ")


def better_with_the_filter(planned):
    return curves_of(planned, 0.5 if planned.fields.get("snr_strategy") == "all" else 0.6)


@pytest.fixture(scope="module")
def fig9():
    """As if its runs could decide."""
    return replace(read_experiment(FOLDER / "fig9.yaml"), flaw="", page=True)


def test_the_page_says_what_the_store_has(tmp_path, fig9):
    write_results(tmp_path, fig9.planned_runs(), better_with_the_filter)
    analyse([fig9], tmp_path)
    text = page_of(tmp_path, "fig9")
    gain = float(re.search(r"the filter gains without noise \| above 0 \| \+([\d.]+) points", text)[1])
    assert 8 < gain < 12
    verdict = "**inconclusive**, at the same learning rate and gradient clip"  # it gains, but in noise as much
    assert row_of(tmp_path, "fig9")[1] == verdict
    assert f"| {verdict} |" in (tmp_path / "README.md").read_text()
    assert "60 of 60" in text and "torch 2.13.0" in text and "2 CPU cores" in text
    assert "experiments/fig9.yaml" in text and "2026-" in text
    images = re.findall(r"!\[.+\]\((.+)\)", text)
    assert images and all((tmp_path / image).stat().st_size > 5000 for image in images)
    assert not re.search(r"\bnan\b|None", text)


def test_the_number_beside_a_verdict_is_the_one_that_made_it(tmp_path):
    """Of tab7 where the filter is behind none, and ahead of random groups by too little to be significant."""
    experiment = read_experiment(FOLDER / "tab7.yaml")

    def behind(planned):
        return curves_of(planned, {"none": 0.7, "random, same size": 0.595}.get(planned.levels["method"], 0.6))

    write_results(tmp_path, experiment.planned_runs(), behind)
    analyse([experiment], tmp_path)
    _, verdict, ours, seeds, power = row_of(tmp_path, "tab7")
    assert verdict == "**opposite**, at the same learning rate and gradient clip"
    assert ours.startswith("the filter beats no filter, at equal steps: -")
    assert seeds == "10" and re.fullmatch(r"\d+ % \(at \+5\.0 points, level 0\.05\)", power)


def test_the_primary_check_stands_first_and_the_page_says_what_came_after_the_runs(tmp_path, fig9):
    """The filter gains, which is no primary check; that it gains at the end, too, was asked later."""
    gain, trend = fig9.checks
    later = {**gain, "name": "it gains at the end", "statistic": "success/last"}
    write_results(tmp_path, fig9.planned_runs(), better_with_the_filter)
    analyse([replace(fig9, checks=(later, gain, trend))], tmp_path)
    assert "after the runs" not in (tmp_path / "fig9.md").read_text()
    before = {name: value for name, value in trend.items() if name not in ("primary", "true_effect")}
    Store(tmp_path).write_record(replace(fig9, checks=(gain, before)), "tiny", quick=False)
    analyse([replace(fig9, checks=(later, gain, trend))], tmp_path)
    text = (tmp_path / "fig9.md").read_text()
    places = [
        text.index(part)
        for part in (
            "| primary check, named after the runs |",
            f"| {trend['name']} |",
            "| secondary check |",
            "| it gains at the end (added after the runs) |",
            "| the filter gains without noise |",
        )
    ]
    assert places == sorted(places) and "**Inconclusive.**" in text
    assert "machine not recorded for 60 of 60 runs" in text and "CPU model not recorded for 60 of 60 runs" in text


def test_runs_that_cannot_decide_have_a_line_in_the_appendix(tmp_path, fig9):
    write_results(tmp_path, fig9.planned_runs(), better_with_the_filter)
    for page in (True, False):
        folder = tmp_path if page else tmp_path / "without"
        if not page:
            write_results(folder, fig9.planned_runs(), better_with_the_filter)
        analyse([replace(fig9, flaw="It slips.", page=page)], folder)
        first = (folder / "all.md").read_text()
        (link,) = re.findall(r"^\| \[The filter's gain.+\]\((.+?)\) .+\| It slips\. \|$", first, re.MULTILINE)
        assert (folder / link).exists() and (link == "fig9.md") == page == (folder / "fig9.png").exists()
        assert "| verdict |" not in first and (fig9.checks[0]["name"] in first) == (not page), "a check shown nowhere"
    assert "**No verdict.** It slips." in (tmp_path / "fig9.md").read_text()


def test_before_anything_ran_the_page_says_so(tmp_path, fig9):
    analyse([fig9], tmp_path)
    text = page_of(tmp_path, "fig9")
    assert "**Not run yet.**" in text and "| 0 of 60 |" in text and "no number" in text and "![" not in text


@pytest.mark.slow
def test_an_experiment_without_checks_has_curves_and_no_verdict(tmp_path):
    experiment = replace(read_experiment(FOLDER / "smollm2.yaml"), flaw="", page=True)
    planned_runs = experiment.planned_runs()
    so_far = "**No verdict, so far (3 of 8 runs).**"  # all of GRPO, and PPO has a figure of its own
    for number, images, said in ((0, 0, "**Not run yet.**"), (3, 1, so_far), (8, 2, "**No verdict.**")):
        write_results(tmp_path, planned_runs[:number], curves_of)
        analyse([experiment], tmp_path)
        text = page_of(tmp_path, "smollm2")
        assert said in text and ("It has no check." in text) == (number > 0)
        assert "primary check," not in text and text.count("![") == images


def test_links_lead_to_files_wherever_the_page_is(tmp_path):
    for folder in (tmp_path / "results", tmp_path / "runs" / "quick" / "results"):
        analyse([read_experiment(FOLDER / "tab4.yaml")], folder)
        links = re.findall(r"\]\(([^)#]+)[^)]*\)", page_of(folder, "tab4"))
        files = [folder / link for link in links if not link.startswith("https://")]
        assert {path.name for path in files} >= {"README.md", "ppo.yaml", "sokoban.yaml"}
        assert all(path.exists() for path in files)


def test_the_random_baseline_stands_beside_each_setting_in_percent(tmp_path, fig9):
    """Where it was evaluated; other tasks have no such player, and their table no such column."""
    for baseline in ({}, {"eval/env/frozen_lake/random_success": {0: 0.2031}}):
        write_results(tmp_path, fig9.planned_runs(), lambda planned: curves_of(planned) | baseline)  # noqa: B023
        analyse([fig9], tmp_path)
        page = (tmp_path / "fig9.md").read_text()
        assert ("| setting | seeds | random baseline | before |" in page) == bool(baseline)
        assert "| retrieval before | retrieval, last fifth |" in page
    rows = re.findall(r"^\| (?:none|filter), 0\.\d \| 5 \|(.*?)\|", page, re.MULTILINE)
    assert len(rows) == len(fig9.axes["slip"]) * 2 and {row.strip() for row in rows} == {"20.3 %"}


def test_the_gradient_norms_and_clipped_steps_of_arms_on_other_groups_stand_beside_each(tmp_path, fig9):
    """A quarter of the steps of plain runs is above 1, all of filtered ones; arms on the same groups have none."""

    def norms(planned):
        every = planned.fields.get("snr_strategy") == "all"
        values = {step: 3.0 if step % 4 == 0 or not every else 0.25 for step in range(1, 41)}
        return curves_of(planned) | {"grad_norm": values}

    other = read_experiment(FOLDER / "impossible_rates.yaml")
    write_results(tmp_path, [*fig9.planned_runs(), *other.planned_runs()], norms)
    analyse([fig9, other], tmp_path)
    page = (tmp_path / "fig9.md").read_text()
    assert "compared at the same learning rate and gradient clip." in page
    (header,) = re.findall(r"^\| setting \| seeds \|.*$", page, re.MULTILINE)
    columns = header.strip("| ").split(" | ")
    rows = [line.strip("| ").split(" | ") for line in re.findall(r"^\| (?:none|filter), .*$", page, re.MULTILINE)]
    cells = [[row[columns.index(name)] for name in ("median gradient norm", "clipped steps")] for row in rows]
    assert sorted(map(tuple, cells)) == [("0.25", "25.0 %")] * 6 + [("3", "100.0 %")] * 6
    assert "clipped steps" not in (tmp_path / "impossible_rates.md").read_text()


def test_the_page_of_few_runs_tells_each_with_its_health(tmp_path, fig9):
    """In a column a statistic, where any run has it; a page of many runs has no such table."""
    experiment = read_experiment(FOLDER / "impossible_rates.yaml")
    falling = {step: 0.9 if step < 100 else 0.1 for step in range(4, 192, 4)}

    def curves(planned):
        valid = {"env/frozen_lake/valid_rate": falling} if planned.seed == 203 else {}
        return {key: curve for key, curve in curves_of(planned).items() if not key.startswith("mi/")} | valid

    write_results(tmp_path, [*experiment.planned_runs(), *fig9.planned_runs()], curves)
    analyse([experiment, fig9], tmp_path)
    page = (tmp_path / "impossible_rates.md").read_text().partition("Every run")[2]
    header, _, *rows = [
        line.strip("| ").split(" | ") for line in page.split("</details>")[0].splitlines() if "|" in line
    ]
    assert header == ["setting", "seed", "before", "last", "CPU seconds", "sampled tokens", "health"]
    assert [row[:2] for row in rows] == [[rate, str(n)] for rate in ("2e-5", "5e-5", "1e-4") for n in range(201, 206)]
    assert {row[1] for row in rows if row[-1].startswith("failing since 1")} == {"203"}
    assert all(row[-1] == "too early to tell" for row in rows if row[1] != "203")
    assert "<summary>Every run" not in (tmp_path / "fig9.md").read_text()


@pytest.mark.slow
def test_all_claims_are_drawn_and_told_on_a_screen_and_a_page_each(tmp_path, recwarn):
    experiments = read_experiments(FILES)
    write_results(tmp_path, chain.from_iterable(one.planned_runs() for one in experiments), better_with_the_filter)
    analyse(experiments, tmp_path)
    every = (tmp_path / "all.md").read_text()
    assert len(every.splitlines()) < 55 and all(f"[{one.claim}](" in every for one in experiments)
    first = (tmp_path / "README.md").read_text()
    assert len(re.findall(r"^\| \[", first, re.MULTILINE)) == 8
    paper = (tmp_path / "paper.md").read_text()
    assert (
        "| Figures 7 and 12 |" in paper
        and "| `python -m research run research/experiments/tab4.yaml --fresh` |" in paper
    )
    tried = {one.id for one in experiments if one.source.startswith(("Fig", "Table"))}
    assert all(f"/{name}.yaml --fresh" in paper for name in tried)
    assert "| algorithm: PPO | [ppo.yaml](" in (tmp_path / "tab4.md").read_text()
    for one in experiments:
        if not one.page:
            assert not (tmp_path / f"{one.id}.md").exists()
            continue
        page = (tmp_path / f"{one.id}.md").read_text()
        assert one.claim.rstrip(".") in page and page.count("![") == len(one.figures)
        assert "| no number |" not in page and not re.search(r"\bnan\b", page)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 12e6
    assert not [one for one in recwarn if "constrained_layout" in str(one.message)]
    assert len(Store(tmp_path).done()) > 400


# Figures: readable in grey print and without all colours


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
