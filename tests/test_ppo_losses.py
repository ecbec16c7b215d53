"""Value losses and KL penalties of PPO against formulas in Python floats."""

import math

import pytest
import torch
from by_loops import assert_same, numbers
from hypothesis import given
from hypothesis import strategies as st

from ragen2_trl.trainers.ppo.advantages import (
    clipped_value_loss,
    kl_penalty,
)


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


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6))
def test_kl_penalties_match_their_formulas(pairs):
    logps, ref_logps = torch.tensor(pairs).t().unsqueeze(1)
    ratios = [ref - own for own, ref in pairs]
    assert_same(kl_penalty(logps, ref_logps, "k1"), [[-ratio for ratio in ratios]])
    assert_same(kl_penalty(logps, ref_logps, "k2"), [[0.5 * ratio**2 for ratio in ratios]])
    k3 = kl_penalty(logps, ref_logps, "k3")
    assert_same(k3, [[math.exp(ratio) - ratio - 1 for ratio in ratios]])


def test_k1_and_k3_have_the_divergence_as_expectation_and_k2_has_its_gradient():
    logits = torch.tensor([0.3, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.2, 0.1]).log_softmax(dim=0)
    logps = logits.log_softmax(dim=0)
    probabilities = logps.detach().exp()
    divergence = (logps.exp() * (logps - reference)).sum()
    for kind in ("k1", "k3"):
        expectation = (probabilities * kl_penalty(logps, reference, kind)).sum()
        torch.testing.assert_close(expectation.item(), divergence.item(), rtol=1e-6, atol=1e-7)
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    (sampled,) = torch.autograd.grad((probabilities * kl_penalty(logps, reference, "k2")).sum(), logits)
    torch.testing.assert_close(sampled, exact, rtol=1e-5, atol=1e-7)


def test_an_unknown_kl_estimator_is_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match=r"kind='k4' is not supported; allowed values: k1, k2, k3\."):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
