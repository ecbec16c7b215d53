"""People subclass TRL's trainers. Half of the groups are dropped here, and every subclass that can be right is; those
that cannot be are refused before a parameter moves."""

import pytest
import torch
from algorithms import GRPO, STILL, cases, for_each, replay_of, slow
from conftest import PROMPTS, assert_same_parameters, parameters_of
from replay import KEPT, Recorder, assert_close, mean_gradient, move_away
from trl import GRPOTrainer, RLOOTrainer

from ragen2_trl.trainers.plans import KEPT as KEPT_KEY

LAYOUT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "max_steps": 1, **STILL}
SETTINGS = {
    "grpo": {"dapo": {"loss_type": "dapo", "beta": 0.1}, "grpo": {"loss_type": "grpo", "beta": 0.1}},
    "rloo": {"kl": {"beta": 0.1}},
    "ppo": {"shared": {"beta": 0.1, "critic_lr": 0.0}},
}


def trl_trainer(trainer):
    """The class of TRL's that a trainer is made of."""
    return RLOOTrainer if isinstance(trainer, RLOOTrainer) else GRPOTrainer


def subclass(mixin, trainer_class):
    return type(mixin.__name__, (mixin, trainer_class), {})


# Loss


class CallsSuper:
    def _compute_loss(self, model, inputs):
        assert len(inputs["advantages"])
        return 2 * super()._compute_loss(model, inputs)


class CallsTheLossOfTRL:
    def _compute_loss(self, model, inputs):
        return trl_trainer(self)._compute_loss(self, model, inputs)


class CallsComputeLossOfTRL:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return trl_trainer(self).compute_loss(self, model, inputs, return_outputs, num_items_in_batch)


def policy_gradient(trainer, model, inputs):
    """(rows, T) of a loss of one's own, by a forward pass of one's own, and the mask of what counts."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    width = inputs["completion_ids"].size(1)
    logits = model(input_ids=ids, attention_mask=attended).logits[:, -width - 1 : -1]
    logps = logits.log_softmax(dim=-1).gather(2, inputs["completion_ids"].unsqueeze(2)).squeeze(2)
    advantages = inputs["advantages"]
    return -logps * (advantages if advantages.ndim == 2 else advantages.unsqueeze(1)), inputs["completion_mask"]


class MeanOverRows:
    def _compute_loss(self, model, inputs):
        losses, mask = policy_gradient(self, model, inputs)
        loss = ((losses * mask).sum(dim=1) / mask.sum(dim=1)).mean()
        # transformers divides the loss of RLOO; GRPO's divides by itself
        return loss if isinstance(self, RLOOTrainer) else loss / self.current_gradient_accumulation_steps


class MeanOverRowsInPlaceOfComputeLoss:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return MeanOverRows._compute_loss(self, model, inputs)


class HolesInPrompts:
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        mask = batch["prompt_mask"].clone()
        mask[:, -2] = 0
        return {**batch, "prompt_mask": mask}


OWN = [CallsTheLossOfTRL, MeanOverRows, slow(MeanOverRowsInPlaceOfComputeLoss), slow(HolesInPrompts)]


@pytest.mark.slow
@pytest.mark.parametrize("mixin", OWN)
@cases(**SETTINGS)
def test_what_subclasses_compute_of_the_kept_rows_is_what_they_compute_of_them_alone(
    algorithm, settings, mixin, policy_path, tmp_path
):
    """The gradient of a subclass is that of the same subclass of the plain trainer on the kept groups."""
    replay = replay_of(policy_path)
    layout = {**LAYOUT, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    plain_args = algorithm.args(tmp_path, plain=True, **layout, **settings)
    plain_class = subclass(mixin, algorithm.plain_trainer)
    (plain,) = algorithm.gradients(policy_path, plain_args, replay, KEPT, trainer_class=plain_class)
    args = algorithm.args(tmp_path, **LAYOUT, **settings)
    (filtered,) = algorithm.gradients(policy_path, args, replay, trainer_class=subclass(mixin, algorithm.trainer))
    assert_close(filtered, plain)


@pytest.mark.parametrize(("first", "then"), [("dapo", "grpo"), slow("grpo", "dapo"), slow("dapo", "bnpo")])
def test_the_loss_is_the_one_that_is_set_when_training_begins(first, then, policy_path, tmp_path):
    """Scripts set `trainer.loss_type` after `__init__`."""
    recorder, replay = Recorder(), replay_of(policy_path, equal_lengths=True)
    args = GRPO.args(tmp_path, loss_type=first, **LAYOUT)
    trainer = GRPO.make(policy_path, args, replay, callbacks=[recorder])
    move_away(trainer.model)
    trainer.loss_type = then
    trainer.train()
    (gradient,) = recorder.gradients
    assert_close(gradient, GRPO.plain_gradient(policy_path, KEPT, equal_lengths=True, loss_type=then))


class ComputesTheLossTwice:
    """As sharpness-aware minimisation does: the gradient of a first loss moves the weights for a second one."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        first = self._compute_loss(model, inputs)
        gradients = torch.autograd.grad(first, parameters, allow_unused=True)
        assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)
        loss = self._compute_loss(model, inputs)
        if isinstance(self, RLOOTrainer):  # as transformers does; GRPO's loss is divided already
            loss = loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        self._step += 1
        return loss.detach()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixin", "factor"), [(CallsSuper, 2.0), (CallsComputeLossOfTRL, 1.0), (ComputesTheLossTwice, 1.0)]
)
@cases(**SETTINGS)
def test_losses_that_come_from_super_are_weighted(algorithm, settings, mixin, factor, policy_path, tmp_path):
    """Also where a training step calls the loss itself, and more than once."""
    args = algorithm.args(tmp_path, **LAYOUT, **settings)
    trainer_class = subclass(mixin, algorithm.trainer)
    (gradient,) = algorithm.gradients(policy_path, args, replay_of(policy_path), trainer_class=trainer_class)
    plain = algorithm.plain_gradient(policy_path, KEPT, **settings)
    assert_close(gradient, {name: factor * of_kept for name, of_kept in plain.items()})


