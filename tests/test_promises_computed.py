"""Promise 3: dropped means not computed."""

import pytest
import torch
from algorithms import PPO, for_each, replay_of, slow
from replay import KEPT

LAYOUTS = [slow(1, 16), slow(2, 8), (4, 4), slow(32, 1)]  # rows per device, forward passes of the update


class Passes:
    """The rows of every forward pass of a module, with gradients and without."""

    def __init__(self, module, pad):
        self.pad = pad
        self.with_grad, self.without = [], []
        module.register_forward_pre_hook(self.record, with_kwargs=True)

    def record(self, module, args, kwargs):
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        (self.with_grad if torch.is_grad_enabled() else self.without).append(ids)

    def rows(self, passes):
        return sorted(tuple(token for token in row.tolist() if token != self.pad) for ids in passes for row in ids)


def rows_of(replay, prompts):
    return sorted(
        (*replay.tokenizer(prompt)["input_ids"], *completion)
        for prompt in prompts
        for completion in replay.completions[prompt]
    )


def trained(algorithm, rows, policy_path, tmp_path, **settings):
    layout = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 32 // rows, "max_steps": 1}
    replay = replay_of(policy_path)
    trainer = algorithm.make(policy_path, algorithm.args(tmp_path, **layout, **settings), replay)
    pad = trainer._tokenizer.pad_token_id
    policy = Passes(trainer.model.model, pad)
    critic = Passes(trainer.critic, pad) if algorithm is PPO else None
    trainer.train()
    return replay, policy, critic


@pytest.mark.parametrize(("rows", "num_passes"), LAYOUTS)
@for_each
def test_dropped_means_not_computed(algorithm, rows, num_passes, policy_path, tmp_path):
    replay, policy, _ = trained(algorithm, rows, policy_path, tmp_path)
    kept = rows_of(replay, KEPT)
    assert policy.rows(policy.with_grad) == kept
    assert len(policy.with_grad) == num_passes
    assert all(len(ids) <= rows for ids in policy.with_grad)
    for ids in policy.with_grad:  # no column is padding throughout
        assert (ids != policy.pad).any(dim=0).all()
    # The KL of every row is part of RLOO's rewards. PPO's values are of kept rows only.
    everything = rows_of(replay, list(replay.rewards))
    assert policy.rows(policy.without) == {"grpo": [], "rloo": everything, "ppo": kept}[algorithm.name]


@pytest.mark.parametrize(("rows", "num_passes"), LAYOUTS)
def test_a_critic_computes_kept_rows_only(rows, num_passes, policy_path, tmp_path):
    """Once for the values at the rollout, and once in the update."""
    replay, _, critic = trained(PPO, rows, policy_path, tmp_path, value_head="separate")
    for passes in (critic.with_grad, critic.without):
        assert critic.rows(passes) == rows_of(replay, KEPT)
        assert len(passes) == num_passes


def test_a_critic_on_the_hidden_state_of_the_policy_computes_kept_rows_only(policy_path, tmp_path):
    _, _, critic = trained(PPO, 4, policy_path, tmp_path, value_head="shared")
    assert [len(hidden) for hidden in (*critic.without, *critic.with_grad)] == [4] * 8
