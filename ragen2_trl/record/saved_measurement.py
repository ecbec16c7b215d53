"""A measurement of reasoning with its texts, as a run keeps it on disk."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragen2_trl.filtering import group_score
from ragen2_trl.instrument.diagnosis import Measurement
from ragen2_trl.record.files import read_text, write_json


@dataclass(frozen=True)
class SavedMeasurement:
    """A measurement of the first turns of one generation, with its texts.

    Args:
        step: Optimizer step.
        metrics: From `information_metrics`.
        regime: From `judge`; `None` where there is none.
        prompts: (N,) what the traces were scored under.
        traces: (B,) the reasoning traces.
        prompt_index: (B,) own column of each trace.
        lengths: (B,) tokens.
        cross_logps: (B, N) log p(Z_b | x_n) in nats.
        rewards: For each group of the generation, the G weighted reward sums; NaN where there is none.
        scores: For each group, what the filter ranks by; reward variance without a filter.
        kept: For each group, whether the filter kept it; `None` without a filter.
    """

    step: int
    metrics: dict[str, float]
    regime: str | None
    prompts: list[str]
    traces: list[str]
    prompt_index: Tensor
    lengths: Tensor
    cross_logps: Tensor
    rewards: Tensor
    scores: Tensor
    kept: Tensor | None

    @classmethod
    def of(
        cls,
        step: int,
        measurement: Measurement,
        contexts: Sequence[tuple[int, ...]],
        reasoning: Sequence[Sequence[int]],
        decode: Callable[..., Any],
        regime: str | None,
        rewards: Tensor,
    ) -> "SavedMeasurement":
        """A measurement with its texts, of the token ids of its columns and of its traces; a prompt has one column."""
        distinct = {context: contexts.index(context) for context in contexts}
        columns = list(distinct.values())
        place = torch.tensor([columns.index(distinct[context]) for context in contexts])
        return cls(
            step=step,
            metrics=measurement.metrics,
            regime=regime,
            prompts=[decode(list(context), skip_special_tokens=True) for context in distinct],
            traces=[decode(list(ids), skip_special_tokens=True) for ids in reasoning],
            prompt_index=place[measurement.prompt_index],
            lengths=measurement.lengths,
            cross_logps=measurement.cross_logps[:, columns],
            rewards=rewards,
            scores=group_score(rewards),
            kept=None,
        )

    def save(self, folder: Path) -> Path:
        """Write `measurement_<step>.json` into `folder`."""
        values = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in vars(self).items()}
        values["cross_logps"] = [[round(logp, 4) for logp in row] for row in values["cross_logps"]]  # half the file
        values["rewards"] = [
            [None if math.isnan(reward) else reward for reward in group] for group in values["rewards"]
        ]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"measurement_{self.step:05d}.json"
        write_json(path, values)
        return path


def read_measurement(path: Path) -> SavedMeasurement:
    """What `SavedMeasurement.save` wrote."""
    values = json.loads(read_text(path))
    values["rewards"] = [[math.nan if reward is None else reward for reward in group] for group in values["rewards"]]
    for name, dtype in (("prompt_index", torch.long), ("lengths", torch.long), ("kept", torch.bool)):
        values[name] = None if values[name] is None else torch.tensor(values[name], dtype=dtype)
    for name in ("cross_logps", "rewards", "scores"):
        values[name] = torch.tensor(values[name], dtype=torch.float32)
    return SavedMeasurement(**values)
