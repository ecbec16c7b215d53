"""Multi-turn play by a language model: the ids it sampled, what the environment answered, and which is which."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from ragen2_trl.envs import Play, respond_all
from ragen2_trl.envs.mixture import AnyTask

Messages: TypeAlias = Sequence[Mapping[str, Any]]
# (contexts, most new tokens) -> for each context the ids it goes on with, and their log-probs where there are any
Generate: TypeAlias = Callable[[list[list[int]], int], tuple[list[list[int]], list[list[float]] | None]]

_MARK = "ragen2-trl:answer"  # stands for the model's answer while a template is read


@dataclass
class Trajectory:
    """One episode in tokens.

    Args:
        play: The episode.
        prompt_ids: Ids of the first messages, up to where the model's first turn begins.
        completion_ids: All that followed: what the model wrote, and what the environment answered.
        env_mask: For each id of the completion, 1 where the model wrote it and 0 elsewhere.
        logprobs: For each id of the completion its log-prob when it was sampled, 0.0 where the environment wrote it;
            empty where generation gives none.
    """

    play: Play
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    def add(self, ids: Sequence[int], by_model: bool) -> None:
        self.completion_ids += ids
        self.env_mask += [int(by_model)] * len(ids)


class Chat:
    """How a chat template joins turns, in ids.

    Args:
        tokenizer: Turns text into ids and back.
        eos_token_ids: Ids that end a turn; default: the tokenizer's own.
        processor: What has the chat template: the tokenizer by default, or the processor of a vision-language model.
        **template_kwargs: For the template, for instance `enable_thinking` or a `chat_template` of its own.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int] | None = None,
        processor: Any = None,
        **template_kwargs: Any,
    ):
        self._tokenizer = tokenizer
        self._processor = processor or tokenizer
        self._eos = {tokenizer.eos_token_id} if eos_token_ids is None else set(eos_token_ids)
        self._kwargs = template_kwargs

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Ids of a conversation, up to where the model's next turn begins."""
        text = self._render(messages)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def reply_ids(self, answer_ids: Sequence[int], message: str) -> list[int]:
        """Ids between an answer of the model and its next turn: the end of its turn and the user's message.

        The answer itself is not tokenised again: the ids that were sampled are the ids that are trained.
        """
        conversation = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": message},
        ]
        _, _, text = self._render(conversation).partition(_MARK)
        end_of_turn, _, _ = text.partition(message)
        closing = self._tokenizer(end_of_turn, add_special_tokens=False)["input_ids"]
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        last = answer_ids[-1] if answer_ids else None
        # Where the model has ended its turn itself, what the template ends it with is there already.
        return ids[closing.index(last) + 1 :] if last in self._eos and last in closing else ids

    def text(self, ids: Sequence[int]) -> str:
        """What an answer says."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _render(self, messages: Messages) -> str:
        if self._processor is not self._tokenizer:  # some templates of vision-language models read parts only
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        return self._processor.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False, **self._kwargs
        )


def play_all(
    plays: Sequence[Play],
    prompts: Sequence[Messages],
    chat: Chat,
    generate: Generate,
    *,
    max_tokens: int,
    max_turn_tokens: int | None = None,
    max_context: int | None = None,
    workers: int = 1,
    most: Callable[[int], int] = int,
) -> list[Trajectory]:
    """Plays episodes to their end, all of those still running in one batch each turn.

    An episode ends by its rules, by its turns, or when nothing more fits: then its last turn may be cut off, and
    counts as it stands.

    Args:
        plays: B episodes at their start.
        prompts: Their first messages.
        chat: Joins turns.
        generate: Continues contexts.
        max_tokens: Longest completion in tokens, all turns and what the environment answers included.
        max_turn_tokens: Longest turn of the model; default: what is left.
        max_context: Longest prompt and completion together.
        workers: Episodes stepped at the same time.
        most: The largest of an int over all processes. Each of them generates until none has an episode left, since
            generation may need all of them.

    Returns:
        B trajectories; their plays are played.

    Raises:
        ValueError: If a prompt leaves no room for an answer.
    """
    trajectories = [Trajectory(play, chat.prompt_ids(prompt)) for play, prompt in zip(plays, prompts, strict=True)]
    longest = max((len(trajectory.prompt_ids) for trajectory in trajectories), default=0)
    if max_context is not None and longest >= max_context:
        raise ValueError(f"prompts must have fewer tokens than the model's {max_context} positions, got {longest}")

    def left(trajectory: Trajectory) -> int:
        tokens = max_tokens - len(trajectory.completion_ids)
        return tokens if max_context is None else min(tokens, max_context - len(trajectory.context))

    def room(trajectory: Trajectory) -> int:
        return left(trajectory) if max_turn_tokens is None else min(left(trajectory), max_turn_tokens)

    running = trajectories
    while limit := most(max((room(trajectory) for trajectory in running), default=0)):
        if not running:
            generate([trajectories[0].prompt_ids], limit)  # for the others' sake
            continue
        answers, logprobs = generate([trajectory.context for trajectory in running], limit)
        for number, trajectory in enumerate(running):
            answers[number] = answers[number][: room(trajectory)]
            if logprobs is not None:
                trajectory.logprobs += logprobs[number][: len(answers[number])]
            trajectory.add(answers[number], by_model=True)
        texts = [chat.text(answer) for answer in answers]
        messages = respond_all([trajectory.play for trajectory in running], texts, workers)
        played, running = running, []
        for trajectory, answer, message in zip(played, answers, messages, strict=True):
            if message is None:
                continue
            reply = chat.reply_ids(answer, message)
            if len(reply) < left(trajectory):
                trajectory.add(reply, by_model=False)
                trajectory.logprobs += [0.0] * len(reply) if logprobs is not None else []
                running.append(trajectory)
    return trajectories


def check_words_only(env: AnyTask) -> None:
    """Raises a `ValueError` unless the environment is played in text: with that protocol, and without pictures."""
    if env.protocol != "text" or env.shows_images:
        shown = "pictures" if env.shows_images else f"protocol={env.protocol!r}"
        raise ValueError(f"env must be text played with protocol='text', got {env.name} with {shown}")
