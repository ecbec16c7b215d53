"""Some completions of each prompt are sampled and scored first, the rest only where rewards may be expected to vary.

A filter saves the update once the samples are paid for; this saves the samples, from the first epoch on. Pilot-Commit
(arXiv 2605.26606) and AERO (arXiv 2602.14338) go on where a pilot's rewards vary. Here a prompt is worth its remaining
completions if these buy as much expected reward variance as completions do on average, pilots included.

TRL's method is called twice. It prepares the pilots as it would a batch, and is left once they have been sampled and
scored. It then makes the batch of all prompts that are sampled whole, with the pilots as the first of their
completions. So groups, advantages and logged completions are those of TRL on these prompts, and nothing after sampling
knows of pilots.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import RLOOTrainer

from ragen2_trl.rollout_events import group_rewards
from ragen2_trl.trainers.posterior import Floats, RewardPosterior, evidence_of
from ragen2_trl.trainers.processes import own_share
from ragen2_trl.trainers.prompt_selection import PromptSelection, SamplerOrder
from ragen2_trl.trainers.selection import score_rewards

Generate = Callable[[list[Any]], tuple[Any, ...]]
Calculate = Callable[..., Tensor]
Completion = tuple[list[Any], dict[str, Any]]  # its part of what `_generate` gave, and what was logged of it

AUDIT = 0.02
"""Share of the prompts not worth going on with that are sampled whole all the same: what they turn out to hold says
what is missed. At 70 % dead prompts these are 4 % of all completions."""

MEMORY = 256  # rounds after which what was found in audits counts 1/e
RECENT = 256  # prompts that say what completions buy on average
_DRAW = 0xA0D1  # tells our draws from others of the same seed

# What TRL keeps by row for tools: what is sampled for some of the rows must find theirs.
BY_ROW = ("environments", "_batch_environments", "_sync_tool_dicts", "_async_tool_dicts")


def worth_going_on(expected: Floats, first: int, size: int) -> float:
    """The expected variance from which on prompts are worth their other completions: so that prompts like these yield
    most reward variance for a completion.

    Args:
        expected: (n,) reward variances to be expected of prompts, given their pilots.
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


@dataclass(frozen=True)
class Pilots:
    """What was sampled first for the P prompts of a round.

    Args:
        generated: what TRL's `_generate` gave on this process.
        logged: what reward functions have logged of each of its completions, by column.
        rewards_per_func: (P·G0, F) over all processes.
    """

    generated: tuple[Any, ...]
    logged: list[dict[str, Any]]
    rewards_per_func: Tensor

    @property
    def rows(self) -> "list[Completion]":
        """This process's, one by one."""
        return list(zip(by_row(self.generated, len(self.logged)), self.logged, strict=True))


