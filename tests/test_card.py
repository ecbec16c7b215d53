"""The model cards that real trainings leave: what they say, and that it is true."""

import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
from cards import OURS, STOCK, BrokenCard, Watcher, figures_in, make, read_card, rows_of, section_of
from cards import trained_fixture as trained_fixture
from cards import without_figures_fixture as without_figures_fixture
from conftest import PROMPTS
from datasets import Dataset
from huggingface_hub import ModelCard

from ragen2_trl.callbacks import run_record
from ragen2_trl.callbacks.run_record import RunRecord
from ragen2_trl.envs import DatasetEnvironment, make_env
from ragen2_trl.record.group_rewards import read_group_rewards
from ragen2_trl.record.run import MEAN_OVER, Run, read_run, run_of, running_means
from ragen2_trl.record.saved_measurement import SavedMeasurement
from ragen2_trl.record.settings import public_prompt
from ragen2_trl.report.card import FIGURES, HEADING, add_diagnostics, diagnostics_section, headline, inline

pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_every_trainer_adds_its_diagnostics_to_all_that_trl_wrote(trained, monkeypatch, tmp_path):
    trainer, _ = trained
    card = ModelCard.load(Path(trainer.args.output_dir) / "README.md")
    assert {"ragen2", "trl", "generated_from_trainer", *trainer._tag_names} <= set(card.data.tags)
    assert ("snr-filter" in card.data.tags) == (type(trainer) is OURS)
    assert card.text.count(HEADING) == 1
    assert sum(isinstance(callback, RunRecord) for callback in trainer.callback_handler.callbacks) == 1
    monkeypatch.setattr(trainer.args, "output_dir", str(tmp_path))
    type(trainer).create_model_card(trainer, "run")  # TRL's own
    written = ModelCard.load(tmp_path / "README.md").text
    changed = [line for line in written.splitlines() if line not in card.text.splitlines()]
    # A base model and a repository that there are not; and TRL's own question, where ours is of the task.
    assert all("None" in line or line.startswith(("question = ", "output = ")) for line in changed), changed
    assert len(changed) in (2, 4)


def test_numbers_on_the_card_are_those_of_the_uploaded_state(trained):
    trainer, _ = trained
    folder = Path(trainer.args.output_dir)
    history = json.loads((folder / "diagnostics" / "trainer_state.json").read_text())["log_history"]
    *_, before, last = [row for row in history if "reward" in row]
    results = {result.metric_type: result for result in ModelCard.load(folder / "README.md").data.eval_results}
    reward = (before["reward"] + last["reward"]) / 2  # a mean over half of a run of four steps
    assert results["mean_reward"].metric_value == pytest.approx(reward, abs=1e-6)
    for kind, key in (
        ("mutual_information", "mi_seq"),
        *((f"retrieval_{one}",) * 2 for one in ("accuracy", "chance")),
    ):
        assert results[kind].metric_value == pytest.approx(last[f"mi/first_turn/{key}"], abs=1e-6)
    assert all(result.verified is False and result.dataset_name == "bandit" for result in results.values())
    table, accuracy = rows_of(read_card(folder)), last["mi/first_turn/retrieval_accuracy"]
    assert table["retrieval accuracy"][1] == f"{accuracy:.1%} (chance {last['mi/first_turn/retrieval_chance']:.1%})"
    assert table["reward in training"][1] == f"{reward:.3f}"
    assert ("completions kept" in table) == (type(trainer) is OURS)


def test_the_card_says_how_the_run_was_made(trained):
    trainer, _ = trained
    text = section_of(read_card(trainer.args.output_dir))
    assert "`bandit, max_actions=2, protocol=text`, 1 turn of up to 2 actions" in text
    for part in (f"`trainer={type(trainer).__name__}`", "`seed=3`", "`learning_rate=0.01`", "torch 2.", "ragen2-trl "):
        assert part in text
    assert ("`snr_strategy=top_p`" in text) == (type(trainer) is OURS)


def test_outcome_and_findings_stand_at_the_head_of_the_card(trained):
    trainer, _ = trained
    text = read_card(trainer.args.output_dir)
    head = text[: text.index("## Quick start")]
    said = next(finding.sentence for finding in run_of(trainer).findings if finding.kind == "reasoning")
    assert inline(said) in head and "finished 4 steps" in head


