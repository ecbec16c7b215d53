"""From the rewards of a generation batch to the mask of completions to train on (arXiv 2604.06268, Section 3.3)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor

from ragen2_trl.filtering import group_score, select_groups, zero_variance
from ragen2_trl.rollout_events import Scored

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
        compute_entropies: the implementation of `entropies`.
        sums: (N, G) float64 weighted reward sums that advantages are made of.
        compute_advantages: the implementation of `advantages`.
    """

    rewards: Tensor
    rewards_per_func: Tensor
    lengths: Tensor
    generator: torch.Generator
    reward_range: tuple[float, float] | None
    compute_entropies: Callable[[], Tensor] = field(repr=False)
    sums: Tensor = field(repr=False, default_factory=lambda: torch.empty(0))
    compute_advantages: Callable[[], Tensor] = field(repr=False, default=lambda: torch.empty(0))

    def entropies(self) -> Tensor:
        """(N, G) mean token entropy of each completion in nats, by a forward pass: a call for all processes."""
        return self.compute_entropies()

    def advantages(self) -> Tensor:
        """(N, G) as TRL has made them, on the CPU: a call for all processes."""
        return self.compute_advantages()

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

    @property
    def scorable_rows(self) -> Tensor:
        """(B,) bool on the device of the rewards: completions with a reward."""
        return ~self.rewards.isnan().flatten()


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


def joined_selections(rounds: Sequence[Selection]) -> Selection:
    """The groups of all rounds of a step as one selection."""
    first, *others = rounds
    if not others:
        return first
    predicted = [one.predicted for one in rounds]
    return Selection(
        torch.cat([one.rewards for one in rounds]),
        torch.cat([one.scores for one in rounds]),
        torch.cat([one.kept for one in rounds]),
        torch.cat([one.lengths for one in rounds]),
        None if None in predicted else [value for values in predicted for value in values or []],
    )


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
