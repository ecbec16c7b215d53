"""Held-out tasks played by a model: what evaluation, the held-out curve of a training and diagnosis begin with."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ragen2_trl.envs import Play
from ragen2_trl.envs.mixture import AnyTask, TaskMixture
from ragen2_trl.rollouts.chat import Chat
from ragen2_trl.rollouts.context import ContextWindow, Trajectory
from ragen2_trl.rollouts.play import Generate, check_words_only, play_all

OnToken: TypeAlias = Callable[[int, int], None]
OnPlayed: TypeAlias = Callable[[Dataset, list[Trajectory]], None]
LONGEST_TURN = 128  # tokens, unless another limit is given


def held_out_plays(
    env: AnyTask, num_prompts: int, num_samples: int, seed: int, data: str | None
) -> tuple[Dataset, list[Play]]:
    """Rows of the split `"test"`, each `num_samples` times in a row, and an episode for each.

    Raises:
        ValueError: If there are fewer than two tasks or less than one sample each.
    """
    rows = held_out_rows(env, num_prompts, num_samples, seed, data)
    return rows, plays_of(env, rows)


def held_out_rows(env: AnyTask, num_prompts: int, num_samples: int, seed: int, data: str | None) -> Dataset:
    """Rows of the split `"test"`, each `num_samples` times in a row.

    Raises:
        ValueError: If there are fewer than two tasks, or than `num_prompts`, or less than one sample each.
    """
    for name, value, least in (
        ("num_prompts", num_prompts, 2),  # one prompt has no spread to make an interval of
        ("num_samples", num_samples, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value!r}")
    if isinstance(env, TaskMixture) and min(env.shares(num_prompts)) < 2:
        raise ValueError(f"num_prompts must give each task of {env.name} at least 2, got {num_prompts!r}")
    rows = env.dataset(num_prompts, seed, split="test", data=data)
    if len(rows) < 2:
        raise ValueError(f"held-out tasks of {env.name} must be at least 2, got {len(rows)}")
    return rows.select([index for index in range(len(rows)) for _ in range(num_samples)])  # groups stay together


def plays_of(env: AnyTask, rows: Dataset) -> list[Play]:
    """An episode at its start for each row."""
    columns = {name: rows[name][:] for name in rows.column_names if name not in ("prompt", "seed")}
    return env.plays(rows["seed"][:], columns)


def sample_trajectories(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    env: AnyTask,
    *,
    num_prompts: int,
    num_samples: int,
    temperature: float,
    max_new_tokens: int | None,
    batch_size: int,
    seed: int,
    data: str | None = None,
    max_turn_tokens: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    context_options: dict[str, Any] | None = None,
    on_token: OnToken | None = None,
    on_played: OnPlayed | None = None,
) -> tuple[Dataset, list[Trajectory]]:
    """Rows of the split `"test"`, each `num_samples` times in a row, and an episode for each, played to its end.

    Other arguments, errors and what is left untouched are those of `evaluate_model`.

    Args:
        on_token: Called with (tokens that a turn has by now, most that it can have).
        on_played: Called with (rows, trajectories) of each batch, in their order, as soon as it is played; by default
            all episodes are played side by side.
    """
    check_sampling(env, num_samples, temperature, max_new_tokens, batch_size)
    rows = held_out_rows(env, num_prompts, num_samples, seed, data)
    return rows, play_rows(
        model,
        tokenizer,
        env,
        rows,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        max_turn_tokens=max_turn_tokens,
        chat_template_kwargs=chat_template_kwargs,
        context_options=context_options,
        on_token=on_token,
        on_played=on_played,
    )


def check_sampling(
    env: AnyTask, num_samples: int, temperature: float, max_new_tokens: int | None, batch_size: int
) -> None:
    """Raises a `ValueError` unless a task can be sampled so."""
    check_words_only(env)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size!r}")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens!r}")
    if temperature < 0 or (temperature == 0 and num_samples > 1):
        raise ValueError(f"temperature must be above 0, or 0 with num_samples=1, got {temperature!r}")


def play_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    env: AnyTask,
    rows: Dataset,
    *,
    temperature: float,
    max_new_tokens: int | None,
    batch_size: int,
    seed: int,
    max_turn_tokens: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    context_options: dict[str, Any] | None = None,
    on_token: OnToken | None = None,
    on_played: OnPlayed | None = None,
    most: Callable[[int], int] = int,
) -> list[Trajectory]:
    """An episode for each of the B rows, played to its end; see `sample_trajectories`.

    Args:
        most: The largest of an int over all processes, where generation needs all of them; then they have as many
            rows, and `on_played` is given.
    """
    window = ContextWindow.of(**(context_options or {}))
    plays = plays_of(env, rows)
    eos_token_ids = end_tokens(model, tokenizer)
    if max_turn_tokens is None:
        max_turn_tokens = env.max_turn_tokens
    if max_new_tokens is None and max_turn_tokens is None:
        max_turn_tokens = LONGEST_TURN
    step = len(plays) if on_played is None else batch_size
    trajectories: list[Trajectory] = []
    with evaluation_mode(model, seed):
        for start in range(0, len(plays), step):
            batch = rows.select(range(start, min(start + step, len(plays))))
            played = play_all(
                plays[start : start + step],
                batch["prompt"][:],
                Chat(tokenizer, eos_token_ids, forced_tag=env.forced_tag, **(chat_template_kwargs or {})),
                generator(model, tokenizer, temperature, batch_size, eos_token_ids, on_token),
                # What the environment answers counts, too, and nobody knows how long that is.
                max_tokens=1_000_000 if max_new_tokens is None else max_new_tokens,
                max_turn_tokens=max_turn_tokens,
                max_context=getattr(model.config.get_text_config(), "max_position_embeddings", None),
                workers=env.workers,
                most=most,
                window=window,
            )
            trajectories += played
            if on_played is not None:
                on_played(batch, played)
    return trajectories


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a turn: the tokenizer's, and those that the model's generation stops at, as in TRL's training."""
    configured = model.generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    return sorted({tokenizer.eos_token_id, *(token for token in listed if token is not None)})


