"""From the rewards of a generation batch to the groups that are trained on."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import nanstd

from ragen2_trl.filtering import group_score, select_groups, selection_metrics, zero_variance
from ragen2_trl.trainers.config import SNRFilterConfig
from ragen2_trl.trainers.reference import RunningReference

# How scores scale with the unit of the rewards; those that are not of rewards do not.
SCORE_DEGREE = {"reward_variance": 2, "reward_std": 1, "reward_mean": 1, "reward_sum": 1}


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
    """Selects groups by the settings of a run, and remembers the rewards and groups that it has seen.

    Args:
        args: The settings.
        known_range: Reward sums of a failure and of a solved task, where they are known.
    """

    def __init__(self, args: SNRFilterConfig, known_range: tuple[float, float] | None = None):
        self.args = args
        self.known_range = known_range
        self.reward_range: tuple[float, float] | None = None
        window = args.snr_window if args.ranks_in_window else None
        self.reference = None if window is None else RunningReference(window, args.seed)

    def select(self, rewards: Tensor, scores: Tensor) -> Selection:
        """The groups that `snr_strategy` keeps.

        Args:
            rewards: (N, G) raw weighted reward sums, NaN where there is no finite one.
            scores: (N,) from `group_score`.
        """
        signal = ~zero_variance(rewards).cpu()
        valid = rewards[~rewards.isnan()]
        if valid.numel():
            low, high = self.reward_range or (torch.inf, -torch.inf)
            self.reward_range = (min(low, valid.min().item()), max(high, valid.max().item()))
        if self.args.snr_mode == "soft":
            kept = signal.any().expand(len(signal))  # every group, unless none can teach anything
        elif self.reference is not None:
            kept = self.reference.select(scores.cpu(), signal, self._selected)
        else:
            kept = self._selected(scores, signal)
        return Selection(rewards, scores.cpu(), kept)

    def _selected(self, scores: Tensor, signal: Tensor) -> Tensor:
        """(n,) bool for scores and signal of any n groups, as if they were one generation batch."""
        return select_groups(
            scores,
            self.args.snr_strategy,
            self.args.snr_value,
            include_zero=self.args.snr_include_zero,
            selection_eps=self._slack(),
            keep=self.args.snr_keep,
            is_zero=~signal,
            at_least_one=self.args.snr_selection_eps_scale == "reward_range" and bool(signal.any()),
        )

    def _slack(self) -> float:
        """In the unit of the scores. Never more than `snr_selection_eps`, so that no freak reward can blow it up."""
        eps = self.args.snr_selection_eps
        if self.args.snr_selection_eps_scale == "absolute" or self.reward_range is None:
            return eps
        low, high = self.reward_range
        return eps * min(1.0, high - low) ** SCORE_DEGREE.get(self.args.snr_score, 0)

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, the same on every process."""
        return {"reward_range": self.reward_range, "reference": self.reference and self.reference.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.reward_range = state["reward_range"]
        if self.reference is not None and state["reference"] is not None:
            self.reference.load(state["reference"])

    def metrics(self, selection: Selection) -> dict[str, float]:
        """What the latest selection did."""
        best_and_worst = self.known_range or self.reward_range
        told = (selection.rewards, selection.scores, selection.kept, best_and_worst)
        if self.reference is None:
            return selection_metrics(*told)
        ranked = self.reference.scores
        variances = {"reward_variance": ranked, "reward_std": ranked.square()}.get(self.args.snr_score)
        return {**selection_metrics(*told, variances), "window_groups": float(len(ranked))}

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
