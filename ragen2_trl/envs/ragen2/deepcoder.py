"""DeepCoder as RAGEN-2 plays it: a mixture of the data's parts, and all tests count, the public ones too."""

import random
from collections.abc import Collection, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from datasets import Dataset, concatenate_datasets

from ragen2_trl.envs.deepcoder.environment import COLUMNS, CONFIGS, GENERATED_TESTS, DeepCoder, DeepCoderEpisode
from ragen2_trl.envs.deepcoder.program_tests import Test
from ragen2_trl.envs.episode import Limits
from ragen2_trl.envs.ragen2.protocol import RagenProtocol
from ragen2_trl.envs.tasks import Row, check_columns, load_tasks

MIXTURE = "mixture"
READ = (*COLUMNS, "starter_code", "metadata")  # columns of the parts, of which some have the first two alone
PARTS = {"train": ("primeintellect", "taco", "lcbv5"), "test": ("codeforces", "lcbv5")}  # of the mixture


class RagenDeepCoderEpisode(DeepCoderEpisode):
    """Programs for one problem."""

    def task(self) -> str:
        return f"{self.problem}\n\nStarter code:\n{self.starter}" if self.starter else self.problem


class RagenDeepCoder(RagenProtocol, DeepCoder):
    """DeepCoder as RAGEN-2 plays it: the reward is the fraction of all tests that a program passes.

    Args:
        config: As for `DeepCoder`, or `"mixture"`: the first three parts for training and the last two for tests, each
            from its own split; of a local folder, its folders of these names.
        **options: Those of `RagenProtocol` and of `DeepCoder`, except `max_tests`.
    """

    limits = Limits(turns=1, actions=1)
    max_total, turn_tokens = 1, 4000
    fixed = MappingProxyType({"max_tests": GENERATED_TESTS})  # of generated problems
    configs = (*CONFIGS, MIXTURE)

    def __init__(self, config: str = MIXTURE, **options: Any):
        super().__init__(config=config, **options)

    def texts(self) -> dict[str, str]:
        return {
            "instruction": "This is a coding task. Give a complete Python function and nothing else within the answer "
            "tags. ",
            "length": "Use no more than 8000 words.",
        }

    def numbered_tasks(self, seeds: Iterator[int], split: str, data: str | None) -> Iterator[dict[str, Any]]:
        """RAGEN-2's rows: one drawn by each seed, for both splits from the problems for tests."""
        rows, _ = self.load(self.source(data, "agentica-org/DeepCoder-Preview-Dataset"), "test")
        check_columns(rows, COLUMNS)
        for seed in seeds:
            number = random.Random(seed).randint(0, len(rows) - 1)
            task = self._task(seed, rows[number])
            if task is None:
                raise ValueError(
                    f"data must hold tests for each problem with split='ragen2', got none in row {number}"
                )
            yield task

    def _generated(self, stream: random.Random, split: str) -> Iterator[dict[str, Any]]:
        return ({**row, "public": 0} for row in super()._generated(stream, split))

    def choose(self, problem: str, function: str, tests: list[Test]) -> tuple[list[Test], int]:
        return tests, 0

    def episode(self, row: Row, rng: random.Random) -> RagenDeepCoderEpisode:
        return RagenDeepCoderEpisode(row, self.judge)

    @property
    def splits(self) -> Collection[str]:
        return PARTS if self.config == MIXTURE else super().splits

    def load(self, data: str, split: str) -> tuple[Dataset, bool]:
        if self.config != MIXTURE or Path(data).is_file():
            return super().load(data, split)
        parts = [load_tasks(_part(data, part), split, config=part) for part in PARTS[split]]
        # What else they have is of different types.
        read = [part.select_columns([name for name in part.column_names if name in READ]) for part in parts]
        return concatenate_datasets(read), False


def _part(data: str, config: str) -> str:
    path = Path(data)
    if path.is_dir() and not (path / config).is_dir():
        raise ValueError(
            f"data must be a folder with {sorted({*sum(PARTS.values(), ())})} for config={MIXTURE!r}, "
            f"got {data!r} without {config!r}"
        )
    return str(path / config) if path.is_dir() else data
