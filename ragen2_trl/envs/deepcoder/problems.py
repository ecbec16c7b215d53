"""DeepCoder's generated problems: two steps over a list.

The functions below compute what is expected, and their source text is the solution.
"""

import inspect
import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

from ragen2_trl.envs.deepcoder.program_tests import Test, task_row


def above(items: list[int], k: int) -> list[int]:
    return [item for item in items if item > k]


def other_than_multiples(items: list[int], k: int) -> list[int]:
    return [item for item in items if item % k]


def scaled(items: list[int], k: int) -> list[int]:
    return [item * k for item in items]


def remainders(items: list[int], k: int) -> list[int]:
    return [item % k for item in items]


def running_sums(items: list[int], k: int) -> list[int]:
    return [sum(items[: end + 1]) + k for end in range(len(items))]


def total(items: list[int], k: int) -> int:
    return sum(items) + k


def multiples(items: list[int], k: int) -> int:
    return sum(item % k == 0 for item in items)


def pairs(items: list[int], k: int) -> int:
    return sum(abs(a - b) == k for i, a in enumerate(items) for b in items[:i])


def largest_window(items: list[int], k: int) -> int:
    return max(sum(items[start : start + k]) for start in range(max(1, len(items))))


def rotated(items: list[str], k: int) -> list[str]:
    return [items[(place + k) % len(items)] for place in range(len(items))]


def without_short(items: list[str], k: int) -> list[str]:
    return [word for word in items if len(word) > k]


def reversed_long(items: list[str], k: int) -> list[str]:
    return [word[::-1] if len(word) > k else word for word in items]


def shifted(items: list[str], k: int) -> list[str]:
    return ["".join(chr((ord(letter) - 97 + k) % 26 + 97) for letter in word) for word in items]


def letters(items: list[str], k: int) -> int:
    return sum(map(len, items)) + k


def run_lengths(items: list[str], k: int) -> str:
    text = "".join(items)
    starts = [place for place in range(len(text)) if place == 0 or text[place] != text[place - 1]]
    ends = [*starts[1:], len(text)]
    return "".join(f"{text[start]}{end - start + k}" for start, end in zip(starts, ends, strict=False))


def initials(items: list[str], k: int) -> str:
    return "".join(word[:k] for word in items)


Step: TypeAlias = tuple[Callable[[list[Any], int], Any], str]  # what is done, and in words

NUMBER_STEPS: tuple[Step, ...] = (
    (above, "Keep the numbers greater than {k}."),
    (other_than_multiples, "Drop the multiples of {k}."),
    (scaled, "Multiply each number by {k}."),
    (remainders, "Replace each number by its remainder modulo {k}."),
    (running_sums, "Replace each number by the sum of all up to and including it, plus {k}."),
)
NUMBER_ENDS: tuple[Step, ...] = (
    (total, "The answer is their sum plus {k}."),
    (multiples, "The answer is how many of them are multiples of {k}."),
    (pairs, "The answer is how many pairs of them differ by exactly {k}."),
    (largest_window, "The answer is the largest sum of up to {k} neighbours, 0 if there are none."),
)
WORD_STEPS: tuple[Step, ...] = (
    (rotated, "Move the first word to the end, {k} times."),
    (without_short, "Drop the words of up to {k} letters."),
    (reversed_long, "Reverse each word of more than {k} letters."),
    (shifted, "Move each letter on by {k} in the alphabet, from z back to a."),
)
WORD_ENDS: tuple[Step, ...] = (
    (letters, "The answer is the number of their letters plus {k}."),
    (run_lengths, "Join them. The answer is each run of equal letters as the letter and its length plus {k}."),
    (initials, "The answer is the first {k} letters of each, joined."),
)


def make_problem(rng: random.Random, num_tests: int) -> tuple[str, dict[str, Any]]:
    """The steps of a random problem in words, and its row without the seed: two public tests and hidden ones."""
    while True:
        words, as_function = rng.random() < 0.5, rng.random() < 0.5
        step, end = rng.choice(WORD_STEPS if words else NUMBER_STEPS), rng.choice(WORD_ENDS if words else NUMBER_ENDS)
        k, last_k = (rng.randint(2, 5 if words else 9) for _ in range(2))
        inputs = [_random_words(rng) if words else _random_numbers(rng) for _ in range(num_tests)]
        answers = [end[0](step[0](items, k), last_k) for items in inputs]
        if "" not in answers and len(set(answers)) > num_tests // 2:  # no constant is right too often
            break
    steps = f"{step[1].format(k=k)} {end[1].format(k=last_k)}"
    parts = "\n\n".join(_source(part[0]) for part in (step, end))
    compute = f"{end[0].__name__}({step[0].__name__}(items, {k}), {last_k})"
    kind, of = ("words", "str") if words else ("numbers", "int")
    if as_function:
        about, starter = (
            f"The function gets a list of {kind} and returns the answer.",
            f"def solve(items: list[{of}]):",
        )
        solution = f"{parts}\n\n{starter}\n    return {compute}"
        shown = [(json.dumps(items), json.dumps(answer)) for items, answer in zip(inputs, answers, strict=True)]
        tests: list[Test] = [([items], answer) for items, answer in zip(inputs, answers, strict=True)]
    else:
        about, starter = f"The input is one line of {kind}.", ""
        solution = f"{parts}\n\nitems = [{of}(word) for word in input().split()]\nprint({compute})"
        shown = [(" ".join(map(str, items)), str(answer)) for items, answer in zip(inputs, answers, strict=True)]
        tests = [(f"{given}\n", f"{expected}\n") for given, expected in shown]
    public = max(1, min(2, num_tests // 2))
    examples = "\n".join(f"Input: {given} Output: {expected}" for given, expected in shown[:public])
    function = "solve" if as_function else ""
    return steps, task_row(f"{steps}\n{about}\n{examples}", starter, function, tests, public, solution)


@cache
def _source(function: Callable[..., Any]) -> str:
    return inspect.getsource(function).strip()


def _random_words(rng: random.Random) -> list[str]:
    return ["".join(rng.choice("abz") for _ in range(rng.randint(1, 8))) for _ in range(rng.randint(3, 7))]


def _random_numbers(rng: random.Random) -> list[int]:
    return [rng.randint(0, 30) for _ in range(rng.randint(4, 9))]
