"""RAGEN's text protocol as TRL's `rollout_func`: `TextRollout` plays with whatever the trainer generates with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from inspect import signature
from typing import Any

import torch
from transformers import Trainer

from ragen2_trl.columns import EPISODE, TURN_REWARDS, TURN_SAMPLES
from ragen2_trl.envs import Play
from ragen2_trl.envs.mixture import AnyTask
from ragen2_trl.rollout_events import end_tokens, listen
from ragen2_trl.rollouts.chat import Chat, Messages
from ragen2_trl.rollouts.context import ContextWindow, turn_samples
from ragen2_trl.rollouts.play import check_words_only, play_all


class TextRollout:
    """Plays RAGEN's text protocol in TRL: a `rollout_func` for GRPO trainers.

    Generation is the trainer's own: `transformers`, its continuous batching, or vLLM. The completion of a row is its
    whole episode, unless `context` says otherwise; `env_mask` is 0 on everything the model did not write. The reward
    functions of the environment find the outcome in the column `episode`.

        SNRFilteredGRPOTrainer(model, env.reward_funcs, args, env.dataset(1024, seed=0), rollout_func=TextRollout(env))

    With another GRPO trainer, one line more tells it where the rows of the dataset are, which TRL does not hand to
    rollout functions:

        rollout = TextRollout(env)
        trainer = GRPOTrainer(model, env.reward_funcs, args, env.dataset(1024, seed=0), rollout_func=rollout)
        rollout.attach(trainer)

    Args:
        env: The task, or a mixture of tasks, with the text protocol and without pictures.
        max_turn_tokens: Longest turn in tokens; default: the environment's, or whatever is left of TRL's
            `max_completion_length`, which covers the whole episode.
        context: What a turn is sampled from: `"full"`, `"last"` or `"memory"`, see
            [`~ragen2_trl.rollouts.ContextWindow`]. With the last two each turn is a training sample of its own, whose
            length `max_completion_length` bounds, and the completion of a row is its first turn. They need
            `SNRFilteredGRPOTrainer`.
        context_turns: Turns that such a context has, the present one included; default: all.
        drop_oldest_turns: Where the context is full, leave out its oldest turns, rather than end the episode.

    Raises:
        ValueError: If the environment is made for tools or shows pictures, or another argument is outside its range.
    """

    def __init__(
        self,
        env: AnyTask,
        max_turn_tokens: int | None = None,
        *,
        context: str = "full",
        context_turns: int | None = None,
        drop_oldest_turns: bool = False,
    ):
        check_words_only(env)
        if max_turn_tokens is not None and max_turn_tokens < 1:
            raise ValueError(f"max_turn_tokens must be at least 1, got {max_turn_tokens!r}")
        self._env = env
        self._max_turn_tokens = env.max_turn_tokens if max_turn_tokens is None else max_turn_tokens
        self.window = ContextWindow(context, context_turns, drop_oldest_turns)
        self._rows: list[dict[str, Any]] | None = None

    def attach(self, trainer: Trainer) -> None:
        """Lets this rollout see the dataset rows of each generation.

        Raises:
            ValueError: If an episode may be several training samples, and the trainer takes one of each.
        """
        self.check_trainer(type(trainer))
        listen(trainer, on_rows=self._see_rows)

    def _see_rows(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    @property
    def splits_episodes(self) -> bool:
        """Whether an episode may be several training samples."""
        return self.window.splits_episodes

    def check_trainer(self, trainer_class: type) -> None:
        """Raises a `ValueError` where an episode may be several training samples, and the trainer takes one."""
        if self.window.splits_episodes and not getattr(trainer_class, "takes_turn_samples", False):
            raise ValueError(
                f"context={self.window.kind!r} with drop_oldest_turns={self.window.drop_oldest} makes several "
                f"training samples of an episode, which {trainer_class.__name__} cannot take; allowed: "
                "SNRFilteredGRPOTrainer, or context='full' and drop_oldest_turns=False."
            )

    def __call__(self, prompts: list[Messages], trainer: Any) -> dict[str, Any]:
        """TRL's contract: ids of prompts and completions, log-probs, and columns for the reward functions."""
        if self._rows is None:
            raise ValueError(f"rollout_func is not attached to the {type(trainer).__name__}: call its attach(trainer)")
        tokenizer = trainer._tokenizer  # of a vision-language model, too
        chat = Chat(
            tokenizer,
            end_tokens(trainer),
            trainer.processing_class,
            self._env.forced_tag,
            chat_template=trainer.chat_template,
            **trainer.chat_template_kwargs,
        )
        knows_logprobs = False  # as the backend does, whatever this process has to sample

        def generate(contexts: list[list[int]], limit: int) -> tuple[list[list[int]], list[list[float]] | None]:
            nonlocal knows_logprobs
            answers, logprobs = _generate(trainer, contexts, limit)
            knows_logprobs |= logprobs is not None
            return answers, logprobs

        trajectories = play_all(
            self._plays(trainer.state.global_step),
            prompts,
            chat,
            generate,
            max_tokens=trainer.max_completion_length,
            max_turn_tokens=self._max_turn_tokens,
            max_context=_max_context(trainer),
            workers=self._env.workers,
            most=lambda number: _most(trainer, number),
            window=self.window,
        )
        seeds, plays = [row["seed"] for row in self._rows], [trajectory.play for trajectory in trajectories]
        self._env.on_played(prompts, seeds, plays, None)
        logprobs = [trajectory.logprobs for trajectory in trajectories]
        return {
            "prompt_ids": [trajectory.prompt_ids for trajectory in trajectories],
            "completion_ids": [trajectory.completion_ids for trajectory in trajectories],
            "env_mask": [trajectory.env_mask for trajectory in trajectories],
            "logprobs": logprobs if _most(trainer, knows_logprobs) else None,
            EPISODE: [asdict(play.outcome) for play in plays],
            TURN_REWARDS: [play.turn_rewards for play in plays],
            **({TURN_SAMPLES: list(map(turn_samples, trajectories))} if self.window.splits_episodes else {}),
        }

    def _plays(self, step: int) -> list[Play]:
        assert self._rows is not None
        if "seed" not in self._rows[0]:
            raise ValueError(f"train_dataset must come from env.dataset(...), got the columns {sorted(self._rows[0])}")
        names = [name for name in self._rows[0] if name not in ("prompt", "seed")]
        columns = {name: [row[name] for row in self._rows] for name in names}
        return self._env.plays([row["seed"] for row in self._rows], columns, step)