def test_the_quick_start_asks_a_question_of_the_task(trained):
    trainer, _ = trained
    text = read_card(trainer.args.output_dir)
    (script,) = re.findall(r"```python\n(from transformers import pipeline.+?)```", text, re.DOTALL)
    asked = []

    def pipeline(*args, **kwargs):
        return lambda messages, **options: asked.append(messages) or [{"generated_text": ""}]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.pipeline", pipeline)
        exec(script, {"print": lambda *_: None})
    env = make_env("bandit", max_actions=2, protocol="text")
    assert asked == [env.dataset(1, seed=0)[0]["prompt"]]


def test_a_dataset_that_is_a_task_stays_out_of_the_quick_start():
    def right(completions, **columns):
        return [1.0 for _ in completions]

    assert public_prompt(DatasetEnvironment(Dataset.from_dict({"prompt": PROMPTS}), right).reward_funcs) is None
    assert public_prompt(make_env("bandit").reward_funcs) is not None


def test_figures_on_the_card_are_there(trained):
    trainer, _ = trained
    folder = Path(trainer.args.output_dir)
    figures = re.findall(r"!\[.+?\]\((.+?)\)", section_of(read_card(folder)))
    assert all((folder / path).is_file() for path in figures)
    names = ["training", "quadrant", "cross_scores", "reward_variance"]
    expected = [f"diagnostics/{name}.png" for name in names] if type(trainer) is OURS else []
    assert figures == expected
    assert all((folder / path).with_suffix(".svg").is_file() for path in figures)


def test_a_card_amid_the_run_says_so_and_the_last_one_says_that_it_has_ended(trained):
    trainer, watcher = trained
    assert "unfinished: at step 2 of 4" in section_of(watcher.cards[2])
    assert f"(step {3})" not in watcher.cards[2]
    for text in (watcher.cards[4], read_card(trainer.args.output_dir)):
        assert "finished 4 steps" in section_of(text)
        assert "unfinished" not in text


def test_checkpoints_write_numbers_and_the_end_draws_figures_of_them(trained):
    trainer, watcher = trained
    assert watcher.figures == {2: set(), 4: set()}
    assert all("chance 50.0%" in value for value in rows_of(watcher.cards[2])["retrieval accuracy"][:3])
    for step in (2, 4):
        assert "not drawn yet" in watcher.cards[step] and "`ragen2-trl report`" in watcher.cards[step]
    final = read_card(trainer.args.output_dir)
    assert ("not drawn yet" in final) == (type(trainer) is not OURS)
    assert figures_in(trainer.args.output_dir) == (set(FIGURES) - {"held_out"} if type(trainer) is OURS else set())


def test_figures_of_the_same_numbers_are_not_drawn_twice(trained):
    trainer, _ = trained
    pictures = sorted((Path(trainer.args.output_dir) / "diagnostics").glob("*.[ps][nv]g"))
    before = [path.stat().st_mtime_ns for path in pictures]
    if type(trainer) is OURS:
        trainer.create_model_card("run")
        assert len(before) == 8
        assert [path.stat().st_mtime_ns for path in pictures] == before


def test_a_second_card_replaces_the_first(trained, without_figures, monkeypatch, tmp_path):
    trainer, _ = trained
    monkeypatch.setattr(trainer.args, "output_dir", str(tmp_path))
    trainer.create_model_card("first", dataset_name="tester/lakes", tags=["mine"])
    trainer.create_model_card("second", dataset_name="tester/ponds", tags="mine")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.text.count(HEADING) == 1
    assert "first" not in card.data.model_name
    assert "lakes" not in card.content
    assert "mine" in card.data.tags
    assert len(card.data.tags) == len(set(card.data.tags))
    assert card.data.datasets == "tester/ponds"
    assert {result.dataset_type for result in card.data.eval_results} == {"tester/ponds"}


@pytest.mark.slow
def test_names_that_are_no_plain_yaml_keep_the_card_whole(trained, without_figures, monkeypatch, tmp_path):
    trainer, _ = trained
    monkeypatch.setattr(trainer.args, "output_dir", str(tmp_path))
    for name in ('quo"te', "colon: value", "line\nbreak", "--- x", "\n---\n", "'", "{{ x }}", "a|b", "é", "a/b/c"):
        trainer.create_model_card(name, dataset_name=name, tags=[name])
        card = ModelCard.load(tmp_path / "README.md")
        assert card.data.model_name == name
        assert name in card.data.tags
        assert card.text.count(HEADING) == 1
        types = {result.dataset_type for result in card.data.eval_results}
        assert all(re.fullmatch(r"([\w-]+/)?[\w.-]+", kind, re.ASCII) for kind in types), types


