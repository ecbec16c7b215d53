"""Countdown: make a target from a few numbers with + - * / and parentheses, every number exactly once.

A wrong value still earns a tenth if it is made of exactly the numbers given. In multi-turn play the player is told
what the last expression makes and may try again; a step is worth what it improves on the best so far, so that the
tenth is earned once.
"""

import ast
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from typing import Any, TypeAlias

from datasets import Dataset

from ragen2_trl.envs.checks import check_choice, check_count, check_range
from ragen2_trl.envs.environment import Environment
from ragen2_trl.envs.episode import Episode, Limits
from ragen2_trl.envs.tasks import Row, held_out, impossible_rows, load_tasks, shuffled
from ragen2_trl.envs.tools import ToolEnvironment

Tree: TypeAlias = int | tuple["Tree | None", str, "Tree"]  # a number, or left, operator, right; a sign has no left

OPERATORS = ("+-*/", "+-")
RIGHT, RIGHT_NUMBERS = 1.0, 0.1
TARGETS = (10, 99)  # of generated tasks, both included
COLUMNS = ("nums", "target")

MAX_CHARS = 200  # an expression of the most numbers there may be takes less than half of it
MAX_OPERATORS = 16  # signs included, and so the depth of a tree; the most numbers there may be need 3 and 7 signs
_CHARACTERS = frozenset("0123456789+-*/() ")
_SYMBOLS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


class CountdownEpisode(Episode):
    """Attempts at one target.

    Args:
        numbers: What there is to use.
        target: What to make of them.
        operators: The operators that count.
    """

    def __init__(self, numbers: Sequence[int], target: int, operators: str):
        self.numbers = list(numbers)
        self.target = target
        self.operators = operators
        self.best = 0.0
        self._remark = ""

    def observation(self) -> str:
        task = f"Numbers: {' '.join(map(str, self.numbers))}. Target: {self.target}."
        return f"{self._remark}\n{task}" if self._remark else task

    def is_action(self, action: str) -> bool:
        return bool(action.strip())  # any text is an attempt, worth nothing if it is no expression

    def step(self, action: str) -> float:
        """Judges an attempt: 1.0 right, 0.1 wrong but of exactly the numbers, else 0.0; less the best so far."""
        score, self._remark = self.judge(action)
        self.success = self.done = score == RIGHT
        gained = max(0.0, score - self.best)
        self.best = max(self.best, score)
        return gained

    def judge(self, action: str) -> tuple[float, str]:
        """What an attempt is worth, and what the player is told of it."""
        tree = parse_expression(action, self.operators)
        if tree is None:
            return 0.0, f"That is not an expression of numbers with {' '.join(self.operators)} and parentheses."
        if sorted(numbers_of(tree)) != sorted(self.numbers):  # before anything is computed, so that little is
            return 0.0, "That does not use every number exactly once."
        value = value_of(tree)
        if value == self.target:
            return RIGHT, ""
        makes = "divides by zero" if value is None else f"makes {value}, not {self.target}"
        return RIGHT_NUMBERS, f"{show(tree)} {makes}."

    def plan(self, rng: random.Random) -> tuple[str, list[str]]:
        """One of the right expressions, with its steps as the reasoning; any expression where none is right."""
        tree = solve(self.numbers, self.target, self.operators, rng)
        if tree is None:
            return "No expression makes it.", [self.random_action(rng)]
        steps: list[str] = []
        value_of(tree, steps)
        return " ".join(steps), [show(tree)]

    def random_action(self, rng: random.Random) -> str:
        return show(random_tree(self.numbers, self.operators, rng))


class CountdownTools(ToolEnvironment):
    """Countdown's tools."""

    def submit(self, expression: str) -> str:
        """
        Submits an expression that should make the target.

        Args:
            expression: Every number exactly once, joined by operators and parentheses, such as "(1 + 2) * 3".

        Returns:
            The reward of the expression and what it makes.
        """
        return self._take([str(expression)])  # a model may send a bare number


