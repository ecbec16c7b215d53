"""Batches of TRL's trainers as dictionaries of rows: join them, take rows out of them, trim their padding.

A batch maps names to values of one row per completion: tensors (rows, ...), lists and tuples. Anything else, as a
number or a tensor without dimensions, belongs to the whole generation batch. Prompts are padded on the left,
completions on the right, and so are all tensors over their tokens, whoever put them into the batch: those as wide as
the completions (rows, T, ...), the prompts (rows, P, ...) or both (rows, P + T, ...). Where T = P a tensor is one over
prompts if its name says so (`prompt...`), else one over completions. A tensor that is not over tokens but happens to
be as wide needs a dimension before, (rows, 1, K).

Images are split into one item per row to join and to choose rows, and merged into one tensor for the model. TRL lays
them out as each family's processor does, and every row may have any number of images, also none:

| Family | `pixel_values` | Beside it |
|---|---|---|
| Qwen-VL, GLM-V | (patches, F) | `image_grid_thw` (images, 3) |
| LLaVA, Gemma 3 | (images, C, H, W) | |
| Pixtral, Mistral 3 | (images, C, H, W), to the largest image of a call | `image_sizes` (images, 2) |
| LLaVA-NeXT | (images, tiles, C, H, W), to the most tiles of a call | `image_sizes` (images, 2) |
| Gemma 4 | (images, patches, F) | `image_position_ids` (images, patches, 2) |
| InternVL | (tiles, C, H, W) | `num_tiles`, unless all images are one tile |
| LFM2-VL | (tiles, patches, F) | `num_tiles`, `spatial_shapes` (tiles, 2), `pixel_attention_mask` (tiles, patches) |
| Idefics, SmolVLM | (rows, tiles, C, H, W), to the most tiles of a call | `pixel_attention_mask` (rows, tiles, H, W) |

Padding that a call of the processor added stays: the models skip it, but not all of them by its being zero.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ragen2_trl.columns import TURN_SAMPLES

Batch = dict[str, Any]

# What stands at padded positions, 0 for any other key. TRL leaves these values there; the loss masks them out.
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

# What stands where images are padded to one size.
IMAGE_PADDING = {
    "pixel_values": 0,
    "image_grid_thw": 0,
    "image_position_ids": -1,  # Gemma 4's mark of a patch that is not there
    "pixel_attention_mask": 0,
    "spatial_shapes": 0,
    "image_sizes": 0,
}
# (rows, P + T): 0 for a token of text, another number for a token of an image.
WHOLE_SEQUENCE = ("token_type_ids", "mm_token_type_ids")
IMAGE_KEYS = (*IMAGE_PADDING, "num_images", "num_tiles", *WHOLE_SEQUENCE)


def loss_mask(batch: Batch) -> Tensor:
    """Which completion tokens the loss counts: (rows, T), as TRL's `_compute_loss` forms it."""
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def sampled_tokens(batch: Batch) -> Tensor:
    """Tokens that the model wrote in each episode, those of its turn samples included: (rows,)."""
    tokens = loss_mask(batch).sum(dim=1)
    if TURN_SAMPLES in batch:
        further = [sum(sum(sample["env_mask"]) for sample in samples) for samples in batch[TURN_SAMPLES]]
        tokens = tokens + torch.tensor(further, device=tokens.device)
    return tokens


def row_lengths(batch: Batch) -> Tensor:
    """Columns of each row without its padding, prompt and completion: (rows,)."""
    return _prompt_lengths(batch) + _last_position(batch["completion_mask"])


def prompts_of(batch: Batch) -> list[tuple[int, int]]:
    """For each row the number of its prompt among the batch's prompts, and that prompt's columns without padding."""
    prompts = torch.cat([batch["prompt_ids"], batch["prompt_mask"]], dim=1)
    numbers = torch.unique(prompts, dim=0, return_inverse=True)[1]
    return list(zip(numbers.tolist(), _prompt_lengths(batch).tolist(), strict=True))


