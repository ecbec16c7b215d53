"""What people do in notebooks: cells run twice, runs interrupted, several trainers and configurations at once."""

import logging
from pathlib import Path

import pytest
import torch
from conftest import assert_same_parameters, parameters_of
from measured_runs import length_reward, rows_of
from transformers import TrainerCallback
from trl import GRPOTrainer

from ragen2_trl import (
    MutualInformationCallback,
    SNRFilteredGRPOTrainer,
)
from ragen2_trl.callbacks.pooling import POOL_FILE
from ragen2_trl.record.run import read_run
from ragen2_trl.report.card import HEADING

both = pytest.mark.parametrize("kind", [SNRFilteredGRPOTrainer, GRPOTrainer])


@pytest.fixture
def make(policy_path, prompts, make_args, tmp_path):
    """`make(kind, name)`: a trainer with the callback, in a folder of its own."""

    def make_trainer(kind, name="run", **settings):
        args = make_args(snr=kind is SNRFilteredGRPOTrainer, output_dir=str(tmp_path / name), **settings)
        trainer = kind(policy_path, length_reward, args, prompts)
        trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=2))
        return trainer

    return make_trainer


class Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


@both
def test_a_card_can_be_made_when_the_next_configuration_is_there(kind, make, make_args, caplog):
    trainer = make(kind)
    trainer.train()
    make_args(snr=False)  # accelerate forgets the state of the first
    with caplog.at_level(logging.ERROR):
        trainer.create_model_card()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    folder = Path(trainer.args.output_dir)
    assert HEADING in (folder / "README.md").read_text()
    assert read_run(folder).settings["processes"] == 1


@pytest.mark.slow
@both
def test_a_run_that_was_interrupted_can_begin_again(kind, make):
    trainer, interrupt = make(kind), Interrupt()
    trainer.add_callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(interrupt)
    trainer.train()
    assert trainer.state.global_step == 3
    assert [row["step"] for row in rows_of(trainer)] == [1, 2, 3]
    for row in rows_of(trainer):  # and none is a mean with what the interrupted step had measured
        assert row["mi/regime/conclusive"] in (0.0, 1.0)
        assert row["mi/tokens"] == int(row["mi/tokens"])
    if kind is SNRFilteredGRPOTrainer:
        assert all(row["snr/kept_groups"] == int(row["snr/kept_groups"]) for row in rows_of(trainer))
    trainer.create_model_card()
    assert [one.step for one in read_run(Path(trainer.args.output_dir)).evidence] == [1, 2, 3]


def test_two_trainers_do_not_know_of_one_another(make):
    first, second = make(SNRFilteredGRPOTrainer, "first"), make(SNRFilteredGRPOTrainer, "second")
    torch.manual_seed(first.args.seed)
    first.train()
    torch.manual_seed(second.args.seed)
    second.train()
    assert_same_parameters(parameters_of(first), parameters_of(second))
    for trainer in (first, second):
        assert len(rows_of(trainer)) == 3
        trainer.create_model_card()
        assert HEADING in (Path(trainer.args.output_dir) / "README.md").read_text()


@both
def test_a_callback_that_was_added_twice_measures_and_speaks_once(kind, policy_path, prompts, make_args, caplog):
    """One prompt for all: every measurement is a warning."""
    same = prompts.map(lambda row: {"prompt": "Go right"})
    args = make_args(snr=kind is SNRFilteredGRPOTrainer)
    trainer = kind(policy_path, length_reward, args, same)
    for every in (2, 1):  # the cell was run again with another setting
        trainer.add_callback(MutualInformationCallback(trainer, every=every, min_prompts=2))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    told = [record.getMessage() for record in caplog.records if "is not measured" in record.getMessage()]
    assert len(told) == 1


def test_the_callback_that_was_added_last_is_the_one_that_measures(make, monkeypatch):
    trainer = make(SNRFilteredGRPOTrainer)
    seen = []
    for every in (2, 3):
        callback = MutualInformationCallback(trainer, every=every, min_prompts=2)
        log = callback._log
        monkeypatch.setattr(callback, "_log", lambda metrics, every=every, log=log: (seen.append(every), log(metrics)))
        trainer.add_callback(callback)
    trainer.train()
    assert set(seen) == {3}
    assert [row["step"] for row in rows_of(trainer)] == [3]


def test_a_callback_whose_place_was_taken_saves_no_completions(make):
    """Its pool has two groups of the first run; the one in its place waits for no more."""
    trainer = make(GRPOTrainer, max_steps=1, save_strategy="steps", save_steps=1)
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-1"
    for min_prompts, waits in ((3, True), (2, False)):
        trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=min_prompts))
        trainer.train()
        assert (checkpoint / POOL_FILE).exists() == waits
        (checkpoint / POOL_FILE).unlink(missing_ok=True)
