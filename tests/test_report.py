"""The report of runs: what it says first, what it shows where data are missing, and that hostile text stays text."""

import json
import math
import random
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import torch
from browser import open_browser

from ragen2_trl import (
    MutualInformationCallback,
    SNRFilteredGRPOConfig,
    SNRFilteredGRPOTrainer,
    cli,
    information_metrics,
)
from ragen2_trl.envs import make_env
from ragen2_trl.reporting import report
from ragen2_trl.reporting.card import FIGURES
from ragen2_trl.reporting.examples import MAX_GROUP, distinguishing, pick_reasonings, read_groups
from ragen2_trl.reporting.gallery import draw_figures, figures_of, measurement_figures
from ragen2_trl.reporting.report import distinct_labels, render_report
from ragen2_trl.reporting.run import read_run
from ragen2_trl.reporting.saved_measurement import SavedMeasurement, read_measurement
from ragen2_trl.tiny import resolve_model

STEPS, EVERY, PROMPTS, GROUP = 100, 10, 8, 4
COLLAPSED_AT = 60
HOSTILE = (
    "</pre></script><script>document.title='owned'</script><img src=https://evil.example/x.png onerror=alert(1)>"
    "<style>@import url(https://evil.example/a.css)</style>{{ 7 * 7 }}&lt;b&gt;\u202egnp.exe\u0000\u001b[31mred $x$"
)


class Page(HTMLParser):
    """The elements, attributes and words of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.attributes, self.words = set(), set(), []
        self.headline = ""
        self._open = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self._open.append(tag)

    def handle_endtag(self, tag):
        if tag in self._open:
            del self._open[len(self._open) - 1 - self._open[::-1].index(tag) :]

    def handle_data(self, data):
        if "style" not in self._open and "svg" not in self._open:
            self.words.append(data)
        if self._open[-1:] == ["h1"]:
            self.headline += data

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def prompts_of(suffix=""):
    grids = [f"{'_ ' * i}P{' _' * (PROMPTS - i)} G" for i in range(PROMPTS)]
    return [[{"role": "user", "content": f"Walk from P to G.\n{grid}{suffix}\nThink first."}] for grid in grids]


def make_measurement(step, depends, reasoning="Go right.", suffix=""):
    """Reasonings that their own prompt explains far better than others, or that all prompts explain alike."""
    generator = torch.Generator().manual_seed(step)
    index = torch.arange(PROMPTS).repeat_interleave(GROUP)
    lengths = torch.full((len(index),), 20)
    cross_logps = -6.0 - 0.01 * torch.rand(len(index), PROMPTS, generator=generator)
    if depends:
        cross_logps -= 15.0
        cross_logps[torch.arange(len(index)), index] += 15.0
    rewards = torch.tensor([[1.0, 0.0, 0.0, math.nan]]).repeat(PROMPTS, 1)
    return SavedMeasurement(
        step=step,
        metrics=information_metrics(cross_logps, lengths, index),
        regime="diverse" if depends else "template_collapse",
        prompts=[messages[0]["content"] for messages in prompts_of(suffix)],
        reasonings=[f"{reasoning} {number}\ud800" for number in range(len(index))],  # no text, but JSON
        prompt_index=index,
        lengths=lengths,
        cross_logps=cross_logps,
        rewards=rewards,
        scores=torch.linspace(0, 0.3, PROMPTS),
        kept=torch.linspace(0, 0.3, PROMPTS) > 0.1,
    )


def make_run(folder, collapsed_at=None, steps=STEPS, text="<think>Go right.</think>Right", suffix="", **lifecycle):
    """A run's folder as training leaves it behind."""
    rng = random.Random(folder.name)
    rows, regimes = [], []
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "loss": rng.gauss(0, 0.1),
            "reward": 0.5 + rng.gauss(0, 0.05),
            "rewards/success/mean": 0.5,
            "env/frozen_lake/success": 0.5 + 0.3 * step / steps,
            "entropy": 0.5,
            "snr/kept_fraction": 0.6,
            "snr/update_compute_fraction": 0.55,
        }
        if step == 1 or step % EVERY == 0:
            measurement = make_measurement(step, collapsed_at is None or step < collapsed_at, text, suffix)
            row |= {f"mi/first_turn/{key}": value for key, value in measurement.metrics.items()}
            regimes.append([step, measurement.regime])
            if step in (1, steps):
                measurement.save(folder / "_measurements")
        rows.append(row)
    state = {
        "log_history": rows,
        "global_step": steps,
        "max_steps": STEPS,
        "stateful_callbacks": {
            "ragen2_mutual_information": {"watch": {"regimes": regimes}},
            "ragen2_run": {"ended": True, "resumed_at": []} | lifecycle,
        },
    }
    (folder / "diagnostics").mkdir(parents=True)
    (folder / "diagnostics" / "trainer_state.json").write_text(json.dumps(state))
    about = {"settings": {"beta": 0.0, "seed": collapsed_at or 0}, "versions": {"trl": "1.16.0"}}
    (folder / "diagnostics" / "run.json").write_text(json.dumps(about))
    save_completions(folder, steps, text, suffix)
    return folder


