"""The rewards of all groups of a run by generation, as they are kept on disk, read back, and summed up."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

from torch import Tensor

from ragen2_trl.filtering import ZERO_STD
from ragen2_trl.reporting.files import MEASUREMENTS, append_json, read_json, read_text, write_text
from ragen2_trl.reporting.records import is_number
from ragen2_trl.reporting.run import Run

FILE = "group_rewards.jsonl"  # among the measurements, which are not uploaded: it grows while others read
DIGITS = 6
MAX_ROWS = 12  # of the table


@dataclass(frozen=True)
class GroupRewards:
    """What the groups of one generation earned.

    Args:
        step: The optimizer step that it is first used for.
        rewards: For each group the weighted reward sums of its completions, those without one left out.
        kept: For each group, whether the filter kept it; `None` without a filter.
        predicted: For each group the reward variance that was expected of its prompt, where prompts were chosen by it.
    """

    step: int
    rewards: list[list[float]]
    kept: list[bool] | None
    predicted: list[float] | None = None

    @property
    def variances(self) -> list[float]:
        """For each group the sample variance (paper, Section 3.3); 0 where there are fewer than two rewards."""
        return [variance(group) if len(group) > 1 else 0.0 for group in self.rewards]


@dataclass(frozen=True)
class VarianceRow:
    """How reward variance is spread over the groups of a generation.

    Args:
        step: Optimizer step.
        groups: How many there are.
        largest, median, mean: Of their reward variances.
        zero: Groups whose rewards do not vary.
        kept: Groups that the filter kept; `None` without a filter.
        best, average: Of a group's rewards, means over the groups; `None` where no group has any.
    """

    step: int
    groups: int
    largest: float
    median: float
    mean: float
    zero: int
    kept: int | None
    best: float | None
    average: float | None


def append_group_rewards(
    folder: Path, step: int, rewards: Tensor, kept: Tensor, predicted: Sequence[float] | None = None
) -> None:
    """Add a generation, or several that one optimizer step spans, to the record in a run's folder.

    Args:
        folder: The trainer's `output_dir`.
        step: The optimizer step that the generation is first used for.
        rewards: (N, G), NaN where there is none.
        kept: (N,) bool.
        predicted: (N,) the reward variance that was expected of their prompts, where there was one.
    """
    groups = [[_rounded(one) for one in row if math.isfinite(one)] for row in rewards.tolist()]
    expected = {} if predicted is None else {"predicted": [_rounded(one) for one in predicted]}
    (folder / MEASUREMENTS).mkdir(parents=True, exist_ok=True)
    append_json(folder / MEASUREMENTS / FILE, {"step": step, "rewards": groups, "kept": kept.tolist(), **expected})


def forget_group_rewards(folder: Path, after: int) -> None:
    """Remove what is of later steps than `after`, and a line that a kill left half written."""
    path = folder / MEASUREMENTS / FILE
    if lines := [json.dumps(_written(one)) + "\n" for one in _read(path) if one.step <= after]:
        write_text(path, "".join(lines))
    else:
        path.unlink(missing_ok=True)


def read_group_rewards(run: Run) -> list[GroupRewards]:
    """What is known of a run's groups, by step; of one without a filter, what its measurements have kept."""
    records = {one.step: one for one in _read(run.folder / MEASUREMENTS / FILE) if one.step <= run.step}
    if not records:
        found = (_record(read_json(path, dict)) for path in run.measurements)
        records = {one.step: one for one in found if one is not None}
    return [records[step] for step in sorted(records)]


def variance_table(run: Run) -> list[VarianceRow]:
    """A row for each generation; evenly chosen ones, the first and the last among them, where there are too many."""
    records = read_group_rewards(run)
    count = min(MAX_ROWS, len(records))
    chosen = [records[i * (len(records) - 1) // max(1, count - 1)] for i in range(count)]
    return [_row(one) for one in chosen]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _written(record: GroupRewards) -> dict[str, Any]:
    """As `append_group_rewards` writes it."""
    return {key: value for key, value in vars(record).items() if key != "predicted" or value is not None}


def _row(record: GroupRewards) -> VarianceRow:
    variances, earned = record.variances, [group for group in record.rewards if group]
    return VarianceRow(
        step=record.step,
        groups=len(variances),
        largest=max(variances),
        median=median(variances),
        mean=fmean(variances),
        zero=sum(math.sqrt(one) <= ZERO_STD for one in variances),
        kept=None if record.kept is None else sum(record.kept),
        best=fmean(map(max, earned)) if earned else None,
        average=fmean(map(fmean, earned)) if earned else None,
    )


def _read(path: Path) -> Iterator[GroupRewards]:
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        try:
            record = _record(json.loads(line))
        except (ValueError, RecursionError):
            continue
        if record is not None:
            yield record


def _record(values: Any) -> GroupRewards | None:
    """Of numbers that anyone may have written; `None` where they are of another form."""
    if not isinstance(values, dict) or not isinstance(step := values.get("step"), int):
        return None
    groups, kept = values.get("rewards"), values.get("kept")
    if not isinstance(groups, list) or not groups or not all(isinstance(group, list) for group in groups):
        return None
    finite = [[float(one) for one in group if is_number(one)] for group in groups]
    fits = isinstance(kept, list) and len(kept) == len(groups) and all(isinstance(one, bool) for one in kept)
    predicted = values.get("predicted")
    if not isinstance(predicted, list) or len(predicted) != len(groups) or not all(map(is_number, predicted)):
        predicted = None
    return GroupRewards(step, finite, kept if fits else None, predicted)


def early_middle_late(records: Sequence[GroupRewards], most: int = 10) -> list[Sequence[GroupRewards]]:
    """Up to `most` generations each from the start, the middle and the end, none in two of them.

    >>> records = [GroupRewards(step, [[0.0]], None) for step in range(9)]
    >>> [[one.step for one in part] for part in early_middle_late(records, 2)]
    [[0, 1], [3, 4], [7, 8]]
    """
    size = max(1, min(most, len(records) // 3))
    starts = [0, (len(records) - size) // 2, len(records) - size]
    return [records[start : start + size] for start in sorted(set(starts))] if len(records) > 2 else [records]
