"""Groups scored by one of their rewards: shaping makes failures differ, and does not make them worth training on."""

import math

import numpy as np
import pytest
import torch
from algorithms import GRPO, STILL, for_each, replay_of
from conftest import PROMPTS
from replay import GROUP_SIZE, Recorder, assert_close, move_away

from ragen2_trl.trainers.selection import _numbers

SOLVABLE = [PROMPTS[0], PROMPTS[3], PROMPTS[5]]


def right(prompts, **kwargs):
    return [float(prompt in SOLVABLE and number % 4 == 0) for number, prompt in enumerate(prompts)]


def shaping(prompts, **kwargs):
    """A small cost, another one for each completion."""
    return [-0.05 * (number % GROUP_SIZE) - 0.001 * PROMPTS.index(prompt) for number, prompt in enumerate(prompts)]


def logs_right(prompts, log_extra=None, **kwargs):
    """The sum as one function, which logs what it is made of."""
    log_extra("solved", right(prompts))
    return [sum(both) for both in zip(right(prompts), shaping(prompts), strict=True)]


def trained(algorithm, policy_path, folder, rewards=(right, shaping), prompts=PROMPTS, plain=False, **settings):
    """A trainer of one step on all groups in one batch, and its gradient."""
    rows = {"per_device_train_batch_size": len(prompts) * GROUP_SIZE, "max_steps": 1}
    args = algorithm.args(
        folder, plain, **{**STILL, **rows, **({} if plain else {"snr_strategy": "nonzero"}), **settings}
    )
    recorder = Recorder()
    trainer = algorithm.make(policy_path, args, list(rewards), prompts, callbacks=[recorder])
    replay_of(policy_path).attach(trainer)
    move_away(trainer.model)
    trainer.train()
    return trainer, recorder.gradients[0]


def row_of(trainer):
    return next(row for row in trainer.state.log_history if "loss" in row)


@for_each
def test_shaping_fools_the_sum_and_not_the_reward_that_matters(algorithm, policy_path, tmp_path):
    fooled, _ = trained(algorithm, policy_path, tmp_path)
    assert row_of(fooled)["snr/kept_fraction"] == 1
    assert row_of(fooled)["snr/zero_variance_fraction"] == 0
    scored, gradient = trained(algorithm, policy_path, tmp_path, snr_score_reward="right")
    assert row_of(scored)["snr/kept_fraction"] == 3 / 8
    assert row_of(scored)["snr/zero_variance_fraction"] == 5 / 8
    # Advantages stay those of the sum.
    _, of_sum = trained(algorithm, policy_path, tmp_path, prompts=SOLVABLE, plain=True)
    assert_close(gradient, of_sum)


def test_a_column_that_a_reward_function_logs_is_scored_as_a_function_is(policy_path, tmp_path):
    _, by_function = trained(GRPO, policy_path, tmp_path, snr_score_reward="right")
    scored, by_column = trained(GRPO, policy_path, tmp_path, [logs_right], snr_score_reward="solved")
    assert row_of(scored)["snr/kept_fraction"] == 3 / 8
    assert_close(by_column, by_function)


@pytest.mark.parametrize("score_reward", [None, "right"])
def test_dynamic_sampling_and_prompt_selection_follow(score_reward, policy_path, tmp_path):
    """Of the eight prompts three vary in the reward that matters, by 1/4; in the sum all of them do."""
    follows = {"snr_score_reward": score_reward, "snr_prompt_selection": True, "snr_dynamic_sampling_rounds": 1}
    trainer, _ = trained(GRPO, policy_path, tmp_path, **follows)
    row = row_of(trainer)
    assert row["snr/trained_groups"] == (8 if score_reward is None else 6)
    assert row["snr/sampling_rounds"] == (score_reward is not None)
    variance = torch.tensor([1.0, 0.0, 0.0, 0.0]).var().item() * 3 / 8
    assert (row["snr/realised_variance"] == pytest.approx(variance)) == (score_reward is not None)


def test_a_name_of_nothing_is_refused_with_what_there_is(policy_path, tmp_path):
    with pytest.raises(ValueError) as refused:
        trained(GRPO, policy_path, tmp_path, [logs_right], snr_score_reward="rihgt")
    assert all(part in str(refused.value) for part in ("snr_score_reward='rihgt'", "logs_right", "solved"))


def test_a_column_may_hold_numbers_in_arrays_of_one_and_in_no_others():
    held = [np.array([0.5]), torch.tensor([2.0]), torch.tensor(3.0), None]
    assert _numbers(held, 4)[:3] == [0.5, 2.0, 3.0] and math.isnan(_numbers(held, 4)[3])
    assert _numbers([np.array([0.5, 1.0])], 1) is None