# Inputs: the gradient is that of the trainer without the subclass


class TakesWhatItKnows:
    known = (
        *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"),
        *("old_per_token_logps", "ref_per_token_logps", "old_logps", "returns", "old_values"),
    )

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        return {key: inputs[key] for key in self.known if key in inputs}


class ReadsAdvantages:
    seen = 0

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        assert len(inputs["advantages"]) == len(inputs["prompt_ids"]) > 0
        type(self).seen += 1
        return inputs


class ReturnsTheRewardsItself:
    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        return torch.tensor(self.reward_funcs[0](prompts)).unsqueeze(1)


@pytest.mark.parametrize("mixin", [TakesWhatItKnows, ReadsAdvantages, ReturnsTheRewardsItself])
@cases(slow=("grpo-grpo",), **SETTINGS)
def test_subclasses_around_the_update_leave_it_exact(algorithm, settings, mixin, policy_path, tmp_path):
    args = algorithm.args(tmp_path, **LAYOUT, **settings)
    trainer_class = subclass(mixin, algorithm.trainer)
    gradients = algorithm.gradients(policy_path, args, replay_of(policy_path), trainer_class=trainer_class)
    assert_close(mean_gradient(gradients), algorithm.plain_gradient(policy_path, KEPT, **settings))
    if mixin is ReadsAdvantages:
        assert trainer_class.seen == 8  # also in the micro-steps that are skipped


@for_each
def test_subclasses_never_see_a_step_without_rows(algorithm, policy_path, tmp_path):
    """Not even where no group is kept."""
    trainer_class = subclass(ReadsAdvantages, subclass(CallsSuper, algorithm.trainer))
    flat = replay_of(policy_path, {prompt: [1.0] * 4 for prompt in PROMPTS})
    args = algorithm.args(tmp_path, **LAYOUT)
    trainer = algorithm.make(policy_path, args, flat, trainer_class=trainer_class)
    trainer.train()
    assert trainer_class.seen == 8


