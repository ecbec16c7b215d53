"""What tasks are made of: an `Episode` holds the rules of one play, an `Environment` the tasks, texts and options.

A `Play` is an episode behind RAGEN's text protocol. A response `<think>…</think><answer>a || b</answer>` is one turn.
Of its first `max_actions` pieces those that name actions are carried out in order until the episode ends. One that
names none costs `INVALID_TURN`, once for the turn however many there are, and so does a response of another form,
which carries out nothing and consumes the turn. A `ToolEnvironment` plays the same rules through TRL's
`environment_factory`.

Rewards, demonstrations and evaluation follow from these. Nothing here knows torch or TRL.
"""

import inspect
import itertools
import os
import random
import shlex
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import fmean
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from datasets import Dataset
from PIL import Image

from ragen2_trl.columns import EPISODE, SUCCESS
from ragen2_trl.envs.checks import check_choice, check_count, check_flags, check_installed, check_limits
from ragen2_trl.envs.responses import TAGS, Completion, Response, completion_text, format_response, parse_response
from ragen2_trl.envs.tasks import SPLITS, Row

RewardFunc: TypeAlias = Callable[..., list[float]]
# Text, or content parts where the state is a picture. Not a union: tools are put into the prompt with their types.
Answer: TypeAlias = Any

PROTOCOLS = ("text", "tools")
INVALID_TURN = -0.1
COUNTS = ("valid_turns", "num_actions", "acting_turns", "effective_turns")  # of an outcome, besides its turns


@dataclass(frozen=True)
class Limits:
    """Turns of an episode, and actions that count in each."""

    turns: int
    actions: int


class Episode(ABC):
    """One play of one task by one player: the rules and the state, nothing of prompts or formats.

    Attributes:
        done: Whether the rules have ended the episode.
        success: Whether the task is solved.
    """

    done: bool = False
    success: bool = False

    @property
    def measures(self) -> dict[str, float]:
        """Further numbers from 0.0 to 1.0 about the episode so far, by name; logged beside its return and success."""
        return {}

    @abstractmethod
    def observation(self) -> str:
        """What the player sees of the state."""

    @abstractmethod
    def is_action(self, action: str) -> bool:
        """Whether this text names an action of the rules. Hostile input: no exception, and quick.

        All actions of a turn are asked for before the first is carried out: where the answer depends on the state,
        `max_actions` must be 1.
        """

    @abstractmethod
    def step(self, action: str) -> float:
        """Carries out an action and gives its reward. Called only while not `done`, and with `is_action(action)`."""

    def snapshot(self) -> Hashable:
        """What an action without effect leaves as it was: by default what the player sees."""
        return self.observation()

    def image(self) -> Image.Image:
        """The state as an RGB picture.

        Raises:
            NotImplementedError: If the task has no pictures.
        """
        raise NotImplementedError(f"{type(self).__name__} has no pictures")

    def board_letters(self) -> str | None:
        """The state as lines of `drawing.TILES`, one letter a cell, to be drawn later; `None` where it is no grid."""
        return None

    def plan(self, rng: random.Random) -> tuple[str, list[str]]:
        """A reasoning and the actions of a solver from here to the end, for demonstrations and as an oracle.

        Raises:
            NotImplementedError: If the task has no solver.
        """
        raise NotImplementedError(f"{type(self).__name__} has no solver")

    def random_action(self, rng: random.Random) -> str:
        """An action of the random baseline, which looks at nothing but which actions there are.

        Raises:
            NotImplementedError: If there is no set of actions to draw from.
        """
        raise NotImplementedError(f"{type(self).__name__} has no random baseline")


@dataclass(frozen=True)
class EpisodeOutcome:
    """What came of an episode; rollouts hand outcomes to reward functions in the column `EPISODE`.

    Args:
        episode_return: Sum of the rewards, invalid turns included.
        success: Whether the task was solved.
        turns: Turns taken.
        valid_turns: Those with a well-formed response that named known actions and nothing else.
        num_actions: Actions that were carried out.
        acting_turns: Turns in which one was.
        effective_turns: Turns whose last one changed the state, or ended the episode.
        measures: Further numbers of the task's own, 0.0 to 1.0.
    """

    episode_return: float
    success: bool
    turns: int
    valid_turns: int
    num_actions: int = 0
    acting_turns: int = 0
    effective_turns: int = 0
    measures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedTurn:
    """What was done in a turn.

    Args:
        text: What the player wrote; `None` where it called a tool.
        actions: The actions that it named, of those that count; none where the text was of another form.
        valid: Whether the turn was valid.
        reward: What it earned.
        reply: What the player was told then; `None` where the text protocol had come to its end.
        board: The state after it, see `Episode.board_letters`.
    """

    text: str | None
    actions: tuple[str, ...]
    valid: bool
    reward: float
    reply: str | None
    board: str | None

    @property
    def messages(self) -> list[dict[str, str]]:
        """What was said in it, where the player wrote a text."""
        reply = [] if self.reply is None else [{"role": "user", "content": self.reply}]
        return [{"role": "assistant", "content": self.text or ""}, *reply]


