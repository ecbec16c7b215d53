"""FrozenLake's demonstrations: as short as can be, with reasoning that is true."""

import random
import re

import pytest
from lakes import grids_of

from ragen2_trl.envs import FrozenLake, completion_text, parse_response
from ragen2_trl.envs.frozen_lake import distances_to_goal, explain, find, shortest_path


@pytest.mark.parametrize(
    "options", [{}, {"size": 6, "frozen": 0.7, "max_actions": 20}, {"observation": "coordinates"}]
)
def test_demonstrations_always_reach_the_goal(options):
    env = FrozenLake(**options)
    rows, tasks = env.demonstrations(200, seed=7), env.dataset(200, seed=7)
    columns = {"prompts": rows["prompt"][:], "completions": rows["completion"][:]}
    columns |= {"seed": tasks["seed"][:], "grid": tasks["grid"][:]}
    assert rows["prompt"][:] == tasks["prompt"][:]
    assert env.success_func(**columns) == [1.0] * 200
    assert env.reward_funcs[0](**columns) == [1.0] * 200


def test_demonstrations_are_as_short_as_can_be():
    env = FrozenLake(size=5)
    rows = env.demonstrations(100, seed=1)
    for grid, completion in zip(grids_of(env.dataset(100, seed=1)), rows["completion"], strict=True):
        response = parse_response(completion_text(completion))
        assert len(response.actions) == distances_to_goal(grid)[find(grid, "S")[0]]


def test_demonstrations_of_several_turns_are_as_short_as_can_be():
    env = FrozenLake(size=5, multi_turn=True)
    rows = env.demonstrations(100, seed=1)
    distances = [distances_to_goal(grid)[find(grid, "S")[0]] for grid in grids_of(env.dataset(100, seed=1))]
    turns = sum(message["role"] == "assistant" for row in rows for message in row["completion"])
    assert turns == sum(-(-distance // 2) for distance in distances)  # two actions a turn


def test_demonstrations_reason_about_the_map():
    rows = FrozenLake().demonstrations(200, seed=0)
    reasonings = {parse_response(completion_text(completion)).reasoning for completion in rows["completion"]}
    assert len(reasonings) > 150  # on neighbouring cells two maps can call for the same words


def test_demonstrations_reason_from_where_the_player_stands():
    rows = FrozenLake(multi_turn=True, observation="coordinates").demonstrations(50, seed=0)
    conversations = [[*row["prompt"], *row["completion"]] for row in rows]
    turns = [pair for messages in conversations for pair in zip(messages[1::2], messages[2::2], strict=True)]
    assert len(turns) > 50
    for state, answer in turns:
        (shown,) = re.findall(r"P (\w+), G (\w+),", state["content"])
        reasoning = parse_response(answer["content"]).reasoning
        assert reasoning.startswith(f"From {shown[0]} to {shown[1]}, ")


def test_reasoning_names_ends_holes_between_and_cells_of_the_way():
    lake = ("SHF", "FFF", "HFG")
    path, _ = shortest_path(lake, (0, 0), random.Random(0))
    assert explain(lake, path).startswith("From a1 to c3, holes b1 a3, path a1 a2 b2 ")


def test_ties_between_shortest_ways_are_broken_at_random():
    lake = ("SFF", "FFF", "FFG")
    ways = {tuple(shortest_path(lake, (0, 0), random.Random(seed))[1]) for seed in range(200)}
    assert len(ways) == 6  # two moves right and two down, in any order
