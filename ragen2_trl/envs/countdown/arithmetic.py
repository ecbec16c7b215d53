"""Arithmetic on integers with + - * / and parentheses: expressions read, worked out exactly, found and written."""

import ast
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, islice
from typing import TypeAlias

Tree: TypeAlias = int | tuple["Tree", str, "Tree"]  # a number, or left, operator, right

MAX_CHARS = 200  # an expression of the most numbers there may be takes less than half of it
MAX_OPERATORS = 16  # signs included, and so the depth of a tree; the most numbers there may be need 3 and 7 signs
_DIGITS = re.compile(r"\d+")
_CHARACTERS = frozenset("0123456789+-*/() ")
_SYMBOLS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def parse_expression(text: str, operators: str = "+-*/") -> ast.expr | None:
    """The syntax tree of an arithmetic expression, `None` for any other text.

    Numbers are plain decimal integers. A minus may also be a sign, which makes nothing out of nothing. One `= integer`
    may follow; the expression alone is judged. `**`, `//`, calls, other digits and everything else are refused.

    >>> ast.unparse(parse_expression("(1 + 2) * 3 = 9"))
    '(1 + 2) * 3'
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
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None
    return tree if all(_is_arithmetic(node, operators) for node in ast.walk(tree)) else None


def _is_arithmetic(node: ast.AST, operators: str) -> bool:
    if isinstance(node, ast.BinOp):
        return _SYMBOLS.get(type(node.op), "**") in operators
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub)
    return isinstance(node, (ast.Constant, ast.operator, ast.USub))  # of those characters, a constant is an integer


def numbers_of(tree: ast.expr) -> list[int]:
    """The numbers of an expression, sorted."""
    return sorted(
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, int)
    )


def whole_numbers(text: str, count: int) -> list[int] | None:
    """The whole numbers that stand anywhere in a text, sorted; `None` where there are not `count` of them.

    >>> whole_numbers("4.5 of 3", 3), whole_numbers("1 2", 3)
    ([3, 4, 5], None)
    """
    digits = [match.group() for match in islice(_DIGITS.finditer(text), count + 1)]
    if len(digits) != count or any(len(number) > MAX_CHARS for number in digits):  # Python reads 4300 digits, no more
        return None
    return sorted(map(int, digits))


def value_of(tree: ast.expr) -> Fraction | None:
    """The exact value of an expression, `None` if it divides by zero. Its depth is at most `MAX_OPERATORS`."""
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return Fraction(tree.value)
    if isinstance(tree, ast.UnaryOp):
        operand = value_of(tree.operand)
        return None if operand is None else -operand
    assert isinstance(tree, ast.BinOp)  # for the type checker: `parse_expression` gives nothing else
    left, right = value_of(tree.left), value_of(tree.right)
    return None if left is None or right is None else _apply(left, _SYMBOLS[type(tree.op)], right)


def written(tree: ast.expr) -> str:
    """An expression as text; unlike `ast.unparse` it needs one frame of the stack a level, not six.

    >>> written(parse_expression("-3/(4+5)"))
    '-3 / (4 + 5)'
    """
    if isinstance(tree, ast.BinOp):
        left, right = (
            f"({written(side)})" if isinstance(side, ast.BinOp) else written(side) for side in (tree.left, tree.right)
        )
        return f"{left} {_SYMBOLS[type(tree.op)]} {right}"
    if isinstance(tree, ast.UnaryOp):
        return f"-({written(tree.operand)})" if isinstance(tree.operand, ast.BinOp) else f"-{written(tree.operand)}"
    assert isinstance(tree, ast.Constant)  # for the type checker, as above
    return str(tree.value)


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


def sums_with_signs(numbers: Sequence[int], target: int) -> bool:
    """Whether the numbers sum to the target with a sign each, as with `operators="+-"`.

    >>> sums_with_signs([3, 8, 1], 6), sums_with_signs([3, 8, 1], 24)
    (True, False)
    """
    sums = {0}
    for number in numbers:
        sums = {value + sign * number for value in sums for sign in (1, -1)}
    return target in sums


def show(tree: Tree, outer: bool = True) -> str:
    """A tree as text.

    >>> show(((1, "+", 2), "*", 3))
    '(1 + 2) * 3'
    """
    if isinstance(tree, int):
        return str(tree)
    left, operator, right = tree
    text = f"{show(left, False)} {operator} {show(right, False)}"
    return text if outer else f"({text})"


def explain(tree: Tree) -> str:
    """An expression step by step, innermost first.

    >>> explain(((1, "+", 2), "*", 3))
    '1 + 2 = 3. 3 * 3 = 9.'
    """
    steps: list[str] = []
    evaluate(tree, steps)
    return " ".join(steps)


def evaluate(tree: Tree, steps: list[str]) -> Fraction | None:
    """The value of a tree, `None` if it divides by zero; `steps` gets a line for each operator."""
    if isinstance(tree, int):
        return Fraction(tree)
    left, right = evaluate(tree[0], steps), evaluate(tree[2], steps)
    if left is None or right is None:
        return None
    result = _apply(left, tree[1], right)
    steps.append(f"{left} {tree[1]} {right} = {result}.")
    return result


def random_tree(numbers: Sequence[int], operators: str, rng: random.Random) -> Tree:
    """An expression that uses every number once: two parts at random are joined until one is left."""
    parts: list[Tree] = list(numbers)
    while len(parts) > 1:
        rng.shuffle(parts)
        parts.append((parts.pop(), rng.choice(operators), parts.pop()))
    return parts[0]
