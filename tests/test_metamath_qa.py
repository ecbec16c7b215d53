"""MetaMathQA: which answers are the same, what attempts are worth, and where tasks come from."""

import json
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from stacks import with_frames_left

from ragen2_trl.envs import format_response
from ragen2_trl.envs.metamath_qa import MetaMathQA, gold_answer, make_problem, same_answer

ROW = {"seed": 1, "question": "How much is 3 + 4?", "answer": "7", "solution": "3 + 4 = 7."}


def outcome(env, *answers, row=ROW):
    play = env.play(row, random.Random(0))
    for text in answers:
        play.respond(format_response("", [text]))
    return play.outcome


# Answers


@pytest.mark.parametrize(
    ("gold", "given"),
    [
        ("7", "7.0"),
        ("7", " $7$. "),
        ("7", r"\boxed{7}"),
        ("1200", "1,200"),
        (r"\$32,\!000", "32000"),
        ("50\\%", "50"),
        (r"90^\circ", "90"),
        (r"\frac{1}{2}", "0.5"),
        (r"\frac12", "1/2"),
        (r"\dfrac{3}{4}", ".75"),
        (r"-2\frac12", "-2.5"),
        (r"5\text{ cm}", "5"),
        (r"\text{East}", "east"),
        (r"\text{(B)}", "(b)"),
        (r"8\text{ cm}^2", "8"),
        (r"8\text{ inches}", "8 inches"),
        (r"90^\circ", "90°"),
        ("5", r"\(5\)"),
        ("-1", "\u22121"),
        (r"3\sqrt{2}", "3*sqrt(2)"),
        (r"3\sqrt{2}", "3√2"),
        (r"\frac{\pi}{2}", "pi/2"),
        (r"\frac{-1}{2}", "-0.5"),
        (r"(\frac{-1}{2},3)", r"(-\frac12, 3)"),
        ("x=5", "5"),
        ("5", "x = 5"),
        ("x^2+2x", "x(x + 2)"),
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"),
        (r"2\pi", r"\pi \cdot 2"),
        ("3+4i", "4i + 3"),
        ("1,000", "1000"),
        ("2^{10}", "1024"),  # a closed form, and what it is
        ("2\\sqrt{3}", r"\sqrt{12}"),
        ("2^{2004}", "2^{2004}"),
        (r"10^{-30}x", r"\frac{x}{10^{30}}"),
        ("x^{-1/2}", r"\frac{1}{\sqrt{x}}"),
        ("(5,4)", "(5, 4.0)"),
        (r"(-\infty,2]", r"(-\infty, 2.0]"),
        ("4,5", "5, 4"),
        (r"\{1,2\}", r"\{2,1\}"),
    ],
)
def test_answers_of_the_same_worth(gold, given):
    assert same_answer(given, gold)


@pytest.mark.parametrize(
    ("gold", "given"),
    [
        ("7", ""),
        (".", "$"),
        ("7", "8"),
        ("4", "4, 5"),
        ("45", "4 5"),
        ("1", r"\boxed{1}\boxed{2}"),
        ("5", r"5\text{ or }6"),
        ("5", r"5\text{ or six}"),
        ("5", "4=5"),
        ("5", "2(3)"),  # a mixed number to math-verify's parser
        ("x=5", "y=5"),
        ("(5,4)", "(6,3)"),  # empty intervals both
        ("(5,4)", "(4,5)"),
        ("(1,2)", "[1,2]"),
        ("4,4,5", "4,5,5"),
        (r"\text{east}", "seat"),
        (r"\frac{1}{3}", "0.333333"),
        (r"\pi", "3.14159265358979"),
        ("10^{-30}x", "10^{-31}x"),
        ("0", "10^{-10}"),
        ("10000000000", "10^{10}+1"),
        ("x", r"\sqrt{x^2}"),
        (r"\sqrt{\frac{x}{y}}", r"\frac{\sqrt{x}}{\sqrt{y}}"),  # where both are below 0, too
        (r"\sqrt{2}+x", "1.414213562373095+x"),
        (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt{3}}{3}"),
        ("3", "\u0663"),
        ("1", "x/x+1"),
        ("42", "17+25"),
        ("42", r"\frac{84}{2}"),
        ("42", "41 2/2"),
        ("42", "--42"),
        ("42", "(42)"),
        (r"\frac{1}{2}", "2/4"),
        (r"\frac{-1}{2}", "17-17.5"),
        (r"x\frac{-1}{2}", "x-1/2"),
        (r"5\text{ m}", "5 mm"),
        (r"8\text{ cm}^2", r"8\text{ cm}"),
        ("1024", "2^{10}"),
        ("3", r"\sqrt{9}"),
        ("x=42", "x=17+25"),
        ("1,000", "1,0"),  # a number is no list of its digits
        ("12,345", "12, 345"),
        ("1, 200", "1200"),  # and a list no number
        ("(1,000,5)", "(1,0,5)"),
        ("0", "5 and 0"),  # words are no products
        ("0", "0x"),
        ("5", "5/0"),
        ("5", "[" + "5," * 100 + "5]"),
    ],
)
def test_answers_of_another_worth(gold, given):
    assert not same_answer(given, gold)