@dataclass(frozen=True)
class TurnOutcome:
    """What came of a turn.

    Args:
        reward: Sum of the rewards of its actions, as the rules give them; `0` where there was none.
        executed: Actions carried out.
        valid: Whether it named actions and nothing else.
    """

    reward: float
    executed: int
    valid: bool


class Play:
    """One episode behind the text protocol.

    Attributes:
        turn_rewards: The rewards of the turns so far, `INVALID_TURN` for each that was not valid included.
        executed: Actions carried out so far.
        last: What came of the last turn, `None` before the first.
        turns: What was done so far, turn by turn.
        first_board: The state at the start, see `Episode.board_letters`.

    Args:
        env: Limits and texts.
        episode: The rules, at their start.
    """

    def __init__(self, env: "Environment", episode: Episode):
        self.env = env
        self.episode = episode
        self.turn_rewards: list[float] = []
        self.turns: list[RecordedTurn] = []
        self.first_board = episode.board_letters()
        self.executed = 0
        self.last: TurnOutcome | None = None
        self._valid_turns = 0
        self._effects: dict[int, bool] = {}  # by turn, whether the last action in it had an effect

    @property
    def done(self) -> bool:
        """Whether the rules, the turns or the actions have come to an end."""
        return self.episode.done or len(self.turn_rewards) >= self.env.max_turns or self.actions_left == 0

    @property
    def actions_left(self) -> int | None:
        """Actions that the episode may still take, `None` without a limit."""
        return None if self.env.max_total_actions is None else self.env.max_total_actions - self.executed

    @property
    def outcome(self) -> EpisodeOutcome:
        return EpisodeOutcome(
            episode_return=sum(self.turn_rewards),
            success=self.episode.success,
            turns=len(self.turn_rewards),
            valid_turns=self._valid_turns,
            num_actions=self.executed,
            acting_turns=len(self._effects),
            effective_turns=sum(self._effects.values()),
            measures=self.episode.measures,
        )

    def respond(self, text: str) -> str | None:
        """Takes a turn with a response; gives the next user message, or `None` when the episode is over."""
        if self.done:
            return None
        response = self.env.read(text)
        actions = () if response is None else response.actions
        status = self.take(actions)
        reply = None if self.done else self.env.message(self, status)
        self.record(actions, text, reply)
        return reply

    def solver_response(self, rng: random.Random) -> str:
        """What the task's solver writes in the next turn.

        Raises:
            NotImplementedError: If the task has none.
        """
        reasoning, actions = self.episode.plan(rng)
        return format_response(reasoning, actions[: self.env.max_actions], think=self.env.enable_think)

    def random_response(self, rng: random.Random) -> str:
        """What the random baseline writes: as many actions as a turn takes, whatever the state.

        Raises:
            NotImplementedError: If there is no set of actions to draw from.
        """
        count = self.env.max_actions if self.env.splits_answers else 1
        actions = [self.episode.random_action(rng) for _ in range(count)]
        return format_response("", actions, think=self.env.enable_think)

    def take(self, actions: Sequence[str]) -> str:
        """Takes a turn with actions and says what came of it; not to be called when `done`."""
        pieces = actions[: self.env.max_actions]
        known = [action for action in pieces if self.episode.is_action(action)]
        valid = len(known) == len(pieces) > 0
        before = self.executed
        reward: float = 0
        for action in known:
            if not self.done:
                reward += self._carry_out(action)  # whole as long as rewards are, as RAGEN's code shows it
        self.last = TurnOutcome(reward, self.executed - before, valid)
        self._valid_turns += valid
        self.turn_rewards.append(float(reward) if valid else reward + INVALID_TURN)
        kind = "" if valid else "Partly invalid answer. " if known else "Invalid answer. "
        return f"{kind}Reward {self.turn_rewards[-1]:g}."

    def _carry_out(self, action: str) -> float:
        before = self.episode.snapshot()
        reward = self.episode.step(action)
        self.executed += 1
        self._effects[len(self.turn_rewards)] = self.episode.done or self.episode.snapshot() != before
        return reward

    def record(self, actions: Sequence[str], text: str | None = None, reply: str | None = None) -> None:
        """Adds the turn that `take` has just taken to `turns`."""
        valid = self.last is not None and self.last.valid
        counted = tuple(actions[: self.env.max_actions])
        self.turns.append(
            RecordedTurn(text, counted, valid, self.turn_rewards[-1], reply, self.episode.board_letters())
        )