def test_rows_without_numbers_leave_no_trace(tmp_path):
    nan = float("nan")
    rows = [{"step": i, "reward": nan, "mi/first_turn/retrieval_accuracy": None, "entropy": nan} for i in (1, 2)]
    run = Run(folder=tmp_path, log_history=rows, step=2, max_steps=2, ended=True)
    card = ModelCard("---\ntags: []\n---\n# Title\n\n## Quick start\n")
    add_diagnostics(card, run, "tester/x")
    assert "nan" not in card.content.lower() and "| optimizer steps |" in card.text
    assert card.data.eval_results is None
    assert "was not measured" in headline(run) and "finished 2 steps" in headline(run)


def test_the_index_points_to_the_file_that_numbers_can_be_checked_in(tmp_path):
    metrics = {"success": 0.5, "success_ci_low": 0.4, "success_ci_high": 0.6}
    run = Run(tmp_path, [{"step": 1, "reward": 1.0}], ended=True, evaluations={"after": metrics})
    card = ModelCard("---\ntags: []\n---\n# Title\n")
    add_diagnostics(card, run, "tester/model")
    files = {result.metric_name: result.source_url for result in card.data.eval_results}
    assert files == {
        "Held-out success rate": "https://huggingface.co/tester/model/blob/main/evaluation_after.json",
        "Mean reward in training": "https://huggingface.co/tester/model/blob/main/diagnostics/trainer_state.json",
    }


def test_figures_that_are_older_than_the_numbers_say_so(tmp_path):
    (tmp_path / "diagnostics").mkdir()
    (tmp_path / "diagnostics" / "training.png").touch()
    rows = [{"step": step, "reward": 0.5} for step in (5, 10, 15)]
    shown = {drawn: diagnostics_section(Run(tmp_path, rows, step=15, drawn=drawn)) for drawn in (0, 2, 3)}
    assert "not drawn yet" in shown[0] and "training.png" not in shown[0]  # of an earlier run
    assert "up to step 10" in shown[2] and "training.png" in shown[2]
    assert "up to step" not in shown[3] and "not drawn" not in shown[3] and "training.png" in shown[3]


def test_running_means_span_ten_steps_or_half_of_a_short_run():
    points = [(step, float(step)) for step in range(1, 31)]
    means = running_means(points)
    assert means[0] == (MEAN_OVER, 5.5)
    assert means[-1] == (30, 25.5)
    assert running_means(points[:4]) == [(2, 1.5), (3, 2.5), (4, 3.5)]
    assert running_means(points[:1]) == [(1, 1.0)]
    assert running_means([]) == []


# Cards of runs that resumed, raised, stopped or trained twice


def test_a_resumed_run_says_so_and_shows_no_evaluation_of_the_run_before(policy_path, tmp_path, without_figures):
    folder = tmp_path / "run"
    make(OURS, policy_path, folder, max_steps=2, save_steps=1).train()
    for when in ("before", "after"):
        metrics = {"success": 0.25, "success_ci_low": 0.2, "success_ci_high": 0.3}
        (folder / f"evaluation_{when}.json").write_text(json.dumps(metrics))
    trainer, watcher = make(OURS, policy_path, folder, save_steps=1), Watcher()
    trainer.add_callback(watcher)
    trainer.train(resume_from_checkpoint=True)
    assert list(watcher.cards) == [3, 4]
    for text in (watcher.cards[3], read_card(folder)):
        assert re.search(r"resumed .* at step 2\b", section_of(text))
        assert rows_of(text)["held-out success"][:2] == ["25.0% (20.0% to 30.0%)", ""]
    run = run_of(trainer)
    assert [step for step, _ in run.points("mi/first_turn/mi_seq")] == [1, 2, 3, 4]
    assert [path.name for path in run.measurements] == [f"measurement_0000{step}.json" for step in (1, 2, 3, 4)]
    assert read_run(folder).resumed_at == [2]


