"""Promise 2 for the ablations: quarters, draws at random and single completions as selectors of a training, and the
trainers that scale advantages."""

from functools import partial

import pytest
import torch
from algorithms import GRPO, PPO, RLOO, STILL, cases, replay_of, slow
from conftest import PROMPTS
from replay import KEPT, REWARDS, Recorder, assert_close, mean_gradient, move_away
from test_promises_update import LAYOUTS, TERMS, need_equal_lengths
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.record.saved_measurement import read_measurement
from ragen2_trl.tiny import TINY_MODEL_PATH
from ragen2_trl.trainers.selection import seeded_generator
from research import ablations
from research.ablations import (
    AdvantagesByKeptFraction,
    AdvantagesBySqrtOfKeptFraction,
    SkipsZeroGradients,
    as_many_at_random,
    best_and_worst,
    draw_as_many,
)

PPO_TERMS = {name: TERMS["ppo"][name] for name in ("shared", "separate")}


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


def run(
    algorithm,
    policy_path,
    tmp_path,
    layout="four micro-batches",
    *,
    equal_lengths=False,
    selector=None,
    mixin=None,
    callbacks=(),
    **settings,
):
    """A filtered trainer after a run at weights that stay, and the mean gradient of its steps, if all had one."""
    recorder = Recorder()
    args = algorithm.args(tmp_path, **{**settings_of(layout), **settings})
    trainer = algorithm.make(
        policy_path,
        args,
        replay_of(policy_path, equal_lengths=equal_lengths),
        callbacks=[recorder, *callbacks],
        selector=selector,
        trainer_class=mixin and with_mixin(mixin, algorithm),
    )
    move_away(trainer.model)
    trainer.train()
    return trainer, mean_gradient(recorder.gradients) if all(recorder.gradients) else {}


def with_mixin(mixin, algorithm):
    return type(mixin.__name__, (mixin, algorithm.trainer), {})


# Groups at random


@pytest.mark.slow
def test_the_draw_differs_from_step_to_step_takes_groups_without_variance_and_no_random_number(policy_path, tmp_path):
    states, kept = [], []

    def watched(groups):
        kept.append(as_many_at_random(groups))
        return kept[-1]

    for selector in (None, watched):
        trainer, _ = run(GRPO, policy_path, tmp_path, layout="one micro-batch", selector=selector, max_steps=4)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    by_filter = torch.tensor([prompt in KEPT for prompt in PROMPTS])
    of_seed_and_step = [draw_as_many(by_filter, seeded_generator(trainer.args.seed, step, 0)) for step in range(4)]
    assert [one.tolist() for one in kept] == [one.tolist() for one in of_seed_and_step]
    assert len({tuple(one.tolist()) for one in kept}) > 1
    assert any(one[n] for one in kept for n in (1, 3, 4))


# Completions

# The earliest of the highest and the latest of the lowest, in the groups with variance.
ENDS_OF_VARIED = partial(best_and_worst, include_zero=False)
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


def assert_ends(algorithm, settings, layout, policy_path, tmp_path):
    equal_lengths = need_equal_lengths(settings) and LAYOUTS[layout][2] > 1
    options = {"selector": ENDS_OF_VARIED, "equal_lengths": equal_lengths, **settings}
    _, gradient = run(algorithm, policy_path, tmp_path, layout, **options)
    assert_close(gradient, gradient_on_ends(algorithm, policy_path, tmp_path, equal_lengths, **settings))


SCALED = {"scale_rewards": "batch", "beta": 0.1}
SUMMED = {"multi_objective_aggregation": "normalize_then_sum"}


@cases(
    slow=("grpo-bonus", "grpo-rows", "grpo-scaled", "grpo-summed", "rloo-clipped", "rloo-normalised", "ppo-separate"),
    grpo={**TERMS["grpo"], "default": {}, "scaled": SCALED, "summed": SUMMED},
    rloo=TERMS["rloo"],
    ppo=PPO_TERMS,
)
def test_the_ends_of_each_group_are_trained_on_with_the_advantages_of_the_whole(
    algorithm, settings, policy_path, tmp_path
):
    assert_ends(algorithm, settings, "four micro-batches", policy_path, tmp_path)


# What scales advantages


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


