"""A task: an `Environment` has its prompts, texts, options and rewards, and makes the episodes.

The rules of one play are an `Episode`; a `Play` is an episode behind the text protocol; a `ToolEnvironment` plays the
same rules through TRL's `environment_factory`. Rewards, demonstrations and evaluation follow. Nothing here knows torch
or TRL.
"""

import inspect
import itertools
import os
import random
import shlex
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from datasets import Dataset

from ragen2_trl.columns import EPISODE, REQUIRED, SUCCESS, TASK
from ragen2_trl.envs.checks import check_choice, check_count, check_installed, check_range
from ragen2_trl.envs.episode import Episode, Limits
from ragen2_trl.envs.outcomes import EpisodeOutcome, mean_outcomes
from ragen2_trl.envs.play import (
    INVALID_REWARD,
    NoEpisode,
    OnPlayed,
    Play,
    check_failures,
    nobody_looks,
    respond_all,
)
from ragen2_trl.envs.responses import TAGS, Completion, Response, completion_text, format_response, parse_response
from ragen2_trl.envs.tasks import SPLITS, Row
from ragen2_trl.envs.tools import ToolEnvironment
from ragen2_trl.failures import LOST

RewardFunc: TypeAlias = Callable[..., Sequence[float | None]]

PROTOCOLS = ("text", "tools")


