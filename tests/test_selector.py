"""Selectors of one's own, as a callable of the trainer or by name, through a training."""

import math

import numpy as np
import pytest
import torch
from algorithms import GRPO, STILL, for_each, replay_of
from conftest import PROMPTS, assert_same_parameters, parameters_of
from replay import GROUP_SIZE, REWARDS, Recorder, assert_close, move_away

from ragen2_trl.trainers.selection import ScoreSelector, _numbers

# Two steps of a generation of all eight groups, in their order.
ROWS = {"per_device_train_batch_size": 32, "max_steps": 2, "shuffle_dataset": False}
LAST_TWO = torch.arange(8) >= 6


def last_two(groups):
    return LAST_TWO


def everything(groups):
    return torch.ones(groups.rewards.shape, dtype=torch.bool)


def trained(algorithm, policy_path, tmp_path, selector=None, **settings):
    args = algorithm.args(tmp_path, **{**ROWS, **settings})
    trainer = algorithm.make(policy_path, args, replay_of(policy_path), selector=selector)
    trainer.train()
    return trainer


@for_each
def test_a_callable_and_its_name_select_the_same(algorithm, policy_path, tmp_path):
    given = trained(algorithm, policy_path, tmp_path, last_two)
    named = trained(algorithm, policy_path, tmp_path, snr_selector="test_selector:last_two")
    assert_same_parameters(parameters_of(given), parameters_of(named))
    for trainer in (given, named):
        assert torch.equal(trainer.latest_selection.groups, LAST_TWO)
        rows = [row for row in trainer.state.log_history if "snr/kept_groups" in row]
        assert [row["snr/kept_groups"] for row in rows] == [2, 2]


@for_each
def test_what_a_selector_keeps_is_trained_on_as_if_it_were_all(algorithm, policy_path, tmp_path):
    still = {"critic_lr": 0.0} if algorithm.name == "ppo" else {}
    args = algorithm.args(tmp_path, **{**ROWS, **STILL, **still, "max_steps": 1})
    (gradient,) = algorithm.gradients(policy_path, args, replay_of(policy_path), selector=last_two)
    assert_close(gradient, algorithm.plain_gradient(policy_path, PROMPTS[6:], **still))


def test_the_filter_itself_is_a_selector(policy_path, tmp_path):
    settings = {"snr_strategy": "top_k", "snr_value": 0.5}
    by_settings = trained(GRPO, policy_path, tmp_path, **settings)
    given = trained(GRPO, policy_path, tmp_path, ScoreSelector("top_k", 0.5))
    assert_same_parameters(parameters_of(by_settings), parameters_of(given))
    assert torch.equal(by_settings.latest_selection.kept, given.latest_selection.kept)


@for_each
def test_a_mask_of_completions_keeps_single_ones(algorithm, policy_path, tmp_path):
    kept = torch.zeros(8, 4, dtype=torch.bool)
    kept[0, 1] = kept[0, 3] = kept[5, 2] = True
    trainer = trained(algorithm, policy_path, tmp_path, lambda groups: kept)
    selection = trainer.latest_selection
    assert torch.equal(selection.kept, kept)
    assert selection.groups.nonzero().flatten().tolist() == [0, 5]
    row = next(row for row in trainer.state.log_history if "snr/kept_groups" in row)
    assert (row["snr/kept_groups"], row["snr/kept_fraction"]) == (2, 3 / 32)


@for_each
def test_a_mask_of_all_completions_is_the_plain_trainer_to_rounding(algorithm, policy_path, tmp_path):
    args = {**ROWS, **STILL, "max_steps": 1}
    plain = algorithm.gradients(policy_path, algorithm.args(tmp_path, plain=True, **args), replay_of(policy_path))
    own = algorithm.gradients(
        policy_path, algorithm.args(tmp_path, **args), replay_of(policy_path), selector=everything
    )
    assert_close(own[0], plain[0])


@for_each
def test_a_selector_sees_rewards_lengths_and_entropies_of_all_groups(algorithm, policy_path, tmp_path):
    seen = []

    def look(groups):
        seen.append((groups, groups.entropies(), torch.rand(1, generator=groups.generator).item()))
        return last_two(groups)

    trained(algorithm, policy_path, tmp_path, look)
    rewards = torch.tensor([REWARDS[prompt] for prompt in PROMPTS])
    completions = replay_of(policy_path).completions
    lengths = torch.tensor([[len(ids) for ids in completions[prompt]] for prompt in PROMPTS])
    for groups, entropies, _ in seen:
        torch.testing.assert_close(groups.rewards.cpu(), rewards)
        torch.testing.assert_close(groups.rewards_per_func.cpu(), rewards.unsqueeze(2))
        assert torch.equal(groups.lengths.long(), lengths)
        assert groups.reward_range == (0.0, 1.0)
        assert entropies.shape == rewards.shape and (entropies > 0).all()
    assert len({drawn for *_, drawn in seen}) == len(seen) == 2


