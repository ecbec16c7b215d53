"""Options of the filter that leave one another without effect are refused, by name."""

import pytest
from algorithms import GRPO, PPO, RLOO

# One that anybody can import.
SELECTOR = {"snr_selector": "ragen2_trl.filtering:zero_variance"}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({**SELECTOR, "snr_strategy": "top_k"}, ["snr_strategy='top_k'", "snr_selector=", "'top_p'"]),
        ({**SELECTOR, "snr_value": 0.5}, ["snr_value=0.5", "snr_selector=", "0.9"]),
        ({**SELECTOR, "snr_score": "length"}, ["snr_score='length'", "snr_selector=", "'reward_variance'"]),
        (
            {"snr_score": "length", "mask_truncated_completions": True},
            ["snr_score='length'", "mask_truncated_completions=True", "reward_variance"],
        ),
        ({"snr_score": "reward_sum"}, ["snr_strategy='top_p'", "snr_score='reward_sum'", "top_k"]),
        (
            {"snr_score": "reward_mean", "snr_strategy": "min_p", "snr_value": 0.1},
            ["snr_strategy='min_p'", "snr_score='reward_mean'", "top_k"],
        ),
        *[
            ({"snr_strategy": strategy, name: value}, [f"{name}={value!r}", f"snr_strategy={strategy!r}", allowed])
            for strategy in ("all", "nonzero")
            for name, value, allowed in (("snr_value", 0.5, "0.9"), ("snr_score", "length", "reward_variance"))
        ],
        ({"snr_strategy": "all", "snr_score_reward": "success"}, ["snr_score_reward='success'", "'all'"]),
        ({"snr_strategy": "all", "snr_dynamic_sampling_rounds": 1}, ["snr_dynamic_sampling_rounds=1", "'all'"]),
        ({"snr_strategy": "all", "snr_pilot_generations": 2}, ["snr_pilot_generations=2", "'all'"]),
    ],
)
def test_settings_that_leave_one_another_without_effect_are_refused_by_name(settings, parts, tmp_path):
    for algorithm in (GRPO, RLOO, PPO):
        with pytest.raises(ValueError) as refused:
            algorithm.args(tmp_path, **settings)
        assert all(part in str(refused.value) for part in parts)


def test_what_ppo_would_not_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^turn_gamma=0.9 .* gae='token', which knows no turns"):
        PPO.args(tmp_path, turn_gamma=0.9)
