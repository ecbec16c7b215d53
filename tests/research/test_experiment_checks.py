"""Checks and verdicts: from runs whose truth is known, against loops over them."""

import json
import math
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from research.checks import Result, evaluate, validate, verdict
from research.grid import Grid, Notes, pairs
from research.measures import FinishedRun, MetricCurve
from research.plan import Experiment
from research.statistics import IntervalEstimate, mean_interval, power
from research.store import SEVERAL

STEPS = np.array([0.0, 50.0, 100.0])
FILTER, NONE = {"method": "filter"}, {"method": "none"}
GAIN = {"name": "gain", "kind": "difference", "statistic": "success/last", "of": FILTER, "against": NONE,
        "expects": ">"}  # fmt: skip
PRIMARY = {**GAIN, "primary": True, "true_effect": 0.1}


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    """A tenth of the bootstrap's draws: effects here are large."""
    monkeypatch.setattr("research.statistics.RESAMPLES", 200)


def make_grid(checks, number, axes=None, seeds=(1, 2, 3, 4, 5), skip=(), without=(), others=(), name="try"):
    """A grid whose runs end at the success `number` gives for levels and seed; `without`: (levels, seed) not there."""
    axes = axes or {"method": {"none": {}, "filter": {"snr_value": 0.9}}}
    axes = {axis: {level: {f"{axis}_{level}": 1} for level in levels} for axis, levels in axes.items()}
    experiment = Experiment(
        name, "A claim.", "Table 0", (), tuple(seeds), tuple(checks), date(2026, 1, 1), axes=axes, skip=tuple(skip),
        others=tuple(one.experiment for one in others), path=Path(f"{name}.yaml"),
    )  # fmt: skip
    if others:
        planned_runs = [planned for one in others for planned in one.planned_runs]
        return Grid(experiment, planned_runs, {k: v for one in others for k, v in one.runs.items()}, others)
    grid = Experiment.planned_runs(replace(experiment, base=()))
    runs = {}
    for planned in grid:
        if (planned.levels, planned.seed) not in without:
            made = number(planned.levels, planned.seed)
            runs[planned.key] = made if isinstance(made, FinishedRun) else make_run(planned, made)
            runs[planned.key] = replace(runs[planned.key], key=planned.key, seed=planned.seed, levels=planned.levels)
    return Grid(experiment, grid, runs)


def make_run(planned=None, end=0.6, curves=None, done=100, rate=1.0):
    found = {
        "eval/env/frozen_lake/success": MetricCurve(STEPS, np.array([0.4, (0.4 + end) / 2, end])),
        "cost/seconds": MetricCurve(STEPS, rate * STEPS),
        **{name: MetricCurve(STEPS, np.array(values)) for name, values in (curves or {}).items()},
    }
    return FinishedRun(planned.key if planned else "", 1, {}, 100, done, found, {})


def noise(levels, seed):
    return 0.01 * math.sin(7 * seed + 3 * len(str(levels)))


def test_a_difference_is_paired_over_seeds_and_averaged_over_the_other_axes():
    axes = {"method": ["none", "filter"], "slip": ["0.0", "0.2"]}

    def number(levels, seed):
        gain = {"0.0": 0.05, "0.2": 0.01}[levels["slip"]] if levels["method"] == "filter" else 0.0
        return 0.5 + 0.1 * seed + gain + noise(levels, seed)  # seeds differ much more than methods

    grid = make_grid([GAIN, {**GAIN, "of": {**FILTER, "slip": "0.2"}}], number, axes)
    both, noisy = evaluate(grid)
    naive = {
        slip: [
            number({"method": "filter", "slip": slip}, seed) - number({"method": "none", "slip": slip}, seed)
            for seed in range(1, 6)
        ]
        for slip in axes["slip"]
    }
    assert both.estimate.value == pytest.approx(mean(naive["0.0"] + naive["0.2"]))
    by_seed = mean_interval([mean(two) for two in zip(*naive.values(), strict=True)])
    assert (both.estimate.low, both.estimate.high) == pytest.approx((by_seed.low, by_seed.high))
    assert noisy.estimate.value == pytest.approx(mean(naive["0.2"]))
    assert (both.unit, both.seeds, both.finding) == ("points", 5, 1)


