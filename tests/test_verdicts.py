"""Verdicts: what may be said of measurements, what may not, and how often that is wrong."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen2_trl.instrument.findings import reasoning_finding
from ragen2_trl.instrument.information import information_metrics
from ragen2_trl.instrument.verdict import (
    ALPHA,
    Evidence,
    above_chance,
    at_least,
    at_most,
    begins,
    chance_p_value,
    judge,
    lower_bound,
    upper_bound,
)


def false_collapses(prompts, traces, retrieval, runs=400, length=20):
    """Share of simulated runs with a collapse in their history, where retrieval is the same all along."""
    generator = np.random.default_rng([prompts, traces, round(1000 * retrieval)])
    hits = generator.binomial(traces, max(retrieval, 1 / prompts), size=(runs, length))
    judged = (judge([measured(count, traces, 1 / prompts, step=2 + t) for t, count in enumerate(row)]) for row in hits)
    return np.mean([any(one.is_collapsed for one in run) for run in judged])


def measured(hits, trials, chance, entropy=1.0, step=None, mi=0.0, **others):
    metrics = {
        "retrieval_accuracy": hits / trials,
        "retrieval_chance": chance,
        "num_completions": float(trials),
        "mi_seq": mi,
        "mi_upper_bound": math.log(1 / chance),
        "conditional_entropy_token": entropy,
    }
    updates = None if step is None else step - 1
    return Evidence.of(metrics, **{"step": step, "updates": updates, **others})


def run_of(*hits, trials=64, chance=1 / 16, **others):
    """A measurement with so many hits at each of the steps 1, 11, 21, …"""
    return [measured(count, trials, chance, step=1 + 10 * number, **others) for number, count in enumerate(hits)]


def regimes(measurements):
    return [finding.regime for finding in judge(measurements)]


# Counts


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.01, 0.9))
def test_tails_are_those_of_the_binomial(counts, chance):
    hits, trials = counts
    terms = [math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(trials + 1)]
    assert at_least(hits, trials, chance) == pytest.approx(sum(terms[hits:]), rel=1e-9)
    assert at_most(hits, trials, chance) == pytest.approx(sum(terms[: hits + 1]), rel=1e-9)
    metrics = {"retrieval_accuracy": hits / trials, "retrieval_chance": chance, "num_completions": float(trials)}
    assert chance_p_value(metrics) == at_least(hits / trials * trials, trials, chance)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_bounds_are_where_the_tails_become_improbable(counts):
    hits, trials = counts
    low, high = lower_bound(hits, trials, ALPHA), upper_bound(hits, trials, ALPHA)
    assert (low == 0.0) == (hits == 0) and (high == 1.0) == (hits == trials)
    assert low <= hits / trials <= high
    if hits:
        assert at_least(hits, trials, low) == pytest.approx(ALPHA, rel=1e-6)
    if hits < trials:
        assert at_most(hits, trials, high) == pytest.approx(ALPHA, rel=1e-6)


def test_p_value_of_a_fraction_of_a_hit_is_that_of_the_next_whole_one():
    assert at_least(2.5, 8, 0.25) == at_least(3, 8, 0.25)


def test_p_value_of_thousands_of_reasoning_traces_is_finite():
    assert at_least(100, 6400, 1 / 64) == pytest.approx(0.513, abs=0.02)
    assert 0.0 <= at_least(6400, 6400, 1 / 64) < 1e-12


# One measurement


@pytest.mark.parametrize(("prompts", "traces", "enough"), [(2, 4, 7), (2, 6, 7), (3, 3, 5)])
def test_full_retrieval_of_too_few_traces_is_no_verdict_and_says_how_many_would_do(prompts, traces, enough):
    (finding,) = judge([measured(traces, traces, 1 / prompts)])
    assert (finding.regime, finding.enough) == ("inconclusive", enough)
    assert f" {enough} " in reasoning_finding([finding]).sentence
    (told,) = judge([measured(enough, enough, 1 / prompts)])
    assert told.regime == "diverse"


@given(st.integers(2, 64), st.integers(1, 64).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_what_would_do_does(prompts, counts):
    hits, trials = counts
    (finding,) = judge([measured(hits, trials, 1 / prompts)])
    if finding.regime == "inconclusive":
        assert trials < finding.enough < 1000
        more = measured(hits / trials * finding.enough, finding.enough, 1 / prompts)
        assert judge([more])[0].regime in ("diverse", "independent")


def test_a_little_above_chance_with_few_traces_is_no_verdict():
    """SmolLM2 on Sokoban, untrained: 31 %, p = 0.041."""
    finding = judge([measured(5, 16, 1 / 8, step=1)])[0]
    assert finding.evidence.p_value == pytest.approx(0.041, abs=0.005)
    assert finding.regime == "inconclusive"


def test_retrieval_at_chance_is_no_collapse_and_before_training_it_is_not_yet():
    (alone,) = judge([measured(4, 64, 1 / 16)])
    assert alone.regime == "independent"
    assert " yet " not in reasoning_finding([alone]).sentence
    found = judge(run_of(4, 4, 5, 3))
    assert [finding.regime for finding in found] == ["independent"] * 4
    said = reasoning_finding(found)
    assert (said.name, said.severity, said.since, said.advice) == ("independent", "note", None, ())
    assert " yet " in said.sentence
    assert not begins(found)


@pytest.mark.parametrize(("entropy", "regime"), [(1.0, "diverse"), (0.05, "compressed")])
def test_entropy_is_low_by_an_absolute_bound_where_there_is_no_run(entropy, regime):
    assert regimes([measured(40, 64, 1 / 64, entropy)]) == [regime]


def test_a_measurement_without_a_metric_is_an_error():
    with pytest.raises(KeyError, match="mi_seq"):
        Evidence.of({"retrieval_accuracy": 1.0, "retrieval_chance": 0.5, "num_completions": 9.0})


# Completions of other prompts or another model


def test_completions_under_shuffled_prompts_are_called_foreign_and_not_collapsed():
    own = torch.full((16, 8), -60.0)
    own[torch.arange(16), (torch.arange(16) + 1) % 8] = -10.0
    metrics = information_metrics(own, torch.full((16,), 20), torch.arange(16) % 8)
    assert metrics["mi_seq"] == pytest.approx(-50 + math.log(8))
    (finding,) = judge([Evidence.of(metrics)])
    assert finding.regime == "foreign"
    assert (reasoning_finding([finding]).name, reasoning_finding([finding]).severity) == ("foreign", "warning")


def test_a_shift_of_columns_in_a_run_warns_once_and_is_neither_a_collapse_nor_its_end():
    healthy, foreign = measured(60, 64, 1 / 16), {"mi": -40.0}
    steps = [measured(60, 64, 1 / 16, step=1), *(measured(0, 64, 1 / 16, step=s, **foreign) for s in (11, 21, 31))]
    assert regimes(steps) == ["diverse", "foreign", "foreign", "foreign"]
    assert [begins(judge(steps[:count])) for count in range(1, 5)] == [False, True, False, False]
    assert regimes([*steps, measured(60, 64, 1 / 16, step=41)])[-1] == "diverse"
    assert healthy.is_foreign is False


def test_of_a_models_own_completions_hardly_any_measurement_is_foreign():
    """Sampled from p(z|x_i) over ten texts: the sum of I is below log(a) with at most the probability a."""
    generator = np.random.default_rng(0)
    foreign = below = 0
    for _ in range(100):
        logits = generator.normal(0, 3, size=(8, 10))
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)  # (prompts, texts)
        index = np.arange(16) % 8
        texts = [generator.choice(10, p=probabilities[i]) for i in index]
        logps = torch.tensor(np.log(probabilities[:, texts].T), dtype=torch.float32)
        evidence = Evidence.of(information_metrics(logps, torch.ones(16, dtype=torch.long), torch.tensor(index)))
        foreign += evidence.is_foreign
        below += evidence.mi_seq * 16 < math.log(0.2)
    assert foreign == 0
    assert below <= 0.2 * 100


# Runs


def test_a_run_that_rises_from_chance_is_never_warned_of():
    """RLOO, 8 reasoning traces, chance 25 %: 3 hits, then 4.5 of them."""
    rising = [measured(3, 8, 0.25, step=1), measured(4.5, 8, 0.25, step=2)]
    assert not any(begins(judge(rising[:count])) for count in (1, 2))
    assert not any(finding.is_collapsed for finding in judge(rising))


def test_collapse_is_said_of_a_run_that_has_depended_and_whose_upper_bound_has_come_down():
    found = judge(run_of(60, 61, 8, 6, 5))
    assert [finding.regime for finding in found] == ["diverse", "diverse", "weaker", *["template_collapse"] * 2]
    assert (found[-1].since, found[-1].best.step) == (21, 11)
    assert found[-1].upper == upper_bound(19, 192, ALPHA) < 0.2
    assert (reasoning_finding(found).name, reasoning_finding(found).since) == ("template_collapse", 21)
    assert [begins(found[:count]) for count in range(1, 6)] == [False, False, False, True, False]


def test_a_collapse_has_its_numbers_and_what_qualifies_them():
    qualifiers = {"valid_thinking_rate": 0.92, "success": 0.4, "clipped_ratio": 0.03}
    said = reasoning_finding(judge(run_of(60, 6, 5, mi=0.05, **qualifiers)))
    assert (said.name, said.severity, said.since) == ("template_collapse", "warning", 11)
    expected = {"retrieval_accuracy": 5 / 64, "retrieval_chance": 1 / 16, "best_retrieval_accuracy": 60 / 64}
    expected |= {"retrieval_accuracy_at_most": upper_bound(11, 128, ALPHA), "mi_seq": 0.05, **qualifiers}
    assert {name: said.numbers[name] for name in expected} == pytest.approx(expected)
    assert said.advice and all(line in said.text for line in said.advice)


def test_half_of_the_dependence_is_no_collapse_and_a_faint_rest_of_it_is():
    chance, best = 0.1, lower_bound(1800, 2000, 0.001)
    half = chance + 0.5 * above_chance(best, chance) * 0.9
    faint = [measured(round(2000 * share), 2000, chance, step=s) for s, share in ((1, 0.9), (2, 0.15), (3, 0.15))]
    kept = [measured(round(2000 * share), 2000, chance, step=s) for s, share in ((1, 0.9), (2, half), (3, half))]
    assert faint[-1].p_value < 1e-6
    assert regimes(faint)[-1] == "template_collapse"
    assert "collapse" not in " ".join(regimes(kept))


def test_entropy_tells_the_collapses_apart_by_the_start_of_the_run():
    steps = [measured(60, 64, 1 / 16, 0.6, step=1), *(measured(5, 64, 1 / 16, 0.2, step=s) for s in (2, 3))]
    assert regimes(steps)[-1] == "low_entropy_collapse"
    assert not begins(judge(steps))
    assert (reasoning_finding(judge(steps)).name, reasoning_finding(judge(steps)).since) == ("low_entropy_collapse", 2)
    assert regimes([steps[0], measured(60, 64, 1 / 16, 0.29, step=2)])[-1] == "compressed"
    assert regimes([steps[0], measured(60, 64, 1 / 16, 0.31, step=2)])[-1] == "diverse"


def test_a_collapse_is_warned_of_once_however_often_entropy_crosses_its_bound():
    entropies = (1.0, 0.4, 0.4, 0.6, 0.4, 0.6)
    steps = [measured(60 if t == 0 else 4, 64, 1 / 16, entropy, step=1 + t) for t, entropy in enumerate(entropies)]
    collapsing = ["low_entropy_collapse", "template_collapse"] * 2
    assert regimes(steps) == ["diverse", "weaker", *collapsing]
    assert [begins(judge(steps[:count])) for count in range(3, 7)] == [False, True, False, False]


def test_nothing_collapses_before_the_first_update():
    idle = [measured(hits, 64, 1 / 16, step=s, updates=0) for s, hits in ((1, 60), (2, 4), (3, 4), (4, 4))]
    assert not any(finding.is_collapsed for finding in judge(idle))
    moved = [*idle, *(measured(4, 64, 1 / 16, step=s, updates=1) for s in (5, 6))]
    assert judge(moved)[-1].since == 5


def test_measurements_that_could_not_have_come_out_otherwise_end_nothing():
    """After 64 reasoning traces that depend, two of two prompts: none of both is retrieved, again and again."""
    few = [measured(0, 2, 0.5, step=s) for s in (2, 3)]
    assert not any(finding.is_collapsed for finding in judge([measured(64, 64, 0.5, step=1), *few]))
    start = [measured(4, 4, 0.5, step=1), measured(3, 4, 0.5, step=2), measured(0, 4, 0.5, step=3)]
    assert regimes(start) == ["inconclusive"] * 3


def test_an_episode_ends_and_a_later_one_is_another():
    found = judge(run_of(60, 4, 4, 60, 60, 4, 4))
    assert [begins(found[:count]) for count in range(1, 8)] == [False] * 2 + [True] + [False] * 3 + [True]
    assert (
        reasoning_finding(found[:5]).name == "recovered" and "step 11 to 21" in reasoning_finding(found[:5]).sentence
    )
    assert [one.since for one in found] == [None, None, 11, None, None, None, 51]


@pytest.mark.parametrize(
    ("valid", "cut", "said"),
    [
        (0.0, 0.0, "What the model writes depends on its prompt (no closed think tag: what was"),
        (0.0, None, "What the model writes depends on its prompt (no closed think tag: what was"),
        (0.0, 0.875, "What the model writes depends on its prompt (no closed think tag, 88% of completions cut at"),
        (0.4, 0.875, "Reasoning depends on its prompt"),
        (None, 0.875, "Reasoning depends on its prompt"),
    ],
)
def test_a_model_that_closes_no_reasoning_is_not_said_to_reason_nor_to_have_no_tags(valid, cut, said):
    gibberish = measured(60, 64, 1 / 16, 3.8, valid_thinking_rate=valid, success=0.0, clipped_ratio=cut)
    found = reasoning_finding(judge([gibberish]))
    assert found.sentence.startswith(said) and (valid == 0.0) == ("was scored to its end" in found.sentence)
    known = {"valid_thinking_rate": valid, "success": 0.0, "clipped_ratio": cut}
    assert {name: found.numbers.get(name) for name in known} == known


# How often that is wrong


@pytest.mark.slow
def test_hardly_any_run_in_which_nothing_changes_is_said_to_collapse():
    """400 seeds, prompts and reasoning traces from 2 to 64, retrieval of 1.0, 0.5 and chance; 20 measurements."""
    sizes = (2, 8, 64)
    for prompts, traces, retrieval in itertools.product(sizes, sizes, (1.0, 0.5, 0.0)):
        assert false_collapses(prompts, traces, retrieval) < 0.01
