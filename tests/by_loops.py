"""What tests against plain loops in Python floats share."""

import torch
from hypothesis import strategies as st

numbers = st.floats(-4, 4, width=32)


def assert_same(actual, expected):
    expected = torch.tensor(expected, dtype=torch.float64) if isinstance(expected, list) else expected.double()
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)