@pytest.mark.parametrize(
    ("mixin", "factor"),
    [(AdvantagesByKeptFraction, 0.5), slow(AdvantagesBySqrtOfKeptFraction, 0.5**0.5)],
    ids=["linear", "sqrt"],
)
@cases(slow=("rloo-kl", "ppo-separate"), grpo={"kl": {"beta": 0.1}}, rloo={"kl": {"beta": 0.1}}, ppo=PPO_TERMS)
def test_advantages_are_scaled_by_the_kept_fraction_and_regularisers_are_not(
    algorithm, settings, mixin, factor, policy_path, tmp_path
):
    """RLOO's penalty is a part of its advantages."""
    equal_lengths = need_equal_lengths(settings)
    _, gradient = run(algorithm, policy_path, tmp_path, mixin=mixin, equal_lengths=equal_lengths, **settings)
    plain = algorithm.plain_gradient(policy_path, KEPT, equal_lengths, **settings)
    alone = dict.fromkeys(plain, 0.0)
    if algorithm is not RLOO:
        alone = regularisers_alone(algorithm, policy_path, tmp_path, equal_lengths, **settings)
    assert_close(gradient, {name: factor * plain[name] + (1 - factor) * alone[name] for name in plain})


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_a_step_without_gradients_moves_no_weights_and_the_others_are_trls(optim, policy_path, tmp_path):
    """The last step has gradients again; with momentum the ends differ, without they are the same."""
    flat = {prompt: [1.0] * len(rewards) for prompt, rewards in REWARDS.items()}
    ends = []
    for mixin in (None, SkipsZeroGradients):
        args = GRPO.args(tmp_path, snr_strategy="lossless", optim=optim, learning_rate=1e-3, max_steps=3, beta=0.0)
        replay = replay_of(policy_path)
        moved = []

        class Watch(TrainerCallback):
            def on_step_begin(self, args, state, control, model=None, moved=moved, replay=replay, **kwargs):
                replay.rewards = flat if state.global_step == 1 else REWARDS
                moved.append([weight.detach().clone() for weight in model.parameters()])

        trainer = GRPO.make(
            policy_path, args, replay, callbacks=[Watch()], trainer_class=mixin and with_mixin(mixin, GRPO)
        )
        trainer.train()
        still = [torch.equal(*pair) for pair in zip(moved[1], moved[2], strict=True)]
        assert all(still) == (mixin is not None or optim == "sgd")
        assert not all(torch.equal(*pair) for pair in zip(moved[2], trainer.model.parameters(), strict=True))
        ends.append(list(trainer.model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True)) == (optim == "sgd")


@pytest.mark.slow
def test_the_kl_penalty_is_toward_templates_and_retrieval_is_split_by_impossible_maps(tmp_path, monkeypatch):
    made = AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH)
    with torch.no_grad():
        made.lm_head.weight += 1.0  # the embedding, too

    def make(command, check):
        AutoTokenizer.from_pretrained(TINY_MODEL_PATH).save_pretrained(command[-1])
        made.save_pretrained(command[-1])

    monkeypatch.setattr(ablations.subprocess, "run", make)
    env = make_env("frozen_lake", impossible=0.5)
    args = SNRFilteredGRPOConfig(
        str(tmp_path / "run"),
        num_generations=2,
        per_device_train_batch_size=32,
        max_completion_length=48,
        max_steps=1,
        logging_steps=1,
        beta=0.1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        snr_selector="research.ablations:as_many_as_vary",
    )
    trainer_class = type("Pulled", (ablations.PulledToTemplates, SNRFilteredGRPOTrainer), {})
    trainer = trainer_class(str(TINY_MODEL_PATH), env.success_func, args, env.dataset(64, seed=1))
    trainer.add_callback(MutualInformationCallback(trainer, every=1))
    trainer.train()
    assert torch.equal(trainer.ref_model.lm_head.weight, made.lm_head.weight)
    (row,) = [row for row in trainer.state.log_history if "snr/kept_fraction" in row]
    (file,) = (tmp_path / "run" / "_measurements").glob("measurement_*.json")
    measured = read_measurement(file)
    shut = {one["prompt"][-1]["content"]: "G" not in reached(one["grid"]) for one in trainer.train_dataset}
    hits = {True: [], False: []}
    for logps, own in zip(measured.cross_logps, measured.prompt_index.tolist(), strict=True):
        (kind,) = {impossible for shown, impossible in shut.items() if shown in measured.prompts[own]}
        hits[kind].append(int(logps.argmax()) == own)
    assert len(hits[True]) > 3 < len(hits[False])
    for name, found in (("impossible", hits[True]), ("possible", hits[False])):
        assert row[f"retrieval/{name}"] == pytest.approx(sum(found) / len(found))


def reached(grid):
    """The letters of the cells that can be walked to from the start."""
    rows = grid.split("\n")
    cells = {(r, c) for r, row in enumerate(rows) for c, letter in enumerate(row) if letter == "S"}
    for _ in range(len(grid)):
        near = {(r + dr, c + dc) for r, c in cells for dr, dc in ((0, 1), (1, 0), (0, -1), (-1, 0))}
        cells |= {(r, c) for r, c in near if 0 <= r < len(rows) > c >= 0 and rows[r][c] != "H"}
    return {rows[r][c] for r, c in cells}
