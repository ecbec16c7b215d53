"""Of the rows of two processes, only those that change process are sent, and each computes its own share."""

from collections import Counter

import pytest
import torch
from launching import launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(policy_path, tmp_path_factory):
    """What each process saw."""
    folder = tmp_path_factory.mktemp("moved_rows")
    launch("moved_rows.py", 2, policy_path, folder)
    return [torch.load(folder / f"seen_{process}.pt") for process in (0, 1)]


@pytest.mark.parametrize(
    ("place", "moved"), [("two and two", 0), ("three and one", 4), ("four and none", 8)], ids=lambda value: str(value)
)
def test_only_rows_that_change_process_are_sent(place, moved, seen):
    """Two passes over 16 kept rows, of which each process trains on 8."""
    both = [process["moves"][place] for process in seen]
    home = [Counter(process["kept"][0]["rows"] or []) for process in both]
    assert sum(map(Counter.total, home)) == 16
    sent = [
        [Counter(parcels[target] or []) for target in (0, 1)]
        for parcels in (process["sent"][0] if process["sent"] else [None, None] for process in both)
    ]
    assert [sent[0][0].total(), sent[1][1].total()] == [0, 0]
    assert sent[0][1].total() + sent[1][0].total() == moved
    assert [len(process["sent"]) for process in both] == [int(moved > 0)] * 2  # once for both passes
    for process in (0, 1):
        held = home[process] - sent[process][1 - process] + sent[1 - process][process]
        assert held.total() == 8
        trained = Counter(row for micro_batch in both[process]["trained"] for row in micro_batch)
        assert trained == held + held


@pytest.mark.parametrize(("place", "moved"), [("three and one", 4), ("four and none", 8)])
def test_bytes_grow_with_the_rows_that_move_and_not_with_those_that_stay(place, moved, seen):
    both = [process["moves"][place] for process in seen]
    kept = sum(process["kept"][0]["bytes"] for process in both)
    sent = sum(sum(sizes) for process in both for sizes in process["bytes"])
    container = 2_500  # of a parcel, whatever its rows: names, shapes
    assert 0 < sent <= kept * moved / 16 + container  # one of the processes sends


def test_each_process_computes_the_log_probs_of_its_own_rows_alone(seen):
    own, other = (process["refills"] for process in seen)
    assert any(step["waiting"] != beside["waiting"] for step, beside in zip(own, other, strict=True))
    assert any(step["groups"] for step in own)
    for pair in zip(own, other, strict=True):
        assert len(pair[0]["forwards"]) == len(pair[1]["forwards"])
        for step in pair:
            fresh = step["size"] - step["carried"] if step["carries"] else 0
            passes = -(-step["waiting"] // 2) + -(-fresh // 2)
            spare = len(step["forwards"]) - passes
            assert spare >= 0
            assert sum(step["forwards"]) == step["waiting"] + fresh + spare


def test_images_of_other_tile_counts_arrive_whole(seen):
    assert seen[0]["tiles"] == [(0, 1, [1.0]), (10, 4, [11.0])]
    assert seen[1]["tiles"] == [(1, 2, [2.0]), (11, 3, [12.0])]
