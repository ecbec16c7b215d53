"""Bandit: what the machines pay, whose names are whose, and the smallest task there is."""

import random

import pytest

from ragen2_trl.envs import format_response
from ragen2_trl.envs.bandit import PAIRS, Bandit

ROW = {"seed": 1, "names": ["Pond", "Rapids"], "bold": "Rapids"}


def test_several_turns_pay_for_each_pull_and_the_last_one_decides():
    play = Bandit(multi_turn=True).play(ROW, random.Random(0))
    for name in ["Rapids", "Pond", "Pond", "Pond", "Pond"]:
        assert not play.done
        play.respond(format_response("", [name]))
    assert play.done and not play.outcome.success
    assert play.outcome.episode_return == pytest.approx(0.4) or play.outcome.episode_return == pytest.approx(1.4)


def test_held_out_names_never_appear_in_training():
    train, test = ({name for pair in PAIRS[split] for name in pair} for split in ("train", "test"))
    assert not train & test
    assert (len(train), len(test)) == (24, 16)
    for split, names in (("train", train), ("test", test)):
        assert {name for row in Bandit().dataset(500, split=split) for name in row["names"]} == names


def test_the_place_of_a_name_says_nothing():
    rows = Bandit().dataset(2000)
    assert sum(row["names"][0] == row["bold"] for row in rows) / 2000 == pytest.approx(0.5, abs=0.04)