def save_completions(folder, step, text, suffix=""):
    """As TRL's `log` writes them: the success of each is told by its text."""
    rows = [
        {
            "step": step,
            "prompt": prompt,
            "completion": [{"role": "assistant", "content": f"{text} {folder.name} {number}"}],
            "success": float(number == 2),
            "advantage": 0.0,
        }
        for prompt in prompts_of(suffix)
        for number in range(GROUP)
    ]
    (folder / "completions").mkdir(exist_ok=True)
    pd.DataFrame(rows).to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")


def report_of(*folders):
    return Page(render_report([read_run(folder) for folder in folders]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A healthy run and a collapsed one."""
    folder = tmp_path_factory.mktemp("runs")
    return make_run(folder / "healthy"), make_run(folder / "drifted", COLLAPSED_AT)


@pytest.fixture(scope="module")
def compared(runs, tmp_path_factory):
    """The file with the report of both."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    cli.main(["report", *map(str, runs), "--output", str(path)])
    return path


@pytest.fixture
def words_only(monkeypatch):
    """Leaves out the figures, which take nearly all of a report's time."""
    monkeypatch.setattr(report, "_figures", lambda *_: [])
    monkeypatch.setattr(report, "_comparison", lambda _: None)


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


def test_headline_tells_which_run_collapsed_and_when(compared):
    page = Page(compared.read_text())
    assert page.headline == "1 of 2 runs collapsed: “drifted”, template collapse since step 60"


def test_headline_claims_nothing_of_runs_that_were_not_measured(tmp_path, words_only):
    silent = [make_run(tmp_path / name, None, 20) for name in ("a", "b")]
    for folder in silent:
        without_information(folder)
    assert report_of(*silent).headline == "None of 2 runs was measured"
    healthy = make_run(tmp_path / "c", None, 20)
    assert report_of(healthy, *silent).headline == "No measured run is collapsed; 2 of 3 not measured"


def test_first_screen_has_the_numbers_of_both_runs(compared):
    text = Page(compared.read_text()).text.split("How to read these numbers")[0]
    for words in ("finished 100 steps", "Reasoning depends on its prompt", "Template collapse since step 60"):
        assert words in text
    assert "100% → 100%".replace(" → ", " ") in text  # the arrow is the style's
    assert "chance 12.5%" in text
    assert f"nats, at most {math.log(PROMPTS):.2f}" in text
    assert "45% of the updates" in text


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
        assert browser.evaluate("document.title").startswith("1 of 2 runs collapsed")
        assert "<script>document.title='owned'</script>" in browser.evaluate("document.body.textContent")


def test_a_page_that_loads_and_runs_would_be_found_out(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(
        "<meta http-equiv=Content-Security-Policy content=\"script-src 'none'\">"
        "<script>1</script><img src='https://evil.invalid/x.png'>"
    )
    browser.open(path)
    assert "https://evil.invalid/x.png" in browser.requests
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


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


def test_a_template_fits_every_prompt_alike_and_a_thought_only_its_own():
    for depends in (False, True):
        for reasoning in pick_reasonings(make_measurement(3, depends)):
            own, *others, worst = (candidate.probability for candidate in reasoning.candidates)
            assert own == pytest.approx(math.exp(-0.3), rel=0.01)
            assert max(own, *others) - worst < 0.01 if not depends else own > 1.9 * max(others)
    ranks = [one.candidates[0].rank for one in pick_reasonings(make_measurement(3, False))]
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
    assert page.headline == "“healthy”: reasoning depends on its prompt"


def test_runs_of_one_name_are_told_apart_by_their_parents(tmp_path, words_only):
    folders = [make_run(tmp_path / parent / "run", steps=1) for parent in ("first", "second")]
    text = report_of(*folders).text
    assert "first/run" in text and "second/run" in text
    assert distinct_labels([Path("/a/b/run"), Path("/c/b/run"), Path("/c/other")]) == ["a/b/run", "c/b/run", "other"]


def edit_state(folder, change):
    path = folder / "diagnostics" / "trainer_state.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))


def without_information(folder):
    def change(state):
        state["stateful_callbacks"].pop("ragen2_mutual_information")
        state["log_history"] = [
            {key: value for key, value in row.items() if not key.startswith("mi/")} for row in state["log_history"]
        ]

    edit_state(folder, change)


def with_nan_rows(folder):
    def change(state):
        state["log_history"][3] |= {"loss": math.nan, "reward": math.nan, "entropy": math.inf}

    edit_state(folder, change)


def killed_in_its_first_step(folder):
    def change(state):
        state |= {"log_history": [], "global_step": 0, "stateful_callbacks": {}}

    edit_state(folder, change)


def all_nan(folder):
    def change(state):
        for row in state["log_history"]:
            row |= {key: math.nan for key in row if key != "step"}

    edit_state(folder, change)


def with_broken_files(folder):
    edit_state(folder, lambda state: state.update(global_step=99))
    (folder / "completions" / "completions_00099.parquet").write_bytes(b"PAR1 is not all it takes")
    (folder / "_measurements" / "measurement_00098.json").write_text('{"step": 98, "prompts": [')
    (folder / "_measurements" / "measurement_00099.json").write_bytes(b"\xff\xfe")


def with_odd_measurement(folder):
    path = folder / "_measurements" / "measurement_00010.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prompt_index": [99] * PROMPTS * GROUP}))


