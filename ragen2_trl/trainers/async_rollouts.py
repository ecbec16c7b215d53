"""The loop of TRL's asynchronous rollout worker, with pilots, and a tag on each row. It runs in the worker's process.

TRL asks a vLLM server for all G completions of a prompt at once. With pilots the first G0 are scored when they are
there, and the others are asked for where the prompt is worth them, by the rule of `pilots.py`. A prompt that is given
up is handed to the trainer as the rows of its pilots: what was sampled is seen, and nothing of it is trained.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

from ragen2_trl.rollout_events import group_rewards
from ragen2_trl.sampling.policy import AUDIT, RECENT, least_worth
from ragen2_trl.sampling.posterior import Floats, RewardPosterior
from ragen2_trl.trainers.async_groups import TAG, RowTag

_DRAW = 0xA51C  # tells our draws from others of the same seed
_NO_COLUMNS = ("prompt", "completion", "completion_ids")  # of a dataset row, as in TRL


@dataclass
class _Look:
    """A prompt whose pilots are being sampled.

    Args:
        row: of the dataset.
        rest: what TRL's iterator gives for its other completions.
        pilots: prompt and result of each pilot, as they come.
        goes_on: whether its other completions are sampled; `None` until its pilots are scored.
        audited: whether they are sampled to see what is missed.
    """

    row: dict[str, Any]
    rest: list[tuple[int, dict[str, Any]]]
    pilots: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)
    goes_on: bool | None = None
    audited: bool = False


class ScoredOnce:
    """A reward function that is not called again for completions it has scored, as pilots are scored first.

    Args:
        func: TRL's kind, with or without `async`.
    """

    def __init__(self, func: Any):
        self.func = func
        self.known: dict[int, Any] = {}  # by the id of a completion, which its group holds

    async def __call__(self, completions: list[Any], **columns: list[Any]) -> list[Any]:
        new = [number for number, one in enumerate(completions) if id(one) not in self.known]
        if new:
            given = {name: [values[number] for number in new] for name, values in columns.items()}
            given["completions"] = [completions[number] for number in new]
            found = self.func(**given) if _is_async(self.func) else asyncio.to_thread(self.func, **given)
            self.known.update({id(completions[number]): one for number, one in zip(new, await found, strict=True)})
        return [self.known[id(one)] for one in completions]

    def forget(self, completions: list[Any]) -> None:
        for one in completions:
            self.known.pop(id(one), None)


def _is_async(func: Any) -> bool:
    return asyncio.iscoroutinefunction(func) or asyncio.iscoroutinefunction(getattr(func, "__call__", None))  # noqa: B004


class PilotChoice:
    """Which prompts are worth their other completions, one after the other. See `least_worth`.

    Args:
        first: completions of a pilot, G0.
        size: of a group, G.
        seed: of the run.
    """

    def __init__(self, first: int, size: int, seed: int):
        self.first, self.size = first, size
        self.posterior = RewardPosterior(0, 1.0)  # of all prompts together
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.rng = np.random.default_rng([_DRAW, seed])

    def choose(self, rewards: Floats) -> tuple[bool, bool]:
        """Take in the rewards of a prompt's pilots, (1, G0) with NaN where there is none.

        Returns:
            Whether the prompt is worth its other completions; and if not, whether they are sampled all the same.
        """
        self.posterior.see(rewards)
        self.posterior.learn_prior(rewards)
        (expected,) = self.posterior.group_variance(rewards, self.size - self.first)
        self.recent.append(float(expected))
        threshold = least_worth(np.array(self.recent), self.first, self.size)
        is_worth = bool(expected >= threshold)
        return is_worth, not is_worth and bool(self.rng.random() < AUDIT)


class FilteredRolloutLoop(_AsyncRolloutLoop):
    """TRL's rollout loop with pilots and tags; each method goes on to TRL's.

    Args:
        snr_pilots: completions of a pilot; 0 samples all of a group at once.
        snr_seed: of the run.
        snr_score_reward: see `SNRFilterConfig`; pilots are judged by it.
        **kwargs: TRL's own.
    """

    def __init__(self, *, snr_pilots: int = 0, snr_seed: int = 0, snr_score_reward: str | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self._first = snr_pilots
        self._score_reward = snr_score_reward
        self._looks: dict[int, _Look] = {}
        self._next: deque[tuple[int, dict[str, Any]]] = deque()
        if snr_pilots:
            self._choice = PilotChoice(snr_pilots, self.num_generations, snr_seed)
            self.reward_funcs: list[Any] = [ScoredOnce(func) for func in self.reward_funcs]  # TRL has their names

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The completions to sample next: the rest of a group that goes on, else the pilots of the next prompt.

        No completion waits in a slot of the server for the pilots of its group.
        """
        rows = super()._repeat_iterator()
        if not self._first:
            yield from rows
        while True:
            if not self._next:
                group = list(islice(rows, self.num_generations))
                number, row = group[0]
                self._looks[number] = _Look(row, group[self._first :])
                self._next.extend(group[: self._first])
            yield self._next.popleft()

    async def _generate_one(
        self, prompt: Any, tool_dict: dict[str, Any], tools: list[Any], group_id: int = 0
    ) -> tuple[Any, ...]:
        look = self._looks.get(group_id)
        if look is not None and look.goes_on is False:
            return look.pilots[0][1]  # TRL counts completions to G; `_score_group` takes these out again
        result: tuple[Any, ...] = await super()._generate_one(prompt, tool_dict, tools, group_id)
        if look is not None and look.goes_on is None:
            look.pilots.append((prompt, result))
            if len(look.pilots) == self._first:
                is_worth, look.audited = self._choice.choose(await self._pilot_rewards(look))
                look.goes_on = is_worth or look.audited
                self._next.extendleft(look.rest)
        return result

    async def _pilot_rewards(self, look: _Look) -> Floats:
        """(1, G0) rewards by which the filter will score the group."""
        columns = {name: [value] * self._first for name, value in look.row.items() if name not in _NO_COLUMNS}
        columns["prompts"] = [prompt for prompt, _ in look.pilots]
        columns["completions"] = [result[0] for _, result in look.pilots]
        columns["completion_ids"] = [result[1] for _, result in look.pilots]
        scored = await asyncio.gather(*(func(**columns) for func in self.reward_funcs))
        names = self.reward_func_names[: len(scored)]
        weights = torch.tensor([float(self._score_reward in (None, name)) for name in names])
        values = [[torch.nan if one is None else one for one in column] for column in scored]
        per_func = torch.tensor(values, dtype=torch.float64).T  # (G0, F)
        return group_rewards(per_func[:, weights > 0], weights[weights > 0].double(), self._first).numpy()

    async def _score_group(self, group: Any) -> list[Any]:
        look = self._looks.pop(group.group_id, None)
        given_up = look is not None and not look.goes_on
        if given_up:  # the pilots came first: nothing else of the group was started before they were scored
            for name, values in _lists(group).items():
                setattr(group, name, values[: self._first])
            group.reward_kwargs = {name: values[: self._first] for name, values in group.reward_kwargs.items()}
        rows: list[Any] = await super()._score_group(group)
        if self._first:
            for func in self.reward_funcs:
                func.forget(group.completions)
        members = [number for number, of_one in enumerate(group.completions_sequences) for _ in of_one]
        sampled, audited = len(group.completions_sequences), look is not None and look.audited
        for row, member in zip(rows, members, strict=True):
            row.metrics[TAG] = RowTag(len(rows), member, sampled, given_up, audited)
        return rows


def _lists(group: Any) -> dict[str, list[Any]]:
    """The lists of a group of TRL's, by conversation."""
    return {name: value for name in type(group).__slots__ if isinstance(value := getattr(group, name), list)}
