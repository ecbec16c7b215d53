"""FrozenLake: its maps, its slips, its rewards, and the parser that reads what a model wrote."""

import os
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragen2_trl.envs import ENVIRONMENTS, Environment, FrozenLake, completion_text, make_env, parse_response
from ragen2_trl.envs.base import MAX_PARSED_ACTIONS, MAX_RESPONSE_CHARS, format_response
from ragen2_trl.envs.frozen_lake import (
    ACTIONS,
    Walk,
    distances_to_goal,
    explain,
    find,
    shortest_path,
    split_of,
    transitions,
)

LAKE = ("SFF", "FHF", "FFG")


def score(env, text, *, grid=LAKE, seed=0, count=1, **columns):
    """Success of `count` equal completions of one task."""
    messages = [[{"role": "assistant", "content": text}]] * count
    return env.success_func(
        prompts=[None] * count, completions=messages, seed=[seed] * count, grid=["\n".join(grid)] * count, **columns
    )


def answer(*actions):
    return format_response("A plan.", actions)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 2}, r"size must be between 3 and 10, got 2"),
        ({"frozen": 0.5}, r"frozen must be between 0.6 and 1.0, got 0.5"),
        ({"slip": -0.1}, r"slip must be between 0.0 and 1.0, got -0.1"),
        ({"observation": "image"}, r"observation must be one of \['grid', 'coordinates', 'both'\], got 'image'"),
        ({"max_actions": 0}, r"max_actions must be between 1 and 100, got 0"),
        ({"wind": 1}, r"options of frozen_lake must be among \['frozen', .*\], got \['wind'\]"),
    ],
)
def test_bad_options_are_named_with_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        make_env("frozen_lake", **options)


def test_unknown_environment_is_named_with_what_is_allowed():
    with pytest.raises(ValueError, match=r"environment must be one of \['frozen_lake'\], got 'ice'"):
        make_env("ice")


def test_unknown_split_is_named_with_what_is_allowed():
    with pytest.raises(ValueError, match=r"split must be one of \['train', 'test'\], got 'val'"):
        FrozenLake().dataset(1, seed=0, split="val")


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_every_environment_is_known_by_its_own_name(name):
    assert make_env(name).name == name


def test_tasks_without_a_solver_say_so():
    class Unsolvable(FrozenLake):
        name = "unsolvable"
        demonstrations = Environment.demonstrations

    with pytest.raises(NotImplementedError, match="unsolvable has no solver"):
        Unsolvable().demonstrations(1, seed=0)


# Maps


def test_held_out_maps_never_appear_in_training():
    env = FrozenLake(size=3)  # few enough maps that two splits without a rule would meet at once
    train = set(env.dataset(3000, seed=0)["grid"])
    held_out = set(env.dataset(600, seed=0, split="test")["grid"])
    assert not train & held_out
    assert len(held_out) > 100


def test_both_splits_see_the_same_kind_of_map():
    def holes(split):
        grids = FrozenLake().dataset(1500, seed=1, split=split)["grid"]
        return sum(grid.count("H") for grid in grids) / 1500

    assert holes("train") == pytest.approx(holes("test"), rel=0.1)


def test_seeds_decide_the_maps_and_nothing_else_does():
    env = FrozenLake()
    first = env.dataset(200, seed=3)
    random.seed(1)
    assert env.dataset(200, seed=3).to_list() == first.to_list()
    assert env.dataset(50, seed=3).to_list() == first.to_list()[:50]
    assert len(set(first["grid"]) & set(env.dataset(200, seed=4)["grid"])) < 10


def test_maps_leave_the_global_generator_alone():
    random.seed(0)
    expected = random.random()
    random.seed(0)
    FrozenLake().demonstrations(5, seed=0)
    score(FrozenLake(slip=0.5), answer("Down"))
    assert random.random() == expected