def _generate(trainer: Any, contexts: list[list[int]], limit: int) -> tuple[list[list[int]], list[list[float]] | None]:
    """One turn by the trainer's own backend, of at most `limit` tokens."""
    count = len(contexts)
    if trainer.use_vllm:
        settings = [(trainer.vllm_generation, "max_completion_length", limit)]
        # Its servers and tensor-parallel groups take as many contexts from each process.
        contexts = contexts + contexts[:1] * (_most(trainer, count) - count)
    else:
        settings = [(trainer.generation_config, "max_new_tokens", limit)]
    asked = {}
    # Of TRL's class, where there is one: what somebody has wrapped may not say what it takes.
    sample = getattr(type(trainer), "_generate_single_turn", trainer._generate_single_turn)
    if "num_generations" in signature(sample).parameters:  # since TRL 1.14.1
        asked["num_generations"] = 1
    else:  # else vLLM would take every G-th context for a prompt, and answer it G times
        settings += [(trainer, "num_generations", 1), (trainer, "num_generations_eval", 1)]
    with _set(settings):
        answers, logprobs = trainer._generate_single_turn(contexts, None, {}, **asked)
    return answers[:count], None if logprobs is None else logprobs[:count]


@contextmanager
def _set(settings: list[tuple[Any, str, int]]) -> Iterator[None]:
    """For a while, give attributes of objects other values."""
    usual = [getattr(holder, name) for holder, name, _ in settings]
    for holder, name, value in settings:
        setattr(holder, name, value)
    try:
        yield
    finally:
        for (holder, name, _), value in zip(settings, usual, strict=True):
            setattr(holder, name, value)


def _max_context(trainer: Any) -> int | None:
    """Most tokens that a prompt and its completion may have together."""
    bounds = [getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None)]
    if trainer.use_vllm:
        bounds.append(trainer.args.vllm_max_model_length)
        if trainer.vllm_mode == "colocate":
            bounds.append(trainer.vllm_generation.llm.llm_engine.model_config.max_model_len)
    return min((bound for bound in bounds if bound is not None), default=None)


def _most(trainer: Any, number: int) -> int:
    if trainer.accelerator.num_processes == 1:
        return number
    return int(trainer.accelerator.gather(torch.tensor([number], device=trainer.accelerator.device)).max())
