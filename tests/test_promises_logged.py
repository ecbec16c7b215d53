"""Promise 6: nothing hides."""

import logging

import pytest
import torch
from algorithms import GRPO, RLOO, for_each, replay_of, slow
from conftest import PROMPTS, log_rows
from replay import REWARDS

METRICS = {
    "generation",
    "kept_groups",
    "kept_fraction",
    "kept_tokens_fraction",
    "score_mean",
    "score_max",
    "reward_std_spread",
    "reward_variance_spread",
    "zero_variance_fraction",
    "dropped_all_best",
    "dropped_all_worst",
    "dropped_all_same",
    "in_group_max",
    "in_group_mean",
    "empty_steps",
    "update_compute_fraction",
}


@pytest.mark.parametrize("steps_per_generation", [slow(2), 4])
@for_each
def test_nothing_hides(algorithm, steps_per_generation, policy_path, tmp_path):
    """In steps that reuse completions of an earlier generation, too."""
    layout = {"gradient_accumulation_steps": 2, "steps_per_generation": steps_per_generation, "max_steps": 4}
    trainer = algorithm.make(policy_path, algorithm.args(tmp_path, **layout), replay_of(policy_path))
    trainer.train()
    assert len(log_rows(trainer)) == 4
    for row in log_rows(trainer):
        assert {key for key in row if key.startswith("snr/")} == {f"snr/{name}" for name in METRICS}


@for_each
def test_a_further_run_may_begin_with_what_an_earlier_one_sampled(algorithm, policy_path, tmp_path):
    """As in a notebook, whose cell runs again after it ended amid a generation of which nothing was dropped."""
    layout = {"gradient_accumulation_steps": 1, "steps_per_generation": 4, "max_steps": 3}
    args = algorithm.args(tmp_path, snr_strategy="all", **layout)
    trainer = algorithm.make(policy_path, args, replay_of(policy_path))
    trainer.train()
    trainer.train()
    assert trainer.state.global_step == 3
    assert [row["snr/empty_steps"] for row in log_rows(trainer)] == [0.0] * len(log_rows(trainer))


@for_each
def test_metrics_describe_the_selection(algorithm, policy_path, tmp_path):
    args = algorithm.args(tmp_path, per_device_train_batch_size=32, max_steps=1)
    replay = replay_of(policy_path)
    trainer = algorithm.make(policy_path, args, replay)
    trainer.train()
    row = log_rows(trainer)[0]
    scores = torch.tensor([torch.tensor(rewards, dtype=torch.float64).var().item() for rewards in REWARDS.values()])
    scores[4] = 0.0  # float noise
    lengths = torch.tensor([sum(map(len, replay.completions[prompt])) for prompt in REWARDS])
    assert row["snr/kept_groups"] == 4
    assert row["snr/kept_fraction"] == 0.5
    assert row["snr/kept_tokens_fraction"] == pytest.approx((lengths[[0, 2, 5, 6]].sum() / lengths.sum()).item())
    assert row["snr/score_mean"] == pytest.approx(scores.mean().item(), abs=1e-6)
    assert row["snr/score_max"] == pytest.approx(scores.max().item(), abs=1e-6)
    for name, values in (("variance", scores), ("std", scores.sqrt())):  # of Table 8, the second
        assert row[f"snr/reward_{name}_spread"] == pytest.approx((values.std() / values.mean()).item(), abs=1e-5)
    rewards = torch.tensor(list(REWARDS.values()))
    assert row["snr/in_group_max"] == pytest.approx(rewards.amax(dim=1).mean().item())
    assert row["snr/in_group_mean"] == pytest.approx(rewards.mean().item())
    assert row["snr/zero_variance_fraction"] == 3 / 8
    assert row["snr/dropped_all_best"] == 1 / 8
    assert row["snr/dropped_all_worst"] == 1 / 8
    assert row["snr/dropped_all_same"] == 1 / 8  # 0.3 for all
    # RLOO's KL penalty takes old and reference log-probs of every row.
    assert 0 < row["snr/update_compute_fraction"] < (0.8 if algorithm is RLOO else 0.6)
    assert row["snr/empty_steps"] == 0


@pytest.mark.parametrize("algorithm", [GRPO, RLOO], ids=["grpo", "rloo"])
def test_dead_groups_are_counted_where_trls_own_number_rounds(algorithm, policy_path, tmp_path):
    """0.7 for all has a deviation of 6e-8 in float32."""
    told = {}
    for plain in (True, False):
        args = algorithm.args(tmp_path, plain, num_generations=8, max_steps=1)
        trainer = algorithm.make(policy_path, args, lambda completions, **_: [0.7] * len(completions), PROMPTS)
        trainer.train()
        (told[plain],) = log_rows(trainer)
    assert told[True]["frac_reward_zero_std"] == told[False]["frac_reward_zero_std"] == 0
    assert told[False]["snr/zero_variance_fraction"] == 1


@pytest.mark.parametrize(
    ("settings", "warnings"),
    [
        ({}, 1),
        ({"snr_strategy": "nonzero"}, 1),  # drops what has no signal
        ({"snr_strategy": "all"}, 0),
    ],
)
@for_each
def test_a_change_of_scale_is_said_once_before_the_first_step(
    algorithm, settings, warnings, policy_path, tmp_path, caplog
):
    trainer = algorithm.make(policy_path, algorithm.args(tmp_path, max_steps=1, **settings), replay_of(policy_path))
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            trainer.train()
        said = [record.message for record in caplog.records if "grad_norm" in record.message]
        assert len(said) == warnings
        assert all(part in message for message in said for part in ("loss and grad_norm", "docs/filter.md"))


def test_a_selector_of_ones_own_may_drop_too(policy_path, tmp_path, caplog):
    args = GRPO.args(tmp_path, max_steps=1)
    replay = replay_of(policy_path)
    trainer = GRPO.make(policy_path, args, replay, selector=lambda groups: torch.ones(len(groups.rewards)).bool())
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert sum("loss and grad_norm" in record.message for record in caplog.records) == 1