def with_stray_rows(folder):
    def change(state):
        del state["log_history"][3]["step"]
        state["log_history"][4] |= {"step": None}
        state["log_history"] += ["no row", None]

    edit_state(folder, change)


def without_any_step(folder):
    def change(state):
        for row in state["log_history"]:
            del row["step"]

    edit_state(folder, change)


def with_prompts_of_strings(folder):
    path = folder / "completions" / "completions_00010.parquet"
    rows = pd.read_parquet(path)
    rows["prompt"] = [["Prompt 1", prompt[0]["content"]] for prompt in rows["prompt"]]
    rows.to_parquet(path)


def with_prompts_of_numbers(folder):
    path = folder / "completions" / "completions_00010.parquet"
    rows = pd.read_parquet(path)
    rows["prompt"] = [[1, 2]] * len(rows)
    rows.to_parquet(path)


def with_two_rewards_of_one_name(folder):
    path = folder / "diagnostics" / "run.json"
    about = json.loads(path.read_text())
    about["settings"]["reward_weights"] = [1.0, 0.5]
    path.write_text(json.dumps(about))


def with_prompts_that_are_no_texts(folder):
    path = folder / "_measurements" / "measurement_00010.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prompts": list(range(PROMPTS))}))


def without_texts(folder):
    for path in [*(folder / "_measurements").iterdir(), *(folder / "completions").iterdir()]:
        path.unlink()


NUMBERS, READ, THOUGHT = "45% of the updates", "Prompt 1", "Own prompt ranks 1 of 8"


