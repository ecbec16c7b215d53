"""The report of runs: what it says first, what it shows of them, and that hostile text stays text."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from reported_runs import (
    GROUP,
    HOSTILE,
    PROMPTS,
    Page,
    edit_state,
    make_run,
    report_of,
    save_completions,
    without_information,
)
from reported_runs import browser_fixture as browser_fixture
from reported_runs import compared_fixture as compared_fixture
from reported_runs import runs_fixture as runs_fixture
from reported_runs import words_only_fixture as words_only_fixture

from ragen2_trl import cli
from ragen2_trl.metrics import KEPT
from ragen2_trl.record.files import EVALUATION, TRAINING
from ragen2_trl.record.run import read_run
from ragen2_trl.record.saved_episodes import PlayedEpisode, PlayedTurn, save_episodes
from ragen2_trl.record.saved_measurement import read_measurement
from ragen2_trl.report.card import FIGURES
from ragen2_trl.report.figures import draw_figures, figures_of, measurement_figures
from ragen2_trl.report.page import distinct_labels, render_report
from ragen2_trl.report.samples import pick_samples

pytestmark = pytest.mark.slow

# The page


def test_the_page_of_two_runs_has_its_parts_in_order(compared):
    page = compared.read_text()
    read = Page(page)
    assert re.search("“healthy”: success in training .*; “drifted”: template collapse since step 60", read.headline)
    titles = [re.sub("<.*?>", "", title) for title in re.findall("<h[23].*?>.*?</h[23]>", page)]
    of_run = ["Facts", "Figures", "What the model wrote, best and worst"]
    assert titles == ["healthy", *of_run, "drifted", *of_run, "Settings and versions", "Settings", "Versions"]
    first = read.text.split("How to read these numbers")[0]
    for words in ("finished 100 steps", "Reasoning depends on its prompt", "since step 60", "chance 12.5%"):
        assert words in first
    assert "100.0% 9.4%" in first and f"at most {math.log(PROMPTS):.2f}" in first  # the arrow is the style's
    assert "completions/: completions" in read.text
    (contents,) = re.findall(r"<nav.*?</nav>", page, re.DOTALL)
    links = re.findall('href="#([^"]*)"', contents)
    assert links == ["run-1", "run-2", "settings-and-versions"]
    assert all(page.count(f'id="{link}"') == 1 for link in links)


FILTER = {"trainer": "SNRFilteredGRPOTrainer", "snr_strategy": "top_p", "snr_value": 0.9}


def evaluated(folder, before, after, **settings):
    if not folder.exists():
        make_run(folder, None, 20, ended=True)
    for when, success in (("before", before), ("after", after)):
        metrics = {"success": success, "success_ci_low": success - 0.05, "success_ci_high": success + 0.05}
        (folder / f"evaluation_{when}.json").write_text(json.dumps(metrics))
    about = {"settings": {**FILTER, **settings}, "versions": {}}
    (folder / "diagnostics" / "run.json").write_text(json.dumps(about))
    return folder


def test_the_headline_is_the_outcome_of_the_runs_and_names_the_control(tmp_path, words_only):
    run = evaluated(tmp_path / "demo", 0.458, 0.563)
    assert report_of(run).headline.startswith("“demo”: held-out success 45.8% → 56.3%")
    control = evaluated(tmp_path / "demo_control", 0.458, 0.541, trainer="GRPOTrainer")
    headline = report_of(control, run).headline
    assert re.match("“demo”: .* → 56.3%.*“demo_control” \\(nothing filtered\\): .* → 54.1%", headline)
    for folder in (run, control):
        without_information(folder)
    assert "measured" not in report_of(run, control).headline


def test_a_gain_that_chance_may_have_made_comes_with_the_tasks_that_would_tell(tmp_path, words_only):
    """By the two-proportion formula, of which 0.458 and 0.478 are worked out here by hand."""
    ends = {end: evaluated(tmp_path / str(end), 0.458, end) for end in (0.478, 0.563, 0.59)}
    tasks = math.ceil((1.96 + 0.842) ** 2 * (0.458 * 0.542 + 0.478 * 0.522) / 0.02**2)
    assert f"no change shown: about {tasks:,} held-out tasks would tell" in report_of(ends[0.478]).headline
    assert "shown" not in report_of(ends[0.563]).headline
    assert "best two are not shown to differ" in report_of(ends[0.563], ends[0.59]).headline
    assert "best two" not in report_of(ends[0.478], ends[0.59]).headline


def test_trls_own_trainer_counts_as_a_control_and_a_subclass_of_ours_does_not(tmp_path):
    kinds = {"GRPOTrainer": True, "MyTrainer": False, "SNRFilteredGRPOTrainer": False}
    for name, is_control in kinds.items():
        run = read_run(evaluated(tmp_path / name, 0.4, 0.5, trainer=name))
        assert run.filters_nothing == is_control
    assert replace(run, log_history=[{**row, KEPT: 1.0} for row in run.log_history]).filters_nothing


def test_settings_of_some_runs_come_next_and_those_without_effect_in_any_are_left_out(tmp_path, words_only):
    first = evaluated(tmp_path / "first", 0.4, 0.5, trainer="A", seed=0, beta=0.0, top_p=1.0, top_k=0)
    second = evaluated(tmp_path / "second", 0.4, 0.5, trainer="B", seed=0, beta=0.0, top_p=0.9, top_k=0, epsilon=0.2)
    text = report_of(first, second).text
    assert "Settings first second trainer A B top_p 1.0 0.9 epsilon \N{EN DASH} 0.2 " in text
    assert "seed 0 0 beta 0.0 0.0" in text and "top_k" not in text
    assert re.findall('class="differs"><th>(.*?)</th>', render_report([read_run(first), read_run(second)])) == [
        "trainer",
        "top_p",
    ]


def test_each_row_of_the_first_table_names_the_settings_in_which_runs_differ(tmp_path, words_only):
    ends = [evaluated(tmp_path / name, 0.4, 0.5, snr_value=value) for name, value in (("a", 0.5), ("b", 0.25))]
    table = report_of(*ends).text.partition("How to read these numbers")[0]
    assert table.count("snr_value: 0.5") == table.count("snr_value: 0.25") == 1 and "snr_strategy" not in table


def test_runs_of_one_name_are_told_apart_by_their_parents(tmp_path, words_only):
    folders = [make_run(tmp_path / parent / "run", steps=1) for parent in ("first", "second")]
    text = report_of(*folders).text
    assert "first/run" in text and "second/run" in text
    assert distinct_labels([Path("/a/b/run"), Path("/c/b/run"), Path("/c/other")]) == ["a/b/run", "c/b/run", "other"]


def test_a_run_given_twice_is_shown_once(runs, words_only):
    page = report_of(runs[0], runs[0].parent / "." / runs[0].name)
    assert page.headline.count("healthy") == 1 and "of 2" not in page.headline


def test_unfinished_and_resumed_runs_say_so(tmp_path, words_only):
    text = report_of(make_run(tmp_path / "run", steps=20, ended=False, resumed_at=[5, 10])).text
    assert "unfinished: at step 20 of 100, resumed at step 5, 10" in text


def test_a_folder_without_a_run_ends_with_code_2_and_its_name(runs, tmp_path, capsys):
    output = tmp_path / "report.html"
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(runs[0]), str(tmp_path / "nothing here"), "--output", str(output)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "nothing here'" in said and said.count("\n") == 1
    assert not output.exists()


def test_a_place_that_cannot_be_written_ends_with_code_2(runs, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(runs[0]), "--output", str(tmp_path)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"output='{tmp_path}' cannot be written" in said and said.count("\n") == 1


# In a browser


@pytest.mark.needs("chromium")
def test_page_asks_for_nothing_and_breaks_no_policy(browser, tmp_path):
    folders = [make_run(tmp_path / 'a"><img src=x onerror=alert(1)>$b_{c', None, 20, HOSTILE, HOSTILE[::-1])]
    folders.append(make_run(tmp_path / "b", 10, 20, HOSTILE))
    path = tmp_path / "report.html"
    path.write_text(render_report([read_run(folder) for folder in folders]), encoding="utf-8")
    for width in (1400, 390):
        browser.open(path, width)
        loaded = [address for address in browser.requests if not address.startswith("data:")]
        assert loaded == [path.resolve().as_uri()]
        assert browser.complaints == []
        assert browser.evaluate("document.scripts.length") == 0
        assert "template collapse since step" in browser.evaluate("document.title")
        assert "<script>document.title='owned'</script>" in browser.evaluate("document.body.textContent")


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("width", "height"), [(1400, 1000), (390, 844)])
def test_collapse_is_in_sight_without_scrolling(browser, compared, width, height, dark):
    browser.open(compared, width, height, dark)
    verdict = "[...document.querySelectorAll('.summary .warning b')].at(-1).getBoundingClientRect()"
    assert 0 < browser.evaluate(f"{verdict}.top") < browser.evaluate(f"{verdict}.bottom") < height
    assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    colours = [browser.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")]
    lightness = [sum(map(int, colour[4:-1].split(","))) for colour in colours]
    assert abs(lightness[0] - lightness[1]) > 500 and (lightness[0] > lightness[1]) == dark


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_drawings_have_the_ground_and_the_ink_of_the_page(browser, compared, dark):
    browser.open(compared, dark=dark)
    ground = browser.evaluate("getComputedStyle(document.querySelector('.summary')).backgroundColor")
    ink = browser.evaluate("getComputedStyle(document.body).color")

    def painted(selector, name):
        drawings = "[...document.querySelectorAll('figure > .drawing > svg')]"
        look = f"getComputedStyle(svg.querySelector('{selector}'))"
        return set(browser.evaluate(f"{drawings}.map(svg => {look}.{name})"))

    assert painted("text", "fill") == {ink}
    assert painted("[id$=patch_1] path", "fill") == {ground}
    # A map of colours says the same in the dark.
    assert browser.evaluate("getComputedStyle(document.querySelector('svg:has(image)')).filter") == "none"


@pytest.mark.needs("chromium")
def test_a_click_makes_a_drawing_as_large_as_the_window_and_another_one_small_again(browser, compared):
    browser.open(compared, 1400, 1000)
    height = "document.querySelector('.drawing svg').getBoundingClientRect().height"
    small = browser.evaluate(height)
    assert small != 1000
    for expected in (1000, small):
        browser.evaluate("document.querySelector('.drawing').click()")
        assert browser.evaluate(height) == expected


# Texts of models


def test_hostile_text_stays_text(tmp_path, words_only):
    page = render_report([read_run(make_run(tmp_path / "<b>run", 10, 20, HOSTILE, HOSTILE))])
    read = Page(page)
    assert not read.tags & {"script", "img", "iframe", "object", "embed", "form", "base"}
    assert not [name for name in read.attributes if name.startswith("on")]
    assert not any(char in page for char in "\0\x1b\u202e")
    page.encode("utf-8")  # a lone surrogate could not be
    assert "Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:;" in page
    assert "<script>document.title='owned'</script>" in read.text
    assert "{{ 7 * 7 }}&lt;b&gt;�gnp.exe��[31mred $x$" in read.text
    assert "“<b>run”" in read.headline


def test_huge_texts_are_cut_and_it_says_so(tmp_path, words_only):
    folder = make_run(tmp_path / "run", None, 10, "x" * 100_000, "y" * 100_000)
    page = render_report([read_run(folder)])
    assert len(page) < 2_000_000
    assert "characters left out" in page


def test_the_page_has_no_markdown(tmp_path):
    run = make_run(tmp_path / "run", steps=10)

    def without_tags(state):
        for one in state["stateful_callbacks"]["ragen2_mutual_information"]["watch"]["measurements"]:
            one["valid_thinking_rate"] = 0.0

    edit_state(run, without_tags)
    about = {"settings": {"snr_score": "a*b* & [c]!"}, "versions": {}}
    (run / "diagnostics" / "run.json").write_text(json.dumps(about))
    text = report_of(run).text
    assert "no closed think tag" in text and "A*b* & [c]! of the groups" in text
    assert not set("`\\") & set(text)


def episode(group, success, sample=0, seed=None, turns=1, text="Up."):
    said = [{"role": "user", "content": "Go."}] + [
        {"role": role, "content": text} for _ in range(turns) for role in ("assistant", "user")
    ]
    seed = group if seed is None else seed
    return PlayedEpisode(
        "lake", seed, success, float(success), said, [PlayedTurn(["Up"], True, 0.0)] * turns, [], group, sample
    )


def shown(run):
    """Prompts with the (when, earned, beginning) of their samples, and what could not be read."""
    problems = []
    groups = pick_samples(read_run(run), problems)
    return {
        group.prompt.head: [(one.when, one.earned, one.text.head) for one in group.samples] for group in groups
    }, problems


def test_four_completions_are_the_best_and_the_worst_of_a_prompt_early_and_late(tmp_path):
    run = make_run(tmp_path / "run", steps=10)
    save_completions(run, 5, "early")
    rows = pd.read_parquet(run / "completions" / "completions_00010.parquet")
    new = [{"role": "user", "content": "new"}]
    rows["prompt"] = [prompt if n < GROUP else new for n, prompt in enumerate(rows["prompt"])]
    rows.loc[: GROUP - 2, "success"] = 0.25  # of the shared prompt less than of the new one
    rows.to_parquet(run / "completions" / "completions_00010.parquet")
    ((prompt, samples),) = shown(run)[0].items()
    assert prompt.startswith("Walk from P to G.\nP _") and [one[:2] for one in samples] == [
        ("step 5", "reward 1"),
        ("step 5", "reward 0"),
        ("step 10", "reward 0.25"),
        ("step 10", "reward 0"),
    ]
    assert samples[0][2] == "early run 2"


def test_completions_are_of_the_last_generation_of_a_file(tmp_path):
    run = make_run(tmp_path / "run", steps=10)
    rows = [
        {"step": 10, "prompt": "one", "completion": f"{number}", "success": float(member), "generation": number}
        for number in (3, 4)
        for member in (0, 1)
    ]
    pd.DataFrame(rows).to_parquet(run / "completions" / "completions_00010.parquet")
    assert shown(run)[0] == {"one": [("step 10", "reward 1", "4"), ("step 10", "reward 0", "4")]}


def test_episodes_are_shown_in_place_of_completions_and_broken_files_named(tmp_path):
    run = make_run(tmp_path / "run", steps=20)
    for step in (10, 20):
        played = [episode(group, sample < 1, sample) for group in range(2) for sample in range(2)]
        save_episodes(run / "_episodes", played, EVALUATION, step)
        save_episodes(run / "_episodes", played, TRAINING, step)
    (run / "_episodes" / "evaluation_00015.jsonl").write_bytes(b"PAR1")
    (run / "_episodes" / "evaluation_00001.jsonl").write_bytes(b"PAR1")
    (samples,), problems = [*shown(run)[0].values()], shown(run)[1]
    assert [one[:2] for one in samples] == [
        (f"step {step}", earned) for step in (10, 20) for earned in ("solved, return 1", "not solved, return 0")
    ]
    assert "Up." in samples[0][2]
    assert [problem.split()[0] for problem in problems] == ["evaluation_00001.jsonl"]


def test_a_folder_of_episodes_alone_has_a_report(tmp_path, words_only):
    played = [replace(episode(n, n < 3), messages=[{"role": "user", "content": HOSTILE}]) for n in range(8)]
    save_episodes(tmp_path / "played", played, EVALUATION)
    cli.main(["report", str(tmp_path / "played"), "--output", str(tmp_path / "page.html")])
    page = Page((tmp_path / "page.html").read_text())
    assert page.headline == "“played”: success 37.5% (8 episodes)"
    assert not page.tags & {"script", "img", "iframe"} and "<script>document.title='owned'</script>" in page.text


# Figures


def test_figures_name_the_score_and_the_step_of_their_measurement(tmp_path):
    run = read_run(make_run(tmp_path / "run", steps=10))
    run.settings["snr_score"] = "reward_std"
    measurements = [read_measurement(path) for path in run.measurements]
    drawn = [(name, caption) for name, caption, _ in figures_of(run, measurements)]
    assert [name for name, _ in drawn] == ["training", "quadrant", "cross_scores", "cross_scores", "reward_variance"]
    captions = [caption for _, caption in drawn]
    assert "arXiv 2604.06268" in captions[1] and "](" not in captions[1]
    assert captions[2].endswith("at step 1") and captions[3].endswith("at step 10")
    assert captions[4] == "Reward std of the groups at step 10, and which of them the filter kept"
    page = render_report([run])
    assert "Reward std of 8 groups" in page and "Reward variance" not in page


def test_figures_of_the_card_are_those_of_the_report(tmp_path):
    folder = make_run(tmp_path / "run", steps=10)
    held_out = {f"eval/env/frozen_lake/success{bound}": 0.5 for bound in ("", "_ci_low", "_ci_high")}
    edit_state(folder, lambda state: state["log_history"][4].update(held_out))
    run = read_run(folder)
    assert [name for name, _, _ in figures_of(run)] == list(FIGURES)
    draw_figures(run, tmp_path)
    assert {path.name for path in tmp_path.glob("*.*")} == {
        f"{name}{end}" for name in FIGURES for end in (".png", ".svg")
    }


@pytest.mark.parametrize(
    "value", [math.nan, *(pytest.param(other, marks=pytest.mark.slow) for other in (math.inf, None))]
)
@pytest.mark.parametrize("key", ["mi_seq", "conditional_entropy_token", "mi_upper_bound"])
def test_what_a_diverged_model_leaves_unmeasured_is_not_drawn(tmp_path, value, key):
    folder = make_run(tmp_path / "run", steps=1)
    edit_state(folder, lambda state: state["log_history"][0].update({f"mi/first_turn/{key}": value}))
    run = read_run(folder)
    measurement = read_measurement(run.measurements[0])
    assert [name for name, _ in measurement_figures(run, measurement)] == ["cross_scores", "reward_variance"]
    assert "quadrant" not in [name for name, _, _ in figures_of(run)]
    measurement.cross_logps[0, 0] = math.nan
    assert [name for name, _ in measurement_figures(run, measurement)] == ["reward_variance"]


# What a run has not left, or left in another form


def with_broken_files(folder):
    edit_state(folder, lambda state: state.update(global_step=99))
    (folder / "completions" / "completions_00099.parquet").write_bytes(b"PAR1 is not all it takes")
    (folder / "_measurements" / "measurement_00098.json").write_text('{"step": 98, "prompts": [')
    (folder / "_measurements" / "measurement_00099.json").write_bytes(b"\xff\xfe")


def without_any_step(folder):
    def change(state):
        for row in state["log_history"]:
            del row["step"]

    edit_state(folder, change)


def with_groups_of_groups(folder):
    path = folder / "_measurements" / "measurement_00010.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"scores": [values["scores"]], "kept": [values["kept"]]}))


NUMBERS, READ = "update positions (times plain TRL) 0.55", "reward 1"
BROKEN_FILES = [f"{name} cannot be read" for name in ("completions_00099.parquet", "measurement_00098.json")]
CASES = [
    (without_information, ["was not measured", "MutualInformationCallback"], [NUMBERS, READ]),
    (with_broken_files, BROKEN_FILES, [NUMBERS, READ]),
    (with_groups_of_groups, ["measurement_00010.json cannot be read", "scores must have shape (groups,)"], [NUMBERS]),
]


@pytest.mark.parametrize(("spoil", "said", "still_there"), CASES)
def test_what_is_missing_is_said_and_the_rest_is_shown(tmp_path, spoil, said, still_there):
    folder = make_run(tmp_path / "run", steps=10)
    spoil(folder)
    text = report_of(folder).text
    for words in [*said, *still_there]:
        assert words in text, words


def test_a_run_without_steps_can_be_compared(tmp_path, monkeypatch):
    monkeypatch.setattr("ragen2_trl.report.page._figures", lambda *_: [])
    folders = [make_run(tmp_path / name, steps=10) for name in ("stepless", "sound")]
    without_any_step(folders[0])
    assert "No step in 10 of 10 log rows" in report_of(*folders).text