def whole_rows(batch: Batch) -> tuple[Tensor, Tensor, int]:
    """Input ids and attention mask (rows, P + T), and T."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return ids, mask, batch["completion_ids"].size(1)


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

    Values of the whole generation batch come from the first. Some batches may have images and others none.

    Raises:
        ValueError: when only some batches have a key that is not about images, or when types or shapes do not fit.
    """
    parts = fill_in_images([split_images(batch) for batch in batches])
    rows = [len(part["prompt_ids"]) for part in parts]
    values: dict[str, list[Any]] = {
        key: [part.get(key) for part in parts] for key in dict.fromkeys(key for part in parts for key in part)
    }
    by_row = {key: _are_by_row(key, of_all, rows) for key, of_all in values.items()}
    sides = {key: _side(key, parts) for key, of_all in values.items() if by_row[key] and isinstance(of_all[0], Tensor)}
    widths = _widths_of_all(parts, sides)
    joined: Batch = {}
    for key, of_all in values.items():
        if key in sides:
            joined[key] = _concatenate(key, parts, sides[key], widths, pad_token_id)
        else:
            joined[key] = type(of_all[0])(chain(*of_all)) if by_row[key] else of_all[0]
    return joined


def take(
    batch: Batch,
    rows: list[int],
    pad_to_multiple_of: int | None = None,
    *,
    keep_positions: bool = False,
    longest_trimmed: float = math.inf,
) -> Batch:
    """A micro-batch of the given rows of a batch, its padding trimmed to the longest of them.

    With `keep_positions` the padding of prompts stays, on their left, and so the absolute position of each token.
    Rows of more columns than `longest_trimmed` keep all of their padding.
    Without images among them it has no key of images, as a batch of text has none in TRL.
    """
    taken = _pick(split_images(batch), rows)
    full = _widths(taken)
    longest_prompt = full.prompt if keep_positions else int(_prompt_lengths(taken).max())
    longest_completion = max(1, int(_last_position(taken["completion_mask"]).max()))
    widths = Widths(
        _round_up(longest_prompt, pad_to_multiple_of, full.prompt),
        _round_up(longest_completion, pad_to_multiple_of, full.completion),
    )
    sides = {key: _side(key, [taken]) for key, value in taken.items() if isinstance(value, Tensor) and value.ndim}
    if sum(full) > longest_trimmed or not _tells_apart(widths, sides, taken):
        widths = full  # rather some padding than a tensor that is taken for another kind from here on
    first, last = full.prompt - widths.prompt, full.prompt + widths.completion
    columns = {"prompt": slice(first, None), "completion": slice(widths.completion), "whole": slice(first, last)}
    trimmed = {key: taken[key][:, columns[side]] for key, side in sides.items() if side is not None}
    return merge_images({**taken, **trimmed})


def chunks(batch: Batch, size: int) -> list[Batch]:
    """The rows of a batch in their order, `size` at a time and at most as many in the last, in the same widths.

    As TRL cuts a batch for a forward pass, but without image keys for those of text alone.
    """
    split, rows = split_images(batch), range(len(batch["prompt_ids"]))
    return [merge_images(_pick(split, list(rows[start : start + size]))) for start in rows[::size]]


def padded_size(batch: Batch) -> int:
    """Positions that a forward pass over the batch computes, padding included."""
    return sum(_widths(batch)) * len(batch["prompt_ids"])


def tree_size(prompts: Sequence[int], lengths: Sequence[int], groups: Sequence[int]) -> int:
    """Tokens of a tree.

    Args:
        prompts, lengths: tokens of the prompt and the completion of each row.
        groups: number of each row's prompt.

    >>> tree_size([9, 9, 4], [1, 2, 3], [0, 0, 1])
    17
    """
    of_groups = {group: size - 1 for group, size, length in zip(groups, prompts, lengths, strict=True) if length}
    return sum(lengths) + sum(of_groups.values())


def _pick(batch: Batch, rows: list[int]) -> Batch:
    """The given rows of all that is by row."""
    index = torch.tensor(rows, device=batch["prompt_ids"].device)
    picked: Batch = {}
    for key, value in batch.items():
        if not _is_by_row(key, value, len(batch["prompt_ids"])):
            picked[key] = value
        else:
            picked[key] = value[index] if isinstance(value, Tensor) else type(value)(value[row] for row in rows)
    return picked


# Tensors over tokens


class Widths(NamedTuple):
    """Padded widths of prompts and completions, P and T."""

    prompt: int
    completion: int

    def of(self, side: str) -> int:
        return sum(self) if side == "whole" else int(getattr(self, side))


def _widths(batch: Batch) -> Widths:
    return Widths(batch["prompt_ids"].size(1), batch["completion_ids"].size(1))


def _is_by_row(key: str, value: Any, rows: int) -> bool:
    """Whether a value has an item for each row and does not belong to the whole batch."""
    if not (isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.ndim > 0)):
        return False
    if len(value) != rows:
        raise ValueError(f"{key!r} has {len(value)} items in a batch of {rows} rows; allowed: {rows}, or a scalar.")
    return True


