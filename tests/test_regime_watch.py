"""The measurements of a run over checkpoints, and the warnings that come with them."""

import json

import pytest
from ragen2_trl.callbacks.regime_watch import RegimeWatch
from test_verdicts import run_of


def follow(measurements, watch=None):
    watch = watch or RegimeWatch()
    return [watch.update(evidence)[1] for evidence in measurements]


COLLAPSING = run_of(60, 4, 4, 60, valid_thinking_rate=1.0)


def test_one_measurement_at_chance_is_no_collapse():
    assert not any(follow(run_of(60, 4, 60, 4, 60)))


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_state_survives_json(cut):
    watch = RegimeWatch()
    warnings = follow(COLLAPSING[:cut], watch)
    warnings += follow(COLLAPSING[cut:], RegimeWatch.restored(json.loads(json.dumps(watch.state))))
    assert warnings == follow(COLLAPSING)
    assert any(warnings)
