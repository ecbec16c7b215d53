"""Intervals and tests on few seeds.

What is compared is a number a seed, of two runs that have the seed in common. Five or ten such numbers are too few for
the percentile or the BCa bootstrap, whose intervals of nominally 95 % then hold the mean in some 82 % (5 seeds) and
91 % (10) of all cases, where Student's t holds it in 95 % (`tests/research/test_experiment_statistics.py`). Rank
correlations over the settings of a sweep, which are more, have the bootstrap.

    >>> found = mean_interval([0.02, 0.05, 0.03, 0.04, 0.01])
    >>> f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"
    '0.030 (0.010 to 0.050)'
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class IntervalEstimate:
    """A number with its 95 % interval.

    Args:
        value: The estimate.
        low, high: Bounds; NaN where there are too few numbers for them.
        p: Two-sided p-value that belongs to `side`; NaN likewise.
        side: Of what was to be shown: 1 on it, -1 opposite, by the estimate alone.
        n: Independent numbers that it rests on: seeds, or settings for correlations.
        error: Standard error on the scale of the test, which is that of logarithms for ratios; NaN as `low`.
        bound: Where runs never got to what they were to reach: `"<="` or `">="` if the number can only be smaller or
            larger than it is here, `"?"` if either.
    """

    value: float
    low: float
    high: float
    p: float
    side: int
    n: int
    error: float = math.nan
    bound: str = ""


def mean_interval(values: ArrayLike, null: float = 0.0, expects: str = ">", within: float = 0.0) -> IntervalEstimate:
    """The mean of a number a seed with Student's t interval, and how sure its side of `null` is.

    Args:
        values: (n,) finite numbers.
        null: What the mean is compared with.
        expects: `">"`, `"<"`, or `"="`: at most `within` from `null`, for which all of the interval must lie there
            (two one-sided tests, at half the level each).
        within: The margin of `"="`.
    """
    numbers = np.asarray(values, dtype=float) - null
    n = len(numbers)
    if n == 0:
        return IntervalEstimate(math.nan, math.nan, math.nan, math.nan, 0, 0)
    mean = float(numbers.mean())
    side = _side(mean, expects, within)
    if n == 1:
        return IntervalEstimate(mean + null, math.nan, math.nan, math.nan, side, 1)
    if np.ptp(numbers) <= 1e-12 * max(1.0, abs(mean)):  # equal to rounding, for which the test is not defined
        low = high = mean
        p = _p_of_constant(mean, n, expects)
    else:
        low, high = stats.ttest_1samp(numbers, 0.0).confidence_interval(CONFIDENCE)
        p = _p_of_mean(numbers, mean, expects, within)
    error = float(numbers.std(ddof=1)) / math.sqrt(n)
    return IntervalEstimate(mean + null, float(low) + null, float(high) + null, p, side, n, error)


def mean_band(curves: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The bounds of `mean_interval` at each point of some curves.

    Args:
        curves: (n, points) finite numbers, a row a seed, n >= 2.

    Returns:
        low, high: (points,) each.
    """
    rows = np.asarray(curves, dtype=float)
    mean, error = rows.mean(axis=0), stats.sem(rows, axis=0)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(rows) - 1) * error
    return mean - half, mean + half


def _p_of_constant(mean: float, n: int, expects: str) -> float:
    """Of equal numbers, that they have a sign: the exact sign test's. Runs that are bit for bit alike are equal."""
    if expects == "=":
        return 0.0
    return 1.0 if mean == 0 else 2.0 ** (1 - n)


def _side(mean: float, expects: str, within: float) -> int:
    if expects == "=":
        return 1 if abs(mean) <= within else -1
    return int(np.sign(mean)) * (1 if expects == ">" else -1)


def _p_of_mean(numbers: NDArray[np.float64], mean: float, expects: str, within: float) -> float:
    if expects != "=":
        return float(stats.ttest_1samp(numbers, 0.0).pvalue)
    if abs(mean) <= within:  # both bounds must be excluded
        below = stats.ttest_1samp(numbers, within, alternative="less").pvalue
        above = stats.ttest_1samp(numbers, -within, alternative="greater").pvalue
        return min(1.0, 2 * float(max(below, above)))
    beyond = "greater" if mean > 0 else "less"
    return min(1.0, 2 * float(stats.ttest_1samp(numbers, math.copysign(within, mean), alternative=beyond).pvalue))


