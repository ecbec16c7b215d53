"""DeepCoder's data: its parts on the Hub or in local folders, one of them or RAGEN-2's mixture."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from datasets import Dataset

from ragen2_trl.envs.tasks import Row, load_tasks

CONFIGS = {"primeintellect": ("train",), "taco": ("train",), "lcbv5": ("train", "test"), "codeforces": ("test",)}
MIXTURE = "mixture"
HUB = "agentica-org/DeepCoder-Preview-Dataset"
PARTS = {"train": ("primeintellect", "taco", "lcbv5"), "test": ("codeforces", "lcbv5")}  # of the mixture


class Joined:
    """Rows of several tables one after the other, whatever further columns each has.

    Args:
        tables: The tables.
    """

    def __init__(self, tables: Sequence[Dataset]):
        self.tables = tables
        self._ends = list(accumulate(map(len, tables)))
        shared = set(tables[0].column_names).intersection(*(table.column_names for table in tables))
        self.column_names = sorted(shared)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        table = bisect_right(self._ends, index)
        row: dict[str, Any] = self.tables[table][index - self._ends[table]]  # counted from the table's end
        return row


def load_problems(data: str, config: str, split: str) -> tuple[Dataset | Joined, bool]:
    """Problems of a part of the data or of the mixture, and whether they still have to be divided by problem.

    Args:
        data: A Hub id, a local file, which is read whole, or a local folder.
        config: One of `CONFIGS`, or `MIXTURE`.
        split: `"train"` or `"test"`.

    Raises:
        ValueError: If the part has no such split, or a local folder lacks a part of the mixture.
    """
    path = Path(data)
    if config == MIXTURE and not path.is_file():
        return Joined([load_tasks(_part(data, part), split, config=part) for part in PARTS[split]]), False
    splits = PARTS if config == MIXTURE else CONFIGS[config]
    if split == "train" and split not in splits:
        raise ValueError(f"split must be one of {list(splits)} for config={config!r}, got {split!r}")
    hashed = "test" not in splits or ("train" in splits and path.is_file())
    return load_tasks(data, split if split in splits else "train", config=config), hashed


def _part(data: str, config: str) -> str:
    path = Path(data)
    if path.is_dir() and not (path / config).is_dir():
        raise ValueError(
            f"data must be a folder with {sorted({*sum(PARTS.values(), ())})} for config={MIXTURE!r}, "
            f"got {data!r} without {config!r}"
        )
    return str(path / config) if path.is_dir() else data


def statements_for_tests(data: str, config: str) -> set[str]:
    """As `statement` gives them: parts hold problems of the same contests, and some of them both."""
    rows, _ = load_problems(data, config, "test")
    tables = rows.tables if isinstance(rows, Joined) else [rows]
    return {statement(row) for table in tables for row in table.select_columns("problem")}


def statement(source: Row) -> str:
    """The problem of a row, whatever its white space."""
    return " ".join(problem_of(source).split())


def problem_of(source: Row) -> str:
    """The statement of a row.

    Raises:
        ValueError: If it is no text, or empty.
    """
    problem = source["problem"]
    if not isinstance(problem, str) or not problem.strip():
        raise ValueError(f"column 'problem' must be a text that is not empty, got {problem!r}")
    return problem