def test_combinations_that_are_left_out_have_no_pair():
    axes = {"method": ["none", "filter"], "slip": ["0.0", "0.2"]}
    grid = make_grid([GAIN], lambda levels, seed: 0.5, axes, skip=[{"method": "none", "slip": "0.2"}])
    assert pairs(grid, FILTER, NONE) == [({"method": "filter", "slip": "0.0"}, {"method": "none", "slip": "0.0"})]


def test_a_seed_with_a_run_missing_is_left_out_and_told():
    grid = make_grid([PRIMARY], lambda levels, seed: 0.5 + noise(levels, seed), without=[(FILTER, 4)])
    (result,) = evaluate(grid)
    assert result.seeds == 4
    assert result.notes.sentences() == ["1 run not there: method filter, seed 4."]
    assert verdict(grid, [result]).endswith("so far (9 of 10 runs)")


def test_a_run_that_ended_early_and_one_without_the_metric_are_told():
    def number(levels, seed):
        run = make_run(end=0.5 + noise(levels, seed), done=50 if (levels, seed) == (FILTER, 2) else 100)
        return replace(run, curves={}) if (levels, seed) == (NONE, 3) else run

    (result,) = evaluate(make_grid([GAIN], number))
    assert result.seeds == 4
    early, without = result.notes.sentences()
    assert "1 run ended before the planned steps" in early and "method filter, seed 2" in early
    assert "2 runs left out of a check, for want of a number" in without
    assert "method none, seed 3" in without


def test_a_trend_is_the_slope_of_the_gain_seed_by_seed():
    axes = {"method": ["none", "filter"], "slip": ["0.0", "0.2", "0.6"]}

    def number(levels, seed):
        gain = 0.05 - 0.1 * float(levels["slip"]) * seed / 3 if levels["method"] == "filter" else 0
        return 0.4 + 0.02 * seed + gain

    check = {**GAIN, "kind": "trend", "axis": "slip", "expects": "<"}
    (result,) = evaluate(make_grid([check], number, axes))
    assert result.estimate.value == pytest.approx(-0.1)  # at the mean seed, 3
    assert result.finding == 1


def test_a_mean_is_of_all_runs_less_another_statistic_of_theirs():
    check = {"name": "m", "kind": "mean", "statistic": "success/last", "minus": "success/first", "expects": ">"}
    (result,) = evaluate(make_grid([check], lambda levels, seed: 0.5 + 0.01 * seed))
    assert result.estimate.value == pytest.approx(0.13)


def test_a_ratio_is_that_of_logarithms():
    def number(levels, seed):
        return make_run(rate=(0.5 + 0.001 * (seed - 3) if levels == FILTER else 1.0) * (1 + 0.1 * seed))

    check = {**GAIN, "kind": "ratio", "statistic": "seconds/last", "expects": "<"}
    (result,) = evaluate(make_grid([check], number))
    assert result.estimate.value == pytest.approx(0.5, rel=1e-4) and result.unit == "ratio" and result.finding == 1


def test_runs_are_apart_by_their_farthest_parameter_as_a_power_of_ten():
    def number(levels, seed):
        weights = [1.0, 2.0 + (10.0 ** (-6 + 0.1 * (seed - 3)) if levels == FILTER else 0.0)]
        own = {f"weights/{n:03}": [0.0, 0.0, value] for n, value in enumerate(weights)}
        return make_run(curves=own)

    check = {"name": "same", "kind": "apart", "of": FILTER, "against": NONE, "than": -3, "expects": "<"}
    (result,) = evaluate(make_grid([check], number))
    assert result.estimate.value == pytest.approx(-6, abs=1e-4) and result.finding == 1
    (result,) = evaluate(make_grid([{**check, "than": -7}], number))
    assert result.finding == -1
    (result,) = evaluate(make_grid([check], lambda levels, seed: make_run()))
    assert result.seeds == 0


