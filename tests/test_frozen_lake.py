"""FrozenLake: its slips, its rewards, and what it shows."""

import random
import time
from itertools import product
from types import SimpleNamespace

import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from lakes import CROSSING, LAKE, answer, play, row, score

from ragen2_trl.envs import FrozenLake, make_env, respond_all
from ragen2_trl.envs.frozen_lake import ACTIONS, FrozenLakeEpisode

# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 2}, r"size must be an integer between 3 and 10, got 2"),
        ({"frozen": 0.5}, r"frozen must be between 0.6 and 1.0, got 0.5"),
        ({"slip": -0.1}, r"slip must be between 0.0 and 1.0, got -0.1"),
        (
            {"observation": "smell"},
            r"observation must be one of \['grid', 'coordinates', 'both', 'image'\], got 'smell'",
        ),
        (
            {"impossible": 0.5, "max_turns": 1, "max_actions": 1},
            r"max_turns \* max_actions with impossible must be an integer between 2 and 10000, got 1",
        ),
        ({"impossible": 1.1}, r"impossible must be between 0.0 and 1.0, got 1.1"),
        ({"max_actions": 0}, r"max_actions must be an integer between 1 and 100, got 0"),
        ({"wind": 1}, r"options of frozen_lake must be among \['size', 'frozen', .*\], got \['wind'\]"),
    ],
)
def test_bad_options_are_named_with_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        make_env("frozen_lake", **options)


def test_maps_are_generated_and_not_loaded():
    with pytest.raises(ValueError, match=r"data must be None for frozen_lake, .*, got 'maps'"):
        FrozenLake().dataset(1, data="maps")


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


def test_prompt_tells_of_slips_only_where_there_are_any():
    assert "slippery" not in FrozenLake().prompt(row())[0]["content"]
    assert "slippery" in FrozenLake(slip=0.1).prompt(row())[0]["content"]


def test_prompt_tells_how_much_may_be_answered():
    assert FrozenLake().prompt(row())[0]["content"].endswith("Give at most 10 actions.")
    several = FrozenLake(multi_turn=True).prompt(row())[0]["content"]
    assert several.endswith("You have 5 turns with at most 2 actions each.")


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


def test_an_invalid_turn_moves_nobody():
    begun, (message,) = play(FrozenLake(size=3, multi_turn=True), answer("Fly", "Jump"))
    assert begun.episode.position == (0, 0)
    assert message.startswith("Invalid answer. Reward -0.1. Turn 2 of 5.\nP _ _\n")


def test_a_partly_invalid_turn_is_told_and_moves_the_player():
    begun, (message,) = play(FrozenLake(size=3, multi_turn=True), answer("Jump", "Right"))
    assert begun.episode.position == (0, 1)
    assert message.startswith("Partly invalid answer. Reward -0.1. Turn 2 of 5.\n_ P _\n")


def test_actions_beyond_the_limit_are_ignored():
    plan = answer("Up", "Right", "Right", "Down", "Down", "Jump")
    assert score(FrozenLake(max_actions=5), plan) == [1.0]
    assert score(FrozenLake(max_actions=4), plan) == [0.0]
    assert play(FrozenLake(max_actions=5), plan)[0].outcome.valid_turns == 1


def test_reward_functions_carry_the_names_that_trl_logs():
    env = FrozenLake()
    assert [func.__name__ for func in env.reward_funcs] == ["frozen_lake_return"]
    assert env.success_func.__name__ == "frozen_lake_success"


def test_rewards_read_strings_messages_and_parsed_reasoning_alike():
    plan = answer("Right", "Right", "Down", "Down")
    parsed = {
        "role": "assistant",
        "reasoning_content": "A plan.",
        "content": plan.removeprefix("<think>A plan.</think>"),
    }
    completions = [plan, [{"role": "assistant", "content": plan}], [parsed]]
    rewards = FrozenLake().success_func(
        prompts=[None] * 3, completions=completions, seed=[0] * 3, grid=["\n".join(LAKE)] * 3
    )
    assert rewards == [1.0, 1.0, 1.0]


def test_thousands_of_rewards_a_second():
    env = FrozenLake(slip=0.2)
    rows = FrozenLake().demonstrations(1000, seed=0)  # as many answers as tasks: none is left out without slips
    tasks = env.dataset(1000, seed=0)
    columns = {"prompts": rows["prompt"][:], "completions": rows["completion"][:]}
    start = time.perf_counter()
    env.success_func(**columns, seed=tasks["seed"][:], grid=tasks["grid"][:])
    env.reward_funcs[0](**columns, seed=tasks["seed"][:], grid=tasks["grid"][:])
    assert time.perf_counter() - start < 5.0  # 2,000 rewards: 0.1 s on a quiet core


# The floor: what a player gets who looks at nothing. Measured with 5,000 held-out maps; standard error 0.006.


@pytest.mark.slow
@pytest.mark.parametrize(("multi_turn", "floor"), [(False, 0.20), (True, 0.21)])
def test_random_player_reaches_one_goal_in_five(multi_turn, floor):
    env = FrozenLake(multi_turn=multi_turn)
    rng = random.Random(0)
    tasks = list(env.dataset(600, seed=0, split="test"))
    plays = [env.play(task, rng) for task in tasks]
    while going := [each for each in plays if not each.done]:
        respond_all(going, [answer(*(p.episode.random_action(rng) for _ in range(env.max_actions))) for p in going])
    assert sum(each.outcome.success for each in plays) / 600 == pytest.approx(floor, abs=0.04)


# Slips


def test_slips_go_sideways_as_often_as_gymnasium_says():
    lake = ("FFF", "FSF", "FFG")
    walks = [FrozenLakeEpisode(lake, slip=0.4, rng=random.Random(seed), show=str) for seed in range(4000)]
    for walk in walks:
        walk.step("Up")
    share = {cell: sum(walk.position == cell for walk in walks) / 4000 for cell in [(0, 1), (1, 0), (1, 2)]}
    assert share[0, 1] == pytest.approx(0.6, abs=0.03)
    assert share[1, 0] == pytest.approx(0.2, abs=0.03)
    assert share[1, 2] == pytest.approx(0.2, abs=0.03)


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


def test_slips_are_independent_between_tool_environments_that_are_used_again():
    make = FrozenLake(slip=0.5, max_actions=1, protocol="tools").environment_factory
    members = [make() for _ in range(8)]

    def walk(member):
        member.reset(**row(CROSSING))  # the same row again and again
        member.move(["Right"])
        return member.get_reward()

    assert_independent([[walk(member) for member in members] for _ in range(400)])


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


# Tools


def test_the_tool_walks_and_answers_with_the_map():
    lake = FrozenLake(size=3, multi_turn=True, protocol="tools").environment_factory()
    assert lake.reset(**row(), prompt=[], unused="column") == "P _ _\n_ O _\n_ _ G"
    assert lake.move(["Right", "Right", "Up"]) == "Reward 0.\n_ _ P\n_ O _\n_ _ G"
    assert lake.move(["Sideways"]) == "Invalid answer. Reward -0.1.\n_ _ P\n_ O _\n_ _ G"
    assert lake.move(["Down", "Down"]) == "Reward 1. The episode is over."
    assert lake.get_reward() == pytest.approx(0.9)
    assert lake.move(["Up"]) == "The episode is over."
    assert lake.get_reward() == pytest.approx(0.9)
