"""The numbers of a run: against naive loops over its points."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from research.measures import (
    METRICS,
    FinishedRun,
    MetricCurve,
    check_statistic,
    fall,
    gradient_slope,
    read_finished,
    statistic,
    success_at,
)
from research.plan import PlannedRun

STEPS = [0, 20, 40, 60, 80, 100]
SUCCESS = [0.4, 0.5, 0.45, 0.6, 0.62, 0.61]
KEY = "eval/env/frozen_lake/success"


def make_run(planned_steps=100, done=None, **curves):
    known = {
        name: MetricCurve(np.array(steps, float), np.array(values, float)) for name, (steps, values) in curves.items()
    }
    done = planned_steps if done is None else done
    return FinishedRun("key", 1, {"method": "filter"}, planned_steps, done, known, {})


@pytest.fixture
def run():
    return make_run(
        **{
            KEY: (STEPS, SUCCESS),
            "cost/seconds": ([0, *range(1, 101)], [0, *(2 * step for step in range(1, 101))]),
            "entropy": ([1, 2, 3], [1.0, 0.9, 0.8]),
        }
    )


def test_statistics_of_a_curve_are_those_of_loops_over_its_points(run):
    late = [value for step, value in zip(STEPS, SUCCESS, strict=True) if step >= 80]
    area = sum((SUCCESS[i] + SUCCESS[i + 1]) / 2 * (STEPS[i + 1] - STEPS[i]) for i in range(5)) / 100
    expected = {
        "first": 0.4,
        "last": 0.61,
        "last_fifth": sum(late) / len(late),
        "area": area,
        "peak": max(SUCCESS),
        "mean": sum(SUCCESS) / 6,
        "change": sum(late) / len(late) - 0.4,
    }
    assert {name: statistic(run, f"success/{name}") for name in expected} == pytest.approx(expected)
    assert statistic(run, f"{KEY}/last") == 0.61  # by the key of the log rows


def test_a_run_that_ended_early_has_its_last_value_to_the_end():
    short = make_run(done=60, **{KEY: (STEPS[:4], SUCCESS[:4])})
    assert short.ended_early
    assert statistic(short, "success/last_fifth") == 0.6
    assert statistic(short, "success/area") == pytest.approx(
        np.trapezoid([*SUCCESS[:4], 0.6], [*STEPS[:4], 100]) / 100
    )


def test_what_a_run_does_not_have_is_no_number(run):
    assert math.isnan(statistic(run, "retrieval/last"))
    assert math.isnan(statistic(run, "snr/kept_groups/last"))
    assert math.isnan(statistic(run, "cpu_seconds_to_reach", 0.5))


def test_time_to_a_success_is_where_the_straight_lines_between_evaluations_cross_it(run):
    # From 0.45 at step 40 to 0.6 at step 60; each step takes two seconds.
    assert statistic(run, "seconds_to_reach", 0.55) == pytest.approx(2 * (40 + 20 * (0.55 - 0.45) / 0.15))
    assert statistic(run, "steps_to_reach", 0.5) == 20
    assert statistic(run, "steps_to_reach", 0.3) == 0
    assert statistic(run, "steps_to_reach", 0.7) == math.inf


def test_success_at_a_cost_is_the_mean_over_its_last_fifth(run):
    # 160 seconds are 80 steps, of which the last fifth are those from 64 on.
    fine = np.linspace(64, 80, 10_001)
    assert success_at(run, "seconds", 160.0) == pytest.approx(np.interp(fine, STEPS, SUCCESS).mean(), abs=1e-5)


def test_the_mean_over_several_tasks_is_their_success():
    run = make_run(**{KEY: (STEPS, SUCCESS), "eval/env/sokoban/success": (STEPS, [0.2] * 6)})
    assert statistic(run, "success/last") == pytest.approx((0.61 + 0.2) / 2)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 0.5])
def test_the_slope_of_gradients_is_the_exponent_of_a_power_law(exponent):
    curves = {}
    for bucket in range(1, 7):
        deviations = [0.1 * (bucket - 1), 0.05 * (bucket - 1)]  # at two steps; the first bucket has no variance
        scales = [3.0, 0.2]  # of each measurement
        norms = [scale * max(x, 1e-9) ** exponent for scale, x in zip(scales, deviations, strict=True)]
        curves[f"grad/bucket_{bucket}/reward_std"] = ([1, 50], deviations)
        curves[f"grad/bucket_{bucket}/task/norm"] = ([1, 50], norms)
        for part in ("kl", "entropy"):
            curves[f"grad/bucket_{bucket}/{part}/norm"] = ([1, 50], [0.01, 0.02])
        curves[f"grad/bucket_{bucket}/min_reward_std"] = ([1, 50], deviations)
    # One that holds a group without variance, which has no gradient of the task, says nothing of the others.
    curves["grad/bucket_2/min_reward_std"] = ([1, 50], [0.0, 0.0])
    curves["grad/bucket_2/task/norm"] = ([1, 50], [1e-3, 1e-3])
    run = make_run(**curves)
    assert gradient_slope(run, "task") == pytest.approx(exponent)
    assert gradient_slope(run, "regularisers") == pytest.approx(0)
    assert math.isnan(gradient_slope(make_run(), "task"))


def test_a_fall_is_for_good():
    steps = [10, 20, 30, 40, 50]
    assert fall(MetricCurve(steps, np.array([1, 0.7, 0.9, 0.75, 0.1])), 0.2) == 40
    assert fall(MetricCurve(steps, np.array([1, 0.1, 0.1, 0.1, 0.9])), 0.2) == math.inf


@pytest.mark.parametrize(
    "name",
    [
        "success/best",
        "succes/last",
        "at_equal/steps",
        "seconds_to_arrive",
        "gradient/task/norm",
        "success",
        "dropped/by_store/last",
    ],
)
def test_a_statistic_that_does_not_exist_is_refused_with_those_that_do(name):
    with pytest.raises(ValueError, match="allowed") as error:
        check_statistic(name)
    assert name in str(error.value) and "last_fifth" in str(error.value)


def test_short_names_are_names_of_something():
    for name in METRICS:
        check_statistic(f"{name}/last")


def test_runs_are_read_without_numbers_that_are_none_and_with_the_last_of_a_step():
    planned_runs = pd.DataFrame({"key": ["a"], "steps": [3]})
    curves = pd.DataFrame(
        [("a", 2, "entropy", 2.0), ("a", 1, "entropy", 1.0), ("a", 3, "entropy", math.nan), ("a", 2, "entropy", 5.0)],
        columns=["key", "step", "metric", "value"],
    )
    store = SimpleNamespace(finished=lambda: planned_runs, curves=lambda keys: curves)
    planned, other = PlannedRun({"max_steps": 4}, 1, {}), PlannedRun({"max_steps": 5}, 1, {})
    planned_runs.loc[0, "key"] = curves["key"] = planned.key
    (run,) = read_finished(store, [planned.key, other.key]).runs([planned, other]).values()
    assert list(run.curves["entropy"].steps) == [1, 2] and list(run.curves["entropy"].values) == [1.0, 5.0]
    assert run.ended_early
