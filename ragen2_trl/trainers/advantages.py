"""Advantages that TRL makes over a whole batch, recomputed as if the batch held only the kept groups."""

import torch
from torch import Tensor
from trl.trainer.utils import nanstd

from ragen2_trl.trainers.selection import Selection


def renormalised(advantages: Tensor, scorable: Tensor, selection: Selection) -> Tensor:
    """Advantages that TRL normalised over the whole batch, normalised over the kept groups instead.

    TRL has computed a = (A - mean(A)) / (std(A) + 1e-4) over the scorable rows of the batch. Over the kept ones,
    (A - mean) / (std + 1e-4) follows from a alone, since 1e-4 / (std(A) + 1e-4) = 1 - std(a). Groups count whole here,
    also where only some of their completions are trained on.

    Args:
        advantages: (B,) a.
        scorable: (B,) bool, rows in TRL's mean and deviation.
        selection: the kept groups.

    Returns:
        (B,), 0 for rows that are dropped or not scorable.
    """
    of_kept = selection.rows_of_groups & scorable
    over_all, over_kept = advantages.where(scorable, torch.nan), advantages.where(of_kept, torch.nan)
    normalised = (advantages - over_kept.nanmean()) / (nanstd(over_kept) + 1 - nanstd(over_all))
    return torch.where(of_kept, normalised, torch.zeros_like(advantages))


def std_ratio(selection: Selection) -> Tensor:
    """The factor from advantages over the whole batch's reward deviation to the deviation of kept groups; a scalar."""
    rewards = selection.rewards.flatten()
    over_kept = rewards.where(selection.rows_of_groups, torch.nan)
    ratio: Tensor = (nanstd(rewards) + 1e-4) / (nanstd(over_kept) + 1e-4)
    return ratio
