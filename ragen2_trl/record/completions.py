"""Completions and rewards of a training as groups: from TRL's parquet, verl's dumps, JSONL, CSV or our own record.

Nothing is unpickled and nothing is evaluated. Of the texts only lengths and the beginning of each prompt are kept, so
that a log may be larger than the memory of the machine.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragen2_trl.columns import GENERATION
from ragen2_trl.instrument.health import COUNT, SAME, is_number
from ragen2_trl.messages import counted
from ragen2_trl.metrics import GENERATION as LOGGED_GENERATION
from ragen2_trl.record.files import STATE_FILE, measured_step, read_json
from ragen2_trl.record.group_rewards import read_group_rewards
from ragen2_trl.record.rows import (
    ALLOWED,
    MAX_ROWS,
    TABLES,
    NoCompletionsError,
    Row,
    find_files,
    number,
    read_rows,
    reward_columns,
)
from ragen2_trl.record.run import read_run
from ragen2_trl.record.settings import reward_weights_of, steps_per_generation
from ragen2_trl.text import flatten

Floats = NDArray[np.float64]
Count = Callable[[Any, Any], tuple[int, int]]
"""From a prompt and a completion, text or messages each, to their tokens."""

MAX_GROUP = 1024  # completions of a prompt
BEGINNING = 200  # characters of each prompt that are kept to show it
ASSUMED_GROUPS = 8  # of a generation, where rows have no steps to tell it by
SAMPLERS = ("snr_dynamic_sampling_rounds", "snr_pilot_generations", "snr_prompt_selection")


@dataclass(frozen=True)
class CompletionLog:
    """The whole groups of a log, N of them, each of G completions of one prompt in one generation.

    Args:
        name: Of the file or folder, as it was given.
        steps: (N,) first optimizer step with them in its log, rising.
        prompts: (N,) number of the prompt; equal prompts have equal numbers.
        rewards: (N, G) weighted reward sums, NaN where there is none.
        by_function: For each reward function its (N, G) rewards before weights.
        advantages: (N, G) as TRL logged them; `None` where the log has none.
        lengths: (N, G) length of each completion in tokens, or in characters before calibration.
        prompt_lengths: (N,) the same of each prompt; `None` with `lengths`.
        unit: `tokens` (counted), `estimated tokens` (characters, scaled by the logged mean length) or `characters`;
            empty without texts.
        beginnings: Of the text of each prompt by its number; model input, so hostile until it is escaped.
        sampled: (N,) number of the generation, by which its groups follow one another; `None` where the log has none.
        groups_per_generation: Groups of a generation.
        micro_batch: Completions of a micro-batch of a process; `None` where the log does not tell.
        history: Rows of the trainer's log.
        knows_prompts: Whether `prompts` tells which groups have the same prompt.
        notes: What was read, and what was left out.
    """

    name: str
    steps: NDArray[np.int64]
    prompts: NDArray[np.int64]
    rewards: Floats
    by_function: dict[str, Floats] = field(default_factory=dict)
    advantages: Floats | None = None
    lengths: Floats | None = None
    prompt_lengths: Floats | None = None
    unit: str = ""
    beginnings: Sequence[str] = ()
    sampled: NDArray[np.int64] | None = None
    groups_per_generation: int = ASSUMED_GROUPS
    micro_batch: int | None = None
    history: Sequence[Mapping[str, Any]] = ()
    knows_prompts: bool = True
    notes: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def size(self) -> int:
        """G."""
        return int(self.rewards.shape[1])

    @property
    def rows(self) -> list[dict[str, float]]:
        """What a trainer logs of these rewards, a row for each step: the keys that `health` reads."""
        rows = []
        for place, step in enumerate(np.unique(self.steps).tolist(), start=1):
            rewards = self.rewards[self.steps == step]
            rewards = rewards[~np.isnan(rewards).all(axis=1)]
            if len(rewards):
                equal = np.nanmax(rewards, axis=1) - np.nanmin(rewards, axis=1) <= SAME
                row = {LOGGED_GENERATION: place, COUNT: (~np.isnan(rewards)).sum(), "reward": np.nanmean(rewards)}
                row |= {"reward_std": np.nanstd(rewards), "frac_reward_zero_std": equal.mean()}
                rows.append({"step": step} | {key: float(value) for key, value in row.items()})
        return rows

    @property
    def generations(self) -> NDArray[np.int64]:
        """(N,) running number of each group's generation: as it was logged, else consecutive groups of a step."""
        starts = np.r_[True, self.steps[1:] != self.steps[:-1]]
        if self.sampled is not None:
            return np.cumsum(starts | np.r_[True, self.sampled[1:] != self.sampled[:-1]]) - 1
        place = np.arange(len(self)) - np.flatnonzero(starts)[np.cumsum(starts) - 1]
        new = starts | (place % self.groups_per_generation == 0)
        return np.cumsum(new) - 1