class AddsItsOwn:
    """What there is for each row, token, prompt token, and three times that for each token; as tensors and lists."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        rows = torch.arange(len(batch["prompt_ids"]))
        by_token = batch["completion_ids"] * batch["completion_mask"]
        return {
            **batch,
            "own_tokens": by_token.double(),
            "own_features": torch.stack([by_token, 2 * by_token, 3 * by_token], dim=2),
            "prompt_own": batch["prompt_ids"] * batch["prompt_mask"],
            "own_numbers": rows,
            "own_names": [f"{row} {int(ids.sum())}" for row, ids in enumerate(by_token)],
        }

    def _compute_loss(self, model, inputs):
        if self.model.training:
            by_token = inputs["completion_ids"] * inputs["completion_mask"]
            assert torch.equal(inputs["own_tokens"], by_token.double())
            assert torch.equal(inputs["own_features"][:, :, 2], 3 * by_token)
            assert torch.equal(inputs["prompt_own"], inputs["prompt_ids"] * inputs["prompt_mask"])
            numbers, sums = inputs["own_numbers"].tolist(), by_token.sum(dim=1).tolist()
            assert inputs["own_names"] == [f"{n} {total}" for n, total in zip(numbers, sums, strict=True)]
            self.widths.add(inputs["completion_ids"].shape)
        return super()._compute_loss(model, inputs)


@cases(slow=("grpo-grpo",), **SETTINGS)
def test_what_subclasses_add_to_a_batch_is_trimmed_like_the_rest(algorithm, settings, policy_path, tmp_path):
    trainer_class = subclass(AddsItsOwn, algorithm.trainer)
    trainer_class.widths = set()
    args = algorithm.args(tmp_path, **LAYOUT, **settings)
    (gradient,) = algorithm.gradients(policy_path, args, replay_of(policy_path), trainer_class=trainer_class)
    assert len(trainer_class.widths) > 1
    assert_close(gradient, algorithm.plain_gradient(policy_path, KEPT, **settings))


# What cannot be made right


class PreparesInputsOfTRL:
    def _prepare_inputs(self, generation_batch):
        return trl_trainer(self)._prepare_inputs(self, generation_batch)


class GeneratesAsTRL:
    def _generate_and_score_completions(self, inputs):
        return trl_trainer(self)._generate_and_score_completions(self, inputs)


class DropsWhatIsKept:
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        return {key: value for key, value in batch.items() if key != KEPT_KEY}


def at_construction(algorithm, mixins, error, said, policy_path, tmp_path, **settings):
    trainer_class = algorithm.trainer
    for mixin in mixins:
        trainer_class = subclass(mixin, trainer_class)
    with pytest.raises(error, match=said):
        algorithm.make(
            policy_path, algorithm.args(tmp_path, **settings), replay_of(policy_path), trainer_class=trainer_class
        )


def assert_refused_in_training(algorithm, mixin, said, policy_path, tmp_path, **settings):
    layout = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "max_steps": 1, "weight_decay": 0.1}
    trainer_class = subclass(mixin, algorithm.trainer)
    args = algorithm.args(tmp_path, **layout, **settings)
    trainer = algorithm.make(policy_path, args, replay_of(policy_path), trainer_class=trainer_class)
    start = parameters_of(trainer)
    with pytest.raises(RuntimeError, match=said):
        trainer.train()
    assert_same_parameters(start, parameters_of(trainer))


@for_each
def test_a_subclass_that_drops_what_is_kept_is_refused_before_a_parameter_moves(algorithm, policy_path, tmp_path):
    said = r"must leave 'snr_kept'.* in the generation batch"
    assert_refused_in_training(algorithm, DropsWhatIsKept, said, policy_path, tmp_path)


@for_each
def test_the_class_above_may_be_called_by_its_name(algorithm, policy_path, tmp_path):
    class Between(algorithm.trainer):
        def _prepare_inputs(self, generation_batch):
            self.prepared = getattr(self, "prepared", 0) + 1
            return super()._prepare_inputs(generation_batch)

    def below(parent):
        class Below(parent):
            def _prepare_inputs(self, generation_batch):
                return parent._prepare_inputs(self, generation_batch)

        return Below

    args = algorithm.args(tmp_path, **LAYOUT)
    trainer_class = below(Between)
    trainer = algorithm.make(policy_path, args, replay_of(policy_path), trainer_class=trainer_class)
    trainer.train()
    assert trainer.prepared == 8


class PassesTheWeightsBy:
    """In all micro-steps, in the first one of a step, or in the last."""

    micro_steps = (0, 1)

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        by = self._step in self.micro_steps
        inputs = self._prepare_inputs(inputs)
        loss = trl_trainer(self)._compute_loss(self, model, inputs) if by else self._compute_loss(model, inputs)
        self.accelerator.backward(loss)
        self._step += 1
        return loss.detach()


class PassesTheFirstBy(PassesTheWeightsBy):
    micro_steps = (0,)


class PassesTheLastBy(PassesTheWeightsBy):
    micro_steps = (1,)


@pytest.mark.parametrize("mixin", [PassesTheWeightsBy, PassesTheFirstBy, PassesTheLastBy])
@for_each
def test_training_steps_that_pass_the_weights_by_are_refused_before_a_parameter_moves(
    algorithm, mixin, policy_path, tmp_path
):
    said = rf"{mixin.__name__}\.training_step must call self\.compute_loss or self\._compute_loss"
    assert_refused_in_training(algorithm, mixin, said, policy_path, tmp_path)


class PreparesAndWeighsAsTRL(PreparesInputsOfTRL, PassesTheWeightsBy):
    pass


PASS_BY = {
    PreparesInputsOfTRL: "_prepare_inputs",
    PreparesAndWeighsAsTRL: "_prepare_inputs",
    GeneratesAsTRL: "_generate_and_score_completions",
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"snr_strategy": "all"}], ids=str)
@pytest.mark.parametrize("mixin", PASS_BY)
@for_each
def test_subclasses_that_pass_the_filter_by_are_refused_before_a_parameter_moves(
    algorithm, mixin, settings, policy_path, tmp_path
):
    """Also where the batch is TRL's own, in which nothing marks what is kept."""
    said = rf"^{mixin.__name__}\.{PASS_BY[mixin]} must call super\(\)\.{PASS_BY[mixin]}, .* did not"
    assert_refused_in_training(algorithm, mixin, said, policy_path, tmp_path, **settings)


