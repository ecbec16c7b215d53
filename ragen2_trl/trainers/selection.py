"""From the rewards of a generation batch to the groups that are trained on (arXiv 2604.06268, Section 3.3)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl.trainer.utils import nanstd

from ragen2_trl.filtering import group_score, select_groups, selection_metrics, zero_variance

logger = get_logger(__name__)

SELECTION_EPS = 0.01
"""Slack of `top_p`, the mass that may be missing of its value: RAGEN's, for rewards that lie 1 apart or more. Where
those seen so far in the run lie closer together it shrinks with them, and the group ranked first is never dropped for
it, so that a reward of small numbers is filtered as one of large numbers is."""

FEW_GROUPS = 8
"""From so many groups a generation is ranked by itself: the paper's batch. TRL's defaults sample one."""

MANY_VALUES = 4
"""A reward of so many times the values of another is said to be finer: shaped, or continuous."""

RECENT_GROUPS = 256
"""Where a generation has fewer, it is ranked among so many of the latest groups, which cost nothing to keep: enough
that a share of their summed variance is as steady as that of a large batch."""

LARGEST_REWARD = 1e19
"""Of which TRL can take the deviation: it squares rewards in float32."""

# How scores scale with the unit of the rewards; those that are not of rewards do not.
SCORE_DEGREE = {"reward_variance": 2, "reward_std": 1, "reward_mean": 1, "reward_sum": 1}


@dataclass(frozen=True)
class Groups:
    """The groups of one generation over all processes, as a selector sees them.

    Args:
        rewards: (N, G) weighted reward sums as sampled, or what `snr_score_reward` names; NaN where there is no finite
            one.
        rewards_per_func: (N, G, F) of each reward function, before weights.
        lengths: (N, G) tokens that the model wrote.
        generator: of draws, the same on all processes and in a resumed run; never the global random state.
        reward_range: lowest and highest of these rewards in the run so far; `None` without any.
        compute_entropies: what `entropies` calls.
    """

    rewards: Tensor
    rewards_per_func: Tensor
    lengths: Tensor
    generator: torch.Generator
    reward_range: tuple[float, float] | None
    compute_entropies: Callable[[], Tensor] = field(repr=False)

    def entropies(self) -> Tensor:
        """(N, G) mean token entropy of each completion in nats, by a forward pass: a call for all processes."""
        return self.compute_entropies()


Selector = Callable[[Groups], Tensor]
"""From groups to what is kept: (N,) bool for whole groups, or (N, G) bool for single completions, which keep the
advantages that they have in their whole group. Every process calls it with the same groups."""


class ScoreSelector:
    """The filter: groups are ranked by a score, and a strategy says how many of them are kept.

    Args:
        strategy, value, include_zero, keep: as `select_groups` takes them.
        score: as `group_score` takes its `kind`.
    """

    def __init__(
        self,
        strategy: str = "top_p",
        value: float = 0.9,
        score: str = "reward_variance",
        include_zero: bool = False,
        keep: str = "largest",
    ):
        self.strategy, self.value, self.score = strategy, value, score
        self.include_zero, self.keep = include_zero, keep

    def __call__(self, groups: Groups) -> Tensor:
        """(N,) bool, True = kept."""
        return self.select(self.scores(groups), ~zero_variance(groups.rewards), groups.reward_range)

    def scores(self, groups: Groups) -> Tensor:
        """(N,) float64."""
        return group_score(
            groups.rewards,
            self.score,
            entropies=groups.entropies() if self.score.startswith("entropy") else None,
            lengths=groups.lengths,
            generator=groups.generator,
        )

    def select(self, scores: Tensor, signal: Tensor, reward_range: tuple[float, float] | None) -> Tensor:
        """(n,) bool for the scores and the signal (whether rewards vary) of any n groups."""
        low, high = reward_range or (0.0, 1.0)
        return select_groups(
            scores,
            self.strategy,
            self.value,
            include_zero=self.include_zero,
            # Never more than the slack itself: no freak reward can blow it up.
            selection_eps=SELECTION_EPS * min(1.0, high - low) ** SCORE_DEGREE.get(self.score, 0),
            keep=self.keep,
            is_zero=~signal,
            at_least_one=bool(signal.any()),
        )

    @property
    def most_dropped(self) -> float:
        """Of so many groups with signal one is kept, if their rewards have the scale of those before."""
        if self.score == "random":
            return math.inf  # what is drawn does not depend on scores
        return FEW_GROUPS / self.value if self.strategy == "top_k" else FEW_GROUPS


@dataclass(frozen=True)
class Selection:
    """Which groups of a generation batch are kept, over all processes.

    Args:
        rewards: (N, G) as `Groups` has them.
        scores: (N,) what groups were ranked by.
        kept: (N,) bool; of a group that is kept, one completion at least is.
        completions: (N, G) bool, which completions are kept, where a selector does not keep groups whole.
        lengths: (N, G) tokens that the model wrote.
        predicted: (N,) the reward variance that was expected of their prompts, where these were chosen by it.
    """

    rewards: Tensor
    scores: Tensor
    kept: Tensor
    completions: Tensor | None = None
    lengths: Tensor | None = None
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


def joined_selections(rounds: Sequence[Selection]) -> Selection:
    """All groups that a step has sampled: those of its first prompts, and of rounds of dynamic sampling."""
    if len(rounds) == 1:
        return rounds[0]
    whole = all(one.completions is None for one in rounds)
    return Selection(
        torch.cat([one.rewards for one in rounds]),
        torch.cat([one.scores for one in rounds]),
        torch.cat([one.kept for one in rounds]),
        None if whole else torch.cat([one.kept_rows.view(one.rewards.shape) for one in rounds]),
        torch.cat([one.lengths for one in rounds if one.lengths is not None]),
    )


def score_rewards(
    name: str, sums: Tensor, names: Sequence[str], rewards_per_func: Tensor, logged: Mapping[str, Sequence[Any]]
) -> Tensor:
    """The rewards that groups are scored by: those of one function, or a column that one logs.

    Args:
        name: of `snr_score_reward`.
        sums: (N, G) weighted reward sums.
        names: of the reward functions, F.
        rewards_per_func: (B, F).
        logged: columns of the latest completions, this generation's last.

    Returns:
        (N, G), NaN where there is no finite number.

    Raises:
        ValueError: where there is neither.
    """
    columns = _of_functions_and_columns(sums, names, rewards_per_func, logged)
    if name not in columns:
        raise ValueError(
            f"snr_score_reward={name!r} is neither a reward function nor a column of numbers that one logs for each "
            f"completion (log_extra); allowed: {', '.join(columns)}."
        )
    return columns[name]


def finer_than(
    sums: Tensor, names: Sequence[str], rewards_per_func: Tensor, logged: Mapping[str, Sequence[Any]]
) -> str | None:
    """Why groups might better be scored by one of their rewards than by the sum; `None` without a reason.

    Args:
        sums, names, rewards_per_func, logged: as for `score_rewards`.
    """
    values = len(sums[~sums.isnan()].unique())
    for name, rewards in _of_functions_and_columns(sums, names, rewards_per_func, logged).items():
        own = len(rewards[~rewards.isnan()].unique())
        if own > 1 and values >= MANY_VALUES * own:
            return (
                f"Groups are scored by a reward of {values} different values, in which failures may differ, too; "
                f"{name} has {own}. If that is what training is for, score by it: snr_score_reward={name!r}."
            )
    return None


def _of_functions_and_columns(
    sums: Tensor, names: Sequence[str], rewards_per_func: Tensor, logged: Mapping[str, Sequence[Any]]
) -> dict[str, Tensor]:
    """(N, G) each, NaN where there is no finite number; functions come before columns of the same name."""
    found: dict[str, Tensor] = {}
    for name, rewards in zip(names, rewards_per_func.T, strict=False):  # a subclass may have made one of several
        found.setdefault(name, rewards)
    for name, column in logged.items():
        values = list(column)[-sums.numel() :]
        if len(values) == sums.numel() and all(isinstance(value, (int, float, NoneType)) for value in values):
            found.setdefault(name, torch.tensor([math.nan if value is None else value for value in values]))
    return {
        name: values.to(sums).masked_fill(~values.to(sums).isfinite(), torch.nan).view(sums.shape)
        for name, values in found.items()
    }


def with_advantage(rewards: Tensor, advantages: Tensor) -> Selection:
    """The completions that TRL's loss does not multiply by zero.

    Args:
        rewards: (N, G) weighted reward sums.
        advantages: (B,) as TRL has made them.
    """
    completions = (advantages != 0).view(rewards.shape).cpu()
    return Selection(rewards, group_score(rewards), completions.any(dim=1), completions)


class GroupFilter:
    """Selects groups by the settings of a run, and remembers the rewards and groups that it has seen.

    Args:
        args: The settings.
        selector: In place of `snr_strategy` and its siblings.
        known_range: Reward sums of a failure and of a solved task, where they are known.
    """

    def __init__(self, args: Any, selector: Selector | None = None, known_range: tuple[float, float] | None = None):
        self.selector: Selector = selector or ScoreSelector(
            args.snr_strategy, args.snr_value, args.snr_score, args.snr_include_zero
        )
        self.known_range = known_range
        self.reward_range: tuple[float, float] | None = None
        # A number of groups is one of each batch; what somebody else selects is of the groups that it is given.
        self.recent: RecentGroups | None = None
        own, few = self.selector, args.groups_per_generation < FEW_GROUPS
        if few and isinstance(own, ScoreSelector) and own.strategy not in ("top_k_abs", "lossless"):
            self.recent = RecentGroups(args.seed, own.most_dropped)

    @property
    def ranks_rewards(self) -> bool:
        """Whether groups are kept for how their rewards vary."""
        own = self.selector
        if not isinstance(own, ScoreSelector) or own.strategy == "lossless":
            return False
        return own.score in ("reward_variance", "reward_std")

    @property
    def keeps_everything(self) -> bool:
        """Whether no group is ever dropped."""
        own = self.selector
        if not isinstance(own, ScoreSelector) or not own.include_zero:
            return False
        return own.strategy == "none" or (own.strategy.startswith("top_p") and own.value >= 1)

    def see(self, rewards: Tensor) -> tuple[float, float] | None:
        """Take in (N, G) rewards; gives the range of those so far, `None` without any."""
        valid = rewards[~rewards.isnan()]
        if valid.numel():
            low, high = self.reward_range or (math.inf, -math.inf)
            largest = valid.abs().max().item()
            if largest > LARGEST_REWARD >= max(-low, high):
                logger.warning(
                    f"A reward sum of {largest:g} is beyond {LARGEST_REWARD:g}, whose square is infinite in float32: "
                    "TRL's deviation of such a group is infinite and its advantages are 0, and the filter, which "
                    "ranks by variance in float64, keeps it in place of all others."
                )
            self.reward_range = min(low, valid.min().item()), max(high, valid.max().item())
        return self.reward_range

    def select(self, groups: Groups) -> Selection:
        """Which groups are kept.

        Raises:
            ValueError: if a selector gives anything but a mask of groups or of completions.
        """
        signal = ~zero_variance(groups.rewards)
        if isinstance(self.selector, ScoreSelector):
            scores = self.selector.scores(groups).cpu()
            select = partial(self.selector.select, reward_range=groups.reward_range)
            kept = select(scores, signal) if self.recent is None else self.recent.select(scores, signal, select)
            return Selection(groups.rewards, scores, kept)
        kept = self.selector(groups)
        size = tuple(groups.rewards.shape)
        if not isinstance(kept, Tensor) or kept.dtype != torch.bool or tuple(kept.shape) not in (size, size[:1]):
            found = f"{kept.dtype} {tuple(kept.shape)}" if isinstance(kept, Tensor) else type(kept).__name__
            raise ValueError(f"selector gave {found}; allowed: a bool tensor of the shape {size[:1]} or {size}.")
        kept, scores = kept.cpu(), group_score(groups.rewards)
        return Selection(groups.rewards, scores, *((kept,) if kept.ndim == 1 else (kept.any(dim=1), kept)))

    def metrics(self, selection: Selection) -> dict[str, float]:
        """What a selection did, see `selection_metrics`."""
        variances = None
        if self.recent is not None and isinstance(self.selector, ScoreSelector):
            ranked = self.recent.scores
            variances = {"reward_variance": ranked, "reward_std": ranked.square()}.get(self.selector.score)
        best_and_worst = self.known_range or self.reward_range
        metrics = selection_metrics(selection.rewards, selection.scores, selection.kept, best_and_worst, variances)
        metrics["kept_fraction"] = selection.kept_fraction
        if selection.lengths is not None:
            tokens = selection.lengths.flatten()
            metrics["kept_tokens_fraction"] = (
                tokens[selection.kept_rows.cpu()].sum() / tokens.sum().clamp(min=1)
            ).item()
        return metrics

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, the same on every process."""
        return {"reward_range": self.reward_range, "recent": self.recent and self.recent.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.reward_range = state["reward_range"]
        if self.recent is not None and state["recent"] is not None:
            self.recent.load(state["recent"])


class RecentGroups:
    """The latest groups of a run, this generation's included, of which a selection is made as if of one large batch.

    Scores alone decide, so that a group's fate does not depend on when in the run it came, with two exceptions. Of
    equal scores, those that a selection has no room for are drawn at random: in order of age, they would always be the
    new ones. And a batch of eight never drops all that has signal, so where eight groups with signal were dropped in
    a row, the rewards have changed their scale, and all groups before these are forgotten.

    Args:
        seed: of the run.
        most_dropped: groups with signal that are dropped in a row before those before them are forgotten: more than
            eight where a selection keeps few.
        size: most groups.
    """

    _ORDERS = 0x107  # tells our permutations from others of the same seed

    def __init__(self, seed: int, most_dropped: float = FEW_GROUPS, size: int = RECENT_GROUPS):
        self.seed = seed
        self.most_dropped = most_dropped
        self.size = size
        self.scores = torch.zeros(0, dtype=torch.float64)  # (n,)
        self.signal = torch.zeros(0, dtype=torch.bool)  # (n,) whether their rewards vary
        self.seen = 0  # groups in all
        self.since_kept = 0  # groups since the last generation of which one was kept

    def select(self, scores: Tensor, signal: Tensor, select: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Which groups of a generation are kept; they are among the latest from now on.

        Args:
            scores: (N,) float64.
            signal: (N,) bool.
            select: from scores and signal of groups to those kept, the earlier one of equal scores first.

        Returns:
            (N,) bool.
        """
        new = len(scores)
        self.scores = torch.cat([self.scores, scores])[-self.size :]
        self.signal = torch.cat([self.signal, signal])[-self.size :]
        self.seen += new
        order = torch.randperm(len(self.scores), generator=seeded_generator(self._ORDERS, self.seed, self.seen))
        kept = torch.zeros(len(self.scores), dtype=torch.bool)
        kept[order] = select(self.scores[order], self.signal[order])
        self._forget(kept[-new:])
        return kept[-new:]

    def _forget(self, kept: Tensor) -> None:
        self.since_kept = 0 if kept.any() else self.since_kept + len(kept)
        if self.since_kept and self.signal[-self.since_kept :].sum() >= self.most_dropped:
            self.scores, self.signal = self.scores[-self.since_kept :], self.signal[-self.since_kept :]

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs."""
        return {
            "scores": self.scores.tolist(),
            "signal": self.signal.tolist(),
            "seen": self.seen,
            "since_kept": self.since_kept,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.scores = torch.tensor(state["scores"], dtype=torch.float64)[-self.size :]
        self.signal = torch.tensor(state["signal"], dtype=torch.bool)[-self.size :]
        self.seen, self.since_kept = state["seen"], state["since_kept"]


def seeded_generator(*numbers: int) -> torch.Generator:
    """For a draw that these numbers tell from others: training draws the same global random numbers, and so do all
    processes, and a resumed run."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


# Advantages that TRL makes over a whole batch, as they would be if the kept groups were all of it


def renormalised(advantages: Tensor, scorable: Tensor, selection: Selection) -> Tensor:
    """Advantages that TRL normalised over the whole batch, normalised over the kept rows instead.

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
    of_kept = selection.rows_of_kept_groups & scorable
    over_all, over_kept = advantages.where(scorable, torch.nan), advantages.where(of_kept, torch.nan)
    normalised = (advantages - over_kept.nanmean()) / (nanstd(over_kept) + 1 - nanstd(over_all))
    return torch.where(of_kept, normalised, torch.zeros_like(advantages))


def std_ratio(selection: Selection) -> Tensor:
    """What turns advantages over the whole batch's reward deviation into those over the kept rows'; a scalar."""
    rewards = selection.rewards.flatten()
    over_kept = rewards.where(selection.rows_of_kept_groups, torch.nan)
    ratio: Tensor = (nanstd(rewards) + 1e-4) / (nanstd(over_kept) + 1e-4)
    return ratio
