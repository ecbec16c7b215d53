"""Carries out inside TRL's `_generate_and_score_completions` what the policy of sampling decides.

With pilots all of it happens in TRL's call of `_generate`: sample G0 completions of each prompt, score them, choose
prompts, sample their remaining completions. That method has set up environments, images and prompts by row before,
and goes on afterwards with its own lists `inputs` and `prompts`; these then hold the rows of the chosen prompts alone,
so that TRL makes its batch of whole groups.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragen2_trl.rollout_events import Scored, is_rloo
from ragen2_trl.sampling.policy import Permutation, Policy
from ragen2_trl.sampling.row_means import TOKEN_MEANS, Call, average
from ragen2_trl.trainers.selection import rewards_to_score

Row = dict[str, Any]
Generate = Callable[[list[Any]], tuple[Any, ...]]
Calculate = Callable[..., Tensor]

# Lists that TRL keeps by row for tools and environments. In RLOO there are none.
BY_ROW = ("environments", "_batch_environments", "_sync_tool_dicts", "_async_tool_dicts")


@dataclass
class Round:
    """A round of sampling, from the rows that TRL is given to the rewards of whole groups.

    Args:
        inputs: TRL's rows of this process, G for each prompt; once prompts are chosen, the rows of these.
        key: tells this round's draws from others of the run; the last one is its number in the step, from 0.
        rewards: (P, G) by which groups are scored, over all processes, NaN for completions that were not sampled.
        live: (rows,) bool of this process, rows of groups with varying rewards, once log-probs are asked for.
        pilot_rows: of this process. This and what follows with pilots.
        pilots: the scored pilots of all prompts over all processes, once they are sampled.
        metrics: metrics that reward functions logged for them (TRL's `log_metric`).
        in_full: (P,) bool, the chosen prompts.
        chosen: their numbers among this process's prompts.
        given_up: (rows, F) rewards by function and (rows,) sums of the pilots whose prompts were not chosen, over all
            processes.
    """

    inputs: list[Row]
    key: tuple[int, ...]
    rewards: Any = None
    live: Tensor | None = None
    pilot_rows: int = 0
    pilots: Scored | None = None
    metrics: dict[str, list[float]] = field(default_factory=dict)
    in_full: Any = None
    chosen: list[int] = field(default_factory=list)
    given_up: tuple[Tensor, Tensor] | None = None


class PromptSampler:
    """Gives a trainer the rows of the prompts to sample, and samples them.

    Args:
        trainer: One of ours.
        policy: What is sampled.
        rows: The training dataset, M rows, where the policy has an order of prompts.
    """

    def __init__(self, trainer: Any, policy: Policy, rows: Sequence[Row] = ()):
        self.trainer, self.policy, self.rows = trainer, policy, rows
        self.accelerator = trainer.accelerator
        self.size: int = trainer.args.num_generations
        self.first = 0 if policy.pilots is None else policy.pilots.count  # completions of a pilot, G0
        self.place_of_texts = 2 if is_rloo(trainer) else 3  # in a result of `_generate`
        self.round: Round | None = None
        self.calls: list[Call] = []  # of TRL's methods, where a generation takes several
        self.scored: list[tuple[Tensor, Tensor]] = []  # (rows, F) and (rows,) rewards of all processes, of each round

    def begin_step(self, inputs: list[Row], *key: int) -> None:
        """TRL is about to sample these rows of this process, G for each prompt, in a step's first round.

        They are replaced by the rows of the prompts that come next, in place: TRL's data loader reads ahead and cannot
        know how many prompts a step needs. `key` tells the step's draws from others of the run.
        """
        self.policy.rounds = self.trainer.args.snr_dynamic_sampling_rounds  # it may be changed in a run
        self.forget()
        if self.first or self.policy.rounds:
            self._note_call(0)
        numbers = self.policy.begin_step(len(inputs) * self.accelerator.num_processes // self.size)
        self._begin_round(inputs, inputs if numbers is None else self._own_rows(numbers), key)

    def further(self, missing: int, kept: int) -> list[Row]:
        """This process's rows of a further round of the step, see `Policy.next_round`; none where there is none."""
        inputs: list[Row] = []
        if count := self.policy.next_round(missing, kept):
            numbers = self.policy.next_prompts(self._current().rewards, count)
            self._begin_round(inputs, self._own_rows(numbers), self._current().key[:-1])
        return inputs

    def _begin_round(self, inputs: list[Row], rows: list[Row], key: tuple[int, ...]) -> None:
        """Put the rows of a round into the list that TRL is given, and announce those that it samples first."""
        inputs[:] = rows
        self.round = Round(inputs, (*key, self.policy.further))
        first = self.first or self.size
        self._separate(inputs, [row for row in range(len(inputs)) if row % self.size < first])

    def _own_rows(self, numbers: list[int]) -> list[Row]:
        """This process's rows, G for each prompt: the same object until they are sampled."""
        own = np.repeat(numbers, self.size).reshape(self.accelerator.num_processes, -1)[self.accelerator.process_index]
        prompts = {row: self.rows[row] for row in dict.fromkeys(own.tolist())}
        return [prompts[row] for row in own.tolist()]

    def _separate(self, inputs: list[Row], rows: Sequence[int]) -> None:
        """Give each of some rows an object of its own, as an episode may write into it, and announce them."""
        inputs[:] = separate(inputs, rows)
        self.trainer.rollout_events.tell("on_rows", [inputs[row] for row in rows])

    # In place of methods of TRL's

    def generate(self, generate: Generate, calculate: Calculate, prompts: list[Any]) -> tuple[Any, ...]:
        """In place of `_generate`: sample the pilots of each prompt, then the remaining completions of chosen ones.

        Returns:
            Whole groups of the chosen prompts, whose rows `inputs` and `prompts` hold from now on.
        """
        current, trainer = self._current(), self.trainer
        inputs, first, size = current.inputs, self.first, self.size
        of_pilots = [row for row in range(len(inputs)) if row % size < first]
        sampled = self._sample(of_pilots, first, generate, prompts)  # their rows are announced
        completions = by_row(sampled, len(of_pilots))
        self._score_pilots(of_pilots, sampled, completions, calculate, prompts)

        current.in_full = self.policy.choose(current.rewards[:, :first], *current.key).in_full
        mine = current.in_full.reshape(self.accelerator.num_processes, -1)[self.accelerator.process_index]
        current.chosen = np.flatnonzero(mine).tolist()
        dropped = [one for number, one in enumerate(completions) if not mine[number // first]]
        kept = [prompt * size + member for prompt in current.chosen for member in range(size)]
        for name, values in self._lists_by_row().items():
            setattr(trainer, name, [values[row] for row in kept])
        inputs[:], prompts[:] = [inputs[row] for row in kept], [prompts[row] for row in kept]
        remaining = self._remaining()
        self._separate(inputs, remaining)
        further = by_row(self._sample(remaining, size - first, generate, prompts), len(remaining))
        result: tuple[Any, ...] = of_rows(sampled, len(of_pilots), self._whole(completions, further))
        of_dropped = of_rows(sampled, len(of_pilots), dropped)  # they are in no batch
        trainer.rollout_events.generated(of_dropped)
        return result

    def calculate(self, calculate: Calculate, *rows: list[Any]) -> Tensor:
        """In place of `_calculate_rewards`: score the remaining completions. (B, F) of whole groups."""
        current, remaining, first = self._current(), self._remaining(), self.first
        assert current.pilots is not None  # they were scored in `generate`
        scored, metrics = self._score(remaining, calculate, *([values[row] for row in remaining] for values in rows))
        further = self._to_score(scored, self.size - first, len(remaining))
        current.rewards[current.in_full, first:] = further.double().cpu().numpy()
        self._log_columns(current.pilots.columns, scored.columns)
        self._log_metrics(current.metrics, metrics)
        of_pilots = current.pilots.rewards_per_func.to(scored.rewards_per_func)
        groups, functions = of_pilots.view(-1, first, of_pilots.size(1)), of_pilots.size(1)
        chosen = torch.from_numpy(current.in_full).to(groups.device)
        of_sums = current.pilots.sums.view(-1, first)
        current.given_up = groups[~chosen].flatten(0, 1), of_sums[~chosen].flatten()
        of_remaining = scored.rewards_per_func.view(-1, self.size - first, functions)
        return torch.cat([groups[chosen], of_remaining], dim=1).flatten(0, 1)

    def _counted(self, call: Callable[..., Any], *rows: list[Any]) -> Any:
        """The result of a call for some rows, for which its metrics speak."""
        result = call(*rows)
        self._note_call(len(rows[0]))
        return result

    def _note_call(self, rows: int, by_name: Mapping[str, float] | None = None) -> None:
        counts = {name: len(values) for name, values in self.trainer._metrics["train"].items()}
        self.calls.append(Call(counts, rows, by_name or {}))

    # TRL has made its batch

    def end_round(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """TRL's batch is made, and its metrics speak for its rows. A call for all processes together.

        Args:
            lengths: (rows,) tokens that the model wrote.

        Returns:
            (n, G) the rewards that score its groups, over all processes, and (P, G) those of all prompts of the round,
            NaN for completions that were not sampled.
        """
        scored, current = self.trainer.rollout_events.scored, self._current()
        rewards = self._to_score(scored, self.size, len(lengths))
        if current.rewards is None:
            current.rewards = rewards.double().cpu().numpy()
        if self.calls:
            tokens = self.accelerator.reduce(lengths.sum(), reduction="sum").item()
            of_batch = {"frac_reward_zero_std": len(lengths), **dict.fromkeys(TOKEN_MEANS, tokens)}
            of_round = [(scored.rewards_per_func, scored.sums), *([current.given_up] if current.given_up else [])]
            self.scored += of_round
            self._note_call(sum(len(sums) for _, sums in of_round), of_batch)
        return rewards, torch.from_numpy(current.rewards)

    def end_step(self) -> dict[str, float]:
        """Metrics of a step whose rounds are sampled; TRL's become means over what they speak for."""
        calls, scored, rewards = self.calls, self.scored, self._current().rewards
        self.forget()
        self.policy.learn(rewards)
        metrics = self.policy.metrics()
        if calls and (self.first or self.policy.further):
            per_func, sums = map(torch.cat, zip(*scored, strict=True))
            average(self.trainer._metrics["train"], calls, per_func, sums, self.trainer.reward_func_names)
        return metrics

    def forget(self) -> None:
        """No round is being sampled any more."""
        self.round, self.calls, self.scored = None, [], []

    def _current(self) -> Round:
        if self.round is None:
            raise RuntimeError(
                f"{type(self.trainer).__name__} samples with pilots outside of _generate_and_score_completions; "
                "allowed: snr_pilot_generations=0."
            )
        return self.round

    def _remaining(self) -> list[int]:
        """Rows of chosen prompts that are no pilots."""
        return [row for row in range(len(self._current().inputs)) if row % self.size >= self.first]

    def _whole(self, of_pilots: list[Any], of_remaining: list[Any]) -> list[Any]:
        """Values of whole groups, from those of all pilots and of the chosen prompts' remaining completions."""
        first, rest = self.first, self.size - self.first
        of_groups = (
            [*of_pilots[prompt * first :][:first], *of_remaining[place * rest :][:rest]]
            for place, prompt in enumerate(self._current().chosen)
        )
        return [value for of_group in of_groups for value in of_group]

    def _sample(self, rows: list[int], members: int, generate: Generate, prompts: list[Any]) -> tuple[Any, ...]:
        """The result of TRL's `_generate` for some rows."""
        with self._part(rows, members):
            result: tuple[Any, ...] = self._counted(generate, [prompts[row] for row in rows])
        return result

    def _score_pilots(
        self,
        rows: list[int],
        sampled: tuple[Any, ...],
        completions: list[list[Any]],
        calculate: Calculate,
        prompts: list[Any],
    ) -> None:
        current = self._current()
        # TRL puts the fields of a rollout function into its rows before it scores them.
        fields = [next((one for one in values if isinstance(one, dict)), {}) for values in completions]
        scored_rows = [{**current.inputs[row], **own} for row, own in zip(rows, fields, strict=True)]
        values = scored_rows, [prompts[row] for row in rows], sampled[self.place_of_texts], sampled[1]
        current.pilots, current.metrics = self._score(rows, calculate, *values)
        scores = self._to_score(current.pilots, self.first, len(rows)).double().cpu().numpy()
        current.pilot_rows = len(rows)
        current.rewards = np.full((len(scores), self.size), np.nan)
        current.rewards[:, : self.first] = scores

    def _score(
        self, rows: list[int], calculate: Calculate, *values: list[Any]
    ) -> tuple[Scored, dict[str, list[float]]]:
        """The rewards and columns of some rows, and the metrics that reward functions logged for them."""
        trainer = self.trainer
        with self._part(rows, self.size):
            rewards, columns = self._counted(calculate, *values), dict(trainer._pending_extra_logs)
            scored = trainer.rollout_events.scored_rows(values[0], rewards, columns)
        metrics = dict(trainer._pending_metrics)
        trainer._pending_extra_logs.clear()
        trainer._pending_metrics.clear()
        return scored, metrics

    def _to_score(self, scored: Scored, members: int, rows: int) -> Tensor:
        """(n, members) the rewards that score groups of so many completions, of so many rows here."""
        sums, name = scored.sums.view(-1, members), self.trainer.args.snr_score_reward
        if name is None:
            return sums
        return rewards_to_score(name, sums, self.trainer.reward_func_names, scored, rows)

    def _log_columns(self, of_pilots: Mapping[str, list[Any]], of_remaining: Mapping[str, list[Any]]) -> None:
        """Hand TRL the columns of whole groups. A column has one block of values for each function that logged it."""
        pilots, remaining = self._current().pilot_rows, len(self._remaining())

        def blocks(values: list[Any], rows: int) -> list[list[Any]]:
            return [values[start : start + rows] for start in range(0, len(values), rows)]

        def padded(values: list[list[Any]], number: int, rows: int) -> list[Any]:
            own = values[number] if number < len(values) else []
            return [*own, *[None] * rows][:rows]

        for column in sorted({*of_pilots, *of_remaining}):
            first = blocks(of_pilots.get(column, []), pilots)
            second = blocks(of_remaining.get(column, []), remaining)
            for number in range(max(len(first), len(second))):
                own = padded(first, number, pilots), padded(second, number, remaining)
                self.trainer._pending_extra_logs[column] += self._whole(*own)

    def _log_metrics(self, of_pilots: Mapping[str, list[float]], of_remaining: Mapping[str, list[float]]) -> None:
        """Hand TRL the metrics of both stages as means over their completions.

        A name with `@`, such as pass@16, counts the completions of a whole group, which neither stage has. Counting
        it in the whole groups would not make it that of all prompts: pilots have chosen them.
        """
        rows = self._current().pilot_rows, len(self._remaining())
        for name in sorted(name for name in {*of_pilots, *of_remaining} if "@" not in name):
            stages = zip((of_pilots.get(name, []), of_remaining.get(name, [])), rows, strict=True)
            means, weights = zip(*((np.mean(values), weight) for values, weight in stages if values), strict=True)
            self.trainer._pending_metrics[name] = [float(np.average(means, weights=weights))]

    def _lists_by_row(self) -> dict[str, list[Any]]:
        lists = {name: getattr(self.trainer, name, None) for name in BY_ROW}
        return {name: values for name, values in lists.items() if values}

    @contextmanager
    def _part(self, rows: list[int], members: int) -> Iterator[None]:
        """TRL sees some rows, and groups of `members` completions.

        vLLM samples a prompt once for `num_generations` rows of it (`_generate_single_turn`), and rollout functions
        read it from the trainer or its settings, as the documentation of `rollout_func` says.
        """
        lists = {name: [values[row] for row in rows] for name, values in self._lists_by_row().items()}
        of_trainer, of_args = {"num_generations": members, **lists}, {"num_generations": members}
        with replaced(self.trainer, of_trainer), replaced(self.trainer.args, of_args):
            yield


def permutations_of_trl(num_rows: int, seed: int, shuffle: bool) -> Permutation:
    """The orders of TRL's sampler (`RepeatSampler`), epoch by epoch.

    Args:
        num_rows: of the dataset.
        seed: of the run.
        shuffle: whether each epoch has a permutation of its own.
    """

    def permutation(epoch: int) -> list[int]:
        generator, order = torch.Generator().manual_seed(seed), torch.arange(num_rows)
        for _ in range(epoch + 1 if shuffle else 0):
            order = torch.randperm(num_rows, generator=generator)
        return list(order.tolist())

    return permutation


def separate(rows: list[Row], numbers: Sequence[int]) -> list[Row]:
    """The rows, of which these have an object of their own.

    >>> row = {"prompt": "a", "state": [1]}
    >>> first, second, third = separate([row, row, row], range(2))
    >>> first is second or first is row, third is row, first == second == third
    (False, True, True)
    """
    holders, separated = Counter(map(id, rows)), list(rows)
    for number in numbers:
        if holders[id(rows[number])] > 1:
            holders[id(rows[number])] -= 1
            separated[number] = copy.deepcopy(rows[number])
    return separated


def by_row(generated: tuple[Any, ...], size: int) -> list[list[Any]]:
    """The result of TRL's `_generate`, row by row: items of lists as long as the rows, also inside dictionaries.

    >>> by_row(([[1], [2]], None, {"episode": ["a", "b"]}, []), 2)
    [[[1], None, {'episode': 'a'}, []], [[2], None, {'episode': 'b'}, []]]
    """

    def part(value: Any, row: int) -> Any:
        if isinstance(value, dict):
            return {key: part(one, row) for key, one in value.items()}
        return value[row] if isinstance(value, list) and len(value) == size else value

    return [[part(value, row) for value in generated] for row in range(size)]


def of_rows(like: Any, size: int, rows: list[Any]) -> Any:
    """The inverse of `by_row`.

    Args:
        like: a result of `_generate`: tells which values are lists of rows.
        size: number of its rows.
        rows: from `by_row`.

    >>> of_rows(([[1], [2]], None, {"episode": ["a", "b"]}, []), 2, [[[3], None, {"episode": "c"}, []]])
    ([[3]], None, {'episode': ['c']}, [])
    """
    if isinstance(like, tuple):
        return tuple(of_rows(one, size, [row[number] for row in rows]) for number, one in enumerate(like))
    if isinstance(like, dict):
        return {key: of_rows(one, size, [row[key] for row in rows]) for key, one in like.items()}
    if like is None:  # the rows of `like` may happen to have no images
        return rows if any(row is not None for row in rows) else None
    return rows if isinstance(like, list) and len(like) == size else like


@contextmanager
def replaced(holder: Any, values: dict[str, Any]) -> Iterator[None]:
    """Attributes of an object have other values inside."""
    usual = {name: getattr(holder, name) for name in values}
    vars(holder).update(values)
    try:
        yield
    finally:
        vars(holder).update(usual)
