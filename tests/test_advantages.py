"""Token rewards, advantages and losses of PPO against plain loops over rows and tokens in Python floats."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen2_trl.trainers.ppo.advantages import (
    clipped_value_loss,
    explained_variance,
    gae,
    masked_moments,
    token_rewards,
    whiten,
)

numbers = st.floats(-4, 4, width=32)


def assert_same(actual, expected):
    expected = torch.tensor(expected, dtype=torch.float64) if isinstance(expected, list) else expected.double()
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)


NAN = float("nan")
factors = st.sampled_from([1.0, 0.95, 0.5, 0.0])


@st.composite
def mask_rows(draw, max_turns=4):
    """Ones for own tokens: turns of one to four tokens, gaps of one to three, padded to the longest or cut short."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row = [0] * draw(st.integers(0, 1))
        for number in range(draw(st.integers(0, max_turns))):
            row += [0] * draw(st.integers(1, 3)) * (number > 0) + [1] * draw(st.integers(1, 4))
        rows.append(row)
    longest = max(1, *map(len, rows))
    width = draw(st.sampled_from([longest, longest + 2, max(1, longest - 2)]))
    return [(row + [0] * width)[:width] for row in rows]


def draw_like(draw, mask):
    return [[draw(numbers) for _ in row] for row in mask]


@st.composite
def steps(draw, max_turns=4):
    """Rewards, values and mask. What is outside the mask is NaN: nobody may look there."""
    mask = draw(mask_rows(max_turns))
    rewards, values = draw_like(draw, mask), draw_like(draw, mask)
    return nan_outside(rewards, mask), nan_outside(values, mask), torch.tensor(mask)


def nan_outside(numbers, mask):
    return torch.tensor(numbers).masked_fill(torch.tensor(mask) == 0, NAN)


def own_tokens(mask_row):
    return [t for t, own in enumerate(mask_row) if own]


def turns_of(mask_row):
    """Own tokens by turn."""
    turns = []
    for t in own_tokens(mask_row):
        if t > 0 and mask_row[t - 1]:
            turns[-1].append(t)
        else:
            turns.append([t])
    return turns


def discounted_sums(terms, factor):
    """terms[n] + factor terms[n + 1] + factor^2 terms[n + 2] + ... for every n, each sum on its own."""
    return [sum(factor ** (j - n) * terms[j] for j in range(n, len(terms))) for n in range(len(terms))]


def gae_by_loops(rewards, values, mask, gamma, lam):
    advantages = [[0.0] * len(row) for row in mask.tolist()]
    for i, row in enumerate(mask.tolist()):
        own = own_tokens(row)
        r, v = [rewards[i, t].item() for t in own], [values[i, t].item() for t in own]
        deltas = [reward + gamma * after - value for reward, value, after in zip(r, v, [*v[1:], 0.0], strict=False)]
        for t, advantage in zip(own, discounted_sums(deltas, gamma * lam), strict=True):
            advantages[i][t] = advantage
    return advantages


def returns_by_loops(advantages, values, mask):
    own = mask.tolist()
    return [
        [advantages[i][t] + values[i, t].item() if own[i][t] else 0.0 for t in range(len(own[i]))]
        for i in range(len(own))
    ]


# Token rewards


@st.composite
def episodes(draw):
    mask = draw(mask_rows())
    returns = draw(st.lists(numbers | st.just(NAN), min_size=len(mask), max_size=len(mask)))
    per_turn = st.lists(numbers, max_size=6)  # more than the four turns of a row, or fewer
    turn_rewards = draw(st.none() | st.lists(st.none() | per_turn, min_size=len(mask), max_size=len(mask)))
    return torch.tensor(returns), torch.tensor(mask), turn_rewards


@given(episodes())
def test_token_rewards_match_a_loop_over_turns(case):
    returns, mask, turn_rewards = case
    expected = [[0.0] * len(row) for row in mask.tolist()]
    for i, row in enumerate(mask.tolist()):
        remainder, turns = returns[i].item(), turns_of(row)
        if math.isnan(remainder) or not turns:
            continue
        for turn, reward in zip(turns, (turn_rewards and turn_rewards[i]) or [], strict=False):
            expected[i][turn[-1]] = reward
            remainder -= reward
        expected[i][turns[-1][-1]] += remainder
    assert_same(token_rewards(returns, mask, turn_rewards), expected)


def test_a_return_that_is_not_finite_gives_no_rewards_whatever_its_turns_earned():
    mask = torch.ones(3, 2)
    rewards = token_rewards(torch.tensor([NAN, float("inf"), 1.0]), mask, [[1.0], [NAN], None])
    assert rewards.tolist() == [[0, 0], [0, 0], [0, 1]]


def test_turn_rewards_that_do_not_fit_are_refused():
    returns, mask = torch.ones(2), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"turn_rewards has 1 rows; allowed: 2"):
        token_rewards(returns, mask, [[1.0]])
    with pytest.raises(ValueError, match=r"turn_rewards\[1\]=\[nan\].*finite"):
        token_rewards(returns, mask, [None, [NAN]])


# Advantages


