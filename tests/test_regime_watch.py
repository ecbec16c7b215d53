"""Warnings about collapse: when they come, how often, and what they say."""

import json
from dataclasses import asdict

import pytest
import torch

from ragen2_trl.callbacks.regime_watch import RegimeWatch
from ragen2_trl.instrument.information import information_metrics

SEPARABLE = information_metrics(
    torch.tensor([[-10.0, -30.0], [-30.0, -10.0]]), torch.tensor([5, 5]), torch.tensor([0, 1])
)


def measurement(accuracy=0.9, entropy=1.0):
    changed = {"retrieval_accuracy": accuracy, "retrieval_chance": 0.1, "num_completions": 64.0}
    return SEPARABLE | changed | {"conditional_entropy_token": entropy}


def follow(*measurements, valid_rates=None, watch=None):
    """The warnings at each step."""
    watch = watch or RegimeWatch()
    rates = valid_rates or [1.0] * len(measurements)
    return [
        watch.update(step, metrics, rate)
        for step, (metrics, rate) in enumerate(zip(measurements, rates, strict=True), start=1)
    ]


HEALTHY, COLLAPSED = measurement(), measurement(accuracy=0.1)


def test_one_measurement_at_chance_is_no_collapse():
    assert not any(follow(HEALTHY, COLLAPSED, HEALTHY, COLLAPSED, HEALTHY))


def test_an_episode_warns_once_and_a_later_one_again():
    warnings = follow(HEALTHY, COLLAPSED, COLLAPSED, COLLAPSED, HEALTHY, COLLAPSED, COLLAPSED)
    assert [bool(w) for w in warnings] == [False, False, True, False, False, False, True]


def test_a_run_that_never_depended_is_told_so():
    (_, warnings) = follow(COLLAPSED, COLLAPSED)
    assert "does not depend on its prompt" in warnings["template_collapse"]


def test_low_entropy_is_not_called_template_collapse():
    assert not any(follow(HEALTHY, *[measurement(accuracy=0.1, entropy=0.1)] * 3))


def test_lost_tags_are_called_format_collapse():
    warnings = follow(*[HEALTHY] * 4, valid_rates=[0.9, 0.5, 0.4, 0.2])
    assert warnings[:3] == [{}, {}, {}]
    assert warnings[3] == {
        "format_collapse": "Step 4: format collapse. 20% of turns hold reasoning that a tag closes, 90% at step 1."
    }


def test_a_model_that_never_used_tags_has_no_format_to_lose():
    assert not any(follow(*[HEALTHY] * 4, valid_rates=[0.0] * 4))


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_state_survives_json(cut):
    steps = [HEALTHY, COLLAPSED, COLLAPSED, HEALTHY]
    watch = RegimeWatch()
    warnings = [watch.update(step, metrics, 1.0) for step, metrics in enumerate(steps[:cut], start=1)]
    watch = RegimeWatch(**json.loads(json.dumps(asdict(watch))))
    warnings += [watch.update(step, metrics, 1.0) for step, metrics in enumerate(steps[cut:], start=cut + 1)]
    assert warnings == follow(*steps)
