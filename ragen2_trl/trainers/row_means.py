"""Metrics that TRL logs once a call, as means over the rows of all calls of a generation.

A generation with further rounds of dynamic sampling or with pilots calls TRL's methods several times, for unequal
numbers of rows. TRL averages the values of a name; here each value is weighted by the rows of its call first.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class RowMeans:
    """Collects the values that the calls of one generation append to TRL's metrics.

    Args:
        metrics: TRL's lists of values by name, for the next log row.
    """

    def __init__(self, metrics: dict[str, list[float]]):
        self.metrics = metrics
        self.start = {name: len(values) for name, values in metrics.items()}
        self.rows: dict[str, list[int]] = defaultdict(list)  # of the call of each value

    @contextmanager
    def call(self, rows: int) -> Iterator[None]:
        """Values appended inside speak for this many rows, except those of a call inside this one."""
        yield
        for name, values in self.metrics.items():
            weights = self.rows[name]
            weights += [rows] * (len(values) - self.start.get(name, 0) - len(weights))

    def close(self) -> None:
        """Replace the values of each name by one: their mean over rows, or for `min` and `max` their extreme."""
        for name, rows in self.rows.items():
            values, start = self.metrics[name], self.start.get(name, 0)
            if len(rows) < 2 or len(values) != start + len(rows):
                continue
            valid = [(one, row) for one, row in zip(values[start:], rows, strict=True) if not math.isnan(one)]
            if valid:
                values[start:] = [_joined(name, *zip(*valid, strict=True))]


def _joined(name: str, values: tuple[float, ...], rows: tuple[int, ...]) -> float:
    """
    >>> _joined("reward", (1.0, 0.0), (1, 3)), _joined("completions/max_length", (1.0, 3.0), (1, 3))
    (0.25, 3.0)
    """
    kind = name.rpartition("/")[2].partition("_")[0]
    if kind in ("min", "max"):
        return {"min": min, "max": max}[kind](values)
    return sum(value * count for value, count in zip(values, rows, strict=True)) / sum(rows)
