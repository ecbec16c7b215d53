"""How long cells take, and when all of them will have ended."""

import json
import math
from collections.abc import Sequence

from ragen2_trl.experiments.cells import Job
from ragen2_trl.experiments.curves import Store
from ragen2_trl.experiments.settings import WARM_START, Fields, json_text


class Estimate:
    """Seconds that cells take: as long as those with the same settings took, or else by the steps that they have and
    what a step took with the same model and task.

    Args:
        store: Of finished cells.
    """

    def __init__(self, store: Store):
        self._same: dict[str, list[float]] = {}
        self._alike: dict[str, list[tuple[float, int]]] = {}
        for fields, seconds, steps in store.cells()[["fields", "wall_seconds", "steps"]].itertuples(index=False):
            self._note(json.loads(fields), seconds, steps)

    def add(self, job: Job, seconds: float) -> None:
        """A cell has ended after so many seconds, or NaN where they are not those of all of it."""
        self._note(job.cell.fields, seconds, job.max_steps)

    def _note(self, fields: Fields, seconds: float, steps: int) -> None:
        if math.isfinite(seconds) and steps > 0:
            self._same.setdefault(json_text(fields), []).append(seconds)
            self._alike.setdefault(_model_and_task(fields), []).append((seconds, steps))

    def of(self, job: Job) -> float | None:
        """Seconds from a cell's beginning to its end; `None` where no cell with its model and task has ended."""
        if (same := self._same.get(json_text(job.cell.fields))) is not None:
            return sum(same) / len(same)
        if (alike := self._alike.get(_model_and_task(job.cell.fields))) is not None:
            return sum(seconds for seconds, _ in alike) / sum(steps for _, steps in alike) * job.max_steps
        return None

    def seconds_left(
        self, waiting: Sequence[Job], running: Sequence[tuple[Job, float, float | None]], at_once: int
    ) -> float | None:
        """Until all have ended; `None` where nothing tells. Cells of which nothing tells take as long as the others.

        Args:
            waiting: Cells that have not begun.
            running: Those that have, each with its seconds so far and those that it will have taken, if something
                tells.
            at_once: How many are trained at the same time.
        """
        to_come = [self.of(job) for job in waiting]
        under_way = [whole if (known := self.of(job)) is None else known for job, _, whole in running]
        told = [whole for whole in (*to_come, *under_way) if whole is not None]
        if not told:
            return None
        mean = sum(told) / len(told)
        after = sum(mean if whole is None else whole for whole in to_come)
        left = [
            max(0.0, (mean if whole is None else whole) - seconds)
            for whole, (_, seconds, _) in zip(under_way, running, strict=True)
        ]
        return max([(after + sum(left)) / at_once, *left])


def _model_and_task(fields: Fields) -> str:
    return json_text({name: fields.get(name) for name in (WARM_START, "model", "env_name")})
