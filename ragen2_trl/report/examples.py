"""Examples of what a run has written, to read side by side: completions and reasoning traces, cut for a page."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean, pvariance

from ragen2_trl.columns import GENERATION
from ragen2_trl.instrument.health import is_number
from ragen2_trl.record.files import UNREADABLE, unreadable
from ragen2_trl.record.rows import Row, read_table, reward_columns
from ragen2_trl.record.run import Run
from ragen2_trl.record.saved_measurement import SavedMeasurement, read_measurement
from ragen2_trl.record.settings import reward_weights_of
from ragen2_trl.text import Messages, message_text

MAX_CHARS = 1500  # of a text
MAX_PROMPTS, MAX_SHARED = 8, 4  # of a run, and of several runs together
MAX_GROUP = 8  # completions of a prompt: the best and the worst half of them
MAX_TRACES, MAX_RIVALS = 6, 3


@dataclass(frozen=True)
class Excerpt:
    """The beginning and the end of a text, and how many characters between them are left out."""

    head: str
    left_out: int = 0
    tail: str = ""


@dataclass(frozen=True)
class Completion:
    """A completion and what it earned.

    Args:
        text: Of one turn or of several.
        reward: Weighted sum of the reward functions; `None` where none of them gave a number.
        rewards: By reward function, if there are several.
    """

    text: Excerpt
    reward: float | None
    rewards: dict[str, float]


@dataclass(frozen=True)
class Group:
    """The completions of one prompt in the newest file of a run's completions.

    Args:
        prompt: In full.
        completions: Best to worst.
        size: Completions that the prompt has; `completions` may be fewer.
        mean: Of the rewards; `None` where there is none.
        variance: Of the rewards.
    """

    prompt: str
    completions: list[Completion]
    size: int
    mean: float | None
    variance: float


@dataclass(frozen=True)
class Candidate:
    """A prompt under which a reasoning trace was scored.

    Args:
        prompt: What tells it from the other prompts.
        logp: log p(Z given it), in nats per token of the trace.
        rank: 1 for the prompt that explains the trace best.
        role: `own prompt`, `other prompt` or `worst prompt`.
    """

    prompt: Excerpt
    logp: float
    rank: int
    role: str

    @property
    def probability(self) -> float:
        """Geometric mean of the probability of a token."""
        return math.exp(min(self.logp, 0.0))


@dataclass(frozen=True)
class ReasoningTrace:
    """A reasoning trace with the prompts that explain it: its own one, the best of the others, and the worst."""

    text: Excerpt
    candidates: list[Candidate]
    num_prompts: int


def excerpt(text: str, limit: int = MAX_CHARS) -> Excerpt:
    """The text, without its middle if it is longer than `limit` characters: the answer is at the end.

    >>> excerpt("abcdefghi", limit=3)
    Excerpt(head='ab', left_out=6, tail='i')
    """
    if len(text) <= limit:
        return Excerpt(text)
    tail = limit // 3
    return Excerpt(text[: limit - tail], len(text) - limit, text[len(text) - tail :])


def distinguishing(prompts: Iterable[str]) -> dict[str, str]:
    """For each prompt the lines that tell it from the others: those at the beginning and the end of all are left out.

    >>> distinguishing(["Find the goal.\\nP _ G", "Find the goal.\\nG _ P"])
    {'Find the goal.\\nP _ G': 'P _ G', 'Find the goal.\\nG _ P': 'G _ P'}
    """
    lines = {prompt: prompt.split("\n") for prompt in prompts}
    first = _common(lines.values())
    last = _common([split[first:][::-1] for split in lines.values()])
    return {prompt: "\n".join(split[first : len(split) - last]) or prompt for prompt, split in lines.items()}


def _common(texts: Iterable[Sequence[str]]) -> int:
    """Number of lines that all texts begin with."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)))


def read_groups(run: Run, problems: list[str]) -> list[Group]:
    """The groups of the newest completions that can be read, those whose rewards vary most first.

    Args:
        run: The run.
        problems: Takes in what cannot be read, in words.
    """
    for path in reversed(run.completions):
        try:
            rows = read_table(path, problems)
            rows = [row for row in rows if row[GENERATION] == rows[-1][GENERATION]]
            return sorted(_groups(rows, run, problems), key=lambda group: -group.variance)
        except UNREADABLE as error:
            problems.append(unreadable(path, error))
    return []


def read_measurements(run: Run, problems: list[str]) -> list[SavedMeasurement]:
    """The first and the last of the measurements that can be read; one, if there is no more, or none.

    Args:
        run: The run.
        problems: Takes in what cannot be read, in words.
    """
    last = _first_readable(run.measurements[::-1], problems)
    if last is None:
        return []
    first = _first_readable(run.measurements, problems)
    return [last] if first is None or first.step == last.step else [first, last]


