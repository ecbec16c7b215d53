"""The value loss of PPO against formulas in Python floats."""

import torch
from by_loops import assert_same, numbers
from hypothesis import given
from hypothesis import strategies as st

from ragen2_trl.trainers.ppo.advantages import (
    clipped_value_loss,
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
