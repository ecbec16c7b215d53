"""How sure a share of so many trials is: exact binomial tails, and the bounds that follow from them."""

import math
from collections.abc import Callable
from functools import lru_cache

EPS = 1e-6  # of a hit: means of shares are not exact


@lru_cache(maxsize=2**16)
def at_least(hits: float, trials: int, chance: float) -> float:
    """The probability of so many hits or more; a fraction of a hit counts as a whole one.

    >>> at_least(2, 2, 0.5)
    0.25
    """
    return _sum(range(math.ceil(hits - EPS), trials + 1), trials, chance)


@lru_cache(maxsize=2**16)
def at_most(hits: float, trials: int, chance: float) -> float:
    """The probability of so many hits or fewer; a fraction of a hit counts as a whole one."""
    return _sum(range(math.ceil(hits - EPS) + 1), trials, chance)


@lru_cache(maxsize=2**16)
def lower_bound(hits: float, trials: int, alpha: float) -> float:
    """The share below which so many hits or more have at most probability `alpha` (Clopper and Pearson, 1934).

    >>> round(lower_bound(2, 2, 0.25), 3), lower_bound(0, 2, 0.25)
    (0.5, 0.0)
    """
    whole = math.floor(hits + EPS)
    return 0.0 if whole == 0 else _bisect(lambda share: at_least.__wrapped__(whole, trials, share) <= alpha)


@lru_cache(maxsize=2**16)
def upper_bound(hits: float, trials: int, alpha: float) -> float:
    """The share above which so many hits or fewer have at most probability `alpha`."""
    whole = math.ceil(hits - EPS)
    return 1.0 if whole >= trials else _bisect(lambda share: at_most.__wrapped__(whole, trials, share) > alpha)


def _bisect(is_below: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2


def _sum(counts: range, trials: int, chance: float) -> float:
    if chance in (0.0, 1.0):
        return float(round(chance * trials) in counts)
    log_hit, log_miss = math.log(chance), math.log1p(-chance)
    every = math.lgamma(trials + 1)
    terms = (
        math.exp(every - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * log_hit + (trials - k) * log_miss)
        for k in counts
    )
    return min(1.0, math.fsum(terms))
