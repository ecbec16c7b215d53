"""Sokoban: its rules and rewards, its rooms and their solutions, its texts and its pictures."""

import random
import zlib
from collections import Counter, deque
from itertools import islice

import numpy as np
import pytest

from ragen2_trl.envs.drawing import draw_board
from ragen2_trl.envs.responses import format_response
from ragen2_trl.envs.sokoban.environment import ACTIONS, Sokoban
from ragen2_trl.envs.sokoban.rooms import distances, make_room, read_room, write_room

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


# Options and rows


@pytest.mark.parametrize(
    "room",
    [
        None,
        "",
        "P",
        ROOM + "\n######",
        ROOM.replace("X", "x"),
        ROOM.replace("P", "_"),
        ROOM.replace("_P", "SP"),
        ROOM.replace("O", "_"),
        ROOM.replace("O", "_").replace("X", "_"),
        ROOM.replace("##_O", "__XO"),
        "_" + ROOM[1:],
    ],
)
def test_what_is_no_room_is_named_with_its_column(room):
    with pytest.raises(ValueError, match="room must"):
        Sokoban().episode(row(room), random.Random(0))


# Rules and rewards


@pytest.mark.parametrize(
    ("room", "actions", "rewards", "solved"),
    [
        (ROOM, ["Up", "Up", "Left", "Left"], [-0.1] * 4, False),  # even where nothing moves
        (ROOM, ["Right", "Down"], [-0.1, 10.9], True),
        (TWO_BOXES, ["Right", "Right", "Right"], [-0.1, 0.9, -1.1], False),  # onto a target and off it
        (TWO_BOXES, ["Right", "Right", "Down"], [-0.1, 0.9, 10.9], True),  # the last of several boxes
    ],
)
def test_rewards_of_actions(room, actions, rewards, solved):
    got, episode = step_all(actions, room)
    assert got == pytest.approx(rewards)
    assert episode.done == episode.success == solved


def test_no_box_moves_into_a_wall_or_another_box():
    room = TWO_BOXES.replace("#PX_O_#", "#PXXO_#").replace("#__X__#", "#_____#")
    assert step_all(["Right"], room)[1].state == read_room(room)[1]
    assert step_all(["Up"], ROOM.replace("#_P__#\n#__X_#", "#__X_#\n#__P_#"))[1].state[1] == (9,)


@pytest.mark.parametrize("text", [ROOM, TWO_BOXES])
def test_every_action_does_what_a_naive_game_does(text):
    rng = random.Random(0)
    for _ in range(200):
        episode, naive = Sokoban().episode(row(text), rng), text
        for _ in range(30):
            if episode.done:
                break
            action = rng.choice(ACTIONS)
            episode.step(action.upper())
            naive = naive_move(naive, action)
            assert write_room(episode.room, episode.state) == naive
            assert read_room(naive) == (episode.room, episode.state)


@pytest.mark.parametrize(
    ("turns", "episode_return", "success"),
    [
        ([["right", " DOWN "]], 10.8, True),
        ([["Right"], ["Down", "Up", "Up"]], 10.8, True),  # what follows the end costs nothing
        ([["Right", "Jump"], ["Down"]], 10.7, True),
        ([[]] * 5, -0.5, False),
        ([["Up", "Up", "Right"]] * 5, -1.0, False),  # two actions a turn count
    ],
)
def test_returns_of_several_turns(turns, episode_return, success):
    outcome = play(Sokoban(multi_turn=True), *turns).outcome
    assert (outcome.episode_return, outcome.success) == (pytest.approx(episode_return), success)


# Texts and pictures


def test_prompt_shows_what_the_observation_asks_for():
    grid = "\n".join(" ".join(line) for line in ROOM.split("\n"))
    cells = "P c2, X d3, O d4"
    shown = {
        "grid": grid,
        "both": f"{grid}\n{cells}.",
        "coordinates": f"{cells}, # b4, and round b2 top left to e5 bottom right.",
        "image": "",
    }
    for observation, text in shown.items():
        _, user = Sokoban(observation=observation).prompt(row())
        assert user["content"] == f"{text}\nReply with <think>reasoning</think><answer>Up || Right</answer>".lstrip()


def test_pictures_show_every_change_of_the_room():
    env = Sokoban()
    episode = env.episode(row(), random.Random(0))
    pictures = [episode.image()]
    for action in ("Left", "Right", "Right", "Down"):
        episode.step(action)
        pictures.append(episode.image())
    assert {(picture.mode, picture.size) for picture in pictures} == {("RGB", (192, 192))}
    assert pictures[0].tobytes() == pictures[2].tobytes()
    assert len({picture.tobytes() for picture in pictures}) == 4


@pytest.mark.parametrize("cells", ["#_OX√PS", ".ogpd"])
@pytest.mark.parametrize("tile", [14, 32])
def test_no_two_cells_look_alike_without_color(cells, tile):
    gray = [np.asarray(draw_board(cell, tile).convert("L"), dtype=float) for cell in cells]
    for i, one in enumerate(gray):
        for other in gray[:i]:
            assert (np.abs(one - other) > 30).mean() > 0.08  # of the pixels


