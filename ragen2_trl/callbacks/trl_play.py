"""Episodes under TRL's own contracts: `environment_factory`, `tools`, `rollout_func`, or a single turn.

A `Referee` turns a generation into episodes and decides on success. `HeldOutPlay` lets the trainer play held-out rows.
"""

import copy
import inspect
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
from accelerate.utils import gather_object
from datasets import Dataset

from ragen2_trl.columns import SUCCESS, TASK
from ragen2_trl.record.saved_episodes import PlayedEpisode, episode_of_messages
from ragen2_trl.rollout_events import RolloutEvents, group_rewards
from ragen2_trl.rollouts.sampling import evaluation_mode
from ragen2_trl.sampling.sampler import BY_ROW, replaced

Factories: TypeAlias = dict[str | None, Callable[[], Any]]

SOLVED = 1.0  # reward of a solved task where nothing logs its success, as in `DatasetEnvironment`


class Referee:
    """
    Names the task of a row, and decides whether an episode solved it.

    A reward function can log that in a column `success` (TRL's `log_extra`). If none does, success is a reward of at
    least 1.0 from the environment's `get_reward`, or else from the first reward function.

    Args:
        events: Sampling events of the trainer.
        functions: Reward functions of the trainer that decide instead; the first one with a number does.
    """

    def __init__(self, events: RolloutEvents, functions: Sequence[Any] = ()):
        self.events, self.trainer = events, events.trainer
        names = self.trainer.reward_func_names
        pool: Mapping[str | None, list[Any]] = getattr(self.trainer, "_environment_pool", {})
        kinds = {name: type(made[0]).__name__ for name, made in pool.items()}
        own = [column for column, name in enumerate(names) if name in kinds.values()]
        self._judges = [self.trainer.reward_funcs.index(one) for one in functions] or [*own, 0]
        # Rows of one's own say what counts as success.
        tasks = [getattr(one, "environment", None) for one in self.trainer.reward_funcs]
        self._enough = [getattr(task, "success_at", SOLVED) for task in tasks]
        named = getattr(tasks[self._judges[0]], "name", names[self._judges[0]])
        self._only = kinds.get(None) if kinds and not functions else named

    def task(self, row: Mapping[str, Any]) -> str:
        """The environment of a row, or the function that judges it."""
        return self._only or str(row.get(TASK))

    def episodes(
        self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int], step: int
    ) -> list[PlayedEpisode | None]:
        """Episodes of the latest generation on this process, in the order of its rows, without numbers of groups;
        `None` where one has failed."""
        scored = self.events.scored
        assert scored is not None  # the generation has been scored
        first = self.trainer.accelerator.process_index * len(rows)
        rewards = scored.rewards_per_func[first : first + len(rows)].cpu()
        sums = group_rewards(rewards, self.trainer.reward_weights, 1).flatten().tolist()
        told = scored.columns.get(SUCCESS, [None] * len(rows))
        episodes = [
            episode_of_messages(self.task(row), seed, self._solved(success, each), reward, prompt, completion, step)
            for row, seed, success, each, reward, (prompt, completion, _) in zip(
                rows, seeds, told[: len(rows)], rewards.tolist(), sums, self.events.conversations, strict=True
            )
        ]
        failed = scored.failed[first : first + len(rows)].tolist()
        return [None if lost else episode for episode, lost in zip(episodes, failed, strict=True)]

    def _solved(self, told: Any, rewards: list[float]) -> bool:
        if isinstance(told, Real | np.bool_) and not math.isnan(told):
            return float(told) >= 1
        return next((rewards[one] >= self._enough[one] for one in self._judges if not math.isnan(rewards[one])), False)


