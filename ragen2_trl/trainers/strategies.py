"""The strategies: which completions of a generation are kept, and all else that hangs on `snr_strategy`.

A trainer makes one by `strategy_of`. Synchronous and asynchronous trainers, and what-if, ask it the same questions.
"""

import logging
import math
from collections.abc import Callable
from typing import Any, ClassVar, TypedDict

import torch
from accelerate import PartialState
from accelerate.logging import get_logger
from torch import Tensor

from ragen2_trl.filtering import group_score, selection_metrics
from ragen2_trl.trainers.plans import DropPlan, LosslessPlan
from ragen2_trl.trainers.selection import (
    FEW_GROUPS,
    Groups,
    ScoreSelector,
    Selection,
    Selector,
    equal_rewards,
    seeded_generator,
)

logger = get_logger(__name__)

RECENT_GROUPS = 256
"""A smaller generation is ranked among this many of the latest groups: enough to make a share of their summed variance
as steady as that of a large batch, and free to keep."""

LARGEST_REWARD = 1e19
"""Largest reward whose square fits in float32, which TRL uses for the standard deviation."""

RANKED = ("top_p", "top_k", "min_p")  # shares of a ranking need many groups


class Strategy:
    """Keeps groups by their scores (`"nonzero"`, `"top_p"`, `"top_k"`, `"min_p"`), and remembers the run's rewards.

    Args:
        args: The settings.
        selector: In place of `snr_strategy`, `snr_value` and `snr_score`.
        known_range: Reward sums of a failure and of a solved task, where they are known.
    """

    plan: ClassVar[type[DropPlan]] = DropPlan
    keeps_trl_batch: ClassVar[bool] = False  # whether the update is TRL's bit for bit
    is_trl_update: ClassVar[bool] = False  # whether its loss is TRL's mean over all rows
    shares_prompts: ClassVar[bool] = False  # by default

    def __init__(self, args: Any, selector: Any = None, known_range: tuple[float, float] | None = None):
        self.args, self.own_selector, self.known_range = args, selector, known_range
        self.ranking = selector or ScoreSelector(args.snr_strategy, args.snr_value, args.snr_score)
        self.reward_range: tuple[float, float] | None = None
        self.recent: RecentGroups | None = None
        ranks = isinstance(self.ranking, ScoreSelector) and self.ranking.strategy in RANKED
        if ranks and args.groups_per_generation < FEW_GROUPS:
            self.recent = RecentGroups(args.seed, self.ranking.most_dropped)

    def see(self, rewards: Tensor) -> tuple[float, float] | None:
        """Take in (N, G) rewards. Returns the range of all so far, `None` without any."""
        valid = rewards[~rewards.isnan()]
        if valid.numel():
            low, high = self.reward_range or (math.inf, -math.inf)
            largest = valid.abs().max().item()
            if largest > LARGEST_REWARD >= max(-low, high):
                # accelerate's needs a process that trains, and a log is also replayed without one.
                log = logger if PartialState._shared_state else logging.getLogger(__name__)
                log.warning(
                    f"A reward sum of {largest:g} is beyond {LARGEST_REWARD:g}, whose square is infinite in float32: "
                    "TRL's deviation of such a group is infinite and its advantages are 0, and the filter, which "
                    "ranks by variance in float64, keeps it in place of all others."
                )
            self.reward_range = min(low, valid.min().item()), max(high, valid.max().item())
        return self.reward_range

    def select(self, groups: Groups) -> tuple[Tensor, Tensor]:
        """The scores (N,) float64 and the kept completions (N, G) bool of a generation, both on the CPU.

        Raises:
            ValueError: if a selector returns anything but a mask of groups or of completions.
        """
        ranking = self.ranking
        scores, signal = ranking.scores(groups).cpu(), ranking.signal(groups)

        def select(scores: Tensor, signal: Tensor) -> Tensor:
            kept: Tensor = ranking.select(scores, signal, groups.reward_range)
            return kept

        if self.recent is None:
            kept = select(scores, signal)
        else:
            kept = self.recent.select(scores, signal, select, bool(signal.any()) or ranking.include_zero)
        return scores, kept.unsqueeze(1).expand(groups.rewards.shape).clone()

    def advantages(self, advantages: Tensor, kept: Tensor) -> Tensor:
        """Advantages of rows, (rows,), of which (rows,) bool are kept."""
        return advantages

    def reads_every_row(self, has_own_advantages: bool) -> bool:
        """Whether rows of groups with equal rewards may be kept, so that their log-probs are needed, too.

        Args:
            has_own_advantages: whether a subclass may give such rows an advantage.
        """
        return self.own_selector is not None

    @classmethod
    def check_loss(cls, trainer_class: type, own: list[str]) -> None:
        """Raise a `TypeError` where a trainer's own loss, by the names of its methods, does not fit the strategy."""

    @classmethod
    def check_router_loss(cls, coefficient: float) -> None:
        """Raise a `ValueError` where the load-balancing loss of a mixture of experts does not fit the strategy."""

    def describe(self) -> str:
        """The settings that select."""
        args = self.args
        if args.snr_selector is not None:
            return f"snr_selector={args.snr_selector!r}"
        if self.own_selector is not None:
            return f"selector={self.own_selector!r}"
        return f"snr_strategy={args.snr_strategy!r}, snr_value={args.snr_value}, snr_score={args.snr_score!r}"

    def metrics(self, selection: Selection) -> dict[str, float]:
        """Metrics of a selection, see `selection_metrics`."""
        variances = None
        if self.recent is not None:
            ranked = self.recent.scores
            variances = {"reward_variance": ranked, "reward_std": ranked.square()}.get(self.ranking.score)
        return selection_metrics(
            selection.rewards,
            selection.scores,
            selection.kept,
            lengths=selection.lengths,
            reward_range=self.known_range or self.reward_range,
            variances=variances,
        )

    def state(self) -> "FilterState":
        """State for a checkpoint, the same on every process."""
        return {"reward_range": self.reward_range, "recent": None if self.recent is None else self.recent.state()}

    def load(self, state: "FilterState") -> None:
        self.reward_range = state["reward_range"]
        if self.recent is not None and state["recent"] is not None:
            self.recent.load(state["recent"])


