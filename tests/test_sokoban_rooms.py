"""Sokoban's generated rooms and their solutions, its solver and its random player."""

import random
import zlib
from collections import Counter
from itertools import islice

import pytest
from sokoban_rooms import STUCK, naive_length, row

from ragen2_trl.envs.responses import format_response
from ragen2_trl.envs.sokoban.environment import ACTIONS, Sokoban
from ragen2_trl.envs.sokoban.rooms import distances, explore, make_room, read_room, write_room

SLOW = pytest.mark.slow

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


@SLOW
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


@SLOW
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
    for task in env.dataset(100, seed=7, split="test"):
        room, state = read_room(task["room"])
        game = env.play(task, rng)
        while not game.done:
            reasoning, actions = game.episode.plan(rng)
            game.respond(format_response(reasoning, actions[: env.max_actions]))
        assert game.outcome.success
        shortest = distances(room, env.longest)[state]
        assert game.outcome.episode_return == pytest.approx(10 + env.boxes - 0.1 * shortest)


@SLOW
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
