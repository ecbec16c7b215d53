"""Promise 2, the advantages: they are those of a batch of the kept groups."""

import pytest
from algorithms import GRPO, STILL, for_each, replay_of, slow
from replay import KEPT, assert_close

from research.ablations import AdvantagesByKeptFraction, AdvantagesBySqrtOfKeptFraction

ONE_STEP = {**STILL, "max_steps": 1, "per_device_train_batch_size": 32}


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale_rewards", ["batch", slow("group"), slow("none")])
def test_advantages_are_normalised_over_the_kept_groups(aggregation, scale_rewards, policy_path, tmp_path):
    settings = {"multi_objective_aggregation": aggregation, "scale_rewards": scale_rewards}
    layout = {**ONE_STEP, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    filtered = GRPO.gradients(policy_path, GRPO.args(tmp_path, **layout, **settings), replay_of(policy_path))
    assert_close(filtered[0], GRPO.plain_gradient(policy_path, KEPT, **settings))


@pytest.mark.parametrize(
    ("mixin", "factor"), [slow(AdvantagesByKeptFraction, 0.5), (AdvantagesBySqrtOfKeptFraction, 0.5**0.5)]
)
@for_each
def test_advantages_may_be_scaled_by_the_kept_fraction(algorithm, mixin, factor, policy_path, tmp_path):
    """As RAGEN's code can, and as a subclass can here."""
    policy_only = {"value_coef": 0.0} if algorithm.name == "ppo" else {}
    args = algorithm.args(tmp_path, **policy_only, **ONE_STEP)
    scaled_class = type(mixin.__name__, (mixin, algorithm.trainer), {})
    (scaled,) = algorithm.gradients(policy_path, args, replay_of(policy_path), trainer_class=scaled_class)
    unscaled = algorithm.plain_gradient(policy_path, KEPT, **policy_only)
    assert_close(scaled, {name: gradient * factor for name, gradient in unscaled.items()})