class KeepAll(Strategy):
    """`"all"`: plain TRL, bit for bit."""

    keeps_trl_batch = True
    is_trl_update = True

    def reads_every_row(self, has_own_advantages: bool) -> bool:
        return True


class Lossless(Strategy):
    """`"lossless"`: rows with an advantage and a token in the loss; TRL's loss multiplies all others by zero."""

    plan = LosslessPlan
    is_trl_update = True
    shares_prompts = True

    def select(self, groups: Groups) -> tuple[Tensor, Tensor]:
        varies = ~equal_rewards(groups.sums.cpu()).unsqueeze(1)
        return group_score(groups.rewards), (groups.advantages() != 0) & (groups.lengths > 0) & varies

    def advantages(self, advantages: Tensor, kept: Tensor) -> Tensor:
        return advantages.masked_fill(~kept, 0.0)  # rounding noise of equal rewards in TRL

    def reads_every_row(self, has_own_advantages: bool) -> bool:
        return has_own_advantages

    @classmethod
    def check_loss(cls, trainer_class: type, own: list[str]) -> None:
        if own:
            raise TypeError(
                f"snr_strategy='lossless' leaves out rows for which TRL's losses are 0, and {trainer_class.__name__} "
                f"has a {own[0]} of its own; allowed with it: the other strategies, which support every loss."
            )

    @classmethod
    def check_router_loss(cls, coefficient: float) -> None:
        raise ValueError(
            "snr_strategy='lossless' leaves out rows without an advantage, on which the load-balancing loss "
            f"(router_aux_loss_coef={coefficient}) acts, too; allowed with it: 0."
        )


class OwnSelector(Strategy):
    """A selector of somebody's own, which ranks the groups that it is given."""

    def select(self, groups: Groups) -> tuple[Tensor, Tensor]:
        size = tuple(groups.rewards.shape)
        kept = self.ranking(groups)
        if not isinstance(kept, Tensor) or kept.dtype != torch.bool or tuple(kept.shape) not in (size, size[:1]):
            found = f"{kept.dtype} {tuple(kept.shape)}" if isinstance(kept, Tensor) else type(kept).__name__
            raise ValueError(f"selector returned {found}; allowed: a bool tensor of the shape {size[:1]} or {size}.")
        kept = kept.cpu().view(len(kept), -1).expand(size)
        has_tokens = (kept & (groups.lengths > 0)).any(dim=1, keepdim=True)
        return group_score(groups.rewards), kept & has_tokens


