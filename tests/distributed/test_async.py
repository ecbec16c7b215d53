"""TRL's asynchronous trainer with the filter on two processes: decisions on the first, both of TRL's batchers."""

import json

import pytest
from launching import launch


@pytest.fixture(scope="module")
def found(policy_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    launch("async_two.py", 2, policy_path, folder)
    return json.loads((folder / "found.json").read_text())


CASES = ["nonzero_0", "nonzero_60", "lossless_0", "lossless_60"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_trl_does_on_the_kept_rows(found, case):
    one = found[case]
    assert one["processes"] == 2 and one["same_everywhere"] and one["steps"] == 3
    assert one["from_trl"] <= (0 if case.startswith("nonzero") else 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_listeners_and_checkpoints_work_on_two_processes(found, case):
    one = found[case]
    assert one["measured"] >= 4 and one["health"] >= 16
    assert {"snr_state_0.pt", "snr_state_1.pt", "snr_manifest.json"} <= set(one["files"])


@pytest.mark.parametrize("case", CASES)
def test_groups_are_counted_on_two_processes(found, case):
    one = found[case]
    assert one["done"] >= 8 and all(group >= one["done"] for group in one["in_progress"])