class _Completion(NamedTuple):
    """What is kept of a completion; lengths of the prompt and of the completion."""

    step: int | None
    generation: int | None
    prompt: int
    lengths: tuple[int, int]
    rewards: tuple[float, ...]
    advantage: float


def read_completion_log(
    path: Path,
    *,
    num_generations: int | None = None,
    groups_per_generation: int | None = None,
    rewards: Sequence[str] = (),
    reward_weights: Sequence[float] = (),
    count: Count | None = None,
) -> CompletionLog:
    """The groups of a log: equal prompts of one step, or that follow one another where rows have no step.

    Args:
        path: The `output_dir` of a run, TRL's or ours, a folder of completions, or one file of them.
        num_generations: G; by default the commonest number of completions of a prompt in a step.
        groups_per_generation: Groups of a generation; by default the commonest number of a step.
        rewards: Columns that hold the rewards of one reward function each; by default the functions that the trainer's
            log names, or `reward`, or every column of numbers.
        reward_weights: One for each of `rewards`, or for each column of rewards in its order, which is that of TRL's
            `reward_funcs`; by default those of a run of ours, else 1.
        count: Counts the tokens of a prompt and a completion; by default characters stand for them.

    Raises:
        NoCompletionsError: If there are none.
        ValueError: If a value is of another kind, or no group is whole; one line that names file, row and what is
            needed.
        OSError: If a file cannot be read.
    """
    for name, value, least in (("num_generations", num_generations, 2), ("groups", groups_per_generation, 1)):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value!r}")
    notes: list[str] = []
    history, state, settings, end = _history(path, notes)
    files = find_files(path)
    if not files:
        groups = groups_per_generation or _groups_of(settings)
        return _recorded(path, history, num_generations, groups, notes)
    functions = [key.split("/")[1] for row in history for key in row if re.fullmatch(r"rewards/[^/]+/mean", key)]
    if later := [file for file in files if end is not None and (measured_step(file) or 0) > end]:
        notes.append(f"Left out: {counted(len(later), 'file')} of another training, after the last step, {end}.")
        files = [file for file in files if file not in later]
    reader = _Reader(history, rewards, functions, count, notes)
    reader.read(files)
    if not (names := reader.names) or not reader.kept:
        raise ValueError(f"{str(path)!r} holds no completions; allowed: {ALLOWED}. {' '.join(notes)}".rstrip())
    of_run = reward_weights_of(settings, names)
    weights = list(reward_weights) or of_run or [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(
            f"reward_weights must be {len(names)} numbers, one for each of {', '.join(names)}, got {len(weights)}"
        )
    known = num_generations or _whole(settings.get("num_generations"))
    log = _grouped(str(path), reader.kept, reader.beginnings, names, weights, known, groups_per_generation, notes)
    if sampled := [name for name in SAMPLERS if settings.get(name)]:
        notes.append(f"The run chose its prompts ({', '.join(sampled)}): shares here are those of the chosen ones.")
    if not set(functions) & set(names) and len(names) > 1 and not rewards:
        notes.append(f"Columns of numbers are taken as rewards: {', '.join(names)}; --rewards names others.")
    if len(names) > 1 and (reward_weights or of_run is None):  # only our runs save theirs
        notes += _weights_said(log, weights, bool(reward_weights), history)
    micro = _whole(state.get("train_batch_size")) or _whole(settings.get("per_device_train_batch_size"))
    notes += _generations_said(log, history, settings, reader.repeated)
    return _calibrated(log, history, micro, count is not None, notes)


class _Reader:
    """Takes in files of completions, each generation once.

    Args:
        history: Rows of the trainer's log.
        wanted: Columns of rewards that were named; else the first row says which they are.
        functions: Reward functions that the log names.
        count: Counts tokens; `None` for characters.
        notes: Receives a sentence for everything that is left out.
    """

    def __init__(
        self,
        history: Sequence[Mapping[str, Any]],
        wanted: Sequence[str],
        functions: Sequence[str],
        count: Count | None,
        notes: list[str],
    ):
        self.wanted, self.functions, self.count, self.notes = wanted, functions, count, notes
        self.evaluated = {row.get("step") for row in history if any(str(key).startswith("eval_reward") for key in row)}
        self.generated = {row.get("step") for row in history if "reward" in row}  # TRL logs it where it has sampled
        self.names: list[str] = []  # columns of rewards
        self.kept: list[_Completion] = []
        self.numbers: dict[bytes, int] = {}  # of distinct prompts, and how each begins
        self.beginnings: list[str] = []
        self.repeated = 0  # files that saved a generation again

    def read(self, files: Sequence[Path]) -> None:
        left, marks = 0, list[int | bytes]()
        for file in files:
            rows = islice(read_rows(file, self.notes), MAX_ROWS - len(self.kept))
            try:
                found = [self._completion(row, f"row {place} of {file.name}") for place, row in enumerate(rows)]
            except OSError as error:  # half a file, as a kill leaves it
                if len(files) == 1:
                    raise
                self.notes.append(f"{file.name} is left out: {' '.join(str(error).split())[:200]}.")
                continue
            before, marks = marks if file.suffix in TABLES else [], [mark for _, mark in found]
            if (step := measured_step(file)) in self.evaluated:
                left += 1  # TRL writes the file of a step again after an evaluation, with completions of that
                continue
            gone = _again(marks, before, step in self.generated)
            self.repeated += bool(marks) and all(gone)
            self.kept += [one for (one, _), is_gone in zip(found, gone, strict=True) if not is_gone]
            if len(self.kept) >= MAX_ROWS:
                self.notes.append(
                    f"The first {MAX_ROWS:,} completions are read, up to {file.name}; the rest is left out."
                )
                break
        if left:
            count = counted(left, "file")
            self.notes.append(f"Left out: {count} of steps with an evaluation, which overwrites completions.")

    def _completion(self, row: Row, where: str) -> tuple[_Completion, int | bytes]:
        """A completion with the mark that tells its generation, see `_again`."""
        self.names = self.names or self._reward_names(row, where)
        prompt, answer, generation = row["prompt"], row["completion"], row[GENERATION]
        text = flatten(prompt, joint="\n")
        place = self.numbers.setdefault(_hash(prompt), len(self.numbers))
        if place == len(self.beginnings):
            self.beginnings.append(text[:BEGINNING])
        lengths = (len(text), len(flatten(answer, joint="\n"))) if self.count is None else self.count(prompt, answer)
        rewards = tuple(number(name, row.get(name), where) for name in self.names)
        advantage = number("advantage", row.get("advantage"), where)
        mark = _hash([place, answer, rewards]) if generation is None else generation
        return _Completion(row["step"], generation, place, lengths, rewards, advantage), mark

    def _reward_names(self, row: Row, where: str) -> list[str]:
        if lacking := [name for name in self.wanted if name not in row]:
            allowed = ", ".join(reward_columns(row))
            raise ValueError(f"{where} has no column {lacking[0]!r}; allowed for rewards: {allowed}")
        found = [*self.wanted] or reward_columns(row, self.functions)
        if not found:
            raise ValueError(f"{where} must have reward, a number, got the columns {', '.join(map(str, row))[:200]}")
        return found


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _groups_of(settings: Mapping[str, Any]) -> int | None:
    """Groups of a generation of a run of ours; `None` where its settings do not tell."""
    names = ("per_device_train_batch_size", "processes", "steps_per_generation", "num_generations")
    values = [_whole(settings.get(name)) or 0 for name in names]
    return (math.prod(values[:3]) // values[3] or None) if values[3] else None


def _again(marks: Sequence[int | bytes], before: Sequence[int | bytes], has_sampled: bool) -> list[bool]:
    """Which rows of a file stand in the file before it, too: TRL saves a generation at each step that uses it.

    Args:
        marks: For each row the number of its generation; where it has none, a hash of the row.
        before: Of the rows of the file before it.
        has_sampled: Whether the log says that a generation was sampled since then.
    """
    if all(isinstance(mark, int) for mark in marks):
        known = set(before)
        return [mark in known for mark in marks]
    return [marks == before and not has_sampled] * len(marks)


def _history(
    path: Path, notes: list[str]
) -> tuple[list[dict[str, Any]], Mapping[str, Any], Mapping[str, Any], int | None]:
    """Log rows, newest trainer state and settings of the run at a path, and its last step if it has ended; empty where
    it has none."""
    for folder in (path, path.parent):
        states = sorted(folder.glob(f"checkpoint-*/{STATE_FILE}")) if folder.is_dir() else []
        found = [read_json(file, dict) or {} for file in (*states, folder / STATE_FILE)]
        state = max(found, key=lambda one: _whole(one.get("global_step")) or 0)
        try:
            run = read_run(folder)
            return list(run.log_history), state, run.settings, run.step if run.ended and run.log_history else None
        except (ValueError, OSError) as error:
            if (folder / STATE_FILE).is_file():  # otherwise a folder of completions alone
                notes.append(" ".join(str(error).split())[:200])
    return [], {}, {}, None


def _hash(value: Any) -> bytes:
    """Of messages the same in whatever order their keys come."""
    return sha256(json.dumps(value, sort_keys=True, default=str).encode()).digest()


def _grouped(
    name: str,
    rows: Sequence[_Completion],
    beginnings: Sequence[str],
    names: Sequence[str],
    weights: Sequence[float],
    size: int | None,
    groups: int | None,
    notes: list[str],
) -> CompletionLog:
    """Whole groups of the rows. Those of a prompt in a generation that are no multiple of G are left out."""
    prompts = np.array([row.prompt for row in rows], dtype=np.int64)
    has_steps, has_numbers = (all(getattr(row, key) is not None for row in rows) for key in ("step", "generation"))
    if has_steps:
        steps = np.array([row.step for row in rows], dtype=np.int64)
        sampled = np.array([row.generation for row in rows], dtype=np.int64) if has_numbers else 0 * steps
        order = np.lexsort((np.arange(len(steps)), prompts, sampled, steps))
    else:  # equal prompts that follow one another
        steps = np.cumsum(np.r_[False, prompts[1:] != prompts[:-1]]).astype(np.int64)
        sampled, order = 0 * steps, np.arange(len(steps))
    units = np.stack([steps, sampled, prompts])[:, order]
    bounds = np.r_[0, 1 + np.flatnonzero((units[:, 1:] != units[:, :-1]).any(axis=0)), len(order)]
    counts = np.diff(bounds)
    if size is None:
        size = max(Counter(counts.tolist()).items(), key=lambda pair: (pair[0] * pair[1], -pair[0]))[0]
    if size > MAX_GROUP:
        raise ValueError(f"num_generations must be at most {MAX_GROUP}, got {size}")
    whole = [order[start : start + size * (n // size)] for start, n in zip(bounds[:-1], counts, strict=True)]
    members = np.concatenate(whole).reshape(-1, size)
    if size < 2 or not len(members):
        raise ValueError(
            f"{name!r} has no whole group in {counted(len(prompts), 'row')}: no prompt has {max(2, size)} completions "
            f"in a step (most: {counts.max()}); set num_generations"
        )
    first = members[:, 0]
    members = members[np.lexsort((first, sampled[first], steps[first]))]  # generations are consecutive in a log
    if left := len(prompts) - members.size:
        notes.append(f"Left out: {left} of {len(prompts)} completions, which fill no group of {size} in a step.")
    of_groups = steps[members[:, 0]]
    if groups is None:
        of_generations = zip(of_groups.tolist(), sampled[members[:, 0]].tolist(), strict=True)
        in_steps = Counter(Counter(of_generations).values())
        groups = max(in_steps.items(), key=lambda pair: (pair[1], pair[0]))[0] if has_steps else ASSUMED_GROUPS
        if not has_steps:
            notes.append(f"Rows have no step: a generation is taken as {counted(groups, 'group')}; --groups sets it.")
    if not has_steps:
        of_groups = np.arange(len(members)) // groups
    values = np.array([row.rewards for row in rows], dtype=np.float64)[members]  # (N, G, F)
    known = ~np.isnan(values)
    sums = (np.where(known, values, 0.0) * np.array(weights)).sum(axis=2)
    advantages = np.array([row.advantage for row in rows])[members]
    lengths = np.array([row.lengths for row in rows], dtype=np.float64)[members]
    return CompletionLog(
        name,
        of_groups,
        prompts[members[:, 0]],
        np.where(known.any(axis=2), sums, np.nan),
        {one: values[:, :, column] for column, one in enumerate(names)},
        None if np.isnan(advantages).all() else advantages,
        lengths[:, :, 1],
        lengths[:, 0, 0],
        "characters",
        beginnings,
        sampled[members[:, 0]] if has_steps and has_numbers else None,
        groups,
    )


def _weights_said(
    log: CompletionLog, weights: Sequence[float], are_given: bool, history: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What must be known of weights that the run has not saved: whether they give the mean reward that was logged."""
    names = [*log.by_function]
    keys = ["reward", *(f"rewards/{name}/mean" for name in names)]
    # A KL penalty may be part of RLOO's reward, and the mean of sums is no sum of means where some are missing.
    known = [] if np.isnan([*log.by_function.values()]).any() else history
    logged = [[row.get(key) for key in keys] for row in known if "kl" not in row]
    means = np.array([row for row in logged if all(map(is_number, row))], dtype=np.float64).reshape(-1, len(keys))
    sums = means[:, 1:] * weights
    if len(means) and (np.abs(sums.sum(axis=1) - means[:, 0]) <= 1e-3 * np.abs(sums).sum(axis=1)).all():
        return []
    order = ", ".join(names)
    if len(means):
        which = f"With weights of {', '.join(f'{one:g}' for one in weights)}"
        return [f"{which} rewards do not sum to the mean that was logged: --reward_weights gives others, for {order}."]
    return [] if are_given else [f"Rewards are summed with weights of 1; --reward_weights gives others, for {order}."]


def _generations_said(
    log: CompletionLog, history: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], repeated: int
) -> list[str]:
    """How much of the run its completions are of: TRL saves the latest generation of each logging step.

    Args:
        log: Each generation once.
        history: Rows of the trainer's log.
        settings: Of the run; empty for a run of TRL.
        repeated: Steps that saved a generation again.
    """
    last = max((row["step"] for row in history if _whole(row.get("step"))), default=0)
    read = int(log.generations[-1]) + 1
    if each := steps_per_generation(settings):
        total = -(-last // each)
        lost = f"{read} of {total} generations are read: TRL saves the latest one at each logging step."
        return [lost] if read < total else []
    steps = len(np.unique(log.steps))
    if last > steps + repeated:
        return [f"TRL saves completions at logging steps alone: here, {steps + repeated} of {last} steps."]
    if several := len(_steps_of_several(log, history)):
        return [
            f"{read} of at least {read + several} generations are read: TRL saves the latest one of a step, and at "
            f"{several} of {steps} steps the mean rewards of more were logged."
        ]
    return []


def _steps_of_several(log: CompletionLog, history: Sequence[Mapping[str, Any]]) -> set[int]:
    """Steps whose logged mean rewards are not those of their completions: of the latest of several generations."""
    found = set()
    for row in history:
        here = log.steps == row.get("step")
        for name, rewards in log.by_function.items():
            mean = row.get(f"rewards/{name}/mean")
            if is_number(mean) and here.any() and not math.isclose(
                float(np.nanmean(rewards[here])), mean, rel_tol=1e-4, abs_tol=1e-6
            ):  # fmt: skip
                found.add(row["step"])
    return found


def _calibrated(
    log: CompletionLog,
    history: Sequence[Mapping[str, Any]],
    micro: int | None,
    counted: bool,
    notes: Sequence[str],
) -> CompletionLog:
    """The log with lengths in tokens: counted, or characters scaled by the mean length that the trainer logged."""
    log = replace(log, micro_batch=micro, history=list(history), notes=list(notes))
    assert log.lengths is not None and log.prompt_lengths is not None  # of texts
    if counted:  # a completion that was cut has no end token
        longest = [row["completions/max_length"] for row in history if is_number(row.get("completions/max_length"))]
        return replace(log, lengths=np.minimum(log.lengths, max(longest, default=math.inf)), unit="tokens")
    means = {
        row["step"]: row["completions/mean_length"]
        for row in history
        if _whole(row.get("step")) and is_number(row.get("completions/mean_length"))
    }
    here = np.isin(log.steps, [*means])
    characters = log.lengths[here].mean() if here.any() else 0.0
    if not characters:
        return log
    scale = float(np.mean([means[step] for step in log.steps[here].tolist()]) / characters)
    prompts = log.prompt_lengths * (_prompt_scale(log, history, means) or scale)
    return replace(log, lengths=log.lengths * scale, prompt_lengths=prompts, unit="estimated tokens")


def _prompt_scale(
    log: CompletionLog, history: Sequence[Mapping[str, Any]], means: Mapping[int, float]
) -> float | None:
    """Tokens of a prompt for each of its characters, chat template included: what TRL's count of all tokens grows by
    in a step, less the completions; `None` where logged steps do not follow one another."""
    assert log.prompt_lengths is not None  # of texts
    totals = {row["step"]: row["num_tokens"] for row in history if is_number(row.get("num_tokens")) and "step" in row}
    tokens, characters, several = 0.0, 0.0, _steps_of_several(log, history)
    for step in np.unique(log.steps).tolist():
        if step in several or step not in means or step not in totals or (step > 1 and step - 1 not in totals):
            continue
        here = log.steps == step
        of_prompts = totals[step] - totals.get(step - 1, 0) - means[step] * here.sum() * log.size
        if of_prompts > 0:  # else no generation of its own, as with several updates for each
            tokens, characters = tokens + of_prompts, characters + log.prompt_lengths[here].sum() * log.size
    return tokens / characters if characters else None


def _recorded(
    path: Path,
    history: Sequence[Mapping[str, Any]],
    size: int | None,
    groups: int | None,
    notes: list[str],
) -> CompletionLog:
    """The rewards that a run of ours has recorded, which tell neither prompts nor lengths."""
    recorded = [(record.step, group) for record in read_group_rewards(path) for group in record.rewards]
    if not recorded:
        raise NoCompletionsError(
            f"{str(path)!r} holds no completions; allowed: {ALLOWED}. TRL writes them with log_completions=True"
        )
    rows = [
        _Completion(step, None, prompt, (0, 0), (reward,), math.nan)
        for prompt, (step, group) in enumerate(recorded)
        for reward in group
    ]
    log = _grouped(str(path), rows, (), ("reward",), (1.0,), size, groups, notes)
    notes.append("No completions are saved: rewards of all groups are read, without prompts and lengths.")
    log = replace(log, by_function={}, lengths=None, prompt_lengths=None, unit="", knows_prompts=False)
    return replace(log, history=list(history), notes=notes)
