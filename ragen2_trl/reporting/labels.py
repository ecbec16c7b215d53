"""What runs are called beside one another."""

from collections.abc import Sequence
from pathlib import Path

from ragen2_trl.reporting.examples import printable


def distinct_labels(folders: Sequence[Path]) -> list[str]:
    """The name of each folder, with as many of its parents as tell it from the others.

    >>> distinct_labels([Path("/a/run"), Path("/b/run"), Path("/b/other")])
    ['a/run', 'b/run', 'other']
    """

    def name(folder: Path, depth: int) -> str:
        return printable("/".join(folder.parts[-depth:])).replace("\n", "\N{REPLACEMENT CHARACTER}")

    labels = []
    for folder in folders:
        depth = 1
        while sum(name(other, depth) == name(folder, depth) for other in folders) > 1 and depth < len(folder.parts):
            depth += 1
        labels.append(name(folder, depth))
    return labels