@given(steps(), factors, factors)
def test_gae_matches_sums_of_discounted_errors(case, gamma, lam):
    rewards, values, mask = case
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    expected = gae_by_loops(rewards, values, mask, gamma, lam)
    assert_same(advantages, expected)
    assert_same(returns, returns_by_loops(expected, values, mask))


def test_advantages_of_no_rows_and_of_no_tokens_are_empty():
    for shape in ((0, 3), (2, 0)):
        empty = torch.zeros(shape)
        assert token_rewards(torch.ones(shape[0]), empty).shape == shape
        assert gae(empty, empty, empty, 1.0, 1.0)[0].shape == shape


def test_advantages_and_returns_carry_no_gradient_and_leave_their_inputs_alone():
    rewards, values = torch.ones(2, 4), torch.full((2, 4), 0.5, requires_grad=True)
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
    before = values.detach().clone()
    outputs = gae(rewards, values, mask, 0.9, 0.9)
    assert not any(output.requires_grad for output in outputs)
    assert rewards.eq(1).all() and values.eq(before).all() and mask.sum() == 5


# Whitening


@given(steps(), steps())
def test_whitening_uses_the_moments_of_all_processes(here, there):
    inside = [[tensor[1][tensor[2].bool()].tolist(), tensor] for tensor in (here, there)]
    everyone = inside[0][0] + inside[1][0]
    moments = masked_moments(here[1], here[2]) + masked_moments(there[1], there[2])
    assert moments.dtype == torch.float64
    mean = statistics.mean(everyone) if everyone else 0.0
    variance = statistics.variance(everyone) if len(everyone) > 1 else 0.0
    for _, (_, values, mask) in inside:
        expected = ((values.double() - mean) / math.sqrt(variance + 1e-8)).masked_fill(mask == 0, 0.0)
        torch.testing.assert_close(whiten(values, mask, moments), expected.float(), rtol=1e-5, atol=1e-4)


def test_whitened_values_have_mean_zero_and_sample_variance_one_far_from_zero():
    values = torch.arange(12.0).reshape(3, 4) / 8 + 10_000  # float32 sums of squares would lose the variance
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]])
    whitened = whiten(values, mask, masked_moments(values, mask))
    inside = whitened[mask.bool()].tolist()
    assert statistics.mean(inside) == pytest.approx(0, abs=1e-6)
    assert statistics.variance(inside) == pytest.approx(1, abs=1e-6)
    assert whitened[mask == 0].eq(0).all()


@pytest.mark.parametrize("mask", [[0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]])
@pytest.mark.parametrize("constant", [0.1, -1000.1])
def test_no_token_one_token_or_no_variance_whiten_to_zero(mask, constant):
    values, mask = torch.full((1, 4), constant), torch.tensor([mask])
    torch.testing.assert_close(
        whiten(values, mask, masked_moments(values, mask)), torch.zeros(1, 4), rtol=0, atol=1e-6
    )


def test_rounding_makes_no_negative_variance():
    values, mask = torch.full((1, 999), 12345.67), torch.ones(1, 999)
    assert whiten(values, mask, masked_moments(values, mask)).abs().max() < 1e-6


def explained(values, returns, mask):
    return explained_variance(masked_moments(returns - values, mask), masked_moments(returns, mask))


def test_explained_variance_is_one_for_perfect_values_zero_for_constant_ones_and_a_ratio_between():
    returns, mask = torch.tensor([[1.0, 2.0, 4.0, 90.0]]), torch.tensor([[1, 1, 1, 0]])
    assert explained(returns - 3, returns, mask) == 1  # a constant bias is no variance
    assert explained(torch.full((1, 4), 2.0), returns, mask) == pytest.approx(0)
    values = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    expected = 1 - statistics.variance([0, -1, 1]) / statistics.variance([1, 2, 4])
    assert explained(values, returns, mask) == pytest.approx(expected)


def test_explained_variance_of_returns_that_do_not_vary_is_not_a_number():
    values, mask = torch.arange(3.0).unsqueeze(0), torch.ones(1, 3)
    for returns in ([0.1, 0.1, 0.1], [0.3, 0.30000004, 0.3]):  # the second differs by float noise only
        assert math.isnan(explained(values, torch.tensor([returns]), mask))


# The value loss of PPO against formulas in Python floats.


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=6), st.none() | st.sampled_from([0.5, 0.0]))
def test_value_loss_is_the_worse_of_both_squared_errors(triples, clip):
    expected = []
    for value, old, target in triples:
        clipped = value if clip is None else min(max(value, old - clip), old + clip)
        expected.append(0.5 * max((value - target) ** 2, (clipped - target) ** 2))
    values, old_values, returns = torch.tensor(triples).t().unsqueeze(1)
    assert_same(clipped_value_loss(values, old_values, returns, clip), [expected])


def test_value_loss_moves_no_value_that_has_already_moved_far_enough():
    values = torch.tensor([[0.1, 1.0, 1.0]], requires_grad=True)
    old_values = torch.zeros(1, 3, requires_grad=True)
    returns = torch.tensor([[2.0, 2.0, 0.0]], requires_grad=True)  # near; too far; too far the wrong way
    clipped_value_loss(values, old_values, returns, 0.5).sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([[0.1 - 2.0, 0.0, 1.0]]))
    assert old_values.grad is None and returns.grad is None
