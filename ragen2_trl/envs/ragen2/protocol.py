"""RAGEN-2's protocol: what RAGEN's code shows a player, in which order, how it reads a response, its tasks by number.

A task has a subclass for it, such as `RagenSokoban`, which adds what differs in its own rules. The layout is that of
RAGEN's code, the sentences are ours. Each text may be replaced by another one, from a file of `prompts`, and holds
fields such as `{left}` where a value belongs.
"""

import itertools
import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import yaml
from datasets import Dataset

from ragen2_trl.envs.checks import check_choice
from ragen2_trl.envs.environment import Environment
from ragen2_trl.envs.episode import Limits
from ragen2_trl.envs.play import Play
from ragen2_trl.envs.responses import (
    MAX_RESPONSE_CHARS,
    Response,
    actions_in,
    answer_in,
    format_response,
    reasoning_in,
)

# Texts by key, and the fields that each may hold. A task has its own `instruction` and `length`, and more where it
# needs them.
TEXTS = {
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
TURN = ("turn", "state", "warning", "left", "format", "length")
TASK_SPLITS = ("held_out", "ragen2")
FIRST_SEED = {"train": 10_000, "test": 123}  # of RAGEN's tasks, which count up from there
FIRST_ROWS = 20_000  # of data, from which RAGEN draws

_FIELD = re.compile(r"\{(\w+)\}")
_ANSWERED = re.compile(r"</think>\s*<answer>")  # linear: white space is read once behind each tag
_TAGS = re.compile(r"</?(?:think|answer)>|<\|im_(?:start|end)\|>")


class RagenProtocol(Environment):
    """A task as RAGEN-2 plays it; to be inherited from before the task's own class.

    Args:
        prompts: YAML or JSON file with texts that replace ours, by the keys of `TEXTS`.
        split: `"held_out"`, where no task of one split appears in the other, or `"ragen2"`: tasks in the order of
            RAGEN's seeds, for comparison; some of its test tasks occur in training.
        max_turn_tokens: Longest turn in tokens where a model plays and nothing else is asked for; default: RAGEN's.
        enable_think: Whether a response is reasoning and an answer, or an answer alone.
        force_think: Whether the prompt of each turn ends with the tag that a response opens with.
        multi_turn: Whether there are several turns; nothing but what the protocol of the task has.

    Raises:
        ValueError: If an option is outside its range, or the file does not hold texts by the keys of `TEXTS`.
    """

    preset = "ragen2"
    splits_answers = True
    limits: ClassVar[Limits]
    max_total: ClassVar[int]  # actions of an episode
    turn_tokens: ClassVar[int]  # longest turn
    fixed: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # options of the task that belong to the protocol
    legend: Mapping[str, str] = MappingProxyType({})  # symbols of an observation and what they mean
    actions: ClassVar[Sequence[str]] = ()  # names of all actions, where there are few

    def __init__(
        self,
        prompts: str | None = None,
        split: str = "held_out",
        max_turn_tokens: int | None = None,
        enable_think: bool = True,
        force_think: bool = True,
        multi_turn: bool | None = None,
        **options: Any,
    ):
        check_choice("multi_turn", multi_turn, (None, self.limits.turns > 1))
        super().__init__(
            multi_turn=self.limits.turns > 1,
            max_turns=self.limits.turns,
            max_actions=self.limits.actions,
            max_total_actions=self.max_total,
            max_turn_tokens=self.turn_tokens if max_turn_tokens is None else max_turn_tokens,
            enable_think=enable_think,
            force_think=force_think,
            **self.fixed,
            **options,
        )
        check_choice("split", split, TASK_SPLITS)
        self.split = split
        self._given = {} if prompts is None else read_prompts(prompts)

    @abstractmethod
    def texts(self) -> dict[str, str]:
        """The task's own texts by key; `instruction` at least."""

    @abstractmethod
    def numbered_tasks(self, seeds: Iterator[int], split: str, data: str | None) -> Iterator[dict[str, Any]]:
        """Like `tasks`, but a row for each of `seeds`: the one that RAGEN makes of it."""

    def tasks(self, seed: int, split: str, data: str | None) -> Iterator[dict[str, Any]]:
        if self.split == "ragen2":  # whose numbers a seed does not change
            return self.numbered_tasks(itertools.count(FIRST_SEED[split]), split, data)
        return super().tasks(seed, split, data)  # type: ignore[safe-super]  # of the task's own class

    def dataset(
        self, num_prompts: int | None = None, seed: int = 0, split: str = "train", data: str | None = None
    ) -> Dataset:
        """As `Environment.dataset`; tasks by RAGEN's seeds have no end."""
        if num_prompts is None and data is not None and self.split == "ragen2":
            raise ValueError("num_prompts must be given for split='ragen2', which has no end, got None")
        return super().dataset(num_prompts, seed, split, data)

    def source(self, data: str | None, hub: str) -> str:
        """Where the tasks of RAGEN's seeds come from, which are rows of data.

        Raises:
            ValueError: If no data is named.
        """
        if data is None:
            raise ValueError(
                f"data must name rows, such as those of {hub}, for {self.name} with split='ragen2', got None"
            )
        return data

    def read(self, text: str) -> Response | None:
        """As `Environment.read`, but reasoning ends at the first `</think>` that an answer follows, and tags go."""
        text = self.with_forced_tag(text)[:MAX_RESPONSE_CHARS]
        before, after = "", text[text.find("<answer>") :]
        if self.enable_think:
            found = _ANSWERED.search(text)
            if found is None:
                return None
            before, after = text[: found.start()], text[found.start() + len("</think>") :]
        answer = answer_in(after)
        if answer is None:
            return None
        return Response(_TAGS.sub("", reasoning_in(before)).strip(), actions_in(_TAGS.sub("", answer), split=True))

    def system_text(self) -> str:
        """The system message: helper line, instruction, legend, actions."""
        return self._told(
            ["helper", "instruction", *(["legend"] if self.legend else []), *(["actions"] if self.actions else [])],
            legend=", ".join(f"{symbol}: {meaning}" for symbol, meaning in self.legend.items()),
            actions=", ".join(self.actions),
        )

    def message(self, play: Play, status: str | None = None) -> str:
        """The user message of the next turn: reward of the last one, turn, state, warning, actions left, form."""
        last = play.turns[-1] if play.turns else None
        keys = [key for key in TURN if key != "warning" or (last is not None and not last.executed)]
        return self._told(
            keys if last is None else ["reward", *keys],
            turn=len(play.turns) + 1,
            state=play.episode.observation(),
            left=play.actions_left,
            reward=None if last is None else last.earned,
        )

    def text_without_observation(self) -> str:
        """The user message of the first turn without what is particular to a task."""
        return self._told(["turn", "left", "format", "length"], turn=1, left=self.max_total_actions)

    def text(self, key: str) -> str:
        """One of the texts as it stands."""
        return {**TEXTS, **self.texts(), **self._given}[key]

    def _told(self, keys: Sequence[str], **fields: Any) -> str:
        fields["total"] = self.max_total_actions
        # Nothing in capitals or brackets of our own: what stands between the tags is the model's to fill in.
        fields["format"] = format_response(" [Your thoughts] ", [" [your answer] "], think=self.enable_think).replace(
            "</think><answer>", "</think> <answer>"
        )
        # In one pass: a state may hold anything, fields included.
        return "".join(_FIELD.sub(lambda found: str(fields.get(found[1], found[0])), self.text(key)) for key in keys)


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
        raise ValueError(f"prompts={path!r} is not valid YAML or JSON: {' '.join(str(error).split())}") from error
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"prompts={path!r} must map keys of {list(TEXTS)} to text, got {str(texts)[:60]!r}")
    unknown = sorted(str(key) for key in texts if key not in TEXTS)
    if unknown:
        raise ValueError(f"keys of prompts must be among {list(TEXTS)}, got {unknown} in {path!r}")
    return texts


