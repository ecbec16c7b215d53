"""Rewards of several tasks, scaled by the batch or by their task: against naive loops."""

import pytest
import torch
from algorithms import ALGORITHMS, GRPO, PPO, RLOO, STILL, replay_of, slow
from conftest import PROMPTS
from datasets import Dataset
from replay import REWARDS

from ragen2_trl.filtering import group_score, select_groups

TASKS = dict.fromkeys(PROMPTS[:4], "walk") | dict.fromkeys(PROMPTS[4:], "shop")
UNIT = {"walk": 1.0, "shop": 12.0}  # of their rewards
# Of both tasks some groups are kept and some are not.
SCALED = {prompt: [reward * UNIT[TASKS[prompt]] for reward in rewards] for prompt, rewards in REWARDS.items()}
ROWS = {"per_device_train_batch_size": 32, "max_steps": 1, **STILL}


def sampled(algorithm, policy_path, tmp_path, tasks=True, **settings):
    """The batch of a generation and, in its order, rows' prompts, and which groups are kept."""
    columns = {"prompt": PROMPTS, **({"environment": list(TASKS.values())} if tasks else {})}
    trainer = algorithm.make(
        policy_path,
        algorithm.args(tmp_path, **{**ROWS, **settings}),
        replay_of(policy_path, SCALED),
        Dataset.from_dict(columns),
    )
    seen, sample = [], trainer._generate_and_score_completions

    def capture(inputs):
        batch = sample(inputs)
        seen.append((batch["advantages"].clone(), batch["completion_mask"].clone(), [row["prompt"] for row in inputs]))
        return batch

    trainer._generate_and_score_completions = capture
    trainer.train()
    ((advantages, mask, prompts),) = seen
    kept = trainer.latest_selection.kept.repeat_interleave(4)
    return advantages, mask, prompts, kept


BY_TASK = {"snr_reward_scaling_by": "task"}


def of_task(prompts, kept, name):
    return torch.tensor([TASKS[prompt] == name for prompt in prompts]) & kept


@pytest.mark.parametrize("score", ["reward_variance", slow("reward_std"), slow("length")])
def test_groups_are_ranked_in_units_of_their_tasks_range(score, policy_path, tmp_path):
    _, mask, prompts, kept = sampled(GRPO, policy_path, tmp_path, **BY_TASK, snr_score=score, snr_value=0.7)
    groups = prompts[::4]
    degree = {"reward_variance": 2, "reward_std": 1, "length": 0}[score]
    rewards = torch.tensor([SCALED[prompt] for prompt in groups])
    scores = []
    for prompt, group, lengths in zip(groups, rewards, mask.sum(dim=1).view(-1, 4), strict=True):
        of_all = [reward for other in PROMPTS if TASKS[other] == TASKS[prompt] for reward in SCALED[other]]
        plain = {"reward_variance": group.var(), "reward_std": group.std(), "length": lengths.float().mean()}[score]
        scores.append(plain.item() / (max(of_all) - min(of_all)) ** degree)
    signal = group_score(rewards) > 1e-12
    expected = select_groups(torch.tensor(scores), "top_p", 0.7, selection_eps=0.0, is_zero=~signal)
    assert kept[::4].tolist() == expected.tolist()
    assert {TASKS[prompt] for prompt, is_kept in zip(groups, kept[::4], strict=True) if is_kept} == set(UNIT)


def test_without_it_the_task_with_the_larger_rewards_takes_all(policy_path, tmp_path):
    *_, prompts, kept = sampled(GRPO, policy_path, tmp_path)
    assert {TASKS[prompt] for prompt, is_kept in zip(prompts, kept, strict=True) if is_kept} == {"shop"}


@pytest.mark.parametrize("keeps_all", [False, slow(True)])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_grpo_takes_deviations_over_the_rows_of_a_task(aggregation, keeps_all, policy_path, tmp_path):
    settings = {"multi_objective_aggregation": aggregation, "scale_rewards": "batch", **BY_TASK}
    settings |= {"snr_value": 1.0, "snr_include_zero": True} if keeps_all else {}
    advantages, _, prompts, kept = sampled(GRPO, policy_path, tmp_path, **settings)
    rewards = torch.tensor([SCALED[prompt] for prompt in prompts[::4]])
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    for name in UNIT:
        rows = of_task(prompts, kept, name)
        if aggregation == "sum_then_normalize":
            expected = centred.flatten()[rows] / (rewards.flatten()[rows].std() + 1e-4)
        else:
            own = (centred / (rewards.std(dim=1, keepdim=True) + 1e-4)).flatten()[rows]
            expected = (own - own.mean()) / (own.std() + 1e-4)
        torch.testing.assert_close(advantages[rows], expected, rtol=1e-4, atol=1e-5)


