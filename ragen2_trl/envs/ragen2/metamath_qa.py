"""MetaMathQA as RAGEN-2 plays it: its rows, and answers compared as texts."""

import random
from collections.abc import Iterator
from typing import Any

from ragen2_trl.envs.episode import Limits
from ragen2_trl.envs.metamath_qa import ANSWER_MARK, COLUMNS, MetaMathQA, MetaMathQAEpisode, checked_row
from ragen2_trl.envs.ragen2.protocol import RagenProtocol
from ragen2_trl.envs.tasks import Row, check_columns, load_tasks


def gold_text(response: str) -> str:
    """RAGEN-2's answer of a response: all that follows the first mark and its space, empty if there is none.

    >>> gold_text("The answer is: $5$\\nThe answer is: 7")
    '$5$\\nThe answer is: 7'
    """
    return response.partition(f"{ANSWER_MARK} ")[2].strip()


def same_text(answer: str, right: str) -> bool:
    """RAGEN-2's check: the same characters, whatever their letter case and white space.

    >>> same_text("X + 1", "x+1"), same_text("0.5", "\\\\frac{1}{2}"), same_text("5.", "5")
    (True, False, False)
    """
    return "".join(answer.lower().split()) == "".join(right.lower().split())


class RagenMetaMathQA(RagenProtocol, MetaMathQA):
    """MetaMathQA as RAGEN-2 plays it: the text of an answer has to be that of the right one, see `same_text`."""

    limits = Limits(turns=5, actions=2)
    max_total, turn_tokens = 1, 400

    def gold(self, response: str) -> str:
        return gold_text(response)

    def numbered_tasks(self, seeds: Iterator[int], split: str, data: str | None) -> Iterator[dict[str, Any]]:
        """RAGEN-2's rows: one drawn by each seed, for both splits from the same; some have no right answer."""
        rows = load_tasks(self.source(data, "meta-math/MetaMathQA"), "train")
        check_columns(rows, COLUMNS)
        for seed in seeds:
            yield self._task(seed, checked_row(rows[random.Random(seed).randint(0, len(rows) - 1)]))

    def episode(self, row: Row, rng: random.Random) -> MetaMathQAEpisode:
        return MetaMathQAEpisode(row["question"], row["answer"], row["solution"], same_text)

    def texts(self) -> dict[str, str]:
        return {"instruction": "You are solving Math problems. ", "length": "Use no more than 100 words."}