def generator(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    temperature: float,
    batch_size: int,
    eos_token_ids: Sequence[int],
    on_token: OnToken | None = None,
) -> Generate:
    """Continues contexts with `model.generate`, the end token included where there is one; gives no log-probs."""
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    generate_ids: Any = model.generate  # which transformers types as a tensor, too

    def generate(contexts: list[list[int]], max_new_tokens: int) -> tuple[list[list[int]], None]:
        # Every sampling setting is named: what is left out would come from the checkpoint's own generation config.
        config = GenerationConfig(
            do_sample=temperature > 0,
            temperature=temperature if temperature > 0 else 1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos_token_ids),
            pad_token_id=pad,
        )
        answers: list[list[int]] = []
        for start in range(0, len(contexts), batch_size):
            batch = contexts[start : start + batch_size]
            width = max(len(ids) for ids in batch)
            # Padded here, on the left, so that the tokenizer keeps the padding side it has.
            input_ids = torch.tensor([[pad] * (width - len(ids)) + ids for ids in batch], device=model.device)
            mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in batch], device=model.device)
            telling = [] if on_token is None else [_Telling(on_token, width, max_new_tokens)]
            output = generate_ids(
                input_ids=input_ids,
                attention_mask=mask,
                generation_config=config,
                stopping_criteria=StoppingCriteriaList(telling),
            )
            answers += [_until(ids, eos_token_ids) for ids in output[:, width:].tolist()]
        return answers, None

    return generate


def _until(ids: list[int], ends: Sequence[int]) -> list[int]:
    first = next((number for number, token in enumerate(ids) if token in ends), len(ids))
    return ids[: first + 1]


class _Telling(StoppingCriteria):
    """Stops nothing, and tells how long turns are by now."""

    def __init__(self, on_token: OnToken, width: int, most: int):
        self._on_token, self._width, self._most = on_token, width, most

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._on_token(input_ids.shape[1] - self._width, self._most)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@contextmanager
def evaluation_mode(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Eval mode, no gradients and a random state of our own; all as before afterwards, also Python's and numpy's."""
    training = {module: module.training for module in model.modules()}
    devices = [model.device] if model.device.type == "cuda" else []
    states = random.getstate(), np.random.get_state()
    model.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(seed)
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
        random.setstate(states[0])
        np.random.set_state(states[1])
