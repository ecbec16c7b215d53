"""A run that begins with steps without signal: what it says, and that it logs nothing of an update."""

import logging

import pytest
import torch
from algorithms import GRPO, replay_of
from conftest import PROMPTS, assert_same_parameters, log_rows, parameters_of
from datasets import Dataset
from lakes import CROSSING, answer, row
from trl import GRPOTrainer

from ragen2_trl import SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env

REWARD = make_env("frozen_lake", size=3).reward_funcs
WORST, BEST, SAME = (f"snr/dropped_all_{which}" for which in ("worst", "best", "same"))


def lake_trainer(policy_path, args, text):
    """FrozenLake where one step to the right solves every map, and a model that answers `text` to all of them."""
    env = make_env("frozen_lake", size=3)

    def rollout(prompts, trainer):
        ids = trainer.processing_class(text)["input_ids"]
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": [ids for _ in prompts], "logprobs": None}

    tasks = [{"prompt": prompt, **row(CROSSING, seed)} for seed, prompt in enumerate(PROMPTS)]
    return SNRFilteredGRPOTrainer(policy_path, env.reward_funcs, args, Dataset.from_list(tasks), rollout_func=rollout)


@pytest.mark.parametrize(
    ("text", "share_of", "said"),
    [
        ("Go right", WORST, ("no completion holds a valid answer", "ragen2-trl warm-start --env_name frozen_lake")),
        (answer("Left"), WORST, ("no completion solves", "ragen2-trl warm-start --env_name frozen_lake", "easier")),
        (answer("Right"), BEST, ("all completions solve their tasks", "harder")),
    ],
)
def test_a_task_with_known_rewards_tells_too_hard_from_too_easy_from_the_first_step(
    text, share_of, said, policy_path, make_args, caplog
):
    trainer = lake_trainer(policy_path, make_args(max_steps=4, max_completion_length=64), text)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    for row_ in log_rows(trainer):
        assert row_[share_of] == 1.0
        assert row_[WORST] + row_[BEST] + row_[SAME] == 1.0
    warnings = [record.message for record in caplog.records if "None of the first 3 steps" in record.message]
    assert len(warnings) == 1
    for part in said:
        assert part in warnings[0]


def keeps_none(groups):
    return torch.zeros(len(groups.rewards), dtype=torch.bool)


KEEPS_NONE = {"snr_selector": "test_cold_start:keeps_none"}


@pytest.mark.parametrize(
    ("rewards", "settings", "said"),
    [
        ({prompt: [0.0] * 4 for prompt in PROMPTS}, {}, "every group got the same reward, 0"),
        (
            {prompt: [float(number % 2)] * 4 for number, prompt in enumerate(PROMPTS)},
            {},
            "Prompts are solved always or never",
        ),
        (
            {prompt: [0.0, 0.001, 0.0, 0.001] for prompt in PROMPTS},
            KEEPS_NONE,
            "snr_selector='test_cold_start:keeps_none'",
        ),
        ({prompt: [None] * 4 for prompt in PROMPTS}, {}, "no reward function returned a finite number"),
    ],
)
def test_a_cold_start_is_told_after_three_steps(rewards, settings, said, policy_path, tmp_path, caplog):
    args = GRPO.args(tmp_path, max_steps=4, **settings)
    trainer = GRPO.make(policy_path, args, replay_of(policy_path, rewards))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (warning,) = [record.message for record in caplog.records if "None of the first 3 steps" in record.message]
    assert said in warning


def test_groups_of_one_reward_are_said_where_nothing_tells_whether_it_is_the_best(policy_path, tmp_path):
    trainer = GRPO.make(policy_path, GRPO.args(tmp_path), replay_of(policy_path, {p: [0.0] * 4 for p in PROMPTS}))
    trainer.train()
    assert {(row_[WORST], row_[BEST], row_[SAME]) for row_ in log_rows(trainer)} == {(0.0, 0.0, 1.0)}


@pytest.mark.parametrize("keeps_all", [False, True])
def test_rewards_that_are_none_at_first_do_not_stop_a_run(keeps_all, policy_path, make_args):
    """As with TRL's trainer, and bit by bit where nothing is filtered."""

    def late(completions, trainer_state, **kwargs):
        if trainer_state.global_step == 0:
            return [None] * len(completions)
        return [float(len(completion) % 3) for completion in completions]

    def train(kind, **settings):
        args = make_args(snr=kind is SNRFilteredGRPOTrainer, max_steps=3, **settings)
        trainer = kind(policy_path, late, args, Dataset.from_dict({"prompt": PROMPTS}))
        trainer.train()
        return trainer

    neutral = {"snr_strategy": "all"} if keeps_all else {}
    ours = train(SNRFilteredGRPOTrainer, **neutral)
    assert ours.state.global_step == 3
    assert log_rows(ours)[0]["snr/empty_steps"] == (0 if keeps_all else 1)
    if keeps_all:
        assert_same_parameters(parameters_of(train(GRPOTrainer)), parameters_of(ours))


@pytest.mark.parametrize(("prompts", "warns"), [(PROMPTS[:1] * 8, True), (PROMPTS, False)])
def test_rows_that_are_all_the_same_are_told_where_an_environment_draws_its_state(
    prompts, warns, policy_path, make_args, caplog
):
    dataset = Dataset.from_dict({"prompt": prompts})
    with caplog.at_level(logging.WARNING):
        SNRFilteredGRPOTrainer(policy_path, REWARD, make_args(), dataset, rollout_func=lambda prompts, trainer: {})
    assert ("rows of train_dataset are the same" in caplog.text) == warns
    caplog.clear()
    with caplog.at_level(logging.WARNING):  # one question asked several times is no environment
        SNRFilteredGRPOTrainer(policy_path, REWARD, make_args(), dataset)
    assert "rows of train_dataset are the same" not in caplog.text
