"""What a run knows of each prompt's rewards, and how much they may be expected to vary when it is sampled again."""

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]

BEGINNING = 4.0  # groups that the prior of a run's beginning weighs: rewards of two values, any share of each
MEMORY = 256.0  # groups after which what the prior was learned from counts 1/e
SHARE_WITHIN = (0.1, 0.8)  # of all variance, that within prompts; at the ends a prior weighs 0.1 and 4 rewards
FREEDOM = 4.0  # of the prior of a variance; its mean is that of the prior


class PosteriorState(TypedDict):
    """State of a `RewardPosterior` in a checkpoint: the prompts seen so far."""

    rows: Rows
    evidence: Floats
    seen: Rows
    moments: Floats
    weight: float
    clock: int
    values: list[float]
    range: tuple[float, float]


class RewardPosterior:
    """What the groups of each prompt have earned, old evidence fading, and the reward variance to be expected of it.

    Rewards of two values r apart: a Beta distribution of the chance p of the higher one, and the variance r² p (1-p).
    Rewards of more values: a scaled inverse chi-squared distribution of the variance itself. Evidence halves with
    every `half_life` prompts that are sampled, so that one not seen for long is as unknown as one never seen.

    The prior of a prompt has the mean and the variance of rewards that prompts turned out to have which were not
    sampled for what was known of them.

    Args:
        num_rows: Prompts, M.
        half_life: In prompts sampled.
    """

    def __init__(self, num_rows: int, half_life: float):
        self.half_life = half_life
        # Of valid rewards, their sum, degrees of freedom and squared deviations from group means, all of them faded.
        self.evidence = np.zeros((num_rows, 4))
        self.seen = np.full(num_rows, -1, dtype=np.int64)  # the clock when a prompt was last sampled; -1: never
        self.clock = 0  # prompts sampled so far
        self.values: list[float] = []  # of rewards, up to three different ones
        self.range = (0.0, 0.0)
        self.weight = 0.0  # of the groups that the prior is learned from
        self.moments = np.zeros(2)  # and the weighted sums of mean and variance of their rewards

    def observe(self, rows: Rows, rewards: Floats, typical: Mask, first: int | None = None) -> None:
        """Learn from groups.

        Args:
            rows: (N,) whose prompts they are of.
            rewards: (N, G), NaN where there is none.
            typical: (N,) bool, of prompts that were not sampled for their rewards so far: these tell of the others.
            first: members of a group that were sampled whatever its rewards were; default: all.
        """
        self.see(rewards)
        self.clock += len(rows)
        self.evidence[rows] = self.known(rows)
        np.add.at(self.evidence, rows, evidence_of(rewards)[0])
        self.seen[rows] = self.clock
        self.learn_prior(rewards[typical, :first])

    def see(self, rewards: Floats) -> None:
        """Take in which values rewards have. (N, G)"""
        valid = rewards[~np.isnan(rewards)]
        if valid.size:
            low, high = self.range if self.values else (np.inf, -np.inf)
            self.range = (min(low, float(valid.min())), max(high, float(valid.max())))
            if len(self.values) < 3:
                self.values = np.unique([*self.values, *valid])[:3].tolist()

    def learn_prior(self, rewards: Floats) -> None:
        """Learn from (N, G) rewards of prompts and completions that were not sampled for their rewards so far."""
        evidence, variances = evidence_of(rewards)
        for (count, total, freedom, _), variance in zip(evidence, variances, strict=True):
            if freedom > 0:
                keep = 1 - 1 / MEMORY
                self.weight = keep * self.weight + 1
                self.moments = keep * self.moments + np.array([total / count, variance])

    def mean(self, rows: Rows) -> Floats:
        """(n,) reward variance to be expected of prompts."""
        if self._binary:
            a, b = self._beta(self.known(rows))
            return self._unit**2 * a * b / ((a + b) * (a + b + 1))
        freedom, squares = self._inverse_chi_squared(self.known(rows))
        return squares / (freedom - 2)

    def group_variance(self, pilots: Floats, further: int, known: Floats | None = None) -> Floats:
        """The expected sample variance of groups with some known rewards.

        Args:
            pilots: (n, G0) the known rewards, NaN where there is none.
            further: how many are to come, G - G0.
            known: (n, 4) of `known`, what earlier groups of these prompts have shown; default: nothing.

        Returns:
            (n,)
        """
        own = evidence_of(pilots)[0]
        known = np.zeros_like(own) if known is None else known
        size = own[:, 0] + further
        if not self._binary:
            freedom, squares = self._inverse_chi_squared(known + own)
            # Around the mean of the whole group: each further reward adds the variance of one.
            return (own[:, 3] + further * squares / (freedom - 2)) / (size - 1)
        a, b = self._beta(known + own)
        wins = (own[:, 1] - own[:, 0] * self.range[0]) / self._unit
        mean = further * a / (a + b)  # of the further wins, which are beta-binomial
        square = mean**2 + mean * b * (a + b + further) / ((a + b) * (a + b + 1))
        split = wins * (size - wins) + mean * (size - 2 * wins) - square  # wins times losses
        return self._unit**2 * split / (size * (size - 1))

    def sample(self, rows: Rows, rng: np.random.Generator) -> Floats:
        """(n,) reward variances of prompts, drawn from what is known of each."""
        if self._binary:
            chance = rng.beta(*self._beta(self.known(rows)))
            return self._unit**2 * chance * (1 - chance)
        freedom, squares = self._inverse_chi_squared(self.known(rows))
        drawn = squares / rng.chisquare(freedom)
        return np.minimum(drawn, self._unit**2 / 4)  # no variance within a range is larger

    @property
    def _binary(self) -> bool:
        return len(self.values) < 3

    @property
    def _unit(self) -> float:
        """The range of rewards; 1 where all were the same, which then count as the lower of two values."""
        return (self.range[1] - self.range[0]) or 1.0

    def known(self, rows: Rows) -> Floats:
        """(n, 4) evidence of prompts, faded."""
        return self.evidence[rows] * np.exp2((self.seen[rows] - self.clock) / self.half_life)[:, None]

    def _prior(self) -> tuple[float, float]:
        """Mean of the rewards, in units of their range from the lowest up, and their variance in rewards'."""
        at_first = BEGINNING * np.array([self.range[0] + self._unit / 2, self._unit**2 / 6])
        mean, variance = (self.moments + at_first) / (self.weight + BEGINNING)
        mean = np.clip((mean - self.range[0]) / self._unit, 0.01, 0.99)
        return float(mean), float(np.clip(variance, 1e-3 * self._unit**2, self._unit**2 / 4))

    def _beta(self, evidence: Floats) -> tuple[Floats, Floats]:
        """(n,) each: the parameters. The prior is the beta distribution with its mean and E[p (1 - p)]."""
        mean, variance = self._prior()
        within = np.clip(variance / (self._unit**2 * mean * (1 - mean)), *SHARE_WITHIN)
        strength = within / (1 - within)
        count, total = evidence[:, :2].T
        wins = np.clip((total - count * self.range[0]) / self._unit, 0, count)
        return mean * strength + wins, (1 - mean) * strength + count - wins

    def _inverse_chi_squared(self, evidence: Floats) -> tuple[Floats, Floats]:
        """(n,) each: degrees of freedom, and sum of squares."""
        freedom, squares = evidence[:, 2:].T
        return FREEDOM + freedom, (FREEDOM - 2) * self._prior()[1] + squares

    def state(self) -> PosteriorState:
        """State for a checkpoint."""
        rows = np.flatnonzero(self.seen >= 0)
        return {
            "rows": rows,
            "evidence": self.evidence[rows],
            "seen": self.seen[rows],
            "moments": self.moments.copy(),
            "weight": self.weight,
            "clock": self.clock,
            "values": self.values,
            "range": self.range,
        }

    def load(self, state: PosteriorState) -> None:
        rows, evidence, seen, moments = (np.asarray(state[name]) for name in ("rows", "evidence", "seen", "moments"))
        if evidence.shape != (len(rows), 4) or seen.shape != rows.shape or moments.shape != (2,):
            raise LookupError(f"evidence {evidence.shape} and seen {seen.shape} are not of rows {rows.shape}")
        self.evidence[rows], self.seen[rows], self.moments[:] = evidence, seen, moments
        self.weight, self.clock = state["weight"], state["clock"]
        self.values, self.range = list(state["values"]), state["range"]


def evidence_of(rewards: Floats) -> tuple[Floats, Floats]:
    """What groups say of their prompts' rewards.

    Args:
        rewards: (N, G), NaN where there is none.

    Returns:
        (N, 4): number and sum of valid rewards, degrees of freedom and squared deviations; and (N,) sample variances,
        0 with fewer than two rewards.

    >>> evidence, variances = evidence_of(np.array([[1.0, 0.0, np.nan], [np.nan, np.nan, 2.0]]))
    >>> evidence.tolist(), variances.tolist()
    ([[2.0, 1.0, 1.0, 0.5], [1.0, 2.0, 0.0, 0.0]], [0.5, 0.0])
    """
    valid = ~np.isnan(rewards)
    count = valid.sum(axis=1).astype(np.float64)
    known = np.where(valid, rewards, 0.0)
    total = known.sum(axis=1)
    means = total / np.maximum(count, 1)
    squares = np.where(valid, (known - means[:, None]) ** 2, 0.0).sum(axis=1)
    freedom = np.maximum(count - 1, 0)
    squares = np.where(freedom > 0, squares, 0.0)
    return np.stack([count, total, freedom, squares], axis=1), squares / np.maximum(freedom, 1)
