"""Promise 1: a filter that keeps everything computes bit for bit what the trainer without it does."""

import pytest
import torch
from algorithms import GRPO, LOSSES, PPO, cases, for_each, length_reward, replay_of, slow
from conftest import ENDS, assert_same_parameters, parameters_of
from replay import move_away
from transformers import TrainerCallback
from trl import GRPOTrainer

NEUTRAL = {"snr_strategy": "all"}
LAYOUTS = {
    "iterations": {"num_iterations": 2, "gradient_accumulation_steps": 2, "mask_truncated_completions": ENDS},
    "steps": {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "pad_to_multiple_of": 8},
    "generations": {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
}
# All of them, and evaluations between.
TOGETHER = {
    **LAYOUTS["iterations"],
    **LAYOUTS["steps"],
    **{"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2},
}
TERMS = {"gradient_accumulation_steps": 2, "beta": 0.01, "entropy_coef": 0.01}


def assert_neutral(algorithm, settings, policy_path, prompts, tmp_path, **kwargs):
    def trained(plain, **filtering):
        lengths = {"per_device_eval_batch_size": 8, "max_completion_length": 6}
        args = algorithm.args(tmp_path, plain, **lengths, **settings, **filtering)
        trainer = algorithm.make(policy_path, args, length_reward, prompts, eval_dataset=prompts, **kwargs)
        before = parameters_of(trainer)
        trainer.train()
        return before, parameters_of(trainer)

    before, plain = trained(True)
    _, neutral = trained(False, **NEUTRAL)
    assert_same_parameters(plain, neutral)
    assert not [name for name in before if torch.equal(before[name], neutral[name])]


@cases(
    grpo={"loss": TERMS},
    rloo={"loss": {"gradient_accumulation_steps": 2, "beta": 0.01, "normalize_advantages": True}},
    ppo={"shared": TERMS, "separate": {**TERMS, "value_head": "separate"}},
)
def test_neutral_is_plain(algorithm, settings, policy_path, prompts, tmp_path):
    assert_neutral(algorithm, settings, policy_path, prompts, tmp_path)


@for_each
def test_neutral_is_plain_amid_iterations_and_evaluations(algorithm, policy_path, prompts, tmp_path):
    assert_neutral(algorithm, TOGETHER, policy_path, prompts, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@for_each
def test_neutral_is_plain_in_every_layout(algorithm, layout, policy_path, prompts, tmp_path):
    assert_neutral(algorithm, LAYOUTS[layout], policy_path, prompts, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSSES)
def test_neutral_is_grpo_for_every_loss(loss_type, policy_path, prompts, tmp_path):
    assert_neutral(GRPO, {**TERMS, "loss_type": loss_type}, policy_path, prompts, tmp_path)


class EndsEachEpochEarly(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 2 == 0


def test_neutral_is_plain_where_a_callback_ends_epochs_early(policy_path, prompts, tmp_path):
    callbacks = [EndsEachEpochEarly()]
    assert_neutral(GRPO, {"max_steps": 6}, policy_path, prompts, tmp_path, callbacks=callbacks)


class WhitenedReturnsForAdvantages(GRPOTrainer):
    """Of zero mean and unit variance over the tokens of the generation batch."""

    def _calculate_rewards(self, *args):
        self.returns = super()._calculate_rewards(*args)[:, 0]
        return self.returns.unsqueeze(1)

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        of_rows = self.returns.double()
        of_tokens = of_rows.repeat_interleave(batch["completion_mask"].sum(dim=1))
        whitened = (of_rows - of_tokens.mean()) / (of_tokens.var() + 1e-8).sqrt()
        return {**batch, "advantages": whitened.float()}


@pytest.mark.parametrize("value_head", ["shared", slow("separate")])
def test_ppo_without_a_critic_is_grpo_with_whitened_returns_for_advantages(value_head, policy_path, tmp_path):
    """A critic at zero that does not learn, nothing discounted. Gradients are clipped, as by default."""
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4, "beta": 0.1}
    none = {"value_coef": 0.0, "critic_lr": 0.0, "value_head": value_head}
    replay = replay_of(policy_path)

    def trained(algorithm, args, trainer_class):
        trainer = algorithm.make(policy_path, args, replay, trainer_class=trainer_class)
        critic = trainer.model._modules.pop("critic", None)
        move_away(trainer.model)
        if critic is not None:
            trainer.model._modules["critic"] = critic
        torch.manual_seed(0)  # new critics have drawn random numbers
        trainer.train()
        return {name: p for name, p in parameters_of(trainer).items() if not name.startswith("critic.")}

    ppo = trained(PPO, PPO.args(tmp_path, plain=True, **settings, **none), None)
    grpo_args = GRPO.args(tmp_path, plain=True, scale_rewards="none", loss_type="dapo", **settings)
    assert_same_parameters(trained(GRPO, grpo_args, WhitenedReturnsForAdvantages), ppo)
