"""Log-probabilities of many completions under many prompts, with the work of each prompt done once.

Each prompt is run once into a key-value cache; all completions are then run on top of that cache, which no forward
pass changes, and logits are made of scored tokens only. Only standard calls `model(input_ids, position_ids, cache)`
are made. Where a cache cannot be reused, or reusing it turns out to change a log-probability, each pair is run in
full, with a warning that says why.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
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
from transformers.utils import logging

from ragen2_trl.rotary import length_dependent

logger = logging.get_logger(__name__)

H = TypeVar("H", bound=Hashable)
Rows = Sequence[tuple[tuple[int, ...], int]]  # ids of each completion, and how many of them are not scored

# Bounds of one forward pass, unless `max_tokens_per_forward` says otherwise, on a CPU and elsewhere. On a CPU little
# chunks are fastest (benchmarks/cross_score.py): less padding, and less memory to be mapped for logits.
MAX_TOKENS_CPU, MAX_TOKENS = 1024, 8192
MAX_LOGITS_CPU, MAX_LOGITS = 2**27, 2**29  # 512 MiB in float32, 1 GiB in bfloat16
# Times `max_tokens_per_forward` that rows and the prompt before each may be together, in tokens: attention holds a
# layer's keys and values of all of them.
ATTENDED = 16
# Logits that are normalised at once, in float32: on a CPU few enough to stay in a cache, elsewhere enough to keep a
# GPU busy (256 MiB).
LOGITS_SLICE_CPU, LOGITS_SLICE = 2**18, 2**26
# Nats by which two orders of operations may differ at a token: rounding makes a tenth of it, a wrong cache whole nats.
# Over n tokens rounding averages out, so that their mean may differ by 1 / sqrt(n) of a half of it only.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}


@torch.no_grad()
def cross_score(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    lead_in: Sequence[int] | None = None,
    under: Sequence[Collection[int]] | None = None,
    temperature: float = 1.0,
    max_tokens_per_forward: int | None = None,
    split_over_processes: bool = False,
) -> Tensor:
    """The log-probability of every completion under every prompt, L of arXiv 2604.06268, Section 2.3, or under some.

    Exact up to the order of floating-point operations: equal to running each pair in full. Identical prompts and
    identical completions are computed once. Training mode is left as it was found; no random number is drawn.

    Args:
        model: A causal LM, bare or wrapped.
        prompts: N lists of token ids.
        completions: B lists of token ids.
        lead_in: (B,) number of ids at the start of each completion that belong to its context: the model sees them,
            but their log-probability is not counted. Default: none.
        under: (B,) for each completion the numbers of the prompts that it is scored under. Default: all of them.
        temperature: Divides the logits, as in sampling.
        max_tokens_per_forward: Upper bound for the padded tokens of one forward pass over completions, and over
            prompt and completions where the prompt cannot be reused; a longer one runs alone. Where it is reused, rows
            with the prompt before each are at most 16 times as many. Default: 1024 on a CPU and 8192 elsewhere, fewer
            for large vocabularies.
        split_over_processes: Whether the processes of `torch.distributed` each score a share of the prompts. All of
            them must then make this call with the same arguments, and run the same number of forward passes, so that
            a sharded model never waits for one of them. All get the whole matrix.

    Returns:
        (B, N) in nats, float32, on the CPU; NaN where a completion is not scored under a prompt.

    Raises:
        ContextLengthError: If a pair is longer than the model's context.
        ValueError: If a prompt is empty, a completion has no token to score, or an argument is outside its range.
    """
    lead_in = [0] * len(completions) if lead_in is None else lead_in
    shape = (len(completions), len(prompts))
    wanted = torch.ones(shape, dtype=torch.bool) if under is None else _wanted(under, shape)
    limit = context_length(model)
    _check_arguments(prompts, completions, lead_in, wanted, temperature, max_tokens_per_forward, limit)
    device = next(model.parameters()).device
    if max_tokens_per_forward is None:
        max_tokens_per_forward = _default_tokens(device, _text_config(model).vocab_size)
    distinct_prompts, column = _distinct(tuple(prompt) for prompt in prompts)
    distinct_rows, row = _distinct((tuple(ids), skip) for ids, skip in zip(completions, lead_in, strict=True))
    rows_of: dict[int, set[int]] = {}  # of distinct prompts, the distinct completions that are scored under them
    for number, place in wanted.nonzero().tolist():
        rows_of.setdefault(column[place], set()).add(row[number])
    numbers = {place: tuple(sorted(rows)) for place, rows in rows_of.items()}
    scores = torch.zeros(len(distinct_rows), len(distinct_prompts), device=device)
    # The longest first: that is where reusing its cache is put to the test.
    order = sorted(numbers, key=lambda place: -len(distinct_prompts[place]))
    rank, world = (dist.get_rank(), dist.get_world_size()) if split_over_processes else (0, 1)
    with _evaluation_mode(model):
        scorer = _Scorer(model, distinct_prompts, distinct_rows, max_tokens_per_forward, temperature, world > 1)
        for turn in range(0, len(order), world):
            # Where prompts have run out, the shortest one once more, so that no process runs fewer forward passes.
            at_once = [order[min(turn + other, len(order) - 1)] for other in range(world)]
            place = at_once[rank]
            beside = [numbers[other] for other in at_once]
            for chunk, values in scorer.column(distinct_prompts[place], numbers[place], beside):
                if turn + rank < len(order):
                    scores[chunk.rows, place] = values
    if world > 1:
        dist.all_reduce(scores)  # each column is filled by one process and zero on the others
    return scores.cpu()[row][:, column].masked_fill(~wanted, torch.nan)


def context_length(model: nn.Module) -> int | None:
    """The tokens that a model's texts may have; `None` where its configuration says nothing."""
    limit: int | None = getattr(_text_config(model), "max_position_embeddings", None)
    return limit


