"""FrozenLake: its maps, its slips, its rewards, what it shows, and how its demonstrations reason."""

import hashlib
import random
import re
from itertools import islice, product
from types import SimpleNamespace

import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from lakes import CROSSING, LAKE, answer, grids_of, play, row, score

from ragen2_trl.envs import FrozenLake, completion_text, parse_response
from ragen2_trl.envs.frozen_lake import (
    ACTIONS,
    FrozenLakeEpisode,
    distances_to_goal,
    explain,
    find,
    random_map,
    shortest_path,
)
from ragen2_trl.envs.ragen2.frozen_lake import RagenFrozenLake
from ragen2_trl.envs.tasks import held_out

# Text


def test_prompt_shows_what_the_observation_asks_for():
    grid_text = "P _ _\n_ O _\n_ _ G"
    coordinates = "P a1, G c3, O b2, from a1 top left to c3 bottom right."
    for observation, shown in {
        "grid": grid_text,
        "coordinates": coordinates,
        "both": f"{grid_text}\n{coordinates}",
    }.items():
        _, user = FrozenLake(size=3, observation=observation).prompt(row())
        assert user["content"].startswith(f"{shown}\nReply with")


def test_next_turn_tells_the_reward_the_turn_and_where_the_player_stands():
    _, (message, unmoved) = play(FrozenLake(size=3, multi_turn=True), answer("Right", "Right"), answer("Right"))
    assert message.startswith("Reward 0. Turn 2 of 5.\n_ _ P\n_ O _\n_ _ G\nReply with")  # the start is forgotten
    assert unmoved.startswith("Reward 0. Turn 3 of 5.\n_ _ P\n")  # the edge holds
    env = FrozenLake(size=3, multi_turn=True, observation="coordinates")
    assert play(env, answer("Down"))[1][0].startswith("Reward 0. Turn 2 of 5.\nP a2, G c3, O b2, from a1 ")


# Rewards


@pytest.mark.parametrize(
    ("text", "success", "episode_return"),
    [
        (answer("Right", "Right", "Down", "Down"), True, 1.0),
        (answer("right", " DOWN ", "Right"), False, 0.0),  # into the hole, which ends the walk
        (answer("Right", "Down", "Up", "Right", "Down", "Down"), False, 0.0),  # no way out of the hole
        (answer("Down", "Down", "Right", "Right", "Up"), True, 1.0),  # the goal ends the walk too
        (answer("Right"), False, 0.0),
        (answer("Right", "Jump", "Right", "Down", "Down"), True, 0.9),  # the others are carried out
        (answer("Jump", "Fly"), False, -0.1),  # once
        (answer(), False, -0.1),
        ("Right || Right || Down || Down", False, -0.1),
        ("", False, -0.1),
    ],
)
def test_rewards_of_a_plan(text, success, episode_return):
    env = FrozenLake(size=3)
    (returns,) = env.reward_funcs
    assert score(env, text) == [float(success)]
    assert returns(prompts=[None], completions=[text], seed=[0], grid=["\n".join(LAKE)]) == [episode_return]
    outcome = play(env, text)[0].outcome
    assert (outcome.success, outcome.episode_return, outcome.turns) == (success, episode_return, 1)
    assert outcome.valid_turns == (episode_return in (0.0, 1.0))


@pytest.mark.parametrize(
    ("texts", "success", "episode_return", "turns"),
    [
        ([answer("Right", "Right"), answer("Down", "Down")], True, 1.0, 2),
        ([answer("Right", "Jump"), answer("Right"), "?", answer("Down", "Down")], True, 0.8, 4),
        ([answer("Down", "Right")], False, 0.0, 1),  # the hole
        (["?", answer("Right", "Down")], False, -0.1, 2),
        ([answer("Left")] * 5, False, 0.0, 5),
        ([answer("Right", "Right", "Down", "Down")], False, 0.0, 1),  # two actions a turn count
    ],
)
def test_rewards_of_several_turns(texts, success, episode_return, turns):
    begun, messages = play(FrozenLake(size=3, multi_turn=True), *texts)
    outcome = begun.outcome
    assert (outcome.success, outcome.episode_return, outcome.turns) == (success, pytest.approx(episode_return), turns)
    assert [message is None for message in messages] == [False] * (turns - 1) + [begun.done]


def test_actions_beyond_the_limit_are_ignored():
    plan = answer("Up", "Right", "Right", "Down", "Down", "Jump")
    assert score(FrozenLake(max_actions=5), plan) == [1.0]
    assert score(FrozenLake(max_actions=4), plan) == [0.0]
    assert play(FrozenLake(max_actions=5), plan)[0].outcome.valid_turns == 1


