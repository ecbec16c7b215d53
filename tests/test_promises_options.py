"""Promise 2 for what selects otherwise: quarters, draws at random, completions; and for what scales the loss, or
leaves only its regularisers."""

import pytest
import torch
from algorithms import GRPO, PPO, RLOO, STILL, cases, replay_of, slow
from conftest import PROMPTS, assert_same_parameters, parameters_of
from replay import KEPT, REWARDS, Recorder, assert_close, mean_gradient, move_away
from test_promises_update import LAYOUTS, LOSSES, PPO_STILL, TERMS, need_equal_lengths

# By variance: 0 and 5, 2 and 6, 7 and the first of those without any, the other two of these.
QUARTERS = {1: (0, 5), 2: (2, 6), 3: (7, 1), 4: (3, 4)}
# Each costs a third of a second: where one shows the property, the others are for CI.
grpo_first = pytest.mark.parametrize("algorithm", [GRPO, slow(RLOO), slow(PPO)], ids=lambda one: one.name)
PARTLY = ("four micro-batches", "optimizer steps of one row")


def settings_of(layout):
    rows, accumulation, steps = LAYOUTS[layout]
    return {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": steps,
        "max_steps": steps // accumulation,
        "shuffle_dataset": False,  # of groups without variance, the earlier ones rank higher
        **STILL,
    }


def run(algorithm, policy_path, tmp_path, layout="four micro-batches", replay=None, equal_lengths=False, **settings):
    """A filtered trainer after a run at weights that stay, and the mean gradient of its steps, if all had one."""
    recorder = Recorder()
    args = algorithm.args(tmp_path, **{**settings_of(layout), **settings})
    replay = replay or replay_of(policy_path, equal_lengths=equal_lengths)
    trainer = algorithm.make(policy_path, args, replay, callbacks=[recorder])
    move_away(trainer.model)
    trainer.train()
    return trainer, mean_gradient(recorder.gradients) if all(recorder.gradients) else {}


def row_of(trainer):
    return next(row for row in trainer.state.log_history if "snr/kept_fraction" in row)


# Quarters of the groups

REGULARISED = {"grpo": {"beta": 0.1}, "rloo": {"beta": 0.1}, "ppo": PPO_STILL}


@pytest.mark.parametrize("mode", ["drop", slow("mask")])
@pytest.mark.parametrize("quartile", [slow(1), slow(2), 3])
@grpo_first
def test_a_quarter_is_trained_on_as_if_it_were_all(algorithm, quartile, mode, policy_path, tmp_path):
    """Groups without variance that rank among it are in it, and in its mean."""
    settings = REGULARISED[algorithm.name]
    trainer, gradient = run(algorithm, policy_path, tmp_path, snr_quartile=quartile, snr_mode=mode, **settings)
    expected = algorithm.plain_gradient(policy_path, [PROMPTS[n] for n in QUARTERS[quartile]], **settings)
    assert_close(gradient, expected)
    assert row_of(trainer)["snr/kept_fraction"] == 0.25


@grpo_first
def test_a_quarter_without_variance_is_an_empty_step(algorithm, policy_path, tmp_path):
    trainer, gradient = run(algorithm, policy_path, tmp_path, snr_quartile=4, **REGULARISED[algorithm.name])
    assert gradient == {}
    row = row_of(trainer)
    assert row["snr/kept_groups"] == 0 and row["snr/empty_steps"] == 1 and row["snr/update_compute_fraction"] == 0


@pytest.mark.slow
@grpo_first
def test_a_quarter_without_variance_is_trained_on_where_such_groups_are_included(algorithm, policy_path, tmp_path):
    settings = REGULARISED[algorithm.name]
    _, gradient = run(algorithm, policy_path, tmp_path, snr_quartile=4, snr_include_zero=True, **settings)
    assert_close(gradient, algorithm.plain_gradient(policy_path, [PROMPTS[3], PROMPTS[4]], **settings))


@pytest.mark.slow
def test_with_few_groups_a_quarter_is_that_of_the_window(policy_path, tmp_path):
    """Two of eight groups a generation: each is kept if it is in the quarter of those before it and itself."""
    layout = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 1}
    trainer, _ = run(GRPO, policy_path, tmp_path, snr_quartile=1, **{**layout, "max_steps": 24})
    kept = [row["snr/kept_fraction"] for row in trainer.state.log_history if "snr/kept_fraction" in row]
    assert 0.15 < sum(kept) / len(kept) < 0.4
    assert row_of(trainer)["snr/window_groups"] == 2


# Groups at random


