"""Intervals and tests on few seeds: against loops, and how often they hold the truth."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from research.statistics import correlation_interval, holm, mean_band, mean_interval, power


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    """A part of the bootstrap's draws, which is enough to see what an interval holds."""
    monkeypatch.setattr("research.statistics.RESAMPLES", 400)


VALUES = [0.02, -0.01, 0.05, 0.03, 0.04]


def test_the_interval_of_a_mean_is_students():
    n, mean = len(VALUES), sum(VALUES) / len(VALUES)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in VALUES) / (n - 1))
    half = 2.7764451 * deviation / math.sqrt(n)  # t of 4 degrees of freedom, from a table
    found = mean_interval(VALUES)
    assert (found.low, found.value, found.high) == pytest.approx((mean - half, mean, mean + half), rel=1e-6)
    assert (found.side, found.n) == (1, 5)
    assert mean_interval(VALUES, expects="<").side == -1


def test_a_band_has_the_interval_of_the_mean_at_each_point():
    curves = np.random.default_rng(0).normal(size=(5, 7))
    curves[:, 3] = 0.25  # where all seeds agree, as before training
    intervals = [mean_interval(column) for column in curves.T]
    low, high = mean_band(curves)
    assert low == pytest.approx([one.low for one in intervals])
    assert high == pytest.approx([one.high for one in intervals])


@pytest.mark.parametrize("n", [2, 5, 10])
def test_equal_numbers_are_as_sure_as_their_signs_are(n):
    assert mean_interval([0.2] * n).p == pytest.approx(stats.binomtest(n, n).pvalue)
    assert mean_interval([0.0] * n).p == 1.0
    assert mean_interval([0.0] * n, expects="=").p == 0.0


@pytest.mark.parametrize("shift", [-0.03, 0.0, 0.011, 0.05])
def test_the_p_value_is_below_5_percent_where_the_interval_excludes_the_null(shift):
    found = mean_interval(np.array(VALUES) + shift)
    assert (found.p <= 0.05) == (not found.low <= 0 <= found.high)


@pytest.mark.parametrize(("values", "side", "significant"), [
    ([0.001, -0.002, 0.003, 0.0, 0.001], 1, True),  # all of the interval within
    ([0.02, -0.02, 0.03, -0.01, 0.0], 1, False),
    ([0.05, 0.06, 0.05, 0.055, 0.06], -1, True),  # all of it beyond
    ([-0.05, -0.06, -0.05, -0.055, -0.06], -1, True),
])  # fmt: skip
def test_equal_means_that_all_of_the_interval_is_within_the_margin(values, side, significant):
    found = mean_interval(values, expects="=", within=0.02)
    assert (found.side, found.p <= 0.05) == (side, significant)
    if significant:
        within = abs(found.low) <= 0.02 and abs(found.high) <= 0.02
        assert within if side == 1 else min(abs(found.low), abs(found.high)) >= 0.02


@pytest.mark.parametrize("level", [0.05, 0.01])
@pytest.mark.parametrize(
    ("expects", "within", "effect"), [(">", 0, 0.02), (">", 0, 0.0), ("<", 0, -0.03), ("=", 0.05, 0.01)]
)
def test_power_is_how_often_new_seeds_are_significant_as_expected(expects, within, effect, level):
    """Of ten seeds each, simulated; the two-sided test on the expected side is a one-sided one at half the level."""
    deviation = 0.04
    draws = np.random.default_rng(1).normal(effect, deviation, (20_000, 10))
    above = stats.ttest_1samp(draws, -within, axis=1, alternative="greater").pvalue <= level / 2
    below = stats.ttest_1samp(draws, within, axis=1, alternative="less").pvalue <= level / 2
    share = {">": above, "<": below, "=": above & below}[expects].mean()
    estimate = replace(mean_interval(draws[0]), error=deviation / math.sqrt(10))
    told = power(effect, estimate, level, expects, within)
    assert share - (0.06 if expects == "=" else 0.01) < told < share + 0.01  # a lower bound for "="


def test_power_is_unknown_without_a_standard_error():
    assert math.isnan(power(0.1, mean_interval([0.3]), 0.05))
    assert power(0.1, mean_interval(VALUES), 0.05) > power(0.05, mean_interval(VALUES), 0.05)


def test_a_single_seed_has_no_interval():
    found = mean_interval([0.3])
    assert found.value == 0.3 and math.isnan(found.low) and math.isnan(found.p)
    assert math.isnan(mean_interval([]).value)


