"""What every task offers: prompts, reward functions and, where a solver exists, demonstrations.

A task keeps three things apart: the *rules* (a small seeded state object with a `step`), the *text* (how a state
becomes a prompt and an answer becomes actions) and the *rewards* (plain functions that TRL calls). Single-turn play
needs no more than that, and multi-turn play can be put on top of the same rules later.

Nothing here knows torch or TRL.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from datasets import Dataset

Message: TypeAlias = Mapping[str, Any]
Completion: TypeAlias = str | Sequence[Message]
RewardFunc: TypeAlias = Callable[..., list[float]]

SPLITS = ("train", "test")

# A response is model text and may be of any length. Real ones are far shorter, so that cutting costs nothing.
MAX_RESPONSE_CHARS = 100_000
# Tasks look at a handful of actions; a response of a million separators must not become a million strings.
MAX_PARSED_ACTIONS = 256

_THINK, _END_THINK = "<think>", "</think>"
_ANSWER, _END_ANSWER = "<answer>", "</answer>"
_SEPARATOR = "||"


@dataclass(frozen=True)
class Response:
    """A well-formed response: the text between the think tags, and the actions between the answer tags."""

    reasoning: str
    actions: tuple[str, ...]


def parse_response(text: str) -> Response | None:
    """Reads `<think>…</think><answer>a || b</answer>`; `None` when the text does not have that form.

    The first `</think>` counts and only white space may stand between it and `<answer>`. The opening `<think>` may be
    missing, since many chat templates write it into the prompt. Text after the first `</answer>` is ignored, and so
    are empty actions. Plain searches only, at most `MAX_RESPONSE_CHARS` characters: the work is linear in the text.

    >>> parse_response("<think>The goal is right of me.</think><answer>Right || Down</answer>")
    Response(reasoning='The goal is right of me.', actions=('Right', 'Down'))
    >>> parse_response("Right") is None
    True
    """
    text = text[:MAX_RESPONSE_CHARS]
    before, end_think, after = text.partition(_END_THINK)
    if not end_think:
        return None
    _, opened, inside = before.partition(_THINK)
    after = after.lstrip()
    if not after.startswith(_ANSWER):
        return None
    answer, end_answer, _ = after.removeprefix(_ANSWER).partition(_END_ANSWER)
    if not end_answer:
        return None
    pieces = answer.split(_SEPARATOR, MAX_PARSED_ACTIONS)[:MAX_PARSED_ACTIONS]
    actions = tuple(stripped for piece in pieces if (stripped := piece.strip()))
    return Response(reasoning=(inside if opened else before).strip(), actions=actions)


def format_response(reasoning: str, actions: Sequence[str]) -> str:
    """The text that `parse_response` reads back.

    >>> format_response("Two steps.", ["Right", "Down"])
    '<think>Two steps.</think><answer>Right || Down</answer>'
    """
    return f"{_THINK}{reasoning}{_END_THINK}{_ANSWER}{f' {_SEPARATOR} '.join(actions)}{_END_ANSWER}"


def completion_text(completion: Completion) -> str:
    """The text a model wrote, from a plain string or from the messages TRL passes to reward functions.

    Only assistant messages count. Reasoning that a response parser moved into `reasoning_content` or `thinking` is put
    back between think tags, so that both kinds of completions read the same.

    >>> completion_text([{"role": "assistant", "reasoning_content": "Go.", "content": "<answer>Up</answer>"}])
    '<think>Go.</think><answer>Up</answer>'
    """
    if isinstance(completion, str):
        return completion
    return "".join(_message_text(message) for message in completion if message["role"] == "assistant")


def _message_text(message: Message) -> str:
    content = message.get("content") or ""  # None where a message holds nothing but tool calls
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content if part["type"] == "text")
    reasoning = message.get("reasoning_content") or message.get("thinking")
    return f"{_THINK}{reasoning}{_END_THINK}{content}" if reasoning else content


class Environment(ABC):
    """One task: its prompts, its rewards and, where a solver exists, its demonstrations.

    Subclasses set `name` (the key in `make_env`, and the prefix of their reward functions) and take their options as
    keyword arguments of `__init__`.
    """

    name: ClassVar[str]

    @abstractmethod
    def dataset(self, num_prompts: int, seed: int, split: str = "train") -> Dataset:
        """Prompts of one split; equal arguments give equal rows, on every machine and in every process.

        Args:
            num_prompts: Number of rows.
            seed: Which stream of tasks to draw from; distinct seeds give distinct streams.
            split: `"train"` or `"test"`. No task of one split ever appears in the other.

        Returns:
            Rows with `prompt` (a system and a user message), `seed` (int) and what the reward functions need.

        Raises:
            ValueError: If an argument is outside its range.
        """

    @property
    @abstractmethod
    def reward_funcs(self) -> list[RewardFunc]:
        """Functions `fn(prompts, completions, **columns) -> list[float]`, one value a completion, for TRL trainers.

        Their names are the names TRL logs. The return of an episode is their sum.
        """

    @property
    @abstractmethod
    def success_func(self) -> RewardFunc:
        """The reward function whose value is 1.0 where the task is solved and 0.0 elsewhere."""

    @abstractmethod
    def is_valid(self, text: str) -> bool:
        """Whether a response has the required form and names only actions of this task."""

    def demonstrations(self, num: int, seed: int) -> Dataset:
        """Solved tasks of the training split for a warm start, as conversational `prompt` and `completion`.

        Raises:
            NotImplementedError: If the task has no solver.
        """
        raise NotImplementedError(f"{self.name} has no solver, so it cannot make demonstrations")


def check_choice(field: str, value: object, allowed: Sequence[object]) -> None:
    """Raises a `ValueError` that names the field, the value and the allowed set unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{field} must be one of {list(allowed)}, got {value!r}")


def check_range(field: str, value: float, low: float, high: float) -> None:
    """Raises a `ValueError` that names the field, the value and the range unless `low <= value <= high`."""
    if not low <= value <= high:
        raise ValueError(f"{field} must be between {low} and {high}, got {value!r}")