def test_what_never_reached_its_target_is_a_lower_bound_that_decides_nothing_in_its_favour():
    """The filter never gets there, in less time than the other needs: cheap failures are no success."""

    def number(levels, seed):
        filtered = levels == FILTER
        return make_run(end=0.5 if filtered else 0.62 + 0.001 * seed, rate=0.1 if filtered else 1.0)

    check = {**GAIN, "kind": "ratio", "statistic": "seconds_to_reach", "target": 0.6, "expects": "<"}
    (result,) = evaluate(make_grid([check], number))
    assert result.estimate.value < 1 and result.finding == 0
    assert "5 runs of method filter never reached the target" in result.notes.others[-1]
    assert result.notes.others[-1].endswith("the ratio can only be larger.")
    assert result.estimate.bound == ">=" and result.shown.startswith(">= 0.1")
    (result,) = evaluate(make_grid([{**check, "of": NONE, "against": FILTER}], number))
    assert result.estimate.bound == "<="
    (result,) = evaluate(make_grid([{**check, "target": 0.7}], number))  # neither gets there
    assert result.estimate.bound == "?" and result.finding == 0
    (result,) = evaluate(make_grid([{**check, "target": 0.5}], number))  # both do
    assert result.estimate.bound == "" and "never" not in " ".join(result.notes.others)


def test_a_target_may_be_the_end_of_another_run_of_the_seed():
    check = {**GAIN, "kind": "ratio", "statistic": "steps_to_reach", "target": NONE, "expects": "<"}
    (result,) = evaluate(make_grid([check], lambda levels, seed: 0.8 if levels == FILTER else 0.5 + 0.01 * seed))
    naive = [100 * (0.1 + 0.01 * seed) / 0.4 / 100 for seed in range(1, 6)]  # of the steps, on a straight line
    assert result.estimate.value == pytest.approx(math.exp(mean(map(math.log, naive))))


def test_success_at_an_equal_cost_ends_where_the_cheaper_run_did():
    def number(levels, seed):
        return make_run(end=0.6, rate=0.5 if levels == FILTER else 1.0)

    check = {**GAIN, "statistic": "at_equal/seconds"}
    (result,) = evaluate(make_grid([check], number))
    # At 40 to 50 seconds, the mean of 45: one is at steps 80 to 100, the other at 40 to 50.
    assert result.estimate.value == pytest.approx(0.2 * (0.90 - 0.45))


def test_a_target_that_was_there_before_training_has_no_time():
    """Plain training ends below where it began, with all seeds but one: there is no ratio, and nothing left to run."""
    check = {"name": "r", "kind": "ratio", "statistic": "seconds_to_reach", "of": FILTER, "against": NONE,
             "target": NONE, "expects": "<"}  # fmt: skip
    check |= {"primary": True, "true_effect": 0.5}
    grid = make_grid([check], lambda levels, seed: 0.7 if levels == FILTER or seed == 1 else 0.3)
    (result,) = evaluate(grid)
    assert result.seeds == 1
    assert result.notes.others == ["4 seeds left out: at the target before training, which leaves no time to compare."]
    assert verdict(grid, [result]) == "inconclusive"


def test_a_cost_that_is_a_bound_shows_nothing_equal():
    check = {"name": "r", "kind": "ratio", "statistic": "seconds_to_reach", "of": FILTER, "against": NONE,
             "target": 0.8, "expects": "=", "within": 0.5}  # fmt: skip
    (result,) = evaluate(make_grid([check], lambda levels, seed: 0.5 if levels == FILTER else 0.8 + 0.01 * seed))
    assert result.estimate.side == 1 and result.finding == 0


def test_what_is_measured_more_often_does_not_fall_sooner():
    """Both fall at step 10; one is measured every tenth step, the other every fiftieth."""
    often, seldom = np.arange(0.0, 101, 10), np.arange(0.0, 101, 50)

    def number(levels, seed):
        run = make_run()
        curves = {
            name: MetricCurve(steps, np.where(steps < 10, 1.0, 0.1)) for name, steps in (("a", often), ("b", seldom))
        }
        return replace(run, curves={**run.curves, **curves})

    checks = [
        {"name": n, "kind": "earlier", "first": n, "then": o, "of": NONE, "expects": ">"}
        for n, o in (("a", "b"), ("b", "a"))
    ]
    assert [one.estimate.value for one in evaluate(make_grid(checks, number))] == [0, 0]