class RewardsOfItsOwn:
    def _calculate_rewards(self, *args):
        self.own = super()._calculate_rewards(*args)
        return self.own


class BatchOfItsOwn:
    def _generate_and_score_completions(self, inputs):
        return {**super()._generate_and_score_completions(inputs), "own": getattr(self, "own", None)}


FURTHER = {"snr_dynamic_sampling_rounds": 1}


@for_each
def test_rewards_of_one_round_are_not_those_of_a_batch_of_several(algorithm, policy_path, tmp_path):
    settings = {**FURTHER, "scale_rewards": "none"} if algorithm is GRPO else FURTHER
    mixins = [RewardsOfItsOwn, BatchOfItsOwn]
    said = r"snr_dynamic_sampling_rounds=1.*_calculate_rewards.*_generate_and_score_completions.*0"
    at_construction(algorithm, mixins, TypeError, said, policy_path, tmp_path, **settings)
    replay = replay_of(policy_path)
    for one in mixins:
        trainer_class = subclass(one, algorithm.trainer)
        algorithm.make(policy_path, algorithm.args(tmp_path, **settings), replay, trainer_class=trainer_class)
    both = subclass(BatchOfItsOwn, subclass(RewardsOfItsOwn, algorithm.trainer))
    algorithm.make(policy_path, algorithm.args(tmp_path), replay, trainer_class=both)


class CompletionsOfItsOwn:
    def _generate(self, prompts):
        return super()._generate(prompts)


@for_each
def test_pilots_are_not_scored_before_a_subclass_has_changed_them(algorithm, policy_path, tmp_path):
    said = r"snr_pilot_generations=2.*_generate.*0.*_generate_single_turn"
    at_construction(algorithm, [CompletionsOfItsOwn], TypeError, said, policy_path, tmp_path, snr_pilot_generations=2)
    trainer_class = subclass(CompletionsOfItsOwn, algorithm.trainer)
    by_default = {**FURTHER, "snr_strategy": "nonzero", "num_generations": 16, "per_device_train_batch_size": 32}
    for settings in ({}, by_default):
        args = algorithm.args(tmp_path, **settings)
        trainer = algorithm.make(policy_path, args, replay_of(policy_path), trainer_class=trainer_class)
        assert trainer.pilot_generations == 0


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_a_filter_that_is_lost_later_is_refused_too(num_iterations, policy_path, tmp_path):
    """A subclass that calls super() in the first generation only."""

    class Later(GRPO.trainer):
        def _generate_and_score_completions(self, inputs):
            if self.state.global_step == 0:
                return super()._generate_and_score_completions(inputs)
            return GRPOTrainer._generate_and_score_completions(self, inputs)

    layout = {"per_device_train_batch_size": 32, "num_iterations": num_iterations, "max_steps": 4}
    args = GRPO.args(tmp_path, snr_strategy="nonzero", **layout)
    trainer = GRPO.make(policy_path, args, replay_of(policy_path), trainer_class=Later)
    with pytest.raises(RuntimeError, match="_generate_and_score_completions"):
        trainer.train()
    assert trainer.state.global_step == num_iterations


@pytest.mark.parametrize("strategy", ["nonzero", "all"])
def test_a_batch_of_an_earlier_generation_may_be_trained_on_again(strategy, policy_path, tmp_path):
    class Replays(GRPO.trainer):
        def _generate_and_score_completions(self, inputs):
            if self.state.global_step != 1:
                self.earlier = super()._generate_and_score_completions(inputs)
            return dict(self.earlier)

    args = GRPO.args(tmp_path, snr_strategy=strategy, per_device_train_batch_size=32, max_steps=3)
    trainer = GRPO.make(policy_path, args, replay_of(policy_path), trainer_class=Replays)
    trainer.train()
    assert trainer.state.global_step == 3


def test_completions_outside_of_a_step_are_no_pilots(policy_path, tmp_path):
    args = GRPO.args(tmp_path, snr_strategy="nonzero", snr_pilot_generations=2, max_steps=1)
    trainer = GRPO.make(policy_path, args, replay_of(policy_path))
    trainer.train()
    trainer.model.train()
    with pytest.raises(RuntimeError, match=r"samples with pilots outside of .* allowed: snr_pilot_generations=0"):
        trainer._generate([PROMPTS[0]] * 4)
