"""Cards of runs that resumed, raised, stopped or trained twice, and of those where something broke."""

import json
import logging
import re

import numpy as np
import pytest
from cards import OURS, STOCK, BrokenCard, Watcher, figures_in, make, read_card, rows_of, section_of
from cards import without_figures_fixture as without_figures_fixture

from ragen2_trl.callbacks import run_record
from ragen2_trl.record.group_rewards import read_group_rewards
from ragen2_trl.record.run import read_run, run_of
from ragen2_trl.record.saved_measurement import SavedMeasurement
from ragen2_trl.report.card import FIGURES, HEADING

pytestmark = pytest.mark.slow


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
