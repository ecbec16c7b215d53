"""GradientSNRCallback through real training: exact, without a trace, and told where others look."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from algorithms import GRPO, PPO, RLOO, replay_of
from conftest import assert_same_parameters, parameters_of
from peft import LoraConfig
from replay import GROUP_SIZE, PROMPTS, move_away
from trl import GRPOTrainer

from ragen2_trl import GradientSNRCallback
from ragen2_trl.callbacks.gradient_snr import quantile_buckets, split_in_halves
from ragen2_trl.filtering import group_score
from ragen2_trl.rollout_events import listen

OFF = {"snr_strategy": "all"}
# All 32 rows of the eight prompts in one optimizer step of four micro-batches.
WHOLE_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": 1}
REGULARISED = {"beta": 0.5, "entropy_coef": 0.1}


def make(algorithm, policy_path, folder, callback=None, peft_config=None, **settings):
    """A trainer away from its reference policy, and its callback."""
    args = algorithm.args(folder, **{**WHOLE_BATCH, **settings})
    trainer = algorithm.make(policy_path, args, replay_of(policy_path), peft_config=peft_config)
    if peft_config is None:
        move_away(trainer.model)
    callback = None if callback is None else callback(trainer)
    if callback is not None:
        trainer.add_callback(callback)
    return trainer, callback


each_step = partial(GradientSNRCallback, every=1)
six_of_eight = partial(GradientSNRCallback, every=1, num_buckets=4)


def logged(trainer):
    return [row for row in trainer.state.log_history if "grad/batch_norm" in row]


# Exact


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        pytest.param(GRPO, {"loss_type": "dapo", **REGULARISED}, id="dapo"),
        pytest.param(PPO, {"value_head": "separate", "beta": 0.5}, id="ppo"),
        pytest.param(RLOO, {"beta": 0.5}, id="rloo", marks=pytest.mark.slow),
        *(
            pytest.param(GRPO, {"loss_type": loss, "beta": 0.5}, id=loss, marks=pytest.mark.slow)
            for loss in ("grpo", "dr_grpo", "cispo", "luspo", "sapo", "vespo")
        ),
    ],
)
def test_the_gradient_of_the_batch_is_that_of_the_update(algorithm, settings, policy_path, tmp_path):
    trainer, _ = make(algorithm, policy_path, tmp_path, each_step, **OFF, **settings)
    trainer.train()
    (row,) = logged(trainer)
    # The entropy bonus is a mean over tokens: of a micro-batch in TRL, of the batch here.
    assert row["grad/batch_norm"] == pytest.approx(row["grad_norm"], rel=0.02 if "entropy_coef" in settings else 1e-4)
    assert row["grad/batch_norm"] > 0.01


def one_by_one(trainer, part, sampled):
    """(rows, parameters) the gradient of each row's own loss, which is a mean over rows."""
    settings = {
        "task": {"beta": 0.0, "_entropy_bonus_enabled": False},
        "kl": {"beta": REGULARISED["beta"], "_entropy_bonus_enabled": False},
        "entropy": {"beta": 0.0, "_entropy_bonus_enabled": True},
    }[part]
    before = {name: getattr(trainer, name) for name in settings}
    vars(trainer).update(settings)
    gradients = []
    batch = sampled.batch
    tokens = batch["completion_mask"].sum(dim=1).float()
    for row in range(len(tokens)):
        inputs = {key: value[row : row + 1] for key, value in batch.items() if value.ndim}
        if part != "task":
            inputs["advantages"] = torch.zeros(1)
        inputs["num_items_in_batch"] = tokens.mean() * trainer.args.steps_per_generation
        trainer.model.zero_grad()
        loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs) * trainer.current_gradient_accumulation_steps
        if part == "entropy" or trainer.loss_type == "bnpo":
            loss = loss * tokens[row] / tokens.mean()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten().clone() for p in trainer.model.parameters()]))
    trainer.model.zero_grad()
    vars(trainer).update(before)
    trainer._metrics["train"].clear()
    return torch.stack(gradients)


def same_halves(buckets, seed):
    """Of each bucket and of all rows, as drawn for step 1."""
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence([seed, 1]).generate_state(1)[0]))
    halves = [split_in_halves(groups, GROUP_SIZE, generator) for groups in buckets]
    return [*halves[:-1], [[row for pair in halves for row in pair[half]] for half in (0, 1)]]


