"""Sokoban: its rooms and their solutions, its rewards, its texts and its pictures."""

import os
import random
import subprocess
import sys
import time
from collections import Counter, deque
from itertools import islice

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from trl.data_utils import prepare_multimodal_messages

from ragen2_trl.envs.drawing import draw_grid
from ragen2_trl.envs.responses import format_response
from ragen2_trl.envs.sokoban.environment import ACTIONS, Sokoban
from ragen2_trl.envs.sokoban.rooms import distances, explore, make_room, read_room, write_room

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
    ("options", "message"),
    [
        ({"size": 4}, r"size must be an integer between 5 and 10, got 4"),
        ({"boxes": 5}, r"boxes must be an integer between 1 and 4, got 5"),
        ({"size": 5, "boxes": 4}, r"boxes must be an integer between 1 and 3, got 4"),
        ({"observation": "sound"}, r"observation must be one of \['grid', 'coordinates', 'both', 'image'\], got 'sou"),
        ({"boxes": 2, "max_actions": 3}, r"max_turns \* max_actions must be between 4 and 10000, got 3"),
        ({"observation": "image", "multi_turn": True}, "observation must be in words in several turns .* got 'image'"),
    ],
)
def test_bad_options_are_named_with_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        Sokoban(**options)


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


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match=r"column room must be the text of a room, got None in columns \['seed'\]"):
        Sokoban().episode({"seed": 0}, random.Random(0))


def test_rooms_come_from_no_data():
    with pytest.raises(ValueError, match="data must be None for sokoban"):
        Sokoban().dataset(1, data="rooms.json")


# Rules and rewards


def test_every_action_costs_even_where_nothing_moves():
    rewards, episode = step_all(["Up", "Up", "Left", "Left"])
    assert rewards == [-0.1] * 4
    assert write_room(episode.room, episode.state) == ROOM.replace("_P__", "P___")


def test_a_solved_room_ends_with_success_and_eleven():
    rewards, episode = step_all(["Right", "Down"])
    assert rewards == [-0.1, pytest.approx(-0.1 + 1 + 10)]
    assert episode.done and episode.success


def test_a_box_on_a_target_gives_one_and_off_it_takes_one():
    rewards, episode = step_all(["Right", "Right", "Right"], TWO_BOXES)
    assert rewards == pytest.approx([-0.1, 0.9, -1.1])
    assert not episode.done and not episode.success


def test_the_last_of_several_boxes_ends_the_room():
    rewards, episode = step_all(["Right", "Right", "Down"], TWO_BOXES)
    assert rewards == pytest.approx([-0.1, 0.9, 10.9])
    assert episode.success


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
        ([["Right", "Jump"], ["Right"], ["Down"]], 10.7, True),
        ([[]] * 5, -0.5, False),
        ([["Up", "Up", "Right"]] * 5, -1.0, False),  # two actions a turn count
    ],
)
def test_returns_of_several_turns(turns, episode_return, success):
    outcome = play(Sokoban(multi_turn=True), *turns).outcome
    assert (outcome.episode_return, outcome.success) == (pytest.approx(episode_return), success)


def test_tools_give_the_return_of_the_text_protocol():
    env, tools = Sokoban(multi_turn=True), Sokoban(multi_turn=True, protocol="tools").environment_factory()
    rng = random.Random(3)
    for task in env.dataset(50, seed=0).to_list():
        game = env.play(task, rng)
        assert tools.reset(**task) == game.episode.observation()
        while not game.done:
            actions = [rng.choice([*ACTIONS, "Jump"]) for _ in range(3)]
            game.respond(format_response("A plan.", actions))
            tools.move(actions)
        assert tools.get_reward() == game.outcome.episode_return
        assert tools.move(["Up"]) == "The episode is over."


# Rooms


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


def test_all_lengths_of_solution_are_equally_frequent():
    rng = random.Random(0)
    rooms = [make_room(6, 1, 10, rng) for _ in range(1800)]
    lengths = Counter(distances(room, 10)[state] for room, state in rooms)
    assert sorted(lengths) == list(range(2, 11))
    assert all(150 < count < 250 for count in lengths.values())