TASKS_AND_REWARDS = """
import zlib
from ragen2_trl.envs import make_env
env = make_env("frozen_lake", slip=0.4)
rows, tasks = env.demonstrations(30, seed=5), env.dataset(30, seed=5)
columns = {"prompts": rows["prompt"][:], "completions": rows["completion"][:], "grid": tasks["grid"][:]}
rewards = env.frozen_lake_success(**columns, seed=tasks["seed"][:])
checksum = zlib.crc32(repr((rows.to_list(), tasks.to_list(), rewards)).encode())
"""


def test_tasks_are_equal_across_processes_with_different_hash_seeds():
    here: dict = {}
    exec(TASKS_AND_REWARDS, here)  # this process has a hash seed of its own
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run(
        [sys.executable, "-c", f"{TASKS_AND_REWARDS}\nprint(checksum)"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        check=True,
        text=True,
    )
    assert int(there.stdout) == here["checksum"]


@pytest.mark.parametrize("size", [3, 4, 7])
def test_every_map_has_one_start_one_goal_and_a_way_short_enough(size):
    env = FrozenLake(size=size, max_actions=5)
    for row in env.dataset(100, seed=0):
        grid = tuple(row["grid"].split("\n"))
        assert len(grid) == size and {len(line) for line in grid} == {size}
        (start,) = find(grid, "S")
        (_goal,) = find(grid, "G")
        assert 1 <= distances_to_goal(grid)[start] <= 5


def test_start_and_goal_are_spread_over_the_map():
    grids = FrozenLake().dataset(1000, seed=0)["grid"]
    for symbol in "SG":
        assert len({find(tuple(grid.split("\n")), symbol)[0] for grid in grids}) == 16


def test_split_depends_on_the_map_alone():
    env = FrozenLake(observation="both", slip=0.2)
    assert {split_of(tuple(row["grid"].split("\n"))) for row in env.dataset(50, seed=0, split="test")} == {"test"}


# Text


def test_prompt_shows_what_the_observation_asks_for():
    grid_text = "P _ _\n_ O _\n_ _ G"
    coordinates = "P a1, G c3, O b2, from a1 top left to c3 bottom right."
    for observation, shown in {
        "grid": grid_text,
        "coordinates": coordinates,
        "both": f"{grid_text}\n{coordinates}",
    }.items():
        _, user = FrozenLake(size=3, observation=observation).render_prompt(LAKE)
        assert user["content"].startswith(f"{shown}\nReply with")


def test_prompt_tells_of_slips_only_where_there_are_any():
    assert "slippery" not in FrozenLake().render_prompt(LAKE)[0]["content"]
    assert "slippery" in FrozenLake(slip=0.1).render_prompt(LAKE)[0]["content"]


# Rewards


@pytest.mark.parametrize(
    ("text", "success", "penalty"),
    [
        (answer("Right", "Right", "Down", "Down"), 1.0, 0.0),
        (answer("right", " DOWN ", "Right"), 0.0, 0.0),  # into the hole, which ends the walk
        (answer("Right", "Down", "Up", "Right", "Down", "Down"), 0.0, 0.0),  # no way out of the hole
        (answer("Down", "Down", "Right", "Right", "Up"), 1.0, 0.0),  # the goal ends the walk too
        (answer("Right"), 0.0, 0.0),
        (answer("Right", "Jump", "Right", "Down", "Down"), 0.0, -0.1),  # not carried out
        (answer(), 0.0, -0.1),
        ("Right || Right || Down || Down", 0.0, -0.1),
        ("", 0.0, -0.1),
    ],
)
def test_rewards_of_a_plan(text, success, penalty):
    env = FrozenLake(size=3)
    assert score(env, text) == [success]
    assert env.frozen_lake_format(prompts=[None], completions=[text]) == [penalty]
    assert env.is_valid(text) == (penalty == 0.0)


def test_actions_beyond_the_limit_are_ignored():
    plan = ("Up", "Right", "Right", "Down", "Down", "Jump")
    assert score(FrozenLake(max_actions=5), answer(*plan)) == [1.0]
    assert score(FrozenLake(max_actions=4), answer(*plan)) == [0.0]
    assert FrozenLake(max_actions=5).is_valid(answer(*plan))


def test_reward_functions_carry_the_names_that_trl_logs():
    env = FrozenLake()
    assert [func.__name__ for func in env.reward_funcs] == ["frozen_lake_success", "frozen_lake_format"]
    assert env.success_func in env.reward_funcs


def test_rewards_read_strings_messages_and_parsed_reasoning_alike():
    plan = answer("Right", "Right", "Down", "Down")
    parsed = {
        "role": "assistant",
        "reasoning_content": "A plan.",
        "content": plan.removeprefix("<think>A plan.</think>"),
    }
    completions = [plan, [{"role": "assistant", "content": plan}], [parsed]]
    rewards = FrozenLake().frozen_lake_success(
        prompts=[None] * 3, completions=completions, seed=[0] * 3, grid=["\n".join(LAKE)] * 3
    )
    assert rewards == [1.0, 1.0, 1.0]


def test_thousands_of_rewards_a_second():
    env = FrozenLake(slip=0.2)
    rows = env.demonstrations(1000, seed=0)
    tasks = env.dataset(1000, seed=0)
    columns = {"prompts": rows["prompt"][:], "completions": rows["completion"][:]}
    start = time.perf_counter()
    env.frozen_lake_success(**columns, seed=tasks["seed"][:], grid=tasks["grid"][:])
    env.frozen_lake_format(**columns)
    assert time.perf_counter() - start < 1.0  # 2,000 rewards, with the tables of 1,000 new maps


# Slips


def test_slips_go_sideways_as_often_as_gymnasium_says():
    walks = [Walk(("FFF", "FSF", "FFG"), slip=0.4, rng=random.Random(seed)) for seed in range(4000)]
    for walk in walks:
        walk.step(ACTIONS.index("Up"))
    share = {cell: sum(walk.position == cell for walk in walks) / 4000 for cell in [(0, 1), (1, 0), (1, 2)]}
    assert share[0, 1] == pytest.approx(0.6, abs=0.03)
    assert share[1, 0] == pytest.approx(0.2, abs=0.03)
    assert share[1, 2] == pytest.approx(0.2, abs=0.03)


def test_without_slips_every_table_entry_is_certain():
    assert all(len(outcomes) == 1 for row in transitions(LAKE, 0.0).values() for outcomes in row.values())


def test_slips_are_independent_between_members_of_a_group():
    env = FrozenLake(slip=0.5, max_actions=1)
    lake = ("FFF", "FSG", "FFF")
    groups = [score(env, answer("Right"), grid=lake, seed=seed, count=8) for seed in range(400)]
    mean = sum(map(sum, groups)) / 3200
    assert mean == pytest.approx(0.5, abs=0.04)
    # Shared noise would make every group unanimous; independent noise gives each pair of members no correlation.
    pairs = [(group[0] - mean) * (group[1] - mean) for group in groups]
    assert abs(sum(pairs) / len(pairs)) < 0.25 * 0.2
    assert sum(len(set(group)) == 1 for group in groups) < 20


def test_slips_are_fresh_at_every_training_step_and_in_every_process(monkeypatch):
    env = FrozenLake(slip=0.5, max_actions=1)

    def draw(step=0):
        return score(
            env, answer("Right"), grid=("FFF", "FSG", "FFF"), count=64, trainer_state=SimpleNamespace(global_step=step)
        )

    assert draw() == draw()
    assert draw(step=1) != draw()
    here = draw()
    monkeypatch.setenv("RANK", "1")
    assert draw() != here


# Demonstrations


@pytest.mark.parametrize(
    "options", [{}, {"size": 6, "frozen": 0.7, "max_actions": 20}, {"observation": "coordinates"}]
)
def test_demonstrations_always_reach_the_goal(options):
    env = FrozenLake(**options)
    rows, tasks = env.demonstrations(200, seed=7), env.dataset(200, seed=7)
    columns = {"prompts": rows["prompt"][:], "completions": rows["completion"][:]}
    assert rows["prompt"][:] == tasks["prompt"][:]
    assert env.frozen_lake_success(**columns, seed=tasks["seed"][:], grid=tasks["grid"][:]) == [1.0] * 200
    assert env.frozen_lake_format(**columns) == [0.0] * 200


def test_demonstrations_are_as_short_as_can_be():
    env = FrozenLake(size=5)
    for row, task in zip(env.demonstrations(100, seed=1), env.dataset(100, seed=1), strict=True):
        grid = tuple(task["grid"].split("\n"))
        response = parse_response(completion_text(row["completion"]))
        assert len(response.actions) == distances_to_goal(grid)[find(grid, "S")[0]]


def test_demonstrations_reason_about_the_map():
    rows = FrozenLake().demonstrations(200, seed=0)
    reasonings = {parse_response(completion_text(completion)).reasoning for completion in rows["completion"]}
    assert len(reasonings) > 150  # on neighbouring cells two maps can call for the same words


def test_reasoning_names_ends_holes_between_and_cells_of_the_way():
    lake = ("SHF", "FFF", "HFG")
    path, _ = shortest_path(lake, random.Random(0))
    assert explain(lake, path).startswith("From a1 to c3, holes b1 a3, path a1 a2 b2 ")


def test_ties_between_shortest_ways_are_broken_at_random():
    lake = ("SFF", "FFF", "FFG")
    ways = {tuple(shortest_path(lake, random.Random(seed))[1]) for seed in range(200)}
    assert len(ways) == 6  # two moves right and two down, in any order


# Parser


def test_parser_reads_the_first_pair_and_ignores_the_rest():
    response = parse_response(
        "So <think>a</think>\n<answer>Up||Down || </answer> <think>b</think><answer>Left</answer>"
    )
    assert (response.reasoning, response.actions) == ("a", ("Up", "Down"))


def test_parser_allows_a_prefilled_think_tag():
    response = parse_response("I go up.</think><answer>Up</answer>")
    assert (response.reasoning, response.actions) == ("I go up.", ("Up",))


@pytest.mark.parametrize(
    "text",
    [
        "<answer>Up</answer>",
        "<think>a</think> so <answer>Up</answer>",
        "<think>a</think><answer>Up",
        "<think>a<answer>Up</answer>",
        "<answer>Up</answer><think>a</think>",
    ],
)
def test_parser_rejects_malformed_text(text):
    assert parse_response(text) is None


PIECES = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "||", " ", "\n", "Up", "<", "\x00"])


