"""Countdown: its solver, what counts as an expression, and what attempts are worth."""

import ast
import json
import random
import warnings
import zlib
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from stacks import with_frames_left

from ragen2_trl.envs import format_response
from ragen2_trl.envs.countdown import (
    MAX_CHARS,
    Countdown,
    checked_row,
    numbers_of,
    parse_expression,
    random_tree,
    show,
    solve,
    value_of,
)
from ragen2_trl.envs.ragen2.countdown import RagenCountdown

ROW = {"seed": 1, "nums": [3, 4, 5], "target": 35}

HOSTILE = [
    "(" * MAX_CHARS,
    "(" * 90 + "1" + ")" * 90,
    "-" * 199 + "1",
    "-(" * 60 + "1" + ")" * 60,
    "()" * 100,
    "9" * 200,
    "9**9**9**9**9",
    "(1)" * 66,
    "1 " * 100,
    "1+" * 99 + "1",
    "=" * 200,
    "1" * 1_000_000,
    "(" * 1_000_000,
]


def outcome(env, *answers, row=ROW):
    play = env.play(row, random.Random(0))
    for text in answers:
        play.respond(format_response("", [text]))
    return play.outcome


# Impossible tasks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "options"),
    [(Countdown, {}), (Countdown, {"operators": "+-"}), (RagenCountdown, {}), (Countdown, {"largest": 5})],
)
def test_that_share_of_the_training_targets_is_out_of_reach_and_no_held_out_one(task, options):
    env = task(impossible=0.5, **options)
    counted = "+-*/" if task is RagenCountdown else env.operators

    def reachable(rows, operators):
        return [solve(row["nums"], row["target"], operators) is not None for row in rows]

    rows = env.dataset(60, seed=0)
    assert 15 < sum(reachable(rows, counted)) < 45
    assert all(10 <= row["target"] <= 99 for row in rows)
    assert len(env.demonstrations(60, seed=0)) == sum(reachable(rows, env.operators))
    held = env.dataset(30, seed=0, split="test")
    assert held.to_list() == task(**options).dataset(30, seed=0, split="test").to_list()


def test_impossible_tasks_are_generated_and_not_loaded(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"nums": [number, 1, 1], "target": number}) for number in range(3, 40)))
    env = Countdown(impossible=0.5)
    assert len(env.dataset(2, split="test", data=str(path))) == 2  # which it says nothing of
    with pytest.raises(ValueError, match=r"impossible with data must be one of \[0.0\], got 0.5"):
        env.dataset(2, data=str(path))
    with pytest.raises(ValueError, match=r"impossible must be between 0.0 and 1.0, got -1"):
        Countdown(impossible=-1)


# Rewards


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("5 * (3 + 4)", 1.0),
        ("(3+4)*5", 1.0),
        ("(3 + 4) * 5 = 35", 1.0),
        ("(3 + 4) * 5 = 7", 1.0),  # the expression is judged, not what is said of it
        ("-(-3 - 4) * 5", 1.0),
        ("3 + 4 + 5", 0.1),
        ("3 / (4 - 5) = -3", 0.1),
        ("5 / (3 - 4 + 5 - 4)", 0.0),  # a number twice
        ("35", 0.0),
        ("7 * 5", 0.0),
        ("(3 + 4) * 5 * 1", 0.0),
        ("(3 + 4) * 5 = 35 = 35", 0.0),
        ("(3 + 4) * 5 = x", 0.0),
        ("(3 + 4) * 5 # comment", 0.0),
        ("(3 + 4) * 5 or 3", 0.0),
        ("(3, 4, 5, 35)[3]", 0.0),
        ("35 if 3 + 4 + 5 else 0", 0.0),
        ("5 * (3 + 0x4)", 0.0),
        ("5 * (3 + 0_4)", 0.0),
        ("5 * (3 + 4.0)", 0.0),
        ("5 * (3 + \u0664)", 0.0),
        ("5 \u00d7 (3 + 4)", 0.0),
        ("3(4)5", 0.0),
        ("3 ** 4 - 5", 0.0),
        ("3 // 4 + 5", 0.0),
        ("+3 + 4 + 5", 0.0),
        ("3 4 5", 0.0),
        ("(3 + 4)" + " " * 190 + "* 5", 1.0),
        ("(3 + 4)" + " " * 191 + "* 5", 0.0),  # more than 200 characters
        ("(3 + 4) * 5" + " " * 200 + "+ 1", 0.0),
        ("(3 + 4) * 5 || (3 + 4) * 5", 0.0),
    ],
)
def test_what_an_answer_is_worth(answer, reward):
    result = outcome(Countdown(), answer)
    assert (result.episode_return, result.success) == (reward, reward == 1.0)


@pytest.mark.parametrize("answer", ["5 / (2 - 2) + 1", "1 - 5 / (2 - 2)", "-(5 / (2 - 2)) * 1"])
def test_division_by_zero_is_wrong_but_of_the_right_numbers(answer):
    row = {"seed": 1, "nums": [2, 2, 5, 1], "target": 5}
    assert outcome(Countdown(), answer, row=row).episode_return == 0.1


def test_the_tenth_is_paid_once_and_a_right_answer_brings_the_rest():
    env = Countdown(multi_turn=True)
    assert outcome(env, "3 + 4 + 5", "3 - 4 + 5", "3 * 4 + 5").episode_return == pytest.approx(0.1)
    assert outcome(env, "3 + 4 + 5", "nothing", "(3 + 4) * 5").episode_return == pytest.approx(1.0)
    assert outcome(env, "(3 + 4) * 5").turns == 1


