"""Log-probabilities of many completions under many prompts, with the work of each prompt done once.

Each prompt is run once into a key-value cache; all completions are then run on top of that cache, which no forward
pass changes. Only standard calls `model(input_ids, position_ids, past_key_values, logits_to_keep)` are made.
"""

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers.cache_utils import Cache, DynamicLayer
from transformers.utils import logging

logger = logging.get_logger(__name__)

H = TypeVar("H", bound=Hashable)

# Bounds of one forward pass, unless `max_tokens_per_forward` says otherwise, on a CPU and elsewhere. On a CPU little
# chunks are fastest (benchmarks/cross_score.py): less padding, and less memory to be mapped for logits.
MAX_TOKENS_CPU, MAX_TOKENS = 1024, 8192
MAX_LOGITS_CPU, MAX_LOGITS = 2**27, 2**29  # 512 MiB in float32, 1 GiB in bfloat16
# Logits that are normalised at once, in float32; few enough to stay in a cache.
LOGITS_SLICE = 2**18


@torch.no_grad()
def cross_score(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    lead_in: Sequence[int] | None = None,
    temperature: float = 1.0,
    max_tokens_per_forward: int | None = None,
    split_over_processes: bool = False,
) -> Tensor:
    """The log-probability of every completion under every prompt, L of arXiv 2604.06268, Section 2.3.

    Exact up to the order of floating-point operations: equal to running each pair in full. Identical prompts and
    identical completions are computed once. Training mode is left as it was found; no random number is drawn.

    Args:
        model: A causal LM, bare or wrapped.
        prompts: N lists of token ids.
        completions: B lists of token ids.
        lead_in: (B,) number of ids at the start of each completion that belong to its context: the model sees them,
            but their log-probability is not counted. Default: none.
        temperature: Divides the logits, as in sampling.
        max_tokens_per_forward: Upper bound for the padded tokens of one forward pass over completions, and over
            prompt and completions where the prompt cannot be reused; a longer one runs alone. Default: 1024 on a CPU
            and 8192 elsewhere, fewer for large vocabularies.
        split_over_processes: Whether the processes of `torch.distributed` each score a share of the prompts. All of
            them must then make this call with the same arguments, and run the same number of forward passes, so that
            a sharded model never waits for one of them. All get the whole matrix.

    Returns:
        (B, N) in nats, float32, on the CPU.

    Raises:
        ContextLengthError: If a pair is longer than the model's context.
        ValueError: If a prompt is empty, a completion has no token to score, or an argument is outside its range.
    """
    lead_in = [0] * len(completions) if lead_in is None else lead_in
    limit = getattr(_text_config(model), "max_position_embeddings", None)
    _check_arguments(prompts, completions, lead_in, temperature, max_tokens_per_forward, limit)
    device = next(model.parameters()).device
    if max_tokens_per_forward is None:
        max_tokens_per_forward = _default_tokens(device, _text_config(model).vocab_size)
    distinct_prompts, column = _distinct(tuple(prompt) for prompt in prompts)
    distinct_rows, row = _distinct((tuple(ids), skip) for ids, skip in zip(completions, lead_in, strict=True))
    chunks = _chunks(distinct_rows, max_tokens_per_forward, device)
    scores = torch.zeros(len(distinct_rows), len(distinct_prompts), device=device)
    # The longest first: that is where reusing its cache is put to the test.
    order = sorted(range(len(distinct_prompts)), key=lambda number: -len(distinct_prompts[number]))
    rank, world = (dist.get_rank(), dist.get_world_size()) if split_over_processes else (0, 1)
    with _evaluation_mode(model):
        rows_in_full = max_tokens_per_forward // (len(distinct_prompts[order[0]]) + chunks[-1].ids.shape[1])
        scorer = _Scorer(model, chunks, max(1, rows_in_full), temperature, world > 1)
        for turn in range(rank, ceil(len(order) / world) * world, world):
            # Where prompts have run out, the shortest one once more, so that no process runs fewer forward passes.
            number = order[min(turn, len(order) - 1)]
            for chunk, values in scorer.column(distinct_prompts[number]):
                if turn < len(order):
                    scores[chunk.rows, number] = values
    if world > 1:
        dist.all_reduce(scores)  # each column is filled by one process and zero on the others
    return scores.cpu()[row][:, column]


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

    def split(self, size: int) -> list["_Chunk"]:
        """The same in parts of at most `size` rows."""
        parts = zip(self.rows.split(size), self.ids.split(size), self.scored.split(size), strict=True)
        return [_Chunk(*part) for part in parts]