@given(st.one_of(st.text(), st.lists(PIECES, max_size=40).map("".join)))
@example("<think>" * 50_000)
@example("</think><answer>" * 50_000)
@example("</think><answer>" + "a||" * 30_000 + "</answer>")
@example("</think>" + " " * 99_000)
def test_parser_survives_hostile_text(text):
    response = parse_response(text)
    if response is not None:
        assert len(response.actions) <= MAX_PARSED_ACTIONS
        assert all(action == action.strip() != "" and "||" not in action for action in response.actions)
    assert FrozenLake().frozen_lake_format(prompts=[None], completions=[text])[0] in (-0.1, 0.0)


def test_parser_reads_no_further_than_its_limit():
    filler = "x" * (MAX_RESPONSE_CHARS - len(answer("Up")))
    assert parse_response(filler + answer("Up")) is not None
    assert parse_response(filler + "x" + answer("Up")) is None


def test_parser_work_is_linear_in_the_text():
    pieces = ["<think>", "</think>", "</think><answer>", "|| ", "</think><answer>a||", " "]
    start = time.perf_counter()
    for piece in pieces:
        parse_response(piece * (10_000_000 // len(piece)))
    assert time.perf_counter() - start < 1.0


@given(st.text(alphabet="abc \n.", max_size=30), st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=10))
def test_parser_reads_back_what_was_formatted(reasoning, actions):
    response = parse_response(format_response(reasoning, actions))
    assert (response.reasoning, response.actions) == (reasoning.strip(), tuple(actions))


def test_completion_text_joins_assistant_messages_only():
    messages = [
        {"role": "assistant", "content": None, "thinking": "a"},
        {"role": "tool", "content": "ignored"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "image", "image": None}]},
    ]
    assert completion_text(messages) == "<think>a</think>b"
