"""One of two processes is killed: all end, what killed it is told, and the resumed run is the undisturbed one.

A run whose other process stayed would reach the limit of `launch`.
"""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "distributed"))

from killed import KILLS, kill_and_resume, whole_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize(
    ("layout", "numbers"),
    [("ddp", [2, 4]), pytest.param("zero3", [4, 9], marks=pytest.mark.needs("deepspeed"))],
)
def test_a_run_that_loses_a_process_ends_soon_and_goes_on_as_if_it_had_not(layout, numbers, policy_path, tmp_path):
    whole = whole_run(layout, policy_path, tmp_path / "whole")
    for number in numbers:
        outcome = kill_and_resume(layout, policy_path, tmp_path / str(number), KILLS[number])
        assert outcome.names(KILLS[number][0]), outcome.told
        assert outcome.resumed_from in ("checkpoint-2", "checkpoint-4")
        assert outcome.equals(whole)