@pytest.mark.parametrize("slip", [0.0, 0.02, 0.3, 1.0])
def test_every_move_is_the_one_that_gymnasium_s_table_draws(slip):
    """Also to the last bit of its probabilities, so that a seed gives the same slips."""
    for seed in range(4):
        grid = FrozenLake(slip=slip).make_grid(seed)
        table = FrozenLakeEnv(desc=list(grid), is_slippery=slip > 0, success_rate=1.0 - slip).P
        frozen = [(r, c) for r, letters in enumerate(grid) for c, letter in enumerate(letters) if letter in "SF"]
        for draw, (cell, action) in enumerate(product(frozen, enumerate(ACTIONS))):
            walk = FrozenLakeEpisode(grid, slip, random.Random(draw), show=str)
            walk.position = cell
            outcomes = table[cell[0] * len(grid) + cell[1]][action[0]]
            (expected,) = random.Random(draw).choices(outcomes, [probability for probability, *_ in outcomes])
            reward = walk.step(action[1])
            state = walk.position[0] * len(grid) + walk.position[1]
            assert (state, reward, walk.done) == expected[1:]
            assert walk.success == (reward == 1)


def assert_independent(groups):
    """`groups` of 8 successes, each with a chance of one half."""
    mean = sum(map(sum, groups)) / (8 * len(groups))
    assert mean == pytest.approx(0.5, abs=0.04)
    # Shared noise would make every group unanimous; independent noise gives each pair of members no correlation.
    pairs = [(group[0] - mean) * (group[1] - mean) for group in groups]
    assert abs(sum(pairs) / len(pairs)) < 0.25 * 0.2
    assert sum(len(set(group)) == 1 for group in groups) < len(groups) / 20


def test_slips_are_independent_between_members_of_a_group():
    env = FrozenLake(slip=0.5, max_actions=1)
    assert_independent([score(env, answer("Right"), grid=CROSSING, seed=seed, count=8) for seed in range(400)])


def test_slips_are_fresh_at_every_training_step_and_in_every_process(monkeypatch):
    env = FrozenLake(slip=0.5, max_actions=1)

    def draw(step=0):
        state = SimpleNamespace(global_step=step)
        return score(env, answer("Right"), grid=CROSSING, count=64, trainer_state=state)

    assert draw() == draw()
    assert draw(step=1) != draw()
    here = draw()
    monkeypatch.setenv("RANK", "1")
    assert draw() != here


@pytest.mark.slow
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
        assert list(random_map(size, frozen, seed)) == generate_random_map(size, frozen, seed=seed)


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
    grids = [tuple(row["grid"].split("\n")) for row in islice(env.tasks(0, "train", None), 400)]
    assert sum(map(has_way, grids)) / 400 == pytest.approx(0.3, abs=0.08)
    assert all(len(find(grid, symbol)) == 1 for grid in grids for symbol in "SG")
    assert not any(held_out("\n".join(grid)) for grid in grids)
    held = env.dataset(100, seed=0, split="test")
    assert held.to_list() == task(**options).dataset(100, seed=0, split="test").to_list()


def test_an_impossible_map_rewards_nobody_and_is_not_demonstrated():
    env = FrozenLake(impossible=1.0)
    for task in env.dataset(20, seed=0):
        rng = random.Random(0)
        for walk in (env.play(task, rng) for _ in range(20)):
            walk.respond(walk.random_response(rng))
            assert walk.outcome.episode_return == 0.0 and not walk.outcome.success
    with pytest.raises(ValueError, match="got 20: the solver"):
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


def test_demonstrations_are_as_short_as_can_be():
    env = FrozenLake(size=5)
    rows = env.demonstrations(100, seed=1)
    for grid, completion in zip(grids_of(env.dataset(100, seed=1)), rows["completion"], strict=True):
        response = parse_response(completion_text(completion))
        assert len(response.actions) == distances_to_goal(grid)[find(grid, "S")[0]]


def test_demonstrations_reason_from_where_the_player_stands():
    rows = FrozenLake(multi_turn=True, observation="coordinates").demonstrations(50, seed=0)
    conversations = [[*row["prompt"], *row["completion"]] for row in rows]
    turns = [pair for messages in conversations for pair in zip(messages[1::2], messages[2::2], strict=True)]
    assert len(turns) > 50
    for state, told in turns:
        (shown,) = re.findall(r"P (\w+), G (\w+),", state["content"])
        reasoning = parse_response(told["content"]).reasoning
        assert reasoning.startswith(f"From {shown[0]} to {shown[1]}, ")


def test_reasoning_names_ends_holes_between_and_cells_of_the_way():
    lake = ("SHF", "FFF", "HFG")
    path, _ = shortest_path(lake, (0, 0), random.Random(0))
    assert explain(lake, path).startswith("From a1 to c3, holes b1 a3, path a1 a2 b2 ")


def test_ties_between_shortest_ways_are_broken_at_random():
    lake = ("SFF", "FFF", "FFG")
    ways = {tuple(shortest_path(lake, (0, 0), random.Random(seed))[1]) for seed in range(200)}
    assert len(ways) == 6  # two moves right and two down, in any order