@pytest.mark.parametrize(
    ("spoil", "said", "still_there"),
    [
        (without_information, ["trainer.add_callback(MutualInformationCallback(trainer))"], [NUMBERS, READ]),
        (with_nan_rows, ["1 of 10 log rows", "at step 4: loss, reward, entropy"], [NUMBERS, READ, THOUGHT]),
        (killed_in_its_first_step, ["No training step was logged", "unfinished: at step 0 of 100"], []),
        (all_nan, ["10 of 10 log rows"], [READ, THOUGHT]),
        (
            with_broken_files,
            [f"{name} cannot be read" for name in ("completions_00099", "measurement_00098", "measurement_00099")],
            [NUMBERS, READ, THOUGHT],
        ),
        (with_odd_measurement, ["prompt_index must be between 0 and 7"], [NUMBERS, READ, THOUGHT]),
        (with_stray_rows, ["2 of 10 log rows have no step"], [NUMBERS, READ, THOUGHT]),
        (without_any_step, ["10 of 10 log rows have no step"], [READ, THOUGHT]),
        (with_prompts_of_strings, [], [NUMBERS, READ, THOUGHT]),
        (with_prompts_of_numbers, ["completions_00010 cannot be read"], [NUMBERS, THOUGHT]),
        (
            with_two_rewards_of_one_name,
            ["reward_weights [1.0, 0.5] do not fit", "(success): their sums are shown with equal weights"],
            [NUMBERS, READ, THOUGHT],
        ),
        (with_prompts_that_are_no_texts, ["prompts and reasonings must be texts"], [NUMBERS, READ, THOUGHT]),
        (without_texts, ["log_completions=True", "_measurements/"], [NUMBERS]),
    ],
)
def test_what_is_missing_is_said_and_the_rest_is_shown(tmp_path, spoil, said, still_there):
    folder = make_run(tmp_path / "run", steps=10)
    spoil(folder)
    text = report_of(folder).text.replace(".parquet", "").replace(".json", "")
    for words in [*said, *still_there]:
        assert words in text, words


def test_runs_without_a_number_to_plot_can_be_compared(tmp_path):
    folders = [make_run(tmp_path / name, steps=1) for name in ("blank", "killed", "sound")]
    all_nan(folders[0])
    killed_in_its_first_step(folders[1])
    for chosen in (folders, folders[:2]):
        assert "1 of 1 log rows hold values that are no finite numbers" in report_of(*chosen).text


def test_a_run_without_steps_can_be_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_figures", lambda *_: [])
    folders = [make_run(tmp_path / name, steps=10) for name in ("stepless", "sound")]
    without_any_step(folders[0])
    assert "10 of 10 log rows have no step" in report_of(*folders).text


def test_figures_name_the_score_and_the_step_of_their_measurement(tmp_path):
    run = read_run(make_run(tmp_path / "run", steps=10))
    run.settings["snr_score"] = "reward_std"
    measurements = [read_measurement(path) for path in run.measurements]
    drawn = [(name, caption) for name, caption, _ in figures_of(run, measurements)]
    assert [name for name, _ in drawn] == [
        "training",
        "quadrant",
        "cross_scores",
        "cross_scores",
        "reward_variance",
        "compute",
    ]
    captions = [caption for _, caption in drawn]
    assert "arXiv 2604.06268" in captions[1] and "](" not in captions[1]
    assert captions[2].endswith("at step 1") and captions[3].endswith("at step 10")
    assert captions[4] == "Reward std of the groups at step 10, and which of them the filter kept"
    page = render_report([run])
    assert "Reward std of 8 groups" in page and "Reward variance" not in page