# (prompts, seeds, plays, completions) of episodes that are over; the completions where plays do not know the messages
OnPlayed: TypeAlias = Callable[[Sequence[Any], Sequence[int], Sequence[Play], Sequence[Any] | None], None]


def nobody_looks(
    prompts: Sequence[Any], seeds: Sequence[int], plays: Sequence[Play], completions: Sequence[Any] | None
) -> None:
    """For those who keep no episodes."""


def respond_all(plays: Sequence[Play], texts: Sequence[str], workers: int = 1) -> list[str | None]:
    """`respond` for each play with its text, up to `workers` at a time."""
    if workers == 1:
        return [play.respond(text) for play, text in zip(plays, texts, strict=True)]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(Play.respond, plays, texts))


def mean_outcomes(outcomes: Sequence[EpisodeOutcome], seeds: Sequence[int]) -> dict[str, float]:
    """Means over episodes, and `pass@k` where each of the tasks, told apart by `seeds`, was played k times."""
    groups: defaultdict[int, list[bool]] = defaultdict(list)
    for seed, outcome in zip(seeds, outcomes, strict=True):
        groups[seed].append(outcome.success)
    turns = sum(outcome.turns for outcome in outcomes)
    means = {
        "success": fmean(outcome.success for outcome in outcomes),
        "return": fmean(outcome.episode_return for outcome in outcomes),
        "turns": turns / len(outcomes),
        "valid_rate": sum(outcome.valid_turns for outcome in outcomes) / max(1, turns),
        # As RAGEN's code logs them: of each episode the mean over its turns, then the mean over episodes.
        "num_actions": fmean(outcome.num_actions for outcome in outcomes),
        "action_is_valid": fmean(outcome.acting_turns / max(1, outcome.turns) for outcome in outcomes),
        "action_is_effective": fmean(outcome.effective_turns / max(1, outcome.turns) for outcome in outcomes),
    }
    shared = [name for name in outcomes[0].measures if all(name in outcome.measures for outcome in outcomes)]
    means.update({name: fmean(outcome.measures[name] for outcome in outcomes) for name in shared})
    sizes = {len(members) for members in groups.values()}
    if len(sizes) == 1:  # elsewhere a group is spread over processes, and k would differ from task to task
        means[f"pass@{sizes.pop()}"] = fmean(any(members) for members in groups.values())
    return means


