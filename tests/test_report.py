"""The report of runs: what it says first, what it shows of them, and that hostile text stays text."""

import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest
from reported_runs import (
    HOSTILE,
    PROMPTS,
    Page,
    edit_state,
    make_measurement,
    make_run,
    report_of,
    without_information,
)
from reported_runs import browser_fixture as browser_fixture
from reported_runs import compared_fixture as compared_fixture
from reported_runs import runs_fixture as runs_fixture
from reported_runs import words_only_fixture as words_only_fixture
from transformers import TrainerState

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, cli
from ragen2_trl.envs import completion_text, make_env
from ragen2_trl.record.run import read_run
from ragen2_trl.record.saved_measurement import read_measurement
from ragen2_trl.remedies import what_if
from ragen2_trl.report import remedies
from ragen2_trl.report.card import FIGURES, diagnostics_section
from ragen2_trl.report.examples import MAX_GROUP, distinguishing, pick_traces, read_groups
from ragen2_trl.report.gallery import draw_figures, figures_of, measurement_figures
from ragen2_trl.report.page import distinct_labels, render_report
from ragen2_trl.report.summary import summarize
from ragen2_trl.tiny import resolve_model

pytestmark = pytest.mark.slow


def test_headline_tells_which_run_collapsed_and_when(compared):
    page = Page(compared.read_text())
    assert re.search("in 1 of 2 runs reasoning is a template: “drifted” since step 60", page.headline, re.IGNORECASE)


def test_headline_claims_nothing_of_runs_that_were_not_measured(tmp_path, words_only):
    silent = [make_run(tmp_path / name, None, 20) for name in ("a", "b")]
    for folder in silent:
        without_information(folder)
    assert "not measured in 2 of 2 runs" in report_of(*silent).headline
    healthy = make_run(tmp_path / "c", None, 20)
    for folder in silent:  # an outcome would be said first
        assert report_of(folder).headline.startswith(f"“{folder.name}”")
    others = [make_run(tmp_path / name, None, 20) for name in ("d", "e")]
    assert report_of(*others).headline == "In none of 2 runs has reasoning become a template"
    assert "not measured in 2 of 3 runs" in report_of(healthy, *silent).headline


