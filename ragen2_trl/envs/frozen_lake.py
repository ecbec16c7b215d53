"""FrozenLake: cross a frozen lake from a start to a goal without falling into a hole.

Maps and movement, slips included, are gymnasium's. Start and goal lie on random cells instead of two corners, so that
a plan has to depend on the map. In single-turn play the whole plan is one answer.
"""

import os
import random
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from datasets import Dataset
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from ragen2_trl.envs.base import (
    SPLITS,
    Completion,
    Environment,
    Message,
    RewardFunc,
    check_choice,
    check_range,
    completion_text,
    format_response,
    parse_response,
)

Grid: TypeAlias = tuple[str, ...]  # rows of S (start), F (frozen), H (hole), G (goal)
Cell: TypeAlias = tuple[int, int]  # row, column; both from 0, rows downwards
Transitions: TypeAlias = dict[int, dict[int, list[tuple[float, int, float, bool]]]]  # gymnasium's `P`

ACTIONS = ("Left", "Down", "Right", "Up")  # in gymnasium's order
MOVES: tuple[Cell, ...] = ((0, -1), (1, 0), (0, 1), (-1, 0))
COLUMNS = "abcdefghij"
OBSERVATIONS = ("grid", "coordinates", "both")
FORMAT_PENALTY = -0.1
TEST_FRACTION_INVERSE = 5  # one map in five is held out

_ACTION_INDEX = {name.lower(): index for index, name in enumerate(ACTIONS)}
_SYMBOLS = str.maketrans({"S": "P", "F": "_", "H": "O", "G": "G"})


@lru_cache(maxsize=8192)
def transitions(grid: Grid, slip: float) -> Transitions:
    """Gymnasium's transition table of a map: state, action -> list of (probability, state, reward, done)."""
    env = FrozenLakeEnv(desc=list(grid), is_slippery=slip > 0, success_rate=1.0 - slip)
    table: Transitions = env.P
    return table


def find(grid: Grid, symbol: str) -> list[Cell]:
    """The cells that hold `symbol`, row by row."""
    return [(r, c) for r, row in enumerate(grid) for c, letter in enumerate(row) if letter == symbol]


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


class Walk:
    """One walk over one map: the rules and nothing else.

    Args:
        grid: The map.
        slip: Probability that a move goes to one of its two perpendicular directions instead, half to each.
        rng: Source of the slips.
    """

    def __init__(self, grid: Grid, slip: float, rng: random.Random):
        self._table = transitions(grid, slip)
        self._rng = rng
        self._size = len(grid)
        (self.position,) = find(grid, "S")
        self.done = False
        self.solved = False

    def step(self, action: int) -> None:
        """Moves once; `action` is an index into `ACTIONS`. A walk that is done stays where it is."""
        if self.done:
            return
        outcomes = self._table[self.position[0] * self._size + self.position[1]][action]
        weights = [probability for probability, *_ in outcomes]
        _, state, reward, self.done = self._rng.choices(outcomes, weights)[0]
        self.position = divmod(state, self._size)
        self.solved = reward > 0