def test_figures_of_the_card_are_those_of_the_report(tmp_path):
    run = read_run(make_run(tmp_path / "run", steps=10))
    assert [name for name, _, _ in figures_of(run)] == list(FIGURES)
    draw_figures(run, tmp_path)
    assert {path.name for path in tmp_path.glob("*.*")} == {
        f"{name}{end}" for name in FIGURES for end in (".png", ".svg")
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
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
    assert "Verdict Reward Retrieval accuracy" in report_of(folders[0]).text
    assert "Verdict Success Retrieval accuracy" in report_of(folders[1]).text
    assert "Verdict Success or reward" in report_of(folders[1], folders[0]).text


def test_a_single_row_is_a_report(tmp_path):
    page = report_of(make_run(tmp_path / "run", steps=1))
    assert page.headline == "“run”: reasoning depends on its prompt"


def test_unfinished_and_resumed_runs_say_so(tmp_path, words_only):
    text = report_of(make_run(tmp_path / "run", steps=20, ended=False, resumed_at=[5, 10])).text
    assert "unfinished: at step 20 of 100, resumed at step 5, 10" in text


def test_held_out_success_comes_with_its_interval(tmp_path, words_only):
    folder = make_run(tmp_path / "run", steps=10)
    for when, success in (("before", 0.25), ("after", 0.5)):
        metrics = {"success": success, "success_ci_low": success - 0.05, "success_ci_high": success + 0.05}
        (folder / f"evaluation_{when}.json").write_text(json.dumps(metrics))
    assert "25% 50% held out; 95 % interval 20% to 30%, then 45% to 55%" in report_of(folder).text


def test_settings_that_differ_come_first(runs, words_only):
    assert "Settings healthy drifted seed 0 60 beta 0.0 0.0" in report_of(*runs).text


def test_a_folder_without_a_run_ends_with_code_2_and_its_name(runs, tmp_path, capsys):
    output = tmp_path / "report.html"
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(runs[0]), str(tmp_path / "nothing here"), "--output", str(output)])
    assert ended.value.code == 2
    assert "nothing here'" in capsys.readouterr().err
    assert not output.exists()


def test_a_place_that_cannot_be_written_ends_with_code_2(runs, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(runs[0]), "--output", str(tmp_path)])
    assert ended.value.code == 2
    assert "--output cannot be written" in capsys.readouterr().err


def length_reward(completion_ids, **kwargs):
    return [float(len(ids) % 3) for ids in completion_ids]


def test_a_real_run_shows_its_completions_and_reasonings(policy_path, prompts, make_args):
    args = make_args(log_completions=True, num_completions_to_print=0)
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, args=args, train_dataset=prompts)
    trainer.add_callback(MutualInformationCallback(trainer, every=1))
    trainer.train()
    page = report_of(args.output_dir)
    assert "finished 3 steps" in page.text
    assert "Own prompt ranks" in page.text
    assert "SNRFilteredGRPOTrainer" in page.text
    best = read_groups(read_run(args.output_dir), [])[0]
    assert len(best.completions) == 4 and best.completions[0].reward == max(one.reward for one in best.completions)
    assert best.completions[0].text.head[:20].split()[0] in page.text


@pytest.mark.slow
def test_of_two_real_runs_the_report_tells_which_one_collapsed_and_when(tmp_path):
    """The same training twice: with the demo's learning rate, and with one that wrecks the model."""
    env = make_env("frozen_lake", size=4)
    for name, learning_rate in (("healthy", 1e-4), ("wrecked", 3e-3)):
        args = SNRFilteredGRPOConfig(
            str(tmp_path / name),
            per_device_train_batch_size=32,
            gradient_accumulation_steps=2,
            num_generations=8,
            max_completion_length=64,
            max_steps=60,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_steps=60,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = SNRFilteredGRPOTrainer(resolve_model("tiny"), env.reward_funcs, args, env.dataset(1024, seed=0))
        trainer.add_callback(MutualInformationCallback(trainer, every=5))
        trainer.train()
    wrecked = read_run(tmp_path / "wrecked")
    collapse = wrecked.collapses[-1]  # its format may be lost before
    assert collapse.regime == "template_collapse" and 1 < collapse.first < 60 and collapse.last is None
    page = report_of(tmp_path / "healthy", tmp_path / "wrecked")
    assert page.headline == f"1 of 2 runs collapsed: “wrecked”, template collapse since step {collapse.first}"
