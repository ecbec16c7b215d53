"""Sokoban's rooms as RAGEN-2 makes them: a room is dug, its boxes start on their targets and are dragged away.

Their solutions are of any length, one action included, and some rooms cannot be solved within ten. Random numbers come
from Python's and NumPy's older generators, in the order of RAGEN's code, so that equal seeds give equal rooms.
"""

import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import numpy as np

from ragen2_trl.envs.sokoban.rooms import Cell, Room, State

MAX_BOARDS = 300_000
TRIES = 4  # rooms of one seed before it is given up
CHANGE_DIRECTION = 0.35
WALK, WALK_ON, WALK_CLOSE, LONGEST_WALK = 0.5, 0.5, 0.8, 3  # of the player, once the boxes are where they are

_DIGGING = ((1, 0), (0, 1), (-1, 0), (0, -1))
# Stamps around a position, as (row, column) offsets.
_STAMPS = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)


@lru_cache(maxsize=8192)
def play_backwards(size: int, boxes: int, search_depth: int, seed: int) -> tuple[Room, State]:
    """The room of a seed.

    Where RAGEN's code finds none it goes on with a seed that differs from process to process; here the next one comes
    from the seed alone.

    Args:
        size: Rows and columns.
        boxes: Number of boxes.
        search_depth: Boards at most `search_depth - 2` moves from the solved one are looked at.
        seed: 0 to 2**32 - 1.
    """
    for attempt in count():
        number = seed if attempt == 0 else random.Random(f"sokoban/{seed}/{attempt}").getrandbits(32)
        made = _make(size, boxes, search_depth, random.Random(number), np.random.RandomState(number))
        if made is not None:
            return made
    raise AssertionError("unreachable")


def _make(
    size: int, boxes: int, depth: int, rng: random.Random, places: np.random.RandomState
) -> tuple[Room, State] | None:
    for _ in range(TRIES):
        floor = _dig(size, rng)
        free = [cell for cell, is_floor in enumerate(floor) if is_floor]
        if len(free) <= boxes + 1:
            return None
        player = free.pop(places.randint(len(free)))
        targets = [free.pop(places.randint(len(free))) for _ in range(boxes)]
        room = Room(size, floor, tuple(sorted(targets)))
        state, distance = _drag(room, player, targets, depth)
        if distance > 0:
            return room, (_walk(room, state, distance, rng), state[1])
    return None


def _dig(size: int, rng: random.Random) -> tuple[bool, ...]:
    (direction,) = rng.sample(_DIGGING, 1)
    row, column = rng.randint(1, size - 1), rng.randint(1, size - 1)
    dug: set[tuple[int, int]] = set()
    for _ in range(int(1.7 * 2 * size)):
        if rng.random() < CHANGE_DIRECTION:
            (direction,) = rng.sample(_DIGGING, 1)
        row = max(min(row + direction[0], size - 2), 1)
        column = max(min(column + direction[1], size - 2), 1)
        (stamp,) = rng.sample(_STAMPS, 1)
        dug.update((row + down, column + right) for down, right in stamp)
    inside = range(1, size - 1)
    return tuple(
        (cell // size, cell % size) in dug and cell // size in inside and cell % size in inside
        for cell in range(size * size)
    )


class _Board(NamedTuple):
    """A board of the search: the player, the box of each target, and which boxes have been dragged."""

    player: Cell
    boxes: tuple[Cell, ...]
    dragged: tuple[bool, ...]

    @property
    def picture(self) -> tuple[Cell, frozenset[tuple[Cell, bool]]]:
        """What tells boards apart: where boxes are and which were dragged, also back to where they began."""
        return self.player, frozenset(zip(self.boxes, self.dragged, strict=True))

    def pulled(self, box: int, ahead: Cell) -> "_Board":
        """The board after the player has gone ahead with a box behind it."""
        boxes, dragged = list(self.boxes), list(self.dragged)
        boxes[box], dragged[box] = self.player, True
        return _Board(ahead, tuple(boxes), tuple(dragged))


def _drag(room: Room, player: Cell, targets: Sequence[Cell], depth: int) -> tuple[State, int]:
    """The first board of the best score of a depth-first search for boards that lead to the solved one.

    Returns:
        The board, and the distance of its boxes from their targets: 0 where no board scores.
    """
    best = start = _Board(player, tuple(targets), (False,) * len(targets))
    best_score = best_distance = 0
    seen: set[tuple[Cell, frozenset[tuple[Cell, bool]]]] = set()
    stack = [(start, 0, -1, depth - 1)]  # a board, changes of the dragged box, the last one, moves that are left
    while stack:
        board, changes, last, left = stack.pop()
        if left <= 0 or len(seen) >= MAX_BOARDS or board.picture in seen:
            continue
        seen.add(board.picture)
        distance = _distance(room.size, board.boxes, targets)
        bare = board.player not in targets and not set(board.boxes) & set(targets)
        if bare and changes * distance > best_score:
            best, best_score, best_distance = board, changes * distance, distance
        for direction in reversed(room.directions):  # the last one is looked at first
            ahead, behind = board.player + direction, board.player - direction
            if not room.floor[ahead] or ahead in board.boxes:
                continue
            if behind in board.boxes:
                box = board.boxes.index(behind)
                stack.append((board.pulled(box, ahead), changes + (box != last), box, left - 1))
            else:
                stack.append((board._replace(player=ahead), changes, last, left - 1))
    return (best.player, tuple(sorted(best.boxes))), best_distance


def _distance(size: int, boxes: Sequence[Cell], targets: Sequence[Cell]) -> int:
    return sum(abs(a // size - b // size) + abs(a % size - b % size) for a, b in zip(boxes, targets, strict=True))


def _walk(room: Room, state: State, distance: int, rng: random.Random) -> Cell:
    """Where the player goes before the room is shown."""
    player, boxes = state
    if rng.random() > (WALK_CLOSE if distance == 1 else WALK):
        return player
    visited = {player}
    for _ in range(LONGEST_WALK):
        cells = [player + step for step in room.directions]
        cells = [cell for cell in cells if room.floor[cell] and cell not in boxes and cell not in visited]
        if not cells:
            break
        player = rng.choice(cells)
        visited.add(player)
        if rng.random() > WALK_ON:
            break
    return player
