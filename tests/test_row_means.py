"""Metrics that several calls append become means over the rows of those calls."""

import math

import pytest

from ragen2_trl.trainers.row_means import RowMeans


def collected(*calls, before=()):
    """A metric's values after calls of (rows, value), where some were logged before."""
    metrics = {"reward": list(before)}
    means = RowMeans(metrics)
    for rows, value in calls:
        with means.call(rows):
            metrics["reward"].append(value)
    means.close()
    return metrics["reward"]


def test_values_are_weighed_by_the_rows_of_their_calls():
    assert collected((2, 1.0), (6, 0.0)) == [0.25]
    assert collected((2, 1.0), (1, 0.0), (1, 1.0)) == [0.75]


def test_values_of_earlier_generations_stay():
    assert collected((2, 1.0), (6, 0.0), before=(0.5, 0.125)) == [0.5, 0.125, 0.25]
    assert collected((3, 0.1), before=(0.5,)) == [0.5, 0.1]  # to the last bit


def test_calls_without_a_value_have_no_weight():
    assert collected((3, math.nan), (1, 0.25), (1, 0.75)) == [0.5]
    assert [math.isnan(value) for value in collected((3, math.nan), (1, math.nan))] == [True, True]


@pytest.mark.parametrize(("name", "value"), [("completions/max_length", 9.0), ("completions/min_length", 2.0)])
def test_of_extremes_the_extreme_is_kept(name, value):
    metrics = {}
    means = RowMeans(metrics)
    for length in (4.0, 9.0, 2.0):
        with means.call(3):
            metrics.setdefault(name, []).append(length)
    means.close()
    assert metrics == {name: [value]}


def test_a_call_inside_another_speaks_for_its_own_rows():
    metrics = {"inner": [], "outer": []}
    means = RowMeans(metrics)
    for rows, value in ((1, 1.0), (3, 0.0)):
        with means.call(8):
            with means.call(rows):
                metrics["inner"].append(value)
            metrics["outer"].append(value)
    means.close()
    assert metrics == {"inner": [0.25], "outer": [0.5]}


def test_names_with_values_from_elsewhere_are_left_as_they_are():
    metrics = {"reward": []}
    means = RowMeans(metrics)
    for value in (1.0, 0.0):
        with means.call(4):
            metrics["reward"].append(value)
    metrics["reward"].append(0.5)
    means.close()
    assert metrics == {"reward": [1.0, 0.0, 0.5]}
