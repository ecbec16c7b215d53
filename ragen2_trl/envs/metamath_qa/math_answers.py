"""Whether two answers in numbers or in LaTeX are worth the same.

Answers are compared by value. Text is compared first, then numbers as exact fractions. Where the right answer is a
number, that is all: `17+25` is no answer to how much that is. Where it is an expression of a small and bounded form,
math-verify says whether another one equals it. Its parser and its timeouts are left alone: the one takes a second for
ten nested parentheses and reads `2(3)` as a mixed number, the others need the main thread.
"""

import ast
import cmath
import logging
import operator
import random
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

MAX_ANSWER_CHARS = 300  # of text to compare
MAX_EXPRESSION_CHARS = 40  # of text to calculate with
MAX_ROOTS = 3
MAX_DIGITS = 12
MAX_ELEMENTS = 10
MAX_POWER = 10  # of all nested exponents together: what is calculated exactly has to stay small

# It says that without timeouts the caller has to bound the work, as is done here.
logging.getLogger("math_verify.grader").addFilter(lambda record: "Timeout is disabled" not in record.getMessage())


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
_POINTS = [
    {name: complex(random.Random(f"{name}/{point}").uniform(-2, 2)) for name in _NAMES}
    | {"π": complex(cmath.pi), "e": complex(cmath.e), "i": 1j}
    for point in range(3)
]


def _same_expression(given: str, gold: str) -> bool:
    tree, gold_tree = _expression(given), _expression(gold)
    # Letters of its own make words of an answer: "5 and 0" is no product.
    if tree is None or gold_tree is None or not _letters(tree) <= _letters(gold_tree):
        return False
    # Numbers first: a wrong answer costs microseconds, and only one that seems right gets an exact look.
    try:
        for point in _POINTS:
            value, gold_value = (_calculate(side, point, complex) for side in (tree, gold_tree))
            if not cmath.isclose(value, gold_value, rel_tol=1e-9, abs_tol=1e-9):
                return False
    except (ZeroDivisionError, OverflowError):
        return False
    return _exactly_same(tree, gold_tree)


def _exactly_same(tree: ast.expr, gold_tree: ast.expr) -> bool:
    # Here and not above: they take half a second, which everything that imports a task would pay, and few answers
    # come this far.
    import sympy
    from math_verify import verify

    symbols = {name: sympy.Symbol(name, real=True) for name in _NAMES} | {"π": sympy.pi, "e": sympy.E, "i": sympy.I}
    value, gold_value = (_calculate(side, symbols, sympy.Rational) for side in (tree, gold_tree))
    return bool(verify(gold_value, value, timeout_seconds=None))


def _expression(text: str) -> ast.expr | None:
    """The syntax tree of an expression of numbers, letters, roots and small powers, `None` for any other text."""
    if len(text) > MAX_EXPRESSION_CHARS or text.isalpha():  # a word is no product of its letters
        return None
    text = re.sub(r"\\(?:cdot|times)(?![a-z])", "*", re.sub(r"\\pi(?![a-z])", "π", text))
    for _ in range(3):  # from the inside outwards, three levels deep
        for pattern, replacement in _NESTED:
            text = pattern.sub(replacement, text)
    text = text.replace("^", "**")
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text or text.count("**(1/2)") > MAX_ROOTS or _LEADING_ZERO.search(text):
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
    return tree if all(map(_is_allowed, ast.walk(tree))) and _power(tree) <= MAX_POWER else None


def _is_allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return len(repr(node.value)) <= MAX_DIGITS
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub)
    return isinstance(node, (ast.BinOp, ast.Name, ast.Load, ast.USub, *_OPERATORS))


def _letters(tree: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _power(tree: ast.expr) -> float:
    """The product of nested exponents where it is largest; infinite if an exponent is no plain number."""
    powers = [_power(child) for child in ast.iter_child_nodes(tree) if isinstance(child, ast.expr)]
    if not (isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Pow)):
        return max(powers, default=1.0)
    exponent = _plain_number(tree.right)
    return cmath.inf if exponent is None else powers[0] * max(1.0, exponent)


def _plain_number(tree: ast.expr) -> float | None:
    """The size of a number, or of a ratio of two, with a sign or without; `None` for anything else."""
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Div):
        top, bottom = _plain_number(tree.left), _plain_number(tree.right)
        return top / bottom if top is not None and bottom else None
    tree = tree.operand if isinstance(tree, ast.UnaryOp) else tree
    return float(tree.value) if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float) else None


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
