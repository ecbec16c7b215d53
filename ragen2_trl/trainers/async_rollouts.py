"""The loop of TRL's asynchronous rollout worker, with pilots, and a tag on each row. It runs in the worker's process.

TRL asks a vLLM server for all G completions of a prompt at once. With pilots the first G0 are scored when they are
there, and the remaining ones are sampled where the policy (`sampling/`) finds that the prompt is worth them. A prompt
that is given up is handed to the trainer as the rows of its pilots, which are counted and not trained.
"""

import asyncio
import inspect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

from ragen2_trl.rollout_events import group_rewards
from ragen2_trl.sampling.policy import Pilots, Policy
from ragen2_trl.sampling.posterior import Floats
from ragen2_trl.trainers.async_groups import TAG, RowTag

_NO_COLUMNS = ("prompt", "completion", "completion_ids")  # of a dataset row, as in TRL


@dataclass
class _Prompt:
    """A prompt whose pilots are being sampled."""

    row: dict[str, Any]  # of the dataset
    remaining: list[tuple[int, dict[str, Any]]]  # what TRL's iterator gives for its completions after the pilots
    pilots: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)  # prompt and result of each, as they come
    given_up: bool = False  # whether the remaining ones are not sampled
    audited: bool = False  # whether they are, though not worth it


class ScoredOnce:
    """A reward function that is called for the pilots of a group, and then for its other completions.

    Args:
        func: TRL's kind, with or without `async`.
    """

    def __init__(self, func: Any):
        self.func = func
        self.known: dict[int, Any] = {}  # of pilots, by the id of a completion, which its group holds

    async def __call__(self, completions: list[Any], **columns: list[Any]) -> list[Any]:
        """The rewards of pilots, or of a whole group whose pilots have been asked for."""
        of_pilots = {place: self.known.pop(id(one)) for place, one in enumerate(completions) if id(one) in self.known}
        new = [place for place in range(len(completions)) if place not in of_pilots]
        found: Any = []
        if new:
            given = {name: [values[place] for place in new] for name, values in columns.items()}
            found = await asyncio.to_thread(self.func, completions=[completions[place] for place in new], **given)
            found = await found if inspect.isawaitable(found) else found
        rewards = of_pilots | dict(zip(new, found, strict=True))
        if not of_pilots:
            self.known |= {id(completions[place]): reward for place, reward in rewards.items()}
        return [rewards[place] for place in range(len(completions))]


class FilteredRolloutLoop(_AsyncRolloutLoop):
    """TRL's rollout loop with pilots and tags; each method goes on to TRL's.

    Args:
        pilots: completions of a pilot, G0; 0 samples all of a group at once.
        seed: of the run.
        score_reward: `snr_score_reward`, by which pilots are judged.
        **kwargs: TRL's own.
    """

    def __init__(self, *, pilots: int, seed: int, score_reward: str | None, **kwargs: Any):
        super().__init__(**kwargs)
        self._pilot_count, self._scored_by = pilots, score_reward
        self._first_number = kwargs.get("dataset_start_index", 0)  # of the groups of this run
        self._pilot_prompts: dict[int, _Prompt] = {}  # with pilots, by the number of the group
        self._pilot_next: deque[tuple[int, dict[str, Any]]] = deque()
        if pilots:
            self._pilot_policy = Policy(None, Pilots(pilots, self.num_generations, groups=1, seed=seed))
            self.reward_funcs: list[Any] = [ScoredOnce(func) for func in self.reward_funcs]  # TRL has their names

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The completions to sample next: those that remain of a chosen prompt, else the pilots of the next prompt.

        No completion waits in a slot of the server for the pilots of its group.
        """
        rows = super()._repeat_iterator()
        if not self._pilot_count:
            yield from rows
        while True:
            if not self._pilot_next:
                group = list(islice(rows, self.num_generations))
                number, row = group[0]
                self._pilot_prompts[number] = _Prompt(row, group[self._pilot_count :])
                self._pilot_next.extend(group[: self._pilot_count])
            yield self._pilot_next.popleft()

    async def _generate_one(self, prompt: Any, tool_dict: Any, tools: Any, group_id: int = 0) -> tuple[Any, ...]:
        sampled = self._pilot_prompts.get(group_id)
        if sampled is not None and sampled.given_up:
            return sampled.pilots[0][1]  # TRL counts completions to G; `_score_group` takes these out again
        result: tuple[Any, ...] = await super()._generate_one(prompt, tool_dict, tools, group_id)
        if sampled is not None and len(sampled.pilots) < self._pilot_count:
            sampled.pilots.append((prompt, result))
            if len(sampled.pilots) == self._pilot_count:
                rewards = await self._pilot_rewards(sampled)
                choice = self._pilot_policy.choose(rewards, self._first_number + group_id, fewest=0)
                sampled.given_up, sampled.audited = not choice.in_full.item(), choice.audited.item()
                self._pilot_next.extendleft(sampled.remaining)
        return result

    async def _pilot_rewards(self, sampled: _Prompt) -> Floats:
        """(1, G0) rewards by which the filter will score the group."""
        columns = {name: [value] * self._pilot_count for name, value in sampled.row.items() if name not in _NO_COLUMNS}
        columns["prompts"] = [prompt for prompt, _ in sampled.pilots]
        columns["completions"] = [result[0] for _, result in sampled.pilots]
        columns["completion_ids"] = [result[1] for _, result in sampled.pilots]
        scored = await asyncio.gather(*(func(**columns) for func in self.reward_funcs))
        named = zip(self.reward_func_names, scored, strict=True)
        counted = [values for name, values in named if self._scored_by in (None, name)]
        per_func = [[torch.nan if one is None else one for one in values] for values in counted]  # (F, G0)
        rewards = torch.tensor(per_func, dtype=torch.float64).view(-1, self._pilot_count).T
        return group_rewards(rewards, torch.ones(len(counted), dtype=torch.float64), self._pilot_count).numpy()

    async def _score_group(self, group: Any) -> list[Any]:
        sampled = self._pilot_prompts.pop(group.group_id, None)
        given_up, audited = (False, False) if sampled is None else (sampled.given_up, sampled.audited)
        if given_up:  # the pilots came first: nothing else of the group was started before they were scored
            for name in type(group).__slots__:
                if isinstance(values := getattr(group, name), list):
                    setattr(group, name, values[: self._pilot_count])
            group.reward_kwargs = {name: values[: self._pilot_count] for name, values in group.reward_kwargs.items()}
        rows: list[Any] = await super()._score_group(group)
        members = [number for number, of_one in enumerate(group.completions_sequences) for _ in of_one]
        for row, member in zip(rows, members, strict=True):
            row.metrics[TAG] = RowTag(len(rows), member, given_up, audited)
        return rows


def filtered_loop(loop_class: type, **kwargs: Any) -> Any:
    """A loop of TRL's or derived from it, such as that of OpenEnv's harness, with what `FilteredRolloutLoop` adds."""
    filtered: Any = type(loop_class.__name__, (FilteredRolloutLoop, loop_class), {})
    return filtered(**kwargs)
