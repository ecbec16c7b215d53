"""The cache of one prompt under many completions at once, held once and changed by none of them.

A layer hands out what it holds for as many rows as ask, and drops what it is given: beside the prompt's cache, no more
than one layer's keys and values exist for all rows at any time, those that attention is computed from.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)


def share(cache: Cache, rows: int) -> Cache:
    """A cache for one forward pass of `rows` rows on top of `cache`, which holds one."""
    shared = copy.copy(cache)
    shared.layers = [layer if _is_empty(layer) else _SHARED[type(layer)](layer, rows) for layer in cache.layers]
    return shared


def unshareable(cache: Any, length: int) -> str | None:
    """What is wrong with the cache of `length` ids; `None` if `share` can give it to other rows."""
    if not isinstance(cache, Cache):
        return f"{type(cache).__name__} in place of a cache of its input"
    layers = [layer for layer in cache.layers if not _is_empty(layer)]
    unknown = next((type(layer).__name__ for layer in layers if type(layer) not in _SHARED), None)
    if unknown is not None:
        return f"a cache with layers of the class {unknown}, which is not known to serve other rows"
    lengths = {layer.get_seq_length() for layer in layers if getattr(layer, "keys", None) is not None}
    if lengths != {length}:
        return f"{type(cache).__name__} of {sorted(lengths)} tokens in place of a cache of its {length}"
    return None


def _is_empty(layer: Any) -> bool:
    """Whether it is there for the count only: of a layer without attention, or one that attends to another's keys."""
    return not isinstance(layer, LinearAttentionCacheLayerMixin) and layer.keys is None


class _SharedKeys(DynamicLayer):
    """Keys and values (1, heads, P - 1, head size) of all tokens, or of the latest within a window."""

    def __init__(self, layer: DynamicLayer, rows: int):
        self.__dict__.update(vars(layer))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows = len(key_states)
        keys = torch.cat([self.keys.expand(rows, -1, -1, -1), key_states], dim=-2)
        return keys, torch.cat([self.values.expand(rows, -1, -1, -1), value_states], dim=-2)


class _SharedWindow(_SharedKeys, DynamicSlidingWindowLayer):
    """Its masks come from the number of tokens seen, which stays that of the prompt."""


class _SharedIndex(_SharedKeys, DynamicIndexedLayer):
    """Sparse attention, with keys (1, P - 1, size) of its index."""

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        return torch.cat([self.indexer_keys.expand(len(indexer_key_states), -1, -1), indexer_key_states], dim=1)


class _Repeated(dict[int, Tensor | None]):
    """States (1, ...) that are read as (rows, ...): a copy each time, which a kernel may write to."""

    def __init__(self, states: dict[int, Tensor | None], rows: int):
        super().__init__(states)
        self.rows = rows

    def __getitem__(self, number: int) -> Tensor | None:
        state = super().__getitem__(number)
        return None if state is None else state.repeat(self.rows, *[1] * (state.ndim - 1))


class _SharedStates(LinearAttentionLayer):
    """States of convolutions and recurrences, which updates replace: in a copy that nobody keeps."""

    def __init__(self, layer: LinearAttentionLayer, rows: int):
        self.__dict__.update(vars(layer))
        self.has_previous_state = dict(layer.has_previous_state)
        self.conv_states = _Repeated(layer.conv_states, rows)
        self.recurrent_states = _Repeated(layer.recurrent_states, rows)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return self.recurrent_states[state_idx].copy_(recurrent_states)


class _SharedStatesAndKeys(_SharedStates, _SharedKeys, LinearAttentionAndFullAttentionLayer):
    pass


class _SharedStatesAndWindow(_SharedStates, _SharedWindow, LinearAttentionAndSlidingWindowAttentionLayer):
    pass


# By class and not by inheritance: what a layer of another class does with its input is not known.
_SHARED: dict[type, Any] = {
    DynamicLayer: _SharedKeys,
    DynamicSlidingWindowLayer: _SharedWindow,
    DynamicIndexedLayer: _SharedIndex,
    LinearAttentionLayer: _SharedStates,
    LinearAttentionAndFullAttentionLayer: _SharedStatesAndKeys,
    LinearAttentionAndSlidingWindowAttentionLayer: _SharedStatesAndWindow,
}