@pytest.mark.parametrize(
    ("gives", "found"),
    [
        (torch.ones(7, dtype=torch.bool), "torch.bool (7,)"),
        (torch.ones(4, 8, dtype=torch.bool), "torch.bool (4, 8)"),
        (torch.ones((), dtype=torch.bool), "torch.bool ()"),
        (torch.ones(8), "torch.float32 (8,)"),
        (torch.arange(8), "torch.int64 (8,)"),
        ([True] * 8, "list"),
        (None, "NoneType"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_mask_is_refused_with_the_shapes_that_are(gives, found, policy_path, tmp_path):
    with pytest.raises(ValueError) as refused:
        trained(GRPO, policy_path, tmp_path, lambda groups: gives)
    assert all(part in str(refused.value) for part in ("selector", found, "(8,)", "(8, 4)", "bool"))


@for_each
def test_a_callable_beside_a_name_is_refused(algorithm, policy_path, tmp_path):
    name = "test_selector:last_two"
    with pytest.raises(ValueError) as refused:
        trained(algorithm, policy_path, tmp_path, last_two, snr_selector=name)
    assert all(part in str(refused.value) for part in ("selector", f"snr_selector='{name}'"))


@pytest.mark.parametrize(
    "settings",
    [{"snr_strategy": "nonzero"}, {"snr_value": 0.5}, {"snr_score": "reward_std"}],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.parametrize("given", ["callable", "name"])
def test_settings_of_the_filter_beside_a_selector_are_refused(given, settings, policy_path, tmp_path):
    ((name, value),) = settings.items()
    selector = last_two if given == "callable" else None
    named = {} if given == "callable" else {"snr_selector": "test_selector:last_two"}
    with pytest.raises(ValueError) as refused:
        trained(GRPO, policy_path, tmp_path, selector, **named, **settings)
    allowed = {"snr_strategy": "'top_p'", "snr_value": "0.9", "snr_score": "'reward_variance'"}[name]
    assert all(part in str(refused.value) for part in (f"{name}={value!r}", "selector", allowed))


@pytest.mark.parametrize(
    "name", ["no_such_module:last_two", "test_selector:no_such_name", "test_selector", "test_selector:", ":last_two"]
)
def test_names_of_nothing_are_refused(name, tmp_path):
    with pytest.raises(ValueError) as refused:
        GRPO.args(tmp_path, snr_selector=name)
    assert all(part in str(refused.value) for part in (f"snr_selector={name!r}", "package.module:name"))


# Groups scored by one of their rewards: shaping makes failures differ, and does not make them worth training on.


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


def rewarded(algorithm, policy_path, folder, rewards=(right, shaping), prompts=PROMPTS, plain=False, **settings):
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
    fooled, _ = rewarded(algorithm, policy_path, tmp_path)
    assert row_of(fooled)["snr/kept_fraction"] == 1
    assert row_of(fooled)["snr/zero_variance_fraction"] == 0
    scored, gradient = rewarded(algorithm, policy_path, tmp_path, snr_score_reward="right")
    assert row_of(scored)["snr/kept_fraction"] == 3 / 8
    assert row_of(scored)["snr/zero_variance_fraction"] == 5 / 8
    # Advantages stay those of the sum.
    _, of_sum = rewarded(algorithm, policy_path, tmp_path, prompts=SOLVABLE, plain=True)
    assert_close(gradient, of_sum)


def test_a_column_that_a_reward_function_logs_is_scored_as_a_function_is(policy_path, tmp_path):
    _, by_function = rewarded(GRPO, policy_path, tmp_path, snr_score_reward="right")
    scored, by_column = rewarded(GRPO, policy_path, tmp_path, [logs_right], snr_score_reward="solved")
    assert row_of(scored)["snr/kept_fraction"] == 3 / 8
    assert_close(by_column, by_function)


@pytest.mark.parametrize("score_reward", [None, "right"])
def test_dynamic_sampling_and_prompt_selection_follow(score_reward, policy_path, tmp_path):
    """Of the eight prompts three vary in the reward that matters, by 1/4; in the sum all of them do."""
    follows = {"snr_score_reward": score_reward, "snr_prompt_selection": True, "snr_dynamic_sampling_rounds": 1}
    trainer, _ = rewarded(GRPO, policy_path, tmp_path, **follows)
    row = row_of(trainer)
    assert row["snr/trained_groups"] == (8 if score_reward is None else 6)
    assert row["snr/sampling_rounds"] == (score_reward is not None)
    variance = torch.tensor([1.0, 0.0, 0.0, 0.0]).var().item() * 3 / 8
    assert (row["snr/realised_variance"] == pytest.approx(variance)) == (score_reward is not None)


def test_a_name_of_nothing_is_refused_with_what_there_is(policy_path, tmp_path):
    with pytest.raises(ValueError) as refused:
        rewarded(GRPO, policy_path, tmp_path, [logs_right], snr_score_reward="rihgt")
    assert all(part in str(refused.value) for part in ("snr_score_reward='rihgt'", "logs_right", "solved"))


def test_a_column_may_hold_numbers_in_arrays_of_one_and_in_no_others():
    held = [np.array([0.5]), torch.tensor([2.0]), torch.tensor(3.0), None]
    assert _numbers(held, 4)[:3] == [0.5, 2.0, 3.0] and math.isnan(_numbers(held, 4)[3])
    assert _numbers([np.array([0.5, 1.0])], 1) is None