class Countdown(Environment):
    """Make a target from numbers: 1.0 if right, 0.1 if only the numbers are.

    Tasks are generated, or come from data in the schema of `Jiayi-Pan/Countdown-Tasks-3to4` (`nums`, `target`), of
    which those that cannot be solved are left out. Its one split is divided by what a task asks.

    Args:
        operators: The operators that answers may use and tasks can be solved with, `"+-*/"` or `"+-"`.
        max_numbers: Generated tasks have 3 to this many numbers, 3 or 4.
        largest: Largest number of generated tasks, 5 to 99.
        impossible: Share of generated training tasks whose target no expression makes, 0.0 to 1.0: no completion
            solves them. Held-out tasks (split `"test"`) never are.
        **limits: `multi_turn`, `max_turns`, `max_actions` and `protocol` of `Environment`.

    Raises:
        ValueError: If an option is outside its range.
    """

    name = "countdown"
    returns = (RIGHT_NUMBERS, RIGHT)
    single_turn_limits = Limits(turns=1, actions=1)
    multi_turn_limits = Limits(turns=3, actions=1)
    example = "(1 + 2) * 3"
    splits_answers = False
    tools = CountdownTools

    def __init__(
        self,
        operators: str = "+-*/",
        max_numbers: int = 4,
        largest: int = 99,
        impossible: float = 0.0,
        **limits: Any,
    ):
        super().__init__(**limits)
        check_choice("operators", operators, OPERATORS)
        check_count("max_numbers", max_numbers, 3, 4)
        check_count("largest", largest, 5, 99)
        check_range("impossible", impossible, 0.0, 1.0)
        self.operators = self.answer_operators = operators
        self.max_numbers = max_numbers
        self.largest = largest
        self.impossible = impossible

    def tasks(self, seed: int, split: str, data: str | None) -> Iterator[dict[str, Any]]:
        if data is not None and split == "train":
            check_choice("impossible with data", self.impossible, (0.0,))
        rows = self._generated(seed, split) if data is None else self._loaded(seed, split, data)
        for row in rows:
            if held_out(f"{sorted(row['nums'])} {row['target']}") != (split == "test"):
                continue
            if data is None or solve(row["nums"], row["target"], self.operators) is not None:
                yield row

    def _generated(self, seed: int, split: str) -> Iterator[dict[str, Any]]:
        stream = random.Random(f"{self.name}/{split}/{seed}")
        for impossible in impossible_rows(self.impossible, self.name, split, seed):
            task_seed = stream.getrandbits(31)
            yield {"seed": task_seed, **self.make_task(task_seed, impossible)}

    def make_task(self, seed: int, impossible: bool = False) -> dict[str, Any]:
        """The task of a seed: a random expression of random numbers whose value is an integer in `TARGETS`.

        An impossible one has numbers that some expression brings there, and another target, which none makes.
        """
        rng = random.Random(seed)
        while True:
            numbers = [rng.randint(1, self.largest) for _ in range(rng.randint(3, self.max_numbers))]
            value = value_of(random_tree(numbers, self.operators, rng))
            if value is not None and value.denominator == 1 and TARGETS[0] <= value <= TARGETS[1]:
                target = self._out_of_reach(numbers, rng) if impossible else int(value)
                if target is not None:
                    return {"nums": numbers, "target": target}

    def _out_of_reach(self, numbers: list[int], rng: random.Random) -> int | None:
        low, high = TARGETS
        targets = rng.sample(range(low, high + 1), high + 1 - low)
        return next((target for target in targets if solve(numbers, target, self.answer_operators) is None), None)

    def _loaded(self, seed: int, split: str, data: str) -> Iterator[dict[str, Any]]:
        for index, row in shuffled(self.load(data), COLUMNS, random.Random(f"{self.name}/{split}/{seed}")):
            numbers, target = checked_row(row)
            yield {"seed": index, "nums": numbers, "target": target}

    def load(self, data: str) -> Dataset:
        """Rows of data: of the only split there is."""
        return load_tasks(data, "train")

    def episode(self, row: Row, rng: random.Random) -> CountdownEpisode:
        return CountdownEpisode(row["nums"], row["target"], self.operators)

    def instructions(self) -> str:
        return (
            f"Make the target from the numbers with {' '.join(self.operators)} and parentheses, using every number "
            f"exactly once. Reward: {RIGHT:g} if right, {RIGHT_NUMBERS:g} if only the numbers are."
        )


def checked_row(row: Row) -> tuple[list[int], int]:
    numbers, target = row["nums"], row["target"]
    if not isinstance(numbers, list) or not 2 <= len(numbers) <= 4 or not all(_is_count(n) for n in numbers):
        raise ValueError(f"nums must be 2 to 4 integers from 1 to 1000, got {numbers!r}")
    if not _is_count(target):
        raise ValueError(f"target must be an integer from 1 to 1000, got {target!r}")
    return numbers, target


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= 1000


# Arithmetic on integers: expressions read, worked out exactly, found and written


