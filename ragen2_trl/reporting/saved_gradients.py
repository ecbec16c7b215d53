"""A measurement of gradients by reward variance, as a run keeps it on disk."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragen2_trl.instrument.gradients import WHOLE, BucketGradients, GradientMeasurement, GradientStatistics
from ragen2_trl.reporting.files import UNREADABLE, unreadable, write_json
from ragen2_trl.reporting.records import is_number

NAME = "gradients"  # of the files, before their step


def save_gradients(measurement: GradientMeasurement, folder: Path) -> Path:
    """Write `gradients_<step>.json` into `folder`; what is not defined is `null` in it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}_{measurement.step:05d}.json"
    write_json(path, _without_nan(asdict(measurement)), allow_nan=False)
    return path


def readable_gradients(paths: Sequence[Path], problems: list[str] | None = None) -> list[GradientMeasurement]:
    """Those that can be read; `problems` takes in the others, in words."""
    found = []
    for path in paths:
        try:
            found.append(read_gradients(path))
        except UNREADABLE as error:
            if problems is not None:
                problems.append(unreadable(path, error))
    return found


def read_gradients(path: Path) -> GradientMeasurement:
    """What `save_gradients` wrote."""
    values = json.loads(path.read_text())
    whole, *buckets = (_bucket(one) for one in (values["whole"], *values["buckets"]))
    norm = _number(values["batch_norm"])
    if not isinstance(values["step"], int):
        raise ValueError(f"step must be a whole number, got {ascii(values['step'])[:80]}")
    return GradientMeasurement(values["step"], values["coefficients"], norm, whole, buckets)


def _bucket(values: dict[str, Any]) -> BucketGradients:
    parts = {
        part: {
            group: GradientStatistics(**{key: _number(value) for key, value in statistics.items()})
            for group, statistics in groups.items()
        }
        for part, groups in values["parts"].items()
    }
    if "task" not in parts or not all(WHOLE in groups for groups in parts.values()):
        raise ValueError(f"parts must hold the task, and each of them the {WHOLE}, got {ascii(values['parts'])[:80]}")
    lowest, mean, highest = map(_number, values["reward_std"])
    return BucketGradients(values["num_groups"], values["num_samples"], (lowest, mean, highest), parts)


def _number(value: float | None) -> float:
    if value is not None and not is_number(value):
        raise ValueError(f"all values must be numbers or null, got {ascii(value)[:80]}")
    return math.nan if value is None else value


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