def first_rows(rows: Dataset) -> Dataset:
    """The rows of data that RAGEN draws from."""
    return rows.select(range(min(FIRST_ROWS, len(rows))))


class RagenGrid(RagenProtocol):
    """A grid world as RAGEN-2 shows it: symbols without spaces and zero-based `(row, column)`.

    Args:
        observation: What the prompt shows: the `"grid"`, the `"coordinates"` or `"both"`.
        symbols: As many as usual, in place of those, in the order of the legend; default: the usual ones.
        **options: Those of `RagenProtocol` and of the task.
    """

    meanings: ClassVar[Mapping[str, str]]  # of the usual symbols, in the order of the legend

    def __init__(self, observation: str = "both", symbols: str | None = None, **options: Any):
        check_choice("observation", observation, ("grid", "coordinates", "both"))
        super().__init__(observation=observation, **options)
        self.observation = observation
        usual = "".join(self.meanings)
        symbols = usual if symbols is None else symbols
        if (
            not isinstance(symbols, str)
            or not len(symbols) == len(usual) == len(set(symbols))
            or not symbols.isprintable()
            or " " in symbols
        ):
            raise ValueError(
                f"symbols must be {len(usual)} different characters without spaces, like {usual!r}, got {symbols!r}"
            )
        self.legend = dict(zip(symbols, self.meanings.values(), strict=True))
        self.symbols = str.maketrans(usual, symbols)

    def show_board(self, lines: Sequence[str], cells: Mapping[str, Sequence[tuple[int, int]]]) -> str:
        """A board in words, in the form that `observation` asks for.

        Args:
            lines: The rows of the grid, in the usual symbols.
            cells: For each label the (row, column) of its cells; labels without cells are left out.
        """
        grid = "\n".join(lines).translate(self.symbols)
        if self.observation == "grid":
            return grid
        parts = ["Coordinates: ", f"Board size: {len(lines)} rows x {len(lines[0])} cols (zero-indexed)."]
        parts += [f"{label}: {', '.join(map(str, places))}" for label, places in cells.items() if places]
        return "\n".join(parts if self.observation == "coordinates" else [*parts, "Grid Map: ", grid])
