"""Batches of TRL's GRPO trainer as dictionaries of rows: join them, take rows out of them, trim their padding.

A batch maps names to tensors with one row per completion, to lists with one item per completion, or to scalars that
belong to the whole generation batch. Prompts are padded on the left, completions on the right.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

Batch = dict[str, Any]

# What stands at padded positions. TRL leaves these values there; the loss masks them out.
PROMPT_PADDING = {"prompt_ids": None, "prompt_mask": 0}
COMPLETION_PADDING = {
    "completion_ids": None,  # None: the tokenizer's padding token
    "completion_mask": 0,
    "tool_mask": 1,
    "old_per_token_logps": 0.0,
    "ref_per_token_logps": 0.0,
    "sampling_per_token_logps": 0.0,
    "importance_sampling_ratio": 1.0,  # VESPO sums its logarithm over padded positions, too
    "advantages": 0.0,  # one per token in some subclasses of TRL's trainer
}
# (rows, prompt + completion): padded on both sides.
WHOLE_SEQUENCE = ("token_type_ids", "mm_token_type_ids")


def loss_mask(batch: Batch) -> Tensor:
    """Which completion tokens the loss counts: (rows, T), as TRL's `_compute_loss` forms it."""
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def row_lengths(batch: Batch) -> Tensor:
    """Tokens of each row without its padding, prompt and completion: (rows,)."""
    return batch["prompt_mask"].sum(dim=1) + _last_position(batch["completion_mask"])


def without_loss(batch: Batch, rows: Tensor) -> Batch:
    """The batch with no token of the given rows in its loss. They are still attended to, so others see no change.

    Args:
        batch: any batch.
        rows: (rows,) bool, True = out of the loss.
    """
    mask = batch.get("tool_mask", torch.ones_like(batch["completion_mask"]))
    return {**batch, "tool_mask": mask.masked_fill(rows.unsqueeze(1), 0)}


def join(batches: list[Batch], pad_token_id: int) -> Batch:
    """One batch from several whose padded widths may differ, images split into one item per row.

    Raises:
        ValueError: when the batches do not have the same keys, as when only some processes sampled images.
    """
    batches = [_split_images(batch) for batch in batches]
    keys = [sorted(batch) for batch in batches]
    if any(other != keys[0] for other in keys):
        raise ValueError(
            f"Batches with the keys {keys} cannot be joined; allowed: the same keys in all, so images in the prompts "
            "of every process, and of every round of a refill, or of none."
        )
    prompt_width = max(batch["prompt_ids"].size(1) for batch in batches)
    completion_width = max(batch["completion_ids"].size(1) for batch in batches)

    def widen(batch: Batch, key: str) -> Tensor:
        left = prompt_width - batch["prompt_ids"].size(1)
        right = completion_width - batch["completion_ids"].size(1)
        value: Tensor = batch[key]
        if key in PROMPT_PADDING:
            fill = PROMPT_PADDING[key]
            return pad(value, (left, 0), value=pad_token_id if fill is None else fill)
        # In all of them: a ratio for each sequence looks like one for each token where all have a single token.
        if all(_is_per_token(key, other[key], other) for other in batches):
            fill = COMPLETION_PADDING[key]
            return pad(value, (0, right), value=pad_token_id if fill is None else fill)
        return pad(value, (left, right)) if key in WHOLE_SEQUENCE else value

    joined: Batch = {}
    for key, first in batches[0].items():
        if first is None:
            joined[key] = None
        elif isinstance(first, list):
            joined[key] = [item for batch in batches for item in batch[key]]
        elif first.ndim == 0:
            joined[key] = first
        else:
            joined[key] = torch.cat([widen(batch, key) for batch in batches])
    return joined


def take(batch: Batch, rows: list[int], pad_to_multiple_of: int | None = None) -> Batch:
    """A micro-batch of the given rows of a joined batch, its padding trimmed to the longest of them."""
    batch = _split_images(batch)
    index = torch.tensor(rows, device=batch["prompt_ids"].device)
    taken: Batch = {}
    for key, value in batch.items():
        if isinstance(value, list):
            taken[key] = [value[row] for row in rows]
        else:
            taken[key] = value if value is None or value.ndim == 0 else value[index]

    prompt_width, completion_width = taken["prompt_ids"].size(1), taken["completion_ids"].size(1)
    longest_prompt = int(taken["prompt_mask"].sum(dim=1).max())
    longest_completion = max(1, int(_last_position(taken["completion_mask"]).max()))
    first = prompt_width - _round_up(longest_prompt, pad_to_multiple_of, prompt_width)
    last = _round_up(longest_completion, pad_to_multiple_of, completion_width)
    trimmed = dict(taken)
    for key, value in taken.items():
        if key in PROMPT_PADDING:
            trimmed[key] = value[:, first:]
        elif _is_per_token(key, value, taken):
            trimmed[key] = value[:, :last]
        elif key in WHOLE_SEQUENCE:
            trimmed[key] = value[:, first : prompt_width + last]
    return unsplit_pixel_values_by_grid(trimmed)


def padded_size(batch: Batch) -> int:
    """Positions that a forward pass over the batch computes, padding included."""
    prompt_ids: Tensor = batch["prompt_ids"]
    return prompt_ids.numel() + int(batch["completion_ids"].numel())


def _split_images(batch: Batch) -> Batch:
    """The batch with its images as one item per row, as which they may already be."""
    return batch if isinstance(batch.get("pixel_values"), list) else split_pixel_values_by_grid(batch)


def _is_per_token(key: str, value: Any, batch: Batch) -> bool:
    """Whether a value is (rows, T). Advantages are mostly (rows,), sequence-level importance ratios (rows, 1)."""
    return key in COMPLETION_PADDING and value.ndim == 2 and value.size(1) == batch["completion_ids"].size(1)


def _last_position(mask: Tensor) -> Tensor:
    """One past the last position that is set in each row, 0 for an empty row. (rows, T) -> (rows,)."""
    positions = torch.arange(1, mask.size(1) + 1, device=mask.device)
    return (mask * positions).amax(dim=1)


def _round_up(width: int, multiple: int | None, limit: int) -> int:
    return width if multiple is None else min(-(-width // multiple) * multiple, limit)
