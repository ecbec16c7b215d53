"""Regimes: from retrieval and entropy to the names of RAGEN-2, and how sure that is."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen2_trl.instrument.information import chance_p_value, classify_regime


def retrieved(hits: float, trials: int, chance: float, entropy: float = 1.0) -> dict[str, float]:
    return {
        "retrieval_accuracy": hits / trials,
        "retrieval_chance": chance,
        "num_completions": float(trials),
        "conditional_entropy_token": entropy,
    }


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.01, 0.9))
def test_p_value_is_the_upper_tail_of_the_binomial(counts, chance):
    hits, trials = counts
    tail = sum(math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(hits, trials + 1))
    assert chance_p_value(retrieved(hits, trials, chance)) == pytest.approx(tail, rel=1e-9)


def test_p_value_of_a_fraction_of_a_hit_is_that_of_the_next_whole_one():
    assert chance_p_value(retrieved(2.5, 8, 0.25)) == chance_p_value(retrieved(3, 8, 0.25))


def test_p_value_of_thousands_of_reasonings_is_finite():
    assert chance_p_value(retrieved(100, 6400, 1 / 64)) == pytest.approx(0.513, abs=0.02)
    assert 0.0 <= chance_p_value(retrieved(6400, 6400, 1 / 64)) < 1e-12


REGIMES = [
    (40, 1.0, "diverse"),
    (1, 1.0, "template_collapse"),
    (40, 0.05, "compressed"),
    (1, 0.05, "low_entropy_collapse"),
]


@pytest.mark.parametrize(("hits", "entropy", "regime"), REGIMES)
def test_regime_without_a_start_follows_significance_and_an_absolute_entropy(hits, entropy, regime):
    assert classify_regime(retrieved(hits, 64, 1 / 64, entropy)) == regime


@pytest.mark.parametrize(("hits", "entropy", "regime"), REGIMES)
def test_regime_with_a_start_follows_what_is_left_of_it(hits, entropy, regime):
    start = retrieved(50, 64, 1 / 64, entropy=0.6)
    assert classify_regime(retrieved(hits, 64, 1 / 64, entropy), start) == regime


def test_entropy_is_low_relative_to_the_start_of_the_run():
    now = retrieved(40, 64, 1 / 64, entropy=0.3)
    assert classify_regime(now, retrieved(40, 64, 1 / 64, entropy=0.61)) == "compressed"
    assert classify_regime(now, retrieved(40, 64, 1 / 64, entropy=0.59)) == "diverse"
    assert classify_regime(retrieved(40, 64, 1 / 64, 0.05), retrieved(40, 64, 1 / 64, 0.09)) == "diverse"


def test_faint_but_significant_dependence_is_collapse():
    start, faint = retrieved(1800, 2000, 0.1), retrieved(300, 2000, 0.1)
    assert chance_p_value(faint) < 1e-6
    assert classify_regime(faint) == "diverse"
    assert classify_regime(faint, start) == "template_collapse"
    assert classify_regime(faint, start, dependence_ratio=0.05) == "diverse"


def test_half_of_the_dependence_above_chance_is_enough():
    start = retrieved(900, 1000, 0.2)
    assert classify_regime(retrieved(551, 1000, 0.2), start) == "diverse"
    assert classify_regime(retrieved(549, 1000, 0.2), start) == "template_collapse"


@pytest.mark.parametrize("start", [None, retrieved(50, 64, 0.25), retrieved(10, 64, 0.25)])
def test_retrieval_at_chance_is_collapse(start):
    assert classify_regime(retrieved(16, 64, 0.25), start) == "template_collapse"


def test_insignificant_dependence_is_collapse_however_weak_the_start_was():
    weak = retrieved(20, 64, 0.25)
    assert classify_regime(weak, weak) == "template_collapse"
    assert classify_regime(weak, weak, alpha=0.5) == "diverse"


def test_regime_of_metrics_that_are_missing_is_an_error():
    with pytest.raises(KeyError, match="conditional_entropy_token"):
        classify_regime({"retrieval_accuracy": 1.0, "retrieval_chance": 0.5, "num_completions": 9.0})