class Environment(ABC):
    """One task: its prompts, its rewards and, where a solver exists, its demonstrations.

    Subclasses set the class attributes below, take their options as keyword arguments of `__init__`, and give
    `instructions`, `tasks` and `episode`.

    Args:
        multi_turn: Whether an episode has several turns; default: where the task needs them, and with tools.
        max_turns: Turns of an episode, 1 to 100; default: the task's.
        max_actions: Actions that count in a turn, 1 to 100; later ones are ignored. Default: the task's.
        protocol: `"text"`, where answers are read from `<think>…</think><answer>…</answer>`, or `"tools"`, whose
            prompts are for TRL's `environment_factory` and say nothing of formats.
        max_total_actions: Actions of an episode, all turns together; default: no such limit.
        max_turn_tokens: Longest turn in tokens where a model plays and nothing else is asked for; default: none.
        enable_think: Whether a response is reasoning and an answer, or an answer alone.
        force_think: Whether the prompt of each turn ends with the tag that a response opens with: `<think>`, or
            `<answer>` where there is no reasoning. Trained with `TextRollout`, in a single turn as well.
        invalid_reward: Of a turn that names no action, -10 to 0. At 0 a group without a success has no variance.

    Raises:
        ImportError: If a package of the task's extra is missing.
        ValueError: If an option is outside its range.
    """

    name: ClassVar[str]
    single_turn_limits: ClassVar[Limits | None]  # None where one turn makes no sense
    multi_turn_limits: ClassVar[Limits | None]
    example: str  # what could stand between the answer tags
    # A return at or below the first is a failure's, at or above the second that of a solved task; None: no such bounds
    returns: ClassVar[tuple[float, float] | None] = None
    splits_answers: bool = True  # whether `||` separates actions; not where an answer may contain it
    shows_images: bool = False  # whether the first observation is a picture
    workers: int = 1  # episodes stepped at the same time, where steps wait for something
    tools: ClassVar[type[ToolEnvironment] | None] = None  # the task's tools for TRL's `environment_factory`
    options: Mapping[str, Any] = MappingProxyType({})  # what the environment was made with
    on_played: OnPlayed = staticmethod(nobody_looks)  # told of what is played for rewards, where a callback listens
    preset: str | None = None  # the name of the set of options that it follows, where there is one
    packages: ClassVar[tuple[str, ...]] = ()  # those of the extra that has the task's name
    quick: ClassVar[bool] = True  # whether a random player's episodes cost next to nothing
    has_failed: bool = False  # whether an episode has lost its connection, which is said once

    def __new__(cls, *args: Any, **kwargs: Any) -> "Environment":
        env = super().__new__(cls)
        if args or kwargs:  # neither in a copy nor in another process, where the options come with the rest
            signature = inspect.signature(cls)
            given = signature.bind(*args, **kwargs).arguments
            for parameter in signature.parameters.values():
                if parameter.kind is parameter.VAR_KEYWORD:  # what a task hands on
                    given |= given.pop(parameter.name, {})
            env.options = given
        return env

    def __init__(
        self,
        multi_turn: bool | None = None,
        max_turns: int | None = None,
        max_actions: int | None = None,
        protocol: str = "text",
        max_total_actions: int | None = None,
        max_turn_tokens: int | None = None,
        enable_think: bool = True,
        force_think: bool = False,
        invalid_reward: float = INVALID_REWARD,
    ):
        check_installed(self.name, *self.packages)
        check_choice("protocol", protocol, PROTOCOLS if self.tools else PROTOCOLS[:1])
        if multi_turn is not None:
            check_choice("multi_turn", multi_turn, (True, False))
        if multi_turn is False and max_turns is not None:
            check_count("max_turns", max_turns, 1, 1)
        if multi_turn is None:
            several = self.single_turn_limits is None or protocol == "tools" or (max_turns or 1) > 1
            multi_turn = several and self.multi_turn_limits is not None
        limits = self.multi_turn_limits if multi_turn else self.single_turn_limits
        if limits is None:
            raise ValueError(f"multi_turn must be {not multi_turn} for {self.name}, got {multi_turn!r}")
        self.max_turns = limits.turns if max_turns is None else max_turns
        self.max_actions = limits.actions if max_actions is None else max_actions
        check_count("max_turns", self.max_turns, 1, 100)
        check_count("max_actions", self.max_actions, 1, 100)
        self.protocol = protocol
        check_count("max_total_actions", 1 if max_total_actions is None else max_total_actions, 1, 1_000_000)
        check_count("max_turn_tokens", 1 if max_turn_tokens is None else max_turn_tokens, 1, 1_000_000)
        check_choice("enable_think", enable_think, (True, False))
        check_choice("force_think", force_think, (True, False))
        check_range("invalid_reward", invalid_reward, -10.0, 0.0)
        if protocol == "tools":  # whose calls have no tags
            check_choice("force_think with protocol='tools'", force_think, (False,))
        self.max_total_actions = max_total_actions
        self.longest = min(self.max_turns * self.max_actions, max_total_actions or 10_000)  # actions of an episode
        self.max_turn_tokens = max_turn_tokens
        self.enable_think = enable_think
        self.invalid_reward = invalid_reward
        self.forced_tag = TAGS[enable_think] if force_think else ""

    def _show_pictures(self) -> None:
        """Lets the first observation be a picture; called by tasks that have them, once limits are set."""
        if self.protocol == "text" and self.max_turns > 1:
            raise ValueError(
                f"observation must be in words for {self.name} in several turns with protocol='text', got 'image'; "
                "protocol='tools' can show pictures in every turn"
            )
        check_choice("force_think with pictures", bool(self.forced_tag), (False,))  # `TextRollout` shows none
        self.shows_images = True

    # What a task gives

    @abstractmethod
    def instructions(self) -> str:
        """The rules in words, for the system message; limits and format are added to it."""

    @abstractmethod
    def tasks(self, seed: int, split: str, data: str | None) -> Iterator[dict[str, Any]]:
        """Tasks of one split in the order of `seed`, endless where they are generated.

        Args:
            seed: Which order, or which stream, of tasks.
            split: `"train"` or `"test"`. No task of one split ever appears in the other.
            data: A Hub id or a local path to take tasks from, `None` for the task's default.

        Yields:
            Rows with `seed` (int, the task's own) and what `episode` needs.
        """

    @abstractmethod
    def episode(self, row: Row, rng: random.Random) -> Episode:
        """A new play of a row's task, whose chance events come from `rng`."""

    # What follows from it

    def dataset(
        self, num_prompts: int | None = None, seed: int = 0, split: str = "train", data: str | None = None
    ) -> Dataset:
        """Prompts of one split; equal arguments give equal rows, on every machine and in every process.

        Args:
            num_prompts: Number of rows; `None` for all there are, where tasks come from data.
            seed: Which stream of tasks to draw from; distinct seeds give distinct streams.
            split: `"train"` or `"test"`. No task of one split ever appears in the other.
            data: A Hub id or a local file or folder to take tasks from; default: the task's own source.

        Returns:
            Rows with `prompt` (a system and a user message), `seed` (int), what the rewards need, and `image` where
            the task is shown as a picture.

        Raises:
            ValueError: If an argument is outside its range, or there are fewer tasks than `num_prompts`.
        """
        check_choice("split", split, SPLITS)
        if num_prompts is None and data is None:
            raise ValueError(f"num_prompts must be given for {self.name}, which makes its own tasks, got None")
        if num_prompts is not None:
            check_count("num_prompts", num_prompts, 1, 10_000_000)
        rows: list[dict[str, Any]] = []
        for task in self.tasks(seed, split, data):
            rows.append({"prompt": self.prompt(task), **task})
            if self.shows_images and self.protocol == "text":  # tools answer with pictures of their own
                rows[-1]["image"] = self.episode(task, random.Random(0)).image()
            if len(rows) == num_prompts:
                break
        if num_prompts is not None and len(rows) < num_prompts:
            raise ValueError(f"num_prompts must be at most {len(rows)}, the number of tasks, got {num_prompts}")
        if not rows:
            raise ValueError(f"data must hold tasks of the split {split!r} for {self.name}, got none in {data!r}")
        return Dataset.from_list(rows)

    def prompt(self, row: Row) -> list[dict[str, str]]:
        """The system and the user message that an episode begins with."""
        system = {"role": "system", "content": self.system_text()}
        if self.protocol == "tools":  # `reset` appends the observation
            return [system, {"role": "user", "content": ""}]
        return [system, {"role": "user", "content": self.message(self.play(row, random.Random(0)))}]

    @property
    def prompt_without_observation(self) -> list[dict[str, str]]:
        """Rules and form of an answer alone: what is written to it cannot depend on a task."""
        system = {"role": "system", "content": self.system_text()}
        return [system, {"role": "user", "content": self.text_without_observation()}]

    def system_text(self) -> str:
        """The system message: the rules, and how many turns and actions there are."""
        one = "one action" if self.splits_answers else "one answer"
        actions = f"at most {self.max_actions} actions" if self.max_actions > 1 else one
        total = "" if self.max_total_actions is None else f" All turns together take at most {self.max_total_actions}."
        if self.max_turns > 1:
            return f"{self.instructions()} You have {self.max_turns} turns with {actions} each.{total}"
        return f"{self.instructions()} Give {actions}.{total}" if self.max_actions > 1 else self.instructions()

    def message(self, play: Play, status: str | None = None) -> str:
        """The user message of the next turn of a play: what came of the last one, the state, the form of an answer."""
        if status is not None:
            status = f"{status} Turn {len(play.turns) + 1} of {self.max_turns}."
        lines = (status, play.episode.observation(), self.text_without_observation())
        return "\n".join(line for line in lines if line)

    def text_without_observation(self) -> str:
        """The user message of the first turn without what is particular to a task."""
        return f"Reply with {format_response('reasoning', [self.example], think=self.enable_think)}"

    def read(self, text: str) -> Response | None:
        """The response that a model wrote, `None` where it has no form of one."""
        return parse_response(self.with_forced_tag(text), split=self.splits_answers, think=self.enable_think)

    def with_forced_tag(self, text: str) -> str:
        """What a model wrote behind the tag that its prompt ends with, and the tag."""
        return text if text.lstrip().startswith(self.forced_tag) else self.forced_tag + text

    @property
    def reward_funcs(self) -> list[RewardFunc]:
        """One function `<name>_return(prompts, completions, **columns) -> list[float | None]` for TRL trainers.

        It gives the return of each episode: the rewards of its actions, and `invalid_reward` for each invalid turn;
        `None` for an episode that a lost connection has ended. In single-turn play it plays the completions; in
        multi-turn play `TextRollout` has played them. Where TRL offers `log_metric` it logs `env/<name>/success`,
        `return`, `turns`, `valid_rate`, `failed` and `pass@k` with the k completions of a prompt on this process, and
        with `log_extra` a column `success` of single completions. Use it or `success_func`, not both: each plays the
        completions of single-turn play.
        """
        return [reward_func(self, f"{self.name}_return", "episode_return", self.returns)]

    @property
    def success_func(self) -> RewardFunc:
        """Like the function in `reward_funcs`, but 1.0 where the task is solved and 0.0 elsewhere.

        Next to an `environment_factory`, whose `get_reward` is the return, it serves with `reward_weights=[0.0]` to
        log the metrics.
        """
        return reward_func(self, f"{self.name}_success", "success", (0.0, 1.0))

    @property
    def needs_rollout(self) -> bool:
        """Whether training goes through `TextRollout`: TRL's own prompts have one turn and end before a forced tag."""
        return self.max_turns > 1 or bool(self.forced_tag)

    @property
    def environment_factory(self) -> Callable[[], ToolEnvironment]:
        """TRL's multi-turn contract: makes objects with `reset(**row)`, typed tools, and `get_reward()`.

        Raises:
            ValueError: If the environment was not made with `protocol="tools"`.
        """
        tools = self.tools
        if tools is None or self.protocol != "tools":
            raise ValueError(f"protocol must be 'tools' for an environment_factory, got {self.protocol!r}")
        numbers, players = itertools.count(), weakref.WeakSet[ToolEnvironment]()

        def make() -> ToolEnvironment:
            player = tools(self, next(numbers), players)
            players.add(player)
            return player

        return make

    @property
    def summary(self) -> dict[str, Any]:
        """What a model card says of the task: name, options, and limits of an episode."""
        preset = {} if self.preset is None else {"preset": self.preset}
        return {
            "name": self.name,
            **preset,
            "options": dict(self.options),
            "max_turns": self.max_turns,
            "max_actions": self.max_actions,
        }

    def play(self, row: Row, rng: random.Random) -> Play:
        """A new episode of a row's task behind the text protocol."""
        return Play(self, self.episode(row, rng))

    def begin(self, row: Row, rng: random.Random) -> Play:
        """As `play`; one that is over where a lost connection kept it from beginning. Any other exception is raised,
        with task and row."""
        try:
            play = self.play(row, rng)
        except Exception as error:
            play = Play(self, NoEpisode())
            play.seed = row["seed"]
            play.fail(error)
            if not isinstance(error, LOST):
                raise
        play.seed = row["seed"]
        return play

    def plays(self, seeds: Sequence[int], columns: Mapping[str, Sequence[Any]], step: int = 0) -> list[Play]:
        """A play for each row, each with chance events of its own; `columns` are those of the rows.

        The noise comes from the seed of its row, its place among the plays of that row, the training step and the
        process, so that the members of a group share none.
        """
        # A group may be spread over processes, each of which counts its own members from 0.
        process = os.environ.get("RANK", "0")
        members: Counter[int] = Counter()
        plays = []
        for index, seed in enumerate(seeds):
            row = {"seed": seed, **{name: values[index] for name, values in columns.items()}}
            plays.append(self.begin(row, random.Random(f"{seed}/{members[seed]}/{step}/{process}")))
            members[seed] += 1
        return plays

    def demonstrations(self, num: int, seed: int, data: str | None = None) -> Dataset:
        """Solved training tasks for a warm start: conversational `prompt`, and `completion` with all turns.

        With several turns the user's messages are part of the completion: train with `assistant_only_loss=True`.
        Episodes that chance has spoiled, and impossible tasks, are left out: there may be fewer than `num`.

        Raises:
            NotImplementedError: If the task has no solver.
            ValueError: If the environment was not made with `protocol="text"`.
        """
        if self.protocol != "text":
            raise ValueError(f"protocol must be 'text' for demonstrations, which are text, got {self.protocol!r}")
        rows = [self._demonstration(row, seed) for row in self.dataset(num, seed, data=data)]
        solved = [row for row in rows if row is not None]
        if not solved:
            raise ValueError(f"num must be larger, got {num}: the solver solved no task of {self.name}")
        return Dataset.from_list(solved)

    @property
    def qualified_name(self) -> str:
        """What `make_env` calls the task: its name, or `package.module:Class` of one that is not of this package."""
        ours = type(self).__module__.startswith(__name__.partition(".")[0] + ".")
        return self.name if ours else f"{type(self).__module__}:{type(self).__qualname__}"

    @property
    def warm_start(self) -> str | None:
        """The command that trains a model on demonstrations of this task, `None` where there are none."""
        try:
            self.demonstrations(8, seed=0)
        except (NotImplementedError, ValueError):
            return None
        options = [f"{name}={value}" for name, value in self.options.items()]
        arguments = ["--env_name", self.qualified_name, *(["--env_args", *options] if options else [])]
        return shlex.join(["ragen2-trl", "warm-start", *arguments, "--model"]) + " <your model>"

    def _demonstration(self, row: Row, seed: int) -> dict[str, Any] | None:
        rng = random.Random(f"demonstration/{seed}/{row['seed']}")
        play = self.play(row, rng)
        while not play.done:
            play.respond(play.solver_response(rng))
        if not play.episode.success:
            return None
        completion = [message for turn in play.turns for message in turn.messages]
        return {name: row[name] for name in ("prompt", "image") if name in row} | {"completion": completion}

    def outcomes(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        seed: Sequence[int],
        columns: Mapping[str, Any],
        step: int,
    ) -> list[EpisodeOutcome]:
        """What came of each row's episode: as a rollout tells in its column, else by playing its completion."""
        if "environments" in columns:
            plays = [environment._play for environment in columns["environments"]]
            self.on_played(prompts, seed, plays, completions)
            return [play.outcome for play in plays]
        if EPISODE in columns:
            return [EpisodeOutcome(**fields) for fields in columns[EPISODE]]
        if self.max_turns > 1:
            raise ValueError(
                f"rollout_func must be TextRollout(env) for {self.name} with max_turns={self.max_turns}: its "
                "completions have not been played; or make the environment with max_turns=1."
            )
        if self.forced_tag:
            raise ValueError(f"rollout_func must be TextRollout(env) for {self.name} with force_think=True, got none")
        needed = {name: values for name, values in columns.items() if isinstance(values, Sequence)}
        plays = self.plays(seed, needed, step)
        respond_all(plays, [completion_text(completion) for completion in completions], self.workers)
        check_failures(plays)
        self.on_played(prompts, seed, plays, None)
        return [play.outcome for play in plays]

    def logged_rows(self, columns: Mapping[str, Any], count: int) -> dict[str, Sequence[int]]:
        """Numbers of the rows whose means are logged under a name, of so many rows."""
        return {self.name: range(count)}