def test_the_player_is_told_what_an_attempt_makes():
    play = Countdown(multi_turn=True).play(ROW, random.Random(0))
    told = play.respond(format_response("", ["3/(4+5)"]))
    assert told.startswith("Reward 0.1. Turn 2 of 3.\n3 / (4 + 5) makes 1/3, not 35.\nNumbers: 3 4 5. Target: 35.\n")
    assert "every number exactly once" in play.respond(format_response("", ["3"]))


# Expressions and the solver


@given(st.integers(0, 2**31), st.integers(1, 4))
def test_expressions_have_the_value_that_python_gives_them(seed, count):
    rng = random.Random(seed)
    text = show(random_tree([rng.randint(1, 99) for _ in range(count)], "+-*", rng))
    tree = parse_expression(text)
    assert value_of(tree) == eval(text)


@given(st.integers(0, 2**31))
def test_whatever_can_be_made_is_solved(seed):
    rng = random.Random(seed)
    numbers = [rng.randint(1, 20) for _ in range(rng.randint(2, 4))]
    value = value_of(parse_expression(show(random_tree(numbers, "+-*/", rng))))
    if value is None or value.denominator > 1 or value < 1:
        return
    tree = parse_expression(show(solve(numbers, int(value), rng=rng)))
    assert value_of(tree) == value
    assert sorted(numbers_of(tree)) == sorted(numbers)


@pytest.mark.parametrize(
    ("numbers", "target", "operators", "solvable"),
    [
        ([3, 3, 8, 8], 24, "+-*/", True),  # 8 / (3 - 8 / 3)
        ([1, 1, 1, 1], 24, "+-*/", False),
        ([3, 8], 24, "+-", False),
        ([1, 5, 5, 5], 24, "+-*/", True),
        ([7], 7, "+-*/", False),
    ],
)
def test_solver_is_exact_and_complete(numbers, target, operators, solvable):
    assert (solve(numbers, target, operators) is not None) == solvable


@given(st.text() | st.text("0123456789+-*/() =", max_size=60))
@example("1(2)")
@example("0123")
@example("(*1)")
def test_no_text_raises_and_no_text_earns_a_reward_without_a_right_answer(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reward = outcome(Countdown(), text).episode_return
    assert reward in (1.0, 0.1, 0.0, -0.1)
    if reward > 0:  # judged again with Python itself
        code = text.strip().partition("=")[0].strip()
        numbers = sorted(n.value for n in ast.walk(ast.parse(code, mode="eval")) if isinstance(n, ast.Constant))
        assert numbers == [3, 4, 5]
        assert (value_of(parse_expression(text)) == Fraction(35)) == (reward == 1.0)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_worth_nothing(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert outcome(Countdown(), text).episode_return <= 0.0


@pytest.mark.parametrize(
    ("signs", "reward"),
    [
        ("-" * 150 + "3", 0.0),
        ("-(" * 60 + "3" + ")" * 60, 0.0),
        ("-" * 15 + "3", 0.0),  # with the two operators that follow, 17
        ("-" * 14 + "3", 0.1),
        ("3", 0.1),
    ],
)
def test_signs_need_no_more_of_the_stack_than_an_honest_answer(signs, reward):
    env = Countdown()
    (judge,) = env.reward_funcs
    columns = {"seed": [1], "nums": [ROW["nums"]], "target": [ROW["target"]]}
    completions = [format_response("", [f"{signs} * 4 * 5"])]
    assert with_frames_left(90, lambda: judge([None], completions, **columns)) == [reward]


# Tasks


@pytest.mark.parametrize(
    ("options", "checksum"), [({}, 2235725744), ({"operators": "+-", "max_numbers": 3, "impossible": 0.5}, 1546176356)]
)
def test_a_seed_means_the_same_tasks_and_plans_in_every_release(options, checksum):
    """A seed gives the same room in every release: the tiny model was warmed up on these plans."""
    env = Countdown(**options)
    tasks = [(row["seed"], row["nums"], row["target"]) for row in env.dataset(100, seed=0)]
    plans = [row["completion"][0]["content"] for row in env.demonstrations(100, seed=0)]
    assert zlib.crc32(repr((tasks, plans)).encode()) == checksum


@pytest.fixture
def tasks_file(tmp_path):
    rng = random.Random(0)
    rows = [{"target": rng.randint(10, 99), "nums": [rng.randint(1, 20) for _ in range(4)]} for _ in range(150)]
    rows += [{"target": 99, "nums": [1, 1, 1]}] * 5
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.slow
def test_local_data_loads_without_what_cannot_be_solved_and_is_split_by_task(tasks_file):
    env, rng = Countdown(), random.Random(0)
    train, test = env.dataset(data=tasks_file), env.dataset(data=tasks_file, split="test")
    assert 40 < len(train) < 150 and len(test) > 8
    asked = [{(*sorted(row["nums"]), row["target"]) for row in rows} for rows in (train, test)]
    assert not asked[0] & asked[1]
    assert (99 not in train["target"]) or [1, 1, 1] not in list(train["nums"])
    assert len(set(train["seed"])) == len(train)
    assert train["seed"][:] != env.dataset(data=tasks_file, seed=1)["seed"][:]
    play = env.play(train[0], rng)
    play.respond(format_response(*play.episode.plan(rng)))
    assert play.outcome.success


@pytest.mark.parametrize("changed", [{"target": 1001}, {"target": 0}, {"nums": [3, 1001]}, {"nums": [0, 3]}])
def test_numbers_of_a_task_are_from_1_to_1000(changed):
    assert checked_row({**ROW, "nums": [1, 1000], "target": 1000}) == ([1, 1000], 1000)
    with pytest.raises(ValueError, match="1 to 1000"):
        checked_row({**ROW, **changed})
