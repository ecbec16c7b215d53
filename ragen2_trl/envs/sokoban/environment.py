"""Sokoban: push boxes onto targets, in rooms where a wrong push cannot be undone.

Rewards are RAGEN's. In single-turn play the whole plan is one answer; in multi-turn play the room is shown again after
every few moves. Rooms are made in `rooms.py`, each with a solution that fits the limits.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from PIL import Image

from ragen2_trl.envs.checks import check_choice, check_count, check_range
from ragen2_trl.envs.drawing import draw_board
from ragen2_trl.envs.environment import Environment
from ragen2_trl.envs.episode import Episode, Limits
from ragen2_trl.envs.sokoban.rooms import (
    Cell,
    Room,
    State,
    make_room,
    read_room,
    shortest_solution,
    write_room,
)
from ragen2_trl.envs.tasks import Row, held_out
from ragen2_trl.envs.tools import Answer, ToolEnvironment

ACTIONS = ("Up", "Down", "Left", "Right")  # in the order of `Room.directions`
OBSERVATIONS = ("grid", "coordinates", "both", "image")

STEP_REWARD = -0.1
BOX_REWARD = 1.0  # for a box that comes onto a target, and its negative for one that leaves
SOLVED_REWARD = 10.0

_ACTION_INDEX = {name.lower(): index for index, name in enumerate(ACTIONS)}


class SokobanEpisode(Episode):
    """One play of one room.

    Args:
        room: Walls and targets.
        state: Where the player and the boxes are.
        longest: Longest solution that `plan` looks for, in actions.
        show: Puts a room in a state into words.
    """

    def __init__(self, room: Room, state: State, longest: int, show: Callable[[Room, State], str]):
        self.room = room
        self.state = state
        self._longest = longest
        self._show = show

    def observation(self) -> str:
        return self._show(self.room, self.state)

    def snapshot(self) -> State:
        return self.state

    def is_action(self, action: str) -> bool:
        return action.lower() in _ACTION_INDEX

    def step(self, action: str) -> float:
        """Moves, and pushes the box that is in the way: -0.1, 1 for a box onto a target, -1 off it, 10 at the end.

        Where a wall or a blocked box is in the way nothing moves, which costs as much as any action.
        """
        before = self.room.placed(self.state)
        self.state = self.room.act(self.state, self.room.directions[_ACTION_INDEX[action.lower()]])
        reward = STEP_REWARD + BOX_REWARD * (self.room.placed(self.state) - before)
        self.done = self.success = self.room.solved(self.state)
        return reward + SOLVED_REWARD if self.success else reward

    def image(self) -> Image.Image:
        """The room as an RGB picture, 32 pixels a cell."""
        return draw_board(self.board_letters())

    def board_letters(self) -> str:
        return write_room(self.room, self.state)

    def plan(self, rng: random.Random) -> tuple[str, list[str]]:
        """A shortest solution, drawn at random, so that a model warmed up on it stays stochastic.

        The reasoning reads the room first (player, boxes, targets) and then follows the player cell by cell, and each
        box that it pushes. Where there is no solution within the limits it says so and tries something.
        """
        seen = explain(self.room, self.state)
        indices = shortest_solution(self.room, self.state, self._longest, rng)
        if indices is None:
            moves = [
                action
                for action, direction in zip(ACTIONS, self.room.directions, strict=True)
                if self.room.act(self.state, direction) != self.state
            ]
            return f"{seen}. I see no way.", [rng.choice(moves or ACTIONS)]
        return f"{seen}{follow(self.room, self.state, indices)}.", [ACTIONS[index] for index in indices]

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(ACTIONS)


class SokobanTools(ToolEnvironment):
    """Sokoban's tools."""

    def move(self, directions: list[str]) -> Answer:
        """
        Walks through the room and pushes boxes.

        Args:
            directions: Steps to take one after the other, each "Up", "Down", "Left" or "Right".

        Returns:
            The reward of these steps and the room as it is then.
        """
        return self._shown(self._take(directions))