@pytest.mark.parametrize("mode", ["drop", slow("mask")])
@grpo_first
def test_as_many_groups_at_random_are_trained_on_as_if_they_were_all(algorithm, mode, policy_path, tmp_path):
    settings = REGULARISED[algorithm.name]
    trainer, gradient = run(algorithm, policy_path, tmp_path, snr_keep="random", snr_mode=mode, **settings)
    kept = trainer.latest_selection.kept
    assert int(kept.sum()) == len(KEPT)
    drawn = [prompt for prompt, is_kept in zip(PROMPTS, kept, strict=True) if is_kept]
    assert_close(gradient, algorithm.plain_gradient(policy_path, drawn, **settings))


@pytest.mark.slow
def test_the_draw_differs_from_step_to_step_takes_groups_without_variance_and_no_random_number(policy_path, tmp_path):
    states, kept = [], []
    for keep in ("largest", "random"):
        trainer, _ = run(GRPO, policy_path, tmp_path, layout="one micro-batch", snr_keep=keep, max_steps=4)
        states.append(torch.get_rng_state())
    for step in range(4):
        select = trainer._selector.select
        rewards = torch.tensor([REWARDS[prompt] for prompt in PROMPTS])
        kept.append(select(rewards, rewards.var(dim=1), moment=(step, 0)).kept.tolist())
    assert torch.equal(*states)
    assert trainer.latest_selection.kept.tolist() == kept[3]  # of step and seed alone
    assert len({tuple(one) for one in kept}) > 1
    assert any(one[n] for one in kept for n in (1, 3, 4))


# Completions

# The earliest of the highest and the latest of the lowest, in the groups with variance.
ENDS = {0: (0, 2), 2: (2, 1), 5: (3, 2), 6: (1, 2), 7: (1, 2)}