def test_first_screen_has_the_numbers_of_both_runs(compared):
    text = Page(compared.read_text()).text.split("How to read these numbers")[0]
    for words in ("finished 100 steps", "Reasoning depends on its prompt", "a template: since step 60"):
        assert words in text
    assert "100% → 100%".replace(" → ", " ") in text  # the arrow is the style's
    assert "chance 12.5%" in text
    assert f"nats, at most {math.log(PROMPTS):.2f}" in text
    assert "0.55 times plain TRL" in text


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
        assert browser.evaluate("document.title").startswith("In 1 of 2 runs reasoning is a template")
        assert "<script>document.title='owned'</script>" in browser.evaluate("document.body.textContent")


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("width", "height"), [(1400, 1000), (390, 844)])
def test_collapse_is_in_sight_without_scrolling(browser, compared, width, height, dark):
    browser.open(compared, width, height, dark)
    verdict = "[...document.querySelectorAll('.verdict.collapsed')][0].getBoundingClientRect()"
    assert 0 < browser.evaluate(f"{verdict}.top") < browser.evaluate(f"{verdict}.bottom") < height
    assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    colours = [browser.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")]
    lightness = [sum(map(int, colour[4:-1].split(","))) for colour in colours]
    assert abs(lightness[0] - lightness[1]) > 500 and (lightness[0] > lightness[1]) == dark


BROKEN = """(() => {  // words of tables that stand on several lines
    document.querySelectorAll("details").forEach(one => one.open = true);
    const broken = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = new Range();
    for (let text = texts.nextNode(); text; text = texts.nextNode())
        for (const word of text.parentElement.closest("th, td") ? text.data.matchAll(/[a-z_]+/g) : []) {
            range.setStart(text, word.index);
            range.setEnd(text, word.index + word[0].length);
            if (range.getClientRects().length > 1) broken.push(word[0]);
        }
    return broken;
})()"""


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_names_are_not_broken_inside_a_word(browser, tmp_path, words_only, width):
    long = (
        "gradient_accumulation_steps",
        "per_device_train_batch_size",
        "mask_truncated_completions",
        "learning_rate",
    )
    runs = [make_run(tmp_path / name, steps=10) for name in ("first", "second")]
    for number, run in enumerate(runs):
        about = {"settings": dict.fromkeys(long, number + 1), "versions": {}}
        (run / "diagnostics" / "run.json").write_text(json.dumps(about))
    (tmp_path / "report.html").write_text(render_report([read_run(run) for run in runs]))
    (tmp_path / "what_if.html").write_text(remedies.page(what_if(runs[0])))
    for name in ("report", "what_if"):
        browser.open(tmp_path / f"{name}.html", width)
        assert browser.evaluate(BROKEN) == []
        assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


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


def test_same_prompt_is_shown_for_each_run_best_completion_first(runs, words_only):
    text = report_of(*runs).text.split("The same prompt in several runs")[1]
    first = text.index("Go right.</think>Right healthy 2")
    assert first < text.index("healthy 0") < text.index("Right drifted 2") < text.index("drifted 0")
    assert "Prompt 2; healthy: mean reward 0.25; drifted: mean reward 0.25" in text


def test_groups_with_most_reward_variance_come_first(tmp_path):
    folder = make_run(tmp_path / "run", steps=10)
    rows = [
        {"step": 10, "prompt": f"prompt {number}", "completion": "text", "success": value, "advantage": 0.0}
        for number, values in enumerate([[1.0] * 10, [0.0, 1.0] * 5, [0.0] * 9 + [1.0]])
        for value in values
    ]
    pd.DataFrame(rows).to_parquet(folder / "completions" / "completions_00010.parquet")
    groups = read_groups(read_run(folder), [])
    assert [group.prompt for group in groups] == ["prompt 1", "prompt 2", "prompt 0"]
    assert [one.reward for one in groups[1].completions] == [1.0] + [0.0] * (MAX_GROUP - 1)
    assert groups[1].size == 10


def test_groups_are_of_the_last_generation_of_a_file(tmp_path):
    folder = make_run(tmp_path / "run", steps=10)
    rows = [
        {"step": 10, "prompt": "one", "completion": "text", "success": float(member), "generation": number}
        for number in (3, 4)
        for member in (0, 1)
    ]
    pd.DataFrame(rows).to_parquet(folder / "completions" / "completions_00010.parquet")
    assert [group.size for group in read_groups(read_run(folder), [])] == [2]


def test_a_template_fits_every_prompt_alike_and_a_thought_only_its_own():
    for depends in (False, True):
        for reasoning in pick_traces(make_measurement(3, depends)):
            own, *others, worst = (candidate.probability for candidate in reasoning.candidates)
            assert own == pytest.approx(math.exp(-0.3), rel=0.01)
            assert max(own, *others) - worst < 0.01 if not depends else own > 1.9 * max(others)
    ranks = [one.candidates[0].rank for one in pick_traces(make_measurement(3, False))]
    assert ranks == sorted(ranks) and ranks[0] == 1 and ranks[-1] > 4


def test_only_what_tells_prompts_apart_is_shown():
    assert distinguishing(["a\nb\nc", "a\nd\nc", "a\nd\ne\nc"]) == {
        "a\nb\nc": "b",
        "a\nd\nc": "d",
        "a\nd\ne\nc": "d\ne",
    }
    assert distinguishing(["alone\nhere"]) == {"alone\nhere": "alone\nhere"}


def test_a_run_given_twice_is_shown_once(runs, words_only):
    page = report_of(runs[0], runs[0].parent / "." / runs[0].name)
    assert page.headline.count("healthy") == 1 and "of 2" not in page.headline


def test_runs_of_one_name_are_told_apart_by_their_parents(tmp_path, words_only):
    folders = [make_run(tmp_path / parent / "run", steps=1) for parent in ("first", "second")]
    text = report_of(*folders).text
    assert "first/run" in text and "second/run" in text
    assert distinct_labels([Path("/a/b/run"), Path("/c/b/run"), Path("/c/other")]) == ["a/b/run", "c/b/run", "other"]


def test_figures_name_the_score_and_the_step_of_their_measurement(tmp_path):
    run = read_run(make_run(tmp_path / "run", steps=10))
    run.settings["snr_score"] = "reward_std"
    measurements = [read_measurement(path) for path in run.measurements]
    drawn = [(name, caption) for name, caption, _ in figures_of(run, measurements)]
    assert [name for name, _ in drawn] == [
        "training",
        "quadrant",
        "proxies",
        "cross_scores",
        "cross_scores",
        "reward_variance",
    ]
    captions = [caption for _, caption in drawn]
    assert "arXiv 2604.06268" in captions[1] and "](" not in captions[1]
    assert captions[3].endswith("at step 1") and captions[4].endswith("at step 10")
    assert captions[5] == "Reward std of the groups at step 10, and which of them the filter kept"
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


def test_reward_is_not_called_success(tmp_path, words_only):
    folders = [make_run(tmp_path / name, steps=10) for name in ("free", "game")]

    def change(state):
        for row in state["log_history"]:
            del row["env/frozen_lake/success"]

    edit_state(folders[0], change)
    assert "Verdict Reward in training Completions sampled" in report_of(folders[0]).text
    assert "Verdict Success in training Completions sampled" in report_of(folders[1]).text
    assert "Verdict Success in training or reward in training" in report_of(folders[1], folders[0]).text


def test_unfinished_and_resumed_runs_say_so(tmp_path, words_only):
    text = report_of(make_run(tmp_path / "run", steps=20, ended=False, resumed_at=[5, 10])).text
    assert "unfinished: at step 20 of 100, resumed at step 5, 10" in text


def test_held_out_success_comes_with_its_interval(tmp_path, words_only):
    folder = make_run(tmp_path / "run", steps=10)
    for when, success in (("before", 0.25), ("after", 0.5)):
        metrics = {"success": success, "success_ci_low": success - 0.05, "success_ci_high": success + 0.05}
        (folder / f"evaluation_{when}.json").write_text(json.dumps(metrics))
    assert "25% 50% 95 % interval 20% to 30%, then 45% to 55%" in report_of(folder).text


def test_settings_that_differ_come_first(runs, words_only):
    assert "Settings healthy drifted seed 0 60 beta 0.0 0.0" in report_of(*runs).text


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


def test_held_out_success_says_on_how_many_tasks_it_stands(tmp_path, words_only):
    folder = evaluated(tmp_path / "run", 0.4, 0.5)
    for when, tasks in (("before", 64), ("after", 1024)):
        path = folder / f"evaluation_{when}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_prompts": tasks}))
    assert "64 to 1,024 tasks" in report_of(folder).text


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


