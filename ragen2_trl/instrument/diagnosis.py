"""A diagnosis of sampled turns: their reasoning is scored under every prompt, and what that says is measured."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from ragen2_trl.instrument.information import information_metrics
from ragen2_trl.instrument.reasoning import Trajectories, Turn
from ragen2_trl.instrument.scoring import ContextLengthError, cross_score

T = TypeVar("T")

ANSWERS = "answer"  # the scope of `measure_answers`
SCOPES = ("first_turn", "trajectory", ANSWERS)


class NotMeasurableError(ValueError):
    """The sampled turns hold nothing to measure; the message says why."""


class SamePromptsError(NotMeasurableError):
    """All turns have the same context."""


@dataclass(frozen=True)
class Measurement:
    """A cross-scoring matrix and what follows from it.

    Args:
        metrics: From `information_metrics`.
        cross_logps: (B, N) log p(Z_b | x_n) in nats.
        lengths: (B,) tokens of each reasoning trace.
        prompt_index: (B,) own column of each reasoning trace.
        trajectories: For each of the B rows, the number of its trajectory.
        columns: For each of the N columns, the number of a trajectory with that context.
        without_own_words: The same reasoning traces under the same contexts, each without what the model itself wrote
            in earlier turns; `None` in a first turn, and where such contexts are all the same. The log-probabilities
            are not those that the reasoning was sampled with: only retrieval means something.
    """

    metrics: dict[str, float]
    cross_logps: Tensor
    lengths: Tensor
    prompt_index: Tensor
    trajectories: list[int]
    columns: list[int]
    without_own_words: "Measurement | None" = None


@dataclass(frozen=True)
class Sampling:
    """How many reasoning traces are scored under how many prompts.

    Reasoning traces are subsampled, prompts only where there are more than `max_prompts`: against fewer candidates
    than the batch has, mutual information is biased and retrieval is easier.

    Args:
        num_completions: Reasoning traces to score in each scope, drawn without replacement.
        max_prompts: Prompts to score them under.
        max_tokens: First tokens of each reasoning trace, and of each answer, that are scored; all by default.
        num_answers: Answers to score in the scope of answers; `num_completions` by default.
        temperature: Of the policy.
        max_tokens_per_forward: See `cross_score`.
        split_over_processes: See `cross_score`.
    """

    num_completions: int = 64
    max_prompts: int = 64
    temperature: float = 1.0
    max_tokens_per_forward: int | None = None
    max_tokens: int | None = None
    num_answers: int | None = None
    split_over_processes: bool = False

    def __post_init__(self) -> None:
        for name in ("num_completions", "max_prompts"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class _Column:
    trajectory: int
    group: int
    context: tuple[int, ...]

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        """Groups with one prompt are columns of their own, and so are different prompts of one group."""
        return self.group, self.context


@dataclass(frozen=True)
class _Row:
    column: _Column
    turn: Turn


def measure_first_turn(
    model: nn.Module,
    trajectories: Trajectories,
    groups: Sequence[int],
    generator: torch.Generator,
    sampling: Sampling,
) -> Measurement:
    """Scores first-turn reasoning under the prompts of all groups.

    Args:
        model: The policy.
        trajectories: Turns of each completion. Only those that are drawn are read.
        groups: Group of each completion. Each group is one column, or several where its members have different
            prompts. Groups with the same prompt form a class (see `information_metrics`).
        generator: Draws the subsample.
        sampling: How many of what.

    Raises:
        NotMeasurableError: With fewer than two distinct prompts, or without any reasoning.
    """
    first = [
        _Column(i, groups[i], trajectories.first_context(i))
        for i in range(len(trajectories))
        if trajectories.num_turns(i)
    ]
    distinct = {column.key: column for column in reversed(first)}
    columns = draw(list(distinct.values())[::-1], sampling.max_prompts, generator)
    chosen = {column.key for column in columns}
    candidates = [column for column in first if column.key in chosen]
    # Drawn before they are read: one without reasoning makes room for the next.
    count, order = sampling.num_completions, list(range(len(candidates)))
    if len(candidates) > count:
        order = torch.randperm(len(candidates), generator=generator).tolist()
    rows: dict[int, _Row] = {}
    for number in order:
        turn = trajectories[candidates[number].trajectory][0]
        if turn.reasoning:
            rows[number] = _Row(candidates[number], turn)
        if len(rows) == count:
            break
    return _measure(model, [rows[number] for number in sorted(rows)], columns, sampling)


def measure_trajectory(
    model: nn.Module,
    trajectories: Trajectories,
    groups: Sequence[int],
    generator: torch.Generator,
    sampling: Sampling,
) -> dict[int, Measurement]:
    """Scores reasoning of all turns, each under the contexts of other trajectories at the same turn.

    A trajectory is drawn uniformly, then one of its turns (arXiv 2604.06268, trajectory-uniform sampling). Turns are
    compared within their position only. A later context of the same trajectory would hold the reasoning verbatim, and
    is therefore never a candidate.

    A context of a later turn holds what the model itself wrote in earlier ones, by which even gibberish is told apart:
    later turns are therefore measured without that, too (`Measurement.without_own_words`).

    Returns:
        By turn position, from 0, for the positions that have two distinct contexts.

    Raises:
        NotMeasurableError: If no position has that fit the model's context, or without any reasoning.
    """
    rows = []
    for i in draw(range(len(trajectories)), sampling.num_completions, generator):
        reasoned = [(position, turn) for position, turn in enumerate(trajectories[i]) if turn.reasoning]
        if reasoned:
            position, turn = draw(reasoned, 1, generator)[0]
            rows.append((position, _Row(_Column(i, groups[i], turn.context), turn)))
    strata: dict[int, list[_Row]] = defaultdict(list)
    for position, row in rows:
        strata[position].append(row)
    measurements, reason = {}, "no completion has reasoning"
    for position, stratum in sorted(strata.items()):
        columns = list({row.column.key: row.column for row in stratum}.values())[: sampling.max_prompts]
        chosen = {column.key for column in columns}
        stratum = [row for row in stratum if row.column.key in chosen]
        try:
            measured = _measure(model, stratum, columns, sampling)
            measurements[position] = replace(
                measured, without_own_words=_without_own_words(model, stratum, columns, sampling)
            )
        except (NotMeasurableError, ContextLengthError) as error:
            reason = str(error)
    if not measurements:
        raise NotMeasurableError(reason)
    return measurements


def combine(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Metrics of several strata as one: means weighted by reasoning traces, sums for the counts."""
    total = sum(m.metrics["num_completions"] for m in measurements)
    metrics = {}
    for key in measurements[0].metrics:
        if key in ("num_completions", "num_prompts"):
            metrics[key] = sum(m.metrics[key] for m in measurements)
        else:
            metrics[key] = sum(m.metrics[key] * m.metrics["num_completions"] for m in measurements) / total
    return metrics