def test_rooms_are_varied_connected_and_have_inner_walls():
    rooms = Sokoban().dataset(500, seed=0)["room"]
    assert len(set(rooms)) > 490
    assert len({read_room(text)[0].floor for text in rooms}) > 250
    for text in rooms:
        room, (player, _) = read_room(text)
        reached, frontier = {player}, [player]
        while frontier:
            cell = frontier.pop()
            for neighbor in (cell + direction for direction in room.directions):
                if room.floor[neighbor] and neighbor not in reached:
                    reached.add(neighbor)
                    frontier.append(neighbor)
        assert reached == set(room.floor_cells)
        assert 8 <= len(reached) <= 15  # of 16


def test_the_solver_finds_shortest_solutions_and_all_of_them():
    rng = random.Random(5)
    for _ in range(15):
        room, _ = make_room(5, 1, 8, rng)
        known = distances(room, 100)
        for player in room.floor_cells:
            for box in set(room.floor_cells) - {player}:
                assert known.get((player, (box,))) == naive_length(write_room(room, (player, (box,))))


def test_a_search_cut_short_knows_the_same_lengths():
    room, _ = make_room(6, 2, 10, random.Random(1))
    assert explore(room, 4) == explore(room, 100)[:5]


def test_held_out_rooms_never_appear_in_training():
    env = Sokoban(size=5, max_actions=3)  # few enough rooms that two splits without a rule would meet at once
    train = set(env.dataset(3000, seed=0)["room"])
    held_out = set(env.dataset(600, seed=0, split="test")["room"])
    assert not train & held_out
    assert len(held_out) > 100


def test_seeds_decide_the_rooms_and_nothing_else_does():
    env = Sokoban()
    first = env.dataset(100, seed=3)
    random.seed(1)
    assert env.dataset(100, seed=3).to_list() == first.to_list()
    assert env.dataset(20, seed=3).to_list() == first.to_list()[:20]
    assert not set(first["room"]) & set(env.dataset(100, seed=4)["room"])


def test_rooms_and_plans_leave_the_global_generator_alone():
    random.seed(0)
    expected = random.random()
    random.seed(0)
    Sokoban().demonstrations(5, seed=0)
    assert random.random() == expected


TASKS_AND_PLANS = """
import zlib
from ragen2_trl.envs.sokoban import Sokoban
rows = Sokoban(boxes=2, multi_turn=True).demonstrations(20, seed=5).to_list()
checksum = zlib.crc32(repr(rows).encode())
"""


