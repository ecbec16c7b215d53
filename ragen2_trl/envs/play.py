"""RAGEN's text protocol: what a response does to an episode, and what the player is told next.

A response `<think>…</think><answer>a || b</answer>` is one turn. Of its first `max_actions` pieces those that name
actions are carried out in order until the episode ends. One that names none costs `INVALID_TURN`, once for the turn
however many there are, and so does a response of another form, which carries out nothing and consumes the turn.
"""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import fmean
from typing import ClassVar, Protocol

from ragen2_trl.envs.episode import Episode
from ragen2_trl.envs.responses import Response

INVALID_TURN = -0.1
TURN_REWARDS = "turn_rewards"  # under which rollouts hand the rewards of an episode's turns on


@dataclass(frozen=True)
class Outcome:
    """What came of an episode.

    Args:
        episode_return: Sum of the rewards, invalid turns included.
        success: Whether the task was solved.
        turns: Turns taken.
        valid_turns: Those with a well-formed response that named known actions and nothing else.
        measures: Further numbers of the task's own.
    """

    COLUMN: ClassVar[str] = "episode"  # under which rollouts hand outcomes to reward functions

    episode_return: float
    success: bool
    turns: int
    valid_turns: int
    measures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """What came of a turn.

    Args:
        reward: Sum of the rewards of its actions, as the rules give them; `0` where there was none.
        executed: Actions carried out.
        valid: Whether it named actions and nothing else.
    """

    reward: float
    executed: int
    valid: bool


class Setting(Protocol):
    """What a play asks of its environment: how much may be done, how responses are read and what a player is told."""

    max_turns: int
    max_actions: int
    max_total_actions: int | None
    show_penalty: bool

    def read(self, text: str) -> Response | None: ...

    def message(self, play: "Play", status: str) -> str: ...


class Play:
    """One episode behind the text protocol.

    Attributes:
        turn_rewards: The rewards of the turns so far, `INVALID_TURN` for each that was not valid included.
        executed: Actions carried out so far.
        last: What came of the last turn, `None` before the first.

    Args:
        env: Limits and texts.
        episode: The rules, at their start.
    """

    def __init__(self, env: Setting, episode: Episode):
        self.env = env
        self.episode = episode
        self.turn_rewards: list[float] = []
        self.executed = 0
        self.last: Turn | None = None
        self._valid_turns = 0

    @property
    def done(self) -> bool:
        """Whether the rules, the turns or the actions have come to an end."""
        return self.episode.done or len(self.turn_rewards) >= self.env.max_turns or self.actions_left == 0

    @property
    def actions_left(self) -> int | None:
        """Actions that the episode may still take, `None` without a limit."""
        return None if self.env.max_total_actions is None else self.env.max_total_actions - self.executed

    @property
    def outcome(self) -> Outcome:
        return Outcome(
            sum(self.turn_rewards),
            self.episode.success,
            len(self.turn_rewards),
            self._valid_turns,
            self.episode.measures,
        )

    def respond(self, text: str) -> str | None:
        """Takes a turn with a response; gives the next user message, or `None` when the episode is over."""
        if self.done:
            return None
        response = self.env.read(text)
        status = self.take(() if response is None else response.actions)
        return None if self.done else self.env.message(self, status)

    def take(self, actions: Sequence[str]) -> str:
        """Takes a turn with actions and says what came of it; not to be called when `done`."""
        pieces = actions[: self.env.max_actions]
        known = [action for action in pieces if self.episode.is_action(action)]
        valid = len(known) == len(pieces) > 0
        before = self.executed
        reward: float = 0
        for action in known:
            if not self.done:
                reward += self.episode.step(action)  # whole as long as rewards are, as RAGEN shows it
                self.executed += 1
        self.last = Turn(reward, self.executed - before, valid)
        self._valid_turns += valid
        self.turn_rewards.append(float(reward) if valid else reward + INVALID_TURN)
        told = self.turn_rewards[-1] if self.env.show_penalty else reward
        return f"{'' if valid else 'Partly invalid answer. ' if known else 'Invalid answer. '}Reward {told:g}."


def respond_all(plays: Sequence[Play], texts: Sequence[str], workers: int = 1) -> list[str | None]:
    """`respond` for each play with its text, up to `workers` at a time."""
    if workers == 1:
        return [play.respond(text) for play, text in zip(plays, texts, strict=True)]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(Play.respond, plays, texts))


def mean_outcomes(outcomes: Sequence[Outcome], seeds: Sequence[int]) -> dict[str, float]:
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
    }
    shared = [name for name in outcomes[0].measures if all(name in outcome.measures for outcome in outcomes)]
    means.update({name: fmean(outcome.measures[name] for outcome in outcomes) for name in shared})
    sizes = {len(members) for members in groups.values()}
    if len(sizes) == 1:  # elsewhere a group is spread over processes, and k would differ from task to task
        means[f"pass@{sizes.pop()}"] = fmean(any(members) for members in groups.values())
    return means