def test_a_run_that_raised_is_unfinished_and_a_fresh_one_shows_nothing_of_it(policy_path, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    trainer = make(OURS, policy_path, folder)
    trainer.add_callback(Watcher(raise_at=3))
    with pytest.raises(RuntimeError):
        trainer.train()
    assert "unfinished: at step 2 of 4" in read_card(folder)
    assert figures_in(folder) == set()
    state = (folder / "diagnostics" / "trainer_state.json").read_text()
    make(OURS, policy_path, folder).create_model_card("run")  # in a new process, to upload what a killed one left
    assert figures_in(folder) == set(FIGURES) - {"held_out"}
    assert "unfinished: at step 2 of 4" in read_card(folder)
    assert "not drawn yet" not in read_card(folder)
    assert (folder / "diagnostics" / "trainer_state.json").read_text() == state
    with monkeypatch.context() as patch:
        patch.setattr(run_record, "write_figures", lambda run: run)
        trainer.create_model_card("run")
    assert "unfinished: at step 3 of 4" in read_card(folder)
    (folder / "log_history.json").write_text("[{}]")
    again, watcher = make(OURS, policy_path, folder, callback=False, max_steps=2), Watcher(raise_at=1)
    again.add_callback(watcher)
    with pytest.raises(RuntimeError):
        again.train()
    run = read_run(folder)
    assert (run.status, run.rows, run.measurements) == ("unfinished: at step 0 of 2", [], [])
    again.remove_callback(watcher)
    again.train()  # the same trainer, from the start
    assert "finished 2 steps" in read_card(folder)
    assert "was not measured" in section_of(read_card(folder))
    assert "retrieval accuracy (" not in read_card(folder)
    assert figures_in(folder) == {"training"}
    assert [generation.step for generation in read_group_rewards(folder)] == [1, 2]


def test_a_run_that_was_stopped_says_where(policy_path, tmp_path, without_figures):
    trainer = make(STOCK, policy_path, tmp_path / "run")
    trainer.add_callback(Watcher(stop_at=3))
    trainer.train()
    assert "stopped at step 3 of 4" in section_of(read_card(tmp_path / "run"))


def test_one_trainer_trains_twice_and_tells_of_the_second_time(policy_path, tmp_path, without_figures):
    trainer = make(STOCK, policy_path, tmp_path / "run")
    trainer.train()
    trainer.args.max_steps = 2
    trainer.train()
    run = run_of(trainer)
    assert (run.status, run.resumed_at, len(run.rows), len(run.judgements)) == ("finished 2 steps", [], 2, 2)
    assert len(run.measurements) == 2
    assert read_card(tmp_path / "run").count(HEADING) == 1


def test_without_checkpoints_the_run_can_be_read_all_the_same(policy_path, tmp_path):
    make(STOCK, policy_path, tmp_path / "run", save_strategy="no", max_steps=1).train()
    assert read_run(tmp_path / "run").status == "finished 1 step"
    assert not (tmp_path / "run" / "README.md").exists()


def test_broken_metadata_is_a_warning_and_training_goes_on(policy_path, tmp_path, without_figures, caplog):
    trainer = make(BrokenCard, policy_path, tmp_path / "run", max_steps=2)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 2
    assert "README.md" in caplog.text and "metadata" in caplog.text
    assert read_run(tmp_path / "run").status == "finished 2 steps"


@pytest.mark.parametrize("save_strategy", ["no", "steps"])
def test_a_record_that_cannot_be_written_costs_no_training(policy_path, tmp_path, monkeypatch, caplog, save_strategy):
    def fail(trainer):
        raise OSError("no space left")

    for name in ("write_run", "write_figures"):
        monkeypatch.setattr(run_record, name, fail)
    monkeypatch.setattr(SavedMeasurement, "save", lambda *_: fail(None))
    trainer = make(OURS, policy_path, tmp_path / "run", max_steps=2, save_strategy=save_strategy)
    trainer.train()
    assert trainer.state.global_step == 2
    assert "record of this run" in caplog.text and "no space left" in caplog.text


def test_a_log_of_odd_numbers_is_written(policy_path, tmp_path, without_figures):
    trainer = make(STOCK, policy_path, tmp_path / "run", max_steps=1, save_strategy="no")
    log = trainer.log
    trainer.log = lambda logs, *rest: log({**logs, "mine": np.float32(0.5)}, *rest)
    trainer.train()
    assert read_run(tmp_path / "run").status == "finished 1 step"