def test_holm_is_the_closed_test_of_bonferroni():
    """Each hypothesis has the largest p-value, times its size, of ... all sets that it is in: by brute force."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        p = rng.uniform(0, 0.2, 4)
        by_sets = [
            max(
                min(1.0, len(members) * min(p[j] for j in members))
                for mask in range(1, 16)
                if i in (members := [j for j in range(4) if mask >> j & 1])
            )
            for i in range(4)
        ]
        assert holm(list(p)) == pytest.approx(by_sets)


def test_a_check_without_a_number_still_counts_as_a_comparison():
    adjusted = holm([0.02, math.nan])
    assert adjusted[0] == 0.04 and math.isnan(adjusted[1])


def test_the_correlation_is_spearmans():
    rng = np.random.default_rng(1)
    x, y, z = rng.integers(0, 5, (3, 60)).astype(float)  # with ties
    settings = [str(i // 5) for i in range(60)]
    assert correlation_interval(x, y, settings).value == pytest.approx(stats.spearmanr(x, y).statistic)
    than = correlation_interval(x, y, settings, than=z)
    naive = abs(stats.spearmanr(x, y).statistic) - abs(stats.spearmanr(z, y).statistic)
    assert than.value == pytest.approx(naive)
    assert than.low <= than.value <= than.high and than.n == 12


def test_further_seeds_of_few_settings_do_not_make_a_correlation_sure():
    """Ten seeds of five settings: each setting is one point, whatever its seeds."""
    rng = np.random.default_rng(2)
    at = rng.normal(size=(2, 5)).repeat(10, axis=1)
    x, y = at + 0.01 * rng.normal(size=at.shape)
    settings = [str(i // 10) for i in range(50)]
    alone = [str(i) for i in range(50)]
    clustered, single = (correlation_interval(x, y, names) for names in (settings, alone))
    assert clustered.high - clustered.low > 1.5 * (single.high - single.low)


def coverage(draw, interval, repeats=1500):
    """How often an interval holds 0, the true mean."""
    held = [low <= 0 <= high for low, high in (interval(draw()) for _ in range(repeats))]
    return sum(held) / repeats


def student(values):
    found = mean_interval(values)
    return found.low, found.high


def bootstrapped(method, rng):
    def interval(values):
        found = stats.bootstrap((values,), np.mean, n_resamples=399, method=method, rng=rng).confidence_interval
        return found.low, found.high

    return interval


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "held_by_bootstrap"), [(5, 0.87), (10, 0.94)])
def test_students_interval_holds_95_percent_where_the_bootstrap_does_not(seeds, held_by_bootstrap):
    """Paired differences of success on 1024 episodes between runs whose true success differs by 2 points or so."""
    rng = np.random.default_rng(seeds)

    def draw():
        truth = np.clip(rng.normal(0.6, 0.02, (2, seeds)), 0, 1)
        first, second = rng.binomial(1024, truth) / 1024
        return first - second

    assert 0.935 <= coverage(draw, student, 3000) <= 0.965
    for method in ("percentile", "BCa"):
        assert coverage(draw, bootstrapped(method, rng), 400) < held_by_bootstrap


@pytest.mark.slow
def test_no_interval_of_five_seeds_is_safe_where_one_run_in_five_collapses():
    """A limit that the page on experiments names: a third of all fives have no collapse to learn of."""
    rng = np.random.default_rng(3)

    def draw():
        first, second = rng.normal(0.6, 0.03, (2, 5))
        return first - 0.3 * (rng.random(5) < 0.2) - second + 0.06

    assert 0.7 < coverage(draw, student) < 0.85


@pytest.mark.full
def test_the_correlation_of_a_dozen_settings_is_held_in_95_percent():
    rng = np.random.default_rng(4)
    held, repeats, settings = 0, 120, [str(i // 5) for i in range(60)]
    x, y = rng.normal(size=(2, 2, 200_000))
    truth = stats.spearmanr(x[0] + 0.5 * x[1], 0.6 * x[0] + 0.8 * y[0] + 0.5 * y[1]).statistic
    for _ in range(repeats):
        u, v = rng.normal(size=(2, 12, 1))
        a, b = u + 0.5 * rng.normal(size=(12, 5)), 0.6 * u + 0.8 * v + 0.5 * rng.normal(size=(12, 5))
        found = correlation_interval(a.ravel(), b.ravel(), settings)
        held += found.low <= truth <= found.high
    assert held / repeats >= 0.91  # 95 % within two standard errors
