"""Tensors that a subclass of a trainer puts into its batches are cut and padded like TRL's own."""

import pytest
import torch

from ragen2_trl.trainers.batches import join, take

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
