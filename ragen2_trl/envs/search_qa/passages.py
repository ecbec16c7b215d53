"""Passages of a corpus, in memory or on disk, and as results of a search.

A corpus is a file of passages, `{"title", "text"}` or, as in wiki-18, `{"id", "contents"}` whose first line is the
title.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from datasets import Dataset

MAX_QUERY_CHARS = 500  # a query is model text; no question is that long


@dataclass(frozen=True)
class Passage:
    """A paragraph and what it is about; as a result of a search also its id and its score, which tell none apart."""

    title: str
    text: str
    id: str = field(default="", compare=False)
    score: float = field(default=0.0, compare=False)

    @property
    def content(self) -> str:
        """Title and text as one, in two lines."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class Passages(Protocol):
    """Passages by number, in memory or on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Passage: ...

    def __iter__(self) -> Iterator[Passage]: ...


def passage_of(row: object) -> Passage:
    """A passage from either form of a corpus' rows.

    Raises:
        ValueError: If it has neither.
    """
    if isinstance(row, Mapping):
        name = name_of(row.get("id"))
        if isinstance(row.get("contents"), str):
            title, _, text = row["contents"].partition("\n")
            return Passage(title.strip().strip('"'), text.strip(), name)
        if isinstance(row.get("title"), str) and isinstance(row.get("text"), str):
            return Passage(row["title"], row["text"], name)
    raise ValueError(f"a passage must have texts 'title' and 'text', or 'contents', got {str(row)[:200]}")


def name_of(value: object) -> str:
    """An id as text; a passage without one has an empty one."""
    return str(value) if isinstance(value, (str, int)) else ""


class PassageTable:
    """The passages of a memory-mapped table.

    Args:
        rows: Its rows, in either form of a corpus.
    """

    def __init__(self, rows: Dataset):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Passage:
        return passage_of(self.rows[index])

    def __iter__(self) -> Iterator[Passage]:
        return map(passage_of, self.rows)


def scored(passage: Passage, number: int, score: float) -> Passage:
    """A result of a search: the passage with its score, and an id from its place where its corpus has none."""
    return replace(passage, id=passage.id or f"doc_{number + 1}", score=score)
