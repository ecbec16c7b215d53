"""Joining batches and taking rows out of them: every row keeps its own, in every layout that TRL knows."""

from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.utils import (
    pad,
    shuffle_sequence_dict,
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
)

from ragen2_trl.trainers.batches import IMAGE_KEYS, chunks, join, padded_size, row_lengths, take

PAD = 0
LAYOUTS = ("qwen", "llava", "gemma3", "pixtral", "llava_next", "gemma4", "internvl", "lfm2", "idefics")
TOKEN_TYPES = {"qwen": "mm_token_type_ids", "gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}

# Rows as TRL lays them out. A row is its number, its prompt's and its completion's tokens, and its images; an image is
# its tiles, and a tile is (height, width, what tells it from others).


def picture(tile):
    height, width, number = tile
    return number + torch.arange(height * width * 2).view(2, height, width) / 1000


def square(tile):
    return picture((2, 2, tile[2]))


def patches_of(tile):
    return picture(tile).flatten(1).T  # (patches, 2)


def images_of(rows, layout):
    """What TRL and a processor make of the images of some rows in one call; nothing where there are none."""
    images = [image for row in rows for image in row["images"]]
    if not images:
        return {}
    tiles = [tile for image in images for tile in image]
    first = [image[0] for image in images]
    counts = {"num_images": [len(row["images"]) for row in rows]}
    tile_counts = {"num_tiles": [sum(map(len, row["images"])) for row in rows]}
    sizes = torch.tensor([tile[:2] for tile in first])
    if layout == "qwen":
        grid = torch.cat([torch.ones_like(sizes[:, :1]), sizes], dim=1)
        return {"pixel_values": torch.cat([*map(patches_of, first)]), "image_grid_thw": grid, **counts}
    if layout == "pixtral":
        return {"pixel_values": pad([*map(picture, first)]), "image_sizes": sizes, **counts}
    if layout == "llava_next":
        stacks = [torch.stack([*map(square, image)]) for image in images]
        sizes = torch.tensor([[len(image), image[0][2]] for image in images])
        return {"pixel_values": pad(stacks), "image_sizes": sizes, **counts}
    if layout == "gemma4":
        places = [torch.arange(2 * tile[0] * tile[1]).view(-1, 2) for tile in first]
        pixels = pad([*map(patches_of, first)])
        return {"pixel_values": pixels, "image_position_ids": pad(places, -1), **counts}
    if layout == "internvl":
        some_have_several = tile_counts if len(tiles) != len(images) else {}
        return {"pixel_values": torch.stack([*map(square, tiles)]), **counts, **some_have_several}
    if layout == "lfm2":
        patches = [*map(patches_of, tiles)]
        masks, shapes = pad([torch.ones(len(patch)) for patch in patches]), torch.tensor([tile[:2] for tile in tiles])
        beside = {"pixel_attention_mask": masks, "spatial_shapes": shapes}
        return {"pixel_values": pad(patches), **beside, **counts, **tile_counts}
    if layout == "idefics":
        height, width = (max(tile[side] for tile in tiles) for side in (0, 1))
        pixels = torch.zeros(len(rows), max(tile_counts["num_tiles"]), 2, height, width)
        masks = torch.zeros_like(pixels[:, :, 0], dtype=torch.long)
        for row, (these, mask) in zip(rows, zip(pixels, masks, strict=True), strict=True):
            for number, tile in enumerate(tile for image in row["images"] for tile in image):
                these[number, :, : tile[0], : tile[1]] = picture(tile)
                mask[number, : tile[0], : tile[1]] = 1
        return {"pixel_values": pixels, "pixel_attention_mask": masks, **counts}
    return {"pixel_values": torch.stack([*map(square, first)]), **counts}


def batch_of(rows, layout="llava", multiple=None):
    """TRL's batch of some rows, with values of all kinds that a subclass may add."""
    prompts, completions = ([torch.tensor(row[key]) for row in rows] for key in ("prompt", "completion"))

    def per_token(tensors, fill=0, side="right"):
        return pad(tensors, fill, side, multiple)

    batch = {
        "prompt_ids": per_token(prompts, PAD, "left"),
        "prompt_mask": per_token([torch.ones_like(ids) for ids in prompts], 0, "left"),
        "completion_ids": per_token(completions, PAD),
        "completion_mask": per_token([torch.ones_like(ids) for ids in completions]),
        "advantages": torch.tensor([row["number"] / 7 for row in rows]),
        "num_items_in_batch": torch.tensor(sum(map(len, completions))),
        "importance_sampling_ratio": torch.tensor([[row["number"] / 3] for row in rows]),
        "old_logps": torch.tensor([row["number"] / 5 for row in rows]),
        "returns": per_token([ids / 2 for ids in completions], 9),
        "chosen": per_token([ids % 2 == 1 for ids in completions], 1),
        "hidden": per_token([torch.stack([ids, -ids], dim=1) for ids in completions], 9),
        "prompt_scores": per_token([ids / 4 for ids in prompts], 9, "left"),
        "features": torch.tensor([[[row["number"], 1, 2]] for row in rows]),
        "number": torch.tensor([row["number"] for row in rows]),
        "names": [f"row {row['number']}" for row in rows],
        "pairs": tuple((row["number"], 1) for row in rows),
        "nothing": None,
    }
    whole = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    batch["places"] = (whole * 2).unsqueeze(2)
    images = images_of(rows, layout)
    if images and layout in TOKEN_TYPES:
        with_images = torch.tensor([bool(row["images"]) for row in rows]).unsqueeze(1)
        batch[TOKEN_TYPES[layout]] = (whole % 3 == 1) * with_images.long()
    return {**batch, **images}


def images_by_row(batch, layout):
    """Each row's images or tiles without padding, with all that belongs to them."""
    pixels, counts = batch["pixel_values"], batch["num_images"]
    if layout == "idefics":
        rows = zip(pixels, batch["pixel_attention_mask"], strict=True)
        return [[t[:, m.bool()].tolist() for t, m in zip(*row, strict=True) if m.any()] for row in rows]
    shapes = next((batch[key].tolist() for key in ("image_sizes", "spatial_shapes") if key in batch), None)
    if layout == "qwen":
        shapes = batch["image_grid_thw"].tolist()
        items = pixels.split(batch["image_grid_thw"].prod(dim=1).tolist())
    elif layout == "pixtral":
        items = [item[:, :height, :width] for item, (height, width) in zip(pixels, shapes, strict=True)]
    elif layout == "llava_next":
        items = [item[:tiles] for item, (tiles, _) in zip(pixels, shapes, strict=True)]
    elif layout == "gemma4":
        real = (batch["image_position_ids"] >= 0).all(dim=2)
        items = [item[mask] for item, mask in zip(pixels, real, strict=True)]
    elif layout == "lfm2":
        items = [item[mask.bool()] for item, mask in zip(pixels, batch["pixel_attention_mask"], strict=True)]
    else:
        items = list(pixels)
    counts = batch.get("num_tiles", counts)
    assert len(items) == sum(counts)
    described = zip(map(torch.Tensor.tolist, items), shapes or [None] * len(items), strict=True)
    return [[next(described) for _ in range(number)] for number in counts]


def contents_of(batch, layout):
    """What each row of a batch has, without padding."""
    prompt, completion = batch["prompt_mask"], batch["completion_mask"]
    whole, types = torch.cat([prompt, completion], dim=1), TOKEN_TYPES.get(layout, "token_type_ids")
    kinds = {
        **dict.fromkeys(("prompt_ids", "prompt_scores"), prompt),
        **dict.fromkeys(("completion_ids", "returns", "chosen", "hidden"), completion),
        **dict.fromkeys(("places", types), whole),
    }
    contents = {types: [[0] * int(mask.sum()) for mask in whole], "images": [[] for _ in whole]}
    for key, masks in kinds.items():
        if key in batch:
            assert batch[key].shape[:2] == masks.shape
            contents[key] = [values[mask.bool()].tolist() for values, mask in zip(batch[key], masks, strict=True)]
    for key in ("advantages", "importance_sampling_ratio", "old_logps", "features", "number"):
        contents[key] = batch[key].tolist()
    contents["names"], contents["pairs"] = batch["names"], batch["pairs"]
    if "pixel_values" in batch:
        contents["images"] = images_by_row(batch, layout)
    return [{key: values[row] for key, values in contents.items()} for row in range(len(whole))]


def numbered(parts):
    """The rows of all parts, each with its number."""
    rows = [row for part in parts for row in part]
    for number, row in enumerate(rows):
        row["number"] = number
    return rows


@st.composite
def rows_in_parts(draw):
    """Rows split over 1 to 3 batches, and some of them in any order."""
    numbers, tokens = count(1), st.lists(st.integers(1, 50), min_size=1, max_size=6)
    tile = st.builds(lambda height, width: (height, width, next(numbers)), st.integers(1, 3), st.integers(1, 3))
    images = st.lists(st.lists(tile, min_size=1, max_size=3), max_size=2)
    row = st.fixed_dictionaries({"prompt": tokens, "completion": tokens, "images": images})
    text = st.lists(row.map(lambda drawn: {**drawn, "images": []}), min_size=1, max_size=4)
    parts = draw(st.lists(text | st.lists(row, min_size=1, max_size=4), min_size=1, max_size=3))
    rows = numbered(parts)
    return parts, rows, draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=8))


