"""From the rewards of a generation to the mask of completions to train on (arXiv 2604.06268, Section 3.3).

A trainer makes a strategy by `strategy_of`. Synchronous and asynchronous trainers, and what-if, ask it the same
questions.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, TypedDict

import numpy as np
import torch
from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor

from ragen2_trl.filtering import group_score, select_groups, selection_metrics, zero_variance
from ragen2_trl.rollout_events import Scored
from ragen2_trl.trainers.plans import DropPlan, LosslessPlan

logger = get_logger(__name__)

SELECTION_EPS = 0.01
"""Slack of `top_p`: the selected mass may fall short of its target by this much. RAGEN's, for rewards that lie 1 apart
or more. Where the rewards of the run lie closer together it shrinks with their range, and the group ranked first is
never dropped for it, so that small rewards are filtered like large ones."""

FEW_GROUPS = 8
"""A generation of at least this many groups, the paper's batch, is ranked by itself. TRL's defaults sample one."""

# How a score scales with the unit of the rewards. Scores of tokens do not.
SCORE_DEGREE = {"reward_variance": 2, "reward_std": 1, "reward_mean": 1, "reward_sum": 1}


@dataclass(frozen=True)
class Groups:
    """The groups of one generation over all processes: the argument of a selector.

    Args:
        rewards: (N, G) weighted reward sums as sampled, or the rewards named by `snr_score_reward`; NaN where there is
            no finite one.
        rewards_per_func: (N, G, F) of each reward function, before weights.
        lengths: (N, G) trainable tokens that the model wrote; 0 where `mask_truncated_completions` masks a completion.
        generator: for draws. The same on all processes and in a resumed run; never the global random state.
        reward_range: lowest and highest of these rewards in the run so far; `None` without any.
        entropies: gives (N, G) the mean token entropy of each completion in nats, by a forward pass: a call for all
            processes.
        sums: (N, G) float64 on the CPU, the weighted reward sums that advantages are made of.
        advantages: gives (N, G) as TRL has made them, on the CPU: a call for all processes.
    """

    rewards: Tensor
    rewards_per_func: Tensor
    lengths: Tensor
    generator: torch.Generator
    reward_range: tuple[float, float] | None
    entropies: Callable[[], Tensor] = field(repr=False)
    sums: Tensor = field(repr=False, default=torch.empty(0))
    advantages: Callable[[], Tensor] = field(repr=False, default=lambda: torch.empty(0))

    @property
    def trainable(self) -> Tensor:
        """(N,) bool, groups with a token in the loss: nothing can be learned from the others."""
        return (self.lengths > 0).any(dim=1)


Selector = Callable[[Groups], Tensor]
"""From groups to a bool mask of kept groups (N,) or of kept completions (N, G). Single completions keep the advantages
of their whole group. Every process calls it with the same groups."""


class ScoreSelector:
    """The filter: a score ranks the groups, and a strategy decides how many are kept.

    Args:
        strategy, value, include_zero, keep: as for `select_groups`.
        score: as `kind` of `group_score`.
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
        return self.select(self.scores(groups), self.signal(groups), groups.reward_range)

    def scores(self, groups: Groups) -> Tensor:
        """(N,) float64."""
        return group_score(
            groups.rewards,
            self.score,
            entropies=groups.entropies() if self.score.startswith("entropy") else None,
            lengths=groups.lengths,
            generator=groups.generator,
        )

    def signal(self, groups: Groups) -> Tensor:
        """(N,) bool, groups with varying rewards and a token to train."""
        return ~zero_variance(groups.rewards) & groups.trainable

    def select(self, scores: Tensor, signal: Tensor, reward_range: tuple[float, float] | None) -> Tensor:
        """(n,) bool for the scores and the signal of any n groups."""
        low, high = reward_range or (0.0, 1.0)
        return select_groups(
            scores,
            self.strategy,
            self.value,
            include_zero=self.include_zero,
            # Never more than the slack itself: one freak reward cannot blow it up.
            selection_eps=SELECTION_EPS * min(1.0, high - low) ** SCORE_DEGREE.get(self.score, 0),
            keep=self.keep,
            is_zero=~signal,
            at_least_one=bool(signal.any()),
        )

    @property
    def most_dropped(self) -> float:
        """At least one group is kept for every this many groups with signal, as long as rewards keep their scale."""
        if self.score == "random":
            return math.inf  # draws do not depend on scores
        return FEW_GROUPS / self.value if self.strategy == "top_k" else FEW_GROUPS