SLOW = pytest.mark.slow


# Rooms


def test_limits_hold_two_actions_for_each_box_at_least_and_rooms_are_never_data():
    assert Sokoban(boxes=2, max_turns=1, max_actions=4).longest == 4
    with pytest.raises(ValueError, match=r"max_turns \* max_actions.* 4 "):
        Sokoban(boxes=2, max_turns=1, max_actions=3)
    with pytest.raises(ValueError, match="data"):
        Sokoban().dataset(1, data="rooms")


@pytest.mark.parametrize("options", [{}, {"size": 5}, {"size": 8, "max_actions": 6}, {"boxes": 2}, {"boxes": 3}])
def test_every_room_can_be_solved_within_the_limits_and_not_at_once(options):
    env = Sokoban(**options)
    for task in env.dataset(60, seed=0):
        text = task["room"]
        assert text.count("X") == text.count("O") + text.count("S") == env.boxes and "√" not in text
        assert {len(line) for line in text.split("\n")} == {text.count("\n") + 1} == {env.size}
        assert 2 <= naive_length(text) <= env.longest


def test_tight_limits_and_large_rooms_still_have_rooms():
    for size, boxes, longest in [(5, 3, 6), (6, 4, 8), (10, 4, 10), (10, 1, 10_000), (5, 1, 10_000)]:
        room, state = make_room(size, boxes, longest, random.Random(0))
        assert 2 <= distances(room, longest)[state] <= longest


@SLOW
def test_all_lengths_of_solution_are_equally_frequent():
    rng = random.Random(0)
    rooms = [make_room(6, 1, 10, rng) for _ in range(900)]
    lengths = Counter(distances(room, 10)[state] for room, state in rooms)
    assert sorted(lengths) == list(range(2, 11))
    assert all(65 < count < 135 for count in lengths.values())


def test_the_solver_finds_shortest_solutions_and_all_of_them():
    rng = random.Random(5)
    for _ in range(15):
        room, _ = make_room(5, 1, 8, rng)
        known = distances(room, 100)
        for player in room.floor_cells:
            for box in set(room.floor_cells) - {player}:
                assert known.get((player, (box,))) == naive_length(write_room(room, (player, (box,))))


@pytest.mark.parametrize(
    ("options", "checksum"),
    [
        ({}, 1246600150),
        ({"boxes": 3}, 1186380545),
        ({"size": 5, "boxes": 2, "max_actions": 8}, 1642658735),
        ({"size": 10, "max_actions": 6}, 524559881),
    ],
)
def test_a_seed_means_the_same_rooms_in_every_release(options, checksum):
    """Results are of seeds, and our tiny models were warmed up in these rooms."""
    rooms = "\n\n".join(Sokoban(**options).dataset(60, seed=0)["room"])
    assert zlib.crc32(rooms.encode()) == checksum


# Players


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multi_turn": True},
        *(pytest.param(one, marks=SLOW) for one in ({"boxes": 3, "max_actions": 15}, {"size": 9})),
    ],
)
def test_the_solver_solves_every_room_in_as_few_actions_as_can_be(options):
    env, rng = Sokoban(**options), random.Random(0)
    for task in islice(env.tasks(7, "test", None), 40):
        room, state = read_room(task["room"])
        game = env.play(task, rng)
        while not game.done:
            reasoning, actions = game.episode.plan(rng)
            game.respond(format_response(reasoning, actions[: env.max_actions]))
        assert game.outcome.success
        shortest = distances(room, env.longest)[state]
        assert game.outcome.episode_return == pytest.approx(10 + env.boxes - 0.1 * shortest)


def test_ties_between_shortest_solutions_are_broken_at_random():
    room = "######\n#P___#\n#____#\n#__X_#\n#__O_#\n######"
    episode = Sokoban().episode(row(room), random.Random(0))
    plans = {tuple(episode.plan(random.Random(seed))[1]) for seed in range(100)}
    assert plans == {("Down", "Right", "Right", "Down"), ("Right", "Down", "Right", "Down")} | {
        ("Right", "Right", "Down", "Down")
    }


def test_reasoning_reads_the_room_and_follows_player_and_box():
    episode = Sokoban().episode(row(), random.Random(0))
    assert episode.plan(random.Random(0)) == ("P c2, X d3, O d4, go d2, push Down d4.", ["Right", "Down"])
    rows = Sokoban().demonstrations(200, seed=0)
    assert len({completion[0]["content"] for completion in rows["completion"]}) > 180


def test_a_lost_room_is_called_lost_and_played_on():
    episode = Sokoban().episode(row(STUCK), random.Random(0))
    plans = [episode.plan(random.Random(seed)) for seed in range(50)]
    assert {reasoning for reasoning, _ in plans} == {"P c2, X e2, O d4. I see no way."}
    assert {action for _, (action,) in plans} == {"Left", "Down", "Right"}  # up is a wall


def test_a_player_who_cannot_move_still_has_a_plan():
    episode = Sokoban().episode(row("#####\n#P###\n###O#\n#_#X#\n#####"), random.Random(0))
    assert episode.plan(random.Random(0))[1][0] in ACTIONS