def pick_traces(measurement: SavedMeasurement) -> list[ReasoningTrace]:
    """Reasoning traces, evenly from the one that its own prompt explains best to the one that it explains least."""
    per_token = measurement.cross_logps / measurement.lengths[:, None]
    short = distinguishing(measurement.prompts)
    scored = []
    for text, own, row in zip(measurement.traces, measurement.prompt_index.tolist(), per_token.tolist(), strict=True):
        logps: dict[str, float] = {}  # the best, of columns with the same prompt
        for prompt, logp in zip(measurement.prompts, row, strict=True):
            logps[prompt] = max(logp, logps.get(prompt, -math.inf))
        candidates = _candidates(logps, measurement.prompts[own], short)
        scored.append(ReasoningTrace(excerpt(text), candidates, len(short)))
    scored.sort(key=lambda one: (one.candidates[0].rank, one.candidates[1].logp - one.candidates[0].logp))
    count = min(MAX_TRACES, len(scored))
    return [scored[i * (len(scored) - 1) // max(1, count - 1)] for i in range(count)]


def _candidates(logps: Mapping[str, float], own: str, short: Mapping[str, str]) -> list[Candidate]:
    def candidate(prompt: str, role: str) -> Candidate:
        rank = 1 + sum(other > logps[prompt] for other in logps.values())
        return Candidate(excerpt(short[prompt], MAX_CHARS // 3), logps[prompt], rank, role)

    others = sorted((prompt for prompt in logps if prompt != own), key=lambda prompt: -logps[prompt])
    found = [candidate(own, "own prompt"), *(candidate(prompt, "other prompt") for prompt in others[:MAX_RIVALS])]
    return found + [candidate(prompt, "worst prompt") for prompt in others[MAX_RIVALS:][-1:]]


def _first_readable(paths: Sequence[Path], problems: list[str]) -> SavedMeasurement | None:
    for path in paths:
        try:
            measurement = read_measurement(path)
            _check(measurement)
            return measurement
        except UNREADABLE as error:
            if (problem := unreadable(path, error)) not in problems:
                problems.append(problem)
    return None


def _check(measurement: SavedMeasurement) -> None:
    rows, columns = len(measurement.traces), len(measurement.prompts)
    for name, shape in (("cross_logps", (rows, columns)), ("lengths", (rows,)), ("prompt_index", (rows,))):
        if (found := tuple(getattr(measurement, name).shape)) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {found}")
    if not all(isinstance(text, str) for text in (*measurement.prompts, *measurement.traces)):
        raise ValueError("prompts and traces must be texts")
    if not rows or len(set(measurement.prompts)) < 2:
        raise ValueError("there must be at least one reasoning trace and two distinct prompts")
    if not measurement.cross_logps.isfinite().all():
        raise ValueError("cross_logps must be finite")
    if measurement.lengths.min() < 1:
        raise ValueError("lengths must be at least 1")
    if measurement.prompt_index.min() < 0 or measurement.prompt_index.max() >= columns:
        raise ValueError(f"prompt_index must be between 0 and {columns - 1}")
    if measurement.scores.dim() != 1:
        raise ValueError(f"scores must have shape (groups,), got {tuple(measurement.scores.shape)}")
    if measurement.kept is not None and measurement.kept.shape != measurement.scores.shape:
        raise ValueError("kept must have as many values as scores")
    for name in ("retrieval_accuracy", "retrieval_chance"):
        if not is_number(measurement.metrics.get(name)):
            raise ValueError(f"metrics must hold the number {name}")


def _groups(rows: Sequence[Row], run: Run, problems: list[str]) -> list[Group]:
    logged = {key.split("/")[1] for row in run.rows for key in row if key.startswith("rewards/")}
    names = reward_columns(rows[0], logged)
    weights = _weights(names, run, problems)
    by_prompt: dict[str, list[Completion]] = {}
    for row in rows:
        rewards = {name: row[name] for name in names if is_number(row.get(name))}
        total = sum(weight * rewards[name] for name, weight in zip(names, weights, strict=True) if name in rewards)
        completion = Completion(
            excerpt(as_text(row["completion"])),
            total if rewards else None,
            rewards if len(names) > 1 else {},
        )
        by_prompt.setdefault(as_text(row["prompt"]), []).append(completion)
    return [_group(prompt, completions) for prompt, completions in by_prompt.items()]


def _group(prompt: str, completions: list[Completion]) -> Group:
    ranked = sorted(completions, key=lambda one: -math.inf if one.reward is None else one.reward, reverse=True)
    half = MAX_GROUP // 2
    shown = ranked if len(ranked) <= MAX_GROUP else ranked[:half] + ranked[-half:]
    rewards = [one.reward for one in ranked if one.reward is not None]
    mean, variance = (fmean(rewards), pvariance(rewards)) if rewards else (None, 0.0)
    return Group(prompt, shown, len(ranked), mean, variance)


def _weights(names: Sequence[str], run: Run, problems: list[str]) -> list[float]:
    weights = reward_weights_of(run.settings, names)
    if weights is None and (given := run.settings.get("reward_weights")):
        problems.append(
            f"reward_weights {str(given)[:200]} do not fit the rewards that were saved with the completions "
            f"({', '.join(names) or 'none'}): their sums are shown with equal weights."
        )
    return weights or [1.0] * len(names)


def as_text(messages: Messages) -> str:
    """A prompt or a completion as one text, with the role above each message where there are several.

    >>> as_text([{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Up."}])
    '[user]\\nWhere?\\n[assistant]\\nUp.'
    """
    if isinstance(messages, str):
        return messages
    texts = []
    for message in messages:
        calls = message.get("tool_calls")
        said = message_text(message) + (json.dumps(calls) if calls else "")
        texts.append(said if len(messages) == 1 else f"[{message.get('role')}]\n{said}")
    return "\n".join(texts)
