"""Bandit: what the machines pay, whose names are whose, and the smallest task there is."""

import random

import pytest

from ragen2_trl.envs import format_response
from ragen2_trl.envs.bandit import PAIRS, Bandit

ROW = {"seed": 1, "names": ["Pond", "Rapids"], "bold": "Rapids"}


def test_the_cautious_machine_always_pays_a_tenth():
    for seed in range(20):
        play = Bandit().play(ROW, random.Random(seed))
        play.respond(format_response("", ["pond"]))
        assert (play.outcome.episode_return, play.outcome.success, play.done) == (0.1, False, True)


def test_the_bold_machine_pays_one_in_four_and_is_a_success_in_either_case():
    returns = []
    for seed in range(4000):
        play = Bandit().play(ROW, random.Random(seed))
        play.respond(format_response("", ["Rapids"]))
        assert play.outcome.success
        returns.append(play.outcome.episode_return)
    assert set(returns) == {0.0, 1.0}
    assert sum(returns) / 4000 == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("text", ["", "Rapids", format_response("", []), format_response("", ["Storm"])])
def test_other_text_is_invalid(text):
    play = Bandit().play(ROW, random.Random(0))
    play.respond(text)
    assert (play.outcome.episode_return, play.outcome.valid_turns) == (-0.1, 0)


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


def test_equal_seeds_give_equal_rows_whatever_the_global_generator_does():
    first = Bandit().dataset(100, seed=3).to_list()
    random.seed(1)
    assert Bandit().dataset(100, seed=3).to_list() == first
    assert Bandit().dataset(100, seed=4).to_list() != first


def test_demonstrations_pull_the_bold_machine():
    rows = Bandit().dataset(100, seed=2)
    for row, turn in zip(rows, Bandit().demonstrations(100, seed=2), strict=True):
        assert turn["completion"][0]["content"].endswith(f"<answer>{row['bold']}</answer>")
        assert turn["prompt"] == row["prompt"]


def test_a_random_player_is_right_half_of_the_time():
    rng, won = random.Random(0), 0
    for row in Bandit().dataset(2000):
        play = Bandit().play(row, rng)
        play.take([play.episode.random_action(rng)])
        won += play.outcome.success
    assert won / 2000 == pytest.approx(0.5, abs=0.04)


def test_tools_pay_what_text_pays():
    tools = Bandit(protocol="tools", multi_turn=False).environment_factory()
    assert tools.reset(**ROW) == "Machines: Pond, Rapids."
    assert tools.pull("Pond") == "Reward 0.1. The episode is over."
    assert tools.get_reward() == 0.1


def test_data_is_refused():
    with pytest.raises(ValueError, match=r"data must be one of \[None\], got 'names.json'"):
        Bandit().dataset(1, data="names.json")