each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.mark.slow
@each_layout
@settings(max_examples=25)
@given(drawn=rows_in_parts(), multiple=st.sampled_from([None, 4]))
def test_rows_that_are_taken_keep_their_own(layout, drawn, multiple):
    parts, rows, chosen = drawn
    batches = [batch_of(part, layout, multiple) for part in parts]
    taken = take(join(batches, PAD), chosen, multiple)
    expected = [contents_of(batch_of([rows[row]], layout), layout)[0] for row in chosen]
    assert contents_of(taken, layout) == expected
    # As in dynamic sampling: rows are pooled, joined with more, and taken out again.
    again = take(join([taken, *batches], PAD), list(range(len(chosen)))[::-1], multiple)
    assert contents_of(again, layout) == expected[::-1]
    assert row_lengths(taken).tolist() == [len(rows[row]["prompt"]) + len(rows[row]["completion"]) for row in chosen]
    if multiple is None:
        widest = sum(max(len(rows[row][key]) for row in chosen) for key in ("prompt", "completion"))
        assert padded_size(taken) == widest * len(chosen)
    else:
        assert not any(taken[key].size(1) % multiple for key in ("prompt_ids", "completion_ids"))


@pytest.mark.slow
@each_layout
@settings(max_examples=25)
@given(drawn=rows_in_parts(), chunks=st.integers(1, 3))
def test_trl_shuffles_and_splits_what_was_taken_without_tearing_rows_apart(layout, drawn, chunks):
    parts, rows, chosen = drawn
    taken = take(join([batch_of(part, layout) for part in parts], PAD), chosen * chunks)
    del taken["pairs"]  # TRL splits no tuples
    batch = shuffle_sequence_dict(split_pixel_values_by_grid(taken))
    batches = [unsplit_pixel_values_by_grid(chunk) for chunk in split_tensor_dict(batch, chunks)]
    seen = []
    for chunk in batches:
        chunk["pairs"] = [(number, 1) for number in chunk["number"].tolist()]
        for row, content in zip(chunk["number"].tolist(), contents_of(chunk, layout), strict=True):
            seen.append(row)
            assert content == contents_of(batch_of([rows[row]], layout), layout)[0]
    assert sorted(seen) == sorted(chosen * chunks)
    # Micro-batches of TRL's are what we pack.
    packed = take(join([{**chunk, "pairs": list(chunk["pairs"])} for chunk in batches], PAD), list(range(len(chosen))))
    for row, content in zip(packed["number"].tolist(), contents_of(packed, layout), strict=True):
        assert content == contents_of(batch_of([rows[row]], layout), layout)[0]