class ToolEnvironment:
    """One player's environment, used again and again: `reset`, then tools, then `get_reward`.

    Chance events count the resets of this instance, which begin again when training is resumed.

    Args:
        env: The task.
        number: Tells this instance from others of one trainer.
    """

    def __init__(self, env: "Environment", number: int):
        self._env = env
        self._number = number
        self._resets = 0

    def reset(self, **row: Any) -> Answer:
        """Begins a row's task and gives what the player sees of it; TRL appends that to the prompt."""
        # Members of a group share the row, so their noise comes from the instance, too.
        noise = f"{row['seed']}/{self._number}/{self._resets}/{os.environ.get('RANK', '0')}"
        self._resets += 1
        self._play = self._env.play(row, random.Random(noise))
        return self._shown(self._play.episode.observation())

    def get_reward(self) -> float:
        """The return of the episode so far."""
        return self._play.outcome.episode_return

    def _take(self, actions: object) -> str:
        """Takes a turn and tells what a tool answers; anything but a list of strings is an invalid turn."""
        if self._play.done:
            return "The episode is over."
        known = isinstance(actions, list) and all(isinstance(action, str) for action in actions)
        named = [action.strip() for action in actions] if known else []  # type: ignore[attr-defined]
        status = self._play.take(named)
        over = self._play.done
        answer = f"{status} The episode is over." if over else f"{status}\n{self._play.episode.observation()}"
        self._play.record(named, reply=answer)
        return answer

    def _shown(self, text: str) -> Answer:
        """What a player sees: the text, with the picture of the state where the task has one."""
        if not self._env.shows_images or self._play.done:
            return text
        picture = {"type": "image", "image": self._play.episode.image()}
        return [picture, {"type": "text", "text": text.strip()}] if text.strip() else [picture]


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
        check_limits(max_total_actions=max_total_actions, max_turn_tokens=max_turn_tokens)
        check_flags(enable_think=enable_think, force_think=force_think)
        if protocol == "tools":  # whose calls have no tags
            check_choice("force_think with protocol='tools'", force_think, (False,))
        self.max_total_actions = max_total_actions
        self.longest = min(self.max_turns * self.max_actions, max_total_actions or 10_000)  # actions of an episode
        self.max_turn_tokens = max_turn_tokens
        self.enable_think = enable_think
        self.forced_tag = TAGS[enable_think] if force_think else ""

    def _show_pictures(self) -> None:
        """Lets the first observation be a picture; called by tasks that have them, once limits are set."""
        if self.protocol == "text" and self.max_turns > 1:
            raise ValueError(
                f"observation must be in words in several turns of the text protocol, got 'image' for {self.name}; "
                "with protocol='tools' pictures can be shown in every turn"
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
            raise ValueError(f"num_prompts must be given where {self.name} makes its tasks itself, got None")
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
            raise ValueError(f"num_prompts must be at most {len(rows)}, the tasks there are, got {num_prompts}")
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
            status = f"{status} Turn {len(play.turn_rewards) + 1} of {self.max_turns}."
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
        """One function `<name>_return(prompts, completions, **columns) -> list[float]` for TRL trainers.

        It gives the return of each episode: the rewards of its actions and -0.1 for each invalid turn. In single-turn
        play it plays the completions; in multi-turn play `TextRollout` has played them. Where TRL offers `log_metric`
        it logs `env/<name>/success`, `return`, `turns`, `valid_rate` and `pass@k` with the k completions of a prompt
        on this process, and with `log_extra` a column `success` of single completions. Use it or `success_func`, not
        both: each plays the completions of single-turn play.
        """
        return [self._reward_func(f"{self.name}_return", "episode_return", self.returns)]

    @property
    def success_func(self) -> RewardFunc:
        """Like the function in `reward_funcs`, but 1.0 where the task is solved and 0.0 elsewhere.

        Next to an `environment_factory`, whose `get_reward` is the return, it serves with `reward_weights=[0.0]` to
        log the metrics.
        """
        return self._reward_func(f"{self.name}_success", "success", (0.0, 1.0))

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
        numbers = itertools.count()
        return lambda: tools(self, next(numbers))

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
            plays.append(self.play(row, random.Random(f"{seed}/{members[seed]}/{step}/{process}")))
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
            raise ValueError(f"num must be larger, the solver has solved none of {num} tasks of {self.name}")
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

    def _reward_func(self, name: str, field: str, bounds: tuple[float, float] | None) -> RewardFunc:
        def reward(
            prompts: Sequence[Any],
            completions: Sequence[Completion],
            seed: Sequence[int],
            trainer_state: Any = None,
            log_metric: Callable[[str, float], None] | None = None,
            log_extra: Callable[[str, list[Any]], None] | None = None,
            **columns: Any,
        ) -> list[float]:
            step = 0 if trainer_state is None else trainer_state.global_step
            outcomes = self.outcomes(prompts, completions, seed, columns, step)
            if log_extra is not None:
                log_extra(SUCCESS, [float(outcome.success) for outcome in outcomes])
            if log_metric is not None:
                for key, value in mean_outcomes(outcomes, seed).items():
                    log_metric(f"env/{self.name}/{key}", value)
            return [float(getattr(outcome, field)) for outcome in outcomes]

        reward.__name__ = name  # what TRL logs it under
        vars(reward)["environment"] = self  # for the model card
        vars(reward)["bounds"] = bounds  # for the filter: what is too hard, and too easy
        return reward

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
        self.on_played(prompts, seed, plays, None)
        return [play.outcome for play in plays]
