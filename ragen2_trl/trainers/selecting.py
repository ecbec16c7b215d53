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
        tasks: (N,) names of the groups' tasks, where the dataset tells them.
        scaled_by_task: whether rewards are scaled by those.
        predicted: (N,) the reward variance that was expected of their prompts, where these were chosen by it.
    """

    rewards: Tensor
    scores: Tensor
    kept: Tensor
    tasks: list[str] | None = None
    scaled_by_task: bool = False
    predicted: list[float] | None = None

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

    @property
    def scaled_together(self) -> list[Tensor]:
        """(B,) bool each: the rows of each task, or all rows."""
        tasks = (self.tasks if self.scaled_by_task else None) or [""] * len(self.kept)
        groups = [torch.tensor([other == task for other in tasks]) for task in dict.fromkeys(tasks)]
        return [own.repeat_interleave(self.rewards.size(1)).to(self.rewards.device) for own in groups]


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
        self.ranges: dict[str, tuple[float, float]] = {}  # of each task, where there are several
        window = args.snr_window if args.ranks_in_window else None
        self.reference = None if window is None else RunningReference(window, args.seed)

    def select(self, rewards: Tensor, scores: Tensor, tasks: list[str] | None = None) -> Selection:
        """The groups that `snr_strategy` keeps.

        Args:
            rewards: (N, G) raw weighted reward sums, NaN where there is no finite one.
            scores: (N,) from `group_score`.
            tasks: (N,) names of the groups' tasks, where the dataset tells them.
        """
        signal = ~zero_variance(rewards).cpu()
        self.reward_range = widened(self.reward_range, rewards)
        for task in dict.fromkeys(tasks or ()):
            own = torch.tensor([other == task for other in tasks or ()], device=rewards.device)
            if (of_task := widened(self.ranges.get(task), rewards[own])) is not None:
                self.ranges[task] = of_task
        if self.args.snr_reward_scaling_by == "task":
            scores = scores.cpu() / self._units(tasks, SCORE_DEGREE.get(self.args.snr_score, 0))
        if self.args.snr_mode == "soft":
            kept = signal.any().expand(len(signal))  # every group, unless none can teach anything
        elif self.reference is not None:
            kept = self.reference.select(scores.cpu(), signal, self._selected)
        else:
            kept = self._selected(scores, signal)
        return Selection(rewards, scores.cpu(), kept, tasks, self.args.snr_reward_scaling_by == "task")

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
        by_task = self.args.snr_reward_scaling_by == "task"  # scores are in units of the range already
        if by_task or self.args.snr_selection_eps_scale == "absolute" or self.reward_range is None:
            return eps
        low, high = self.reward_range
        return eps * min(1.0, high - low) ** SCORE_DEGREE.get(self.args.snr_score, 0)

    def _units(self, tasks: list[str] | None, degree: int) -> Tensor:
        """(N,) ranges of the rewards of the groups' tasks, to the power of a degree; 1 where none has been seen."""
        ranges = [self.ranges.get(task, (0.0, 0.0)) for task in tasks or ()]
        return torch.tensor([(high - low) or 1.0 for low, high in ranges], dtype=torch.float64) ** degree

    def in_units(self, selection: Selection) -> Tensor:
        """(N, G) rewards in the unit that groups of several tasks are ranked in."""
        if not selection.scaled_by_task:
            return selection.rewards
        return selection.rewards.cpu() / self._units(selection.tasks, 1).unsqueeze(1)

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, the same on every process."""
        reference = self.reference and self.reference.state()
        return {"reward_range": self.reward_range, "ranges": self.ranges, "reference": reference}

    def load(self, state: dict[str, Any]) -> None:
        self.reward_range, self.ranges = state["reward_range"], dict(state.get("ranges", {}))
        if self.reference is not None and state["reference"] is not None:
            self.reference.load(state["reference"])

    def metrics(self, selection: Selection) -> dict[str, float]:
        """What the latest selection did; best and worst are those of each group's task."""
        best_and_worst: Any = self.known_range or self.reward_range
        if selection.tasks is not None and self.known_range is None:
            ranges = [self.ranges.get(task, (torch.nan, torch.nan)) for task in selection.tasks]
            best_and_worst = torch.tensor(ranges, dtype=torch.float64).unbind(dim=1)
        told = (selection.rewards, selection.scores, selection.kept, best_and_worst)
        if self.reference is None:
            variances = None
            if selection.scaled_by_task:
                variances = group_score(selection.rewards).cpu() / self._units(selection.tasks, 2)
            return selection_metrics(*told, variances)
        ranked = self.reference.scores
        variances = {"reward_variance": ranked, "reward_std": ranked.square()}.get(self.args.snr_score)
        return {**selection_metrics(*told, variances), "window_groups": float(len(ranked))}

    def row_weights(self, selection: Selection) -> Tensor | None:
        """(B,) what `snr_mode="soft"` or `snr_loss_scaling` multiply advantages by; `None` for nothing."""
        if self.args.snr_mode == "soft":
            std = group_score(selection.rewards, "reward_std").repeat_interleave(selection.rewards.size(1))
            rows = torch.stack(selection.scaled_together).to(std.device)  # (tasks, B)
            largest = torch.where(rows, std, 0.0).amax(dim=1).clamp(min=1e-6)
            return std / (rows.to(std) * largest.unsqueeze(1)).sum(dim=0)
        exponent = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self.args.snr_loss_scaling]
        if exponent == 0.0 or selection.keeps_all or not selection.kept.any():
            return None
        return torch.full((selection.rewards.numel(),), float(selection.kept.double().mean()) ** exponent)


