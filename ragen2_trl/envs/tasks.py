"""Where tasks come from, and which of them are held out."""

import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError

Row: TypeAlias = Mapping[str, Any]

SPLITS = ("train", "test")
TEST_FRACTION_INVERSE = 5  # one task in five is held out
_FILE_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def held_out(task: str) -> bool:
    """Whether a task, given as text, belongs to the split `"test"`: one in `TEST_FRACTION_INVERSE`, by its hash.

    >>> [held_out(task) for task in ("a", "b", "c", "d")]
    [False, False, True, False]
    """
    return zlib.crc32(task.encode()) % TEST_FRACTION_INVERSE == 0


def impossible_rows(share: float, task: str, split: str, seed: int) -> Iterator[bool]:
    """Which rows of generated tasks shall be impossible: a `share` of the training ones, and no held-out one.

    Drawn apart from the tasks, row by row, so that the share is exact in expectation.
    """
    rng = random.Random(f"impossible/{task}/{split}/{seed}")
    while True:
        yield split == "train" and rng.random() < share


def means_a_path(name: str) -> bool:
    """Whether a name, where there is no such file or folder, cannot be of the Hub.

    >>> [means_a_path(name) for name in ("./mine", "runs/mine/best", "Qwen/Qwen3-0.6B", "gpt2")]
    [True, True, False, False]
    """
    return name.startswith((".", "/", "~")) or name.count("/") > 1


@contextmanager
def readable(field: str, data: str) -> Iterator[None]:
    """Makes what `load_dataset` raises a `ValueError` that names a field and its value."""
    try:
        yield
    except (DatasetsError, ValueError, OSError) as error:
        cause = (isinstance(error, DatasetsError) and error.__cause__) or error
        offline = "; allowed offline: a file or a folder" if isinstance(error, ConnectionError) else ""
        raise ValueError(f"{field}={data!r} cannot be read: {cause}{offline}") from error


def load_tasks(data: str, split: str, *, config: str | None = None, field: str = "data") -> Dataset:
    """Rows of a Hub dataset or of a local file (json, jsonl, parquet, csv) or folder.

    Args:
        data: A Hub id or a local path.
        split: The split to load; a single file has none and is read whole, so that tasks have to hold out by hash.
        config: Name of the dataset's configuration on the Hub.
        field: Of the setting that named the data, for messages.

    Raises:
        ValueError: If a local file is of another kind, is not there or cannot be read.
    """
    path = Path(data)
    if not path.exists() and (path.suffix in _FILE_FORMATS or means_a_path(data)):
        raise ValueError(f"{field} must be a Hub id or an existing folder or file, got {data!r}")
    if path.is_file() and path.suffix not in _FILE_FORMATS:
        raise ValueError(f"{field} must be a Hub id, a folder or a file of {sorted(_FILE_FORMATS)}, got {data!r}")
    if path.is_file() and not path.stat().st_size:
        raise ValueError(f"{field}={data!r} cannot be read: the file is empty")
    with readable(field, data):
        if path.is_file():
            return load_dataset(_FILE_FORMATS[path.suffix], data_files=str(path), split="train")
        return load_dataset(data, config if not path.exists() else None, split=split)


def check_columns(rows: Dataset, columns: Iterable[str]) -> None:
    """Raises a `ValueError` unless the rows have all of the columns."""
    if not set(columns) <= set(rows.column_names):
        raise ValueError(f"columns of data must include {list(columns)}, got {rows.column_names}")


def shuffled(rows: Dataset, columns: Iterable[str], rng: random.Random) -> Iterator[tuple[int, dict[str, Any]]]:
    """All rows with their numbers, in the order that `rng` draws.

    Raises:
        ValueError: If a column is missing.
    """
    check_columns(rows, columns)
    order = list(range(len(rows)))
    rng.shuffle(order)
    return ((index, rows[index]) for index in order)
