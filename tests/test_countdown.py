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
from ragen2_trl.envs.countdown import Countdown
from ragen2_trl.envs.countdown.arithmetic import (
    MAX_CHARS,
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


def test_a_response_of_another_form_costs_a_tenth():
    play = Countdown().play(ROW, random.Random(0))
    play.respond("(3 + 4) * 5")
    assert play.outcome.episode_return == -0.1


def test_operators_that_are_left_out_do_not_count():
    assert outcome(Countdown(operators="+-"), "(3 + 4) * 5").episode_return == 0.0


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
    assert numbers_of(tree) == sorted(numbers)


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


@pytest.mark.parametrize("options", [{}, {"operators": "+-"}, {"max_numbers": 3, "largest": 9}, {"multi_turn": True}])
def test_every_task_is_solved_by_its_oracle(options):
    env, rng = Countdown(**options), random.Random(0)
    for row in env.dataset(150, seed=5):
        play = env.play(row, rng)
        play.respond(format_response(*play.episode.plan(rng)))
        assert play.outcome.success and play.outcome.episode_return == 1.0
        assert 3 <= len(row["nums"]) <= env.max_numbers and max(row["nums"]) <= env.largest
        assert 10 <= row["target"] <= 99


@pytest.mark.slow
def test_a_random_player_is_right_in_one_task_of_thirty():
    env, rng, won = Countdown(), random.Random(0), 0
    for row in env.dataset(2500, seed=1):
        play = env.play(row, rng)
        play.take([play.episode.random_action(rng)])
        assert play.outcome.episode_return in (0.1, 1.0)
        won += play.outcome.success
    assert won / 2500 == pytest.approx(0.035, abs=0.012)


def identity(row):
    return (*sorted(row["nums"]), row["target"])


def test_held_out_tasks_never_appear_in_training():
    env = Countdown(max_numbers=3, largest=5)  # few enough that two splits without a rule would meet
    train = set(map(identity, env.dataset(1000)))
    test = set(map(identity, env.dataset(300, split="test")))
    assert not train & test
    assert len(test) > 20


def test_equal_seeds_give_equal_rows_whatever_the_global_generator_does():
    first = Countdown().dataset(100, seed=3).to_list()
    random.seed(1)
    assert Countdown().dataset(100, seed=3).to_list() == first
    assert Countdown().dataset(50, seed=3).to_list() == first[:50]
    assert Countdown().dataset(100, seed=4).to_list() != first


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
    assert not set(map(identity, train)) & set(map(identity, test))
    assert (99 not in train["target"]) or [1, 1, 1] not in list(train["nums"])
    assert len(set(train["seed"])) == len(train)
    assert train["seed"][:] != env.dataset(data=tasks_file, seed=1)["seed"][:]
    play = env.play(train[0], rng)
    play.respond(format_response(*play.episode.plan(rng)))
    assert play.outcome.success


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"numbers": [1, 2], "target": 3}, r"columns of data must include \['nums', 'target'\], got \['numbers', 'ta"),
        ({"nums": [1], "target": 1}, r"nums must be 2 to 4 integers from 1 to 1000, got \[1\]"),
        ({"nums": [1, 2.5], "target": 1}, r"nums must be 2 to 4 integers from 1 to 1000, got \[1.0, 2.5\]"),
        ({"nums": [1, 2], "target": -3}, r"target must be an integer from 1 to 1000, got -3"),
    ],
)
def test_data_of_another_schema_is_named(tmp_path, row, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ValueError, match=message):
        Countdown().dataset(data=str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operators": "*"}, r"operators must be one of \['\+-\*/', '\+-'\], got '\*'"),
        ({"max_numbers": 5}, r"max_numbers must be an integer between 3 and 4, got 5"),
        ({"largest": 4}, r"largest must be an integer between 5 and 99, got 4"),
    ],
)
def test_bad_options_are_named_with_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        Countdown(**options)


def test_tools_and_text_agree():
    attempts = ["3 + 4 + 5", "junk", "(3 + 4) * 5"]
    tools = Countdown(multi_turn=True, protocol="tools").environment_factory()
    assert tools.reset(**ROW) == "Numbers: 3 4 5. Target: 35."
    told = [tools.submit(attempt) for attempt in attempts]
    assert told[-1] == "Reward 0.9. The episode is over."
    assert tools.get_reward() == outcome(Countdown(multi_turn=True), *attempts).episode_return