def _chunks(rows: Sequence[tuple[tuple[int, ...], int]], max_tokens: int, device: torch.device) -> list[_Chunk]:
    """Completions sorted by length and cut so that each chunk, with its padding, has at most `max_tokens`."""
    order = sorted(range(len(rows)), key=lambda number: len(rows[number][0]))
    chunks: list[list[int]] = []
    for number in order:
        if not chunks or (len(chunks[-1]) + 1) * len(rows[number][0]) > max_tokens:
            chunks.append([])
        chunks[-1].append(number)
    return [_make_chunk(rows, numbers, device) for numbers in chunks]


def _make_chunk(rows: Sequence[tuple[tuple[int, ...], int]], numbers: list[int], device: torch.device) -> _Chunk:
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
    """Scores all chunks after one prompt at a time, on top of the prompt's cache where that is exact.

    A cache of plain attention layers is shared as it is. Other kinds (sliding windows, recurrent layers) are copied
    for every chunk, provided that this agrees with full runs on the first prompt: there are models that take a cache
    and do not use it. If it does not, everything is run in full.
    """

    def __init__(
        self, model: nn.Module, chunks: list[_Chunk], rows_in_full: int, temperature: float, distributed: bool
    ):
        self.model = model
        self.chunks = chunks
        self.rows_in_full = rows_in_full  # of one forward pass that includes the prompt
        self.temperature = temperature
        self.distributed = distributed
        self.reuse: bool | None = None  # not known before the first prompt

    def column(self, prompt: tuple[int, ...]) -> Iterator[tuple[_Chunk, Tensor]]:
        """Each chunk with its scores (R,) after `prompt`."""
        ids = torch.tensor([prompt], device=self.chunks[0].ids.device)  # (1, P)
        # A prompt of one id has nothing to reuse, but processes have to keep step.
        caches = self._caches(ids) if self.reuse is not False and (len(prompt) > 1 or self.distributed) else None
        if self.reuse is None and (len(prompt) > 1 or self.distributed):
            self.reuse = self._agree(caches is not None)
        for chunk in self.chunks:
            if self.reuse and caches is not None and len(prompt) > 1:
                yield chunk, self._score(chunk, ids, caches(len(chunk.rows)))
            else:
                # After a single id a chunk is no longer than it is on top of a cache.
                for part in chunk.split(self.rows_in_full) if len(prompt) > 1 else [chunk]:
                    yield part, self._score(part, ids, None)

    def _caches(self, ids: Tensor) -> Callable[[int], Cache] | None:
        """What gives a cache of all ids but the last for a number of rows; `None` if full runs have to do."""
        held_back = ids[:, : max(1, ids.shape[1] - 1)]  # of a single id the cache is of no use, but tells its kind
        output = self.model(input_ids=held_back, use_cache=True, logits_to_keep=1)
        cache = getattr(output, "past_key_values", None)
        if not isinstance(cache, Cache) or cache.get_seq_length() != held_back.shape[1]:
            return self._fall_back(f"returns {type(cache).__name__} in place of a cache of its input")
        if all(type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers):
            shared = Cache(layers=[_SharedLayer(layer) for layer in cache.layers])
            return lambda rows: shared

        def copied(rows: int) -> Cache:
            copied_cache = copy.deepcopy(cache)
            copied_cache.reorder_cache(torch.zeros(rows, dtype=torch.long, device=ids.device))
            return copied_cache

        if self.reuse is None and ids.shape[1] > 1:
            probe = self.chunks[-1].split(1)[0]
            reused, exact = self._score(probe, ids, copied(1)), self._score(probe, ids, None)
            if not torch.allclose(reused, exact, **self._tolerance()):
                return self._fall_back(f"differs by {(reused - exact).abs().max():.2g} nats when its cache is reused")
        return copied

    def _fall_back(self, reason: str) -> None:
        logger.warning_once(
            f"{type(self.model).__name__} {reason}: every pair of prompt and completion is run in full, "
            "which is exact but several times slower."
        )

    def _agree(self, reuse: bool) -> bool:
        """Whether all processes can reuse caches: a model that is sharded over them needs the same calls from each."""
        if not self.distributed:
            return reuse
        everyones = torch.tensor(int(reuse), device=self.chunks[0].ids.device)
        dist.all_reduce(everyones, op=dist.ReduceOp.MIN)
        return bool(everyones)

    def _tolerance(self) -> dict[str, float]:
        parameter = next(self.model.parameters())
        if parameter.dtype == torch.float32 and not torch.is_autocast_enabled(parameter.device.type):
            return {"rtol": 1e-5, "atol": 1e-2}
        return {"rtol": 2e-2, "atol": 0.5}  # two orders of operations in bfloat16 differ by tenths of a nat

    def _score(self, chunk: _Chunk, ids: Tensor, cache: Cache | None) -> Tensor:
        """(R,) scores of a chunk after the prompt `ids` (1, P), of which `cache` holds all but the last."""
        rows = len(chunk.rows)
        # The last prompt token predicts the first of the completion, so it runs along with them.
        before = ids if cache is None else ids[:, -1:]
        inputs = torch.cat([before.expand(rows, -1), chunk.ids[:, :-1]], dim=1)  # (R, L) or (R, P - 1 + L)
        end = ids.shape[1] + chunk.ids.shape[1] - 1
        scored = pad(chunk.scored, (inputs.shape[1] - chunk.ids.shape[1], 0))
        logits = self.model(
            input_ids=inputs,
            position_ids=torch.arange(end - inputs.shape[1], end, device=ids.device).expand(rows, -1),
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=scored,  # those only, as (number of scored tokens, vocabulary)
        ).logits
        logps = _token_logps(logits.view(-1, logits.shape[-1]), chunk.ids[chunk.scored], self.temperature)
        return torch.zeros(chunk.ids.shape, device=ids.device).masked_scatter(chunk.scored, logps).sum(dim=1)


