"""Completions of equal prompts as one row, in which each prompt stands once, without padding and without a mask.

A tree is [prompt][completion 1]...[completion k][next prompt]..., each prompt without its last token, and each
completion with that token before it, since it predicts the first token of the completion. A completion attends to its
prompt and, causally, to itself. Positions are the columns of TRL's padded rows, so that learned positions and the
rounding of rotary embeddings are TRL's own.

Attention finds the tree among its keyword arguments, so that a checkpointed layer finds it again in its backward pass.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SHARED_CALL = 256  # queries up to which segments share a call, which computes some pairs for nothing but is one call
LARGEST_HEAD = 256  # of flash kernels
EAGER = "eager_attention_forward"  # in transformers' modules


class Segment(NamedTuple):
    """Consecutive tokens of a tree: a prompt, or a completion.

    Args:
        row: Of the padded batch.
        column: Of its first token there.
        size: Tokens.
        prompt: Place of its prompt in the tree, of a completion.
        context: Tokens of its prompt, 0 for a prompt.
    """

    row: int
    column: int
    size: int
    prompt: int
    context: int


@dataclass(frozen=True, eq=False)
class Branches:
    """How the N tokens of a tree attend, in C parts.

    Args:
        index: (K,) the keys of each part in turn, by place: those of its prompt and its own.
        queries, keys: (C + 1,) int32, sums of each part's queries and keys.
        sizes: queries and keys of each part.
        masks: by window, `None` for full attention, and for each part (queries, keys) bool, or `None` if it is causal;
            empty where a part is one segment and flash attention serves.
    """

    index: Tensor
    queries: Tensor
    keys: Tensor
    sizes: tuple[list[int], list[int]]
    masks: Mapping[int | None, list[Tensor | None]]


class Tree(NamedTuple):
    """Padded rows as one row of N tokens.

    Args:
        ids, positions: (1, N) tokens, and their columns in the padded rows.
        labels: (1, N) the token that each position predicts, -100 for none.
        scored: (3, tokens) place of each prediction, and row and completion column of its token.
        branches: for attention.
    """

    ids: Tensor
    positions: Tensor
    labels: Tensor
    scored: Tensor
    branches: Branches


def build_tree(
    input_ids: Tensor,
    width: int,
    prompts: Sequence[int],
    lengths: Sequence[int],
    groups: Sequence[int],
    windows: Iterable[int | None],
    uses_flash: bool,
) -> Tree:
    """A tree of padded rows.

    Args:
        input_ids: (rows, P + T), prompts padded on the left and completions on the right.
        width: T.
        prompts, lengths, groups: tokens of the prompt and the completion of each row, and number of its prompt.
        windows: those that layers attend in, `None` for full attention.
        uses_flash: whether attention is one call for all segments.
    """
    segments = _segments(input_ids.size(1) - width, prompts, lengths, groups)
    parts = [[one] for one in segments] if uses_flash else _parts(segments)
    sizes = [sum(one.size for one in part) for part in parts]
    contexts = [part[0].context for part in parts]
    both = sizes, [size + context for size, context in zip(sizes, contexts, strict=True)]
    row = torch.cat([torch.full((one.size,), one.row) for one in segments])
    column = torch.cat([torch.arange(one.column, one.column + one.size) for one in segments])
    index = []
    for part, (start, stop) in zip(parts, pairwise(accumulate(sizes, initial=0)), strict=True):
        index += [*range(part[0].prompt, part[0].prompt + part[0].context), *range(start, stop)]
    predicts = column >= input_ids.size(1) - width - 1
    place = predicts.nonzero().squeeze(1)
    scored = torch.stack([place, row[place], column[place] - (input_ids.size(1) - width) + 1])
    device = input_ids.device
    row, column, predicts = row.to(device), column.to(device), predicts.to(device)
    labels = input_ids[row, (column + 1).clamp(max=input_ids.size(1) - 1)].masked_fill(~predicts, -100)
    branches = Branches(
        torch.tensor(index, device=device),
        _ends(both[0], device),
        _ends(both[1], device),
        both,
        {} if uses_flash else {window: [_mask(part, window, device) for part in parts] for window in windows},
    )
    return Tree(input_ids[row, column][None], column[None], labels[None], scored.to(device), branches)


def _ends(sizes: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)


def _segments(before: int, prompts: Sequence[int], lengths: Sequence[int], groups: Sequence[int]) -> list[Segment]:
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        if lengths[row]:
            members.setdefault(group, []).append(row)
    segments: list[Segment] = []
    place = 0
    for rows in members.values():
        context, start = prompts[rows[0]] - 1, place
        if context:
            segments.append(Segment(rows[0], before - context - 1, context, start, 0))
        segments += [Segment(row, before - 1, lengths[row], start, context) for row in rows]
        place += context + sum(lengths[row] for row in rows)
    return segments


def _parts(segments: list[Segment]) -> list[list[Segment]]:
    """Consecutive segments of a group that share a call where there is no kernel for sequences of several lengths."""
    parts: list[list[Segment]] = []
    for one in segments:
        begins = not parts or one.prompt != parts[-1][0].prompt
        if begins or sum(other.size for other in parts[-1]) + one.size > SHARED_CALL:
            parts.append([])
        parts[-1].append(one)
    return parts


def _mask(part: list[Segment], window: int | None, device: torch.device) -> Tensor | None:
    """Whether each token of a part attends to each of its keys. Segment 0 is the prompt."""
    first = part[0]
    if len(part) == 1 and not first.context and (window is None or first.size <= window):
        return None
    is_root = first.context == 0 and any(one.context for one in part)
    numbers = [0 if number == 0 and is_root else number + 1 for number in range(len(part))]
    segment = torch.cat([torch.full((one.size,), number) for one, number in zip(part, numbers, strict=True)])
    column = torch.cat([torch.arange(one.column, one.column + one.size) for one in part])
    context = torch.arange(first.column - first.context, first.column)
    key_segment = torch.cat([torch.zeros_like(context), segment])
    key_column = torch.cat([context, column])
    apart = column[:, None] - key_column
    mask = (apart >= 0) & ((key_segment == 0) | (key_segment == segment[:, None]))
    return (mask if window is None else mask & (apart < window)).to(device)


# Attention


def serves_flash(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether PyTorch has a flash kernel for sequences of several lengths here."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_size <= LARGEST_HEAD
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and torch.backends.cuda.is_flash_attention_available()
    )


@contextmanager
def attending_to_trees(config: Any) -> Iterator[None]:
    """While inside, the layers of a model attend to the tree that they are given, and to rows without one as before.

    Around the forward pass over a tree, and around its backward pass, in which checkpointed layers run again.
    """
    before = config._attn_implementation
    config._attn_implementation = _registered(before)
    try:
        yield
    finally:
        config._attn_implementation = before


@cache
def _registered(implementation: str) -> str:
    from transformers import AttentionInterface  # an import of seconds

    name = f"prompt_tree|{implementation}"  # transformers knows no mask for this name, and makes none
    AttentionInterface.register(name, partial(_attention, implementation))
    return name


def _attention(
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    prompt_tree: Branches | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As transformers calls it: (rows, heads, N, D) each, to (rows, N, heads, D)."""
    if prompt_tree is None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        of_classes = (vars(sys.modules[owner.__module__]) for owner in type(module).__mro__)
        eager = next((names[EAGER] for names in of_classes if EAGER in names), None)
        plain: Any = ALL_ATTENTION_FUNCTIONS.get(implementation, eager)
        own = {"scaling": scaling, "sliding_window": sliding_window, "dropout": dropout}
        result: tuple[Tensor, Tensor | None] = plain(module, query, key, value, attention_mask, **own, **kwargs)
        return result
    if others := [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None] + ["dropout"] * (dropout > 0):
        raise ValueError(f"attention with {others[0]} is not that of a tree")
    query, key, value = (each.transpose(1, 2)[0] for each in (query, key, value))  # (N, heads, D)
    if not prompt_tree.masks:  # rotary embeddings may have widened queries and keys
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else value.dtype
        query, key, value = (each.to(dtype) for each in (query, key, value))
    key, value = (_gather(each, prompt_tree.index) for each in (key, value))  # (K, heads, D)
    attend = _by_part if prompt_tree.masks else _flash
    return attend(query, key, value, prompt_tree, scaling, sliding_window)[None], None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, branches: Branches, scaling: float | None, window: int | None
) -> Tensor:
    """(N, heads, D) by one call. Causal from the last key backwards, so that a completion sees all of its prompt."""
    sizes, left = [max(each) for each in branches.sizes], -1 if window is None else window - 1
    public = _varlen_attn()
    if public is not None:
        has_groups = query.size(1) != key.size(1)
        options = {"scale": scaling, "window_size": (left, 0), "enable_gqa": has_groups}
        out: Tensor = public(query, key, value, branches.queries, branches.keys, *sizes, **options)
        return out
    kernel = torch.ops.aten._flash_attention_forward
    windows = {} if window is None else {"window_size_left": left, "window_size_right": 0}
    bounds = branches.queries, branches.keys, *sizes
    out = kernel(query.contiguous(), key, value, *bounds, 0.0, True, False, scale=scaling, **windows)[0]
    return out


