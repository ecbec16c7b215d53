"""Sokoban's rooms as RAGEN-2 makes them: a room is dug, its boxes start on their targets and are dragged away.

Their solutions are of any length, one action included, and some rooms cannot be solved within ten. Random numbers come
from Python's and NumPy's older generators, in the reference's order, so that equal seeds give equal rooms.
"""

import random
from functools import lru_cache
from itertools import count

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
def make_reference_room(size: int, boxes: int, search_depth: int, seed: int) -> tuple[Room, State]:
    """The room of a seed.

    Where the reference finds none it goes on with a seed that differs from process to process; here the next one comes
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


def _drag(room: Room, player: Cell, targets: list[Cell], depth: int) -> tuple[State, int]:
    """The first board of the best score of a depth-first search for boards that lead to the solved one.

    Returns:
        The board, and the distance of its boxes from their targets: 0 where no board scores.
    """
    # A box that has been dragged is another thing than one that has not, also when it is back where it began.
    seen: set[tuple[Cell, tuple[Cell, ...], tuple[bool, ...]]] = set()
    untouched = (False,) * len(targets)
    best_score, best, best_distance = -1, (player, tuple(targets)), 0
    stack = [(player, tuple(targets), untouched, 0, -1, depth - 1)]
    while stack:
        player, boxes, dragged, changes, last, left = stack.pop()
        if left <= 0 or len(seen) >= MAX_BOARDS:
            continue
        board = (player, *_seen_board(boxes, dragged))
        if board in seen:
            continue
        seen.add(board)
        distance = _distance(room.size, boxes, targets)
        bare = player not in targets and not set(boxes) & set(targets)
        score = changes * distance if bare else 0
        if score > best_score:
            best_score, best, best_distance = score, (player, boxes), distance
        following = []
        for direction in room.directions:
            ahead, behind = player + direction, player - direction
            if not room.floor[ahead] or ahead in boxes:
                following.append((player, boxes, dragged, changes, last, left - 1))
                continue
            if behind in boxes:
                box = boxes.index(behind)
                moved = (*boxes[:box], player, *boxes[box + 1 :])
                touched = (*dragged[:box], True, *dragged[box + 1 :])
                following.append((ahead, moved, touched, changes + (box != last), box, left - 1))
            else:
                following.append((ahead, boxes, dragged, changes, last, left - 1))
        stack += reversed(following)
    player, boxes = best
    return (player, tuple(sorted(boxes))), best_distance if best_score > 0 else 0


def _seen_board(boxes, dragged):
    order = sorted(range(len(boxes)), key=boxes.__getitem__)
    return tuple(boxes[i] for i in order), tuple(dragged[i] for i in order)


def _distance(size: int, boxes, targets) -> int:
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
