"""Rooms to play in, and a naive game beside ours."""

import random
from collections import deque

from ragen2_trl.envs.responses import format_response
from ragen2_trl.envs.sokoban.environment import ACTIONS, Sokoban

ROOM = """
######
#_P__#
#__X_#
##_O_#
#____#
######
""".strip()
TWO_BOXES = """
#######
#_____#
#PX_O_#
#__X__#
#__O__#
#######
#######
""".strip()
STUCK = ROOM.replace("__X_", "____").replace("_P__", "_P_X")


def row(room=ROOM):
    return {"seed": 0, "room": room}


def play(env, *turns, room=ROOM):
    """A play of a room after turns of actions each."""
    game = env.play(row(room), random.Random(0))
    for actions in turns:
        game.respond(format_response("A plan.", actions))
    return game


def step_all(actions, room=ROOM):
    """The rewards of actions, and the episode after them."""
    episode = Sokoban(boxes=room.count("X")).episode(row(room), random.Random(0))
    return [episode.step(action) for action in actions], episode


def naive_length(text):
    """Length of a shortest solution by a search over rooms as text, or `None`."""
    frontier, seen = deque([(text, 0)]), {text}
    while frontier:
        room, length = frontier.popleft()
        if "X" not in room:
            return length
        for move in ACTIONS:
            after = naive_move(room, move)
            if after not in seen:
                seen.add(after)
                frontier.append((after, length + 1))
    return None


def naive_move(text, move):
    width = text.index("\n") + 1
    player = max(text.find("P"), text.find("S"))
    delta = {"Up": -width, "Down": width, "Left": -1, "Right": 1}[move]
    cells, (a, b) = list(text), (player + delta, player + 2 * delta)
    if cells[a] in "X√":
        if cells[b] not in "_O":
            return text
        cells[b] = {"_": "X", "O": "√"}[cells[b]]
        cells[a] = {"X": "_", "√": "O"}[cells[a]]
    if cells[a] == "#":
        return text
    cells[player] = {"P": "_", "S": "O"}[cells[player]]
    cells[a] = {"_": "P", "O": "S"}[cells[a]]
    return "".join(cells)
