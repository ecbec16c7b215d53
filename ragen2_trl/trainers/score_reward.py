"""The rewards that score groups: the weighted sum of all, those of one function, or a logged column."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from ragen2_trl.rollout_events import Scored


def rewards_to_score(name: str | None, sums: Tensor, names: Sequence[str], scored: Scored, rows: int) -> Tensor:
    """(N, G) the rewards that score groups, NaN where there is no finite one. A call for all processes together.

    Args:
        name: `snr_score_reward`.
        sums: (N, G) weighted reward sums.
        names: of the reward functions, F.
        scored: the call that scored these groups.
        rows: number of completions of this process in that call.

    Raises:
        ValueError: where `name` is neither a reward function nor a column of one number for each completion, logged in
            this very call.
    """
    if name is None:
        return sums
    if name in names[: scored.rewards_per_func.size(1)]:  # a subclass may have merged several functions into one
        values = scored.rewards_per_func[:, names.index(name)]
    else:
        columns = gather_object([_numbers(scored.columns.get(name), rows)])
        if any(column is None for column in columns):
            found = [one for one, column in scored.columns.items() if _numbers(column, rows) is not None]
            raise ValueError(
                f"snr_score_reward={name!r} is neither a reward function nor a column of one number for each "
                "completion that a reward function logs (log_extra) in every call; allowed here: "
                f"{', '.join([*names, *found])}."
            )
        values = torch.tensor([value for column in columns for value in column])
    values = values.to(sums)
    return values.masked_fill(~values.isfinite(), torch.nan).view(sums.shape)


def _numbers(column: Sequence[Any] | None, rows: int) -> list[float] | None:
    """A logged column as floats, NaN for `None`; `None` unless it is one number for each row."""
    if column is None or len(column) != rows:
        return None
    values = [_number(value) for value in column]
    return None if None in values else [value for value in values if value is not None]


def _number(value: Any) -> float | None:
    """A number of Python, NumPy or torch as a float, NaN for `None`; `None` for anything else."""
    if value is None:
        return math.nan
    if isinstance(value, Tensor | np.ndarray):
        return float(value.item()) if value.ndim == 0 or tuple(value.shape) == (1,) else None
    return float(value) if isinstance(value, Real | np.bool_) else None
