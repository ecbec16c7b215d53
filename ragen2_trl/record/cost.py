"""What a run cost, against plain TRL for as many optimizer steps, by the sums that `CostCallback` logs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragen2_trl.instrument.health import is_number


@dataclass(frozen=True)
class Cost:
    """Sums over a run, of what it did and of what plain TRL would have done in as many steps.

    Args:
        sampled, plain_sampled: Completions.
        update, plain_update: Positions of all passes over a generation, padding included; `None` without our trainers.
        rows: Rows that were trained on, where they were counted.
    """

    sampled: float
    plain_sampled: float
    update: float | None = None
    plain_update: float | None = None
    rows: float | None = None

    @property
    def sampling_ratio(self) -> float:
        """Completions sampled for each one that plain TRL would have sampled."""
        return self.sampled / self.plain_sampled

    @property
    def update_ratio(self) -> float | None:
        """Positions of the updates for each one of plain TRL's."""
        return None if self.update is None or not self.plain_update else self.update / self.plain_update


def cost_of(log_history: Sequence[Mapping[str, Any]]) -> Cost | None:
    """The cost of a run up to its last row that has sums; `None` where nothing has counted them."""
    names = ("sampled_completions", "plain_completions", "update_positions", "plain_update_positions")
    for row in reversed(log_history):
        sampled, plain, update, plain_update = (row.get(f"cost/{name}") for name in names)
        if is_number(sampled) and is_number(plain) and plain > 0:
            known = is_number(update) and is_number(plain_update)
            rows = row.get("cost/update_rows")
            update, plain_update = (update, plain_update) if known else (None, None)
            return Cost(sampled, plain, update, plain_update, rows if is_number(rows) else None)
    return None