# Rows with and without images

WITH_TWO = {"prompt": [4, 5], "completion": [7], "images": [[(1, 2, 1)], [(2, 2, 2), (2, 1, 3)]]}
WITH_ONE = {"prompt": [4, 5, 6], "completion": [7, 8], "images": [[(3, 1, 4), (1, 1, 5), (1, 3, 6)]]}
OF_TEXT = {"prompt": [9], "completion": [3, 1, 2], "images": []}


def copies(*parts):
    parts = [[dict(row) for row in part] for part in parts]
    return parts, numbered(parts)


@each_layout
def test_text_beside_images_is_laid_out_as_by_one_call_of_trl(layout):
    parts, rows = copies([WITH_TWO], [OF_TEXT], [WITH_ONE])
    taken = take(join([batch_of(part, layout) for part in parts], PAD), [0, 1, 2])
    expected = batch_of(rows, layout)
    assert taken.keys() == expected.keys()
    for key in ("num_images", "num_tiles"):
        if key in expected and not (layout == "idefics" and key == "num_images"):
            assert taken[key] == expected[key]
    for key in IMAGE_KEYS:
        if isinstance(expected.get(key), torch.Tensor):
            assert torch.equal(taken[key], expected[key])


@each_layout
def test_a_micro_batch_of_text_has_no_image_keys(layout):
    """Most models fail when they are shown zero images."""
    parts, rows = copies([WITH_TWO, OF_TEXT], [OF_TEXT, WITH_ONE])
    joined = join([batch_of(part, layout) for part in parts], PAD)
    taken = take(joined, [1, 2])
    assert not set(taken) & set(IMAGE_KEYS)
    assert taken.keys() == batch_of([rows[1], rows[2]], layout).keys()
    assert "pixel_values" in take(joined, [0])


