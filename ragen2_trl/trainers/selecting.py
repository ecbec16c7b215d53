"""From the rewards of a generation batch to the groups that are trained on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl.trainer.utils import nanstd

from ragen2_trl.filtering import (
    as_many_at_random,
    group_score,
    select_completions,
    select_groups,
    select_quarter,
    selection_metrics,
    zero_variance,
)
from ragen2_trl.trainers.config import SNRFilterConfig
from ragen2_trl.trainers.reference import FEW_GROUPS, RunningReference

# How scores scale with the unit of the rewards; those that are not of rewards do not.
SCORE_DEGREE = {"reward_variance": 2, "reward_std": 1, "reward_mean": 1, "reward_sum": 1}
_DRAW = 0xD4A3  # tells draws of groups from random scores of the same moment


@dataclass(frozen=True)
class Selection:
    """Which groups of a generation batch are kept, over all processes.

    Args:
        rewards: (N, G) weighted reward sums as sampled, NaN where there is no finite one.
        scores: (N,) what groups were ranked by.
        kept: (N,) bool; of a group that is kept, one completion at least is.
        tasks: (N,) names of the groups' tasks, where the dataset tells them.
        scaled_by_task: whether rewards are scaled by those.
        completions: (N, G) bool, which completions are kept, where groups are not kept whole.
        predicted: (N,) the reward variance that was expected of their prompts, where these were chosen by it.
    """

    rewards: Tensor
    scores: Tensor
    kept: Tensor
    tasks: list[str] | None = None
    scaled_by_task: bool = False
    completions: Tensor | None = None
    predicted: list[float] | None = None

    @property
    def keeps_all(self) -> bool:
        return self.kept_fraction == 1.0

    @property
    def kept_fraction(self) -> float:
        """Of the completions, which is that of the groups where these are kept whole."""
        return float((self.kept if self.completions is None else self.completions).double().mean())

    @property
    def kept_rows(self) -> Tensor:
        """(B,) bool on the device of the rewards."""
        if self.completions is None:
            return self.rows_of_kept_groups
        return self.completions.flatten().to(self.rewards.device)

    @property
    def rows_of_kept_groups(self) -> Tensor:
        """(B,) bool on the device of the rewards: the completions that advantages are made over."""
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


def patience_of(args: SNRFilterConfig) -> float:
    """Of so many groups with signal a selection by scores would keep one, had the rewards not changed their scale."""
    if args.snr_keep == "random" or args.snr_score == "random":
        return math.inf  # a lot does not know what scores are
    if args.snr_quartile is not None:
        return 4 * FEW_GROUPS
    return FEW_GROUPS / args.snr_value if args.snr_strategy == "top_k" else FEW_GROUPS


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
        self.reference = None if window is None else RunningReference(window, args.seed, patience_of(args))

    def select(
        self,
        rewards: Tensor,
        scores: Tensor,
        tasks: list[str] | None = None,
        moment: Sequence[int] = (),
    ) -> Selection:
        """The groups that `snr_strategy`, or what stands in its place, keeps.

        Args:
            rewards: (N, G) raw weighted reward sums, NaN where there is no finite one.
            scores: (N,) from `group_score`.
            tasks: (N,) names of the groups' tasks, where the dataset tells them.
            moment: numbers that tell this generation from others of the run; `snr_keep="random"` draws by them.
        """
        signal = ~zero_variance(rewards)
        self.reward_range = widened(self.reward_range, rewards)
        for task in dict.fromkeys(tasks or ()):
            own = torch.tensor([other == task for other in tasks or ()], device=rewards.device)
            if (of_task := widened(self.ranges.get(task), rewards[own])) is not None:
                self.ranges[task] = of_task
        if self.args.snr_reward_scaling_by == "task":
            scores = scores.cpu() / self._units(tasks, SCORE_DEGREE.get(self.args.snr_score, 0))
        draw = generator_of(_DRAW, self.args.seed, *moment)
        completions = None
        if self.args.snr_mode == "soft":
            kept = signal.any().expand(len(signal))  # every group, unless none can teach anything
        elif self.args.snr_level == "trajectory":
            candidates = signal | self.args.snr_include_zero
            completions = select_completions(rewards, self.args.snr_trajectory_fraction) & candidates.unsqueeze(1)
            completions = self._or_at_random(completions, draw)
            kept = completions.any(dim=1)
        elif self.reference is not None:
            kept = self.reference.select(scores.cpu(), signal, partial(self._selected, draw=draw))
        else:
            kept = self._selected(scores, signal, draw)
        if self.args.snr_quartile is not None and not self.args.snr_include_zero:
            kept = kept & (kept & signal).any()  # of the groups without variance alone nothing is to be learnt
        by_task = self.args.snr_reward_scaling_by == "task"
        return Selection(rewards, scores.cpu(), kept, tasks, by_task, completions)

    def _selected(self, scores: Tensor, signal: Tensor, draw: torch.Generator) -> Tensor:
        """(n,) bool for scores and signal of any n groups, as if they were one generation batch."""
        if self.args.snr_quartile is not None:
            return select_quarter(scores, self.args.snr_quartile)
        kept = select_groups(
            scores,
            self.args.snr_strategy,
            self.args.snr_value,
            include_zero=self.args.snr_include_zero,
            selection_eps=self._slack(),
            keep="smallest" if self.args.snr_keep == "smallest" else "largest",
            is_zero=~signal,
            at_least_one=self.args.snr_selection_eps_scale == "reward_range" and bool(signal.any()),
        )
        return self._or_at_random(kept, draw)

    def _or_at_random(self, kept: Tensor, draw: torch.Generator) -> Tensor:
        return as_many_at_random(kept, draw) if self.args.snr_keep == "random" else kept

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
        metrics = {**self._metrics_of_groups(selection), "kept_fraction": selection.kept_fraction}
        return metrics if self.reference is None else {**metrics, "window_groups": float(len(self.reference.scores))}

    def _metrics_of_groups(self, selection: Selection) -> dict[str, float]:
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
        return selection_metrics(*told, variances)

    def row_weights(self, selection: Selection) -> Tensor | None:
        """(B,) what `snr_mode="soft"` or `snr_loss_scaling` multiply advantages by; `None` for nothing."""
        if self.args.snr_mode == "soft":
            std = group_score(selection.rewards, "reward_std").repeat_interleave(selection.rewards.size(1))
            rows = torch.stack(selection.scaled_together).to(std.device)  # (tasks, B)
            largest = torch.where(rows, std, 0.0).amax(dim=1).clamp(min=1e-6)
            return std / (rows.to(std) * largest.unsqueeze(1)).sum(dim=0)
        exponent = {"linear": 1.0, "sqrt": 0.5}.get(self.args.snr_loss_scaling, 0.0)
        if exponent == 0.0 or selection.keeps_all or not selection.kept.any():
            return None
        return torch.full((selection.rewards.numel(),), selection.kept_fraction**exponent)


def generator_of(*numbers: int) -> torch.Generator:
    """One for a draw that these numbers tell from others: training draws the same global random numbers, and so do all
    processes, and a resumed run."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


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
    (A - mean) / (std + 1e-4) follows from a alone, since 1e-4 / (std(A) + 1e-4) = 1 - std(a). Kept are whole groups
    here, also where not all of their completions are trained on.

    Args:
        advantages: (B,) a.
        scorable: (B,) bool, rows that TRL's mean and deviation went over.
        selection: the kept groups.

    Returns:
        (B,), 0 for rows that are dropped or not scorable.
    """
    over_all = advantages.where(scorable, torch.nan)
    result = torch.zeros_like(advantages)
    for rows in selection.scaled_together:
        of_kept = selection.rows_of_kept_groups & scorable & rows
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
        of_kept = selection.rows_of_kept_groups & rows
        if of_kept.any():
            over_kept = rewards.where(of_kept, torch.nan)
            ratio = torch.where(rows, (nanstd(rewards) + 1e-4) / (nanstd(over_kept) + 1e-4), ratio)
    return ratio