def length_reward(completion_ids, **kwargs):
    return [float(len(ids) % 3) for ids in completion_ids]


def test_a_real_run_shows_its_completions_and_reasonings(policy_path, prompts, make_args):
    args = make_args(log_completions=True, num_completions_to_print=0)
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, args=args, train_dataset=prompts)
    trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=2))
    trainer.train()
    page = report_of(args.output_dir)
    assert "finished 3 steps" in page.text
    assert "Own prompt ranks" in page.text
    assert "SNRFilteredGRPOTrainer" in page.text
    best = read_groups(read_run(args.output_dir), [])[0]
    assert len(best.completions) == 4 and best.completions[0].reward == max(one.reward for one in best.completions)
    assert best.completions[0].text.head[:20].split()[0] in page.text


def names_no_field(completions, **kwargs):
    """Pays for reasoning that is closed and has no number in it, and so nothing of the map."""
    texts = [completion_text(completion).partition("</think>") for completion in completions]
    return [bool(closed) - 0.1 * sum(char.isdigit() for char in reasoning) for reasoning, closed, _ in texts]


@pytest.mark.full
def test_of_two_real_runs_the_report_tells_which_one_collapsed_and_when(tmp_path):
    """One is paid for its task, the other for saying nothing of it."""
    env = make_env("frozen_lake", size=4)
    for name, rewards, learning_rate in (("healthy", env.reward_funcs, 1e-4), ("empty words", names_no_field, 1e-3)):
        args = SNRFilteredGRPOConfig(
            str(tmp_path / name),
            per_device_train_batch_size=32,
            gradient_accumulation_steps=2,
            num_generations=8,
            max_completion_length=64,
            max_steps=8,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_steps=8,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = SNRFilteredGRPOTrainer(resolve_model("tiny"), rewards, args, env.dataset(1024, seed=0))
        trainer.add_callback(MutualInformationCallback(trainer, every=2))
        trainer.train()
    collapse = read_run(tmp_path / "empty words").collapses[-1]
    assert collapse.regime == "template_collapse" and 2 < collapse.first < 8 and collapse.last is None
    page = report_of(tmp_path / "healthy", tmp_path / "empty words")
    assert "1 of 2" in page.headline and re.search(rf"“empty words”.* step {collapse.first}$", page.headline)


# The gain of a run, and the control beside it

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


def without_signal(folder, steps):
    """The rows of the first steps as those of empty ones."""

    def change(state):
        for row in state["log_history"][:steps]:
            row |= {"snr/kept_fraction": 0.0, "snr/update_compute_fraction": 0.0}

    edit_state(folder, change)
    return folder


def test_a_report_opens_with_the_gain(tmp_path, words_only):
    headline = report_of(evaluated(tmp_path / "demo", 0.458, 0.563)).headline
    assert headline.startswith("“demo”: held-out success 46% → 56%")


def test_a_gain_that_chance_may_have_made_is_not_shown_and_the_tasks_that_would_tell_are_counted(tmp_path):
    """By the two-proportion formula, of which 0.458 and 0.478 are worked out here by hand."""
    sure, unsure = evaluated(tmp_path / "sure", 0.458, 0.563), evaluated(tmp_path / "unsure", 0.458, 0.478)
    assert (
        "not shown" not in report_of(sure).headline.partition(";")[0] and "no change" not in report_of(sure).headline
    )
    tasks = math.ceil((1.96 + 0.842) ** 2 * (0.458 * 0.542 + 0.478 * 0.522) / 0.02**2)
    assert f"no change shown: about {tasks:,} held-out tasks would tell" in report_of(unsure).headline


@pytest.mark.full
def test_runs_whose_ends_do_not_surely_differ_have_no_best_one(tmp_path):
    ends = [evaluated(tmp_path / str(end), 0.4, end) for end in (0.5, 0.563, 0.59, 0.7)]
    assert "the best two are not shown to differ" in report_of(*ends[:3]).headline  # a third is surely worse
    assert "not shown to differ" not in report_of(ends[0], ends[3]).headline


def test_a_value_of_mutual_information_stands_beside_the_bound_of_its_own_measurement(tmp_path, words_only):
    folder = make_run(tmp_path / "run", None, 20, ended=True)

    def change(state):  # the best one is of more prompts than the last
        rows = [row for row in state["log_history"] if "mi/first_turn/mi_seq" in row]
        rows[0] |= {"mi/first_turn/mi_seq": 2.75, "mi/first_turn/mi_upper_bound": 2.77}
        rows[-1] |= {"mi/first_turn/mi_seq": 1.5, "mi/first_turn/mi_upper_bound": 2.08}
        state["log_history"].append({"step": 21, "mi/first_turn/mi_upper_bound": 0.69})

    edit_state(folder, change)
    assert "1.50 nats, at most 2.08" in report_of(folder).text
    section = diagnostics_section(read_run(folder))
    assert "| I(X;Z) (nats) | 2.75 (at most 2.77) | 1.50 (at most 2.08) | 2.75 (at most 2.77) (step" in section


def test_every_link_of_the_contents_leads_to_a_part_of_the_page(tmp_path, words_only):
    page = render_report([read_run(evaluated(tmp_path / name, 0.4, 0.6)) for name in ("one", "two")])
    (contents,) = re.findall(r"<nav.*?</nav>", page, re.DOTALL)
    links = re.findall('href="#([^"]*)"', contents)
    assert {"run-1", "run-2", "settings-and-versions"} <= set(links)
    assert all(page.count(f'id="{link}"') == 1 for link in links)


def test_a_report_opens_with_the_gain_and_the_control(tmp_path, words_only):
    run = evaluated(tmp_path / "demo", 0.458, 0.563)
    control = evaluated(tmp_path / "demo_control", 0.458, 0.541, snr_strategy="all")
    headline = report_of(run, control).headline
    assert re.search("“demo”.* 46% → 56%.*“demo_control”.*nothing filtered.* 46% → 54%", headline)


def test_each_row_of_the_first_table_names_the_settings_in_which_runs_differ(tmp_path, words_only):
    ends = [evaluated(tmp_path / name, 0.4, 0.5, snr_value=value) for name, value in (("a", 0.5), ("b", 0.25))]
    table = report_of(*ends).text.partition("How to read these numbers")[0]
    assert table.count("snr_value: 0.5") == table.count("snr_value: 0.25") == 1 and "snr_strategy" not in table


def test_trls_own_trainer_counts_as_a_control_and_a_subclass_of_ours_does_not(tmp_path):
    kinds = {"GRPOTrainer": True, "MyTrainer": False, "SNRFilteredGRPOTrainer": False}
    for name, is_control in kinds.items():
        assert read_run(evaluated(tmp_path / name, 0.4, 0.5, trainer=name)).filters_nothing == is_control


def with_cost(folder, sampled, plain, update, plain_update):
    def change(state):
        names = ("sampled_completions", "plain_completions", "update_positions", "plain_update_positions")
        sums = zip(names, (sampled, plain, update, plain_update), strict=True)
        state["log_history"][-1] |= {f"cost/{name}": float(value) for name, value in sums}

    edit_state(folder, change)
    return folder


def test_cost_counts_the_sampling_beside_the_updates(tmp_path, words_only):
    folder = with_cost(make_run(tmp_path / "run", None, 20), 564, 192, 60, 100)
    text = report_of(folder).text.split("How to read these numbers")[0]
    assert re.search(r"2\.94\s+times plain TRL.*0\.60\s+times plain TRL", text, re.DOTALL)
    section = diagnostics_section(read_run(folder))
    assert "564 completions sampled; plain TRL would have sampled 192 (ratio 2.94)" in section
    assert re.search(
        r"completions sampled, against plain TRL \|  \| 2\.94 .*update positions.* 0\.60 ", section, re.DOTALL
    )
    cost = summarize(TrainerState(log_history=read_run(folder).log_history), folder)["cost"]
    assert (cost["sampling_ratio"], cost["update_ratio"]) == (564 / 192, 0.6)


def test_nothing_is_said_of_costs_that_nobody_counted(tmp_path, words_only):
    folder = make_run(tmp_path / "run", None, 20)

    def forget(state):
        for row in state["log_history"]:
            row.pop("cost/sampled_completions")

    edit_state(folder, forget)
    assert "times plain TRL" not in report_of(folder).text
    assert "plain TRL" not in diagnostics_section(read_run(folder))
    assert summarize(TrainerState(log_history=read_run(folder).log_history), folder)["cost"] is None


def test_the_outcome_stands_before_the_cost_and_the_cost_before_the_diagnosis(tmp_path, words_only):
    folder = with_cost(evaluated(tmp_path / "run", 0.4, 0.6), 564, 192, 60, 100)
    section = diagnostics_section(read_run(folder))
    places = [section.index(part) for part in ("Held-out success 40.0% → 60.0%", "Cost: 564", "Reasoning depends")]
    assert places == sorted(places)
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    places = [next(i for i, row in enumerate(rows) if part in row) for part in ("held-out", "sampled", "retrieval")]
    assert places == sorted(places)


def test_no_tick_stands_over_a_run_that_ends_below_random_play(tmp_path, words_only):
    """Its reward rises, and its reasoning depends on its prompt."""
    tick, ends = "m5.5 10.5 3 3 6-7", {}
    for random_success in (0.1, 0.9):
        folder = evaluated(make_run(tmp_path / str(random_success), None, 100, ended=True), 0.4, 0.6)
        after = folder / "evaluation_after.json"
        after.write_text(json.dumps(json.loads(after.read_text()) | {"random_success": random_success}))

        def learn(state):
            for number, row in enumerate(state["log_history"]):
                row["reward"] = number / 100

        edit_state(folder, learn)
        ends[random_success] = render_report([read_run(folder)])
    assert tick in ends[0.1] and tick not in ends[0.9]
