"""MetaMathQA: a word problem or a competition problem, and its answer as a number or in LaTeX, compared by value.

Text is compared first, then numbers as exact fractions. Where the right answer is a number, that is all: `17+25` is no
answer to how much that is. Where it is an expression, another one of a small and bounded form equals it if both have
the same value, to more digits than such a text could name, wherever they are calculated. math-verify is not asked: its
parser takes a second for ten nested parentheses, and reads `2(3)` as a mixed number, and `seat` as the product `east`.
"""

import ast
import cmath
import functools
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from ragen2_trl.envs.environment import Environment
from ragen2_trl.envs.episode import Episode, Limits
from ragen2_trl.envs.responses import plain_text
from ragen2_trl.envs.tasks import Row, held_out, load_tasks, shuffled
from ragen2_trl.envs.tools import ToolEnvironment

COLUMNS = ("query", "response", "original_question")
ANSWER_MARK = "The answer is:"

MAX_ANSWER_CHARS = 300  # of text to compare
MAX_EXPRESSION_CHARS = 40  # of text to calculate with
MAX_DIGITS = 12  # of a number in it
MAX_ELEMENTS = 10
_CALCULATED_DIGITS, _SAME = 60, 1e-40  # two expressions of so few characters do not come closer by chance


# Answers


def same_answer(given: str, gold: str) -> bool:
    r"""Whether an answer is worth the same as the right one; whatever the text, within milliseconds.

    Case, spaces, dollar and percent signs, degrees and a final full stop do not count. A unit in `\text{}` may be left
    out, or stand there in plain words. `x = 5` is 5, `sqrt(2)` is `\sqrt{2}`. Lists are compared element by element,
    in brackets in order and elsewhere in any order; one value never equals several. Decimals are exact: 0.33 is not
    1/3.

    A number is a decimal, or a fraction or mixed number in lowest terms; nothing else equals one. Commas with three
    digits after each, without spaces and outside of brackets, are those of thousands. An expression may have no
    letters but those of the right one.

    >>> same_answer("0.5", r"\frac{1}{2}"), same_answer("x^2 + 2x", "x(x+2)"), same_answer("4, 5", "4")
    (True, True, False)
    >>> same_answer("42,000", "42000"), same_answer("84/2", "42"), same_answer("17+25", "42")
    (True, False, False)
    """
    if len(given) > MAX_ANSWER_CHARS:
        return False
    given, gold = _plain(given), _plain(gold)
    if not given or given == gold:
        return bool(given)
    (name, value, unit), (gold_name, gold_value, gold_unit) = _parts(given), _parts(gold)
    value = value.removesuffix(gold_unit) if not unit else value
    if not value or unit not in ("", gold_unit) or (name and gold_name and name != gold_name):
        return False
    if _same_value(value, gold_value):
        return True
    if _fraction(gold_value) is not None:  # 1000 has been "1,000" perhaps, and is no list of 1 and 0
        return False
    return _same_list(_elements(value), _elements(gold_value))


_BRACKETS = re.compile(r"[(\[]|\\\{")
_THOUSANDS = re.compile(r"(?<![0-9.])(?<![0-9],)[0-9]{1,3}(?:,[0-9]{3})+(?!,?[0-9])")


def _plain(text: str) -> str:
    """The text without what does not count, and with one spelling of fractions and roots."""
    text = " ".join(text.replace("\u2212", "-").split()).lstrip("$ ").rstrip("$ .").lower()
    text = re.sub(r"^\\[(\[] ?| ?\\[)\]]$", "", text)
    if text.startswith("\\boxed{"):
        text = text.removeprefix("\\boxed{").removesuffix("}")
    text = re.sub(r"\\(?:left|right)(?![a-z])|\\!|\{(?=,\})|(?<=,)\}|\^(?:\\circ|\{\\circ\})|°|\\?%$|^\\?\$", "", text)
    text = re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", re.sub(r"\\[,;: ]", " ", text))
    text = re.sub(r"(?<![a-z\\])(?:sqrt|√) ?(?:\(([^()]*)\)|([0-9]+))", r"\\sqrt{\1\2}", text)
    text = re.sub(r"(?<![a-z\\])pi(?![a-z])", r"\\pi", text)
    text = re.sub(r"\\(frac|sqrt) ?([0-9])", r"\\\1{\2}", text)
    text = re.sub(r"(\\frac\{[^{}]*\}) ?([0-9])", r"\1{\2}", text)
    text = re.sub(r"(?<![^(\[{,=])\\frac\{-([0-9]+)\}", r"-\\frac{\1}", text)
    words = re.fullmatch(r"\\(?:text|mbox|textbf|mathrm)\{([^{}]*)\}", text)
    text = words[1] if words else text
    if not _BRACKETS.search(text):  # within them a comma parts elements
        text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    return re.sub(r"(?<![0-9]) | (?![0-9])", "", text.strip())  # 4 5 is not 45


