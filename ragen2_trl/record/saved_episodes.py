"""Episodes as they were played are kept on disk by a run or an evaluation: Parquet, and JSONL for everything else.

`<name>_<step>.parquet` and `<name>_<step>.jsonl` hold the same rows: OpenAI's `messages`, what came of each turn, and
what the episode was. Texts in them are a model's, and its prompts.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ragen2_trl.envs.play import Play
from ragen2_trl.record.files import EVALUATION, write_json_lines
from ragen2_trl.record.parquet import open_parquet, rows_of
from ragen2_trl.redaction import without_credentials
from ragen2_trl.saved_state import replace_whole

MAX_EPISODES = 100_000  # of a file that is read
PICTURE = "[picture]"  # stands for one in a message

_NAME = re.compile(r"[a-z]+")
_MESSAGE = {"role": pa.string(), "content": pa.string(), "tool_calls": pa.string()}  # calls as JSON
_TURN = {"actions": pa.list_(pa.string()), "valid": pa.bool_(), "reward": pa.float64()}
SCHEMA = pa.schema(
    {
        "task": pa.string(),
        "step": pa.int64(),
        "group": pa.int64(),
        "sample": pa.int64(),
        "seed": pa.int64(),
        "success": pa.bool_(),
        "return": pa.float64(),
        "messages": pa.list_(pa.struct(_MESSAGE)),
        "turns": pa.list_(pa.struct(_TURN)),
        "boards": pa.list_(pa.string()),
    }
)


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
    """Write `<name>_<step>.parquet` and `<name>_<step>.jsonl` into `folder`, without credentials.

    A kill leaves the former files or these, never half of one.

    Args:
        folder: Made if need be.
        episodes: What was played.
        name: Small letters, such as `evaluation` or `train`.
        step: Optimizer step, 0 outside of training.

    Returns:
        The Parquet file.

    Raises:
        ValueError: If `name` is of another form.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"name must be small letters from a to z, got {name!r}")
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_row(episode) for episode in episodes]
    table = pa.Table.from_pylist([_flat(row) for row in rows], SCHEMA)
    path = episodes_path(folder, name, step)
    write_json_lines(path.with_suffix(".jsonl"), rows)
    replace_whole(path, lambda file: pq.write_table(table, file, compression="zstd"))
    return path


def episodes_path(folder: Path, name: str = EVALUATION, step: int = 0) -> Path:
    """Where `save_episodes` writes; the JSONL is beside it."""
    return folder / f"{name}_{step:05d}.parquet"


def read_episodes(path: Path) -> list[PlayedEpisode]:
    """The episodes of a Parquet file that `save_episodes` wrote, and anybody may have changed.

    Raises:
        OSError, ValueError: If it cannot be read, or holds something else or nothing; one line that names the field.
    """
    return [_episode(row) for row in rows_of(_open(path), MAX_EPISODES)]


def read_outcomes(path: Path) -> list[tuple[tuple[str, int], list[bool]]]:
    """((task, seed), success of each member) of the groups of such a file, without its texts.

    Raises:
        OSError, ValueError: As `read_episodes`.
    """
    names = ("task", "group", "seed", "success")
    groups: dict[tuple[str, int], tuple[tuple[str, int], list[bool]]] = {}
    for row in rows_of(_open(path), MAX_EPISODES, names):
        if missing := [name for name in names if row[name] is None]:
            raise ValueError(f"{missing[0]} must not be missing")
        _, solved = groups.setdefault((row["task"], row["group"]), ((row["task"], row["seed"]), []))
        solved.append(row["success"])
    return list(groups.values())


def _open(path: Path) -> pq.ParquetFile:
    file = open_parquet(path)
    if not 0 < file.metadata.num_rows <= MAX_EPISODES:
        raise ValueError(f"episodes must be 1 to {MAX_EPISODES}, got {file.metadata.num_rows}")
    if file.schema_arrow.remove_metadata() != SCHEMA:
        wrong = [name for name in SCHEMA.names if name not in file.schema_arrow.names or not _same(file, name)]
        raise ValueError(f"columns must be {SCHEMA.names} of their types, got others: {wrong or 'too many'}")
    return file


def _same(file: pq.ParquetFile, name: str) -> bool:
    return bool(file.schema_arrow.field(name).type == SCHEMA.field(name).type)


def _spoken(play: Play) -> list[dict[str, Any]]:
    """What followed the prompt in the text protocol."""
    pairs = (("assistant", turn.text) for turn in play.turns), (("user", turn.reply) for turn in play.turns)
    return [
        {"role": role, "content": text} for pair in zip(*pairs, strict=True) for role, text in pair if text is not None
    ]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(str(part["text"]) if part.get("type") == "text" else PICTURE for part in content)
    kept = {"role": str(message["role"]), "content": content}
    for name in ("reasoning_content", "thinking"):  # where a response parser has put the reasoning
        if message.get(name):
            kept["content"] = f"<think>{message[name]}</think>{content}"
    return {**kept, "tool_calls": message["tool_calls"]} if message.get("tool_calls") else kept


def _action(call: Mapping[str, Any]) -> str:
    """A tool call in the form of Python; what a model wrote may have another form."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return str(function or call)
    given = ", ".join(f"{name}={value!r}" for name, value in function["arguments"].items())
    return f"{function.get('name')}({given})"


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _row(episode: PlayedEpisode) -> dict[str, Any]:
    """A line of the JSONL file, in the order of `SCHEMA`."""
    values = asdict(episode)
    values["return"] = values.pop("episode_return")
    values["messages"] = without_credentials(json.loads(json.dumps(values["messages"], default=str)))
    values["turns"] = without_credentials(values["turns"])
    return _writable({name: values[name] for name in SCHEMA.names})


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """The same for Parquet, whose messages have the same fields in every row."""
    messages = [
        {**message, "tool_calls": json.dumps(message["tool_calls"])} if "tool_calls" in message else message
        for message in row["messages"]
    ]
    return {**row, "messages": messages}


def _writable(value: Any) -> Any:
    """Texts without halves of surrogate pairs, which a model may write and no file in UTF-8 can hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_writable(name): _writable(item) for name, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list) else value


def _episode(row: dict[str, Any]) -> PlayedEpisode:
    for name in SCHEMA.names:
        if row[name] is None and name != "return":
            raise ValueError(f"{name} must not be missing")
    for name, kind in (("messages", dict), ("turns", dict), ("boards", str)):
        if not all(isinstance(one, kind) for one in row[name]):
            raise ValueError(f"{name} must hold no empty value")
    row["episode_return"] = _finite(row.pop("return"))
    row["turns"] = [_read_turn(turn) for turn in row["turns"]]
    row["messages"] = [_read_message(message) for message in row["messages"]]
    return PlayedEpisode(**row)


def _read_turn(turn: dict[str, Any]) -> PlayedTurn:
    named = [action for action in turn["actions"] or () if action is not None]
    return PlayedTurn(named, bool(turn["valid"]), _finite(turn["reward"]))


def _read_message(message: dict[str, Any]) -> dict[str, Any]:
    kept = {"role": message["role"] or "", "content": message["content"] or ""}
    if not message["tool_calls"]:
        return kept
    try:
        return {**kept, "tool_calls": json.loads(message["tool_calls"])}
    except RecursionError as error:  # brackets nested without end
        raise ValueError("tool_calls must be JSON") from error
