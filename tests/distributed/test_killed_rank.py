"""One of two processes is killed: all end, what killed it is told, and the resumed run is the undisturbed one.

A run whose other process stayed would reach the limit of `launch`.
"""

import pytest
from killed import KILLS, kill_and_resume, whole_run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "kill"), [("ddp", KILLS[2]), pytest.param("zero3", KILLS[9], marks=pytest.mark.needs("deepspeed"))]
)
def test_a_run_that_loses_a_process_ends_soon_and_goes_on_as_if_it_had_not(layout, kill, policy_path, tmp_path):
    """`python tests/distributed/killed.py` does so at all moments."""
    whole = whole_run(layout, policy_path, tmp_path / "whole")
    outcome = kill_and_resume(layout, policy_path, tmp_path / "killed", kill)
    assert outcome.names(kill[0]), outcome.told
    assert outcome.resumed_from in ("checkpoint-2", "checkpoint-4")
    assert outcome.equals(whole)
