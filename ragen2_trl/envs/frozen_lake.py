"""FrozenLake: cross a frozen lake from a start to a goal without falling into a hole.

Holes and movement, slips included, are those of gymnasium's FrozenLake. Start and goal lie on random cells instead of
two corners, so that a plan has to depend on the map. In single-turn play the whole plan is one answer; in multi-turn
play the map is shown again after every few moves.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from ragen2_trl.envs.checks import check_choice, check_count, check_range
from ragen2_trl.envs.drawing import draw_board
from ragen2_trl.envs.environment import Environment
from ragen2_trl.envs.episode import Episode, Limits
from ragen2_trl.envs.tasks import Row, held_out, impossible_rows
from ragen2_trl.envs.tools import Answer, ToolEnvironment

Grid: TypeAlias = tuple[str, ...]  # rows of S (start), F (frozen), H (hole), G (goal)
Cell: TypeAlias = tuple[int, int]  # row, column; both from 0, rows downwards

ACTIONS = ("Left", "Down", "Right", "Up")  # in gymnasium's order
MOVES: tuple[Cell, ...] = ((0, -1), (1, 0), (0, 1), (-1, 0))
COLUMNS = "abcdefghij"
OBSERVATIONS = ("grid", "coordinates", "both")  # in words
_ACTION_INDEX = {name.lower(): index for index, name in enumerate(ACTIONS)}
_TILES = str.maketrans({"S": ".", "F": ".", "H": "o", "G": "g"})
_FROZEN = str.maketrans("SG", "FF")
_WITH_PLAYER = {".": "p", "o": "d", "g": "w"}
CELLS = str.maketrans({"S": "_", "F": "_", "H": "O", "G": "G"})  # the player, P, stands on top


def random_map(size: int, frozen: float, seed: int) -> Grid:
    """Gymnasium's `generate_random_map(size, frozen, seed)`: between two corners, joined by a way."""
    rng = np.random.Generator(np.random.PCG64(seed))
    while True:
        cells = rng.choice(["F", "H"], (size, size), p=[frozen, 1 - frozen])
        cells[0, 0], cells[-1, -1] = "S", "G"
        grid = tuple(map("".join, cells.tolist()))
        if (0, 0) in distances_to_goal(grid):
            return grid


def find(grid: Grid, symbol: str) -> list[Cell]:
    """The cells that hold `symbol`, row by row."""
    return [(r, c) for r, row in enumerate(grid) for c, letter in enumerate(row) if letter == symbol]


def shut_in(grid: Grid, rng: random.Random) -> Grid | None:
    """A map with holes all around its start or its goal, as `rng` draws; `None` if these are next to one another."""
    ends = [find(grid, symbol)[0] for symbol in "SG"]
    (r, c), other = rng.sample(ends, 2)
    around = {(r + dr, c + dc) for dr, dc in MOVES}
    if other in around:
        return None
    return tuple(
        "".join("H" if (row, column) in around else letter for column, letter in enumerate(letters))
        for row, letters in enumerate(grid)
    )


def distances_to_goal(grid: Grid) -> dict[Cell, int]:
    """Number of moves from each cell to the goal, without slips; cells that cannot reach it are left out."""
    (goal,) = find(grid, "G")
    distances = {goal: 0}
    frontier = deque([goal])
    while frontier:
        r, c = frontier.popleft()
        for dr, dc in MOVES:
            cell = (r + dr, c + dc)
            inside = 0 <= cell[0] < len(grid) and 0 <= cell[1] < len(grid)
            if inside and cell not in distances and grid[cell[0]][cell[1]] != "H":
                distances[cell] = distances[r, c] + 1
                frontier.append(cell)
    return distances