def reward_func(env: Any, name: str, field: str, bounds: tuple[float, float] | None = None) -> RewardFunc:
    """A function for TRL trainers, see `Environment.reward_funcs`.

    Args:
        env: An environment or a mixture.
        name: What TRL logs it under.
        field: Of an outcome, its reward.
        bounds: For the filter, what is too hard and too easy.
    """

    def reward(
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        seed: Sequence[int],
        trainer_state: Any = None,
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        step = 0 if trainer_state is None else trainer_state.global_step
        outcomes = env.outcomes(prompts, completions, seed, columns, step)
        if log_extra is not None:
            log_extra(SUCCESS, [None if outcome.failure else float(outcome.success) for outcome in outcomes])
        if log_metric is not None:
            # Tasks of two kinds may have the same seed.
            tasks = list(zip(columns.get(TASK, seed), seed, strict=True))
            for part, rows in env.logged_rows(columns, len(seed)).items():
                means = mean_outcomes([outcomes[row] for row in rows], [tasks[row] for row in rows])
                for key, mean in means.items():
                    log_metric(f"env/{part}/{key}", mean)
        return [None if outcome.failure else float(getattr(outcome, field)) for outcome in outcomes]

    reward.__name__ = name
    vars(reward)[REQUIRED] = True
    vars(reward)["environment"] = env  # for the model card
    vars(reward)["bounds"] = bounds
    return reward