def test_what_falls_first_is_told_by_the_lag_in_shares_of_the_run():
    def number(levels, seed):
        return make_run(curves={"a": [1.0, 0.5, 0.4], "b": [1.0, 0.9, 0.5 if seed < 5 else 0.9]})

    check = {"name": "e", "kind": "earlier", "first": "a", "then": "b", "of": NONE, "expects": ">"}
    (result,) = evaluate(make_grid([check], number))
    assert result.estimate.value == pytest.approx(mean([0.5, 0.5, 0.5, 0.5, 0.5]))
    assert "a fell by 20 % of its peak for good in 5 of 5 runs." in result.notes.others
    assert "b fell by 20 % of its peak for good in 4 of 5 runs." in result.notes.others


def test_what_has_not_fallen_counts_as_fallen_at_the_last_step_that_both_have():
    """Nobody knows whether b fell after step 90, where a was measured last."""
    short = MetricCurve(np.array([0.0, 50.0, 90.0]), np.array([1.0, 0.5, 0.4]))

    def number(levels, seed):
        run = make_run(curves={"b": [1.0, 0.9, 0.9]})
        return replace(run, curves={**run.curves, "a": short})

    check = {"name": "e", "kind": "earlier", "first": "a", "then": "b", "of": NONE, "expects": ">"}
    (result,) = evaluate(make_grid([check], number))
    assert result.estimate.value == pytest.approx(0.9 - 0.5)


def test_gains_of_other_experiments_are_correlated_once_each():
    def number(levels, seed):
        spread = 0.1 * len(levels.get("slip", "0")) + float(levels.get("slip", 0.5))
        gain = 0.1 * spread if levels["method"] == "filter" else 0
        return make_run(end=0.5 + gain + 0.1 * noise(levels, seed), curves={"snr/reward_std_spread": [spread] * 3})

    axes = {"method": ["none", "filter"], "slip": ["0.0", "0.2", "0.4", "0.6", "0.8"]}
    first, again = (make_grid([], number, axes, name=name) for name in ("one", "two"))
    check = {"name": "c", "kind": "correlation", "x": "reward_std_spread/mean", "y": "success/last", "of": FILTER,
             "against": NONE, "expects": ">"}  # fmt: skip
    (result,) = evaluate(make_grid([check], number, axes, others=(first, again)))
    assert result.estimate.value > 0.9 and result.estimate.n == 5
    assert result.notes.others[-1] == "25 runs of 5 settings."
    assert result.finding == 1


def test_a_stronger_correlation_is_one_whichever_its_sign():
    axes = {"setting": [str(n) for n in range(12)]}

    def number(levels, seed):
        truth = int(levels["setting"]) / 20 + 0.01 * seed
        return make_run(end=truth, curves={"entropy": [-truth] * 3, "reward": [noise(levels, 3 * seed)] * 3})

    check = {"name": "s", "kind": "stronger_correlation", "x": "entropy/mean", "than": "reward/mean"}
    check |= {"y": "success/last", "expects": ">"}
    (result,) = evaluate(make_grid([check], number, axes))
    assert result.estimate.value > 0.5 and result.finding == 1


def test_runs_of_some_levels_can_be_left_out_of_a_correlation():
    """What breaks has neither success nor the other; among the rest they fall together."""
    axes = {"bonus": ["0", "0.1"], "setting": [str(n) for n in range(12)]}

    def number(levels, seed):
        there = (levels["bonus"] == "0") * (1 + int(levels["setting"]) / 20 + 0.01 * seed)
        return make_run(end=0.3 * there, curves={"entropy": [there and 3 - there] * 3})

    check = {"name": "c", "kind": "correlation", "x": "entropy/mean", "y": "success/last", "expects": ">"}
    whole, part = evaluate(make_grid([check, {**check, "without": {"bonus": "0.1"}}], number, axes))
    assert whole.estimate.value > 0.3 and part.estimate.value == pytest.approx(-1)
    assert part.notes.others[-1] == "60 runs of 12 settings."


