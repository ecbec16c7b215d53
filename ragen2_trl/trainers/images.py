"""Images in batches of TRL's trainers: one item per row to join and to choose rows, one tensor for the model.

TRL lays them out as each family's processor does, and every row may have any number of images, also none:

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

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer.utils import split_pixel_values_by_grid

Batch = dict[str, Any]

# What stands where images are padded to one size.
IMAGE_PADDING = {
    "pixel_values": 0,
    "image_grid_thw": 0,
    "image_position_ids": -1,  # Gemma 4's mark of a patch that is not there
    "pixel_attention_mask": 0,
    "spatial_shapes": 0,
    "image_sizes": 0,
}
# (rows, P + T): they tell the tokens of images from those of text, which are 0.
WHOLE_SEQUENCE = ("token_type_ids", "mm_token_type_ids")
IMAGE_KEYS = (*IMAGE_PADDING, "num_images", "num_tiles", *WHOLE_SEQUENCE)


def split_images(batch: Batch) -> Batch:
    """The batch with its images as one item per row, as which they may already be; rows of text have empty ones."""
    if not isinstance(batch.get("pixel_values"), Tensor):
        return batch
    if not _has_one_item_per_row(batch):
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
        # TRL drops all images of a batch where those of a truncated completion no longer fit its tokens.
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
