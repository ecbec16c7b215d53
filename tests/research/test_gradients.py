"""Gradients by reward variance through real training: exact, and without a trace."""

import pytest
import torch
from algorithms import GRPO, PPO, RLOO, replay_of
from conftest import assert_same_parameters, parameters_of
from replay import GROUP_SIZE, move_away
from trl import GRPOTrainer

from ragen2_trl.filtering import group_score
from ragen2_trl.rollout_events import listen
from research.gradients import BUCKETS, ENTROPY_COEF, MeasuresGradients, quantile_buckets

# All 32 rows of the eight prompts in one optimizer step of four micro-batches.
WHOLE_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": 1}


def make(algorithm, policy_path, folder, measures=True, **settings):
    """A trainer away from its reference policy."""
    args = algorithm.args(folder, **{**WHOLE_BATCH, **settings})
    measuring = type("Measuring", (MeasuresGradients, algorithm.trainer), {}) if measures else algorithm.trainer
    trainer = algorithm.make(policy_path, args, replay_of(policy_path), trainer_class=measuring)
    move_away(trainer.model)
    return trainer


def logged(trainer):
    return [row for row in trainer.state.log_history if "grad/bucket_1/reward_std" in row]


def one_by_one(trainer, part, batch):
    """(rows, parameters) the gradient of each row's own loss, which is a mean over rows."""
    settings = {
        "beta": trainer.beta if part == "kl" else 0.0,
        "_entropy_bonus_enabled": part == "entropy",
        "entropy_coef": ENTROPY_COEF,
    }
    before = {name: getattr(trainer, name) for name in settings}
    vars(trainer).update(settings)
    gradients = []
    tokens = batch["completion_mask"].sum(dim=1).float()
    for row in range(len(tokens)):
        inputs = {key: value[row : row + 1] for key, value in batch.items() if value.ndim}
        if part != "task":
            inputs["advantages"] = torch.zeros(1)
        inputs["num_items_in_batch"] = tokens.mean() * trainer.args.steps_per_generation
        trainer.model.zero_grad()
        loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs) * trainer.current_gradient_accumulation_steps
        if part == "entropy":
            loss = loss * tokens[row] / tokens.mean()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten().clone() for p in trainer.model.parameters()]))
    trainer.model.zero_grad()
    vars(trainer).update(before)
    trainer._metrics["train"].clear()
    return torch.stack(gradients)


@pytest.mark.parametrize("loss_type", ["dapo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_gradients_of_buckets_are_means_of_gradients_computed_one_sample_at_a_time(loss_type, policy_path, tmp_path):
    trainer = make(GRPO, policy_path, tmp_path, loss_type=loss_type, snr_strategy="all", beta=0.5)
    seen = {}

    def compute(sampled):
        measured = {key: values[-1] for key, values in trainer._metrics["train"].items()}
        seen["rewards"], seen["measured"] = sampled.rewards, measured
        seen.update({part: one_by_one(trainer, part, sampled.batch) for part in ("task", "kl", "entropy")})

    listen(trainer, on_rollout=compute)
    trainer.train()
    stds = group_score(seen["rewards"], "reward_std")
    buckets = quantile_buckets(stds, BUCKETS)
    assert [len(bucket) for bucket in buckets] == [1] * BUCKETS
    for number, groups in enumerate(buckets, 1):
        rows = [group * GROUP_SIZE + i for group in groups for i in range(GROUP_SIZE)]
        at = f"grad/bucket_{number}"
        assert seen["measured"][f"{at}/reward_std"] == pytest.approx(stds[groups].mean().item())
        for part in ("task", "kl", "entropy"):
            norm = seen[part][rows].mean(dim=0).norm().item()
            assert seen["measured"][f"{at}/{part}/norm"] == pytest.approx(norm, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("algorithm", [GRPO, pytest.param(PPO, marks=pytest.mark.slow)])
def test_training_is_bit_identical_with_and_without_and_measured_first_midway_and_at_the_end(
    algorithm, policy_path, tmp_path
):
    parameters = []
    for measures in (False, True):
        settings = {"max_steps": 6, "beta": 0.1, "gradient_accumulation_steps": 1, "gradient_checkpointing": True}
        trainer = make(algorithm, policy_path, tmp_path / str(measures), measures, **settings)
        trainer.train()
        parameters.append(parameters_of(trainer))
    assert [row["step"] for row in logged(trainer)] == [1, 3, 6]
    assert_same_parameters(*parameters)


def test_a_loss_without_an_entropy_bonus_is_refused(policy_path, tmp_path):
    with pytest.raises(ValueError, match="has no entropy bonus; allowed: GRPO and PPO"):
        make(RLOO, policy_path, tmp_path)