@pytest.mark.parametrize(
    "loss_type", ["dapo", *(pytest.param(loss, marks=pytest.mark.slow) for loss in ("grpo", "bnpo"))]
)
def test_gradients_of_buckets_are_means_of_gradients_computed_one_sample_at_a_time(loss_type, policy_path, tmp_path):
    trainer, callback = make(GRPO, policy_path, tmp_path, six_of_eight, loss_type=loss_type, **OFF, **REGULARISED)
    seen = {}

    def compute(sampled):
        seen["rewards"] = sampled.rewards
        seen.update({part: one_by_one(trainer, part, sampled) for part in ("task", "kl", "entropy")})

    listen(trainer, on_rollout=compute)
    trainer.train()
    buckets, left_over = quantile_buckets(group_score(seen["rewards"], "reward_std"), 4)
    assert not left_over
    batch = sum(seen[part].mean(dim=0) for part in ("task", "kl", "entropy"))
    assert callback.latest.batch_norm == pytest.approx(batch.norm().item(), rel=1e-4)
    halves = same_halves([*buckets, left_over], trainer.args.seed)
    measured = [*zip(buckets, callback.latest.buckets, strict=True), (range(8), callback.latest.whole)]
    for number, (groups, bucket) in enumerate(measured):
        rows = [group * GROUP_SIZE + i for group in groups for i in range(GROUP_SIZE)]
        assert bucket.num_samples == len(rows)
        for part, statistics in bucket.parts.items():
            gradient = seen[part][rows].mean(dim=0)
            assert statistics.norm == pytest.approx(gradient.norm().item(), rel=1e-4, abs=1e-6)
            first, second = (seen[part][half].mean(dim=0) for half in halves[number])
            product = torch.dot(first, second).item()
            assert statistics.squared_norm_debiased == pytest.approx(product, rel=1e-3, abs=1e-6)
            if gradient.norm() > 1e-6:
                cosine = torch.cosine_similarity(gradient, batch, dim=0).item()
                assert statistics.cosine == pytest.approx(cosine, abs=1e-4)
    assert {"task", "kl", "entropy"} == set(callback.latest.whole.parts)


@pytest.mark.slow
def test_groups_without_variance_have_regularisers_and_no_task(policy_path, tmp_path):
    """Three of eight groups have none (one of them up to rounding, which TRL divides by its own)."""
    trainer, callback = make(GRPO, policy_path, tmp_path, each_step, scale_rewards="none", **REGULARISED)
    trainer.train()
    lowest, highest = callback.latest.buckets[0], callback.latest.buckets[-1]
    assert lowest.reward_std == (0.0, 0.0, 0.0)
    assert lowest.parts["task"].norm < 1e-5 * highest.parts["task"].norm
    assert lowest.parts["entropy"].norm > 1e-3 and lowest.parts["kl"].norm > 1e-3
    (row,) = logged(trainer)
    assert row["grad/bucket_1/regulariser_share"] > 0.999
    assert row["grad/bucket_6/regulariser_share"] < 0.9


def test_what_is_rounding_has_no_share(policy_path, tmp_path):
    """At the reference policy KL has no gradient, and a group without variance none of the task."""
    args = GRPO.args(tmp_path, **{**WHOLE_BATCH, "scale_rewards": "none", "beta": 0.5})
    trainer = GRPO.make(policy_path, args, replay_of(policy_path))
    trainer.add_callback(each_step(trainer))
    trainer.train()
    (row,) = logged(trainer)
    assert row["grad/bucket_1/reward_std"] == 0.0 and "grad/bucket_1/regulariser_share" not in row
    assert row["grad/bucket_6/regulariser_share"] < 1e-3