def _are_by_row(key: str, values: list[Any], rows: list[int]) -> bool:
    """Whether the values of all batches are by row, with a reason where only some are."""
    missing = [number for number, value in enumerate(values) if value is None]
    if 0 < len(missing) < len(values):
        raise ValueError(
            f"{key!r} is missing in the batches {missing} of {len(values)}; allowed: a key in all of them or in none, "
            f"or one of {IMAGE_KEYS} in batches with images."
        )
    by_row = [_is_by_row(key, value, size) for value, size in zip(values, rows, strict=True)]
    kinds = {type(value).__name__ if is_by_row else "scalar" for value, is_by_row in zip(values, by_row, strict=True)}
    if any(by_row) and len(kinds) > 1:
        raise ValueError(
            f"{key!r} is a {' and a '.join(sorted(kinds))} in different batches; allowed: one type in all of them."
        )
    return all(by_row)


def _possible_sides(key: str) -> tuple[str, ...]:
    """Which tokens a tensor of this name may be over, the likelier first: a tie is decided by the name."""
    if key in COMPLETION_PADDING:
        return ("completion",)
    return ("prompt", "completion", "whole") if key.startswith("prompt") else ("completion", "prompt", "whole")


def _side(key: str, parts: list[Batch]) -> str | None:
    """The tokens that a tensor is over: those of `"prompt"`, `"completion"`, the `"whole"` sequence, or none.

    In all of them: a ratio for each sequence (rows, 1) looks like one for each token where all have a single token.
    """
    for side in _possible_sides(key):
        if all(part[key].ndim > 1 and part[key].size(1) == _widths(part).of(side) for part in parts):
            return side
    return None


def _tells_apart(widths: Widths, sides: dict[str, str | None], part: Batch) -> bool:
    """Whether every tensor of a batch padded to these widths would be seen for what it is."""
    for key, side in sides.items():
        if part[key].ndim > 1:
            width = part[key].size(1) if side is None else widths.of(side)
            seen = next((other for other in _possible_sides(key) if width == widths.of(other)), None)
            if seen != side and width > 1:  # else there is nothing to trim
                return False
    return True


def _widths_of_all(parts: list[Batch], sides: dict[str, str | None]) -> Widths:
    """The largest widths of all batches, or little more where tensors would not be told apart by theirs."""
    prompt, completion = map(max, zip(*map(_widths, parts), strict=True))
    if len(parts) == 1:
        return Widths(prompt, completion)

    def wider() -> Iterator[Widths]:
        for more in count():
            yield from (Widths(prompt + left, completion + more - left) for left in range(more + 1))

    return next(widths for widths in wider() if _tells_apart(widths, sides, parts[0]))


def _concatenate(key: str, parts: list[Batch], side: str | None, widths: Widths, pad_token_id: int) -> Tensor:
    """The tensors of one key, padded to the given widths."""
    fill = {**PROMPT_PADDING, **COMPLETION_PADDING}.get(key, 0)
    padded: list[Tensor] = []
    for part in parts:
        value, own = part[key], _widths(part)
        if side is not None:
            left = 0 if side == "completion" else widths.prompt - own.prompt
            right = 0 if side == "prompt" else widths.completion - own.completion
            beyond = [0, 0] * (value.ndim - 2)
            value = pad(value, (*beyond, left, right), value=pad_token_id if fill is None else fill)
        padded.append(value)
    shapes = [tuple(value.shape) for value in padded]
    if len({shape[1:] for shape in shapes}) > 1:
        raise ValueError(
            f"{key!r} has the shapes {[tuple(part[key].shape) for part in parts]}; allowed: the width of prompts, of "
            "completions or of both together in every batch, or equal dimensions but for the first."
        )
    return torch.cat(padded)


def _last_position(mask: Tensor) -> Tensor:
    """One past the last position that is set in each row, 0 for an empty row. (rows, T) -> (rows,)."""
    positions = torch.arange(1, mask.size(1) + 1, device=mask.device)
    return pad(mask * positions, (1, 0)).amax(dim=1)


def _prompt_lengths(batch: Batch) -> Tensor:
    """Columns from the first token of each prompt that is attended to: (rows,)."""
    return _last_position(batch["prompt_mask"].flip(1))


