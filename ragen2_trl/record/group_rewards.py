"""The rewards of all groups of a run by generation, as they are kept on disk and read back."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ragen2_trl.instrument.health import is_number
from ragen2_trl.record.checks import MAX_STEP
from ragen2_trl.record.files import MEASUREMENTS, append_json, read_text, write_text

FILE = "group_rewards.jsonl"  # among the measurements, which are not uploaded: it grows while others read
DIGITS = 6


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


def read_group_rewards(folder: Path) -> list[GroupRewards]:
    """The record in a run's folder, by step; empty where there is none."""
    records = {one.step: one for one in _read(folder / MEASUREMENTS / FILE)}
    return [records[step] for step in sorted(records)]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _written(record: GroupRewards) -> dict[str, Any]:
    """As `append_group_rewards` writes it."""
    return {key: value for key, value in vars(record).items() if key != "predicted" or value is not None}


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
    if not isinstance(values, dict) or not isinstance(step := values.get("step"), int) or abs(step) > MAX_STEP:
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