@each_layout
def test_chunks_hold_the_rows_in_their_order_as_wide_as_they_were(layout):
    parts, rows = copies([WITH_TWO, OF_TEXT, OF_TEXT, OF_TEXT, WITH_ONE])
    batch = batch_of(parts[0], layout)
    cut = chunks(batch, 2)
    assert [chunk["number"].tolist() for chunk in cut] == [[0, 1], [2, 3], [4]]
    assert ["pixel_values" in chunk for chunk in cut] == [True, False, True]
    contents = [content for chunk in cut for content in contents_of(chunk, layout)]
    assert contents == [contents_of(batch_of([row], layout), layout)[0] for row in rows]
    assert all(chunk["completion_ids"].size(1) == batch["completion_ids"].size(1) for chunk in cut)


def test_images_as_many_as_rows_but_not_one_in_each_stay_with_their_rows():
    """Idefics and SmolVLM have an item per row; TRL takes it for one per image where there are as many."""
    parts, _ = copies([WITH_TWO, OF_TEXT], [OF_TEXT, WITH_ONE, WITH_ONE, OF_TEXT])
    batches = [batch_of(part, "idefics") for part in parts]
    assert sum(batches[0]["num_images"]) == len(batches[0]["prompt_ids"])
    taken = take(join(batches, PAD), [0, 1])
    pixels = split_pixel_values_by_grid(taken)["pixel_values"]
    assert [item.any().item() for item in pixels] == [True, False]
    assert "pixel_values" not in take(join([taken, taken], PAD), [1, 3])


def test_one_tile_an_image_beside_several_counts_its_tiles():
    """TRL gives InternVL's batch no `num_tiles` where every image is a single tile."""
    parts, _ = copies([{**WITH_ONE, "images": [[(1, 1, 7)], [(1, 1, 8)]]}], [OF_TEXT], [WITH_ONE])
    batches = [batch_of(part, "internvl") for part in parts]
    assert ["num_tiles" in batch for batch in batches] == [False, False, True]
    assert take(join(batches, PAD), [2, 1, 0])["num_tiles"] == [3, 0, 2]


def test_images_that_trl_dropped_from_one_batch_are_dropped_from_all():
    """It does so where a truncated completion has lost tokens of an image that a tool returned."""
    parts, _ = copies([WITH_TWO], [OF_TEXT], [WITH_ONE])
    dropped, text, complete = (batch_of(part, "qwen") for part in parts)
    del dropped["pixel_values"], dropped["image_grid_thw"]
    dropped["mm_token_type_ids"] *= 0
    dropped["num_images"] = None
    for taken in (join([dropped, text, complete], PAD), take(join([dropped, text, complete], PAD), [0, 2])):
        assert taken["num_images"] is None
        assert not {"pixel_values", "image_grid_thw"} & set(taken)
        assert not taken["mm_token_type_ids"].any()


def test_token_types_of_a_batch_that_never_had_images_stay():
    parts, _ = copies([OF_TEXT], [OF_TEXT])
    batches = [{**batch_of(part), "token_type_ids": torch.ones(1, 4, dtype=torch.long)} for part in parts]
    assert take(join(batches, PAD), [1])["token_type_ids"].tolist() == [[1, 1, 1, 1]]


# Tensors that a subclass of a trainer puts into its batches are cut and padded like TRL's own.


PAD = 0


def plain(prompt, completion, rows=2, **added):
    ids = {"prompt_ids": torch.ones(rows, prompt), "completion_ids": torch.ones(rows, completion)}
    masks = {"prompt_mask": torch.ones(rows, prompt), "completion_mask": torch.ones(rows, completion)}
    return {**{key: value.long() for key, value in {**ids, **masks}.items()}, **added}


@pytest.mark.parametrize(
    ("width", "left", "right"), [(2, 1, 0), (3, 0, 2), (5, 1, 2)], ids=["prompt", "completion", "whole"]
)
@pytest.mark.parametrize("beyond", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float, torch.long, torch.bool], ids=str)
def test_the_width_tells_what_a_tensor_is_over(width, left, right, beyond, dtype):
    value = torch.ones(2, width, *beyond).to(dtype)
    wider = {2: 3, 3: 5, 5: 8}[width]
    other = plain(3, 5, custom=torch.ones(2, wider, *beyond).to(dtype))
    joined = join([plain(2, 3, custom=value), other], PAD)["custom"]
    assert joined.dtype == dtype
    assert joined.shape == (4, wider, *beyond)
    assert torch.equal(joined[:2, left : wider - right], value)
    assert not joined[:2, :left].any()
    assert not joined[:2, wider - right :].any()


