"""Options of the filter that leave one another without effect are refused, by name."""

import pytest
from algorithms import GRPO, PPO, RLOO

TRAJECTORY = {"snr_level": "trajectory"}
VALUE = {"snr_loss_scaling": "whole_loss_by_value"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"snr_quartile": 5}, "snr_quartile=5 is not supported; allowed values: 1, 2, 3, 4, None"),
        ({"snr_level": "token"}, "snr_level='token' is not supported; allowed values: group, trajectory"),
        ({"snr_trajectory_fraction": 0.0}, "snr_trajectory_fraction=0.0 is out of range; allowed: 0 < value <= 1"),
        ({"snr_quartile": 1, "snr_strategy": "top_k"}, "snr_strategy='top_k' does not go with snr_quartile=1"),
        ({"snr_quartile": 1, "snr_value": 0.5}, "snr_value=0.5 does not go with snr_quartile=1"),
        ({"snr_quartile": 1, "snr_keep": "smallest"}, "snr_keep='smallest' does not go with snr_quartile=1"),
        ({"snr_quartile": 1, "snr_mode": "soft"}, "snr_mode='soft' does not go with snr_quartile=1"),
        (
            {"snr_quartile": 1, "snr_dynamic_sampling_rounds": 2},
            "snr_dynamic_sampling_rounds=2 does not go with snr_quartile=1",
        ),
        ({"snr_quartile": 1, **TRAJECTORY}, "snr_level='trajectory' does not go with snr_quartile=1"),
        ({"snr_quartile": 1, "snr_window": None}, "snr_window=None ranks the 2 groups of a generation by themselves"),
        ({**TRAJECTORY, "snr_strategy": "min_p"}, "snr_strategy='min_p' does not go with snr_level='trajectory'"),
        ({**TRAJECTORY, "snr_value": 0.5}, "snr_value=0.5 does not go with snr_level='trajectory'"),
        ({**TRAJECTORY, "snr_score": "length"}, "snr_score='length' does not go with snr_level='trajectory'"),
        ({**TRAJECTORY, "snr_keep": "smallest"}, "snr_keep='smallest' does not go with snr_level='trajectory'"),
        ({**TRAJECTORY, "snr_mode": "soft"}, "snr_mode='soft' does not go with snr_level='trajectory'"),
        (
            {**TRAJECTORY, "snr_dynamic_sampling_rounds": 1},
            "snr_dynamic_sampling_rounds=1 does not go with snr_level='trajectory'",
        ),
        ({"snr_keep": "random", "snr_mode": "soft"}, "snr_mode='soft' does not go with snr_keep='random'"),
        (
            {"snr_keep": "random", "snr_dynamic_sampling_rounds": 1},
            "snr_dynamic_sampling_rounds=1 does not go with snr_keep='random'",
        ),
        ({**VALUE, "snr_strategy": "min_p"}, "snr_strategy='min_p' does not go with snr_loss_scaling='whole_loss"),
        ({**VALUE, "snr_strategy": "none"}, "snr_strategy='none' does not go with snr_loss_scaling='whole_loss"),
        ({**VALUE, "snr_quartile": 1}, "snr_quartile=1 does not go with snr_loss_scaling='whole_loss"),
        ({**VALUE, **TRAJECTORY}, "snr_level='trajectory' does not go with snr_loss_scaling='whole_loss"),
        (
            {"snr_mode": "soft", "snr_value": 0.5},
            "snr_value=0.5 does not go with snr_mode='soft', which selects nothing",
        ),
        ({"snr_mode": "soft", "snr_keep": "smallest"}, "snr_keep='smallest' does not go with snr_mode='soft'"),
        (
            {"snr_score": "length", "mask_truncated_completions": True},
            "snr_score='length' does not go with mask_truncated_completions=True",
        ),
        ({"snr_mode": "soft", "snr_score": "entropy"}, "snr_score='entropy' does not go with snr_mode='soft'"),
        ({"snr_mode": "soft", "snr_include_zero": True}, "snr_include_zero=True does not go with snr_mode='soft'"),
        ({"snr_mode": "soft", "snr_loss_scaling": "sqrt"}, "snr_loss_scaling='sqrt' does not go with snr_mode='soft'"),
        ({"snr_trajectory_fraction": 0.25}, "snr_trajectory_fraction=0.25 does not go with snr_level='group'"),
        ({"snr_score": "reward_sum"}, "snr_strategy='top_p' does not go with snr_score='reward_sum', which has no"),
        ({"snr_score": "reward_mean", "snr_strategy": "min_p"}, "snr_strategy='min_p' does not go with snr_score"),
        (
            {"snr_zero_task_advantage": True, "beta": 0.0},
            "snr_zero_task_advantage=True leaves the KL penalty and the entropy bonus alone, and there is neither",
        ),
        ({**VALUE, "snr_mode": "soft"}, "snr_mode='soft' does not go with snr_loss_scaling='whole_loss"),
    ],
)
def test_settings_that_leave_one_another_without_effect_are_refused_by_name(settings, message, tmp_path):
    for algorithm in (GRPO, RLOO, PPO):
        with pytest.raises(ValueError) as refused:
            algorithm.args(tmp_path, **settings)
        assert str(refused.value).startswith(message)


def test_what_ppo_would_not_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^turn_gamma=0.9 does not go with gae='token', which knows no turns"):
        PPO.args(tmp_path, turn_gamma=0.9)


def test_a_penalty_in_the_reward_is_refused_where_advantages_are_to_be_zero(tmp_path):
    with pytest.raises(ValueError, match=r"^kl_in='reward' makes the KL penalty a part of the advantages"):
        PPO.args(tmp_path, snr_zero_task_advantage=True, kl_in="reward", beta=0.1)
    with pytest.raises(ValueError, match=r"^normalize_advantages=True would scale the KL penalty to one size"):
        RLOO.args(tmp_path, snr_zero_task_advantage=True, normalize_advantages=True, beta=0.1)
