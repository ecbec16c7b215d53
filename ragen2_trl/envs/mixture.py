"""Several tasks in one run: a `TaskMixture` stands where an environment does."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from datasets import Dataset, concatenate_datasets

from ragen2_trl.columns import ALL_TASKS, TASK
from ragen2_trl.envs.checks import check_count
from ragen2_trl.envs.environment import Environment, RewardFunc, reward_func
from ragen2_trl.envs.outcomes import EpisodeOutcome
from ragen2_trl.envs.play import OnPlayed, Play, nobody_looks
from ragen2_trl.envs.responses import Completion


class TaskMixture:
    """Several tasks in one run, each played and rewarded by its own rules.

    It stands where an [`Environment`] does: for datasets, rewards, `TextRollout` and evaluation. The column
    `environment` of a row says whose task it is. All completions of a prompt are of one task, so groups are, too.

    Args:
        environments: Two tasks or more, with different names and the text protocol; all shown in words or all as
            pictures.
        weights: Share of the rows for each of them, above 0; default: equal shares.

    Raises:
        ValueError: If an argument is outside its range.
    """

    protocol = "text"

    def __init__(self, environments: Sequence[Environment], weights: Sequence[float] | None = None):
        names = [env.name for env in environments]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ValueError(f"environments must be at least two different tasks, got {names}")
        weights = [1.0] * len(names) if weights is None else list(weights)
        if len(weights) != len(names) or not all(0 < weight < float("inf") for weight in weights):
            raise ValueError(f"weights must be a number above 0 for each of {names}, got {weights}")
        if by_tools := [env.name for env in environments if env.protocol != self.protocol]:
            raise ValueError(
                f"environments must have protocol='text' in a mixture, got protocol='tools' for {by_tools}"
            )
        pictured = [env.name for env in environments if env.shows_images]
        if 0 < len(pictured) < len(names):
            raise ValueError(
                f"environments must all be shown in words or all as pictures, got pictures for {pictured}"
            )
        forced = {env.forced_tag for env in environments}
        if len(forced) > 1:
            raise ValueError(f"environments must all force the same tag or none (force_think), got {sorted(forced)}")
        turn_tokens = [env.max_turn_tokens for env in environments]
        self.forced_tag = forced.pop()
        self.max_turn_tokens = max(filter(None, turn_tokens)) if all(turn_tokens) else None
        self.needs_rollout = any(env.needs_rollout for env in environments)
        self.environments = {env.name: env for env in environments}
        self.weights = [weight / sum(weights) for weight in weights]
        self.name = ",".join(names)
        self.shows_images = bool(pictured)
        self.max_turns = max(env.max_turns for env in environments)
        self.max_actions = max(env.max_actions for env in environments)
        self.workers = max(env.workers for env in environments)
        self._on_played: OnPlayed = nobody_looks

    @property
    def on_played(self) -> OnPlayed:
        """Who is told of what is played for rewards, whichever task it is of."""
        return self._on_played

    @on_played.setter
    def on_played(self, listener: OnPlayed) -> None:
        self._on_played = listener
        for env in self.environments.values():
            env.on_played = listener

    def dataset(
        self, num_prompts: int | None = None, seed: int = 0, split: str = "train", data: str | None = None
    ) -> Dataset:
        """Prompts of all tasks by their weights, shuffled; equal arguments give equal rows.

        Args:
            num_prompts: Number of rows, so many that each task has one.
            seed: Which stream of tasks to draw from, see `Environment.dataset`.
            split: `"train"` or `"test"`.
            data: Must be `None`: each task makes its own, as no source has tasks of several kinds.

        Returns:
            The rows of `Environment.dataset`, with the name of their task in `environment` and `None` in the columns
            of other tasks.

        Raises:
            ValueError: If an argument is outside its range.
        """
        if data is not None:
            raise ValueError(f"data must be None for several tasks ({self.name}), got {data!r}")
        if num_prompts is None:
            raise ValueError(f"num_prompts must be given for several tasks ({self.name}), got None")
        check_count("num_prompts", num_prompts, 1, 10_000_000)
        parts = []
        for env, count in zip(self.environments.values(), self.shares(num_prompts), strict=True):
            if count == 0:
                raise ValueError(f"num_prompts must be larger, got {num_prompts}: {env.name} gets none of them")
            rows = env.dataset(count, seed, split)
            parts.append(rows.add_column(TASK, [env.name] * count))
        order = list(range(num_prompts))
        random.Random(f"mixture/{seed}").shuffle(order)
        return concatenate_datasets(parts).select(order)

    def shares(self, count: int) -> list[int]:
        """So many rows, shared among the tasks by their weights: the largest remainders get what rounding leaves."""
        exact = [count * weight for weight in self.weights]
        shares = [int(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda task: shares[task] - exact[task])
        for task in by_remainder[: count - sum(shares)]:
            shares[task] += 1
        return shares

    def plays(self, seeds: Sequence[int], columns: Mapping[str, Sequence[Any]], step: int = 0) -> list[Play]:
        """A play for each row by the rules of its task, see `Environment.plays`."""
        plays: list[Any] = [None] * len(seeds)
        for env, rows in self._rows_by_task(columns[TASK]):
            of_task = env.plays([seeds[row] for row in rows], _columns_of(columns, rows, len(seeds)), step)
            for row, play in zip(rows, of_task, strict=True):
                plays[row] = play
        return plays

    def demonstrations(self, num: int, seed: int, data: str | None = None) -> Dataset:
        """Solved training tasks of all kinds by their weights, see `Environment.demonstrations`."""
        if data is not None:
            raise ValueError(f"data must be None for several tasks ({self.name}), got {data!r}")
        envs = zip(self.environments.values(), self.shares(num), strict=True)
        return concatenate_datasets([env.demonstrations(count, seed) for env, count in envs])

    @property
    def warm_start(self) -> str | None:
        """A command for each task that has one, see `Environment.warm_start`."""
        commands = [env.warm_start for env in self.environments.values()]
        return "; ".join(filter(None, commands)) or None

    @property
    def reward_funcs(self) -> list[RewardFunc]:
        """One function for TRL trainers: the return of each episode, by the rules of its task.

        It logs the metrics of each task, and under `env/all/` those of all episodes (see `Environment.reward_funcs`).
        """
        return [reward_func(self, "task_return", "episode_return")]

    @property
    def success_func(self) -> RewardFunc:
        """Like the function in `reward_funcs`, but 1.0 where the task is solved and 0.0 elsewhere."""
        return reward_func(self, "task_success", "success")

    @property
    def summary(self) -> dict[str, Any]:
        """What a model card says of the tasks."""
        options: dict[str, Any] = {name: dict(env.options) for name, env in self.environments.items()}
        return {
            "name": self.name,
            "options": {**options, "weights": self.weights},
            "max_turns": self.max_turns,
            "max_actions": self.max_actions,
        }

    def outcomes(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        seed: Sequence[int],
        columns: Mapping[str, Any],
        step: int,
    ) -> list[EpisodeOutcome]:
        """What came of each row's episode by the rules of its task, see `Environment.outcomes`."""
        outcomes: list[Any] = [None] * len(seed)
        for env, rows in self._rows_by_task(columns[TASK]):
            of_task = env.outcomes(
                [prompts[row] for row in rows],
                [completions[row] for row in rows],
                [seed[row] for row in rows],
                _columns_of(columns, rows, len(seed)),
                step,
            )
            for row, outcome in zip(rows, of_task, strict=True):
                outcomes[row] = outcome
        return outcomes

    def logged_rows(self, columns: Mapping[str, Any], count: int) -> dict[str, Sequence[int]]:
        """Numbers of the rows whose means are logged under a name: of all tasks, and of each."""
        return {ALL_TASKS: range(count), **{env.name: rows for env, rows in self._rows_by_task(columns[TASK])}}

    def _rows_by_task(self, tasks: Sequence[str]) -> list[tuple[Environment, list[int]]]:
        """The numbers of the rows of each task that has some."""
        if unknown := sorted({str(task) for task in tasks} - set(self.environments)):
            raise ValueError(f"{TASK} of a row must be one of {list(self.environments)}, got {unknown}")
        numbered = {name: [row for row, task in enumerate(tasks) if task == name] for name in self.environments}
        return [(self.environments[name], rows) for name, rows in numbered.items() if rows]


AnyTask: TypeAlias = Environment | TaskMixture


def _columns_of(columns: Mapping[str, Any], rows: Sequence[int], count: int) -> dict[str, Any]:
    """What a task's own rows would have: their values, without the columns of other tasks and what is not by row."""
    by_row = {
        name: values for name, values in columns.items() if isinstance(values, Sequence) and len(values) == count
    }
    own = {name: [values[row] for row in rows] for name, values in by_row.items() if name != TASK}
    return {name: values for name, values in own.items() if any(value is not None for value in values)}