def _parts(text: str) -> tuple[str, str, str]:
    """The name that a value is assigned to, the value, and its unit; perhaps empty."""
    measured = re.fullmatch(r"(.*?)\\text\{(.*)\}((?:\^\{?[23]\}?)?)", text)
    text, unit = (measured[1], measured[2] + measured[3]) if measured else (text, "")
    assigned = re.fullmatch(r"([a-z])(?:=|\\in(?![a-z]))([^=]*)", text)
    return (assigned[1], assigned[2], unit) if assigned else ("", text, unit)


def _same_value(given: str, gold: str) -> bool:
    if given == gold:
        return True
    gold_fraction = _fraction(gold)
    if gold_fraction is not None:
        lowest_terms = _fraction(gold, lowest_terms=True) is not None  # if the data has not been careful, none need be
        return _fraction(given, lowest_terms) == gold_fraction
    return _same_expression(given, gold)


_DIGITS = r"[0-9]{1,40}"
_DECIMAL = re.compile(rf"([+-]?)((?:0|[1-9][0-9]{{0,39}})?(?:\.{_DIGITS})?)")  # 000 is the end of 1,000
_RATIO = re.compile(rf"([+-]?)({_DIGITS})?\\frac\{{({_DIGITS})\}}\{{({_DIGITS})\}}")
_SLASHED = re.compile(rf"([+-]?)(?:({_DIGITS}) )?({_DIGITS})/({_DIGITS})")


def _fraction(text: str, lowest_terms: bool = False) -> Fraction | None:
    """A decimal, a fraction or a mixed number exactly, `None` for any other text."""
    if (match := _DECIMAL.fullmatch(text)) and match[2]:
        return Fraction(match[1] + match[2])
    if (match := _RATIO.fullmatch(text) or _SLASHED.fullmatch(text)) and int(match[4]):
        numerator, denominator = int(match[3]), int(match[4])
        part = Fraction(numerator, denominator)
        # 84/2 is a division that nobody has carried out, and 2 3/2 a sum.
        is_lowest = denominator == part.denominator > 1 and (not match[2] or part < 1)
        value = int(match[2] or 0) + part
        return None if lowest_terms and not is_lowest else -value if match[1] == "-" else value
    return None


def _elements(text: str) -> tuple[str, list[str]]:
    """The brackets around a list, none for a set, and its elements; the text itself if it is no list."""
    brackets, inside = "", text
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        brackets, inside = text[0] + text[-1], text[1:-1]
    elif text.startswith("\\{") and text.endswith("\\}"):
        inside = text[2:-2]
    depth, elements = 0, [""]
    for character in inside:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:  # the brackets were no pair, as in (1,2),(3,4)
            return "", [text]
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return brackets, elements