HOSTILE = [
    r"9^{9^{9^9}}",
    r"\binom{10^9}{5*10^8}",
    r"10^{10^{10}}!",
    r"0.1^{1000000000}",
    r"0.5^{9^{9^{2}}}",
    r"9^{9^{9}}-9^{9^{9}}",
    r"x^{99999999999}",
    r"x^{x^{x^x}}",
    r"((9^9)^9)^9",
    r"((x+y+z+1)^9)^9",
    r"\sum_{i=1}^{10^9} i",
    r"\int_0^1 x",
    "\\sqrt{" * 40 + "2" + "}" * 40,
    "\\frac{" * 40,
    "(" * 20 + "x" + ")" * 20,
    "(" * 1_000_000,
    "{" * 100 + "}" * 100,
    "-" * 39 + "1",
    "1/" * 19 + "1",
    "|x|" * 13,
    "9" * 300,
    "1," * 150,
    "$" * 300,
    " " * 1_000_000,
    "\\left" * 60,
    "\x00\ud800",
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("gold", ["5", "x+1", r"\sqrt{2}", "1,2,3"])
def test_hostile_text_is_worth_nothing_and_needs_no_time_to_speak_of(gold):
    for text in HOSTILE:
        assert not same_answer(text, gold)


@pytest.mark.parametrize(
    "text", ["-" * 39 + "x", "(" * 18 + "x" + ")" * 18, "x" + "+x" * 19, "x^{" * 12 + "2" + "}" * 12]
)
def test_nested_signs_and_powers_need_little_of_the_stack(text):
    env = MetaMathQA()
    (reward,) = env.reward_funcs
    columns = {"seed": [1], "question": ["?"], "answer": ["x^3"], "solution": [""]}
    completions = [format_response("", [text])]
    assert with_frames_left(120, lambda: reward([None], completions, **columns)) == [0.0]


LATEX = st.lists(
    st.sampled_from([*"0123456789xyi+-*/^(){},=. ", r"\frac", r"\sqrt", r"\pi", r"\boxed{", r"\text{", "\\"]),
    max_size=25,
).map("".join)


@given(st.text() | LATEX)
@example("7-")
@example("--7")
def test_no_text_raises_and_no_text_earns_a_reward_without_a_right_answer(text):
    gold = "7.125193"  # a value that no short text has by chance
    assert outcome(MetaMathQA(), text, row={**ROW, "answer": gold}).episode_return in (0.0, -0.1)
    same_answer(text, "x+1")


@given(st.integers(-(10**6), 10**6), st.integers(1, 1000))
def test_fractions_are_exact(top, bottom):
    assert same_answer(f"{top}/{bottom}", f"{'-' if top < 0 else ''}\\frac{{{abs(top)}}}{{{bottom}}}")
    assert not same_answer(f"{top}/{bottom}", f"{top + 1}/{bottom}")


def test_the_gold_answer_is_the_last_one():
    assert gold_answer("The answer is: 3\nNo. The answer is: 4 ") == "4"
    assert gold_answer("So it is 4.") == ""


# Rewards


def test_each_wrong_answer_halves_the_reward():
    env = MetaMathQA(multi_turn=True)
    for wrong in range(5):
        result = outcome(env, *["8"] * wrong, "7")
        assert (result.episode_return, result.success) == (0.5**wrong, True)
    assert outcome(env, *["8"] * 5) == outcome(env, "1", "2", "3", "4", "5")
    assert outcome(env, *["8"] * 5).episode_return == 0.0


def test_the_player_is_told_that_an_answer_is_not_right_and_never_which_one_is():
    play = MetaMathQA(multi_turn=True).play(ROW, random.Random(0))
    told = play.respond(format_response("", ["8"]))
    assert told.startswith("Reward 0. Turn 2 of 5.\nNot right.\nHow much is 3 + 4?\n")
    assert "7" not in told


# Tasks


def test_generated_problems_are_solved_by_their_solutions():
    env, rng = MetaMathQA(), random.Random(0)
    for row in env.dataset(200):
        play = env.play(row, rng)
        reasoning, actions = play.episode.plan(rng)
        left, right = reasoning.removesuffix(".").split(" = ")
        assert eval(left) == int(right) == int(actions[0])
        play.respond(format_response(reasoning, actions))
        assert play.outcome.success


@pytest.fixture
def problems_file(tmp_path):
    rng = random.Random(0)
    rows = [make_problem(rng) for _ in range(100)]
    rows = [{**row, "query": f"{row['query']} ({k})", "type": "GSM_Rephrased"} for row in rows for k in range(3)]
    rows.append({**rows[0], "response": "I do not know."})
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_local_data_loads_and_all_wordings_of_a_question_land_on_one_side(problems_file):
    env = MetaMathQA()
    train, test = env.dataset(data=problems_file), env.dataset(data=problems_file, split="test")
    assert len(train) + len(test) == 300  # without the one that has no answer
    assert len(test) % 3 == 0 and len(test) > 20
    wordings = [{text.rpartition(" (")[0] for text in rows["question"]} for rows in (train, test)]
    assert not wordings[0] & wordings[1]
    assert len(set(train["seed"])) == len(train)
    assert train["seed"][:] != env.dataset(data=problems_file, seed=1)["seed"][:]
