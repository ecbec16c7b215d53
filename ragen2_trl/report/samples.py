"""Four texts that a run has written, to read side by side: early and late, one that went well and one that did not."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen2_trl.columns import GENERATION
from ragen2_trl.instrument.health import is_number
from ragen2_trl.record.files import EPISODES, EVALUATION, TRAINING, UNREADABLE, measured_step, numbered, unreadable
from ragen2_trl.record.rows import read_table, reward_columns
from ragen2_trl.record.run import Run
from ragen2_trl.record.saved_episodes import read_episodes
from ragen2_trl.record.settings import reward_weights_of
from ragen2_trl.text import message_text

MAX_CHARS = 3000  # of a text


@dataclass(frozen=True)
class Excerpt:
    """The beginning and the end of a text, and how many characters between them are left out."""

    head: str
    left_out: int = 0
    tail: str = ""


@dataclass(frozen=True)
class Sample:
    """A completion, or an episode, as the page shows it.

    Args:
        when: Of which step it is; empty for a file without one.
        earned: What came of it, in words.
        text: All that followed the prompt.
    """

    when: str
    earned: str
    text: Excerpt


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, early ones first."""

    prompt: Excerpt
    samples: list[Sample]


@dataclass(frozen=True)
class _Text:
    """A completion or an episode of a file; `rank` orders those of a prompt, the better the higher."""

    prompt: str
    text: str
    rank: float
    earned: str


def excerpt(text: str, limit: int = MAX_CHARS) -> Excerpt:
    """The text, without its middle if it is longer than `limit` characters: the answer is at the end.

    >>> excerpt("abcdefghi", limit=3)
    Excerpt(head='ab', left_out=6, tail='i')
    """
    if len(text) <= limit:
        return Excerpt(text)
    tail = limit // 3
    return Excerpt(text[: limit - tail], len(text) - limit, text[len(text) - tail :])


def pick_samples(run: Run, problems: list[str]) -> list[Group]:
    """Of the first and of the last file that can be read the best and the worst of a prompt: of one that both have,
    where there is such a prompt, else of the one whose rewards lie furthest apart.

    Args:
        run: The run.
        problems: Takes in what cannot be read, in words.
    """
    paths = files_of(run)
    late = _first_readable(paths[::-1], run, problems)
    early = _first_readable(paths[: paths.index(late[0])] if late else [], run, problems)
    ends = [_by_prompt(texts) for _, texts in filter(None, (early, late))]
    shared = set.intersection(*map(set, ends)) if ends else set()
    groups: dict[str, list[Sample]] = {}
    for file, texts in zip(filter(None, (early, late)), ends, strict=True):
        prompt = max(sorted(shared or texts), key=lambda prompt: sum(_spread(end.get(prompt, ())) for end in ends))
        step = measured_step(file[0])
        groups.setdefault(prompt, []).extend(
            Sample("" if step is None or run.is_played else f"step {step}", one.earned, excerpt(one.text))
            for one in dict.fromkeys((texts[prompt][0], texts[prompt][-1]))
        )
    return [Group(excerpt(prompt), samples) for prompt, samples in groups.items()]


def files_of(run: Run) -> list[Path]:
    """Where a run keeps its texts, by step: episodes of evaluations, else of training, else completions."""
    folder = run.folder if run.is_played else run.folder / EPISODES
    kept = (numbered(folder, name, ".jsonl", run.step) for name in (EVALUATION, TRAINING))
    return next(filter(None, (*kept, run.completions)), [])


def _first_readable(paths: Sequence[Path], run: Run, problems: list[str]) -> tuple[Path, list[_Text]] | None:
    for path in paths:
        try:
            texts = _completions(path, run, problems) if path in run.completions else _episodes(path)
        except UNREADABLE as error:
            if (problem := unreadable(path, error)) not in problems:
                problems.append(problem)
            continue
        if texts:
            return path, texts
    return None


def _episodes(path: Path) -> list[_Text]:
    found = []
    for one in read_episodes(path):
        said = next((n for n, message in enumerate(one.messages) if message["role"] == "assistant"), len(one.messages))
        earned = f"{'solved' if one.success else 'not solved'}, return {_number(one.episode_return)}"
        found.append(_Text(as_text(one.messages[:said]), as_text(one.messages[said:]), float(one.success), earned))
    return found


def _completions(path: Path, run: Run, problems: list[str]) -> list[_Text]:
    """Those of the last generation of a file."""
    rows = read_table(path, problems)
    rows = [row for row in rows if row[GENERATION] == rows[-1][GENERATION]]
    logged = {key.split("/")[1] for row in run.rows for key in row if key.startswith("rewards/")}
    names = reward_columns(rows[0], logged)
    weights = reward_weights_of(run.settings, names) or [1.0] * len(names)
    found = []
    for row in rows:
        known = [weight * row[name] for name, weight in zip(names, weights, strict=True) if is_number(row.get(name))]
        earned = f"reward {_number(sum(known) if known else None)}"
        rank = sum(known) if known else -math.inf
        found.append(_Text(as_text(row["prompt"]), as_text(row["completion"]), rank, earned))
    return found


def _by_prompt(texts: Sequence[_Text]) -> dict[str, list[_Text]]:
    """The texts of each prompt, the best first."""
    groups: dict[str, list[_Text]] = {}
    for one in sorted(texts, key=lambda one: -one.rank):
        groups.setdefault(one.prompt, []).append(one)
    return groups


def _spread(texts: Sequence[_Text]) -> float:
    ranks = [one.rank for one in texts if math.isfinite(one.rank)]
    return max(ranks) - min(ranks) if ranks else 0.0


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def as_text(messages: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt or a completion as one text, with the role above each message where there are several.

    >>> as_text([{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Up."}])
    '[user]\\nWhere?\\n[assistant]\\nUp.'
    """
    if isinstance(messages, str):
        return messages
    texts = [
        message_text(one) + (json.dumps(one["tool_calls"], default=str) if one.get("tool_calls") else "")
        for one in messages
    ]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"[{one['role']}]\n{text}" for one, text in zip(messages, texts, strict=True))