def _same_list(given: tuple[str, list[str]], gold: tuple[str, list[str]]) -> bool:
    (brackets, elements), (gold_brackets, gold_elements) = given, gold
    if brackets != gold_brackets or len(elements) != len(gold_elements) or not 2 <= len(elements) <= MAX_ELEMENTS:
        return False
    if brackets:
        return all(map(_same_value, elements, gold_elements))
    left = list(gold_elements)
    for element in elements:
        match = next((other for other in left if _same_value(element, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


# Expressions: a little LaTeX, read as Python's syntax and calculated here

_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\*\*|[a-zπ+\-*/()]")
_LEADING_ZERO = re.compile(r"(?<![0-9.])0[0-9]")
_NAMES = "abcdefghijklmnopqrstuvwxyzπ"
_NESTED = (
    (re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}"), r"((\1)/(\2))"),
    (re.compile(r"\\sqrt\{([^{}]*)\}"), r"((\1)^(1/2))"),
    (re.compile(r"\^\{([^{}]*)\}"), r"^(\1)"),
)
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def _same_expression(given: str, gold: str) -> bool:
    tree, gold_tree = _expression(given), _expression(gold)
    # Letters of its own make words of an answer: "5 and 0" is no product.
    if tree is None or gold_tree is None or not _letters(tree) <= _letters(gold_tree):
        return False
    try:
        for points, number, relative, absolute in _calculations():
            for point in points:
                value, right = _calculate(tree, point, number), _calculate(gold_tree, point, number)
                if not abs(value - right) <= max(absolute, relative * max(abs(value), abs(right))):  # nor is a NaN
                    return False
        return True
    except (ZeroDivisionError, OverflowError):
        return False


@functools.cache
def _calculations() -> list[tuple[list[dict[str, Any]], Callable[[str], Any], float, float]]:
    """Values of letters, what a number is, and how near is equal, relatively and absolutely.

    Once in floating point, by which a wrong answer costs microseconds and what overflows is calculated no further, and
    then to `_CALCULATED_DIGITS`. Of any two letters each is below 0 somewhere while the other is not, so that roots of
    squares and of quotients are told apart.
    """
    import mpmath  # takes a tenth of a second, which whatever imports a task would pay

    precise = mpmath.MPContext()  # its precision is nobody else's
    precise.dps = _CALCULATED_DIGITS
    calculations = []
    arithmetics: tuple[tuple[Any, Any, Any, float, float], ...] = (
        (complex, cmath.pi, cmath.e, 1e-9, 1e-9),
        (precise.mpc, precise.pi, precise.e, _SAME, 0.0),
    )
    for number, pi, e, near, below in arithmetics:
        points = [
            {name: number((-1) ** (place >> bit) * flip * _size(name, bit)) for place, name in enumerate(_NAMES)}
            | {"π": number(pi), "e": number(e), "i": number(0, 1)}
            for bit in range(len(_NAMES).bit_length())
            for flip in (1, -1)
        ]
        calculations.append((points, number, near, below))
    return calculations


def _size(name: str, point: int) -> float:
    return random.Random(f"{name}/{point}").uniform(0.5, 2)


def _expression(text: str) -> ast.expr | None:
    """The syntax tree of an expression of numbers, letters, roots and powers, `None` for any other text."""
    if len(text) > MAX_EXPRESSION_CHARS or text.isalpha():  # a word is no product of its letters
        return None
    text = re.sub(r"\\(?:cdot|times)(?![a-z])", "*", re.sub(r"\\pi(?![a-z])", "π", text))
    for _ in range(3):  # from the inside outwards, three levels deep
        for pattern, replacement in _NESTED:
            text = pattern.sub(replacement, text)
    text = text.replace("^", "**")
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text or _LEADING_ZERO.search(text):
        return None
    pieces: list[str] = []
    for token in tokens:
        if pieces and token[0] not in "+-*/)" and pieces[-1][-1] not in "+-*/(":
            pieces.append("*")  # 2x is a product
        pieces.append(token)
    try:
        # Of these characters and this length, CPython's parser neither warns nor runs out of stack.
        tree = ast.parse("".join(pieces), mode="eval").body
    except SyntaxError:
        return None
    return tree if all(map(_is_allowed, ast.walk(tree))) else None


def _is_allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return len(repr(node.value)) <= MAX_DIGITS
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub)
    return isinstance(node, (ast.BinOp, ast.Name, ast.Load, ast.USub, *_OPERATORS))


def _letters(tree: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _calculate(tree: ast.AST, names: Mapping[str, Any], number: Callable[[str], Any]) -> Any:
    """The value of a tree that `_expression` gave, over whatever numbers `names` and `number` make."""
    if isinstance(tree, ast.BinOp):
        left, right = (_calculate(side, names, number) for side in (tree.left, tree.right))
        return _OPERATORS[type(tree.op)](left, right)
    if isinstance(tree, ast.UnaryOp):
        return -_calculate(tree.operand, names, number)
    if isinstance(tree, ast.Name):
        return names[tree.id]
    assert isinstance(tree, ast.Constant)  # for the type checker
    return number(repr(tree.value))


# Rules and tasks


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
