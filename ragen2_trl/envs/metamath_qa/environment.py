"""MetaMathQA: a word problem or a competition problem, and its answer as a number or in LaTeX."""

import random
from collections.abc import Callable, Iterator
from typing import Any

from ragen2_trl.envs.environment import Environment
from ragen2_trl.envs.episode import Episode, Limits
from ragen2_trl.envs.metamath_qa.math_answers import same_answer
from ragen2_trl.envs.responses import plain_text
from ragen2_trl.envs.tasks import Row, held_out, load_tasks, shuffled
from ragen2_trl.envs.tools import ToolEnvironment

COLUMNS = ("query", "response", "original_question")
ANSWER_MARK = "The answer is:"


def gold_answer(response: str) -> str:
    """The answer at the end of a response of the data, empty if there is none.

    >>> gold_answer("3 + 4 = 7.\\nThe answer is: 7")
    '7'
    """
    _, _, answer = response.rpartition(ANSWER_MARK)
    return answer.strip() if ANSWER_MARK in response else ""


class MetaMathQAEpisode(Episode):
    """Attempts at one question.

    Args:
        question: What is asked.
        answer: The right answer.
        solution: The way to it, for demonstrations.
        is_right: Whether an answer, the first argument, is as good as the right one.
    """

    def __init__(self, question: str, answer: str, solution: str, is_right: Callable[[str, str], bool] = same_answer):
        self.question = plain_text(question, keep_lines=True)
        self.answer = answer
        self.solution = solution
        self.worth = 1.0
        self._is_right = is_right

    def observation(self) -> str:
        return self.question if self.worth == 1.0 else f"Not right.\n{self.question}"

    def is_action(self, action: str) -> bool:
        return bool(action.strip())

    def step(self, action: str) -> float:
        """Judges an answer: a right one is worth 1.0 at first, and half as much after each wrong one."""
        if self._is_right(action, self.answer):
            self.success = self.done = True
            return self.worth
        self.worth /= 2
        return 0.0

    def plan(self, rng: random.Random) -> tuple[str, list[str]]:
        """The solution and the answer of the data."""
        return self.solution, [self.answer]

    def random_action(self, rng: random.Random) -> str:
        """A whole number from 0 to 99, as most answers are."""
        return str(rng.randrange(100))


class MetaMathQATools(ToolEnvironment):
    """MetaMathQA's tools."""

    def answer(self, value: str) -> str:
        """
        Answers the question.

        Args:
            value: The answer alone: a number or an expression, in plain text or LaTeX.

        Returns:
            The reward, and the question again if the answer is not right.
        """
        return self._take([str(value)])  # a model may send a bare number


class MetaMathQA(Environment):
    """Answer a mathematical question: 1.0 if right, halved by each wrong attempt before.

    Tasks come from data in the schema of `meta-math/MetaMathQA`, or from a small generator of one-step word problems
    in that schema, a stand-in for demonstrations and tests. The one split of the data is divided by
    `original_question`, so that all forms of a question land on one side. Responses that end without an answer
    cannot be judged and are left out.

    Args:
        **limits: `multi_turn`, `max_turns`, `max_actions` and `protocol` of `Environment`.

    Raises:
        ValueError: If an option is outside its range.
    """

    name = "metamath_qa"
    returns = (0.0, 1.0)
    single_turn_limits = Limits(turns=1, actions=1)
    multi_turn_limits = Limits(turns=5, actions=1)
    example = "42"
    splits_answers = False
    tools = MetaMathQATools

    def tasks(self, seed: int, split: str, data: str | None) -> Iterator[dict[str, Any]]:
        rows = self._generated(seed, split) if data is None else self._loaded(seed, split, data)
        for number, row in rows:
            task = self._task(number, row)
            if task["answer"] and held_out(row["original_question"]) == (split == "test"):
                yield task

    def _task(self, number: int, row: Row) -> dict[str, Any]:
        solution, _, _ = row["response"].rpartition(ANSWER_MARK)
        answer = self.gold(row["response"])
        return {"seed": number, "question": row["query"], "answer": answer, "solution": solution.strip()}

    def gold(self, response: str) -> str:
        """The right answer in a response of the data, empty if there is none."""
        return gold_answer(response)

    def _generated(self, seed: int, split: str) -> Iterator[tuple[int, dict[str, str]]]:
        stream = random.Random(f"{self.name}/{split}/{seed}")
        while True:
            number = stream.getrandbits(31)
            yield number, make_problem(random.Random(number))

    def _loaded(self, seed: int, split: str, data: str) -> Iterator[tuple[int, dict[str, Any]]]:
        rows = load_tasks(data, "train")  # the only split there is
        for index, row in shuffled(rows, COLUMNS, random.Random(f"{self.name}/{split}/{seed}")):
            yield index, checked_row(row)

    def episode(self, row: Row, rng: random.Random) -> MetaMathQAEpisode:
        return MetaMathQAEpisode(row["question"], row["answer"], row["solution"])

    def instructions(self) -> str:
        again = " A wrong answer may be mended, for half the reward each time." if self.max_turns > 1 else ""
        return f"Answer the question with a number or an expression alone. Reward: 1 if right.{again}"


def checked_row(row: dict[str, Any]) -> dict[str, Any]:
    for column in COLUMNS:
        if not isinstance(row[column], str):
            raise ValueError(f"{column} must be text, got {row[column]!r}")
    return row


# Two forms of a question, and its way to the answer: what is asked of `a` and `b` is `c`.
_PROBLEMS = (
    (
        "{name} has {a} {things} and buys {b} more. How many {things} does {name} have?",
        "After buying {b} {things}, {name}, who had {a}, has how many?",
        "{a} + {b} = {c}.",
    ),
    (
        "{name} has {c} {things} and gives {b} away. How many {things} are left?",
        "Of {c} {things} {name} gives {b} to a friend and keeps how many?",
        "{c} - {b} = {a}.",
    ),
    (
        "{name} fills {a} bags with {b} {things} each. How many {things} is that?",
        "With {b} {things} in each of {a} bags, how many {things} has {name}?",
        "{a} * {b} = {c}.",
    ),
    (
        "{name} shares {c} {things} among {b} friends. How many does each get?",
        "Each of {b} friends gets the same of {c} {things} from {name}. How many?",
        "{c} / {b} = {a}.",
    ),
)
_PEOPLE = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn")
_THINGS = ("apples", "books", "cards", "eggs", "pens", "shells")


def make_problem(rng: random.Random) -> dict[str, str]:
    """A one-step word problem as a row of MetaMathQA: `query` is one of two forms of `original_question`."""
    original, rephrased, solution = rng.choice(_PROBLEMS)
    product = "*" in solution or "/" in solution
    a, b = (rng.randint(2, 9 if product else 40) for _ in range(2))
    words = {"name": rng.choice(_PEOPLE), "things": rng.choice(_THINGS), "a": a, "b": b}
    words["c"] = a * b if product else a + b
    steps = solution.format(**words)
    answer = steps.removesuffix(".").rpartition(" ")[2]
    return {
        "query": rng.choice((original, rephrased)).format(**words),
        "response": f"{steps}\n{ANSWER_MARK} {answer}",
        "original_question": original.format(**words),
    }
