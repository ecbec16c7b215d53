"""Episodes as they were played are kept on disk by a run or an evaluation, as lines of JSON.

`<name>_<step>.jsonl` has a row an episode: OpenAI's `messages`, what came of each turn, and what the episode was.
Texts in it are a model's, and its prompts.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from ragen2_trl.envs.play import Play
from ragen2_trl.record.files import EVALUATION, MAX_BYTES, write_json_lines
from ragen2_trl.record.rows import json_lines
from ragen2_trl.redaction import without_credentials
from ragen2_trl.saved_state import check_form, wrong
from ragen2_trl.text import message_text

MAX_EPISODES = 100_000  # of a file that is read
PICTURE = "[picture]"  # stands for one in a message

_NAME = re.compile(r"[a-z]+")


class SavedMessage(TypedDict):
    """A message with its reasoning between think tags."""

    role: str
    content: str
    tool_calls: NotRequired[Any]


@dataclass(frozen=True)
class PlayedTurn:
    """What came of a turn.

    Args:
        actions: Those that the model named, of those that count.
        valid: Whether the turn was valid.
        reward: What it earned; `None` where that is no finite number.
    """

    actions: list[str]
    valid: bool
    reward: float | None


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode that was played to its end.

    Args:
        task: Name of the environment.
        seed: Of the task; 0 where a row of training has none.
        success: Whether the task was solved.
        episode_return: Sum of the rewards; `None` where that is no finite number.
        messages: `{"role", "content"}` from the first to the last, and `tool_calls` where there were any.
        turns: What came of each turn, in their order.
        boards: The state at the start and after each turn in letters of `envs.drawing.TILES`, where it is a grid;
            none elsewhere.
        group: Which of the groups of its file: episodes of one task and seed, played together.
        sample: Which of the members of its group.
        step: Optimizer step, 0 outside of training.
    """

    task: str
    seed: int
    success: bool
    episode_return: float | None
    messages: list[dict[str, Any]]
    turns: list[PlayedTurn]
    boards: list[str] = field(default_factory=list)
    group: int = 0
    sample: int = 0
    step: int = 0


def episodes_of(
    prompts: Sequence[Sequence[Mapping[str, Any]]],
    seeds: Sequence[int],
    plays: Sequence[Play],
    step: int = 0,
    completions: Sequence[Any] | None = None,
) -> list[PlayedEpisode]:
    """What was played, to be saved; plays of one task and seed are a group. Those that have failed are left out.

    Args:
        prompts: The first messages of each of the B episodes.
        seeds: (B,) of their tasks.
        plays: (B,) as far as they have come.
        step: Optimizer step, 0 outside of training.
        completions: All further messages of each, where they are not those of the text protocol: with tools.
    """
    groups: dict[tuple[str, int], int] = {}
    members: dict[int, int] = {}
    episodes = []
    for number, (prompt, seed, play) in enumerate(zip(prompts, seeds, plays, strict=True)):
        if play.failure:
            continue
        group = groups.setdefault((play.env.name, int(seed)), len(groups))
        sample = members[group] = members.get(group, -1) + 1
        outcome = play.outcome
        said = _spoken(play) if completions is None else completions[number]
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        boards = [play.first_board, *(turn.board for turn in play.turns)]
        episodes.append(
            PlayedEpisode(
                play.env.name,
                int(seed),
                bool(outcome.success),
                _finite(outcome.episode_return),
                [_message(message) for message in (*asked, *said)],
                [PlayedTurn(list(turn.actions), turn.valid, _finite(turn.reward)) for turn in play.turns],
                [board for board in boards if board is not None],
                group,
                sample,
                step,
            )
        )
    return episodes


def episode_of_messages(
    task: str, seed: int, success: bool, reward: float, prompt: Any, completion: Any, step: int = 0
) -> PlayedEpisode:
    """An episode as TRL's reward functions saw it. Each message of the model is a turn, and its tool calls are the
    actions; there is one reward for all of them.

    Args:
        task, seed, success, reward, step: As in `PlayedEpisode`.
        prompt, completion: Messages, or texts.
    """
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said: Any = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    turns = [
        PlayedTurn([_action(call) for call in message.get("tool_calls") or ()], True, None)
        for message in said
        if message["role"] == "assistant"
    ]
    messages = [_message(message) for message in (*asked, *said)]
    return PlayedEpisode(task, seed, success, _finite(reward), messages, turns, step=step)


