"""The end of a run whose rewards have stopped varying within groups."""

import pytest
from trl import GRPOTrainer

from research.reward_variance_stop import RewardVarianceStopCallback

SPREAD = [1.0] * 3 + [0.2] * 20  # of rewards within a group, by optimizer step; its square is the variance's


def spread_reward(completions, trainer_state, **kwargs):
    return [SPREAD[trainer_state.global_step] * (number % 2) for number in range(len(completions))]


def train(policy_path, args, prompts, resume=None, **settings):
    trainer = GRPOTrainer(policy_path, spread_reward, args=args, train_dataset=prompts)
    trainer.add_callback(RewardVarianceStopCallback(trainer, **settings))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_variance_below_a_tenth_of_its_start_stops_after_patience(policy_path, prompts, make_args, caplog):
    args = make_args(snr=False, max_steps=12)
    trainer = train(policy_path, args, prompts, start_generations=3, patience=4)
    assert trainer.state.global_step == 3 + 4
    shares = [
        row["reward_variance/of_start"] for row in trainer.state.log_history if "reward_variance/of_start" in row
    ]
    assert shares == pytest.approx([0.04] * 4)
    assert "below 10% of its start (0.333) for 4 generations in a row" in caplog.text


def test_variance_above_the_fraction_goes_on(policy_path, prompts, make_args):
    args = make_args(snr=False, max_steps=8)
    trainer = train(policy_path, args, prompts, start_generations=3, patience=2, fraction=0.03)
    assert trainer.state.global_step == 8


@pytest.mark.slow
def test_a_resumed_run_stops_where_the_uninterrupted_one_does(policy_path, prompts, make_args, tmp_path):
    args = make_args(snr=False, max_steps=12, save_strategy="steps", save_steps=5)
    train(policy_path, args, prompts, start_generations=3, patience=4)
    checkpoint = str(tmp_path / "run" / "checkpoint-5")
    resumed = train(policy_path, args, prompts, resume=checkpoint, start_generations=3, patience=4)
    assert resumed.state.global_step == 3 + 4


def test_a_callback_whose_place_was_taken_ends_no_run(policy_path, prompts, make_args, tmp_path):
    args = make_args(snr=False, max_steps=6, save_strategy="steps", save_steps=5)
    train(policy_path, args, prompts, start_generations=3, patience=10)  # two generations of ten by the checkpoint
    resumed = GRPOTrainer(policy_path, spread_reward, args=make_args(snr=False, max_steps=7), train_dataset=prompts)
    for patience in (2, 10):
        resumed.add_callback(RewardVarianceStopCallback(resumed, start_generations=3, patience=patience))
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert resumed.state.global_step == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 1.0}, "fraction must be between 0 and 1"),
        ({"start_generations": 0}, "start_generations must be at least 1"),
        ({"patience": 0}, "patience must be at least 1"),
    ],
)
def test_a_bad_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardVarianceStopCallback(None, **settings)