# Verdicts


def results_of(findings, seeds=5):
    """The first is that of the primary check."""
    estimates = [IntervalEstimate(0.1, 0, 0, 0, side or 1, 5) for side in findings]
    return [
        Result(GAIN if n else PRIMARY, estimate, "points", seeds, Notes(), 0.01 if side else 0.5)
        for n, (side, estimate) in enumerate(zip(findings, estimates, strict=True))
    ]


@pytest.mark.parametrize("secondary", [1, 0, -1])
@pytest.mark.parametrize(("primary", "said"), [(1, "supported"), (0, "inconclusive"), (-1, "opposite")])
def test_the_primary_check_alone_makes_the_verdict(primary, said, secondary):
    grid = make_grid([], lambda levels, seed: 0.5)
    findings = [primary, secondary, secondary]
    assert verdict(grid, results_of(findings)) == said
    assert verdict(grid, results_of(findings, seeds=3)) == said  # two without a number, which more runs do not bring
    grid = make_grid([], lambda levels, seed: 0.5, without=[(FILTER, 4), (FILTER, 5)])
    assert verdict(grid, results_of(findings, seeds=3)) == f"{said}, so far (8 of 10 runs)"


def test_runs_that_cannot_decide_have_no_verdict():
    grid = make_grid([], lambda levels, seed: 0.5)
    assert verdict(grid, []) == "no verdict"
    flawed = Grid(replace(grid.experiment, flaw="The baseline diverges."), grid.planned_runs, grid.runs)
    assert verdict(flawed, results_of([1])) == "no verdict"


@pytest.mark.parametrize("there", [[], [NONE]])
def test_nothing_that_ran_is_no_verdict_and_neither_are_runs_without_what_they_are_compared_with(there):
    without = [(levels, seed) for levels in (NONE, FILTER) if levels not in there for seed in range(1, 6)]
    grid = make_grid([GAIN], lambda levels, seed: 0.5, without=without)
    assert verdict(grid, evaluate(grid)) == "not run yet"


def test_what_was_asked_or_named_primary_after_the_runs_is_known():
    """A check is known by what it asks: another name makes no other check."""
    other = {**GAIN, "statistic": "success/first"}
    grid = make_grid([other, {**PRIMARY, "name": "the gain"}], lambda levels, seed: 0.5)

    def later(fixed):
        return {one.name: one.later for one in evaluate(grid, fixed)}

    assert list(later(None)) == ["the gain", "gain"]  # the primary check first
    assert later([PRIMARY]) == {"the gain": False, "gain": True}
    assert later([GAIN, other]) == later([{**GAIN, "beside": True}, other]) == {"the gain": True, "gain": False}
    assert not any(later(None).values())


def test_a_primary_check_is_corrected_only_where_it_was_named_after_the_runs():
    values = np.array([0.010, 0.004, 0.012, 0.001, 0.006])
    checks = [PRIMARY, *({**GAIN, "name": str(n), "statistic": "success/first"} for n in range(3))]
    grid = make_grid(checks, lambda levels, seed: 0.5 + (values[seed - 1] if levels == FILTER else 0))
    before, after = evaluate(grid, fixed=checks), evaluate(grid, fixed=[GAIN, *checks[1:]])
    assert before[0].adjusted == before[0].estimate.p < 0.05 and before[0].level == pytest.approx(0.05)
    assert after[0].adjusted == pytest.approx(4 * before[0].adjusted) and after[0].level == pytest.approx(0.05 / 4)
    assert [one.level for one in before[1:]] == pytest.approx([0.05 / 3] * 3)
    noisy = make_grid(checks, lambda levels, seed: 0.5 + (20 * values[seed - 1] if levels == FILTER else 0))
    early, late = (evaluate(noisy, fixed=fixed)[0].power for fixed in (checks, [GAIN, *checks[1:]]))
    assert 0 < 1.5 * late < early < 1


