"""Pilots: a few completions of each prompt are sampled and scored first, the rest only for prompts worth it.

A filter saves the update once the samples are paid for; pilots save the samples, from the first epoch on. Pilot-Commit
(arXiv 2605.26606) and AERO (arXiv 2602.14338) continue where a pilot's rewards vary. Here a prompt is worth its
remaining completions if they buy at least as much expected reward variance as completions do on average, pilots
included.

All of it happens inside TRL's `_generate`: sample G0 completions of each prompt, score them, choose prompts, sample
their remaining completions. TRL's `inputs` and `prompts` then hold the rows of the chosen prompts alone, so that TRL
makes its batch of whole groups and nothing after sampling knows of pilots.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from ragen2_trl.rollout_events import Scored, group_rewards, texts_of
from ragen2_trl.sampling.posterior import Floats, PosteriorState, RewardPosterior, Rows, evidence_of
from ragen2_trl.trainers.prompt_selection import PromptSelection
from ragen2_trl.trainers.prompt_source import Row, TRLOrder
from ragen2_trl.trainers.selection import rewards_to_score

Generate = Callable[[list[Any]], tuple[Any, ...]]
Calculate = Callable[..., Tensor]

AUDIT = 0.02
"""Fraction of rejected prompts sampled in full anyway, to estimate the variance that rejection misses. At 70 % dead
prompts these are 4 % of all completions."""

MEMORY = 256  # rounds after which the findings of an audit count 1/e
RECENT = 256  # prompts whose expected variances set the threshold
_DRAW = 0xA0D1  # tells our draws from others of the same seed

# Lists that TRL keeps by row for tools and environments. In RLOO there are none.
BY_ROW = ("environments", "_batch_environments", "_sync_tool_dicts", "_async_tool_dicts")


def worth_going_on(expected: Floats, first: int, size: int) -> float:
    """Minimum expected variance for which sampling a prompt's remaining completions pays off: with this threshold,
    prompts like these yield most reward variance per completion.

    Args:
        expected: (n,) expected reward variances of prompts, given their pilots.
        first: completions of a pilot, G0.
        size: of a group, G.

    >>> worth_going_on(np.array([0.2, 0.01, 0.01, 0.2]), first=3, size=16)
    0.2
    >>> worth_going_on(np.array([0.2, 0.16, 0.2, 0.2]), first=3, size=16)
    0.16
    """
    falling = np.sort(expected)[::-1]
    costs = len(falling) * first + np.arange(1, len(falling) + 1) * (size - first)
    return float(falling[(np.cumsum(falling) / costs).argmax()])


@dataclass
class _Round:
    """A round in progress, from `begin_round` to TRL's batch.

    Args:
        inputs: TRL's rows of this process, G for each prompt; once prompts are chosen, the rows of these.
        key: tells this round's draws from others of the run.
        shared: ids of row objects that stand for several completions.
        pilots: the scored pilots of all prompts over all processes, once they are sampled.
        metrics: metrics that reward functions logged for the pilots (TRL's `log_metric`).
        looked: number of this process's pilots.
        chosen: numbers of the chosen prompts among this process's prompts.
    """

    inputs: list[Row]
    key: tuple[int, ...]
    shared: set[int]
    pilots: Scored | None = None
    metrics: dict[str, list[float]] = field(default_factory=dict)
    looked: int = 0
    chosen: list[int] = field(default_factory=list)


class PilotState(TypedDict):
    """State of `PilotSampling` in a checkpoint."""

    recent: list[float]
    held: list[float]
    posterior: PosteriorState


class PilotSampling:
    """Samples the generations of a trainer in two stages.

    Args:
        trainer: One of ours.
        first: Completions of a pilot, G0.
        prompts: The source of its prompts; a prompt selection also tells what is known of each.
    """

    def __init__(self, trainer: Any, first: int, prompts: TRLOrder):
        self.trainer = trainer
        self.accelerator = trainer.accelerator
        self.first = first
        self.size: int = trainer.args.num_generations
        self.prompts = prompts
        self.posterior = RewardPosterior(0, 1.0)  # of all prompts together, where single ones are not known
        self.recent: list[float] = []
        self.held = np.zeros(3)  # audited groups, the variance that they stand for, and the variance of committed ones
        self._round: _Round | None = None
        self.begin_step()

    def begin_step(self) -> None:
        self.step = np.zeros(4)  # completions and places, committed and all prompts
        self.earned: list[float] = []  # rewards of pilots

    def begin_round(self, inputs: list[Row], key: tuple[int, ...]) -> None:
        """The next call of `generate` is for these rows of this process, G for each prompt."""
        shared = {one for one, count in Counter(map(id, inputs)).items() if count > 1}
        self._round = _Round(inputs, key, shared)

    # Inside TRL's `_generate_and_score_completions`

    def generate(self, generate: Generate, calculate: Calculate, prompts: list[Any]) -> tuple[Any, ...]:
        """In place of TRL's `_generate`: `inputs` and `prompts` become the rows of the chosen prompts, in place."""
        current = self._current()
        inputs, trainer = current.inputs, self.trainer
        rows = [row for row in range(len(inputs)) if row % self.size < self.first]
        current.looked = len(rows)
        looked = self._sample(rows, self.first, generate, prompts)
        completions = by_row(looked, len(rows))
        # TRL puts the fields of a rollout function into its rows before it scores them.
        fields = [next((one for one in row if isinstance(one, dict)), {}) for row in completions]
        scored_rows = [{**inputs[row], **own} for row, own in zip(rows, fields, strict=True)]
        texts = texts_of(trainer, looked)
        own_prompts = [prompts[row] for row in rows]
        current.pilots, current.metrics = self._score(rows, calculate, scored_rows, own_prompts, texts, looked[1])

        scored = self._to_score(current.pilots, self.first, len(rows))
        whole = self._choose(scored.double().cpu().numpy(), current.key)
        current.chosen = whole[self.accelerator.process_index].tolist()

        others = [row for number, row in enumerate(completions) if number // self.first not in current.chosen]
        trainer.rollout_events.generated(together(looked, len(rows), others))  # they are in no batch
        kept = [prompt * self.size + member for prompt in current.chosen for member in range(self.size)]
        for name, values in self._lists_by_row().items():
            setattr(trainer, name, [values[row] for row in kept])
        inputs[:], prompts[:] = [inputs[row] for row in kept], [prompts[row] for row in kept]
        rest = self._rest()
        sampled = by_row(self._sample(rest, self.size - self.first, generate, prompts), len(rest))
        in_order = self._in_order([completions[row] for row in self._pilots_of_chosen()], sampled)
        merged: tuple[Any, ...] = together(looked, len(rows), in_order)
        return merged

    def calculate(self, calculate: Calculate, *rows: list[Any]) -> Tensor:
        """In place of TRL's `_calculate_rewards`: scores the remaining completions. (B, F) of whole groups."""
        current, rest = self._current(), self._rest()
        assert current.pilots is not None  # they were scored in `generate`
        scored, metrics = self._score(rest, calculate, *([values[row] for row in rest] for values in rows))
        if self.size > self.first:
            self._to_score(scored, self.size - self.first, len(rest))  # it checks that they log the column, too
        self._log_columns(current.pilots.columns, scored.columns)
        self._log_metrics(current.metrics, metrics)
        self._round = None
        of_pilots, of_rest = current.pilots.rewards_per_func, scored.rewards_per_func
        groups = of_pilots.view(-1, self.first, of_pilots.size(1)).to(of_rest)
        is_whole = torch.from_numpy(self.committed | self.audited).to(of_rest.device)
        self.given_up = groups[~is_whole].flatten(0, 1)  # (rows, F) over all processes
        of_rest = of_rest.view(int(is_whole.sum()), self.size - self.first, -1)
        return torch.cat([groups[is_whole], of_rest], dim=1).flatten(0, 1)

    def _current(self) -> _Round:
        if self._round is None:
            raise RuntimeError(
                f"{type(self.trainer).__name__} samples with pilots outside of _generate_and_score_completions; "
                "allowed: snr_pilot_generations=0."
            )
        return self._round

    def _rest(self) -> list[int]:
        """Rows of chosen prompts that are no pilots."""
        return [row for row in range(len(self._current().inputs)) if row % self.size >= self.first]

    def _pilots_of_chosen(self) -> list[int]:
        """Numbers of the chosen prompts' pilots among this process's pilots."""
        return [prompt * self.first + member for prompt in self._current().chosen for member in range(self.first)]

    def _in_order(self, pilots: list[Any], rest: list[Any]) -> list[Any]:
        """Values of the chosen prompts' pilots and remaining completions, in the order of rows."""
        values = iter(pilots), iter(rest)
        return [next(values[row % self.size >= self.first]) for row in range(len(self._current().inputs))]

    def _sample(self, rows: list[int], members: int, generate: Generate, prompts: list[Any]) -> tuple[Any, ...]:
        """The result of TRL's `_generate` for some rows. Each row gets an object of its own."""
        current = self._current()
        for row in rows:
            if id(current.inputs[row]) in current.shared:  # an episode may write into its row
                current.inputs[row] = copy.deepcopy(current.inputs[row])
        self.trainer.rollout_events.rows([current.inputs[row] for row in rows])
        with self._part(rows, members):
            return generate([prompts[row] for row in rows])

    def _score(
        self, rows: list[int], calculate: Calculate, *values: list[Any]
    ) -> tuple[Scored, dict[str, list[float]]]:
        """The rewards and columns of some rows, and the metrics that reward functions logged for them."""
        trainer = self.trainer
        with self._part(rows, self.size):
            rewards, failed = trainer.rollout_events.without_failed(values[0], calculate(*values))
        columns, metrics = dict(trainer._pending_extra_logs), dict(trainer._pending_metrics)
        trainer._pending_extra_logs.clear()
        trainer._pending_metrics.clear()
        return Scored(rewards, columns, failed), metrics

    def _to_score(self, scored: Scored, members: int, rows: int) -> Tensor:
        """(n, members) the rewards that score groups, of this many completions each, of so many rows here."""
        trainer = self.trainer
        sums = group_rewards(scored.rewards_per_func, trainer.reward_weights, members)
        return rewards_to_score(trainer.args.snr_score_reward, sums, trainer.reward_func_names, scored, rows)

    def _log_columns(self, of_pilots: Mapping[str, list[Any]], of_rest: Mapping[str, list[Any]]) -> None:
        """Hand TRL the columns of whole groups. A column has one block of values for each function that logged it."""
        rest, pilots = len(self._rest()), self._current().looked

        def blocks(values: list[Any], rows: int) -> list[list[Any]]:
            return [values[start : start + rows] for start in range(0, len(values), rows)]

        for column in sorted({*of_pilots, *of_rest}):
            first, second = blocks(of_pilots.get(column, []), pilots), blocks(of_rest.get(column, []), rest)
            for number in range(max(len(first), len(second))):
                looked = first[number] if number < len(first) else []
                looked = [looked[row] if row < len(looked) else None for row in self._pilots_of_chosen()]
                others = [*(second[number] if number < len(second) else []), *[None] * rest][:rest]
                self.trainer._pending_extra_logs[column] += self._in_order(looked, others)

    def _log_metrics(self, of_pilots: Mapping[str, list[float]], of_rest: Mapping[str, list[float]]) -> None:
        """Hand TRL the metrics of both stages as means over their completions.

        A name with `@`, such as pass@16, counts the completions of a whole group, which neither stage has. Counting
        it in the whole groups would not make it that of all prompts: pilots have chosen them.
        """
        rows = self._current().looked, len(self._rest())
        for name in sorted(name for name in {*of_pilots, *of_rest} if "@" not in name):
            both = [values.get(name, []) for values in (of_pilots, of_rest)]
            means = [(sum(values) / len(values), size) for values, size in zip(both, rows, strict=True) if values]
            mean = sum(value * size for value, size in means) / sum(size for _, size in means)
            self.trainer._pending_metrics[name] = [mean]

    def _lists_by_row(self) -> dict[str, list[Any]]:
        lists = {name: getattr(self.trainer, name, None) for name in BY_ROW}
        return {name: values for name, values in lists.items() if values}

    @contextmanager
    def _part(self, rows: list[int], members: int) -> Iterator[None]:
        """TRL and rollout functions see some rows, and groups of `members` completions."""
        lists = {name: [values[row] for row in rows] for name, values in self._lists_by_row().items()}
        of_trainer, of_args = {"num_generations": members, **lists}, {"num_generations": members}
        with replaced(self.trainer, of_trainer), replaced(self.trainer.args, of_args):
            yield

    # The prompts to sample in full

    def _choose(self, rewards: Floats, key: tuple[int, ...]) -> Rows:
        """(processes, n) numbers of prompts among each process's own, n of them on each.

        Args:
            rewards: (P, G0) of pilots, process by process.
            key: tells this round's draws from others of the run.
        """
        args, processes = self.trainer.args, self.accelerator.num_processes
        expected = self._expected(rewards)
        self.recent = [*self.recent, *expected.tolist()][-RECENT:]
        worth = expected >= worth_going_on(np.array(self.recent), self.first, self.size)
        rng = np.random.default_rng([_DRAW, args.seed, *key])
        self.audited = ~worth & (rng.random(len(expected)) < AUDIT)
        # No more whole groups than a generation batch has: memory is that of TRL's batches.
        wanted = -(-int((worth | self.audited).sum()) // processes)
        number = min(max(1, wanted), args.groups_per_generation // processes, len(expected) // processes)
        # All processes generate equally often, so each continues with its own best prompts, after the audited ones.
        order = np.lexsort((-expected, ~self.audited))  # stable
        mine = order.reshape(-1) // (len(expected) // processes)
        chosen = np.stack([np.sort(order[mine == process][:number]) for process in range(processes)])
        self.whole = chosen.flatten()
        is_whole = np.zeros(len(expected), dtype=bool)
        is_whole[self.whole] = True
        self.audited &= is_whole
        self.committed = is_whole & ~self.audited
        self.rewards = np.full((len(rewards), self.size), np.nan)
        self.rewards[:, : self.first] = rewards
        own: Rows = chosen - np.arange(processes)[:, None] * (len(expected) // processes)
        return own

    def _expected(self, rewards: Floats) -> Floats:
        """(P,) expected reward variances of whole groups."""
        further = self.size - self.first
        if isinstance(self.prompts, PromptSelection):
            posterior = self.prompts.posterior
            posterior.see(rewards)
            return posterior.group_variance(rewards, further, posterior.known(self.prompts.drawn))
        self.posterior.see(rewards)
        self.posterior.learn_prior(rewards)
        return self.posterior.group_variance(rewards, further)

    # The result of a round

    def learn(self, rewards: Tensor) -> Tensor:
        """Take in the rewards of the groups that were sampled in full, (n, G).

        Returns:
            (P, G) rewards of all prompts, NaN for completions that were not sampled.
        """
        self.rewards[self.whole] = rewards.double().cpu().numpy()
        variances = evidence_of(self.rewards)[1]
        found = [self.audited.sum(), variances[self.audited].sum() / AUDIT, variances[self.committed].sum()]
        self.held = self.held * (1 - 1 / MEMORY) + found
        completions = len(self.rewards) * self.first + len(self.whole) * (self.size - self.first)
        self.step += [completions, self.rewards.size, self.committed.sum(), len(self.rewards)]
        self.earned += self.rewards[:, : self.first][~np.isnan(self.rewards[:, : self.first])].tolist()
        return torch.from_numpy(self.rewards)

    def metrics(self) -> dict[str, float]:
        """Metrics of all rounds of a step; the missed variance is an estimate from the latest rounds."""
        completions, places, committed, prompts = self.step.tolist()
        audited, missed, held = self.held.tolist()
        return {
            "sampled_completions": completions,
            "sampled_fraction": completions / places,
            "committed_fraction": committed / prompts,
            **({"pilot_reward": float(np.mean(self.earned))} if self.earned else {}),
            **({"missed_variance": missed / (missed + held)} if audited and missed + held else {}),
        }

    def state(self) -> PilotState:
        """State for a checkpoint, the same on every process."""
        return {"recent": self.recent, "held": self.held.tolist(), "posterior": self.posterior.state()}

    def load(self, state: PilotState) -> None:
        self.recent, self.held = list(state["recent"]), np.array(state["held"])
        self.posterior.load(state["posterior"])


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


def together(like: Any, size: int, rows: list[Any]) -> Any:
    """The inverse of `by_row`.

    Args:
        like: a result of `_generate`: tells which values are lists of rows.
        size: number of its rows.
        rows: from `by_row`.

    >>> together(([[1], [2]], None, {"episode": ["a", "b"]}, []), 2, [[[3], None, {"episode": "c"}, []]])
    ([[3]], None, {'episode': ['c']}, [])
    """
    if isinstance(like, tuple):
        return tuple(together(one, size, [row[number] for row in rows]) for number, one in enumerate(like))
    if isinstance(like, dict):
        return {key: together(one, size, [row[key] for row in rows]) for key, one in like.items()}
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