@dataclass(frozen=True)
class Selection:
    """The completions to train on, of the groups of one or several generations over all processes.

    Args:
        rewards: (N, G) as in `Groups`.
        scores: (N,) by which groups were ranked.
        kept: (N, G) bool, True = the completion is trained on.
        lengths: (N, G) as in `Groups`.
        predicted: (N,) reward variance predicted for their prompts by prompt selection, else `None`.
    """

    rewards: Tensor
    scores: Tensor
    kept: Tensor
    lengths: Tensor
    predicted: list[float] | None = None

    @property
    def groups(self) -> Tensor:
        """(N,) bool, groups with a kept completion."""
        return self.kept.any(dim=1)

    @property
    def rows_of_groups(self) -> Tensor:
        """(B,) bool on the device of the rewards: all completions of these groups, over which advantages are made."""
        return self.groups.repeat_interleave(self.rewards.size(1)).to(self.rewards.device)


def rewards_to_score(name: str, sums: Tensor, names: Sequence[str], scored: Scored, rows: int) -> Tensor:
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
    if name in names[: scored.rewards_per_func.size(1)]:  # a subclass may have merged several functions into one
        values = scored.rewards_per_func[:, names.index(name)]
    else:
        columns = gather_object([_numbers(scored.columns.get(name), rows)])
        if any(column is None for column in columns):
            found = [one for one, column in scored.columns.items() if _numbers(column, rows) is not None]
            raise ValueError(
                f"snr_score_reward={name!r} is neither a reward function nor a column that one logs (log_extra) in "
                "every call, with a number for each completion; allowed here: "
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


def joined_selections(rounds: Sequence[Selection]) -> Selection:
    """The groups of all rounds of a step as one selection."""
    parts = zip(*((one.rewards, one.scores, one.kept, one.lengths) for one in rounds), strict=True)
    rewards, scores, kept, lengths = map(torch.cat, parts)
    predicted = [one.predicted for one in rounds]
    of_all = None if None in predicted else [value for values in predicted for value in values or []]
    return Selection(rewards, scores, kept, lengths, of_all)


def equal_rewards(rewards: Tensor) -> Tensor:
    """(N,) bool, groups whose rewards are all the same number, so that any advantage in them is rounding noise.

    TRL subtracts a float32 mean, which of eight rewards of 0.1 is not 0.1: its advantages are 7e-5 then, of 0.7 6e-4.

    >>> equal_rewards(torch.tensor([[0.1, 0.1, float("nan")], [0.1, 0.2, 0.1]])).tolist()
    [True, False]
    """
    nan = rewards.isnan()
    return rewards.masked_fill(nan, -torch.inf).amax(dim=1) <= rewards.masked_fill(nan, torch.inf).amin(dim=1)


def seeded_generator(*numbers: int) -> torch.Generator:
    """A generator for a draw identified by these numbers: the same on all processes and in a resumed run, and apart
    from the global random state of training."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


# Strategies: which completions are kept, and all else that hangs on `snr_strategy`

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
    # Whether rows that are not kept get no advantage: TRL's rounding of equal rewards.
    zeroes_advantages: ClassVar[bool] = False

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
                    f"A reward sum of {largest:g} is above {LARGEST_REWARD:g}: its square is infinite in float32, "
                    "so that TRL's advantages of the group are 0, while the filter ranks its variance in float64 and "
                    "keeps it in place of all others. Scale the rewards down."
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

    def reads_every_row(self, has_own_advantages: bool) -> bool:
        """Whether rows of groups with equal rewards may be kept, so that their log-probs are needed, too.

        Args:
            has_own_advantages: whether a subclass may give such rows an advantage.
        """
        return self.own_selector is not None

    @classmethod
    def check_losses(cls, trainer_class: type, own: list[str], router_coefficient: float | None = None) -> None:
        """Raise a `TypeError` where a loss of a trainer's own, by the names of its methods, does not fit the strategy,
        and a `ValueError` where a load-balancing loss, by its coefficient, does not."""

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
    is_trl_update = shares_prompts = zeroes_advantages = True

    def select(self, groups: Groups) -> tuple[Tensor, Tensor]:
        varies = ~equal_rewards(groups.sums).unsqueeze(1)
        return group_score(groups.rewards), (groups.advantages() != 0) & (groups.lengths > 0) & varies

    def reads_every_row(self, has_own_advantages: bool) -> bool:
        return has_own_advantages

    @classmethod
    def check_losses(cls, trainer_class: type, own: list[str], router_coefficient: float | None = None) -> None:
        if own:
            raise TypeError(
                f"snr_strategy='lossless' leaves out rows for which TRL's losses are 0, and {trainer_class.__name__} "
                f"has a {own[0]} of its own; allowed with it: the other strategies, which support every loss."
            )
        if router_coefficient is not None:
            raise ValueError(
                "snr_strategy='lossless' leaves out rows without an advantage, but the load-balancing loss needs "
                f"them; router_aux_loss_coef={router_coefficient} must be 0."
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
    """State of a `Strategy` in a checkpoint."""

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