def _without_own_words(
    model: nn.Module, rows: Sequence[_Row], columns: Sequence[_Column], sampling: Sampling
) -> Measurement | None:
    """The measurement under contexts that differ only in prompts and in what the environment answered."""
    turn_of = {row.column.key: row.turn for row in rows}
    contexts = [turn_of[column.key].context_without_own_words for column in columns]
    if len(set(contexts)) < 2 or all(not row.turn.earlier for row in rows):
        return None
    return _measure(model, rows, columns, sampling, contexts)


def _measure(
    model: nn.Module,
    rows: Sequence[_Row],
    columns: Sequence[_Column],
    sampling: Sampling,
    contexts: Sequence[tuple[int, ...]] | None = None,
) -> Measurement:
    """Scores rows under the contexts of the columns, or under others in their places."""
    if not rows:
        raise NotMeasurableError("no completion has reasoning")
    contexts = [column.context for column in columns] if contexts is None else contexts
    column_of = {column.key: number for number, column in enumerate(columns)}
    class_of: dict[tuple[int, ...], int] = {}
    prompt_class = [class_of.setdefault(context, len(class_of)) for context in contexts]
    if len(class_of) < 2:
        raise SamePromptsError(f"all {len(columns)} prompts are the same, and two different ones are needed")
    cross_logps = cross_score(
        model,
        contexts,
        [row.turn.lead_in + row.turn.reasoning[: sampling.max_tokens] for row in rows],
        lead_in=[len(row.turn.lead_in) for row in rows],
        temperature=sampling.temperature,
        max_tokens_per_forward=sampling.max_tokens_per_forward,
        split_over_processes=sampling.split_over_processes,
    )
    lengths = torch.tensor([len(row.turn.reasoning[: sampling.max_tokens]) for row in rows])
    prompt_index = torch.tensor([column_of[row.column.key] for row in rows])
    return Measurement(
        information_metrics(cross_logps, lengths, prompt_index, prompt_class=torch.tensor(prompt_class)),
        cross_logps,
        lengths,
        prompt_index,
        [row.column.trajectory for row in rows],
        [column.trajectory for column in columns],
    )


def draw(items: Sequence[T], count: int, generator: torch.Generator) -> list[T]:
    """`count` of the items without replacement, in their order; all of them where there are no more."""
    if len(items) <= count:
        return list(items)
    return [items[i] for i in sorted(torch.randperm(len(items), generator=generator)[:count].tolist())]
