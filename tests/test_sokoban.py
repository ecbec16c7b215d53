"""Sokoban: its options, its rules and rewards, its texts and its pictures."""

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sokoban_rooms import ROOM, TWO_BOXES, naive_move, play, row, step_all
from trl.data_utils import prepare_multimodal_messages

from ragen2_trl.envs.drawing import draw_grid
from ragen2_trl.envs.responses import format_response
from ragen2_trl.envs.sokoban.environment import ACTIONS, Sokoban
from ragen2_trl.envs.sokoban.rooms import read_room, write_room

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
        ([["Right", "Jump"], ["Down"]], 10.7, True),
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
