"""An episode behind RAGEN's text protocol, turn by turn.

A response `<think>…</think><answer>a || b</answer>` is one turn. Of its first `max_actions` pieces those that name
actions are carried out in order until the episode ends. One that names none earns `invalid_reward`, once for the turn
however many there are, and so does a response of another form, which carries out nothing and consumes the turn.
"""

import logging
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

from ragen2_trl.envs.episode import Episode
from ragen2_trl.envs.outcomes import EpisodeOutcome
from ragen2_trl.envs.responses import Response, format_response
from ragen2_trl.failures import LOST, check_failed, left_out

logger = logging.getLogger(__name__)

INVALID_REWARD = -0.1
"""Of an invalid turn, unless an environment is given another. Where no completion succeeds, it is all that varies."""


class TextTask(Protocol):
    """What a play needs of its `Environment`: limits and texts."""

    name: ClassVar[str]
    max_turns: int
    max_actions: int
    max_total_actions: int | None
    splits_answers: bool
    enable_think: bool
    invalid_reward: float
    has_failed: bool

    def read(self, text: str) -> Response | None: ...
    def message(self, play: "Play", status: str | None = None) -> str: ...


@dataclass
class TurnOutcome:
    """What was done in a turn and what came of it.

    Args:
        actions: The actions that it named, of those that count; none where a text was of another form.
        valid: Whether it named actions and nothing else.
        reward: What it earned, with `invalid_reward` where it was not valid.
        earned: Sum of the rewards of its actions, as the rules give them; `0` where there was none.
        executed: Actions carried out.
        effective: Whether the last of them changed the state, or ended the episode.
        board: The state after it, see `Episode.board_letters`.
        text: What the player wrote; `None` where it called a tool.
        reply: What the player was told then; `None` where the text protocol had come to its end.
    """

    actions: tuple[str, ...]
    valid: bool
    reward: float
    earned: float
    executed: int
    effective: bool
    board: str | None
    text: str | None = None
    reply: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """What was said in it, where the player wrote a text."""
        reply = [] if self.reply is None else [{"role": "user", "content": self.reply}]
        return [{"role": "assistant", "content": self.text or ""}, *reply]


class Play:
    """One episode behind the text protocol.

    Attributes:
        executed: Actions carried out so far.
        turns: What was done so far, turn by turn.
        first_board: The state at the start, see `Episode.board_letters`.
        seed: Of its row, where an environment has begun it for one.
        error: The exception that has ended the episode, if one has.
        failure: Task, row, turn and exception in words, if one has.

    Args:
        env: Limits and texts.
        episode: The rules, at their start.
    """

    def __init__(self, env: TextTask, episode: Episode):
        self.env = env
        self.episode = episode
        self.turns: list[TurnOutcome] = []
        self.first_board = episode.board_letters()
        self.executed = 0
        self.seed: int | None = None
        self.error: Exception | None = None
        self.failure: str | None = None

    @property
    def turn_rewards(self) -> list[float]:
        """The rewards of the turns so far, `invalid_reward` for each that was not valid included."""
        return [turn.reward for turn in self.turns]

    @property
    def done(self) -> bool:
        """Whether the rules, the turns or the actions have come to an end, or an exception has ended the episode."""
        over = self.episode.done or self.error is not None
        return over or len(self.turns) >= self.env.max_turns or self.actions_left == 0

    @property
    def actions_left(self) -> int | None:
        """Actions that the episode may still take, `None` without a limit."""
        return None if self.env.max_total_actions is None else self.env.max_total_actions - self.executed

    @property
    def outcome(self) -> EpisodeOutcome:
        return EpisodeOutcome(
            episode_return=sum(self.turn_rewards),
            success=self.episode.success,
            turns=len(self.turns),
            valid_turns=sum(turn.valid for turn in self.turns),
            num_actions=self.executed,
            acting_turns=sum(turn.executed > 0 for turn in self.turns),
            effective_turns=sum(turn.effective for turn in self.turns),
            measures={} if self.failure else self.episode.measures,
            failure=self.failure,
        )

    def fail(self, error: Exception) -> None:
        """Ends the episode with an exception, which is told the task, the row and the turn. The first is said."""
        where = f"{self.env.name}, row {self.seed}, turn {len(self.turns) + 1}"
        self.error, self.failure = error, f"{where}: {type(error).__name__}: {error}"
        error.add_note(where)
        if isinstance(error, LOST) and not self.env.has_failed:
            self.env.has_failed = True
            logger.warning(left_out(self.env.name, self.failure))

    def respond(self, text: str) -> str | None:
        """Takes a turn with a response; gives the next user message, or `None` when the episode is over.

        A lost connection ends the episode. Any other exception is raised, with task, row and turn.
        """
        if self.done:
            return None
        try:
            return self._respond(text)
        except Exception as error:
            self.fail(error)
            if not isinstance(error, LOST):
                raise
            return None

    def _respond(self, text: str) -> str | None:
        response = self.env.read(text)
        status = self.take(() if response is None else response.actions)
        self.turns[-1].text = text
        self.turns[-1].reply = None if self.done else self.env.message(self, status)
        return self.turns[-1].reply

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
        pieces = tuple(actions[: self.env.max_actions])
        known = [action for action in pieces if self.episode.is_action(action)]
        valid = len(known) == len(pieces) > 0
        before, effective = self.executed, False
        earned: float = 0  # whole as long as rewards are, as RAGEN's code shows it
        for action in known:
            if not self.done:
                state = self.episode.snapshot()
                earned += self.episode.step(action)
                self.executed += 1
                effective = self.episode.done or self.episode.snapshot() != state
        reward = float(earned) if valid else earned + self.env.invalid_reward
        board = self.episode.board_letters()
        self.turns.append(TurnOutcome(pieces, valid, reward, earned, self.executed - before, effective, board))
        kind = "" if valid else "Partly invalid answer. " if known else "Invalid answer. "
        return f"{kind}Reward {reward:g}."


class NoEpisode(Episode):
    """Stands for an episode that could not begin."""

    done = True

    def observation(self) -> str:
        return ""

    def is_action(self, action: str) -> bool:
        return False

    def step(self, action: str) -> float:
        raise NotImplementedError("the episode could not begin")


def check_failures(plays: Sequence[Play]) -> None:
    """Raises a `ConnectionError` if so many of a generation's plays on this process have failed that there are too
    many over all processes, each of which has as many plays."""
    failed = [play.failure for play in plays if play.failure is not None]
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    check_failed(len(failed), len(plays) * processes, failed[0] if failed else None)


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
