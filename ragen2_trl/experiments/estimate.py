"""How long cells take, and when all of them will have ended."""

import math
from collections.abc import Sequence

from ragen2_trl.experiments.cells import Job
from ragen2_trl.experiments.curves import Store
from ragen2_trl.experiments.settings import json_text


class Estimate:
    """Seconds that cells take: as long as those with the same settings took, or else by the steps that they have.

    Args:
        store: Of finished cells.
    """

    def __init__(self, store: Store):
        self._alike: dict[str, list[float]] = {}
        self._all: list[tuple[float, int]] = []
        for fields, seconds, steps in store.cells()[["fields", "wall_seconds", "steps"]].itertuples(index=False):
            self._note(fields, seconds, steps)

    def add(self, job: Job, seconds: float) -> None:
        """A cell has ended after so many seconds, or NaN where they are not those of all of it."""
        self._note(json_text(job.cell.fields), seconds, job.max_steps)

    def _note(self, fields: str, seconds: float, steps: int) -> None:
        if math.isfinite(seconds) and steps > 0:
            self._alike.setdefault(fields, []).append(seconds)
            self._all.append((seconds, steps))

    def of(self, job: Job) -> float | None:
        """Seconds from a cell's beginning to its end."""
        if (alike := self._alike.get(json_text(job.cell.fields))) is not None:
            return sum(alike) / len(alike)
        if not self._all:
            return None
        return sum(seconds for seconds, _ in self._all) / sum(steps for _, steps in self._all) * job.max_steps

    def seconds_left(
        self, waiting: Sequence[Job], running: Sequence[tuple[Job, float, float | None]], at_once: int
    ) -> float | None:
        """Until all have ended; `None` where nothing tells.

        Args:
            waiting: Cells that have not begun.
            running: Those that have, each with its seconds so far and those that it will have taken, if something
                tells.
            at_once: How many are trained at the same time.
        """
        if self._all:
            after = sum(self.of(job) or 0.0 for job in waiting)
            under_way = [max(0.0, (self.of(job) or 0.0) - seconds) for job, seconds, _ in running]
            return max([(after + sum(under_way)) / at_once, *under_way])
        told = [whole for _, _, whole in running if whole is not None]
        if not told:
            return None
        whole = sum(told) / len(told)
        return (whole * (len(waiting) + len(running)) - sum(seconds for _, seconds, _ in running)) / at_once
