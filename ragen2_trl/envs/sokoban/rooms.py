"""Sokoban's rooms: what an action does, how far each state is from being solved, and rooms made to a length.

A room is written as RAGEN writes it: `#` wall, `_` floor, `O` target, `X` box, `√` box on a target, `P` player, `S`
player on a target.
"""

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

Cell: TypeAlias = int  # row * size + column
State: TypeAlias = tuple[Cell, tuple[Cell, ...]]  # the player and the boxes, which are sorted

# Beyond, rooms with several boxes become slow to explore; they are then solved in fewer actions than would be allowed.
MAX_STATES = 20_000
MIN_LENGTH = 2  # one push is no plan
LAYOUTS = 20  # walls and targets that are tried for one length of solution

# Corners of what a drunken digger digs out: a cell, two in a line, or an L.
_SHAPES = (((0, 0),), ((0, 0), (0, 1)), ((0, 0), (1, 0)), ((0, 0), (0, 1), (1, 0)), ((0, 0), (0, -1), (-1, 0)))


class Room(NamedTuple):
    """What never changes: a square of walls and floor with targets, its outermost cells all wall.

    Args:
        size: Rows, and columns.
        floor: For each cell whether it is free of wall.
        targets: Cells where boxes belong, sorted.
    """

    size: int
    floor: tuple[bool, ...]
    targets: tuple[Cell, ...]

    @property
    def directions(self) -> tuple[int, int, int, int]:
        """What up, down, left and right add to a cell."""
        return -self.size, self.size, -1, 1

    @property
    def floor_cells(self) -> list[Cell]:
        return [cell for cell, free in enumerate(self.floor) if free]

    def on_edge(self, cell: Cell) -> bool:
        """Whether a cell belongs to the walls round the room."""
        return not (0 < cell // self.size < self.size - 1 and 0 < cell % self.size < self.size - 1)

    def act(self, state: State, direction: int) -> State:
        """The state after an action; the same where a wall or a blocked box is in the way."""
        player, boxes = state
        ahead, behind_it = player + direction, player + 2 * direction
        if not self.floor[ahead]:
            return state
        if ahead not in boxes:
            return ahead, boxes
        if not self.floor[behind_it] or behind_it in boxes:
            return state
        return ahead, _moved(boxes, ahead, behind_it)

    def placed(self, state: State) -> int:
        """Number of boxes that are on targets."""
        return sum(box in self.targets for box in state[1])

    def solved(self, state: State) -> bool:
        return state[1] == self.targets


def _moved(boxes: Sequence[Cell], source: Cell, destination: Cell) -> tuple[Cell, ...]:
    return tuple(sorted(destination if box == source else box for box in boxes))


@lru_cache(maxsize=1024)
def read_room(text: str) -> tuple[Room, State]:
    """A room and the state it is in.

    Raises:
        ValueError: If the text is no room.
    """
    lines, flat = text.split("\n"), text.replace("\n", "")
    size = len(lines)
    if {len(line) for line in lines} != {size} or set(flat) - set("#_OX√PS"):
        raise ValueError(f"room must be a square of the symbols #_OX√PS, got {text!r}")
    cells = {symbol: tuple(cell for cell, letter in enumerate(flat) if letter == symbol) for symbol in "OX√PS"}
    players = cells["P"] + cells["S"]
    targets = tuple(sorted(cells["O"] + cells["√"] + cells["S"]))
    boxes = tuple(sorted(cells["X"] + cells["√"]))
    room = Room(size, tuple(letter != "#" for letter in flat), targets)
    open_edge = any(room.on_edge(cell) for cell in room.floor_cells)
    if len(players) != 1 or not targets or len(boxes) != len(targets) or open_edge:
        raise ValueError(f"room must have walls round it, one player, and a target for each box, got {text!r}")
    return room, (players[0], boxes)


def write_room(room: Room, state: State) -> str:
    """The inverse of `read_room`."""
    player, boxes = state
    symbols = ["_" if free else "#" for free in room.floor]
    for cell in room.targets:
        symbols[cell] = "O"
    for cell in boxes:
        symbols[cell] = "√" if cell in room.targets else "X"
    symbols[player] = "S" if player in room.targets else "P"
    return "\n".join("".join(symbols[start : start + room.size]) for start in range(0, len(symbols), room.size))


def explore(room: Room, longest: int) -> list[list[State]]:
    """All states that can be solved, by how many actions that takes at least.

    Searches backwards from the solved states: what can be pushed onto a target can be pulled away from it.

    Args:
        room: The room.
        longest: Actions after which to stop.

    Returns:
        States for 0 actions, 1 action, ... up to at most `longest`; fewer, and perhaps none for the last number, where
        there are no more or more than `MAX_STATES` altogether.
    """
    floor, directions = room.floor, room.directions
    layers = [[(cell, room.targets) for cell in room.floor_cells if cell not in room.targets]]
    seen = set(layers[0])
    while layers[-1] and len(layers) <= longest and len(seen) < MAX_STATES:
        layer = []
        for player, boxes in layers[-1]:
            for direction in directions:
                before, ahead = player - direction, player + direction
                if not floor[before] or before in boxes:
                    continue
                earlier = [(before, boxes)]
                if ahead in boxes:
                    earlier.append((before, _moved(boxes, ahead, player)))
                for state in earlier:
                    if state not in seen:
                        seen.add(state)
                        layer.append(state)
        layers.append(layer)
    return layers


@lru_cache(maxsize=16)
def distances(room: Room, longest: int) -> Mapping[State, int]:
    """Least number of actions to solve each state that can be solved within `longest`; see `explore`."""
    return {state: length for length, layer in enumerate(explore(room, longest)) for state in layer}


def shortest_solution(room: Room, state: State, longest: int, rng: random.Random) -> list[int] | None:
    """Indices into `room.directions` of a shortest solution, ties broken by `rng`.

    Returns:
        `None` where there is no solution of at most `longest` actions.
    """
    left = distances(room, longest)
    if state not in left:
        return None
    actions: list[int] = []
    while left[state] > 0:
        steps = [(index, room.act(state, direction)) for index, direction in enumerate(room.directions)]
        index, state = rng.choice([step for step in steps if left.get(step[1]) == left[state] - 1])
        actions.append(index)
    return actions


def make_room(size: int, boxes: int, longest: int, rng: random.Random) -> tuple[Room, State]:
    """A room whose shortest solution has `MIN_LENGTH` to `longest` actions and in which no box is on a target.

    The length is drawn first, each as likely as any other, then walls and targets until they allow it. After
    `LAYOUTS` of them, which happens where the length is too much for the size, any length that the last ones allow is
    taken. Boxes and player are then drawn evenly among all states of that length.
    """
    wanted = rng.randint(MIN_LENGTH, longest)
    layouts = 0
    while True:
        room = _dig(size, boxes, rng)
        layouts += 1
        starts = {
            length: states
            for length, layer in enumerate(explore(room, longest))
            if length >= MIN_LENGTH and (states := [state for state in layer if not room.placed(state)])
        }
        if wanted in starts:
            return room, rng.choice(starts[wanted])
        if starts and layouts >= LAYOUTS:
            return room, rng.choice(starts[rng.choice(list(starts))])


def _dig(size: int, boxes: int, rng: random.Random) -> Room:
    """Walls and floor of a cave that a drunken digger made, all of it connected, and targets on random floor."""
    inner = size - 2
    wanted = max(2 * boxes + 1, round(inner * inner * rng.uniform(0.5, 0.8)))
    row, column = rng.randrange(inner), rng.randrange(inner)
    dug = {(row, column)}
    while len(dug) < wanted:
        for down, right in rng.choice(_SHAPES):
            if 0 <= row + down < inner and 0 <= column + right < inner:
                dug.add((row + down, column + right))
        down, right = rng.choice(((-1, 0), (1, 0), (0, -1), (0, 1)))
        row, column = min(max(row + down, 0), inner - 1), min(max(column + right, 0), inner - 1)
    floor = tuple((row - 1, column - 1) in dug for row in range(size) for column in range(size))
    targets = rng.sample([cell for cell, free in enumerate(floor) if free], boxes)
    return Room(size, floor, tuple(sorted(targets)))
