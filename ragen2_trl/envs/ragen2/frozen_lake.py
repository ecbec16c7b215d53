"""FrozenLake as RAGEN-2 plays it: its maps, its symbols, its texts."""

from collections.abc import Iterator
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from ragen2_trl.envs.checks import check_choice
from ragen2_trl.envs.episode import Limits
from ragen2_trl.envs.frozen_lake import ACTIONS, CELLS, Cell, FrozenLake, Grid, distances_to_goal, find
from ragen2_trl.envs.ragen2.protocol import RagenGrid

# What RAGEN-2's prompt says, in our words. The corner is that of RAGEN's code, whatever the size of the map.
TEXTS = {
    "coordinates": {
        "instruction": "This is FrozenLake.\nYou are given the lake as a grid of symbols, and the coordinates of "
        "start, goal, player and holes, counted from zero.\nThey go from (0, 0) at the top left to (5, 5) at the "
        "bottom right.\n"
        "The ice is slippery: you may come to another place than you wanted to.\n"
        "Your answer is a sequence of actions, for instance <answer>Down || Down || Left</answer>.\n",
        "length": "Use no more than 120 words.",
    },
    "grid": {
        "instruction": "This is FrozenLake. Keep away from the holes and get to the goal. You may slip and come to "
        "another place than you wanted to. For instance: <think>The goal is below me and then to the left, with no "
        "hole on the way.</think> <answer>Down || Left</answer>",
        "length": "Use no more than 100 words.",
    },
}


class RagenFrozenLake(RagenGrid, FrozenLake):
    """FrozenLake as RAGEN-2 plays it: ways may be longer than the limits.

    Args:
        **options: Those of `RagenGrid`, and `size`, `slip` and `impossible` of `FrozenLake`.
    """

    limits = Limits(turns=5, actions=2)
    max_total, turn_tokens = 10, 400
    fixed = MappingProxyType({"frozen": 0.9})
    actions = ACTIONS
    # The last two occur only where an episode has ended.
    meanings = MappingProxyType(
        {"P": "player", "_": "empty", "O": "hole", "G": "goal", "X": "player in hole", "√": "player on goal"}
    )

    def texts(self) -> dict[str, str]:
        return TEXTS["grid" if self.observation == "grid" else "coordinates"]

    def numbered_tasks(self, seeds: Iterator[int], split: str, data: str | None) -> Iterator[dict[str, Any]]:
        check_choice("data", data, (None,))
        check_choice("impossible with split='ragen2'", self.impossible, (0.0,))
        return ({"seed": seed, "grid": "\n".join(self.make_grid(seed))} for seed in seeds)

    def make_grid(self, seed: int) -> Grid:
        return make_ragen_grid(self.size, self.frozen, seed)

    def show(self, grid: Grid, position: Cell) -> str:
        lines = [list(row.translate(CELLS)) for row in grid]
        row, column = position
        standing = {"H": "X", "G": "√"}.get(grid[row][column], "P")
        lines[row][column] = standing
        places = {
            "Start": find(grid, "S"),
            "Goal": find(grid, "G"),
            {"P": "Player", "√": "Player on goal", "X": "Player in hole"}[standing]: [position],
            "Holes": find(grid, "H"),
        }
        return self.show_board(["".join(line) for line in lines], places)


@lru_cache(maxsize=8192)
def make_ragen_grid(size: int, frozen: float, seed: int) -> Grid:
    """The map of a seed as RAGEN-2 makes it: start and goal on any two cells that a way joins, of any length."""
    rng = np.random.Generator(np.random.PCG64(seed))
    while True:
        cells = rng.choice(["F", "H"], (size, size), p=[frozen, 1 - frozen])
        start, goal = ((int(rng.integers(size)), int(rng.integers(size))) for _ in range(2))
        cells[start], cells[goal] = "S", "G"
        grid = tuple("".join(row) for row in cells)
        if start != goal and start in distances_to_goal(grid):
            return grid