class Sokoban(Environment):
    """Push every box onto a target: -0.1 an action, 1 for a box onto a target, -1 off it, 10 when all are there.

    The shortest solutions have 2 to `max_turns * max_actions` actions, each length as often as the
    others as far as rooms of that size allow (at 6x6 with one box up to about 10).

    Args:
        size: Rows and columns of the room with the walls round it, 5 to 10.
        boxes: Number of boxes, 1 to 4; at most 3 where the size is 5.
        observation: What the prompt shows: the `"grid"`, the `"coordinates"`, `"both"`, or an `"image"` in the row's
            column `image` or, with `protocol="tools"`, in the answers of tools.
        **limits: The options of `Environment`. Every room can be solved within the limits, which must allow two
            actions for each box.

    Raises:
        ValueError: If an option is outside its range, or pictures are asked for in the text of later turns.
    """

    name = "sokoban"
    returns = (0.0, SOLVED_REWARD + 10 * STEP_REWARD)
    single_turn_limits = Limits(turns=1, actions=10)
    multi_turn_limits = Limits(turns=5, actions=2)
    example = "Up || Right"
    tools = SokobanTools

    def __init__(self, size: int = 6, boxes: int = 1, observation: str = "grid", **limits: Any):
        super().__init__(**limits)
        check_count("size", size, 5, 10)
        check_count("boxes", boxes, 1, min(4, size - 2))
        check_choice("observation", observation, OBSERVATIONS)
        limits_named = "max_turns * max_actions" if self.max_total_actions is None else "max_total_actions"
        check_range(limits_named, self.longest, 2 * boxes, 100 * 100)
        if observation == "image":
            self._show_pictures()
        self.size = size
        self.boxes = boxes
        self.observation = observation

    def tasks(self, seed: int, split: str, data: str | None) -> Iterator[dict[str, Any]]:
        check_choice("data", data, (None,))  # rooms are generated
        # A string seeds `Random` through SHA-512, so the streams of two seeds or splits have nothing in common.
        stream = random.Random(f"{self.name}/{split}/{seed}")
        while True:
            room_seed = stream.getrandbits(31)
            room = self.make_room(room_seed)
            if held_out(room) == (split == "test"):
                yield {"seed": room_seed, "room": room}

    def make_room(self, seed: int) -> str:
        """The room of a seed, in the usual symbols."""
        return write_room(*make_room(self.size, self.boxes, self.longest, random.Random(seed)))

    def episode(self, row: Row, rng: random.Random) -> SokobanEpisode:
        return SokobanEpisode(*room_of(row), self.longest, self.show)

    def instructions(self) -> str:
        goal, rewards = "Push the box X onto the target O.", "the box on the target gives 11"
        if self.boxes > 1:
            goal = "Push each box X onto a target O."
            rewards = "a box on a target gives 1, off it takes 1, and all on targets give 10"
        return (
            f"{goal} {self._legend()} You cannot pull, nor push into a wall{' or a box' if self.boxes > 1 else ''}; a "
            f"blocked move changes nothing. Actions: {', '.join(ACTIONS)}. Each costs 0.1, {rewards}."
        )

    def _legend(self) -> str:
        if self.observation == "image":
            ticked = ", or ticked on a target" if self.boxes > 1 else ""
            return f"You are blue, X is crossed{ticked}, O is a ring."
        if self.observation == "coordinates":
            return "P is you, # a wall."
        on_target = ", √ a box on a target" if self.boxes > 1 else ""
        return f"P is you, S you on a target{on_target}, # a wall, _ floor."

    def show(self, room: Room, state: State) -> str:
        """A room in a state as text, in the form that `observation` asks for; none where that is a picture."""
        parts = []
        if self.observation in ("grid", "both"):
            parts.append("\n".join(" ".join(line) for line in write_room(room, state).split("\n")))
        if self.observation == "both":
            parts.append(f"{explain(room, state)}.")
        if self.observation == "coordinates":
            parts.append(f"{explain(room, state)}, {explain_walls(room)}.")
        return "\n".join(parts)


def room_of(row: Row) -> tuple[Room, State]:
    """The room of a row, and the state it is in.

    Raises:
        ValueError: If the row has none.
    """
    text = row.get("room")
    if not isinstance(text, str):
        raise ValueError(f"column room must be the text of a room, got {text!r} in columns {sorted(row)}")
    return read_room(text)


def explain_walls(room: Room) -> str:
    """The walls by their cells, those round the room by the corners of what they enclose.

    >>> explain_walls(read_room("#####\\n#P_##\\n#_X_#\\n#__O#\\n#####")[0])
    '# d2, and round b2 top left to d4 bottom right'
    """
    inner = [cell for cell, free in enumerate(room.floor) if not free and not room.on_edge(cell)]
    first, last = name_cells(room, [room.size + 1, (room.size + 1) * (room.size - 2)])
    return f"# {' '.join(name_cells(room, inner)) or 'none'}, and round {first} top left to {last} bottom right"


def explain(room: Room, state: State) -> str:
    """The player, the boxes and the targets by their cells.

    >>> explain(*read_room("#####\\n#P_##\\n#_X_#\\n#__O#\\n#####"))
    'P b2, X c3, O d4'
    """
    player, boxes = state
    names = {symbol: " ".join(name_cells(room, cells)) for symbol, cells in (("X", boxes), ("O", room.targets))}
    return f"P {name_cells(room, [player])[0]}, X {names['X']}, O {names['O']}"


def follow(room: Room, state: State, indices: Sequence[int]) -> str:
    """Where actions lead: the cells the player goes to, and for each push its direction and where the box comes to.

    >>> room, state = read_room("#####\\n#P_##\\n#_X_#\\n#__O#\\n#####")
    >>> follow(room, state, [3, 1, 2, 1, 3])
    ', go c2, push Down c4, go b3 b4, push Right d4'
    """
    words, run = "", -1  # which action a run of pushes repeats, `len(ACTIONS)` in a walk
    for index in indices:
        direction = room.directions[index]
        after = room.act(state, direction)
        pushed = after[1] != state[1]
        kind = index if pushed else len(ACTIONS)
        if kind != run:
            words += f", push {ACTIONS[index]}" if pushed else ", go"
        (cell,) = name_cells(room, [after[0] + direction if pushed else after[0]])
        words, run, state = f"{words} {cell}", kind, after
    return words


def name_cells(room: Room, cells: Sequence[Cell]) -> list[str]:
    """Cells as on a chess board, column letter and row number, but with the rows counted from the top."""
    return [f"{'abcdefghij'[cell % room.size]}{cell // room.size + 1}" for cell in cells]