def test_tasks_are_equal_across_processes_with_different_hash_seeds():
    here: dict = {}
    exec(TASKS_AND_PLANS, here)  # this process has a hash seed of its own
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run(
        [sys.executable, "-c", f"{TASKS_AND_PLANS}\nprint(checksum)"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        check=True,
        text=True,
    )
    assert int(there.stdout) == here["checksum"]


# Players


@pytest.mark.parametrize("options", [{}, {"multi_turn": True}, {"boxes": 3, "max_actions": 15}, {"size": 9}])
def test_the_solver_solves_every_room_in_as_few_actions_as_can_be(options):
    env, rng = Sokoban(**options), random.Random(0)
    for task in env.dataset(100, seed=7, split="test"):
        room, state = read_room(task["room"])
        game = env.play(task, rng)
        while not game.done:
            reasoning, actions = game.episode.plan(rng)
            game.respond(format_response(reasoning, actions[: env.max_actions]))
        assert game.outcome.success
        shortest = distances(room, env.longest)[state]
        assert game.outcome.episode_return == pytest.approx(10 + env.boxes - 0.1 * shortest)


@pytest.mark.parametrize(("options", "floor"), [({}, 0.059), ({"multi_turn": True}, 0.054)])
def test_a_random_player_solves_one_room_in_twenty(options, floor):
    env, rng = Sokoban(**options), random.Random(0)
    plays = [env.play(task, rng) for task in islice(env.tasks(9, "test", None), 1500)]
    for game in plays:
        while not game.done:
            actions = [game.episode.random_action(rng) for _ in range(env.max_actions)]
            game.respond(format_response("", actions))
    # 10,000 rooms gave `floor`; three standard errors of 1,500
    assert sum(game.outcome.success for game in plays) / 1500 == pytest.approx(floor, abs=0.018)


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


def test_instructions_explain_every_symbol_that_can_appear():
    for boxes, symbols in [(1, "XOPS#_"), (2, "XOPS#_√")]:
        words = Sokoban(boxes=boxes).instructions().replace(",", " ").replace(".", " ").split()
        assert set(symbols) <= set(words)
        assert ("√" in words) == ("√" in symbols)


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


SOKOBAN_CELLS = [("wall",)] + [
    ("floor", *things) for things in [(), ("target",), ("box",), ("box_on_target",), ("player",), ("target", "player")]
]
LAKE_CELLS = [("ice", *things) for things in [(), ("hole",), ("goal",), ("player",), ("hole", "player")]]


@pytest.mark.parametrize("cells", [SOKOBAN_CELLS, LAKE_CELLS])
@pytest.mark.parametrize("tile", [14, 32])
def test_no_two_cells_look_alike_without_color(cells, tile):
    gray = [np.asarray(draw_grid([[cell]], tile).convert("L"), dtype=float) for cell in cells]
    for i, one in enumerate(gray):
        for other in gray[:i]:
            assert (np.abs(one - other) > 30).mean() > 0.08  # of the pixels


def test_unknown_layers_are_named():
    with pytest.raises(ValueError, match=r"layer must be one of \['wall', .*, got 'lava'"):
        draw_grid([[("floor", "lava")]])


def test_single_turn_rows_carry_their_picture():
    env = Sokoban(observation="image")
    for task in env.dataset(5, seed=0):
        assert task["image"].tobytes() == env.episode(task, random.Random(0)).image().tobytes()


def test_tools_show_pictures_in_the_form_that_trl_reads():
    env = Sokoban(observation="image", protocol="tools", multi_turn=True)
    tools = env.environment_factory()
    content = [{"type": "text", "text": ""}, *tools.reset(**row())]
    (message,) = prepare_multimodal_messages([{"role": "user", "content": content}])  # what TRL does after `reset`
    (picture,) = [part["image"] for part in message["content"] if part["type"] == "image"]
    assert picture.tobytes() == env.episode(row(), random.Random(0)).image().tobytes()
    picture, words = tools.move(["Right"])
    assert words == {"type": "text", "text": "Reward -0.1."}
    assert picture["image"].tobytes() == step_all(["Right"])[1].image().tobytes()
    assert tools.move(["Down"]) == "Reward 10.9. The episode is over."


# Hostile text


PIECES = st.sampled_from(
    ["<think>", "</think>", "<answer>", "</answer>", "||", " ", "Up", "Down", "Left", "√", "\x00"]
)


@given(st.one_of(st.text(), st.lists(PIECES, max_size=40).map("".join)))
@example("</think><answer>" + "Left||" * 30_000 + "</answer>")
@example("</think><answer>DOWN || ıŞ</answer>")
def test_no_text_earns_a_reward_without_a_right_answer(text):
    outcome = play_text(text)
    assert outcome.success == (outcome.episode_return > 0)
    if outcome.success:
        assert "right" in text.lower() and "down" in text.lower()


def play_text(text):
    game = Sokoban().play(row(), random.Random(0))
    assert game.respond(text) is None
    return game.outcome


@given(st.text())
@example("Up" * 1_000_000)
def test_no_text_raises(text):
    episode = Sokoban().episode(row(), random.Random(0))
    if episode.is_action(text):
        episode.step(text)


# Speed


def test_hundreds_of_rooms_and_thousands_of_steps_a_second():
    env, rng = Sokoban(), random.Random(0)
    start = time.perf_counter()
    tasks = env.dataset(500, seed=11).to_list()
    for task in tasks:
        env.episode(task, rng).plan(rng)
    assert time.perf_counter() - start < 1.0
    start = time.perf_counter()
    for task in tasks * 4:
        episode = env.episode(task, rng)
        for _ in range(10):
            if not episode.done:
                episode.step(rng.choice(ACTIONS))
    assert time.perf_counter() - start < 1.0  # 2,000 resets, 20,000 steps
