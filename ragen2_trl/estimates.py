"""Numbers with 95 % intervals from the groups of a log, and how many groups of another size would be live.

Intervals are by bootstrap over prompts or generations: a number is computed from the sums of the log and from those of
each of R draws, as (1 + R,) values with the log's first.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]

REPLICATES = 400  # of a bootstrap, R: ends of a 95 % interval to about a tenth of its width
MOST_VALUES = 16  # rewards that groups have earned throughout, for an estimate of larger groups
_DRAW = 0x3F1F  # tells our draws from others of the same seed


def seeded_draws(seed: int, *numbers: int) -> np.random.Generator:
    """Draws for the purpose that these numbers above 0 stand for, apart from the global random state."""
    return np.random.default_rng([_DRAW, seed, *numbers])


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval. The ends are NaN for a single prompt or generation.

    As `{:%}` and `{}` in an f-string it is a percentage or a number, with the interval; `{:.0%}` is the value alone.
    """

    value: float
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def of(cls, values: Floats) -> "Estimate":
        """From (1 + R,) values. Draws with a value that is not finite are left out."""
        value, drawn = float(values[0]), values[1:][np.isfinite(values[1:])]
        return cls(value, *np.quantile(drawn, [0.025, 0.975]).tolist()) if len(drawn) else cls(value)

    def percent(self) -> str:
        return f"{self.value:.0%}{self._interval('{:.0f}', 100)}"

    def number(self) -> str:
        digits = 1 if abs(self.value) >= 10 else 2
        return f"{self.value:.{digits}f}{self._interval(f'{{:.{digits}f}}', 1)}"

    def __format__(self, form: str) -> str:
        return self.percent() if form == "%" else format(self.value, form) if form else self.number()

    def _interval(self, form: str, scale: float) -> str:
        ends = [form.format(end * scale) for end in (self.low, self.high) if math.isfinite(end)]
        return f" ({'–'.join(ends)})" if len(ends) == 2 else ""  # noqa: RUF001 - a range


class Bootstrap:
    """Draws units with replacement: (N,) for each group its prompt, or its generation."""

    def __init__(self, units: NDArray[np.int64], seed: int):
        self.units = np.unique(units, return_inverse=True)[1].reshape(-1)
        self.count = int(self.units.max()) + 1
        rng = seeded_draws(seed)
        self.weights = np.ones((1 + REPLICATES * (self.count > 1), self.count))  # a single unit has no draws
        for row in self.weights[1:]:
            row[:] = np.bincount(rng.integers(self.count, size=self.count), minlength=self.count)

    def sums(self, *columns: NDArray[Any] | float) -> Floats:
        """(K, 1 + R) sums of K columns, each (N,) or one number for all groups."""
        values = [np.broadcast_to(one, self.units.shape).astype(np.float64) for one in columns]
        return np.stack([np.bincount(self.units, one, minlength=self.count) for one in values]) @ self.weights.T

    def share(self, mask: NDArray[Any]) -> Estimate:
        """The share of groups in a mask. Draws from none or from all claim certainty; the exact bound does not."""
        held, groups = self.sums(mask, 1)
        found, bound = Estimate.of(held / groups), 1 - 0.025 ** (1 / self.count)
        if found.value == 0:
            return Estimate(0.0, 0.0, bound)
        return Estimate(1.0, 1 - bound, 1.0) if found.value == 1 else found


def live_with(rewards: Floats, size: int, units: NDArray[np.int64] | None = None) -> Floats:
    """(U,) probability that `size` completions drawn from a unit, without replacement, do not all earn the same.

    1 - sum over values v of C(n_v, size) / C(n, size): unbiased for a group of that size, as members are exchangeable.
    It is 0 for a unit with fewer rewards than `size`, of at least 2. Rewards are (N, G), NaN where there is none, and
    `units` tells the unit of each group, from 0 to U - 1; by default each group is one.

    >>> live_with(np.array([[1.0, 0.0, 0.0, 0.0]]), 2).tolist()
    [0.5]
    """
    units = np.arange(len(rewards)) if units is None else units
    known = ~np.isnan(rewards)
    values, places = np.unique(np.round(rewards[known], 6), return_inverse=True)  # float noise is no variance
    owners = np.repeat(units, known.sum(axis=1))
    kinds, counts = np.unique(owners * len(values) + places.reshape(-1), return_counts=True)
    owner, total = kinds // max(1, len(values)), np.bincount(owners, minlength=int(units.max()) + 1)
    same = np.ones(len(kinds))
    for drawn in range(size):
        same *= (counts - drawn).clip(0) / (total[owner] - drawn).clip(1)
    return np.where(total >= size, 1 - np.bincount(owner, same, minlength=len(total)), 0.0)


@dataclass(frozen=True)
class Sameness:
    """How likely all completions of a group are to earn the same, for groups of any size.

    A prompt's chance of a reward is taken as Beta distributed over prompts, and fitted by likelihood to the counts of
    groups, for each reward that some group has earned throughout.
    """

    fitted: Floats  # (V, 1 + R, 2) alpha and beta of each such reward

    @classmethod
    def fit(cls, rewards: Floats, prompts: Bootstrap) -> "Sameness | None":
        """From (N, G) rewards; `None` without a group of known rewards, or with too many values."""
        rounded, size = np.round(rewards, 6), rewards.shape[1]
        known = ~np.isnan(rounded).any(axis=1)
        values = np.unique(rounded[known & (rounded == rounded[:, :1]).all(axis=1), 0])
        if not known.any() or len(values) > MOST_VALUES:
            return None
        means = 1 / (1 + np.exp(-np.linspace(-6, 6, 97)))
        strengths = np.exp(np.linspace(math.log(0.02), math.log(500), 97))[:, None]
        cells = np.stack([means * strengths, (1 - means) * strengths], axis=-1).reshape(-1, 2)
        likelihood, fitted = log_beta_binomial(cells, size), np.empty((len(values), len(prompts.weights), 2))
        for place, value in enumerate(values):
            counts = np.where(known, (rounded == value).sum(axis=1), -1)
            sums = prompts.sums(*(counts == number for number in range(size + 1)))
            fitted[place] = cells[(likelihood @ sums).argmax(axis=0)]
        return cls(fitted)

    def live(self, size: int) -> Floats:
        """(1 + R,) shares of live groups of a size. Without a reward there are no draws: 1 is no certainty."""
        same = np.exp(log_beta_binomial(self.fitted, size)[..., -1])
        return np.asarray((1 - same.sum(axis=0)).clip(0)[: None if len(same) else 1])


def log_beta_binomial(parameters: Floats, size: int) -> Floats:
    """(..., size + 1) log-probabilities of each number of successes, for (..., 2) alpha and beta.

    >>> np.exp(log_beta_binomial(np.array([1.0, 1.0]), 3)).round(6).tolist()  # uniform
    [0.25, 0.25, 0.25, 0.25]
    """

    def log_beta(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)

    alpha, beta = torch.from_numpy(parameters).unsqueeze(-2).unbind(-1)
    wins = torch.arange(size + 1, dtype=torch.float64)
    losses = size - wins
    ways = -math.log(size + 1) - log_beta(wins + 1, losses + 1)
    return np.asarray(ways + log_beta(alpha + wins, beta + losses) - log_beta(alpha, beta))