class FrozenLakeEpisode(Episode):
    """One walk over one map.

    Args:
        grid: The map.
        slip: Probability that a move goes to one of its two perpendicular directions instead, half to each.
        rng: Source of the slips.
        show: Puts a map, with the player where it is, into words.
    """

    def __init__(self, grid: Grid, slip: float, rng: random.Random, show: Callable[[Grid, Cell], str]):
        sideways = (1.0 - (1.0 - slip)) / 2.0  # in the order of operations that gymnasium has
        self._turns = {-1: sideways, 0: 1.0 - slip, 1: sideways} if slip > 0 else {0: 1.0}
        self._rng = rng
        self._show = show
        self.grid = grid
        (self.position,) = find(grid, "S")

    def observation(self) -> str:
        return self._show(self.grid, self.position)

    def image(self) -> Image.Image:
        """The map from above, 32 pixels a cell: ice, dark holes, a flag on the goal, and the player in blue."""
        return draw_board(self.board_letters())

    def board_letters(self) -> str:
        rows = [list(row.translate(_TILES)) for row in self.grid]
        row, column = self.position
        rows[row][column] = _WITH_PLAYER[rows[row][column]]
        return "\n".join(map("".join, rows))

    def snapshot(self) -> Cell:
        return self.position

    def is_action(self, action: str) -> bool:
        return action.lower() in _ACTION_INDEX

    def step(self, action: str) -> float:
        """Moves once. 1 at the goal, else 0."""
        (turn,) = self._rng.choices(list(self._turns), list(self._turns.values()))
        down, right = MOVES[(_ACTION_INDEX[action.lower()] + turn) % len(MOVES)]
        last = len(self.grid) - 1
        row, column = (min(max(at + by, 0), last) for at, by in zip(self.position, (down, right), strict=True))
        self.position = row, column
        self.success = self.grid[row][column] == "G"
        self.done = self.grid[row][column] in "GH"
        return int(self.success)

    def plan(self, rng: random.Random) -> tuple[str, list[str]]:
        """A shortest way, drawn at random, so that a model warmed up on it stays stochastic.

        The reasoning reads the map first (start, goal, holes between them) and then follows the way cell by cell.
        Where there is no way, it says so and takes any step.
        """
        if self.position not in distances_to_goal(self.grid):
            return "There is no way.", [ACTIONS[0]]
        path, actions = shortest_path(self.grid, self.position, rng)
        return explain(self.grid, path), [ACTIONS[action] for action in actions]

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(ACTIONS)


class FrozenLakeTools(ToolEnvironment):
    """FrozenLake's tools."""

    def move(self, directions: list[str]) -> Answer:
        """
        Walks over the ice.

        Args:
            directions: Steps to take one after the other, each "Left", "Down", "Right" or "Up".

        Returns:
            The reward of these steps and the map as it is then.
        """
        return self._shown(self._take(directions))