def strategy_class(args: Any) -> type[Strategy]:
    """The class of `snr_strategy`."""
    return {"all": KeepAll, "lossless": Lossless}.get(args.snr_strategy, Strategy)


def strategy_of(
    args: Any, selector: Selector | None = None, known_range: tuple[float, float] | None = None
) -> Strategy:
    """The strategy of a run, with the arguments of `Strategy`."""
    is_own = selector is not None and not isinstance(selector, ScoreSelector)
    return (OwnSelector if is_own else strategy_class(args))(args, selector, known_range)


class RecentState(TypedDict):
    """State of the latest groups in a checkpoint."""

    scores: list[float]
    signal: list[bool]
    seen: int
    since_kept: int


class FilterState(TypedDict):
    """State of a `GroupFilter` in a checkpoint."""

    reward_range: tuple[float, float] | None
    recent: RecentState | None


class RecentGroups:
    """The latest groups of a run, including this generation's, ranked like one large batch.

    Scores alone decide, so that a group's fate does not depend on its time in the run, with two exceptions. Groups of
    equal scores at the edge of the selection are drawn at random: in order of age, the new ones would always lose. And
    since a batch of eight never drops every group with signal, eight dropped groups with signal in a row mean that the
    rewards have changed their scale; all earlier groups are then forgotten.

    Args:
        seed: of the run.
        most_dropped: number of groups with signal, dropped in a row, after which earlier groups are forgotten; more
            than eight where a selection keeps few.
        size: largest number of groups.
    """

    _ORDERS = 0x107  # tells our permutations from others of the same seed

    def __init__(self, seed: int, most_dropped: float = FEW_GROUPS, size: int = RECENT_GROUPS):
        self.seed = seed
        self.most_dropped = most_dropped
        self.size = size
        self.scores = torch.zeros(0, dtype=torch.float64)  # (n,)
        self.signal = torch.zeros(0, dtype=torch.bool)  # (n,) whether rewards vary
        self.seen = 0  # groups in all
        self.since_kept = 0  # groups since the last generation with a kept one

    def select(
        self, scores: Tensor, signal: Tensor, select: Callable[[Tensor, Tensor], Tensor], may_keep: bool = True
    ) -> Tensor:
        """The kept groups of a generation, which becomes part of the latest groups.

        Args:
            scores: (N,) float64.
            signal: (N,) bool.
            select: from scores and signal of groups to the kept ones, the earlier of equal scores first.
            may_keep: whether any of the new groups can be among them; if not, there is nothing to rank.

        Returns:
            (N,) bool.
        """
        new = len(scores)
        self.scores = torch.cat([self.scores, scores])[-self.size :]
        self.signal = torch.cat([self.signal, signal])[-self.size :]
        self.seen += new
        kept = torch.zeros(len(self.scores), dtype=torch.bool)
        if may_keep:
            order = torch.randperm(len(self.scores), generator=seeded_generator(self._ORDERS, self.seed, self.seen))
            kept[order] = select(self.scores[order], self.signal[order])
        self._forget(kept[-new:])
        return kept[-new:]

    def _forget(self, kept: Tensor) -> None:
        self.since_kept = 0 if kept.any() else self.since_kept + len(kept)
        if self.since_kept and self.signal[-self.since_kept :].sum() >= self.most_dropped:
            self.scores, self.signal = self.scores[-self.since_kept :], self.signal[-self.since_kept :]

    def state(self) -> RecentState:
        """State for a checkpoint."""
        return {
            "scores": self.scores.tolist(),
            "signal": self.signal.tolist(),
            "seen": self.seen,
            "since_kept": self.since_kept,
        }

    def load(self, state: RecentState) -> None:
        self.scores = torch.tensor(state["scores"], dtype=torch.float64)[-self.size :]
        self.signal = torch.tensor(state["signal"], dtype=torch.bool)[-self.size :]
        self.seen, self.since_kept = state["seen"], state["since_kept"]
