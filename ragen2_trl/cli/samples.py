"""Completions that a diagnosis looks at: sampled now and saved as they come, or read from what was saved."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragen2_trl.cli.arguments import SamplingArguments
from ragen2_trl.columns import TURN_SAMPLES
from ragen2_trl.envs import Environment
from ragen2_trl.envs.mixture import AnyTask
from ragen2_trl.record.rows import ALLOWED, Row, find_files, read_table
from ragen2_trl.redaction import without_credentials
from ragen2_trl.rollouts.chat import Chat
from ragen2_trl.rollouts.context import ContextWindow, Trajectory, turn_samples
from ragen2_trl.rollouts.sampling import (
    LONGEST_TURN,
    OnToken,
    end_tokens,
    evaluation_mode,
    generator,
    sample_trajectories,
)
from ragen2_trl.saved_state import check_form, replace_whole
from ragen2_trl.text import Messages, flatten, with_text

COMPLETIONS_FILE, CONTROL_FILE = "completions.parquet", "completions_control.parquet"
WITHHELD = "the observation was withheld"
MAX_FILES = 8  # of a folder: a path that a figure can show


class OwnColumns(TypedDict):
    """What a table of our own has besides: the ids as they were sampled, so that scoring it again gives the same
    numbers."""

    group: int
    prompt_ids: list[int]
    completion_ids: list[int]
    env_mask: list[int]
    success: float | None
    clipped: float


TEXTS, OWN_COLUMNS = ("prompt", "completion"), tuple(OwnColumns.__annotations__)


@dataclass(frozen=True)
class Completions:
    """Completions of one policy.

    Args:
        label: Names them in the figure.
        prompt_ids: For each completion the token ids of its prompt.
        completion_ids: Their token ids.
        groups: For each completion the number of its group.
        masks: For each completion, 1 for each id that the model wrote and 0 for the others; `None` for all of them.
        step: Of the run that they are from, if they are from one.
        success: Share of the episodes that solved their task, where it is known.
        clipped_ratio: Share of the completions whose first turn was cut at the length limit, where it is known.
        turn_samples: For each completion the samples of its later turns, where turns had contexts of their own.
    """

    label: str
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    groups: list[int]
    masks: list[list[int] | None] = field(default_factory=list)
    step: int | None = None
    success: float | None = None
    clipped_ratio: float | None = None
    turn_samples: list[list[dict[str, Any]]] | None = None


def sample_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    env: AnyTask,
    arguments: SamplingArguments,
    folder: Path,
    tell: Callable[[str], None],
) -> Completions:
    """Completions of held-out tasks, as the very ids that were sampled; a group is a task.

    `completions.parquet` in `folder` holds, at any time, all that have been played.
    """
    done: list[dict[str, Any]] = []
    count = arguments.num_prompts * arguments.num_samples
    ends = end_tokens(model, tokenizer)
    splits = ContextWindow.of(**arguments.context_options).splits_episodes

    def keep(rows: Dataset, played: Sequence[Trajectory]) -> None:
        for prompt, trajectory in zip(rows["prompt"][:], played, strict=True):
            first = [*trajectory.env_mask, 0].index(0)
            done.append(
                {
                    "step": 0,
                    "prompt": prompt,
                    "completion": _messages(tokenizer, trajectory),
                    "group": len(done) // arguments.num_samples,
                    "prompt_ids": trajectory.prompt_ids,
                    "completion_ids": trajectory.completion_ids,
                    "env_mask": trajectory.env_mask,
                    "success": None if trajectory.play.failure else float(trajectory.play.outcome.success),
                    "clipped": float(trajectory.completion_ids[first - 1] not in ends) if first else 1.0,
                    **({TURN_SAMPLES: turn_samples(trajectory)} if splits else {}),
                }
            )
        save_rows(done, folder / COMPLETIONS_FILE)
        tell(f"Sampling: {len(done)} of {count} completions are in {COMPLETIONS_FILE}")

    sample_trajectories(
        model,
        tokenizer,
        env,
        **arguments.sampling,
        on_token=lambda now, most: tell(
            f"Sampling: {len(done)} of {count} completions, token {now} of up to {most} of the next"
        ),
        on_played=keep,
    )
    return _sample(env.name, done)


def sample_control(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    env: Environment,
    sample: Completions,
    arguments: SamplingArguments,
    folder: Path,
    tell: Callable[[str], None],
) -> Completions:
    """As many first turns, written to rules without a task, in the places of the completions of a sample.

    Scored under the prompts of the sample, they say how the instrument reads reasoning that cannot depend on them.
    """
    ends = end_tokens(model, tokenizer)
    chat = Chat(tokenizer, ends, forced_tag=env.forced_tag, **(arguments.sampling["chat_template_kwargs"] or {}))
    blank = chat.prompt_ids(env.prompt_without_observation)
    turn = env.max_turn_tokens if arguments.max_turn_tokens is None else arguments.max_turn_tokens
    limits = [limit for limit in (arguments.max_new_tokens, turn) if limit is not None]
    done: list[dict[str, Any]] = []
    on_token: OnToken = lambda now, most: tell(  # noqa: E731 - no name says more
        f"Control: {len(done)} of {len(sample.groups)} completions, token {now} of up to {most} of the next"
    )
    generate = generator(model, tokenizer, arguments.temperature, arguments.batch_size, ends, on_token)
    with evaluation_mode(model, arguments.seed + 1):
        while len(done) < len(sample.groups):
            size = min(arguments.batch_size, len(sample.groups) - len(done))
            answers, _ = generate([blank] * size, min(limits, default=LONGEST_TURN))
            for answer in answers:
                number = len(done)
                done.append(
                    {
                        "step": 0,
                        "prompt": tokenizer.decode(sample.prompt_ids[number]),
                        "completion": tokenizer.decode(answer, skip_special_tokens=True),
                        "group": sample.groups[number],
                        "prompt_ids": sample.prompt_ids[number],
                        "completion_ids": answer,
                        "env_mask": [1] * len(answer),
                        "success": None,
                        "clipped": float(answer[-1] not in ends),
                    }
                )
            save_rows(done, folder / CONTROL_FILE)
    return _sample(WITHHELD, done)


def save_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Without credentials in texts; ids stay. A kill leaves the former table or this one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([
        {**row, **{name: without_credentials(row[name]) for name in TEXTS}} for row in rows
    ])  # fmt: skip
    replace_whole(path, lambda file: pq.write_table(table, file))


def read_generations(path: Path, notes: list[str]) -> tuple[list[Path], list[list[Row]]]:
    """Up to `MAX_FILES` files of completions, evenly spaced, the last included, with their rows.

    Files that a step saved again, as it used them again, are left out.

    Args:
        path: See `find_files`.
        notes: Takes in what is left out, in words.

    Raises:
        ValueError: If there is no file, or one cannot be used; the message names it.
        OSError: If one cannot be read.
    """
    if not (files := find_files(path)):
        raise ValueError(f"completions={str(path)!r} holds no completions; allowed: {ALLOWED}")
    count = min(MAX_FILES, len(files))
    found: dict[Path, list[Row]] = {}
    former: list[tuple[Any, Any]] = []
    for number in reversed(range(count)):
        file = files[len(files) - 1 - number * (len(files) - 1) // max(1, count - 1)]
        rows = read_saved(file, notes)
        texts = [(row["prompt"], row["completion"]) for row in rows]
        if texts != former:
            found[file] = rows
        former = texts
    return list(found), list(found.values())


def read_saved(file: Path, notes: list[str] | None = None) -> list[Row]:
    """The rows of a file, with the text of messages' parts, which templates of language models do not take.

    Raises:
        ValueError: As `read_table`; also for pictures, and for ids that are none in a table of our own.
    """
    rows = read_table(file, notes, pictures=False)
    for row in rows:
        row |= {name: row[name] if isinstance(row[name], str) else with_text(row[name]) for name in TEXTS}
    if has_ids(rows):
        for place, row in enumerate(rows):
            own = {name: row[name] for name in OWN_COLUMNS if name in row}
            check_form(own, OwnColumns, f"row {place} of {file.name}:")
    return rows


def has_ids(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a table is one of our own, with the ids that were sampled."""
    return all(name in rows[0] for name in OWN_COLUMNS)