class PilotSampling:
    """Samples the generations of a trainer in two stages.

    Args:
        trainer: One of ours.
        prompts: What chooses its prompts; what that knows of them is asked, too.
    """

    def __init__(self, trainer: Any, prompts: PromptSelection | SamplerOrder):
        self.trainer = trainer
        self.args = trainer.args
        self.accelerator = trainer.accelerator
        self.first: int = self.args.snr_pilot_generations
        self.size: int = self.args.num_generations
        self.prompts = prompts
        self.posterior = RewardPosterior(0, 1.0)  # where prompts are not known: what there is to know of all of them
        self.recent: list[float] = []
        self.held = np.zeros(3)  # groups audited, variance they speak for, and variance of prompts gone on with
        self._stage: _Look | _Rest | None = None
        self.begin_step()

    # A round: from rows of prompts to TRL's batch of those that are sampled whole

    def sample(
        self, inputs: list[dict[str, Any]], key: tuple[int, ...], score: Callable[[list[dict[str, Any]]], Any]
    ) -> Any:
        """TRL's batch of whole groups; `inputs` become their rows. A call for all processes together.

        Args:
            inputs: this process's rows, G for each prompt.
            key: tells this round from others of the run.
            score: TRL's `_generate_and_score_completions`.
        """
        looked = self._look(inputs, score)
        per_func = looked.rewards_per_func
        rewards = self._scored(looked)
        whole = self._choose(rewards.double().cpu().numpy(), key)
        mine = own_share(whole, self.accelerator)
        completions = looked.rows
        self._tell_of_others(looked.generated, completions)
        if self.accelerator.num_processes > 1:  # prompts are dealt again, as many to each process
            # Rows of members that were no pilots, into which nobody has written.
            prompts, completions = gather_object(inputs[self.size - 1 :: self.size]), gather_object(completions)
            inputs[:] = [copy.deepcopy(prompts[prompt]) for prompt in mine for _ in range(self.size)]
        else:
            inputs[:] = [inputs[prompt * self.size + member] for prompt in whole for member in range(self.size)]
        kept = [completions[prompt * self.first + member] for prompt in mine for member in range(self.first)]
        of_groups = per_func.view(-1, self.first, per_func.size(1))[whole]
        rest = _Rest(self.trainer, inputs, self.first, self.size, kept, of_groups)
        return self._during(rest, lambda: score(inputs))

    def _scored(self, looked: Pilots) -> Tensor:
        """(P, G0) what groups are scored by, of the pilots."""
        sums = group_rewards(looked.rewards_per_func, self.trainer.reward_weights, self.first)
        if self.args.snr_score_reward is None:
            return sums
        logs: list[dict[str, Any]] = gather_object(looked.logged)
        columns = {column: [log.get(column) for log in logs] for column in {name for log in logs for name in log}}
        return score_rewards(
            self.args.snr_score_reward, sums, self.trainer.reward_func_names, looked.rewards_per_func, columns
        )

    def _tell_of_others(self, generated: tuple[Any, ...], completions: list[Completion]) -> None:
        """Tokens of pilots that are in no batch have been sampled, too."""
        begin = self.accelerator.process_index * len(completions) // self.first
        others = [row for number, (row, _) in enumerate(completions) if begin + number // self.first not in self.whole]
        self.trainer.rollout_events.generated(together(generated, len(completions), others))

    def generate(self, generate: Generate, calculate: Calculate, prompts: list[Any]) -> tuple[Any, ...]:
        """In place of TRL's `_generate`."""
        return generate(prompts) if self._stage is None else self._stage.generate(generate, calculate, prompts)

    def calculate(self, calculate: Calculate, *rows: list[Any]) -> Tensor:
        """In place of TRL's `_calculate_rewards`: (B, F)."""
        return calculate(*rows) if self._stage is None else self._stage.calculate(calculate, *rows)

    def _during(self, stage: "_Look | _Rest", call: Callable[[], Any]) -> Any:
        self._stage = stage
        try:
            return call()
        finally:
            self._stage = None

    def _look(self, inputs: list[dict[str, Any]], score: Callable[[list[dict[str, Any]]], Any]) -> Pilots:
        # Copies: what plays an episode may write into its row, and these are rows of the batch to come, too.
        rows = [copy.deepcopy(row) for number, row in enumerate(inputs) if number % self.size < self.first]
        try:
            self._during(_Look(self.trainer, rows, self.first), lambda: score(rows))
        except _Looked as looked:
            return looked.pilots
        raise RuntimeError(f"{type(self.trainer).__name__} has not called _generate; allowed: TRL's sampling.")

    # Which prompts are sampled whole

    def _choose(self, rewards: Floats, key: tuple[int, ...]) -> list[int]:
        """Numbers of prompts, over all processes, as many for each of them."""
        expected = self._expected(rewards)
        self.recent = [*self.recent, *expected.tolist()][-RECENT:]
        self.committed = expected >= worth_going_on(np.array(self.recent), self.first, self.size)
        rng = np.random.default_rng([_DRAW, self.args.seed, *key])
        self.audited = ~self.committed & (rng.random(len(expected)) < AUDIT)
        # No more whole groups than a generation batch has: memory is that of TRL's batches, and there is room to wait.
        places = max(0, self.args.groups_per_generation - int(self.audited.sum()))
        self.committed[np.argsort(-expected, kind="stable")[places:]] = False
        whole = self.committed | self.audited
        processes = self.accelerator.num_processes
        # The next best, where processes would else wait for others; and so where nothing is worth it.
        room = -int(whole.sum()) % processes if whole.any() else processes
        whole[[prompt for prompt in np.argsort(-expected, kind="stable") if not whole[prompt]][:room]] = True
        self.whole = np.flatnonzero(whole)
        self.rewards = np.full((len(rewards), self.size), np.nan)
        self.rewards[:, : self.first] = rewards
        return [int(prompt) for prompt in self.whole]

    def _expected(self, rewards: Floats) -> Floats:
        """(P,) reward variances of whole groups."""
        further = self.size - self.first
        if isinstance(self.prompts, PromptSelection):
            posterior = self.prompts.posterior
            posterior.see(rewards)
            return posterior.group_variance(rewards, further, posterior.known(self.prompts.rows))
        self.posterior.see(rewards)
        self.posterior.learn_prior(rewards)
        return self.posterior.group_variance(rewards, further)

    # What has come of it

    def learn(self, rewards: Tensor) -> Tensor:
        """Take in the rewards of the groups that were sampled whole, (n, G).

        Returns:
            (P, G) those of all prompts, NaN for completions that were not sampled.
        """
        self.rewards[self.whole] = rewards.double().cpu().numpy()
        variances = evidence_of(self.rewards)[1]
        found = [self.audited.sum(), variances[self.audited].sum() / AUDIT, variances[self.committed].sum()]
        self.held = self.held * (1 - 1 / MEMORY) + found
        completions = len(self.rewards) * self.first + len(self.whole) * (self.size - self.first)
        self.step += [completions, self.rewards.size, self.committed.sum(), len(self.rewards)]
        self.earned += self.rewards[:, : self.first][~np.isnan(self.rewards[:, : self.first])].tolist()
        return torch.from_numpy(self.rewards)

    def begin_step(self) -> None:
        self.step = np.zeros(4)  # completions and places, prompts gone on with and all
        self.earned: list[float] = []  # by pilots

    def metrics(self) -> dict[str, float]:
        """Of all rounds of a step; what is missed, of those of late."""
        completions, places, committed, prompts = self.step.tolist()
        audited, missed, held = self.held.tolist()
        return {
            "sampled_completions": completions,
            "sampled_fraction": completions / places,
            "committed_fraction": committed / prompts,
            **({"pilot_reward": float(np.mean(self.earned))} if self.earned else {}),
            **({"missed_variance": missed / (missed + held)} if audited and missed + held else {}),
        }

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, the same on every process."""
        return {"recent": self.recent, "held": self.held.tolist(), "posterior": self.posterior.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.recent, self.held = list(state["recent"]), np.array(state["held"])
        self.posterior.load(state["posterior"])


class _Looked(Exception):
    """Leaves TRL's method once pilots are sampled and scored."""

    def __init__(self, pilots: Pilots):
        super().__init__("pilots are sampled and scored")
        self.pilots = pilots


class _Look:
    """Pilots are sampled and scored.

    Args:
        trainer: One of ours.
        inputs: their rows.
        first: completions of a pilot, G0.
    """

    def __init__(self, trainer: Any, inputs: list[dict[str, Any]], first: int):
        self.trainer = trainer
        self.inputs = inputs
        self.first = first

    def generate(self, generate: Generate, calculate: Calculate, prompts: list[Any]) -> tuple[Any, ...]:
        trainer = self.trainer
        trainer.rollout_events.rows(self.inputs)
        with members_asked_for(trainer, self.first):
            generated = generate(prompts)
        # As TRL does it with what a rollout function gives, once `_generate` has returned.
        fields = [next((one for one in row if isinstance(one, dict)), {}) for row in by_row(generated, len(prompts))]
        inputs = [{**row, **own} for row, own in zip(self.inputs, fields, strict=True)]
        completions = generated[2 if isinstance(trainer, RLOOTrainer) else 3]
        rewards = calculate(inputs, prompts, completions, generated[1])
        raise _Looked(Pilots(generated, taken_logs(trainer, len(prompts)), rewards))

    def calculate(self, calculate: Calculate, *rows: list[Any]) -> Tensor:
        raise AssertionError("TRL's method was left before")


class _Rest:
    """The other completions of prompts are sampled and scored, and put behind those that are there.

    Args:
        trainer: One of ours.
        inputs: this process's rows, n·G.
        first, size: completions of a pilot and of a group, G0 and G.
        kept: this process's pilots, n·G0.
        rewards_per_func: (N, G0, F) over all processes.
    """

    def __init__(
        self,
        trainer: Any,
        inputs: list[dict[str, Any]],
        first: int,
        size: int,
        kept: list[Completion],
        rewards_per_func: Tensor,
    ):
        self.trainer = trainer
        self.inputs = inputs
        self.kept = kept
        self.rewards_per_func = rewards_per_func
        self.further = size - first
        self.rest = [row for row in range(len(inputs)) if row % size >= first]
        pilots = [row for row in range(len(inputs)) if row % size < first]
        self.order = np.argsort([*pilots, *self.rest], kind="stable").tolist()  # from pilots, then others to rows

    def generate(self, generate: Generate, calculate: Calculate, prompts: list[Any]) -> tuple[Any, ...]:
        self.trainer.rollout_events.rows(self._of_rest(self.inputs))
        with members_asked_for(self.trainer, self.further), self._tools_of_rest():
            generated = generate(self._of_rest(prompts))
        rows = [row for row, _ in self.kept] + by_row(generated, len(self.rest))
        whole: tuple[Any, ...] = together(generated, len(self.rest), [rows[number] for number in self.order])
        return whole

    def calculate(self, calculate: Calculate, *rows: list[Any]) -> Tensor:
        with self._tools_of_rest():
            rewards = calculate(*map(self._of_rest, rows))
        logs = [log for _, log in self.kept] + taken_logs(self.trainer, len(self.rest))
        for column in sorted({column for log in logs for column in log}):
            self.trainer._pending_extra_logs[column] = [logs[number].get(column) for number in self.order]
        groups = self.rewards_per_func
        rewards = rewards.view(len(groups), self.further, -1)
        return torch.cat([groups.to(rewards), rewards], dim=1).flatten(0, 1)

    def _of_rest(self, rows: list[Any]) -> list[Any]:
        return [rows[row] for row in self.rest]

    def _tools_of_rest(self) -> AbstractContextManager[None]:
        lists = {name: getattr(self.trainer, name, None) for name in BY_ROW}
        return replaced(self.trainer, {name: self._of_rest(one) for name, one in lists.items() if one})


def by_row(generated: tuple[Any, ...], size: int) -> list[list[Any]]:
    """What TRL's `_generate` gave, for each of so many rows: lists of as many items and those in dictionaries are.

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
        like: what `_generate` gave for some rows: says what is by row.
        size: how many these were.
        rows: of all.

    >>> together(([[1], [2]], None, {"episode": ["a", "b"]}, []), 2, [[[3], None, {"episode": "c"}, []]])
    ([[3]], None, {'episode': ['c']}, [])
    """
    if isinstance(like, tuple):
        return tuple(together(one, size, [row[number] for row in rows]) for number, one in enumerate(like))
    if isinstance(like, dict):
        return {key: together(one, size, [row[key] for row in rows]) for key, one in like.items()}
    if like is None:  # these may happen to have no images
        return rows if any(row is not None for row in rows) else None
    return rows if isinstance(like, list) and len(like) == size else like


def taken_logs(trainer: Any, size: int) -> list[dict[str, Any]]:
    """What reward functions have put aside for TRL's table of completions, for each of so many rows."""
    logs: list[dict[str, Any]] = [{} for _ in range(size)]
    for column, values in trainer._pending_extra_logs.items():
        for log, value in zip(logs, values, strict=True):
            log[column] = value
    trainer._pending_extra_logs.clear()
    return logs


@contextmanager
def members_asked_for(trainer: Any, number: int) -> Iterator[None]:
    """For a while, groups have so many completions, for TRL and for rollout functions, which may ask either."""
    with replaced(trainer, {"num_generations": number}), replaced(trainer.args, {"num_generations": number}):
        yield


@contextmanager
def replaced(holder: Any, values: dict[str, Any]) -> Iterator[None]:
    """For a while, give attributes of an object other values."""
    usual = {name: getattr(holder, name) for name in values}
    vars(holder).update(values)
    try:
        yield
    finally:
        vars(holder).update(usual)