def advantages_of(algorithm, policy_path, tmp_path, equal_lengths, **settings):
    """By prompt and place in the group, those that the plain trainer gives to the whole groups with variance."""
    found = {}

    class Seen(algorithm.plain_trainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            for number, row in enumerate(inputs):
                found[row["prompt"], number % 4] = batch["advantages"][number]
            return batch

    layout = {"per_device_train_batch_size": 4 * len(ENDS), "max_steps": 1, **STILL}
    args = algorithm.args(tmp_path, plain=True, **layout, **settings)
    replay = replay_of(policy_path, equal_lengths=equal_lengths)
    algorithm.gradients(policy_path, args, replay, [PROMPTS[n] for n in ENDS], trainer_class=Seen)
    return found


def gradient_on_ends(algorithm, policy_path, tmp_path, equal_lengths=False, **settings):
    """That of the plain trainer on a batch of nothing but those completions, with advantages of whole groups. PPO's
    are of single completions and need no group."""
    advantages = {}
    if algorithm is not PPO:
        advantages = advantages_of(algorithm, policy_path, tmp_path, equal_lengths, **settings)

    class WithAdvantages(algorithm.plain_trainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            if advantages:
                places = [(row["prompt"], ENDS[PROMPTS.index(row["prompt"])][n % 2]) for n, row in enumerate(inputs)]
                batch["advantages"] = torch.stack([advantages[place] for place in places])
            return batch

    replay = replay_of(policy_path, equal_lengths=equal_lengths)
    replay.group_size = 2
    for number, ends in ENDS.items():
        prompt = PROMPTS[number]
        replay.completions[prompt] = [replay.completions[prompt][end] for end in ends]
    replay.rewards = {PROMPTS[n]: [REWARDS[PROMPTS[n]][end] for end in ends] for n, ends in ENDS.items()}
    layout = {"per_device_train_batch_size": 2 * len(ENDS), "num_generations": 2, "max_steps": 1, **STILL}
    args = algorithm.args(tmp_path, plain=True, **layout, **settings)
    (gradient,) = algorithm.gradients(policy_path, args, replay, trainer_class=WithAdvantages)
    return gradient


def assert_ends(algorithm, settings, layout, mode, policy_path, tmp_path):
    equal_lengths = need_equal_lengths(settings) and LAYOUTS[layout][2] > 1
    options = {"snr_level": "trajectory", "snr_mode": mode, "equal_lengths": equal_lengths, **settings}
    _, gradient = run(algorithm, policy_path, tmp_path, layout, **options)
    assert_close(gradient, gradient_on_ends(algorithm, policy_path, tmp_path, equal_lengths, **settings))


SCALED = {"scale_rewards": "batch", "beta": 0.1}
SUMMED = {"multi_objective_aggregation": "normalize_then_sum"}


@cases(
    slow=("grpo-bonus", "grpo-rows", "grpo-scaled", "grpo-summed", "rloo-clipped", "rloo-normalised", "ppo-separate"),
    grpo={**TERMS["grpo"], "default": {}, "scaled": SCALED, "summed": SUMMED},
    rloo=TERMS["rloo"],
    ppo={name: TERMS["ppo"][name] for name in ("shared", "separate")},
)
def test_the_ends_of_each_group_are_trained_on_with_the_advantages_of_the_whole(
    algorithm, settings, policy_path, tmp_path
):
    assert_ends(algorithm, settings, "four micro-batches", "drop", policy_path, tmp_path)


@pytest.mark.slow
@grpo_first
def test_masked_completions_leave_the_update_of_the_others(algorithm, policy_path, tmp_path):
    settings = {"grpo": {"beta": 0.1}, "rloo": {"beta": 0.1}, "ppo": PPO_STILL}[algorithm.name]
    assert_ends(algorithm, settings, "four rows per device", "mask", policy_path, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["drop", "mask"])
@pytest.mark.parametrize("layout", PARTLY)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_of_grpo_is_that_of_the_ends(loss_type, layout, mode, policy_path, tmp_path):
    settings = {"loss_type": loss_type, "beta": 0.1}
    assert_ends(GRPO, settings, layout, mode, policy_path, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", PARTLY)
@cases(rloo=TERMS["rloo"], ppo=TERMS["ppo"])
def test_every_term_is_that_of_the_ends(algorithm, settings, layout, policy_path, tmp_path):
    assert_ends(algorithm, settings, layout, "drop", policy_path, tmp_path)


@pytest.mark.parametrize("mode", ["drop", slow("mask")])
def test_metrics_count_completions_where_these_are_kept(mode, policy_path, tmp_path):
    trainer, _ = run(GRPO, policy_path, tmp_path, snr_level="trajectory", snr_mode=mode)
    row, lengths = row_of(trainer), replay_of(policy_path).completions
    assert row["snr/kept_groups"] == len(ENDS)
    assert row["snr/kept_fraction"] == 10 / 32
    kept = sum(len(lengths[PROMPTS[n]][end]) for n, ends in ENDS.items() for end in ends)
    assert row["snr/kept_tokens_fraction"] == pytest.approx(kept / sum(len(c) for p in PROMPTS for c in lengths[p]))
    assert row["snr/update_compute_fraction"] == 1.0 if mode == "mask" else row["snr/update_compute_fraction"] < 0.4


@pytest.mark.slow
@grpo_first
def test_all_completions_of_all_groups_are_the_plain_trainers(algorithm, policy_path, prompts, tmp_path):
    def trained(plain, **settings):
        args = algorithm.args(tmp_path, plain, max_completion_length=6, **settings)
        trainer = algorithm.make(
            policy_path, args, lambda completions, **_: [len(c) / 10 for c in completions], prompts
        )
        trainer.train()
        return parameters_of(trainer)

    whole = {"snr_level": "trajectory", "snr_trajectory_fraction": 1.0, "snr_include_zero": True}
    assert_same_parameters(trained(True), trained(False, **whole))


@pytest.mark.slow
@grpo_first
def test_as_many_completions_at_random_are_drawn_from_all(algorithm, policy_path, tmp_path):
    level = {"snr_level": "trajectory", "snr_keep": "random"}
    trainer, gradient = run(algorithm, policy_path, tmp_path, **level)
    completions = trainer.latest_selection.completions
    assert completions.sum() == 10 and gradient
    assert row_of(trainer)["snr/kept_groups"] == completions.any(dim=1).sum() > len(ENDS)


@pytest.mark.slow
def test_episodes_of_several_samples_are_kept_or_dropped_whole_at_the_level_of_trajectories(policy_path, tmp_path):
    from ragen2_trl import SNRFilteredGRPOTrainer
    from ragen2_trl.envs import make_env
    from ragen2_trl.rollouts import TextRollout
    from ragen2_trl.tiny import resolve_model

    env = make_env("frozen_lake", multi_turn=True, size=3, max_turns=3)
    args = GRPO.args(
        tmp_path,
        per_device_train_batch_size=32,
        max_completion_length=300,
        max_steps=1,
        snr_level="trajectory",
    )
    seen = []

    class Seen(SNRFilteredGRPOTrainer):
        def _compute_loss(self, model, inputs):
            seen.append(len(inputs["prompt_ids"]))
            return super()._compute_loss(model, inputs)

    samples = []

    def by_place(completions, **columns):
        samples.extend(columns["seed"])
        return [float(number % 4) for number in range(len(completions))]

    rollout = TextRollout(env, context="last", context_turns=1)
    trainer = Seen(resolve_model("tiny"), by_place, args, env.dataset(8, seed=0), rollout_func=rollout)
    trainer.train()
    assert row_of(trainer)["snr/kept_fraction"] == 0.5
    assert sum(seen) > 16 and len(samples) == 32  # each of 16 episodes, with its later turns


# What scales the loss, or leaves only its regularisers


@cases(
    slow=("grpo-bonus", "grpo-rows", "rloo-kl", "rloo-normalised", "rloo-clipped", "ppo-separate"),
    grpo=TERMS["grpo"],
    rloo=TERMS["rloo"],
    ppo={name: TERMS["ppo"][name] for name in ("shared", "separate")},
)
def test_the_whole_loss_is_scaled_by_the_value(algorithm, settings, policy_path, tmp_path):
    """Here 0.8 of the mass keep what 0.9 keep, with KL, entropy and value terms."""
    options = {"snr_loss_scaling": "whole_loss_by_value", "snr_value": 0.8, **settings}
    equal_lengths = need_equal_lengths(settings)
    trainer, gradient = run(algorithm, policy_path, tmp_path, equal_lengths=equal_lengths, **options)
    assert int(trainer.latest_selection.kept.sum()) == len(KEPT)
    plain = algorithm.plain_gradient(policy_path, KEPT, equal_lengths, **settings)
    assert_close(gradient, {name: 0.8 * value for name, value in plain.items()})


def regularisers_alone(algorithm, policy_path, tmp_path, equal_lengths, **settings):
    """The plain trainer on the kept groups: with rewards of 0 for RLOO, whose KL penalty is in the advantages."""

    class Regularised(algorithm.plain_trainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            return batch if algorithm is RLOO else {**batch, "advantages": torch.zeros_like(batch["advantages"])}

    replay = replay_of(policy_path, equal_lengths=equal_lengths)
    if algorithm is RLOO:
        replay.rewards = dict.fromkeys(PROMPTS, [0.0] * 4)
    layout = {"per_device_train_batch_size": 4 * len(KEPT), "max_steps": 1, **STILL}
    args = algorithm.args(tmp_path, plain=True, **layout, **settings)
    (gradient,) = algorithm.gradients(policy_path, args, replay, KEPT, trainer_class=Regularised)
    return gradient


@cases(
    slow=("grpo-rows", "rloo-clipped", "ppo-shared", "ppo-separate", "ppo-k2"),
    grpo=TERMS["grpo"],
    rloo={"kl": {"beta": 0.1}, "clipped": {"beta": 0.1, "reward_clip_range": (0.0, 0.6)}},
    ppo={
        **{name: TERMS["ppo"][name] for name in ("shared", "separate")},
        "k2": {**PPO_STILL, "kl_estimator": "k2"},
    },
)
def test_without_the_tasks_advantages_regularisers_act_alone(algorithm, settings, policy_path, tmp_path):
    equal_lengths = need_equal_lengths(settings)
    options = {"snr_zero_task_advantage": True, "equal_lengths": equal_lengths, **settings}
    trainer, gradient = run(algorithm, policy_path, tmp_path, **options)
    assert int(trainer.latest_selection.kept.sum()) == len(KEPT)
    assert_close(gradient, regularisers_alone(algorithm, policy_path, tmp_path, equal_lengths, **settings))


@pytest.mark.slow
@grpo_first
def test_a_refilled_batch_has_no_advantages_of_the_task_either(algorithm, policy_path, tmp_path):
    settings = {
        "snr_zero_task_advantage": True,
        "snr_dynamic_sampling_rounds": 3,
        "snr_strategy": "none",
        "beta": 1e-30,
    }
    critic = {"value_coef": 0.0} if algorithm is PPO else {}
    _, gradient = run(algorithm, policy_path, tmp_path, **settings, **critic)
    assert gradient and all((value.abs() < 1e-20).all() for value in gradient.values())


@pytest.mark.slow
def test_the_scaling_by_the_value_goes_with_a_refill(policy_path, tmp_path):
    gradients = []
    for scaling in ("none", "whole_loss_by_value"):
        options = {"snr_dynamic_sampling_rounds": 2, "snr_loss_scaling": scaling}
        gradients.append(run(GRPO, policy_path, tmp_path, **options)[1])
    assert_close(gradients[1], {name: 0.9 * value for name, value in gradients[0].items()})


@pytest.mark.slow
def test_a_long_row_of_empty_quarters_says_whose_they_are(policy_path, tmp_path, caplog):
    with caplog.at_level("WARNING"):
        options = {"snr_quartile": 4, "snr_max_empty_steps": 4, "max_steps": 9}
        trainer, _ = run(GRPO, policy_path, tmp_path, layout="one micro-batch", **options)
    assert trainer.state.global_step == 4
    assert "there is no variance in the quarter that snr_quartile=4 keeps" in caplog.text