class FrozenLake(Environment):
    """Walk over a frozen lake: 1.0 at the goal, nothing elsewhere, and holes end the walk.

    Args:
        size: Rows and columns of the map, 3 to 10.
        frozen: Probability that a cell is frozen rather than a hole, 0.6 to 1.0.
        slip: Probability that a move slips to one of its two perpendicular directions, 0.0 to 1.0.
        observation: What the player sees: the `"grid"`, the `"coordinates"`, `"both"`, or an `"image"` instead of
            words, in single-turn play or through tools.
        impossible: Share of the training maps on which holes shut in the start or the goal, 0.0 to 1.0: no
            completion solves them. Held-out maps (split `"test"`) never are.
        **limits: The options of `Environment`. Every map but the impossible can be solved within the limits.

    Raises:
        ValueError: If an option is outside its range.
    """

    name = "frozen_lake"
    returns = (0.0, 1.0)
    single_turn_limits = Limits(turns=1, actions=10)
    multi_turn_limits = Limits(turns=5, actions=2)
    example = "Right || Down"
    tools = FrozenLakeTools

    def __init__(
        self,
        size: int = 4,
        frozen: float = 0.8,
        slip: float = 0.0,
        observation: str = "grid",
        impossible: float = 0.0,
        **limits: Any,
    ):
        super().__init__(**limits)
        check_count("size", size, 3, 10)
        check_range("frozen", frozen, 0.6, 1.0)  # below, maps with a way through are too rare to draw
        check_range("slip", slip, 0.0, 1.0)
        check_choice("observation", observation, (*OBSERVATIONS, "image"))
        check_range("impossible", impossible, 0.0, 1.0)
        if impossible > 0:  # a goal one move away cannot be shut in
            check_count("max_turns * max_actions with impossible", self.longest, 2, 10_000)
        if observation == "image":
            self._show_pictures()
        self.size = size
        self.frozen = frozen
        self.slip = slip
        self.observation = observation
        self.impossible = impossible

    def tasks(self, seed: int, split: str, data: str | None) -> Iterator[dict[str, Any]]:
        check_choice("data", data, (None,))  # maps are generated
        # A string seeds `Random` through SHA-512, so the streams of two seeds or splits have nothing in common.
        stream = random.Random(f"{self.name}/{split}/{seed}")
        for impossible in impossible_rows(self.impossible, self.name, split, seed):
            grid: str | None = None
            while grid is None or held_out(grid) != (split == "test"):
                map_seed = stream.getrandbits(31)
                made = self.make_grid(map_seed)
                rows = shut_in(made, random.Random(f"shut in/{map_seed}")) if impossible else made
                grid = None if rows is None else "\n".join(rows)
            yield {"seed": map_seed, "grid": grid}

    def make_grid(self, seed: int) -> Grid:
        """The map of a seed: gymnasium's random holes, start and goal on cells joined by a short enough way."""
        rng = random.Random(seed)
        while True:
            rows = [row.translate(_FROZEN) for row in random_map(self.size, self.frozen, rng.getrandbits(31))]
            start, goal = rng.sample(find(tuple(rows), "F"), 2)
            for (row, column), letter in ((start, "S"), (goal, "G")):
                rows[row] = rows[row][:column] + letter + rows[row][column + 1 :]
            if distances_to_goal(grid := tuple(rows)).get(start, math.inf) <= self.longest:
                return grid

    def episode(self, row: Row, rng: random.Random) -> FrozenLakeEpisode:
        return FrozenLakeEpisode(tuple(row["grid"].split("\n")), self.slip, rng, self.show)

    def instructions(self) -> str:
        task = "Walk from P to G and avoid the holes O."
        if self.shows_images:
            task = "The picture shows a frozen lake. Walk from the blue player to the flag and avoid the dark holes."
        slippery = " The ice is slippery, a move may go sideways." if self.slip > 0 else ""
        return f"{task} Actions: {', '.join(ACTIONS)}.{slippery}"

    def show(self, grid: Grid, position: Cell) -> str:
        """A map and where the player is in words, in the form that `observation` asks for; none for an image."""
        parts = []
        if self.observation in ("grid", "both"):
            symbols = [list(row.translate(CELLS)) for row in grid]
            symbols[position[0]][position[1]] = "P"
            parts.append("\n".join(" ".join(row) for row in symbols))
        if self.observation in ("coordinates", "both"):
            holes = _cells(find(grid, "H")) or "none"
            start, goal, corner = _cells([position]), _cells(find(grid, "G")), _cells([(len(grid) - 1,) * 2])
            parts.append(f"P {start}, G {goal}, O {holes}, from a1 top left to {corner} bottom right.")
        return "\n".join(parts)


def shortest_path(grid: Grid, start: Cell, rng: random.Random) -> tuple[list[Cell], list[int]]:
    """A shortest way to the goal, its cells (both ends included) and its actions, ties broken by `rng`."""
    distances, cell = distances_to_goal(grid), start
    path, actions = [cell], []
    while distances[cell] > 0:
        steps = [(action, (cell[0] + dr, cell[1] + dc)) for action, (dr, dc) in enumerate(MOVES)]
        nearer = distances[cell] - 1
        action, cell = rng.choice([step for step in steps if distances.get(step[1]) == nearer])
        path.append(cell)
        actions.append(action)
    return path, actions


def explain(grid: Grid, path: Sequence[Cell]) -> str:
    """The reasoning behind a way: its two ends, the holes in the rectangle between them, and its cells one by one."""
    (start_row, start_column), (goal_row, goal_column) = path[0], path[-1]
    holes = [
        (r, c)
        for r, c in find(grid, "H")
        if min(start_row, goal_row) <= r <= max(start_row, goal_row)
        and min(start_column, goal_column) <= c <= max(start_column, goal_column)
    ]  # the holes that stand in a direct way, whichever way is taken: a short text, but one that reads the map
    return f"From {_cells(path[:1])} to {_cells(path[-1:])}, holes {_cells(holes) or 'none'}, path {_cells(path)}."


def _cells(cells: Sequence[Cell]) -> str:
    """Cells as on a chess board, column letter and row number, but with the rows counted from the top."""
    return " ".join(f"{COLUMNS[column]}{row + 1}" for row, column in cells)
