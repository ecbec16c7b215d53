"""The rules of one play of a task: an `Episode`. Nothing here knows prompts, formats, torch or TRL."""

import random
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass

from PIL import Image


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
