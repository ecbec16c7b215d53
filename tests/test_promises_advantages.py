"""Promise 2, the advantages: they are those of a batch of the kept groups, or weighed as a setting says."""

import pytest
import torch
from algorithms import GRPO, STILL, for_each, replay_of, slow
from conftest import PROMPTS
from replay import KEPT, REWARDS, assert_close

ONE_STEP = {**STILL, "max_steps": 1, "per_device_train_batch_size": 32}


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale_rewards", ["batch", slow("group"), slow("none")])
def test_advantages_are_normalised_over_the_kept_groups(aggregation, scale_rewards, policy_path, tmp_path):
    settings = {"multi_objective_aggregation": aggregation, "scale_rewards": scale_rewards}
    layout = {**ONE_STEP, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    filtered = GRPO.gradients(policy_path, GRPO.args(tmp_path, **layout, **settings), replay_of(policy_path))
    assert_close(filtered[0], GRPO.plain_gradient(policy_path, KEPT, **settings))


@for_each
def test_soft_mode_scales_advantages_by_group_std(algorithm, policy_path, tmp_path):
    replay = replay_of(policy_path)

    class Reweighted(algorithm.plain_trainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            std = torch.tensor([REWARDS[row["prompt"]] for row in inputs]).std(dim=1)
            weights = std / std.max()
            per_token = batch["advantages"].ndim == 2
            return {**batch, "advantages": batch["advantages"] * (weights.unsqueeze(1) if per_token else weights)}

    soft = algorithm.gradients(policy_path, algorithm.args(tmp_path, snr_mode="soft", **ONE_STEP), replay)
    plain_args = algorithm.args(tmp_path, plain=True, **ONE_STEP)
    plain = algorithm.gradients(policy_path, plain_args, replay, PROMPTS, trainer_class=Reweighted)
    assert_close(soft[0], plain[0])


@pytest.mark.parametrize(("scaling", "factor"), [slow("linear", 0.5), ("sqrt", 0.5**0.5)])
@for_each
def test_loss_scaling_is_the_kept_fraction(algorithm, scaling, factor, policy_path, tmp_path):
    policy_only = {"value_coef": 0.0} if algorithm.name == "ppo" else {}
    args = algorithm.args(tmp_path, snr_loss_scaling=scaling, **policy_only, **ONE_STEP)
    (scaled,) = algorithm.gradients(policy_path, args, replay_of(policy_path))
    unscaled = algorithm.plain_gradient(policy_path, KEPT, **policy_only)
    assert_close(scaled, {name: gradient * factor for name, gradient in unscaled.items()})
