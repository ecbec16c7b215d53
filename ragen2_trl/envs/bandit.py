"""Bandit: two slot machines, and only their names to tell which one is bold. The smallest task; read it first.

The cautious machine always pays 0.1, the bold one pays 1 in a quarter of the pulls and so 0.25 on average.
"""

import random
from collections.abc import Iterator
from typing import Any

from ragen2_trl.envs.checks import check_choice
from ragen2_trl.envs.environment import Environment
from ragen2_trl.envs.episode import Episode, Limits
from ragen2_trl.envs.tasks import Row
from ragen2_trl.envs.tools import ToolEnvironment

SAFE_REWARD, BOLD_REWARD, BOLD_CHANCE = 0.1, 1.0, 0.25

# Bold name, cautious name. Held-out names are others, so that a player has to know what names mean.
PAIRS = {
    "train": (
        ("Volcano", "Meadow"),
        ("Pirate", "Farmer"),
        ("Lightning", "Candle"),
        ("Tiger", "Turtle"),
        ("Rocket", "Bicycle"),
        ("Gambler", "Banker"),
        ("Storm", "Breeze"),
        ("Daredevil", "Librarian"),
        ("Rapids", "Pond"),
        ("Cliff", "Sofa"),
        ("Wildfire", "Hearth"),
        ("Comet", "Pebble"),
    ),
    "test": (
        ("Tornado", "Garden"),
        ("Stuntman", "Accountant"),
        ("Shark", "Cow"),
        ("Avalanche", "Snowflake"),
        ("Dynamite", "Pillow"),
        ("Outlaw", "Shepherd"),
        ("Thunder", "Lullaby"),
        ("Jungle", "Nursery"),
    ),
}


class BanditEpisode(Episode):
    """The rules: what a player sees, may do, and gets for it."""

    shown = "Machines: {0}, {1}."

    def __init__(self, names: list[str], bold: str, rng: random.Random):
        self.names = names
        self.bold = bold
        self._rng = rng  # chance comes from here alone, so that equal seeds play equally

    def observation(self) -> str:
        return self.shown.format(*self.names)

    def is_action(self, action: str) -> bool:
        return action.strip().lower() in [name.lower() for name in self.names]

    def step(self, action: str) -> float:
        """Pulls once. The bold machine counts as success, lucky or not; of several pulls the last one counts."""
        self.success = action.strip().lower() == self.bold.lower()
        if not self.success:
            return SAFE_REWARD
        return BOLD_REWARD if self._rng.random() < BOLD_CHANCE else 0.0

    # The last two are optional: a solver makes demonstrations, and the random baseline is what has to be beaten.

    def plan(self, rng: random.Random) -> tuple[str, list[str]]:
        return f"{self.bold} sounds bold.", [self.bold]

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(self.names)


class BanditTools(ToolEnvironment):
    """What TRL's `environment_factory` offers to a model: every public method is a tool."""

    def pull(self, arm: str) -> str:
        """
        Pulls the arm of a machine.

        Args:
            arm: Name of the machine.

        Returns:
            The reward of the pull.
        """
        return self._take([str(arm)])


class Bandit(Environment):
    """Pull the machine that pays more on average, known by its name alone.

    Args:
        **limits: The options of `Environment`.

    Raises:
        ValueError: If an option is outside its range.
    """

    name = "bandit"
    single_turn_limits = Limits(turns=1, actions=1)
    multi_turn_limits = Limits(turns=5, actions=1)
    example = "Name"
    tools = BanditTools
    pairs = PAIRS

    def instructions(self) -> str:
        return (
            f"Pull one of two slot machines. One always pays {SAFE_REWARD:g}, the bold one {BOLD_REWARD:g} with a "
            f"chance of {BOLD_CHANCE:.0%}. Their names tell which is bold."
        )

    def tasks(self, seed: int, split: str, data: str | None) -> Iterator[dict[str, Any]]:
        """Rows of what `episode` needs: all that a group of completions shares, the order of the names included."""
        check_choice("data", data, (None,))
        stream = random.Random(f"{self.name}/{split}/{seed}")
        while True:
            bold, safe = stream.choice(self.pairs[split])
            yield {"seed": stream.getrandbits(31), "names": stream.sample([bold, safe], 2), "bold": bold}

    def episode(self, row: Row, rng: random.Random) -> BanditEpisode:
        return BanditEpisode(row["names"], row["bold"], rng)
