"""The measurements of a run over checkpoints, and the warnings that come with them."""

import json

import pytest
from test_verdicts import run_of

from ragen2_trl.callbacks.regime_watch import RegimeWatch


def follow(measurements, watch=None):
    watch = watch or RegimeWatch()
    return [watch.update(evidence)[1] for evidence in measurements]


COLLAPSING = run_of(60, 4, 4, 60, valid_thinking_rate=1.0)


def test_one_measurement_at_chance_is_no_collapse():
    assert not any(follow(run_of(60, 4, 60, 4, 60)))


def test_lost_tags_are_called_format_collapse():
    rates = [0.9, 0.5, 0.4, 0.2, 0.2]
    steps = [run_of(60, 60, 60, 60, 60, valid_thinking_rate=rate)[number] for number, rate in enumerate(rates)]
    warnings = follow(steps)
    assert warnings[:3] == [{}, {}, {}] and warnings[4] == {}
    assert warnings[3] == {
        "format_collapse": "Step 31: Format collapse since step 21. 20% of turns hold reasoning that a tag closes, "
        "90% at step 1."
    }


def test_a_model_that_never_used_tags_has_no_format_to_lose():
    assert not any(follow(run_of(60, 60, 60, valid_thinking_rate=0.0)))


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_state_survives_json(cut):
    watch = RegimeWatch()
    warnings = follow(COLLAPSING[:cut], watch)
    warnings += follow(COLLAPSING[cut:], RegimeWatch.restored(json.loads(json.dumps(watch.state))))
    assert warnings == follow(COLLAPSING)
    assert any(warnings)
