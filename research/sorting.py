"""Numbers to sort: a task for a real language model, partly too easy to teach anything and partly too hard."""

import random
from typing import Any

from datasets import Dataset

from ragen2_trl.envs import DatasetEnvironment


def sorted_right(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """1.0 for the numbers in their order and nothing else, otherwise 0.0."""
    return [float(text.split() == right.split()) for text, right in zip(completions, answer, strict=True)]


class Sorting(DatasetEnvironment):
    """Prompts such as `Sort: 52 7 93 =>`, of three to twelve numbers below a hundred, as many of each length: what
    reasoning-gym's `number_sorting` asks, in a prompt that is short.
    """

    def __init__(self) -> None:
        stream = random.Random("sorting")
        asked = [stream.sample(range(100), 3 + n % 10) for n in range(16_000)]
        texts = {f"Sort: {_text(numbers)} =>": _text(sorted(numbers)) for numbers in asked}
        rows = Dataset.from_dict({"prompt": [*texts], "answer": [*texts.values()]})
        super().__init__(rows, sorted_right, name="sorting")

    def demonstrations(self, num: int, seed: int, data: str | None = None) -> Dataset:
        """Training prompts and their answers."""
        rows = self.dataset(num, seed, data=data)
        return Dataset.from_dict({"prompt": rows["prompt"], "completion": [f" {answer}" for answer in rows["answer"]]})


def _text(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))
