"""Promises 1 to 3: the filtered update is GRPO on the kept groups, and computes nothing else."""

import pytest
import torch
from conftest import PROMPTS, assert_same_parameters, parameters_of
from datasets import Dataset
from replay import KEPT, REWARDS, Replay, assert_close, gradients_of, mean_gradient
from transformers import AutoTokenizer
from trl import GRPOTrainer

from ragen2_trl import SNRFilteredGRPOTrainer

LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]


def length_reward(completions, **kwargs):
    return [len(completion) / 10 for completion in completions]


# Promise 1


@pytest.mark.parametrize(
    "layout",
    [
        {"loss_type": loss_type, "gradient_accumulation_steps": 2, "beta": 0.01, "entropy_coef": 0.01}
        for loss_type in LOSS_TYPES
    ]
    + [
        {"num_iterations": 2, "gradient_accumulation_steps": 2},
        {"steps_per_generation": 2, "gradient_accumulation_steps": 1},
        {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
        {"mask_truncated_completions": True, "pad_to_multiple_of": 8},
        {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2},
    ],
    ids=str,
)
def test_neutral_is_grpo(layout, policy_path, prompts, make_args):
    settings = {"per_device_eval_batch_size": 8, **layout}
    plain = GRPOTrainer(policy_path, length_reward, make_args(snr=False, **settings), prompts, prompts)
    plain.train()
    neutral_args = make_args(**settings, snr_value=1.0, snr_include_zero=True)
    neutral = SNRFilteredGRPOTrainer(policy_path, length_reward, neutral_args, prompts, prompts)
    before = parameters_of(neutral)
    neutral.train()
    assert_same_parameters(parameters_of(plain), parameters_of(neutral))
    assert not torch.equal(before["model.norm.weight"], neutral.model.model.norm.weight)


# Promise 2

# (rows per device, gradient accumulation steps, steps per generation): 32 rows each, 16 of them kept
LAYOUTS = {
    "one micro-batch": (32, 1, 1),
    "four micro-batches": (8, 4, 4),
    "one row per device": (1, 32, 32),
    "four rows per device": (4, 8, 8),
    "four optimizer steps per generation": (4, 2, 8),
    "optimizer steps of one row": (1, 8, 32),
}


@pytest.mark.parametrize("mode", ["drop", "mask"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_filtered_update_is_grpo_on_the_kept_groups(loss_type, layout, mode, policy_path, make_args):
    rows, accumulation, steps = LAYOUTS[layout]
    # bnpo and the entropy bonus are means over the tokens of a micro-batch: with several of them, the same whichever
    # way rows are packed only if all rows are equally long.
    several = steps > 1
    bonus = 0.02 if mode == "drop" or loss_type in ("dapo", "cispo", "vespo", "bnpo") else 0.0
    settings = {
        "loss_type": loss_type,
        "beta": 0.1,
        "entropy_coef": bonus,
        "learning_rate": 0.0,
        "max_grad_norm": 0.0,
    }
    replay = Replay(
        AutoTokenizer.from_pretrained(policy_path),
        REWARDS,
        equal_lengths=several and (loss_type == "bnpo" or bonus > 0),
    )
    plain = gradients_of(
        GRPOTrainer,
        policy_path,
        make_args(snr=False, per_device_train_batch_size=16, max_steps=1, **settings),
        replay,
        KEPT,
    )
    filtered = gradients_of(
        SNRFilteredGRPOTrainer,
        policy_path,
        make_args(
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=steps,
            max_steps=steps // accumulation,
            snr_mode=mode,
            **settings,
        ),
        replay,
        list(REWARDS),
    )
    assert len(filtered) == steps // accumulation
    # At learning rate 0 the steps of one generation batch see the same policy: their mean is the whole batch's.
    assert_close(mean_gradient(filtered), plain[0])


@pytest.mark.parametrize("mode", ["drop", "mask"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("accumulation", [4, 6])
def test_every_iteration_over_a_generation_batch_is_grpo_on_the_kept_groups(
    loss_type, mode, accumulation, policy_path, make_args
):
    """Two passes over the same rollouts, in step and out of step with the optimizer's windows (4 and 6 of 8)."""
    settings = {"loss_type": loss_type, "beta": 0.1, "learning_rate": 0.0, "max_grad_norm": 0.0}
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS, equal_lengths=loss_type == "bnpo")
    plain_args = make_args(snr=False, per_device_train_batch_size=16, max_steps=1, **settings)
    plain = gradients_of(GRPOTrainer, policy_path, plain_args, replay, KEPT)
    args = make_args(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=8,
        num_iterations=3 if accumulation == 6 else 2,
        max_steps=4,
        snr_mode=mode,
        **settings,
    )
    filtered = gradients_of(SNRFilteredGRPOTrainer, policy_path, args, replay, PROMPTS)
    # All windows weigh the same, and together they have gone over the rollouts a whole number of times.
    assert_close(mean_gradient(filtered), plain[0])
    if accumulation == 4:
        assert_close(mean_gradient(filtered[:2]), mean_gradient(filtered[2:]))


@pytest.mark.parametrize(
    "settings",
    [
        {"mask_truncated_completions": True},
        {"pad_to_multiple_of": 8},
        {"importance_sampling_level": "sequence", "loss_type": "luspo"},
        {"top_entropy_quantile": 1.0, "delta": 2.0, "off_policy_mask_threshold": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["drop", "mask"])
def test_other_settings_of_trl_keep_the_update_exact(settings, mode, policy_path, make_args):
    settings = {**settings, "learning_rate": 0.0, "max_grad_norm": 0.0, "max_steps": 1}
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    for completions in replay.completions.values():  # two of four end with the end token, the others are truncated
        for completion in completions[::2]:
            completion[-1] = 8
    plain_args = make_args(snr=False, per_device_train_batch_size=16, **settings)
    plain = gradients_of(GRPOTrainer, policy_path, plain_args, replay, KEPT)
    args = make_args(per_device_train_batch_size=4, gradient_accumulation_steps=8, snr_mode=mode, **settings)
    assert_close(gradients_of(SNRFilteredGRPOTrainer, policy_path, args, replay, PROMPTS)[0], plain[0])


@pytest.mark.parametrize("mode", ["drop", "mask"])
def test_tokens_that_the_environment_wrote_stay_out_of_the_loss(mode, policy_path, make_args):
    class Turns(Replay):
        def rollout(self, prompts, trainer):
            output = super().rollout(prompts, trainer)
            masks = [[int(token % 3 > 0) for token in ids] for ids in output["completion_ids"]]
            return {**output, "env_mask": masks}

    settings = {"learning_rate": 0.0, "max_grad_norm": 0.0, "max_steps": 1}
    replay = Turns(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    plain_args = make_args(snr=False, per_device_train_batch_size=16, **settings)
    plain = gradients_of(GRPOTrainer, policy_path, plain_args, replay, KEPT)
    args = make_args(per_device_train_batch_size=4, gradient_accumulation_steps=8, snr_mode=mode, **settings)
    assert_close(gradients_of(SNRFilteredGRPOTrainer, policy_path, args, replay, PROMPTS)[0], plain[0])


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("mode", ["drop", "mask"])
def test_generation_batches_of_one_step_weigh_the_same(loss_type, mode, policy_path, make_args):
    """One optimizer step over two generation batches: the mean of what GRPO computes on the kept groups of each."""
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    settings = {"loss_type": loss_type, "learning_rate": 0.0, "max_grad_norm": 0.0, "shuffle_dataset": False}

    def plain(kept):
        args = make_args(snr=False, per_device_train_batch_size=4 * len(kept), max_steps=1, **settings)
        return gradients_of(GRPOTrainer, policy_path, args, replay, kept)[0]

    args = make_args(
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        steps_per_generation=1,
        max_steps=1,
        snr_strategy="none",
        snr_mode=mode,
        **settings,
    )
    filtered = gradients_of(SNRFilteredGRPOTrainer, policy_path, args, replay, PROMPTS)
    expected = mean_gradient([plain([PROMPTS[0], PROMPTS[2]]), plain([PROMPTS[5], PROMPTS[6], PROMPTS[7]])])
    assert_close(filtered[0], expected)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages_are_normalised_over_the_kept_groups(aggregation, scale_rewards, policy_path, make_args):
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    settings = {
        "multi_objective_aggregation": aggregation,
        "scale_rewards": scale_rewards,
        "learning_rate": 0.0,
        "max_grad_norm": 0.0,
        "max_steps": 1,
    }
    plain_args = make_args(snr=False, per_device_train_batch_size=16, **settings)
    plain = gradients_of(GRPOTrainer, policy_path, plain_args, replay, KEPT)
    filtered_args = make_args(per_device_train_batch_size=4, gradient_accumulation_steps=8, **settings)
    filtered = gradients_of(SNRFilteredGRPOTrainer, policy_path, filtered_args, replay, PROMPTS)
    assert_close(filtered[0], plain[0])


def test_soft_mode_scales_advantages_by_group_std(policy_path, make_args):
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    settings = {"learning_rate": 0.0, "max_grad_norm": 0.0, "max_steps": 1, "per_device_train_batch_size": 32}
    soft = gradients_of(SNRFilteredGRPOTrainer, policy_path, make_args(snr_mode="soft", **settings), replay, PROMPTS)

    class Reweighted(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            std = torch.tensor([REWARDS[row["prompt"]] for row in inputs]).std(dim=1)
            batch["advantages"] = batch["advantages"] * std / std.max()
            return batch

    plain = gradients_of(Reweighted, policy_path, make_args(snr=False, **settings), replay, PROMPTS)
    assert_close(soft[0], plain[0])


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 0.5), ("sqrt", 0.5**0.5)])
def test_loss_scaling_is_the_kept_fraction(scaling, factor, policy_path, make_args):
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    settings = {"learning_rate": 0.0, "max_grad_norm": 0.0, "max_steps": 1, "per_device_train_batch_size": 32}
    unscaled = gradients_of(SNRFilteredGRPOTrainer, policy_path, make_args(**settings), replay, PROMPTS)[0]
    args = make_args(snr_loss_scaling=scaling, **settings)
    scaled = gradients_of(SNRFilteredGRPOTrainer, policy_path, args, replay, PROMPTS)[0]
    assert_close(scaled, {name: gradient * factor for name, gradient in unscaled.items()})


# Promise 3


def update_inputs(trainer) -> list[torch.Tensor]:
    """The input ids of every forward pass with gradients, recorded during `trainer.train()`."""
    recorded = []

    def record(module, args, kwargs):
        if torch.is_grad_enabled():
            recorded.append(kwargs["input_ids"])

    trainer.model.model.register_forward_pre_hook(record, with_kwargs=True)
    return recorded


@pytest.mark.parametrize(("rows", "num_forwards"), [(1, 16), (2, 8), (4, 4), (32, 1)])
def test_dropped_means_not_computed(rows, num_forwards, policy_path, make_args):
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    args = make_args(per_device_train_batch_size=rows, gradient_accumulation_steps=32 // rows, max_steps=1)
    trainer = SNRFilteredGRPOTrainer(
        policy_path,
        Replay.reward,
        args,
        Dataset.from_dict({"prompt": PROMPTS}),
        rollout_func=replay.rollout,
    )
    recorded = update_inputs(trainer)
    trainer.train()

    pad = trainer._tokenizer.pad_token_id
    computed = sorted(tuple(token for token in row.tolist() if token != pad) for ids in recorded for row in ids)
    kept = sorted(
        (*trainer._tokenizer(prompt)["input_ids"], *completion)
        for prompt in KEPT
        for completion in replay.completions[prompt]
    )
    assert computed == kept
    assert len(recorded) == num_forwards
    assert all(len(ids) <= rows for ids in recorded)
    for ids in recorded:  # no column is padding throughout
        assert (ids != pad).any(dim=0).all()