def test_rloo_normalises_advantages_over_the_rows_of_a_task(policy_path, tmp_path):
    plain, *_ = sampled(RLOO, policy_path, tmp_path, **BY_TASK)
    advantages, _, prompts, kept = sampled(RLOO, policy_path, tmp_path, normalize_advantages=True, **BY_TASK)
    for name in UNIT:
        rows = of_task(prompts, kept, name)
        expected = (plain[rows] - plain[rows].mean()) / (plain[rows].std() + 1e-4)
        torch.testing.assert_close(advantages[rows], expected, rtol=1e-4, atol=1e-5)


def test_ppo_whitens_over_the_tokens_of_a_task(policy_path, tmp_path):
    plain, *_ = sampled(PPO, policy_path, tmp_path, whiten_advantages=False, **BY_TASK)
    advantages, mask, prompts, kept = sampled(PPO, policy_path, tmp_path, **BY_TASK)
    for name in UNIT:
        tokens = of_task(prompts, kept, name).unsqueeze(1) & mask.bool()
        expected = (plain[tokens] - plain[tokens].mean()) / plain[tokens].std()
        torch.testing.assert_close(advantages[tokens], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", [GRPO, slow(RLOO), slow(PPO)], ids=lambda algorithm: algorithm.name)
def test_a_column_of_tasks_alone_changes_no_advantage(algorithm, policy_path, tmp_path):
    settings = {"normalize_advantages": True} if algorithm is RLOO else {}
    settings |= {"scale_rewards": "batch"} if algorithm is GRPO else {}
    with_tasks = sampled(algorithm, policy_path, tmp_path, tasks=True, **settings)
    without = sampled(algorithm, policy_path, tmp_path, tasks=False, **settings)
    assert torch.equal(with_tasks[0], without[0]) and torch.equal(with_tasks[3], without[3])


@pytest.mark.slow
def test_one_task_is_scaled_as_the_batch_is(policy_path, tmp_path, monkeypatch):
    by_batch = sampled(GRPO, policy_path, tmp_path, scale_rewards="batch", snr_strategy="top_k", snr_value=0.5)
    monkeypatch.setattr("test_reward_scaling.TASKS", dict.fromkeys(PROMPTS, "shop"))
    by_task = sampled(
        GRPO, policy_path, tmp_path, scale_rewards="batch", snr_strategy="top_k", snr_value=0.5, **BY_TASK
    )
    assert torch.equal(by_batch[0], by_task[0]) and torch.equal(by_batch[3], by_task[3])


def test_best_and_worst_are_those_of_a_task(policy_path, tmp_path):
    """Reward 1 is the best of one task, and far from the best of the other."""
    algorithm = ALGORITHMS["grpo"]
    trainer = algorithm.make(
        policy_path,
        algorithm.args(tmp_path, **ROWS),
        replay_of(policy_path, SCALED),
        Dataset.from_dict({"prompt": PROMPTS, "environment": list(TASKS.values())}),
    )
    trainer.train()
    row = next(row for row in trainer.state.log_history if "loss" in row)
    assert row["snr/dropped_all_best"] == 1 / 8  # prompt 1
    assert trainer._selector.ranges == {"walk": (0.0, 1.0), "shop": (0.0, 12.0)}
    assert trainer._selector.state()["ranges"] == trainer._selector.ranges


def test_rows_that_name_no_task_and_unknown_scalings_are_refused(policy_path, tmp_path):
    with pytest.raises(ValueError, match="snr_reward_scaling_by='task' needs the column 'environment'"):
        sampled(GRPO, policy_path, tmp_path, tasks=False, **BY_TASK)
    with pytest.raises(ValueError, match="snr_reward_scaling_by='task' needs the column 'environment'"):
        sampled(GRPO, policy_path, tmp_path, remove_unused_columns=True, **BY_TASK)
    with pytest.raises(ValueError, match="snr_reward_scaling_by"):
        GRPO.args(tmp_path, snr_reward_scaling_by="group")