def widened(known: tuple[float, float] | None, rewards: Tensor) -> tuple[float, float] | None:
    """The range of rewards so far, with those that are known; `None` without any."""
    valid = rewards[~rewards.isnan()]
    if not valid.numel():
        return known
    low, high = known or (torch.inf, -torch.inf)
    return min(low, valid.min().item()), max(high, valid.max().item())


def renormalised(advantages: Tensor, scorable: Tensor, selection: Selection) -> Tensor:
    """Advantages that TRL normalised over the whole batch, normalised over the kept rows instead, task by task where
    rewards are scaled so.

    TRL has computed a = (A - mean(A)) / (std(A) + 1e-4) over the scorable rows of the batch. Over the kept ones,
    (A - mean) / (std + 1e-4) follows from a alone, since 1e-4 / (std(A) + 1e-4) = 1 - std(a).

    Args:
        advantages: (B,) a.
        scorable: (B,) bool, rows that TRL's mean and deviation went over.
        selection: the kept rows.

    Returns:
        (B,), 0 for rows that are dropped or not scorable.
    """
    over_all = advantages.where(scorable, torch.nan)
    result = torch.zeros_like(advantages)
    for rows in selection.scaled_together:
        of_kept = selection.kept_rows & scorable & rows
        if of_kept.any():
            over_kept = advantages.where(of_kept, torch.nan)
            normalised = (advantages - over_kept.nanmean()) / (nanstd(over_kept) + 1 - nanstd(over_all))
            result = torch.where(of_kept, normalised, result)
    return result


def std_ratio(selection: Selection) -> Tensor:
    """(B,) what turns advantages over the whole batch's reward deviation into those over the kept rows', of the same
    task where rewards are scaled so; 0 where none is kept."""
    rewards = selection.rewards.flatten()
    ratio = torch.zeros_like(rewards)
    for rows in selection.scaled_together:
        of_kept = selection.kept_rows & rows
        if of_kept.any():
            over_kept = rewards.where(of_kept, torch.nan)
            ratio = torch.where(rows, (nanstd(rewards) + 1e-4) / (nanstd(over_kept) + 1e-4), ratio)
    return ratio
