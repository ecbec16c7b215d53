"""Numbers of a row that may predict its rewards: columns of the dataset, or what its task says of how hard it is."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from ragen2_trl.columns import TASK
from ragen2_trl.envs import Environment, TaskMixture
from ragen2_trl.trainers.posterior import Floats


def difficulty_features(names: Sequence[str] | None, rows: Dataset, reward_funcs: Sequence[Any]) -> Floats | None:
    """(M, F) each number and its square, in units of its spread over the dataset; `None` without a name.

    Squares, as reward varies most for what is neither easy nor hard. 0 stands for what is missing.

    Args:
        names: numeric columns of the dataset, or of `Episode.difficulty`.
        rows: the dataset, M rows.
        reward_funcs: of the trainer; those of our tasks know these.

    Raises:
        ValueError: for a name that is neither.
    """
    if not names:
        return None
    numeric = [name for name, feature in rows.features.items() if _is_numeric(feature)]
    of_task: dict[str, Floats] = {}
    if missing := [name for name in names if name not in numeric]:
        of_task = _of_task(rows, reward_funcs)
        if unknown := [name for name in missing if name not in of_task]:
            raise ValueError(
                f"snr_difficulty_columns={list(names)} names {unknown}, numbers that rows do not have; allowed: "
                f"{', '.join([*numeric, *of_task]) or 'none for this dataset'}."
            )
    features = []
    for name in names:
        column = of_task[name] if name in of_task else np.array(rows[name][:], dtype=np.float64)
        known = np.isfinite(column)
        spread = float(column[known].std()) if known.any() else 0.0
        scaled = np.where(known, column - (column[known].mean() if known.any() else 0.0), 0.0) / (spread or 1.0)
        features += [scaled, np.where(known, scaled**2 - 1, 0.0)]
    return np.stack(features, axis=1)


def _is_numeric(feature: Any) -> bool:
    return getattr(feature, "dtype", "").startswith(("int", "uint", "float", "bool"))


def _of_task(rows: Dataset, reward_funcs: Sequence[Any]) -> dict[str, Floats]:
    """(M,) each number that the task of the reward functions tells of the rows, NaN for those of other tasks."""
    tasks = (getattr(func, "environment", None) for func in reward_funcs)
    task = next((one for one in tasks if isinstance(one, (Environment, TaskMixture))), None)
    found: dict[str, Floats] = {}
    for number, row in enumerate(rows if task is not None else ()):
        env = task.environments[row[TASK]] if isinstance(task, TaskMixture) else task
        assert env is not None
        for name, value in env.episode(row, random.Random(0)).difficulty.items():
            found.setdefault(name, np.full(len(rows), np.nan))[number] = value
    return found
