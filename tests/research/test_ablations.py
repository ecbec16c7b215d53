"""The selectors of the ablations as functions of rewards: against naive rankings, and draws that leave no trace."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen2_trl.filtering import zero_variance
from ragen2_trl.trainers.selection import Groups, ScoreSelector
from research import ablations
from research.ablations import (
    QUARTERS,
    as_many_at_random,
    best_and_worst,
    draw_as_many,
    largest_half,
    select_by_softmax,
    select_completions,
    select_count,
    select_quarter,
    smallest_half,
    top_count,
    top_p_softmax,
)

rewards_of_groups = st.integers(2, 6).flatmap(
    lambda g: st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 10.4]), min_size=g, max_size=g), min_size=1)
)
# By variance: 0 and 4, 1 and 5, the two others without any.
REWARDS = torch.tensor(
    [[1.0, 0.0], [0.5, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.5, 0.0], [1.0, 1.0], [1.0, 1.0]]
)


def groups_of(rewards, seed=0):
    def refuse():
        raise AssertionError("a forward pass for what needs none")

    generator = torch.Generator().manual_seed(seed)
    return Groups(rewards, rewards.unsqueeze(2), torch.ones(rewards.shape), generator, (0.0, 1.0), refuse)


def indices(mask):
    return mask.nonzero().squeeze(1).tolist()


@given(st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0]), min_size=1, max_size=14))
def test_quarters_are_those_of_a_naive_ranking(scores):
    ranking = sorted(range(len(scores)), key=lambda group: -scores[group])  # stable: of equal scores the earlier one
    start = 0
    for quarter in QUARTERS:
        size = len(scores) // 4 + (quarter <= len(scores) % 4)
        assert indices(select_quarter(torch.tensor(scores), quarter)) == sorted(ranking[start : start + size])
        start += size
    assert start == len(scores)


def test_the_selectors_of_quarters_keep_those_with_variance():
    names = ("first_quarter", "second_quarter", "third_quarter", "fourth_quarter")
    kept = [indices(getattr(ablations, name)(groups_of(REWARDS))) for name in names]
    assert kept == [[0, 4], [1, 5], [], []]
    with_one = REWARDS.index_copy(0, torch.tensor([7]), torch.tensor([[0.1, 0.0]]))  # the third has 7 and 2
    assert indices(ablations.third_quarter(groups_of(with_one))) == [2, 7]


@given(rewards_of_groups, st.sampled_from([0.01, 0.25, 0.5, 0.75, 1.0]))
def test_kept_completions_are_the_ends_of_a_naive_ranking(rewards, fraction):
    kept = select_completions(torch.tensor(rewards), fraction).tolist()
    for group, of_group in zip(rewards, kept, strict=True):
        number = min(len(group), max(2, math.floor(fraction * len(group))))
        ranking = sorted(range(len(group)), key=lambda member: -group[member])
        ends = set(ranking[: math.ceil(number / 2)]) | set(ranking[len(ranking) - number // 2 :])
        assert {member for member, is_kept in enumerate(of_group) if is_kept} == ends
        assert len(ends) == number


def test_a_completion_without_a_reward_is_in_the_middle():
    rewards = torch.tensor([[math.nan, 1.0, math.inf, 0.0], [math.nan] * 4])
    assert select_completions(rewards).tolist() == [[False, True, False, True], [True, False, False, True]]
    assert select_completions(rewards, 1.0).all()


def test_the_best_and_worst_are_of_all_groups_or_of_those_with_variance():
    rewards = torch.tensor([[0.2, 1.0, 0.0, 0.7], [1.0, 1.0, 1.0, 1.0]])
    assert best_and_worst(groups_of(rewards)).sum(dim=1).tolist() == [2, 2]
    assert best_and_worst(groups_of(rewards), include_zero=False).sum(dim=1).tolist() == [2, 0]


def test_a_random_control_has_the_size_of_the_selection_and_forgets_the_rest():
    kept = torch.tensor([True, True, False, False, False, False])
    state = torch.get_rng_state()
    draws = [draw_as_many(kept, torch.Generator().manual_seed(seed)) for seed in range(400)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(draw.sum() == 2 for draw in draws)
    often = torch.stack(draws).double().mean(dim=0)
    assert ((often - 1 / 3).abs() < 0.1).all()  # four standard errors
    assert draw_as_many(kept.view(2, 3), torch.Generator().manual_seed(0)).shape == (2, 3)


def test_the_random_control_draws_as_many_as_the_filter_keeps_by_the_generator_alone():
    draws = [as_many_at_random(groups_of(REWARDS, seed)) for seed in (1, 1, 2, 3)]
    assert {int(draw.sum()) for draw in draws} == {int(ScoreSelector()(groups_of(REWARDS)).sum())} == {3}
    assert torch.equal(draws[0], draws[1])
    assert any(draw[[2, 3, 6, 7]].any() for draw in draws)
    assert as_many_at_random(groups_of(REWARDS), best_and_worst).shape == REWARDS.shape


def test_the_halves_have_the_most_and_the_least_variance():
    assert indices(largest_half(groups_of(REWARDS))) == [0, 1, 4, 5]
    assert indices(smallest_half(groups_of(REWARDS))) == [2, 3, 6, 7]


def test_half_of_the_groups_is_kept_also_where_fewer_have_variance():
    rewards = REWARDS[[0, 2, 3, 6]]
    assert indices(largest_half(groups_of(rewards))) == [0, 1]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=14), st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_softmax_keeps_the_shortest_prefix_that_holds_the_probability(scores, value):
    kept = select_by_softmax(torch.tensor(scores), value)
    shares = torch.tensor(scores).double().softmax(dim=0)
    assert kept.any() and shares[kept].sum() >= value - 1e-6
    assert (shares[kept].sum() - shares[kept].min() < value + 1e-6) or value == 1.0
    assert shares[kept].min() >= (shares[~kept].max() if (~kept).any() else 0.0)


@given(rewards_of_groups, st.integers(1, 4))
def test_the_selectors_of_the_filter_s_past_keep_groups_with_variance_alone(rewards, count):
    rewards = torch.tensor(rewards)
    flat = zero_variance(rewards)
    softmax, counted = top_p_softmax(groups_of(rewards)), top_count(groups_of(rewards), count)
    assert not (flat & (softmax | counted)).any()
    assert softmax.any() == (~flat).any() and counted.sum() == min(count, (~flat).sum())


def test_of_equal_scores_the_earlier_group_is_counted_first():
    assert indices(select_count(torch.tensor([0.2, 0.3, 0.3, 0.3]), 2)) == [1, 2]
    assert indices(select_by_softmax(torch.tensor([0.2, 0.3, 0.3, 0.3]), 0.5)) == [1, 2]


@pytest.mark.parametrize(
    ("select", "name", "allowed", "values"),
    [
        (select_count, "count", "a whole number >= 1", (0, 0.5, -1)),
        (select_by_softmax, "value", "0 < value <= 1", (0.0, 1.1)),
        (select_quarter, "quarter", "1, 2, 3, 4", (0, 5, -1)),
        (select_completions, "fraction", "0 < value <= 1", (0.0, 1.1, -0.5)),
    ],
)
def test_what_is_out_of_range_is_refused(select, name, allowed, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{name}={value} is out of range; allowed: {allowed}"):
            select(torch.ones(8, 4) if select is select_completions else torch.ones(8), value)