@pytest.mark.slow
def test_an_entropy_bonus_is_measured_as_if_the_run_had_it(policy_path, tmp_path):
    with_it, measured = make(GRPO, policy_path, tmp_path, each_step, entropy_coef=0.1)
    without, as_if = make(GRPO, policy_path, tmp_path, partial(each_step, entropy_coef=0.1))
    for trainer in (with_it, without):
        trainer.train()
    assert as_if.latest.whole.parts["entropy"] != {}
    norms = [one.latest.whole.parts["entropy"].norm for one in (measured, as_if)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    # and it is no part of the update's gradient
    assert as_if.latest.batch_norm == pytest.approx(as_if.latest.whole.parts["task"].norm, rel=1e-5)
    assert measured.latest.batch_norm != pytest.approx(measured.latest.whole.parts["task"].norm, rel=1e-5)


@pytest.mark.parametrize("entropy_coef", [0.01, 0.3])
def test_the_gradient_of_the_batch_has_the_runs_own_bonus_whatever_it_is_measured_with(
    entropy_coef, policy_path, tmp_path
):
    measured = []
    for coefficient in (None, entropy_coef):
        callback = partial(each_step, num_buckets=4, entropy_coef=coefficient)
        trainer, callback = make(GRPO, policy_path, tmp_path, callback, entropy_coef=0.1)
        trainer.train()
        measured.append(callback.latest)
    own, other = measured
    assert other.batch_norm == pytest.approx(own.batch_norm, rel=1e-4)
    cosines = [[bucket.parts["task"].cosine for bucket in one.buckets] for one in measured]
    assert cosines[0] == pytest.approx(cosines[1], rel=1e-3)
    norms = [one.whole.parts["entropy"].norm for one in measured]
    assert norms[1] == pytest.approx(norms[0] * entropy_coef / 0.1, rel=1e-4)


# Without a trace


@pytest.mark.parametrize("algorithm", [GRPO, *(pytest.param(one, marks=pytest.mark.slow) for one in (RLOO, PPO))])
def test_training_is_bit_identical_with_and_without(algorithm, policy_path, tmp_path):
    """Sampled by the policy itself, with dropout: random numbers, optimizer and gradients go on as if nothing was."""
    adapters = LoraConfig(r=4, lora_dropout=0.2, init_lora_weights=False, target_modules="all-linear")
    extra = {"loss_type": "dapo", "entropy_coef": 0.01} if algorithm is GRPO else {}
    results = []
    for number, callback in enumerate((None, each_step)):
        args = algorithm.args(tmp_path / str(number), max_steps=2, beta=0.1, **extra)
        set_seed(0)  # TRL 1.12 draws an adapter before it sets the seed
        trainer = algorithm.make(
            policy_path,
            args,
            lambda completions, **_: [len(c) % 3 for c in completions],
            PROMPTS,
            peft_config=adapters,
        )
        if callback is not None:
            trainer.add_callback(callback(trainer))
        trainer.train()
        rows = [
            {key: value for key, value in row.items() if not key.startswith("grad/")}
            for row in trainer.state.log_history
        ]
        results.append((parameters_of(trainer), trainer.optimizer.state_dict(), rows))
    assert len(logged(trainer)) == 2
    assert_same_parameters(results[0][0], results[1][0])
    for first, second in zip(*(result[1]["state"].values() for result in results), strict=True):
        assert all(torch.equal(torch.as_tensor(first[key]), torch.as_tensor(second[key])) for key in first)
    for first, second in zip(*(result[2] for result in results), strict=True):
        timed = {key for key in first if key.endswith(("time", "per_second", "runtime", "seconds"))}
        assert {k: v for k, v in first.items() if k not in timed} == {
            k: v for k, v in second.items() if k not in timed
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True},
        # As TRL forces it for LoRA under ZeRO-3.
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"steps_per_generation": 2, "gradient_accumulation_steps": 4},
        {"steps_per_generation": 8, "num_iterations": 2, "per_device_train_batch_size": 4},
        # With shared prompts, and old log-probs of live rows.
        {"num_iterations": 2, "beta": 0.0, "snr_strategy": "lossless"},
    ],
)
def test_every_layout_is_measured_and_left_as_it_is(settings, policy_path, tmp_path):
    parameters = []
    for callback in (None, each_step):
        trainer, _ = make(GRPO, policy_path, tmp_path, callback, **{"max_steps": 3, "beta": 0.1, **settings})
        trainer.train()
        parameters.append(parameters_of(trainer))
    assert logged(trainer)
    assert_same_parameters(*parameters)


def test_no_loss_of_a_measurement_waits_for_another_process(policy_path, tmp_path, monkeypatch):
    """Processes without rows of a bucket compute none; the update itself waits without a measurement, too."""
    waited = Counter()

    def counted(name):
        wait = getattr(Accelerator, name)
        monkeypatch.setattr(
            Accelerator, name, lambda *args, **kwargs: (waited.update([name]), wait(*args, **kwargs))[1]
        )

    for name in ("pad_across_processes", "gather_for_metrics"):
        counted(name)
    counts = []
    for callback in (None, each_step):
        trainer, _ = make(GRPO, policy_path, tmp_path, callback, top_entropy_quantile=0.5)
        waited.clear()
        trainer.train()
        counts.append(dict(waited))
    assert logged(trainer) and counts[0] == counts[1] and counts[0]["pad_across_processes"] > 0


def test_it_measures_at_its_own_cadence(policy_path, tmp_path):
    trainer, _ = make(
        GRPO,
        policy_path,
        tmp_path,
        partial(GradientSNRCallback, every=2),
        max_steps=5,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
    )
    trainer.train()
    assert [row["step"] for row in logged(trainer)] == [1, 2, 4]
    assert all(row["grad/seconds"] > 0 and row["grad/tokens"] > 0 for row in logged(trainer))


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every must be"),
        ({"num_buckets": 0}, "num_buckets must be"),
        ({"entropy_coef": 0.0}, "entropy_coef must be"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message, policy_path, tmp_path):
    trainer, _ = make(GRPO, policy_path, tmp_path)
    with pytest.raises(ValueError, match=message):
        GradientSNRCallback(trainer, **settings)


def test_what_cannot_be_differentiated_aside_is_refused_before_training(policy_path, tmp_path):
    trainer, _ = make(RLOO, policy_path, tmp_path, partial(each_step, entropy_coef=0.1))
    with pytest.raises(ValueError, match="no entropy bonus"):
        trainer.train()
    assert trainer.state.global_step == 0
