"""A trainer says by itself when its training fails, ends where it is asked to, and trains on as if nobody watched."""

import json

import pytest
from conftest import assert_same_parameters, parameters_of
from trl import GRPOTrainer

from ragen2_trl import SNRFilteredGRPOTrainer, TrainingHealthCallback
from ragen2_trl.callbacks import TrainingProgressCallback
from ragen2_trl.instrument import Health, health
from ragen2_trl.record.run import read_run


def reward(completions, **kwargs):
    return [float(len(completion) % 3) for completion in completions]


class FailsFrom:
    """Calls every answer valid until a step, and none afterwards."""

    def __init__(self, step):
        self.step, self.trainer, self.texts = step, None, []

    def __call__(self, text):
        self.texts.append(text)
        return self.trainer.state.global_step < self.step


def make_trainer(policy_path, prompts, args, trainer_class=GRPOTrainer, fails_from=8, **settings):
    trainer = trainer_class(policy_path, reward, args=args, train_dataset=prompts)
    valid = FailsFrom(fails_from)
    valid.trainer = trainer
    trainer.add_callback(TrainingHealthCallback(trainer, valid=valid, **settings))
    return trainer


def told(caplog):
    return [record.message for record in caplog.records if "failing" in record.message]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("stop_on", "last"),
    [
        pytest.param((), 13, marks=SLOW),
        pytest.param(("entropy",), 13, marks=SLOW),
        pytest.param(("format",), 12, marks=SLOW),
        (("failing",), 12),
    ],
)
def test_failing_training_is_told_once_and_ends_only_where_asked_to(
    policy_path, prompts, make_args, caplog, stop_on, last
):
    trainer = make_trainer(policy_path, prompts, make_args(snr=False, max_steps=13), stop_on=stop_on)
    trainer.train()
    assert trainer.state.global_step == last
    text = told(caplog)[0]
    assert "since step 12" in text and "health/valid_rate" in text
    assert any("Training stops after step 12" in record.message for record in caplog.records) == (last == 12)
    assert [alarm.step for alarm in health(trainer.state.log_history) if alarm.failing] == [12]


def test_rows_have_the_number_of_completions_and_the_share_of_valid_ones(policy_path, prompts, make_args):
    trainer = make_trainer(policy_path, prompts, make_args(snr=False, max_steps=3), fails_from=2)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    assert [row["health/completions"] for row in rows] == [8.0] * 3
    assert [row["health/valid_rate"] for row in rows] == [1.0, 1.0, 0.0]


@pytest.mark.slow
def test_training_is_the_same_whether_it_is_watched_or_not(policy_path, prompts, make_args):
    plain = GRPOTrainer(policy_path, reward, args=make_args(snr=False), train_dataset=prompts)
    plain.train()
    watched = make_trainer(policy_path, prompts, make_args(snr=False))
    watched.train()
    assert_same_parameters(parameters_of(plain), parameters_of(watched))


@pytest.mark.slow
def test_a_resumed_run_is_watched_as_if_it_had_not_been_interrupted(policy_path, prompts, make_args, tmp_path, caplog):
    args = make_args(snr=False, max_steps=13, save_strategy="steps", save_steps=10)
    make_trainer(policy_path, prompts, args).train()
    whole = told(caplog)
    caplog.clear()
    make_trainer(policy_path, prompts, args).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-10"))
    assert told(caplog) == whole and len(whole) == 1
    saved = json.loads((tmp_path / "run" / "checkpoint-10" / "trainer_state.json").read_text())
    watch = Health()
    for row in saved["log_history"]:
        watch.update(row)
    assert saved["stateful_callbacks"]["ragen2_health"]["health"] == watch.state


def test_trainers_with_the_filter_watch_by_themselves_and_once(policy_path, prompts, make_args):
    trainer = SNRFilteredGRPOTrainer(policy_path, reward, args=make_args(), train_dataset=prompts)
    watching = [one for one in trainer.callback_handler.callbacks if isinstance(one, TrainingHealthCallback)]
    assert len(watching) == 1 and not watching[0].stop_on
    own = TrainingHealthCallback(trainer, valid=lambda text: True)
    trainer.add_callback(own)
    trainer.train()
    assert watching[0].health.state == Health().state and own.health.state != Health().state


@pytest.mark.parametrize(("text", "rate"), [("<think>Go up.</think>Up", 1.0), ("<think>Go up.", None), ("Up", None)])
def test_without_an_environment_valid_is_reasoning_that_is_closed(policy_path, prompts, make_args, text, rate):
    def write(prompts, trainer):
        tokenizer = trainer.processing_class
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": [tokenizer(text)["input_ids"] for _ in prompts],
            "logprobs": None,
        }

    args = make_args(snr=False, max_steps=2)
    trainer = GRPOTrainer(policy_path, reward, args=args, train_dataset=prompts, rollout_func=write)
    trainer.add_callback(TrainingHealthCallback(trainer))
    trainer.train()
    rates = [row.get("health/valid_rate") for row in trainer.state.log_history if "reward" in row]
    assert rates == [rate, rate]


@pytest.mark.parametrize("stop_on", ["failing", ("failing", "nonsense")])
def test_what_may_end_training_is_checked(policy_path, prompts, make_args, stop_on):
    trainer = GRPOTrainer(policy_path, reward, args=make_args(snr=False), train_dataset=prompts)
    if "nonsense" in stop_on:
        with pytest.raises(ValueError, match=r"'nonsense'.*failing"):
            TrainingHealthCallback(trainer, stop_on=stop_on)
    else:
        assert TrainingHealthCallback(trainer, stop_on=stop_on).stop_on == {"failing"}


def test_live_line_card_and_record_say_the_same(policy_path, prompts, make_args, tmp_path):
    lines = []

    class Sees(TrainingProgressCallback):
        def line(self, logs):
            lines.append(super().line(logs))
            return lines[-1]

    args = make_args(max_steps=13)
    trainer = make_trainer(policy_path, prompts, args, SNRFilteredGRPOTrainer)
    trainer.add_callback(Sees(trainer))
    trainer.train()
    assert ["FAILING: valid answers" in line for line in lines] == [False] * 11 + [True] * 2
    trainer.create_model_card()
    card = (tmp_path / "run" / "README.md").read_text()
    run = read_run(tmp_path / "run")
    assert run.failure.step == 12
    assert card.count("Training is failing since step 12") == 3  # at its head, and twice among the diagnostics
