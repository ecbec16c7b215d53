"""Promise 2: the filtered update is that of the plain trainer on the kept groups."""

import pytest
from algorithms import ALGORITHMS, GRPO, LOSSES, STILL, cases, for_each, replay_of, slow
from conftest import PROMPTS
from replay import KEPT, Replay, assert_close, mean_gradient

# The entropy bonus of `mask` needs a loss over tokens.
BONUS = {"beta": 0.1, "entropy_coef": 0.02}
PPO_STILL = {"critic_lr": 0.0, "beta": 0.1}
TERMS = {
    "grpo": {"bonus": BONUS, "rows": {"beta": 0.1, "loss_type": "grpo"}},
    "rloo": {
        "kl": {"beta": 0.1},
        "normalised": {"beta": 0.1, "normalize_advantages": True},
        "clipped": {"reward_clip_range": (0.0, 0.6)},
    },
    "ppo": {
        "shared": {**PPO_STILL, "entropy_coef": 0.02},
        "separate": {**PPO_STILL, "value_head": "separate"},
        "discounted": {**PPO_STILL, "gae_lambda": 0.9, "gamma": 0.95},
    },
}

# (rows per device, gradient accumulation steps, steps per generation): 32 rows each, 16 of them kept
LAYOUTS = {
    "one micro-batch": (32, 1, 1),
    "four micro-batches": (8, 4, 4),
    "one row per device": (1, 32, 32),
    "four rows per device": (4, 8, 8),
    "four optimizer steps per generation": (4, 2, 8),
    "optimizer steps of one row": (1, 8, 32),
}


def need_equal_lengths(settings) -> bool:
    """bnpo and the entropy bonus are means over the tokens of a micro-batch: with several of them, the same whichever
    way rows are packed only if all rows are equally long."""
    return settings.get("loss_type") == "bnpo" or settings.get("entropy_coef", 0.0) > 0