def read_sample(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]], label: str) -> Completions:
    """Completions of a table: by their ids where it has them, which are given `label`, else by their text."""
    return _sample(label, rows) if has_ids(rows) else tokenize_completions(tokenizer, rows)


def tokenize_completions(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]]) -> Completions:
    """Ids of TRL's text, as TRL makes them of prompts; identical prompts form a group."""
    prompt_ids, completion_ids = [], []
    for row in rows:
        if isinstance(row["prompt"], str):
            prompt_ids.append(tokenizer(row["prompt"])["input_ids"])
        else:
            prompt_ids.append(Chat(tokenizer).prompt_ids(row["prompt"]))
        completion_ids.append(tokenizer(first_turn_text(row["completion"]), add_special_tokens=False)["input_ids"])
    numbers: dict[tuple[int, ...], int] = {}
    groups = [numbers.setdefault(tuple(ids), len(numbers)) for ids in prompt_ids]
    step = rows[-1]["step"] or 0
    return Completions(f"step {step}", prompt_ids, completion_ids, groups, [None] * len(groups), step)


def first_turn_text(completion: Messages) -> str:
    """What the model wrote before anything answered it."""
    if isinstance(completion, str):
        return completion
    return flatten([message for message in completion if message["role"] == "assistant"][:1])


def _sample(label: str, rows: Sequence[Mapping[str, Any]]) -> Completions:
    def mean(name: str) -> float | None:
        values = [row[name] for row in rows if row[name] is not None]  # an episode that has failed has no success
        return sum(values) / len(values) if values else None

    ids = {name: [row[name] for row in rows] for name in ("prompt_ids", "completion_ids", "env_mask", "group")}
    return Completions(
        label,
        ids["prompt_ids"],
        ids["completion_ids"],
        ids["group"],
        ids["env_mask"],
        success=mean("success"),
        clipped_ratio=mean("clipped"),
        turn_samples=[row[TURN_SAMPLES] for row in rows] if TURN_SAMPLES in rows[0] else None,
    )


def _messages(tokenizer: PreTrainedTokenizerBase, trajectory: Trajectory) -> list[dict[str, str]]:
    """A completion to be read: what the model wrote and what the environment answered, in turn."""
    messages: list[dict[str, str]] = []
    if trajectory.turn_samples:
        for number, answer in enumerate(trajectory.answers):
            said = {"role": "assistant", "content": str(tokenizer.decode(answer, skip_special_tokens=True))}
            replies = [{"role": "user", "content": text} for text in trajectory.messages[number : number + 1]]
            messages += [said, *replies]
        return messages
    start = 0
    for place in range(1, len(trajectory.env_mask) + 1):
        if place == len(trajectory.env_mask) or trajectory.env_mask[place] != trajectory.env_mask[start]:
            text = str(tokenizer.decode(trajectory.completion_ids[start:place], skip_special_tokens=True))
            messages.append({"role": "assistant" if trajectory.env_mask[start] else "user", "content": text})
            start = place
    return messages