@cache
def _varlen_attn() -> Any:
    """PyTorch's public call, where it is there and takes windows and groups of heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    return varlen_attn if {"window_size", "enable_gqa"} <= signature(varlen_attn).parameters.keys() else None


def _by_part(
    query: Tensor, key: Tensor, value: Tensor, branches: Branches, scaling: float | None, window: int | None
) -> Tensor:
    """(N, heads, D) by a call for each part."""
    key, value = (each.repeat_interleave(query.size(1) // each.size(1), 1) for each in (key, value))
    queries, keys = branches.sizes
    whole = [(query, queries), (key, keys), (value, keys)]
    outs = []
    # Of four dimensions: kernels that hold no scores are for these alone.
    split = (each.transpose(0, 1)[None].split(sizes, 2) for each, sizes in whole)
    for q, k, v, mask in zip(*split, branches.masks[window], strict=True):
        outs.append(scaled_dot_product_attention(q, k, v, mask, scale=scaling, is_causal=mask is None))
    return torch.cat(outs, dim=2)[0].transpose(0, 1)


def _gather(values: Tensor, index: Tensor) -> Tensor:
    gathered: Tensor = _Gather.apply(values, index)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    """Rows of a tensor by index. Gradients of a row that is taken several times are summed in float32."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype = values.shape, values.dtype
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        return wide.new_zeros(ctx.shape).index_add_(0, index, wide).to(ctx.dtype), None
