"""Dynamic sampling through real training runs: a batch that keeps too little is filled up."""

import pytest
import torch
from conftest import parameters_of
from datasets import Dataset, IterableDataset
from dynamic_samplings import WORDS, Seen, replay_with, rows_of
from replay import GROUP_SIZE, Replay

from ragen2_trl import SNRFilteredGRPOTrainer
from ragen2_trl.rollout_events import listen
from ragen2_trl.sampling.policy import round_size


def train(policy_path, args, replay, prompts=WORDS):
    trainer = SNRFilteredGRPOTrainer(
        policy_path,
        Replay.reward,
        args,
        Dataset.from_dict({"prompt": prompts}),
        rollout_func=replay.rollout,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("varied", [{0, 3}, {5}, {1, 2, 3, 4, 5, 6, 7}])
def test_a_batch_is_filled_up_with_kept_groups(policy_path, make_args, varied):
    args = make_args(
        per_device_train_batch_size=16, snr_dynamic_sampling_rounds=50, max_steps=2, snr_strategy="nonzero"
    )
    trainer = train(policy_path, args, replay_with(policy_path, varied))
    for row in rows_of(trainer):
        assert row["snr/trained_groups"] == 4
        assert row["snr/prompts_used"] >= 4
    assert trainer.state.num_input_tokens_seen > 0


def test_the_cap_trains_on_what_there_is(policy_path, make_args):
    args = make_args(
        per_device_train_batch_size=16, snr_dynamic_sampling_rounds=1, max_steps=1, snr_strategy="nonzero"
    )
    trainer = train(policy_path, args, replay_with(policy_path, {5}))
    (row,) = rows_of(trainer)
    assert row["snr/sampling_rounds"] == 1
    assert 0 <= row["snr/trained_groups"] < 4
    assert row["snr/prompts_used"] == 8


@pytest.mark.parametrize("varied", [{5}, {1, 2, 6}])
def test_what_is_kept_is_a_share_of_all_that_a_step_sampled(varied, policy_path, make_args):
    """As TRL's reward in the same row is, and not of its first prompts alone."""
    args = make_args(
        per_device_train_batch_size=16, snr_dynamic_sampling_rounds=3, max_steps=2, snr_strategy="nonzero"
    )
    rows = rows_of(train(policy_path, args, replay_with(policy_path, varied)))
    assert any(row["snr/sampling_rounds"] for row in rows)
    for row in rows:
        assert row["snr/kept_fraction"] == pytest.approx(row["snr/kept_groups"] / row["snr/prompts_used"])
        assert row["snr/zero_variance_fraction"] == pytest.approx(1 - row["snr/kept_fraction"])
        assert row["snr/zero_variance_fraction"] == pytest.approx(row["frac_reward_zero_std"], abs=0.2)


def test_a_full_batch_needs_no_round_and_trains_as_without(policy_path, make_args):
    replay = replay_with(policy_path, set(range(8)))
    states = []
    for rounds in (0, 5):
        args = make_args(
            per_device_train_batch_size=16, snr_dynamic_sampling_rounds=rounds, max_steps=3, snr_strategy="nonzero"
        )
        trainer = train(policy_path, args, replay)
        states.append(parameters_of(trainer))
    assert [row["snr/sampling_rounds"] for row in rows_of(trainer)] == [0, 0, 0]
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-4, atol=1e-5)


def surplus_run(policy_path, make_args, **overrides):
    """Few groups at first, so that a round overshoots: more are kept than there is room for."""
    settings = {
        "per_device_train_batch_size": 16,
        "snr_dynamic_sampling_rounds": 20,
        "max_steps": 6,
        "snr_strategy": "nonzero",
    }
    return make_args(**{**settings, **overrides}), replay_with(policy_path, {0, 3, 5})


def test_surplus_groups_wait_for_the_next_step(policy_path, make_args):
    args, replay = surplus_run(policy_path, make_args)
    rows = rows_of(train(policy_path, args, replay))
    waiting = [row["snr/waiting_groups"] for row in rows]
    assert any(waiting)
    assert [row["snr/carried_groups"] for row in rows] == [0, *waiting[:-1]]
    assert not any(row["snr/stale_groups"] for row in rows)


def test_groups_that_would_be_two_updates_old_are_left_behind(policy_path, make_args):
    args, replay = surplus_run(policy_path, make_args, num_iterations=2, max_steps=12)
    rows = rows_of(train(policy_path, args, replay))
    assert any(row["snr/stale_groups"] for row in rows)
    assert not any(row["snr/waiting_groups"] or row["snr/carried_groups"] for row in rows)


def test_callbacks_see_the_first_prompts_of_a_step_and_no_further_round(policy_path, make_args):
    args, replay = surplus_run(policy_path, make_args, max_steps=3)
    trainer = SNRFilteredGRPOTrainer(
        policy_path, Replay.reward, args, Dataset.from_dict({"prompt": WORDS}), rollout_func=replay.rollout
    )
    seen = []
    listen(trainer, on_rollout=lambda rollout: seen.append(rollout.rewards.shape))
    trainer.train()
    assert any(row["snr/sampling_rounds"] for row in rows_of(trainer))
    assert seen == [(4, GROUP_SIZE)] * 3


def test_each_round_asks_for_whole_groups_of_prompts_from_the_dataset(policy_path, make_args):
    args, replay = surplus_run(policy_path, make_args, max_steps=2)
    trainer = SNRFilteredGRPOTrainer(
        policy_path, Replay.reward, args, Dataset.from_dict({"prompt": WORDS}), rollout_func=replay.rollout
    )
    seen = Seen(trainer)
    trainer.train()
    assert len(seen.asked) > 2
    for asked in seen.asked:
        groups = [asked[i : i + GROUP_SIZE] for i in range(0, len(asked), GROUP_SIZE)]
        assert all(len(set(group)) == 1 and group[0] in WORDS for group in groups)


def test_a_round_is_as_large_as_the_kept_fraction_makes_it():
    sizes = {"most": 16, "unit": 4, "processes": 1}
    assert round_size(missing=4, kept=8, sampled=16, **sizes) == 8
    assert round_size(missing=8, kept=1, sampled=16, **sizes) == 16
    assert round_size(missing=8, kept=0, sampled=16, **sizes) == 16
    assert round_size(missing=1, kept=16, sampled=16, most=16, unit=4, processes=3) == 3


def test_datasets_without_rows_are_refused(policy_path, make_args):
    dataset = IterableDataset.from_generator(lambda: ({"prompt": prompt} for prompt in WORDS))
    with pytest.raises(ValueError, match="snr_dynamic_sampling_rounds=2 draws prompts by their row"):
        SNRFilteredGRPOTrainer(
            policy_path,
            lambda completions, **_: [0.0] * len(completions),
            make_args(snr_dynamic_sampling_rounds=2),
            dataset,
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"snr_dynamic_sampling_rounds": -1}, "snr_dynamic_sampling_rounds=-1 is out of range"),
        ({"snr_dynamic_sampling_rounds": 1, "scale_rewards": "batch"}, "scale_rewards='batch'"),
        (
            {"snr_dynamic_sampling_rounds": 1, "multi_objective_aggregation": "normalize_then_sum"},
            "normalize_then_sum",
        ),
    ],
)
def test_a_bad_setting_is_named(make_args, settings, message):
    with pytest.raises(ValueError, match=message):
        make_args(**settings)