def save_episodes(folder: Path, episodes: Sequence[PlayedEpisode], name: str = EVALUATION, step: int = 0) -> Path:
    """Write `<name>_<step>.jsonl` into `folder`, without credentials. A kill leaves the former file or this one.

    Args:
        folder: Made if need be.
        episodes: What was played.
        name: Small letters, such as `evaluation` or `train`.
        step: Optimizer step, 0 outside of training.

    Returns:
        The file.

    Raises:
        ValueError: If `name` is of another form.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"name must be small letters from a to z, got {name!r}")
    folder.mkdir(parents=True, exist_ok=True)
    path = episodes_path(folder, name, step)
    write_json_lines(path, map(_row, episodes))
    return path


def episodes_path(folder: Path, name: str = EVALUATION, step: int = 0) -> Path:
    """Where `save_episodes` writes."""
    return folder / f"{name}_{step:05d}.jsonl"


def read_episodes(path: Path) -> list[PlayedEpisode]:
    """The episodes of a file that `save_episodes` wrote, and anybody may have changed.

    Raises:
        OSError, ValueError: If it cannot be read, or holds something else or nothing; one line that names the field.
    """
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise OSError(f"{str(path)!r} must be a file of at most {MAX_BYTES} bytes")
    episodes: list[PlayedEpisode] = []
    for number, row in enumerate(json_lines(path)):
        if number >= MAX_EPISODES:
            raise ValueError(f"episodes must be 1 to {MAX_EPISODES}, got more in {path.name}")
        episodes.append(_episode(row, f"row {number} of {path.name}"))
    if not episodes:
        raise ValueError(f"episodes must be 1 to {MAX_EPISODES}, got none in {path.name}")
    return episodes


def _spoken(play: Play) -> list[dict[str, Any]]:
    """What followed the prompt in the text protocol."""
    pairs = (("assistant", turn.text) for turn in play.turns), (("user", turn.reply) for turn in play.turns)
    return [
        {"role": role, "content": text} for pair in zip(*pairs, strict=True) for role, text in pair if text is not None
    ]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {"role": str(message["role"]), "content": message_text(message, f"{PICTURE}\n")}
    return {**kept, "tool_calls": message["tool_calls"]} if message.get("tool_calls") else kept


def _action(call: Mapping[str, Any]) -> str:
    """A tool call in the form of Python; what a model wrote may have another form."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return str(function or call)
    given = ", ".join(f"{name}={value!r}" for name, value in function["arguments"].items())
    return f"{function.get('name')}({given})"


def _finite(value: float | None) -> float | None:
    try:
        return float(value) if value is not None and math.isfinite(value) else None
    except OverflowError:
        return None


def _row(episode: PlayedEpisode) -> dict[str, Any]:
    """A line of the file."""
    values = asdict(episode)
    values["return"] = values.pop("episode_return")
    # Halves of surrogate pairs, which a model may write, are in no text that others can read.
    row: dict[str, Any] = json.loads(json.dumps(values, default=str, ensure_ascii=False).encode("utf-8", "replace"))
    return row | {name: without_credentials(row[name]) for name in ("messages", "turns")}


def _episode(row: dict[str, Any], where: str) -> PlayedEpisode:
    if "return" not in row:
        raise ValueError(f"{where}: field 'return' is missing")
    row["episode_return"] = row.pop("return")
    check_form(row, PlayedEpisode, f"{where}:")
    check_form(row["messages"], list[SavedMessage], f"{where}: messages")
    for name in ("seed", "group", "sample", "step"):
        if abs(row.get(name, 0)) > 2**63:
            raise wrong(f"{where}: {name}", "a whole number of at most 64 bits", row[name])
    turns = [PlayedTurn(turn["actions"], turn["valid"], _finite(turn["reward"])) for turn in row["turns"]]
    return PlayedEpisode(**{**row, "episode_return": _finite(row["episode_return"]), "turns": turns})