class _SharedLayer(DynamicLayer):
    """Keys and values of a prompt, for any number of rows; what is passed to `update` is used once and not kept."""

    def __init__(self, layer: DynamicLayer):
        super().__init__()
        self.keys, self.values = layer.keys, layer.values  # (1, heads, P - 1, head size)
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows = len(key_states)
        keys = torch.cat([self.keys.expand(rows, -1, -1, -1), key_states], dim=-2)
        return keys, torch.cat([self.values.expand(rows, -1, -1, -1), value_states], dim=-2)


def _token_logps(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """(M,) log-probabilities of ids (M,) under logits (M, V), in float32, a slice at a time."""
    size = max(1, LOGITS_SLICE // logits.shape[1])
    logps = []
    for part, targets in zip(logits.split(size), ids.split(size), strict=True):
        scaled = part.float() if temperature == 1.0 else part.float() / temperature
        logps.append(-cross_entropy(scaled, targets, reduction="none"))
    return torch.cat(logps)


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


def _text_config(model: nn.Module) -> Any:
    module = model
    while not hasattr(module, "config"):  # wrappers of accelerate and torch
        module = module.module
    return module.config.get_text_config()


def _distinct(items: Iterable[H]) -> tuple[list[H], list[int]]:
    """The distinct items in order of appearance, and for each item its number among them."""
    numbers: dict[H, int] = {}
    index = [numbers.setdefault(item, len(numbers)) for item in items]
    return list(numbers), index


def _check_arguments(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    lead_in: Sequence[int],
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
            raise ValueError(f"prompts must hold at least one token each, got none at {number}")
    for number, (completion, skip) in enumerate(zip(completions, lead_in, strict=True)):
        if not 0 <= skip < len(completion):
            raise ValueError(
                f"completions must hold at least one token after lead_in, got {len(completion)} tokens "
                f"with lead_in={skip} at {number}"
            )
    longest_prompt = max(range(len(prompts)), key=lambda number: len(prompts[number]))
    longest_completion = max(range(len(completions)), key=lambda number: len(completions[number]))
    total = len(prompts[longest_prompt]) + len(completions[longest_completion])
    if limit is not None and total > limit:
        raise ContextLengthError(
            f"a prompt and a completion must fit the model's context of {limit} tokens together, got "
            f"{len(prompts[longest_prompt])} (prompt {longest_prompt}) + {len(completions[longest_completion])} "
            f"(completion {longest_completion}) = {total}"
        )