class FrozenLake(Environment):
    """Plan a way over a frozen lake, the whole plan in one answer.

    Rewards: `frozen_lake_success` is 1.0 at the goal and 0.0 elsewhere; `frozen_lake_format` is -0.1 for a response
    that is malformed or names an unknown action, and 0.0 otherwise. Such a response is not carried out.

    Args:
        size: Rows and columns of the map, 3 to 10.
        frozen: Probability that a cell is frozen rather than a hole, 0.6 to 1.0.
        slip: Probability that a move slips to one of its two perpendicular directions, 0.0 to 1.0.
        observation: What the prompt shows: the `"grid"`, the `"coordinates"`, or `"both"`.
        max_actions: Actions that count, 1 to 100; later ones are ignored. Every map can be solved with as many.

    Raises:
        ValueError: If an option is outside its range.
    """

    name = "frozen_lake"

    def __init__(
        self,
        size: int = 4,
        frozen: float = 0.8,
        slip: float = 0.0,
        observation: str = "grid",
        max_actions: int = 10,
    ):
        check_range("size", size, 3, 10)
        check_range("frozen", frozen, 0.6, 1.0)  # below, maps with a way through are too rare to draw
        check_range("slip", slip, 0.0, 1.0)
        check_choice("observation", observation, OBSERVATIONS)
        check_range("max_actions", max_actions, 1, 100)
        self.size = size
        self.frozen = frozen
        self.slip = slip
        self.observation = observation
        self.max_actions = max_actions

    # Tasks

    def dataset(self, num_prompts: int, seed: int, split: str = "train") -> Dataset:
        check_choice("split", split, SPLITS)
        check_range("num_prompts", num_prompts, 1, 10_000_000)
        # A string seeds `Random` through SHA-512, so the streams of two seeds or splits have nothing in common.
        stream = random.Random(f"{self.name}/{split}/{seed}")
        rows: list[dict[str, Any]] = []
        while len(rows) < num_prompts:
            map_seed = stream.getrandbits(31)
            grid = self.make_grid(map_seed)
            if split_of(grid) == split:
                rows.append({"prompt": self.render_prompt(grid), "seed": map_seed, "grid": "\n".join(grid)})
        return Dataset.from_list(rows)

    def make_grid(self, seed: int) -> Grid:
        """The map of a seed: gymnasium's random holes, start and goal on cells joined by a short enough way."""
        rng = random.Random(seed)
        while True:
            base = generate_random_map(self.size, self.frozen, seed=rng.getrandbits(31))
            cells = [(r, c) for r, row in enumerate(base) for c, letter in enumerate(row) if letter != "H"]
            start, goal = rng.sample(cells, 2)
            grid = tuple(
                "".join(
                    "S" if (r, c) == start else "G" if (r, c) == goal else "H" if letter == "H" else "F"
                    for c, letter in enumerate(row)
                )
                for r, row in enumerate(base)
            )
            if distances_to_goal(grid).get(start, self.max_actions + 1) <= self.max_actions:
                return grid

    # Text

    def render_prompt(self, grid: Grid) -> list[dict[str, str]]:
        """The system and the user message for a map."""
        system = (
            "Walk from P to G and avoid the holes O"
            f" with at most {self.max_actions} actions: {', '.join(ACTIONS)}."
            f"{' The ice is slippery, a move may go sideways.' if self.slip > 0 else ''}"
        )
        answer_format = "Reply with <think>reasoning</think><answer>Right || Down</answer>"
        user = f"{self.render_observation(grid)}\n{answer_format}"
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]

    def render_observation(self, grid: Grid) -> str:
        """A map as text, in the form that `observation` asks for."""
        parts = []
        if self.observation in ("grid", "both"):
            parts.append("\n".join(" ".join(row.translate(_SYMBOLS)) for row in grid))
        if self.observation in ("coordinates", "both"):
            holes = _cells(find(grid, "H")) or "none"
            start, goal, corner = _cells(find(grid, "S")), _cells(find(grid, "G")), _cells([(len(grid) - 1,) * 2])
            parts.append(f"P {start}, G {goal}, O {holes}, from a1 top left to {corner} bottom right.")
        return "\n".join(parts)

    def is_valid(self, text: str) -> bool:
        return self.parse_actions(text) is not None

    def parse_actions(self, text: str) -> list[int] | None:
        """The first `max_actions` actions of a response; `None` when it is malformed or one of them is unknown."""
        response = parse_response(text)
        if response is None or not response.actions:
            return None
        names = [action.lower() for action in response.actions[: self.max_actions]]
        if any(name not in _ACTION_INDEX for name in names):
            return None
        return [_ACTION_INDEX[name] for name in names]

    # Rewards

    @property
    def reward_funcs(self) -> list[RewardFunc]:
        return [self.frozen_lake_success, self.frozen_lake_format]

    @property
    def success_func(self) -> RewardFunc:
        return self.frozen_lake_success

    def frozen_lake_success(
        self,
        prompts: Sequence[str | Sequence[Message]],
        completions: Sequence[Completion],
        seed: Sequence[int],
        grid: Sequence[str],
        trainer_state: Any = None,
        **columns: Any,
    ) -> list[float]:
        """1.0 for a completion whose walk ends at the goal, else 0.0.

        Every completion slips on its own: its noise comes from the seed of its row, its place among the completions
        of that row, the training step and the process, so that the members of a group share none.
        """
        step = 0 if trainer_state is None else trainer_state.global_step
        # A group may be spread over processes, each of which counts its own members from 0.
        process = os.environ.get("RANK", "0")
        members: Counter[int] = Counter()
        rewards = []
        for completion, row_seed, row_grid in zip(completions, seed, grid, strict=True):
            noise = random.Random(f"{row_seed}/{members[row_seed]}/{step}/{process}")
            members[row_seed] += 1
            walk = Walk(tuple(row_grid.split("\n")), self.slip, noise)
            for action in self.parse_actions(completion_text(completion)) or []:
                walk.step(action)
            rewards.append(1.0 if walk.solved else 0.0)
        return rewards

    def frozen_lake_format(
        self, prompts: Sequence[str | Sequence[Message]], completions: Sequence[Completion], **columns: Any
    ) -> list[float]:
        """-0.1 for a completion that is malformed or names an unknown action, else 0.0."""
        return [0.0 if self.is_valid(completion_text(completion)) else FORMAT_PENALTY for completion in completions]

    # Demonstrations

    def demonstrations(self, num: int, seed: int) -> Dataset:
        """Shortest ways, one drawn at random for each map, so that a model warmed up on them stays stochastic.

        The reasoning reads the map first (start, goal, holes between them) and then follows the way cell by cell.
        """
        rows = []
        for row in self.dataset(num, seed):
            grid = tuple(row["grid"].split("\n"))
            path, actions = shortest_path(grid, random.Random(f"demonstration/{seed}/{row['seed']}"))
            completion = format_response(explain(grid, path), [ACTIONS[action] for action in actions])
            rows.append({"prompt": row["prompt"], "completion": [{"role": "assistant", "content": completion}]})
        return Dataset.from_list(rows)


def split_of(grid: Grid) -> str:
    """The split a map belongs to: one map in `TEST_FRACTION_INVERSE` is held out, by a hash of the map itself."""
    return "test" if zlib.crc32("\n".join(grid).encode()) % TEST_FRACTION_INVERSE == 0 else "train"


def shortest_path(grid: Grid, rng: random.Random) -> tuple[list[Cell], list[int]]:
    """A shortest way from start to goal, its cells (both ends included) and its actions, ties broken by `rng`."""
    distances = distances_to_goal(grid)
    (cell,) = find(grid, "S")
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