class HeldOutPlay:
    """
    Plays held-out rows with the trainer's own generation, and scores them with its reward functions.

    They get environments of their own. The trainer's logs, settings and random states are restored afterwards.

    Args:
        events: Sampling events of the trainer.
        env: The trainer's `environment_factory`, or one or several of its reward functions.
        dataset: Held-out rows.
        num_prompts: Most rows of each environment; a random sample if there are more.
        num_samples: Completions of each row.
        temperature: Of the sampling.
        max_new_tokens: Longest completion in tokens, all turns included.
        batch_size: Completions generated at once on a process, rounded up to whole groups.
        seed: Of the sample of rows and of the sampling.

    Raises:
        TypeError, ValueError: If `env` is not the trainer's, or an argument is outside its range.
    """

    def __init__(
        self,
        events: RolloutEvents,
        env: Any,
        dataset: Any,
        *,
        num_prompts: int,
        num_samples: int,
        temperature: float,
        max_new_tokens: int,
        batch_size: int,
        seed: int,
    ):
        self.trainer = trainer = events.trainer
        functions = [env] if callable(env) else list(env) if isinstance(env, Sequence) else []
        if not functions or any(one not in trainer.reward_funcs for one in functions):
            functions = []
        own: Factories = getattr(trainer, "environment_factories", None) or {}
        factories = own if functions else factories_of(trainer, env, own)
        self.factories = {name: events.watched(factory) for name, factory in factories.items()}
        self.pool = {name: [factory()] for name, factory in self.factories.items()}
        for name, (made,) in self.pool.items():
            if type(made) is not type(expected := trainer._environment_pool[name][0]):
                raise ValueError(
                    f"env must make {type(expected).__name__}, as the trainer's environment_factory does, got "
                    f"{type(made).__name__}"
                )
        for setting, value, least in (("num_prompts", num_prompts, 2), ("num_samples", num_samples, 1)):
            if value < least:
                raise ValueError(f"{setting} must be at least {least}, got {value!r}")
        if temperature <= 0:
            raise ValueError(f"temperature must be above 0 where TRL generates, got {temperature!r}")
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"dataset must be a datasets.Dataset of held-out rows, like train_dataset, got {dataset!r:.60}"
            )
        self.referee = Referee(events, functions)
        self.num_samples, self.seed, self.batch_size = num_samples, seed, batch_size
        self.temperature, self.max_new_tokens = temperature, max_new_tokens
        dataset = trainer._remove_unused_columns(dataset, description="held-out")
        by_task: defaultdict[str, list[int]] = defaultdict(list)
        named = dataset[TASK][:] if TASK in dataset.column_names else [None] * len(dataset)
        for number, name in enumerate(named):
            by_task[self.referee.task({TASK: name})].append(number)
        self.tasks: dict[str, Dataset] = {}
        for task in sorted(by_task, key=lambda task: [*self.factories, task].index(task)):  # the first factory first
            numbers = by_task[task]
            drawn = random.Random(seed).sample(numbers, min(num_prompts, len(numbers)))
            self.tasks[task.replace("/", "_")] = dataset.select(sorted(drawn))
        few = {task: len(rows) for task, rows in self.tasks.items() if len(rows) < 2}
        if few or not self.tasks:  # one prompt has no spread to make an interval of
            raise ValueError(f"dataset must have at least 2 rows of each environment, got {few or 0}")

    def play(self, rows: Dataset) -> tuple[dict[str, list[float]], list[PlayedEpisode | None]]:
        """Columns for `summarize`, and the episodes, `num_samples` for each row. A call for all processes together."""
        accelerator = self.trainer.accelerator
        processes, me = accelerator.num_processes, accelerator.process_index
        numbers = [number for number in range(len(rows)) for _ in range(self.num_samples)]
        # Each call gets whole groups, which vLLM samples from one prompt, and equally many rows on each process.
        unit = math.lcm(processes, self.num_samples)
        size = math.ceil(self.batch_size * processes / unit) * unit
        played: list[tuple[PlayedEpisode | None, int]] = []
        seed = int(np.random.SeedSequence([self.seed, me]).generate_state(1)[0])
        with evaluation_mode(self.trainer.model, seed), self._aside():
            for start in range(0, len(numbers), size):
                block = numbers[start : start + size]
                filled = block + [0] * (-len(block) % unit)  # the results of added rows are dropped
                share = len(filled) // processes
                played += gather_object(self._generated(rows, filled[me * share :][:share]))[: len(block)]
        episodes = [episode for episode, _ in played]
        columns = {
            "success": [math.nan if one is None else float(one.success) for one in episodes],
            "return": [0.0 if one is None else one.episode_return or 0.0 for one in episodes],
            "turns": [0.0 if one is None else float(len(one.turns)) for one in episodes],
            "completion_length": [float(length) for _, length in played],
        }
        return columns, episodes

    def _generated(self, rows: Dataset, numbers: list[int]) -> list[tuple[PlayedEpisode | None, int]]:
        """An episode for each of these rows, and the number of tokens that the model wrote in it."""
        inputs = [dict(rows[number]) for number in numbers]
        seeds = [seed_of(row, number) for row, number in zip(inputs, numbers, strict=True)]
        self.trainer._generate_and_score_completions(inputs)
        episodes = self.referee.episodes(inputs, seeds, self.trainer.state.global_step)
        return list(zip(episodes, (written for *_, written in self.referee.events.conversations), strict=True))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Inside, the trainer has the settings, logs and environments of the evaluation."""
        trainer = self.trainer
        values = {name: getattr(trainer, name) for name in BY_ROW if hasattr(trainer, name)}
        values |= {
            "num_generations_eval": self.num_samples,
            "max_completion_length": self.max_new_tokens,
            "_metrics": {**trainer._metrics, "eval": defaultdict(list)},
            "_logs": copy.deepcopy(trainer._logs),
            # What a reward function has logged before it raised.
            "_pending_extra_logs": defaultdict(list),
            "_pending_metrics": defaultdict(list),
        }
        if self.factories:
            values |= {"environment_factories": self.factories, "_environment_pool": self.pool}
        backend, limit = "generation_config", "max_new_tokens"
        if trainer.use_vllm:
            backend, limit = "vllm_generation", "max_completion_length"
        sampling = {"temperature": self.temperature, limit: self.max_new_tokens}
        asked = {"temperature": self.temperature}  # rollout functions read it there
        with replaced(trainer, values), replaced(getattr(trainer, backend), sampling), replaced(trainer.args, asked):
            yield


def seed_of(row: Mapping[str, Any], otherwise: int) -> int:
    """The row's own `seed`, if it is an int."""
    seed = row.get("seed")
    return seed if isinstance(seed, int) else otherwise


def factories_of(trainer: Any, env: Any, own: Factories) -> Factories:
    """Factories by the names that the trainer's `own` have; `None` is the only one.

    Raises:
        TypeError: If `env` is no factory, or has other names.
    """
    given: Factories = env if isinstance(env, dict) else {None: env}
    if set(given) == set(own) and all(map(_is_factory, given.values())):
        return given
    names = "" if None in own else f" (a dict with {sorted(map(str, own))})"
    factory = f"environment_factory{names} or its " if own else ""
    raise TypeError(
        f"env must be an Environment of ragen2_trl.envs or a list of them, got {env!r:.80}. With dataset=..., the "
        f"trainer's {factory}reward functions are allowed, too: {', '.join(trainer.reward_func_names)}."
    )


def _is_factory(given: Any) -> bool:
    """Whether it can be called without arguments, unlike a reward function."""
    if not callable(given):
        return False
    parameters = inspect.signature(given).parameters.values()
    return all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters)