def parse_expression(text: str, operators: str = "+-*/") -> Tree | None:
    """The tree of an arithmetic expression, `None` for any other text.

    Numbers are plain decimal integers. A minus may also be a sign, which makes nothing out of nothing. One `= integer`
    may follow; the expression alone is judged. `**`, `//`, calls, other digits and everything else are refused.

    >>> parse_expression("(1 + 2) * -3 = 9")
    ((1, '+', 2), '*', (None, '-', 3))
    >>> parse_expression("2 ** 3") is None
    True
    """
    text = text.strip()
    if len(text) > MAX_CHARS:
        return None
    text, equals, result = text.partition("=")
    stated = result.strip().removeprefix("-")
    if equals and not (stated.isascii() and stated.isdecimal()):
        return None
    # With these characters, this length and this depth neither CPython's parser nor what follows runs out of stack,
    # however much of it the caller has used.
    if not _CHARACTERS.issuperset(text) or sum(map(text.count, "+-*/")) > MAX_OPERATORS:
        return None
    try:
        return _tree(ast.parse(text.strip(), mode="eval").body, operators)
    except (SyntaxError, ValueError):
        return None


def _tree(node: ast.expr, operators: str) -> Tree:
    if isinstance(node, ast.BinOp) and (symbol := _SYMBOLS.get(type(node.op), "none")) in operators:
        return _tree(node.left, operators), symbol, _tree(node.right, operators)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return None, "-", _tree(node.operand, operators)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(f"expression must have numbers, {operators} and parentheses alone")


def numbers_of(tree: Tree | None) -> list[int]:
    """The numbers of an expression, from left to right."""
    if tree is None or isinstance(tree, int):
        return [] if tree is None else [tree]
    return numbers_of(tree[0]) + numbers_of(tree[2])


def value_of(tree: Tree | None, steps: list[str] | None = None) -> Fraction | None:
    """The exact value of an expression, `None` if it divides by zero; `steps` gets a line for each operator.

    >>> value_of(((1, "+", 2), "*", 3), steps := []), steps
    (Fraction(9, 1), ['1 + 2 = 3.', '3 * 3 = 9.'])
    """
    if tree is None or isinstance(tree, int):
        return Fraction(tree or 0)  # a sign takes from nothing
    left, right = value_of(tree[0], steps), value_of(tree[2], steps)
    result = None if left is None or right is None else _apply(left, tree[1], right)
    if result is not None and steps is not None:
        steps.append(f"{left} {tree[1]} {right} = {result}.")
    return result


def show(tree: Tree, outer: bool = True) -> str:
    """An expression as text.

    >>> show(((1, "+", 2), "*", (None, "-", 3)))
    '(1 + 2) * -3'
    """
    if isinstance(tree, int):
        return str(tree)
    left, operator, right = tree
    if left is None:
        return f"-{show(right, False)}"
    text = f"{show(left, False)} {operator} {show(right, False)}"
    return text if outer else f"({text})"


def _apply(left: Fraction, operator: str, right: Fraction) -> Fraction | None:
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    return left / right if right else None


def _splits(numbers: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every way to put the numbers on the two sides of an operator, each once."""
    everything = range(len(numbers))
    sides = [side for size in range(1, len(numbers)) for side in combinations(everything, size)]
    pairs = [
        (tuple(numbers[i] for i in side), tuple(numbers[i] for i in everything if i not in side)) for side in sides
    ]
    return list(dict.fromkeys(pairs))


@lru_cache(maxsize=256)
def _values(numbers: tuple[int, ...], operators: str) -> dict[Fraction, Tree]:
    """Every value that the numbers make, and one way to make it."""
    if len(numbers) == 1:
        return {Fraction(numbers[0]): numbers[0]}
    found: dict[Fraction, Tree] = {}
    for left, right in _splits(numbers):
        for a, left_tree in _values(left, operators).items():
            for b, right_tree in _values(right, operators).items():
                for operator in operators:
                    value = _apply(a, operator, b)
                    if value is not None:
                        found.setdefault(value, (left_tree, operator, right_tree))
    return found


def solve(
    numbers: Sequence[int], target: int, operators: str = "+-*/", rng: random.Random | None = None
) -> Tree | None:
    """An expression of all the numbers that makes a positive target, `None` if there is none; exact and complete.

    With `rng` one of several is drawn, though not evenly.

    >>> show(solve([3, 8, 1], 24))
    '1 * (3 * 8)'
    """
    splits = _splits(tuple(sorted(numbers)))
    if rng is not None:
        rng.shuffle(splits)
    for left, right in splits:
        makes = _values(right, operators)
        for a, left_tree in _values(left, operators).items():
            # What would have to stand on the right, instead of trying all of it: the last operator has most to try.
            wanted = {"+": target - a, "-": a - target, "*": target / a if a else None, "/": a / target if a else None}
            for operator in operators:
                b = wanted[operator]
                if b in makes:
                    return left_tree, operator, makes[b]
    return None


def random_tree(numbers: Sequence[int], operators: str, rng: random.Random) -> Tree:
    """An expression that uses every number once: two parts at random are joined until one is left."""
    parts: list[Tree] = list(numbers)
    while len(parts) > 1:
        rng.shuffle(parts)
        parts.append((parts.pop(), rng.choice(operators), parts.pop()))
    return parts[0]
