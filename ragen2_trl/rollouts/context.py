"""What of an episode a turn is sampled from, and so what of it is a training sample."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ragen2_trl.envs import Play
from ragen2_trl.envs.checks import check_choice, check_count
from ragen2_trl.envs.responses import plain_text
from ragen2_trl.rollouts.chat import Chat, Messages

CONTEXTS = ("full", "last", "memory")

_REMEMBERED_CHARS = 1000  # of an answer: what a model wrote may be of any length


@dataclass(kw_only=True)
class TrainingSample:
    """A stretch of an episode that was sampled from one context growing: what is trained as one row.

    Args:
        prompt_ids: Ids up to where the first of its turns begins.
        completion_ids: All that followed: what the model wrote, and what the environment answered.
        env_mask: For each id of the completion, 1 where the model wrote it and 0 elsewhere.
        logprobs: For each id of the completion its log-prob when it was sampled, 0.0 where the environment wrote it;
            empty where generation gives none.
        earlier: (first, last + 1) places in the prompt that the model wrote in earlier turns.
    """

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    earlier: list[tuple[int, int]] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    def add(self, ids: Sequence[int], by_model: bool, logprobs: Sequence[float] | None = None) -> None:
        self.completion_ids += ids
        self.env_mask += [int(by_model)] * len(ids)
        self.logprobs += [] if logprobs is None else logprobs


@dataclass(kw_only=True)
class Trajectory(TrainingSample):
    """One episode in tokens: its first sample, and those after it, where turns have contexts of their own.

    Args:
        play: The episode.
        prompt: The messages that it began with.
        turn_samples: Further samples, in order.
        messages: What the environment answered to each turn but the last.
        answers: Ids of each turn of the model.
    """

    play: Play
    prompt: Messages
    turn_samples: list[TrainingSample] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    @property
    def samples(self) -> list[TrainingSample]:
        return [self, *self.turn_samples]

    @property
    def latest(self) -> TrainingSample:
        """The sample that the next turn is added to."""
        return self.samples[-1]


@dataclass(frozen=True)
class ContextWindow:
    """What a turn is sampled from. Whatever that is, it is what the turn is trained with.

    Args:
        kind: `"full"`: all turns so far; an episode is one training sample. `"last"`: the first message (the rules)
            and the last turns, as messages. `"memory"`: the rules and one message that tells the answers of earlier
            turns and then shows the present one. In the last two, each turn is a training sample of its own.
        turns: Turns that a context shows or tells, the present one included; default: all. Not for `"full"`.
        drop_oldest: Where the context is full, leave out its oldest turns, rather than end the episode. With `"full"`,
            the turns after that are another training sample.

    Raises:
        ValueError: If an argument is outside its range.
    """

    kind: str = "full"
    turns: int | None = None
    drop_oldest: bool = False

    def __post_init__(self) -> None:
        check_choice("context", self.kind, CONTEXTS)
        check_choice("drop_oldest_turns", self.drop_oldest, (True, False))
        if self.turns is not None:
            if self.kind == "full":
                raise ValueError(f"context_turns must be None with context='full', got {self.turns!r}")
            check_count("context_turns", self.turns, 1, 100)

    @classmethod
    def of(
        cls, context: str = "full", context_turns: int | None = None, drop_oldest_turns: bool = False
    ) -> "ContextWindow":
        """By the names that `TextRollout` and the command line have for the arguments."""
        return cls(context, context_turns, drop_oldest_turns)

    @property
    def splits_episodes(self) -> bool:
        """Whether an episode may be several training samples."""
        return self.kind != "full" or self.drop_oldest

    def goes_on(
        self, trajectory: Trajectory, chat: Chat, room: int, max_context: int | None, answer_tokens: int
    ) -> bool:
        """Adds the environment's latest message to the context of the next turn; whether there is room for one.

        Args:
            trajectory: Whose last answer has been replied to.
            chat: Joins turns.
            room: Tokens that its latest sample may still have.
            max_context: Longest context and answer together.
            answer_tokens: What must be left for the answer where older turns can make room.
        """
        if self.kind == "full":
            reply = chat.reply_ids(trajectory.answers[-1], trajectory.messages[-1])
            if len(reply) + (answer_tokens if self.drop_oldest else 1) <= room:
                latest = trajectory.latest
                latest.add(reply, by_model=False, logprobs=[0.0] * len(reply) if latest.logprobs else None)
                return True
        if not self.splits_episodes:
            return False
        newest = len(trajectory.messages)
        first = 0 if self.turns is None else max(0, newest + 1 - self.turns)
        for start in range(first, newest + 1 if self.drop_oldest else first + 1):
            sample = self._sample(trajectory, chat, start)
            if max_context is None or len(sample.prompt_ids) + answer_tokens <= max_context:
                trajectory.turn_samples.append(sample)
                return True
        return False

    def _sample(self, trajectory: Trajectory, chat: Chat, start: int) -> TrainingSample:
        """A sample that begins with the next turn and knows of those from `start`, numbered from 0."""
        *head, first = trajectory.prompt
        shown = [first["content"], *trajectory.messages]
        if self.kind == "memory":
            told = self._told(trajectory, chat, start) + shown[-1]
            return TrainingSample(prompt_ids=chat.prompt_ids([*head, {**first, "content": told}]))
        # What the model wrote is not tokenised again: it sees the ids that it sampled.
        ids, earlier = chat.prompt_ids([*head, {**first, "content": shown[start]}]), []
        for answer, message in zip(trajectory.answers[start:], shown[start + 1 :], strict=True):
            earlier.append((len(ids), len(ids) + len(answer)))
            ids = ids + answer + chat.reply_ids(answer, message)
        return TrainingSample(prompt_ids=ids, earlier=earlier)

    def _told(self, trajectory: Trajectory, chat: Chat, start: int) -> str:
        lines = []
        for number, ids in enumerate(trajectory.answers[start:], start=start + 1):
            response = trajectory.play.env.read(chat.text(ids))
            # Model text on its way into a prompt: without what a tokenizer would read as its own marks.
            answer = plain_text(" || ".join(response.actions))[:_REMEMBERED_CHARS] if response else ""
            lines.append(f"Turn {number}: {answer or 'no valid answer'}")
        return "\n".join(["Your answers so far:", *lines, "", ""]) if lines else ""


FULL = ContextWindow()


def turn_samples(trajectory: Trajectory) -> list[dict[str, Any]]:
    """What TRL's rows, other processes and files take of the samples after the first."""
    return [{**vars(sample), "earlier": list(map(list, sample.earlier))} for sample in trajectory.turn_samples]
