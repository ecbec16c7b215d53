"""FrozenLake's maps: seeded, solvable unless asked not to be, and apart from those held out."""

import hashlib
import random
from itertools import islice

import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from lakes import answer, grids_of, score

from ragen2_trl.envs import FrozenLake
from ragen2_trl.envs.frozen_lake import distances_to_goal, find, frozen_cells, moves_between
from ragen2_trl.envs.ragen2.frozen_lake import RagenFrozenLake
from ragen2_trl.envs.tasks import held_out


@pytest.mark.slow
def test_held_out_maps_never_appear_in_training():
    env = FrozenLake(size=3)  # few enough maps that two splits without a rule would meet at once
    train = set(env.dataset(3000, seed=0)["grid"])
    test = set(env.dataset(600, seed=0, split="test")["grid"])
    assert not train & test
    assert len(test) > 100


@pytest.mark.slow
def test_both_splits_see_the_same_kind_of_map():
    def holes(split):
        return sum(grid.count("H") for grid in FrozenLake().dataset(1500, seed=1, split=split)["grid"]) / 1500

    assert holes("train") == pytest.approx(holes("test"), rel=0.1)


def test_seeds_decide_the_maps_and_nothing_else_does():
    env = FrozenLake()
    first = env.dataset(200, seed=3)
    random.seed(1)
    assert env.dataset(200, seed=3).to_list() == first.to_list()
    assert env.dataset(50, seed=3).to_list() == first.to_list()[:50]
    assert len(set(first["grid"]) & set(env.dataset(200, seed=4)["grid"])) < 10


def test_maps_and_slips_leave_the_global_generator_alone():
    random.seed(0)
    expected = random.random()
    random.seed(0)
    FrozenLake().demonstrations(5, seed=0)
    score(FrozenLake(slip=0.5), answer("Down"))
    assert random.random() == expected


@pytest.mark.parametrize(
    ("options", "digest"),
    [
        ({}, "594f303316d8f7a1"),
        ({"size": 3}, "5bcd01091b59889c"),
        ({"size": 7, "frozen": 0.65}, "ca8ae532f8b37936"),
        ({"size": 10, "frozen": 1.0}, "188d3c7faa48407a"),
        ({"frozen": 0.6, "max_actions": 5}, "701797d0fb3c9212"),
        ({"multi_turn": True, "max_total_actions": 3}, "a85bdaac0abdf307"),
    ],
)
def test_maps_of_a_seed_are_those_of_earlier_releases(options, digest):
    env = FrozenLake(**options)
    rows = [row for split in ("train", "test") for row in islice(env.tasks(0, split, None), 300)]
    text = "\n\n".join(f"{row['seed']}\n{row['grid']}" for row in rows)
    assert hashlib.sha256(text.encode()).hexdigest().startswith(digest)


@pytest.mark.parametrize(("size", "frozen"), [(3, 0.6), (4, 0.8), (4, 0.9), (7, 0.7), (10, 1.0)])
def test_holes_are_where_gymnasium_puts_them(size, frozen):
    for seed in range(60):
        free = frozen_cells(size, frozen, seed)
        letters = "".join(generate_random_map(size, frozen, seed=seed))
        assert [free >> cell & 1 == 1 for cell in range(size * size)] == [letter != "H" for letter in letters]


def test_moves_are_counted_as_a_search_cell_by_cell_does():
    rng = random.Random(0)
    for size in (3, 4, 10):
        for _ in range(60):
            start, goal = rng.sample(range(size * size), 2)
            letters = [rng.choice("FFH") for _ in range(size * size)]
            letters[start], letters[goal] = "S", "G"
            grid = tuple("".join(letters[i : i + size]) for i in range(0, len(letters), size))
            free = sum(1 << cell for cell, letter in enumerate(letters) if letter != "H")
            assert moves_between(free, size, start, goal) == distances_to_goal(grid).get(divmod(start, size))


# Impossible maps


def has_way(grid):
    return find(grid, "S")[0] in distances_to_goal(grid)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "options"),
    [(FrozenLake, {}), (FrozenLake, {"size": 3}), (FrozenLake, {"frozen": 1.0}), (RagenFrozenLake, {})],
)
def test_that_share_of_the_training_maps_has_no_way_and_held_out_maps_all_have_one(task, options):
    env = task(impossible=0.7, **options)
    grids = grids_of(env.dataset(600, seed=0))
    assert sum(map(has_way, grids)) / 600 == pytest.approx(0.3, abs=0.06)
    assert all(len(find(grid, symbol)) == 1 for grid in grids for symbol in "SG")
    assert not any(held_out("\n".join(grid)) for grid in grids)
    assert env.dataset(600, seed=0).to_list() == env.dataset(600, seed=0).to_list()
    held = env.dataset(100, seed=0, split="test")
    assert held.to_list() == task(**options).dataset(100, seed=0, split="test").to_list()


def test_an_impossible_map_rewards_nobody_and_is_not_demonstrated():
    env = FrozenLake(impossible=1.0)
    for task in env.dataset(20, seed=0):
        rng = random.Random(0)
        for walk in (env.play(task, rng) for _ in range(20)):
            walk.respond(walk.random_response(rng))
            assert walk.outcome.episode_return == 0.0 and not walk.outcome.success
    with pytest.raises(ValueError, match="the solver has solved none of 20 tasks"):
        env.demonstrations(20, seed=0)
    mixed = FrozenLake(impossible=0.5)
    shown = mixed.demonstrations(40, seed=0)["prompt"]
    solvable = [row["prompt"] for row in mixed.dataset(40, seed=0) if has_way(tuple(row["grid"].split("\n")))]
    assert list(shown) == solvable


@pytest.mark.parametrize("size", [3, 4, 7])
@pytest.mark.parametrize("limits", [{"max_actions": 5}, {"multi_turn": True, "max_turns": 5, "max_actions": 1}])
def test_every_map_has_one_start_one_goal_and_a_way_short_enough(size, limits):
    for grid in grids_of(FrozenLake(size=size, **limits).dataset(100, seed=0)):
        assert len(grid) == size and {len(line) for line in grid} == {size}
        (start,) = find(grid, "S")
        (_goal,) = find(grid, "G")
        assert 1 <= distances_to_goal(grid)[start] <= 5


def test_start_and_goal_are_spread_over_the_map():
    grids = grids_of(FrozenLake().dataset(1000, seed=0))
    for symbol in "SG":
        assert len({find(grid, symbol)[0] for grid in grids}) == 16


def test_split_depends_on_the_map_alone():
    env = FrozenLake(observation="both", slip=0.2, multi_turn=True)
    assert all(held_out(grid) for grid in env.dataset(50, seed=0, split="test")["grid"])
    assert not any(held_out(grid) for grid in env.dataset(50, seed=0)["grid"])