def assert_update(algorithm, settings, layout, policy_path, tmp_path, **modes):
    rows, accumulation, steps = layout
    equal_lengths = steps > 1 and need_equal_lengths(settings)
    args = algorithm.args(
        tmp_path,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps,
        **{"max_steps": steps // accumulation, **STILL, **settings, **modes},
    )
    filtered = algorithm.gradients(policy_path, args, replay_of(policy_path, equal_lengths=equal_lengths))
    assert len(filtered) == args.max_steps
    # At learning rate 0 the steps of one generation batch see the same policy: their mean is the whole batch's.
    assert_close(mean_gradient(filtered), algorithm.plain_gradient(policy_path, KEPT, equal_lengths, **settings))
    return filtered


FAST = ("four optimizer steps per generation", "optimizer steps of one row")


@pytest.mark.parametrize("layout", [layout if layout in FAST else slow(layout) for layout in LAYOUTS])
@for_each
def test_filtered_update_is_the_plain_one_on_the_kept_groups(algorithm, layout, policy_path, tmp_path):
    settings = {"grpo": BONUS, "rloo": TERMS["rloo"]["normalised"], "ppo": PPO_STILL}[algorithm.name]
    assert_update(algorithm, settings, LAYOUTS[layout], policy_path, tmp_path)


@cases(slow=("rloo-kl",), **TERMS)
def test_every_term_is_that_of_the_kept_groups(algorithm, settings, policy_path, tmp_path):
    assert_update(algorithm, settings, LAYOUTS["four micro-batches"], policy_path, tmp_path)


@pytest.mark.product
@pytest.mark.parametrize("layout", LAYOUTS)
@cases(**TERMS)
def test_every_term_in_every_layout(algorithm, settings, layout, policy_path, tmp_path):
    assert_update(algorithm, settings, LAYOUTS[layout], policy_path, tmp_path)


@pytest.mark.product
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_of_grpo_in_every_layout(loss_type, layout, policy_path, tmp_path):
    settings = {"loss_type": loss_type, "beta": 0.1, "entropy_coef": 0.02}
    assert_update(GRPO, settings, LAYOUTS[layout], policy_path, tmp_path)


# In step and out of step with the optimizer's windows (4 and 6 of 8 micro-steps)
ITERATIONS = {4: {"num_iterations": 2, "max_steps": 4}, 6: {"num_iterations": 3, "max_steps": 4}}


def assert_iterations(algorithm, settings, accumulation, policy_path, tmp_path):
    settings = {"beta": 0.1, **settings}
    equal_lengths = need_equal_lengths(settings)
    args = algorithm.args(
        tmp_path,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=8,
        **ITERATIONS[accumulation],
        **STILL,
        **settings,
    )
    filtered = algorithm.gradients(policy_path, args, replay_of(policy_path, equal_lengths=equal_lengths))
    # All windows weigh the same, and together they have gone over the rollouts a whole number of times.
    expected = algorithm.plain_gradient(policy_path, KEPT, equal_lengths, **settings)
    assert_close(mean_gradient(filtered), expected)
    if accumulation == 4:
        assert_close(mean_gradient(filtered[:2]), mean_gradient(filtered[2:]))


@for_each
def test_every_iteration_over_a_generation_batch_is_exact(algorithm, policy_path, tmp_path):
    settings = {"critic_lr": 0.0} if algorithm.name == "ppo" else {}
    assert_iterations(algorithm, settings, 4, policy_path, tmp_path)


@pytest.mark.slow
@for_each
def test_iterations_out_of_step_with_the_optimizer_are_exact(algorithm, policy_path, tmp_path):
    settings = {"critic_lr": 0.0} if algorithm.name == "ppo" else {}
    assert_iterations(algorithm, settings, 6, policy_path, tmp_path)


@pytest.mark.product
@pytest.mark.parametrize("accumulation", ITERATIONS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_iteration_is_exact_for_every_loss(loss_type, accumulation, policy_path, tmp_path):
    assert_iterations(GRPO, {"loss_type": loss_type}, accumulation, policy_path, tmp_path)


@cases(
    slow=("grpo-grpo", "grpo-dr_grpo"),
    grpo={loss_type: {"loss_type": loss_type} for loss_type in ("grpo", "dapo", "dr_grpo")},
    rloo={"normalised": {"normalize_advantages": True}},
    ppo={"shared": {"critic_lr": 0.0}},
)
def test_generation_batches_of_one_step_weigh_the_same(algorithm, settings, policy_path, tmp_path):
    """One optimizer step over two generation batches: the mean of what is computed on the kept groups of each."""
    args = algorithm.args(
        tmp_path,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        steps_per_generation=1,
        max_steps=1,
        snr_strategy="nonzero",
        shuffle_dataset=False,
        **STILL,
        **settings,
    )
    filtered = algorithm.gradients(policy_path, args, replay_of(policy_path))
    batches = [PROMPTS[0], PROMPTS[2]], [PROMPTS[5], PROMPTS[6], PROMPTS[7]]
    expected = mean_gradient([algorithm.plain_gradient(policy_path, kept, **settings) for kept in batches])
    assert_close(filtered[0], expected)


TRUNCATED = {"mask_truncated_completions": True, "max_completion_length": 10}


@cases(
    slow=("grpo-padded", "grpo-sequence", "grpo-off-policy", "rloo-padded", "ppo-padded"),
    grpo={
        "truncated": TRUNCATED,
        "padded": {"pad_to_multiple_of": 8},
        "sequence": {"importance_sampling_level": "sequence", "loss_type": "luspo"},
        "off-policy": {"top_entropy_quantile": 1.0, "delta": 2.0, "off_policy_mask_threshold": 0.5},
    },
    rloo={"truncated": TRUNCATED, "padded": {"pad_to_multiple_of": 8}},
    ppo={"truncated": TRUNCATED, "padded": {"pad_to_multiple_of": 8}},
)
def test_other_settings_of_trl_keep_the_update_exact(algorithm, settings, policy_path, tmp_path):
    settings = {**settings, **STILL, "max_steps": 1}
    replay = replay_of(policy_path)
    for completions in replay.completions.values():  # two of four end with the end token, the others are truncated
        for completion in completions[::2]:
            completion[-1] = replay.tokenizer.eos_token_id  # TRL 1.12 knows no other
    plain_args = algorithm.args(tmp_path, plain=True, per_device_train_batch_size=16, **settings)
    (plain,) = algorithm.gradients(policy_path, plain_args, replay, KEPT)
    layout = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    args = algorithm.args(tmp_path, **layout, **settings)
    assert_close(algorithm.gradients(policy_path, args, replay)[0], plain)


class Turns(Replay):
    """Some tokens are the environment's."""

    def rollout(self, prompts, trainer):
        output = super().rollout(prompts, trainer)
        masks = [[int(token % 3 > 0) for token in ids] for ids in output["completion_ids"]]
        return {**output, "env_mask": masks}


@pytest.mark.parametrize("algorithm", [ALGORITHMS["grpo"], ALGORITHMS["ppo"]], ids=["grpo", "ppo"])
def test_tokens_that_the_environment_wrote_stay_out_of_the_loss(algorithm, policy_path, tmp_path):
    settings = {**STILL, "max_steps": 1}
    replay = Turns(replay_of(policy_path).tokenizer, replay_of(policy_path).rewards)
    plain_args = algorithm.args(tmp_path, plain=True, per_device_train_batch_size=16, **settings)
    (plain,) = algorithm.gradients(policy_path, plain_args, replay, KEPT, rollout_func=replay.rollout)
    layout = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    args = algorithm.args(tmp_path, **layout, **settings)
    assert_close(algorithm.gradients(policy_path, args, replay, rollout_func=replay.rollout)[0], plain)
