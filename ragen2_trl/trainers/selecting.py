"""From the rewards of a generation batch to the groups that are trained on."""

from dataclasses import dataclass

import torch
from torch import Tensor
from trl.trainer.utils import nanstd

from ragen2_trl.filtering import group_score, select_groups, selection_metrics, zero_variance
from ragen2_trl.trainers.config import SNRFilterConfig


@dataclass(frozen=True)
class Selection:
    """Which groups of a generation batch are kept, over all processes.

    Args:
        rewards: (N, G) weighted reward sums as sampled, NaN where there is no finite one.
        scores: (N,) what groups were ranked by.
        kept: (N,) bool.
    """

    rewards: Tensor
    scores: Tensor
    kept: Tensor

    @property
    def keeps_all(self) -> bool:
        return bool(self.kept.all())

    @property
    def kept_rows(self) -> Tensor:
        """(B,) bool on the device of the rewards."""
        return self.kept.repeat_interleave(self.rewards.size(1)).to(self.rewards.device)

    @property
    def scorable_rows(self) -> Tensor:
        """(B,) bool: rows with a reward."""
        return ~self.rewards.isnan().flatten()


class Selector:
    """Selects groups by the settings of a run, and remembers the lowest and highest reward it has seen.

    Args:
        args: The settings.
        known_range: Reward sums of a failure and of a solved task, where they are known.
    """

    def __init__(self, args: SNRFilterConfig, known_range: tuple[float, float] | None = None):
        self.args = args
        self.known_range = known_range
        self.reward_range: tuple[float, float] | None = None

    def select(self, rewards: Tensor, scores: Tensor) -> Selection:
        """The groups that `snr_strategy` keeps.

        Args:
            rewards: (N, G) raw weighted reward sums, NaN where there is no finite one.
            scores: (N,) from `group_score`.
        """
        signal = ~zero_variance(rewards).cpu()
        if self.args.snr_mode == "soft":
            kept = signal.any().expand(len(signal))  # every group, unless none can teach anything
        else:
            kept = select_groups(
                scores,
                self.args.snr_strategy,
                self.args.snr_value,
                include_zero=self.args.snr_include_zero,
                selection_eps=self.args.snr_selection_eps,
                keep=self.args.snr_keep,
                is_zero=~signal,
            )
        valid = rewards[~rewards.isnan()]
        if valid.numel():
            low, high = self.reward_range or (torch.inf, -torch.inf)
            self.reward_range = (min(low, valid.min().item()), max(high, valid.max().item()))
        return Selection(rewards, scores.cpu(), kept)

    def metrics(self, selection: Selection) -> dict[str, float]:
        best_and_worst = self.known_range or self.reward_range
        return selection_metrics(selection.rewards, selection.scores, selection.kept, best_and_worst)

    def row_weights(self, selection: Selection) -> Tensor | None:
        """(B,) what `snr_mode="soft"` or `snr_loss_scaling` multiply advantages by; `None` for nothing."""
        if self.args.snr_mode == "soft":
            std = group_score(selection.rewards, "reward_std")
            return (std / std.max().clamp(min=1e-6)).repeat_interleave(selection.rewards.size(1))
        exponent = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self.args.snr_loss_scaling]
        if exponent == 0.0 or selection.keeps_all or not selection.kept.any():
            return None
        return torch.full((selection.rewards.numel(),), float(selection.kept.double().mean()) ** exponent)


def renormalised(advantages: Tensor, scorable: Tensor, kept: Tensor) -> Tensor:
    """Advantages that TRL normalised over the whole batch, normalised over the kept rows instead.

    TRL has computed a = (A - mean(A)) / (std(A) + 1e-4) over the scorable rows of the batch. Over the kept ones,
    (A - mean) / (std + 1e-4) follows from a alone, since 1e-4 / (std(A) + 1e-4) = 1 - std(a).

    Args:
        advantages: (B,) a.
        scorable: (B,) bool, rows that TRL's mean and deviation went over.
        kept: (B,) bool.

    Returns:
        (B,), 0 for rows that are dropped or not scorable.
    """
    of_kept = kept & scorable
    over_all, over_kept = (advantages.where(rows, torch.nan) for rows in (scorable, of_kept))
    normalised = (advantages - over_kept.nanmean()) / (nanstd(over_kept) + 1 - nanstd(over_all))
    return normalised.where(of_kept, 0.0)


def std_ratio(selection: Selection) -> Tensor:
    """What turns advantages over the whole batch's reward deviation into those over the kept rows': a scalar."""
    rewards = selection.rewards.flatten()
    of_kept = rewards.where(selection.kept_rows, torch.nan)
    ratio: Tensor = (nanstd(rewards) + 1e-4) / (nanstd(of_kept) + 1e-4)
    return ratio