def test_the_power_of_a_ratio_is_that_of_its_logarithm():
    def number(levels, seed):
        return make_run(rate=(0.8 + 0.05 * (seed - 3) if levels == FILTER else 1.0))

    check = {**PRIMARY, "kind": "ratio", "statistic": "seconds/last", "expects": "<", "true_effect": 0.9}
    (result,) = evaluate(make_grid([check], number))
    logs = mean_interval([math.log(0.8 + 0.05 * n) for n in range(-2, 3)], expects="<")
    assert result.power == pytest.approx(power(math.log(0.9), logs, 0.05, "<"))
    assert 0.1 < result.power < 0.9 and result.true_effect == "0.90 times"


def test_two_checks_are_tested_more_strictly_than_one():
    """p of 0.03: significant alone, and no more beside another that is not."""
    values = np.array([0.010, 0.004, 0.012, 0.001, 0.006])
    assert 0.025 < mean_interval(values).p < 0.05
    alone, beside = ([GAIN], [GAIN, {**GAIN, "name": "not", "statistic": "success/first"}])
    number = lambda levels, seed: 0.5 + (values[seed - 1] if levels == FILTER else 0)  # noqa: E731
    assert [one.finding for one in evaluate(make_grid(alone, number))] == [1]
    assert [one.finding for one in evaluate(make_grid(beside, number))] == [0, 0]


@pytest.mark.parametrize(("changes", "parts"), [
    ({"kind": "differences"}, ["kind='differences'", "allowed: difference, trend"]),
    ({"statistics": "success/last"}, ["check 'gain'", "statistics is not known"]),
    ({"primary": None, "true_effect": None}, ["one with `primary: true`, got []"]),
    ({"true_effect": None}, ["true_effect must be there"]),
    ({"expects": "="}, ["expects='='", "within"]),
    ({"statistic": "succes/last"}, ["statistic='succes/last'", "last_fifth"]),
    ({"kind": "ratio", "statistic": "seconds_to_reach"}, ["seconds_to_reach needs a target"]),
    ({"kind": "mean", "statistic": "at_equal/seconds"}, ["against is not known"]),
    ({"kind": "mean", "minus": "seconds_to_reach", "against": None}, ["minus='seconds_to_reach'", "ratio's"]),
    ({"kind": "correlation", "x": "success/last", "y": "kept/mean", "statistic": None, "expects": "=", "within": 0.1},
     ["expects='='", "for correlation: '>' and '<'"]),
])  # fmt: skip
def test_what_a_check_must_not_say_is_named(changes, parts):
    check = {name: value for name, value in (PRIMARY | changes).items() if value is not None}
    grid = make_grid([check], lambda levels, seed: 0.5)
    with pytest.raises(ValueError) as error:
        validate(grid.experiment)
    for part in ["try.yaml", *parts]:
        assert part in str(error.value)


@pytest.mark.parametrize(("host", "of"), [("0123abcd", [FILTER]), (SEVERAL, [FILTER, NONE])])
@pytest.mark.parametrize("statistic", ["cpu_seconds/last", "at_equal/cpu_seconds", "success/last"])
def test_times_are_compared_between_runs_of_one_machine_alone(statistic, host, of):
    """One run of the third seed was made elsewhere, where all takes twice as long; or both, on two machines each."""

    def made(levels, seed):
        elsewhere = seed == 3 and levels in of
        seconds = [0.0, 50.0, 100.0 + seed] if not elsewhere else [0.0, 100.0, 200.0]
        run = make_run(end=0.6 + noise(levels, seed), curves={"cost/cpu_seconds": seconds})
        return replace(run, record={"versions": json.dumps({"host": host})}) if elsewhere else run

    kind = "ratio" if statistic == "cpu_seconds/last" else "difference"
    (result,) = evaluate(make_grid([{**GAIN, "kind": kind, "statistic": statistic}], made))
    timed = statistic != "success/last"
    assert result.seeds == (4 if timed else 5)
    assert ("ran on several machines" in " ".join(result.notes.sentences())) == timed