def test_a_tie_is_decided_by_the_name():
    added = {"prompt_scores": torch.ones(2, 3), "scores": torch.ones(2, 3)}
    wider = {"prompt_scores": torch.ones(2, 4), "scores": torch.ones(2, 4)}
    joined = join([plain(3, 3, **added), plain(4, 4, **wider)], PAD)
    assert joined["prompt_scores"][0].tolist() == [0, 1, 1, 1]
    assert joined["scores"][0].tolist() == [1, 1, 1, 0]


def test_widths_that_become_equal_do_not_change_what_a_tensor_is_over():
    first = plain(3, 5, over_prompts=torch.ones(2, 3), features=torch.full((2, 6), 2.0))
    second = plain(5, 2, over_prompts=torch.ones(2, 5), features=torch.full((2, 6), 2.0))
    second["prompt_mask"][:, :3] = second["prompt_ids"][:, :3] = 0  # two tokens
    second["over_prompts"][:, :3] = 0
    joined = join([first, second], PAD)
    assert take(joined, [0])["over_prompts"].tolist() == [[1, 1, 1]]
    assert take(joined, [2])["over_prompts"].shape == (1, joined["prompt_ids"].size(1))  # else 2 and 2
    assert take(joined, [1])["features"].tolist() == [[2] * 6]


@pytest.mark.parametrize("key", ["importance_sampling_ratio", "per_sequence"])
def test_one_value_a_sequence_stays_one_beside_completions_of_a_single_token(key):
    joined = join([plain(2, 1, **{key: torch.ones(2, 1)}), plain(3, 4, **{key: torch.ones(2, 1)})], PAD)
    assert joined[key].tolist() == [[1], [1], [1], [1]]
    assert take(joined, [0, 3])[key].tolist() == [[1], [1]]


def test_known_keys_keep_what_trl_leaves_at_padded_positions():
    keys = {"tool_mask": 1, "importance_sampling_ratio": 1, "advantages": 0, "old_values": 0}
    batches = [plain(1, width, **{key: torch.full((2, width), 5.0) for key in keys}) for width in (2, 3)]
    joined = join(batches, pad_token_id=8)
    assert {key: joined[key][0].tolist() for key in keys} == {key: [5, 5, fill] for key, fill in keys.items()}
    assert joined["completion_ids"][0].tolist() == [1, 1, 8]


def test_what_belongs_to_the_whole_batch_is_the_first_ones():
    scalars = {"weight": 0.5, "num_items_in_batch": torch.tensor(7), "name": "first", "nothing": None}
    joined = join(
        [plain(2, 2, **scalars), plain(2, 2, weight=2, num_items_in_batch=torch.tensor(9), name="second")], 0
    )
    assert {key: joined[key] for key in scalars} == scalars
    assert {key: take(joined, [1])[key] for key in scalars} == scalars


def test_lists_and_tuples_stay_what_they_are():
    joined = join([plain(2, 2, a=["x", "y"], b=(1, 2)), plain(2, 2, a=["z", "u"], b=(3, 4))], PAD)
    assert (joined["a"], joined["b"]) == (["x", "y", "z", "u"], (1, 2, 3, 4))
    taken = take(joined, [2, 0])
    assert (taken["a"], taken["b"]) == (["z", "x"], (3, 1))


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"custom": torch.ones(2)}, {}, r"'custom' is missing in the batches \[1\] of 2; allowed: .*pixel_values"),
        ({"custom": None}, {"custom": torch.ones(2)}, r"'custom' is missing in the batches \[0\]"),
        (
            {"custom": torch.ones(3)},
            {"custom": torch.ones(2)},
            "'custom' has 3 items in a batch of 2 rows; allowed: 2",
        ),
        ({"custom": ["a"]}, {"custom": ["a", "b"]}, "'custom' has 1 items"),
        (
            {"custom": torch.ones(2, 7)},
            {"custom": torch.ones(2, 8)},
            r"'custom' has the shapes \[\(2, 7\), \(2, 8\)\]",
        ),
        ({"custom": torch.ones(2, 2)}, {"custom": torch.ones(2)}, "'custom' has the shapes"),
        ({"custom": torch.ones(2)}, {"custom": torch.tensor(1)}, "'custom' is a Tensor and a scalar in"),
        ({"custom": [1, 2]}, {"custom": (1, 2)}, "'custom' is a list and a tuple in"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(first, second, reason):
    with pytest.raises(ValueError, match=reason):
        join([plain(2, 3, **first), plain(2, 4, **second)], PAD)
