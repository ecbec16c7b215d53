"""The rules of a task through TRL's `environment_factory`: an object with `reset`, typed tools and `get_reward`."""

import os
import random
from collections.abc import Collection
from typing import Any, ClassVar, Protocol, TypeAlias

from ragen2_trl.envs.play import Play, check_failures
from ragen2_trl.envs.tasks import Row
from ragen2_trl.failures import LOST

# Text, or content parts where the state is a picture. Not a union: tools are put into the prompt with their types.
Answer: TypeAlias = Any


class ToolTask(Protocol):
    """What a tool environment needs of its `Environment`."""

    name: ClassVar[str]
    shows_images: bool

    def begin(self, row: Row, rng: random.Random) -> Play: ...


class ToolEnvironment:
    """One player's environment, used again and again: `reset`, then tools, then `get_reward`.

    Chance events count the resets of this instance, which begin again when training is resumed.

    Args:
        env: The task.
        number: Tells this instance from others of one trainer.
        players: All instances of one trainer.
    """

    def __init__(self, env: ToolTask, number: int, players: "Collection[ToolEnvironment]" = ()):
        self._env = env
        self._number = number
        self._players = players
        self._resets = 0

    def reset(self, **row: Any) -> Answer:
        """Begins a row's task and gives what the player sees of it; TRL appends that to the prompt."""
        # Members of a group share the row, so their noise comes from the instance, too.
        noise = f"{row['seed']}/{self._number}/{self._resets}/{os.environ.get('RANK', '0')}"
        self._resets += 1
        self._play = self._env.begin(row, random.Random(noise))
        return self._shown(self._play.episode.observation())

    def get_reward(self) -> float | None:
        """The return of the episode so far; `None` after a lost connection, unless there are too many of them.

        TRL makes text of what a tool raises, so that here is where training learns of any other exception.
        """
        error = self._play.error
        if error is None:
            return self._play.outcome.episode_return
        if not isinstance(error, LOST):
            raise error
        check_failures([player._play for player in self._players if player._resets])
        return None

    @property
    def _snr_task(self) -> str:
        return self._env.name

    @property
    def _snr_failure(self) -> str | None:
        return self._play.failure if self._resets else None

    def _take(self, actions: object) -> str:
        """Takes a turn and tells what a tool answers; anything but a list of strings is an invalid turn."""
        if self._play.done:
            return "The episode is over."
        known = isinstance(actions, list) and all(isinstance(action, str) for action in actions)
        named = [action.strip() for action in actions] if known else []  # type: ignore[attr-defined]
        try:
            status = self._play.take(named)
            over = self._play.done
            answer = f"{status} The episode is over." if over else f"{status}\n{self._play.episode.observation()}"
            self._play.turns[-1].reply = answer
        except Exception as error:
            self._play.fail(error)
            raise
        return answer

    def _shown(self, text: str) -> Answer:
        """What a player sees: the text, with the picture of the state where the task has one."""
        if not self._env.shows_images or self._play.done:
            return text
        picture = {"type": "image", "image": self._play.episode.image()}
        return [picture, {"type": "text", "text": text.strip()}] if text.strip() else [picture]