@contextmanager
def count_tokens(model: nn.Module) -> Iterator[list[int]]:
    """Yields a list that receives the number of input tokens, padding included, of each forward pass within."""
    counts: list[int] = []

    def count(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        counts.append((args[0] if args else kwargs["input_ids"]).numel())

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        handle.remove()


@dataclass(frozen=True)
class _Chunk:
    """Completions that share a forward pass, padded on the right to L tokens.

    Args:
        rows: (R,) their rows in the matrix.
        ids: (R, L) token ids.
        scored: (R, L) whether the log-probability of a token counts.
    """

    rows: Tensor
    ids: Tensor
    scored: Tensor


def _chunks(
    rows: Rows, numbers: Sequence[int], device: torch.device, fits: Callable[[int, int, int], bool]
) -> list[_Chunk]:
    """Some completions by length, cut so that each chunk fits by its rows, their shortest and longest length."""
    chunks: list[list[int]] = []
    for number in sorted(numbers, key=lambda number: len(rows[number][0])):
        longest = len(rows[number][0])
        if not chunks or not fits(len(chunks[-1]) + 1, len(rows[chunks[-1][0]][0]), longest):
            chunks.append([])
        chunks[-1].append(number)
    return [_make_chunk(rows, chunk, device) for chunk in chunks]


def _make_chunk(rows: Rows, numbers: list[int], device: torch.device) -> _Chunk:
    width = len(rows[numbers[-1]][0])
    ids = torch.zeros(len(numbers), width, dtype=torch.long)
    scored = torch.zeros(len(numbers), width, dtype=torch.bool)
    for i, number in enumerate(numbers):
        completion, skip = rows[number]
        ids[i, : len(completion)] = torch.tensor(completion)
        scored[i, skip : len(completion)] = True
    return _Chunk(torch.tensor(numbers), ids.to(device), scored.to(device))


class ContextLengthError(ValueError):
    """A prompt and a completion do not fit the model's context together."""


class _Scorer:
    """Scores completions after one prompt at a time, on top of the prompt's cache where that is exact.

    Whether it is, is tried on the first prompt, with its longest and its shortest completion padded to one batch: each
    of their tokens has to agree with a run in full. There are models that take a cache and do not use it, or use it
    for one token only. If it does not agree, everything is run in full, without padding.

    Args:
        prompts: All of them, distinct.
        rows: All completions.
        max_tokens: Of one forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[tuple[int, ...]],
        rows: Rows,
        max_tokens: int,
        temperature: float,
        distributed: bool,
    ):
        self.model = model
        self.cache_argument = _cache_argument(model)
        self.temperature = temperature
        self.distributed = distributed
        self.device = next(model.parameters()).device
        self.rows = rows
        self.max_tokens = max_tokens
        self.before = max(map(len, prompts))  # of any prompt, so that equal completions make equal chunks
        self.cut: dict[tuple[bool, tuple[int, ...]], list[_Chunk]] = {}
        longest = max(len(ids) for ids, _ in rows)
        self.reuse: bool | None = None  # not known before the first prompt
        switch, kind = length_dependent(_text_config(model)) or (sys.maxsize, "")
        if min(map(len, prompts)) - 1 <= switch < self.before + longest:
            self.reuse = self._fall_back(
                f"has other rotary embeddings ({kind}) for texts of more than {switch} tokens, which some prompts "
                "with some completions have"
            )

    def column(
        self, prompt: tuple[int, ...], numbers: tuple[int, ...], beside: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[_Chunk, Tensor]]:
        """Each chunk of some completions with its scores (R,) after `prompt`.

        `beside` are the completions of all processes: where another one has more chunks, the last comes again.
        """
        ids = torch.tensor([prompt], device=self.device)  # (1, P)
        # A prompt of one id has nothing to reuse, but processes have to keep step.
        cache = self._cache(ids) if self.reuse is not False and (len(prompt) > 1 or self.distributed) else None
        if self.reuse is None and (len(prompt) > 1 or self.distributed):
            self.reuse = self._agree(cache is not None and self._is_exact(ids, cache, self._probe(numbers, beside)))
        chunks = self._chunks_of(numbers)
        missing = max(len(self._chunks_of(others)) for others in beside) - len(chunks)
        for chunk in [*chunks, *chunks[-1:] * missing]:
            yield chunk, self._logps(chunk, ids, cache if self.reuse and len(prompt) > 1 else None).sum(dim=1)

    def _chunks_of(self, numbers: tuple[int, ...]) -> list[_Chunk]:
        key = (bool(self.reuse), numbers)
        if key not in self.cut:
            before, most_tokens = self.before, self.max_tokens

            def on_cache(count: int, least: int, most: int) -> bool:
                return count * most <= most_tokens and count * (before + most) <= ATTENDED * most_tokens

            def in_full(count: int, least: int, most: int) -> bool:
                return least == most and count * (before + most) <= most_tokens

            self.cut[key] = _chunks(self.rows, numbers, self.device, on_cache if self.reuse else in_full)
        return self.cut[key]

    def _probe(self, numbers: tuple[int, ...], beside: Sequence[tuple[int, ...]]) -> _Chunk:
        """The longest and the shortest of some completions; the longest alone where a process has no two that fit."""

        def by_length(rows: tuple[int, ...]) -> list[int]:
            return sorted(rows, key=lambda number: len(self.rows[number][0]))

        alone = any(len(rows) == 1 or 2 * len(self.rows[by_length(rows)[-1]][0]) > self.max_tokens for rows in beside)
        shortest, *_, longest = [*by_length(numbers)[:1], *by_length(numbers)]
        return _make_chunk(self.rows, [longest] if alone else [shortest, longest], self.device)

    def _cache(self, ids: Tensor) -> Cache | None:
        """The cache of all ids but the last; `None` if full runs have to do."""
        held_back = ids[:, : max(1, ids.shape[1] - 1)]  # of a single id the cache is of no use, but tells its kind
        output = self.model(input_ids=held_back, use_cache=True, logits_to_keep=1)
        cache: Cache | None = cache_of(output)
        if (reason := unshareable(cache, held_back.shape[1])) is not None:
            self._fall_back(f"returns {reason}")
            return None
        return cache

    def _is_exact(self, ids: Tensor, cache: Cache, probe: _Chunk) -> bool:
        """Whether tokens on top of the cache have the log-probabilities that they have when all is run in full."""
        reused = self._logps(probe, ids, cache if ids.shape[1] > 1 else None)
        errors = []
        for i in range(len(probe.rows)):
            valid = probe.scored[i]
            length = int(valid.nonzero().max()) + 1
            row = _Chunk(probe.rows[i : i + 1], probe.ids[i : i + 1, :length], valid[None, :length])
            errors.append((reused[i, :length] - self._logps(row, ids, None)[0])[valid[:length]])
        tolerance = self._tolerance(cache)
        for error in errors:
            of_mean = tolerance * max(0.04, 0.5 * len(error) ** -0.5)
            # Not "above": NaN, too, is no agreement.
            if not (error.abs().max() <= tolerance and error.mean().abs() <= of_mean):
                return self._fall_back(
                    f"gives tokens other log-probabilities, by more than {tolerance:g} nats or in the mean by more "
                    "than rounding explains, when the cache of their prompt is reused"
                )
        return True

    def _fall_back(self, reason: str) -> bool:
        logger.warning_once(
            f"{type(self.model).__name__} {reason}: every pair of prompt and completion is run in full, "
            "which is exact but several times slower."
        )
        return False

    def _agree(self, reuse: bool) -> bool:
        """Whether all processes can reuse caches: a model that is sharded over them needs the same calls from each."""
        if not self.distributed:
            return reuse
        everyones = torch.tensor(int(reuse), device=self.device)
        dist.all_reduce(everyones, op=dist.ReduceOp.MIN)
        return bool(everyones)

    def _tolerance(self, cache: Cache) -> float:
        # What is computed in, under autocast or a sharded model's mixed precision, too, shows in the cache.
        layers: list[Any] = list(cache.layers)
        keys = [layer.keys for layer in layers if getattr(layer, "keys", None) is not None]
        dtypes = {tensor.dtype for tensor in (*keys, *self.model.parameters())}
        if self.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
            dtypes.add(torch.float16)  # TF32 has as many digits
        return max((TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE), default=TOLERANCE[torch.float32])

    def _logps(self, chunk: _Chunk, ids: Tensor, cache: Cache | None) -> Tensor:
        """(R, L) log-probabilities of scored tokens, 0 elsewhere, after `ids` (1, P).

        `cache` holds all ids but the last, which may be none.
        """
        rows, length = chunk.ids.shape
        # The last prompt token predicts the first of the completion, so it runs along with them. The completion's last
        # token predicts nothing, but rotary embeddings can depend on it.
        in_full = cache is None and not self.reuse
        before, after = (ids, chunk.ids) if in_full else (ids[:, -1:], chunk.ids[:, :-1])
        inputs = torch.cat([before.expand(rows, -1), after], dim=1)  # (R, P + L) or (R, L)
        start = 0 if in_full else ids.shape[1] - 1
        kept = pad(chunk.scored, (before.shape[1] - 1, inputs.shape[1] - before.shape[1] + 1 - length))
        with _logits_of(self.model, kept):
            logits = self.model(
                input_ids=inputs,
                position_ids=torch.arange(start, start + inputs.shape[1], device=ids.device).expand(rows, -1),
                use_cache=cache is not None,
                **{self.cache_argument: None if cache is None else share(cache, rows)},
            ).logits
        logits = logits.view(-1, logits.shape[-1])
        if len(logits) == kept.numel():  # all of them: no layer was found to select at
            logits = logits[kept.flatten()]
        logps = _token_logps(logits, chunk.ids[chunk.scored], self.temperature)
        return torch.zeros(chunk.ids.shape, device=ids.device).masked_scatter(chunk.scored, logps)


def _token_logps(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """(M,) log-probabilities of ids (M,) under logits (M, V), in float32, a slice at a time."""
    at_once = LOGITS_SLICE_CPU if logits.device.type == "cpu" else LOGITS_SLICE
    size = max(1, at_once // logits.shape[1])
    logps = []
    for part, targets in zip(logits.split(size), ids.split(size), strict=True):
        scaled = part.float() if temperature == 1.0 else part.float() / temperature
        logps.append(-cross_entropy(scaled, targets, reduction="none"))
    return torch.cat(logps)


@contextmanager
def _logits_of(model: nn.Module, kept: Tensor) -> Iterator[None]:
    """Within, the output layer makes the logits of kept (R, L) positions only, as (number of them, vocabulary).

    A mask for `logits_to_keep` is known to transformers since 5.21 only, and not to forwards that others patch.
    """

    def select(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        (hidden,) = args
        return (hidden[kept],) if hidden.shape[:-1] == kept.shape else None

    head = _unwrapped(model).get_output_embeddings()
    handle = None if head is None else head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout, and no gradient checkpointing, which would drop the cache; then every module as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _default_tokens(device: torch.device, vocabulary: int) -> int:
    if device.type == "cpu":
        return min(MAX_TOKENS_CPU, MAX_LOGITS_CPU // vocabulary)
    return min(MAX_TOKENS, MAX_LOGITS // vocabulary)


def _unwrapped(model: nn.Module) -> Any:
    module: Any = model
    while not hasattr(module, "config"):  # wrappers of accelerate and torch
        module = module.module
    return module


def _text_config(model: nn.Module) -> Any:
    return _unwrapped(model).config.get_text_config()


def _distinct(items: Iterable[H]) -> tuple[list[H], list[int]]:
    """The distinct items in order of appearance, and for each item its number among them."""
    numbers: dict[H, int] = {}
    index = [numbers.setdefault(item, len(numbers)) for item in items]
    return list(numbers), index


def _check_arguments(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    lead_in: Sequence[int],
    wanted: Tensor,
    temperature: float,
    max_tokens: int | None,
    limit: int | None,
) -> None:
    if not prompts or not completions:
        raise ValueError(f"prompts and completions must not be empty, got {len(prompts)} and {len(completions)}")
    if len(lead_in) != len(completions):
        raise ValueError(f"lead_in must have one value for each of {len(completions)} completions, got {len(lead_in)}")
    for name, value in (("temperature", temperature), ("max_tokens_per_forward", max_tokens)):
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be above 0, got {value!r}")
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompts[{number}] must hold at least one token, got none")
    for number, (completion, skip) in enumerate(zip(completions, lead_in, strict=True)):
        if not 0 <= skip < len(completion):
            raise ValueError(
                f"completions[{number}] must hold at least one token after lead_in={skip}, got {len(completion)} "
                "tokens"
            )
    if limit is None:
        return
    lengths = torch.tensor(list(map(len, completions)))[:, None] + torch.tensor(list(map(len, prompts)))  # (B, N)
    total = int((lengths * wanted).max())
    if total > limit:
        number, place = ((lengths * wanted) == total).nonzero()[0].tolist()
        raise ContextLengthError(
            f"a prompt and a completion must fit the model's context of {limit} tokens together, got "
            f"{len(prompts[place])} (prompt {place}) + {len(completions[number])} (completion {number}) = {total}"
        )


def _wanted(under: Sequence[Collection[int]], shape: tuple[int, int]) -> Tensor:
    """(B, N) whether a completion is scored under a prompt."""
    rows, columns = shape
    if len(under) != rows:
        raise ValueError(f"under must have one collection of prompts for each of {rows} completions, got {len(under)}")
    wanted = torch.zeros(rows, columns, dtype=torch.bool)
    for number, places in enumerate(under):
        for place in places:
            if not 0 <= place < columns:
                raise ValueError(f"under[{number}] must hold indices of prompts from 0 to {columns - 1}, got {place}")
            wanted[number, place] = True
        if not places:
            raise ValueError(f"under must name at least one prompt for each completion, got none at {number}")
    return wanted


# The cache of one prompt under many completions at once, held once and changed by none of them. A layer hands out what
# it holds for as many rows as ask, and drops what it is given: beside the prompt's cache, no more than one layer's
# keys and values exist for all rows at any time, those that attention is computed from.


def _cache_argument(model: nn.Module) -> str:
    """What a model calls the cache that it takes: `cache` in transformers since 5.24, `past_key_values` before."""
    named = (inspect.signature(module.forward).parameters for module in model.modules())  # a wrapper may name none
    return next((name for one in named for name in ("cache", "past_key_values") if name in one), "past_key_values")


def cache_of(output: Any) -> Any:
    """The cache that a model returns."""
    return output.cache if hasattr(output, "cache") else getattr(output, "past_key_values", None)


def share(cache: Cache, rows: int) -> Cache:
    """A cache for one forward pass of `rows` rows on top of `cache`, which holds one."""
    shared = copy.copy(cache)
    shared.layers = [layer if _is_empty(layer) else _SHARED[type(layer)](layer, rows) for layer in cache.layers]
    return shared


def unshareable(cache: Any, length: int) -> str | None:
    """What is wrong with the cache of `length` ids; `None` if `share` can give it to other rows."""
    if not isinstance(cache, Cache):
        return f"{type(cache).__name__} in place of a cache of its input"
    layers: list[Any] = [layer for layer in cache.layers if not _is_empty(layer)]
    unknown = next((type(layer).__name__ for layer in layers if type(layer) not in _SHARED), None)
    if unknown is not None:
        return f"a cache with layers of the class {unknown}, which is not known to serve other rows"
    lengths = {layer.get_seq_length() for layer in layers if getattr(layer, "keys", None) is not None}
    if lengths != {length}:
        return f"{type(cache).__name__} of {sorted(lengths) or 'no'} tokens in place of a cache of its {length}"
    return None


def _is_empty(layer: Any) -> bool:
    """Whether it is there for the count only: of a layer without attention, or one that attends to another's keys."""
    return not isinstance(layer, LinearAttentionCacheLayerMixin) and layer.keys is None


def _append(held: Any, states: Tensor) -> Tensor:
    """States (rows, ..., L, size) after those that are held once, (1, ..., P - 1, size)."""
    return torch.cat([held.expand(len(states), *held.shape[1:]), states], dim=-2)


class _SharedKeys(DynamicLayer):
    """Keys and values (1, heads, P - 1, head size) of all tokens, or of the latest within a window."""

    def __init__(self, layer: DynamicLayer, rows: int):
        self.__dict__.update(vars(layer))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return _append(self.keys, key_states), _append(self.values, value_states)


class _SharedWindow(_SharedKeys, DynamicSlidingWindowLayer):
    """Its masks come from the number of tokens seen, which stays that of the prompt."""


class _SharedIndex(_SharedKeys, DynamicIndexedLayer):
    """Sparse attention, with keys (1, P - 1, size) of its index."""

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        return _append(self.indexer_keys, indexer_key_states)


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
        state: Any = self.recurrent_states[state_idx]
        updated: Tensor = state.copy_(recurrent_states)
        return updated


class _SharedStatesAndKeys(_SharedStates, _SharedKeys, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    pass


class _SharedStatesAndWindow(_SharedStates, _SharedWindow, LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[misc, override]
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
