"""The page of results: from a store of runs whose truth is known, and the files of the claims."""

import re
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from experiment_results import curves_of, write_results

from research.page import analyse, check_readable
from research.plan import read_experiment, read_experiments
from research.store import Store

FOLDER = Path(__file__).parents[2] / "research" / "experiments"
FILES = sorted(FOLDER.glob("*.yaml"))
CLAIMS = {"fig3", "fig5", "fig6", "fig8", "fig9"} | {f"tab{n}" for n in range(4, 10)} | {"ours1", "ours2", "ours3"}


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


def test_every_claim_has_a_file_that_can_be_read():
    experiments = read_experiments(FILES)
    assert {one.id for one in experiments} >= CLAIMS
    for one in experiments:
        check_readable(one)
        assert (one.checks or len(one.seeds) == 1) and one.figures and one.claim.endswith(".")


def test_levels_with_files_share_runs_with_experiments_of_that_file():
    """The plain run on FrozenLake is one run, whether the task is an axis or the base; at the paper's scale, PPO has a
    critic and GRPO has not."""
    tab4, tab5 = (read_experiment(FOLDER / f"{name}.yaml") for name in ("tab4", "tab5"))
    plain = {
        planned.key for planned in tab5.planned_runs() if planned.levels == {"method": "none", "completions": "4"}
    }
    levels = {"method": "none", "algorithm": "DAPO", "env": "frozen_lake"}
    assert {planned.key for planned in tab4.planned_runs() if planned.levels == levels} <= plain
    critics = {(planned.levels["algorithm"], planned.fields["env_name"], "critic_lr" in planned.fields)
               for planned in tab4.planned_runs(scale="paper")}  # fmt: skip
    assert critics == {
        (name, env, name == "PPO")
        for name in ("PPO", "DAPO", "GRPO", "Dr. GRPO")
        for env in ("frozen_lake", "sokoban", "countdown")
    } | {("RLOO", "countdown", False)}  # it plays one turn, and the other two have several at that scale


def test_an_experiment_over_others_has_their_runs():
    over = read_experiment(FOLDER / "tab8.yaml")
    assert {planned.key for planned in over.planned_runs()} == {
        planned.key for one in over.others for planned in one.planned_runs()
    }
    assert len(over.planned_runs()) == len({planned.key for planned in over.planned_runs()})


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
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 11e6
    assert not [one for one in recwarn if "constrained_layout" in str(one.message)]
    assert len(Store(tmp_path).done()) > 400
