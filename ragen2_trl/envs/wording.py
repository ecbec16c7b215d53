"""What a player is told: the texts of messages and their layout, ours or RAGEN-2's.

The layout of RAGEN-2 is in `RAGEN2`, text by text; its sentences are ours. Each text may be replaced by another one,
from a file of `prompts`, and holds fields such as `{left}` where a value belongs.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import yaml

from ragen2_trl.envs.episode import Episode
from ragen2_trl.envs.play import Play
from ragen2_trl.envs.responses import format_response

# Texts of the wording "ragen2" by key, and the fields that each may hold. A task has its own `instruction` and
# `length`, and further ones where it needs them.
KEYS = {
    "helper": "You're a helpful assistant. ",
    "instruction": "",
    "legend": "\nThe meaning of each symbol in the state is:\n{legend}",
    "actions": "\nThe actions you may take are:\n{actions}\nIn all you may take up to {total} of them; put ` || ` "
    "between two.",
    "turn": "\nTurn {turn}:\n",
    "state": "State:\n{state}\n",
    "warning": "Your last answer held no valid action. Nothing has changed, so try another.\n",
    "left": "Actions left: {left}. ",
    "format": "Answer with {format} and with nothing besides. ",
    "length": "Use no more than 100 words.",
    "advice": "",  # a part of the state
    "reward": "Reward:\n{reward}\n",
}
FIELDS = ("legend", "actions", "total", "turn", "state", "left", "format", "reward")
_FIELD = re.compile(r"\{(\w+)\}")


class Task(Protocol):
    """What a wording asks of a task."""

    example: str
    legend: Mapping[str, str]
    actions: Sequence[str]
    enable_think: bool
    max_turns: int
    max_actions: int
    max_total_actions: int | None

    @property
    def splits_answers(self) -> bool: ...

    def instructions(self) -> str: ...

    def turn_text(self, episode: Episode, status: str | None = None) -> str: ...

    def reference_texts(self) -> dict[str, str]: ...


class Own:
    """Our wording: rules and limits, then in each turn what came of the last one, the state and an answer's form.

    Args:
        prompts: `None`; our own texts are not read from a file.
    """

    def __init__(self, prompts: str | None = None):
        if prompts is not None:
            raise ValueError(f"prompts must be None but with wording='ragen2' or a preset, got {prompts!r}")

    def system(self, task: Task) -> str:
        """The system message."""
        return f"{task.instructions()}{limits_in_words(task)}"

    def message(self, task: Task, play: Play, status: str | None) -> str:
        """The user message of the next turn; `status` says what came of the last one."""
        if status is None:
            return task.turn_text(play.episode)
        return task.turn_text(play.episode, f"{status} Turn {len(play.turn_rewards) + 1} of {task.max_turns}.")

    def without_observation(self, task: Task) -> str:
        """The user message of the first turn without what is particular to a task."""
        return reply_form(task)


def limits_in_words(task: Task) -> str:
    """How many turns and actions there are, in our own wording."""
    one = "one action" if task.splits_answers else "one answer"
    actions = f"at most {task.max_actions} actions" if task.max_actions > 1 else one
    total = "" if task.max_total_actions is None else f" All turns together take at most {task.max_total_actions}."
    if task.max_turns > 1:
        return f" You have {task.max_turns} turns with {actions} each.{total}"
    return f" Give {actions}.{total}" if task.max_actions > 1 else ""


def reply_form(task: Task) -> str:
    """The form of an answer, in our own wording."""
    return f"Reply with {format_response('reasoning', [task.example], think=task.enable_think)}"


class Ragen2:
    """RAGEN-2's layout: helper line, instruction, legend, actions and limit; turn, state, warning, actions left, form.

    Args:
        prompts: YAML or JSON file with texts that replace ours, by key.

    Raises:
        ValueError: If the file does not hold texts by the keys of `KEYS`.
    """

    _turn: ClassVar = ("turn", "state", "warning", "left", "format", "length")

    def __init__(self, prompts: str | None = None):
        self._given = {} if prompts is None else read_prompts(prompts)

    def system(self, task: Task) -> str:
        """The system message."""
        keys = ["helper", "instruction"]
        keys += ["legend"] if task.legend else []
        keys += ["actions"] if task.actions else []
        return self._text(
            task,
            keys,
            legend=", ".join(f"{symbol}: {meaning}" for symbol, meaning in task.legend.items()),
            actions=", ".join(task.actions),
        )

    def message(self, task: Task, play: Play, status: str | None) -> str:
        """The user message of the next turn."""
        keys = [key for key in self._turn if key != "warning" or (play.last is not None and not play.last.executed)]
        reward = None if play.last is None else play.last.reward
        left = play.actions_left
        return self._text(
            task,
            keys if reward is None else ["reward", *keys],
            turn=len(play.turn_rewards) + 1,
            state=play.episode.observation(),
            left=(task.max_turns - len(play.turn_rewards)) * task.max_actions if left is None else left,
            reward=reward,
        )

    def without_observation(self, task: Task) -> str:
        """The user message of the first turn without what is particular to a task."""
        return self._text(task, ["turn", "left", "format", "length"], turn=1, left=_total(task))

    def text(self, task: Task, key: str) -> str:
        """One of the texts as it stands."""
        return {**KEYS, **task.reference_texts(), **self._given}[key]

    def _text(self, task: Task, keys: Sequence[str], **fields: Any) -> str:
        texts = {**KEYS, **task.reference_texts(), **self._given}
        fields["total"] = _total(task)
        # Nothing in capitals or brackets of our own: what stands between the tags is the model's to fill in.
        fields["format"] = format_response(" [Your thoughts] ", [" [your answer] "], think=task.enable_think).replace(
            "</think><answer>", "</think> <answer>"
        )
        # In one pass: a state may hold anything, fields included.
        return "".join(_FIELD.sub(lambda found: str(fields.get(found[1], found[0])), texts[key]) for key in keys)


def _total(task: Task) -> int:
    return task.max_turns * task.max_actions if task.max_total_actions is None else task.max_total_actions


def read_prompts(path: str) -> dict[str, str]:
    """Texts by key, from a YAML or JSON file.

    Raises:
        ValueError: If it is no such file, a key is not known, or a value is no text.
    """
    if not isinstance(path, str):
        raise ValueError(f"prompts must be the path of a YAML or JSON file, got {path!r}")
    content = Path(path).read_text(encoding="utf-8")
    try:
        texts = json.loads(content) if path.endswith(".json") else yaml.safe_load(content)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise ValueError(
            f"prompts must be a YAML or JSON file, {path!r} cannot be read: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"prompts must hold texts by the keys {list(KEYS)}, got something else in {path!r}")
    unknown = sorted(str(key) for key in texts if key not in KEYS)
    if unknown:
        raise ValueError(f"keys of prompts must be among {list(KEYS)}, got {unknown} in {path!r}")
    return texts


WORDINGS: dict[str, type[Own] | type[Ragen2]] = {"own": Own, "ragen2": Ragen2}
