"""Countdown as RAGEN-2 plays it: its rows, and what any text earns."""

import random
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice
from types import MappingProxyType
from typing import Any

from datasets import Dataset

from ragen2_trl.envs.checks import check_choice
from ragen2_trl.envs.countdown import (
    COLUMNS,
    MAX_CHARS,
    OPERATORS,
    RIGHT,
    RIGHT_NUMBERS,
    Countdown,
    CountdownEpisode,
    checked_row,
    parse_expression,
    value_of,
)
from ragen2_trl.envs.episode import Limits
from ragen2_trl.envs.ragen2.protocol import RagenProtocol, first_rows
from ragen2_trl.envs.tasks import Row, check_columns

_DIGITS = re.compile(r"\d+")
TOLERANCE = Fraction(1, 100_000)  # of a value that RAGEN's code computes in floating point


def text_reward(text: str, numbers: Sequence[int], target: int) -> float:
    """RAGEN-2's judgement of any text: 0.0 unless its whole numbers are exactly the given ones, else 0.1 or 1.0.

    1.0 takes an expression that makes the target, whatever its operators; a text that is no expression keeps its 0.1.
    RAGEN lets Python evaluate the text. Here it is parsed as always, so that what is no arithmetic of `+ - * /` and
    parentheses (`//`, `%`, `**`, calls) makes nothing.

    >>> [text_reward(text, [44, 19, 35], 98) for text in ("44 + 19 + 35", "44, 19, 35", "44 + 19 + 35 = 98")]
    [1.0, 0.1, 0.0]
    """
    if whole_numbers(text, len(numbers)) != sorted(numbers):
        return 0.0
    tree = None if "=" in text else parse_expression(text)
    value = None if tree is None else value_of(tree)
    return RIGHT if value is not None and abs(value - target) <= TOLERANCE else RIGHT_NUMBERS


def whole_numbers(text: str, count: int) -> list[int] | None:
    """The whole numbers that stand anywhere in a text, sorted; `None` where there are not `count` of them.

    >>> whole_numbers("4.5 of 3", 3), whole_numbers("1 2", 3)
    ([3, 4, 5], None)
    """
    digits = [match.group() for match in islice(_DIGITS.finditer(text), count + 1)]
    if len(digits) != count or any(len(number) > MAX_CHARS for number in digits):  # Python reads 4300 digits, no more
        return None
    return sorted(map(int, digits))


def sums_with_signs(numbers: Sequence[int], target: int) -> bool:
    """Whether the numbers sum to the target with a sign each, as with `operators="+-"`.

    >>> sums_with_signs([3, 8, 1], 6), sums_with_signs([3, 8, 1], 24)
    (True, False)
    """
    sums = {0}
    for number in numbers:
        sums = {value + sign * number for value in sums for sign in (1, -1)}
    return target in sums


class RagenCountdownEpisode(CountdownEpisode):
    """Attempts at one target, judged by `text_reward`."""

    def observation(self) -> str:
        return f"Target: {self.target}, nums: {self.numbers}"

    def judge(self, action: str) -> tuple[float, str]:
        return text_reward(action, self.numbers, self.target), ""


class RagenCountdown(RagenProtocol, Countdown):
    """Countdown as RAGEN-2 plays it: any text with the right numbers earns 0.1, see `text_reward`.

    Args:
        **options: Those of `RagenProtocol`, and `max_numbers`, `largest` and `impossible` of `Countdown`.
    """

    limits = Limits(turns=1, actions=1)
    max_total, turn_tokens = 1, 400
    fixed = MappingProxyType({"operators": "+-"})  # of the tasks alone

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.answer_operators = OPERATORS[0]

    def load(self, data: str) -> Dataset:
        return first_rows(super().load(data))

    def numbered_tasks(self, seeds: Iterator[int], split: str, data: str | None) -> Iterator[dict[str, Any]]:
        """RAGEN-2's rows: among the first ones those that some choice of signs solves, by seed, for both splits."""
        check_choice("impossible with split='ragen2'", self.impossible, (0.0,))
        rows = self.load(self.source(data, "Jiayi-Pan/Countdown-Tasks-3to4"))
        check_columns(rows, COLUMNS)
        numbers, targets = rows["nums"][:], rows["target"][:]
        places = [place for place, row in enumerate(zip(numbers, targets, strict=True)) if sums_with_signs(*row)]
        if not places:
            raise ValueError(f"data must hold tasks whose numbers sum to the target with signs, got none in {data!r}")
        for seed in seeds:
            nums, target = checked_row(rows[places[seed % len(places)]])
            yield {"seed": seed, "nums": nums, "target": target}

    def episode(self, row: Row, rng: random.Random) -> RagenCountdownEpisode:
        return RagenCountdownEpisode(row["nums"], row["target"], self.operators)

    def texts(self) -> dict[str, str]:
        return {
            # RAGEN-2's example contradicts itself on the way, too.
            "instruction": "Combine the numbers of the list in an equation whose value is the target. Example, for "
            "Target: 17, nums: [3, 9, 5]: <think>3 + 9 + 5 makes 18, which is not 17, so I add the other way round: "
            "3 + 5 + 9 = 17.</think><answer>3 + 5 + 9</answer>",
            "length": "Use no more than 100 words.",
        }