def correlation_interval(
    x: ArrayLike,
    y: ArrayLike,
    settings: Sequence[str],
    expects: str = ">",
    than: ArrayLike | None = None,
    seed: int = 0,
) -> IntervalEstimate:
    """Spearman's correlation over runs, with the interval of a bootstrap in two levels.

    Runs of one setting are alike: settings are drawn, and then seeds of each, so that the interval says what further
    settings would show and not only further seeds. With nine settings of five seeds, settings alone would hold 93 %.

    Args:
        x, y: (runs,) finite numbers.
        settings: (runs,) which setting a run belongs to; there should be a dozen or more.
        expects: The side of 0 that was to be shown, `">"` or `"<"`.
        than: (runs,) another predictor: the estimate is then |Spearman of x and y| less |Spearman of than and y|.
        seed: Of the bootstrap.
    """
    columns = [np.asarray(one, dtype=float) for one in (x, y, *(() if than is None else (than,)))]
    names, which = np.unique(np.asarray(settings, dtype=str), return_inverse=True)
    order, counts = np.argsort(which, kind="stable"), np.bincount(which)
    starts = np.cumsum(counts) - counts  # of the runs of each setting in `order`
    value = _correlation(columns)
    side = 0 if math.isnan(value) else _side(value, expects, 0.0)
    if len(names) < 4 or math.isnan(value):
        return IntervalEstimate(value, math.nan, math.nan, math.nan, side, len(names))

    rng = np.random.default_rng(seed)

    def of_settings(drawn: NDArray[np.int64]) -> float:
        several = counts[drawn].repeat(counts[drawn])
        seeds = (rng.random(len(several)) * several).astype(int)
        rows = order[starts[drawn].repeat(counts[drawn]) + seeds]
        return _correlation([column[rows] for column in columns])

    with warnings.catch_warnings():  # of draws without an order, which are left out below
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        found = stats.bootstrap(
            (np.arange(len(names)),),
            of_settings,
            n_resamples=RESAMPLES,
            vectorized=False,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=rng,
        )
    drawn = found.bootstrap_distribution
    drawn = drawn[~np.isnan(drawn)]  # of one setting alone, drawn again and again, whose numbers are all the same
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    beyond = min((drawn <= 0).sum(), (drawn >= 0).sum())
    p = min(1.0, 2 * (beyond + 1) / (len(drawn) + 1))
    return IntervalEstimate(value, float(low), float(high), float(p), side, len(names), float(drawn.std(ddof=1)))


def power(effect: float, estimate: IntervalEstimate, level: float, expects: str = ">", within: float = 0.0) -> float:
    """Chance that a new set of as many seeds is significant on the expected side, by the noncentral t distribution.

    A bootstrap over settings is taken for a t test with a degree of freedom for each setting but one.

    Args:
        effect: The true mean less what it is compared with.
        estimate: Whose standard error and number of seeds the new set has.
        level: Of the two-sided test.
        expects, within: As in `mean_interval`. For `"="` the chance is a lower bound: one less the chances that either
            side fails.

    >>> ten = IntervalEstimate(0.07, 0.04, 0.10, 0.001, 1, 10, error=0.0445 / 10**0.5)
    >>> f"{power(0.02, ten, 0.05):.2f} {power(0.02, ten, 0.05 / 17):.2f}"
    '0.25 0.03'
    """
    if not estimate.error > 0:
        return math.nan
    of_freedom = estimate.n - 1
    needed = stats.t.ppf(1 - level / 2, of_freedom)

    def beyond(distance: float) -> float:
        return float(stats.nct.sf(needed, of_freedom, distance / estimate.error))

    if expects == "=":
        return max(0.0, beyond(within + effect) + beyond(within - effect) - 1)
    return beyond(effect if expects == ">" else -effect)


def _correlation(columns: Sequence[NDArray[np.float64]]) -> float:
    """Of the first two; with a third, by how much the first is closer to the second than that is."""
    x, y, *others = [stats.rankdata(column) for column in columns]
    first = _pearson(x, y)
    return abs(first) - abs(_pearson(others[0], y)) if others else first


def _pearson(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale > 0 else math.nan


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: those below 0.05 hold together with 95 % confidence. NaN counts as a comparison.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda i: math.inf if math.isnan(p_values[i]) else p_values[i])
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, i in enumerate(order):
        if not math.isnan(p_values[i]):
            largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
            adjusted[i] = largest
    return adjusted
