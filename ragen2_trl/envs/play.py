"""RAGEN's text protocol: what a response does to an episode, and what the player is told next.

A response `<think>…</think><answer>a || b</answer>` is one turn. Its first `max_actions` actions are carried out in
order until the episode ends. A response of another form, or one that names an unknown action, carries out nothing,
costs `INVALID_TURN` and consumes the turn.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, Protocol, TypeAlias

from ragen2_trl.envs.episode import Episode
from ragen2_trl.envs.responses import parse_response

INVALID_TURN = -0.1
TURN_REWARDS = "turn_rewards"  # under which rollouts hand the rewards of an episode's turns on


@dataclass(frozen=True)
class Outcome:
    """What came of an episode.

    Args:
        episode_return: Sum of the rewards, invalid turns included.
        success: Whether the task was solved.
        turns: Turns taken.
        valid_turns: Those with a well-formed response that named known actions.
    """

    COLUMN: ClassVar[str] = "episode"  # under which rollouts hand outcomes to reward functions

    episode_return: float
    success: bool
    turns: int
    valid_turns: int


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


class Setting(Protocol):
    """What a play asks of its environment: how many turns and actions there are, and what the player is shown."""

    max_turns: int
    max_actions: int

    @property
    def name(self) -> str: ...

    @property
    def splits_answers(self) -> bool: ...

    def turn_text(self, episode: Episode, status: str | None = None) -> str: ...


class Play:
    """One episode behind the text protocol.

    Args:
        env: Limits and texts.
        episode: The rules, at their start.

    Attributes:
        turns: What was done so far, turn by turn.
        first_board: The state at the start, see `Episode.board_letters`.
    """

    def __init__(self, env: Setting, episode: Episode):
        self.env = env
        self.episode = episode
        self.turn_rewards: list[float] = []
        self.turns: list[RecordedTurn] = []
        self.first_board = episode.board_letters()
        self._valid_turns = 0

    @property
    def done(self) -> bool:
        """Whether the rules or the turns have come to an end."""
        return self.episode.done or len(self.turn_rewards) >= self.env.max_turns

    @property
    def outcome(self) -> Outcome:
        return Outcome(sum(self.turn_rewards), self.episode.success, len(self.turn_rewards), self._valid_turns)

    def respond(self, text: str) -> str | None:
        """Takes a turn with a response; gives the next user message, or `None` when the episode is over."""
        if self.done:
            return None
        response = parse_response(text, split=self.env.splits_answers)
        actions = () if response is None else response.actions
        status, reply = self.take(actions), None
        if not self.done:
            turn = f"Turn {len(self.turn_rewards) + 1} of {self.env.max_turns}."
            reply = self.env.turn_text(self.episode, f"{status} {turn}")
        self.record(actions, text, reply)
        return reply

    def take(self, actions: Sequence[str]) -> str:
        """Takes a turn with actions and says what came of it; not to be called when `done`."""
        actions = actions[: self.env.max_actions]
        if not actions or not all(self.episode.is_action(action) for action in actions):
            self.turn_rewards.append(INVALID_TURN)
            return f"Invalid answer. Reward {INVALID_TURN:g}."
        self._valid_turns += 1
        reward = 0.0
        for action in actions:
            if not self.episode.done:
                reward += self.episode.step(action)
        self.turn_rewards.append(reward)
        return f"Reward {reward:g}."

    def record(self, actions: Sequence[str], text: str | None = None, reply: str | None = None) -> None:
        """Adds the turn that `take` has just taken to `turns`."""
        valid = self._valid_turns > sum(turn.valid for turn in self.turns)
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
    sizes = {len(members) for members in groups.values()}
    if len(sizes) == 1:  # elsewhere a group is spread over processes, and k would differ from task to task
        means[f"pass@{sizes.pop()}"] = fmean(any(members) for members in groups.values())
    return means