def _round_up(width: int, multiple: int | None, limit: int) -> int:
    return width if multiple is None else min(-(-width // multiple) * multiple, limit)


# Images


def split_images(batch: Batch) -> Batch:
    """The batch with its images as one item per row, as which they may already be; rows of text have empty ones."""
    if not isinstance(batch.get("pixel_values"), Tensor):
        return batch
    if not _has_one_item_per_row(batch):
        from trl.trainer.utils import split_pixel_values_by_grid  # an import of seconds, for images alone

        split: Batch = split_pixel_values_by_grid(batch)
        return split
    # The models, too, take what is all zero for padding.
    with_image = [bool(row.any()) for row in batch["pixel_values"]]
    items: Batch = {
        key: [row if has else row[:0] for row, has in zip(batch[key].split(1), with_image, strict=True)]
        for key in ("pixel_values", "pixel_attention_mask")
        if key in batch
    }
    return {**batch, **items}


def merge_images(batch: Batch) -> Batch:
    """The opposite of `split_images`, and no image keys at all where no row has an image.

    That is how TRL lays out a batch of text, and most models fail when they are shown zero images.
    """
    pixels = batch.get("pixel_values")
    if not isinstance(pixels, list):
        return batch
    if not any(len(item) for item in pixels):
        return {key: value for key, value in batch.items() if key not in IMAGE_KEYS}
    merged, one_each = dict(batch), _has_one_item_per_row(batch)
    if one_each and sum(batch["num_images"]) == len(pixels):
        # TRL would take them for images that lie one after another, and cut rows wrongly unless each has one.
        merged["num_images"] = [1] * len(pixels)
    for key, fill in IMAGE_PADDING.items():
        if isinstance(batch.get(key), list):
            merged[key] = _stack(batch[key], fill, one_each)
    return merged


def fill_in_images(batches: list[Batch]) -> list[Batch]:
    """Split batches with the image keys that any of them has: rows of text have no images, and no token of one."""
    if any("num_images" in batch and batch["num_images"] is None for batch in batches):
        # TRL drops all images of a batch where the images of a truncated completion no longer fit its tokens.
        batches = [_without_images(batch) for batch in batches]
    examples = {key: batch[key] for batch in batches for key in IMAGE_KEYS if batch.get(key) is not None}
    filled = []
    for batch in batches:
        own, pixels = dict(batch), batch.get("pixel_values")
        if pixels is not None and "num_tiles" in examples:
            own.setdefault("num_tiles", [len(item) for item in pixels])  # InternVL, every image in one tile
        missing = [key for key in examples if own.get(key) is None] if pixels is None else []
        for key in missing:
            rows = len(batch["prompt_ids"])
            if key in WHOLE_SEQUENCE:
                width = batch["prompt_ids"].size(1) + batch["completion_ids"].size(1)
                own[key] = examples[key].new_zeros(rows, width)
            elif isinstance(examples[key], list):  # else in no layout that we know
                own[key] = [examples[key][0][:0] if key in IMAGE_PADDING else 0] * rows
        filled.append(own)
    return filled


def _has_one_item_per_row(batch: Batch) -> bool:
    """Whether images lie (rows, images or tiles, C, H, W), as in Idefics and SmolVLM, rather than one after another.

    Not by their number as TRL does: two images in one row and none in the next are as many as there are rows.
    """
    if "pixel_attention_mask" in batch:
        return "spatial_shapes" not in batch
    pixels = batch["pixel_values"]  # LLaVA-NeXT's have as many dimensions, and sizes
    return (pixels[0].ndim if isinstance(pixels, list) else pixels.ndim) == 5 and "image_sizes" not in batch


def _without_images(batch: Batch) -> Batch:
    rest = {key: value for key, value in batch.items() if key not in IMAGE_KEYS}
    text = {key: torch.zeros_like(batch[key]) for key in WHOLE_SEQUENCE if batch.get(key) is not None}
    return {**rest, **text, "num_images": None}


def _stack(items: list[Tensor], fill: int, one_each: bool) -> Tensor:
    """All images of all rows, padded at the end of each dimension; with `one_each`, rows without count as padding."""
    full = [item for item in items if len(item)]
    shape = [max(sizes) for sizes in zip(*(item.shape[1:] for item in full), strict=True)]
    if one_each:
        full = [item if len(item) else full[0].new_full((1, *shape), fill) for item in items]
    padded = []
    for item in full:
        missing = [size - own for size, own in zip(shape, item.shape[1:], strict=True)]
        padded.append(pad(item, [side for size in reversed(missing) for side in (0, size)], value=fill))
    return torch.cat(padded)
