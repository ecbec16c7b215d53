"""What holds for every task, whose own rules and rewards have files of their own: options, rows, play, rewards."""

import json
import math
import os
import random
import re
import subprocess
import sys
import zlib
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from every_task import (
    MISSING_MODES,
    MODES,
    NONSENSE,
    PICTURED,
    columns_of,
    data_of,
    demonstrations_of,
    environment,
    every_fuzzed_mode,
    every_mode,
    every_mode_with_tools,
    every_multi_turn,
    every_picture,
    every_single_turn,
    every_task,
    first_episode,
    first_texts,
    has_random_player,
    has_solver,
    needs_of,
    rewards_of,
    rows_of,
    solve,
    turns,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageChops
from transformers.utils import get_json_schema

from ragen2_trl.columns import EPISODE
from ragen2_trl.envs import (
    ENVIRONMENTS,
    Episode,
    EpisodeOutcome,
    FrozenLake,
    format_response,
    make_env,
    parse_response,
    respond_all,
)
from ragen2_trl.envs.random_baseline import random_baseline
from ragen2_trl.envs.tasks import SPLITS


def test_environments_need_neither_torch_nor_trl():
    """They are imported where there is no model: on servers, in worker processes."""
    code = "import sys, ragen2_trl.envs; print(sorted({'torch', 'trl', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"


# Options


def test_unknown_environment_is_named_with_what_is_allowed():
    with pytest.raises(ValueError, match=r"environment must be one of \[.*'frozen_lake'.*\], got 'ice'"):
        make_env("ice")


@every_task
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wind": 1}, r"options of {name} must be among \[.*'max_turns', .*'preset'\], got \['wind'\]"),
        ({"max_turns": 0}, "max_turns must be an integer between 1 and 100, got 0"),
        ({"max_actions": 101}, "max_actions must be an integer between 1 and 100, got 101"),
        ({"protocol": "json"}, r"protocol must be one of \['text'(, 'tools')?\], got 'json'"),
    ],
)
def test_bad_options_are_named_with_what_is_allowed(name, options, message):
    with pytest.raises(ValueError, match=message.format(name=name)):
        make_env(name, **options)


REFUSED = [
    ("frozen_lake", {"size": 2}, "size"),
    ("frozen_lake", {"frozen": 0.5}, "frozen"),
    ("frozen_lake", {"slip": -0.1}, "slip"),
    ("frozen_lake", {"observation": "smell"}, "observation"),
    (
        "frozen_lake",
        {"impossible": 0.5, "max_turns": 1, "max_actions": 1},
        r"max_turns \* max_actions with impossible",
    ),
    ("frozen_lake", {"impossible": 1.1}, "impossible"),
    ("sokoban", {"size": 4}, "size"),
    ("sokoban", {"size": 5, "boxes": 4}, "boxes"),
    ("sokoban", {"observation": "sound"}, "observation"),
    ("sokoban", {"boxes": 2, "max_actions": 3}, r"max_turns \* max_actions"),
    ("countdown", {"operators": "*"}, "operators"),
    ("countdown", {"max_numbers": 5}, "max_numbers"),
    ("countdown", {"largest": 4}, "largest"),
    ("search_qa", {"top_k": 0}, "top_k"),
    ("search_qa", {"max_chars": 99}, "max_chars"),
    ("search_qa", {"corpus": "/nowhere.jsonl"}, "corpus"),
    ("webshop", {"products": 49}, "products"),
    ("webshop", {"results": 21}, "results"),
    ("webshop", {"goals": "own"}, "goals"),
    ("webshop", {"max_actions": 2}, "max_actions"),
    ("webshop", {"max_turns": 2}, "max_turns"),
    ("webshop", {"max_total_actions": 2}, "max_total_actions"),
    ("deepcoder", {"config": "apps"}, "config"),
    ("deepcoder", {"max_tests": 1}, "max_tests"),
    ("deepcoder", {"test_seconds": 0}, "test_seconds"),
    ("deepcoder", {"program_seconds": 0.5}, "program_seconds"),
    ("deepcoder", {"workers": 0}, "workers"),
    ("deepcoder", {"allow_unsafe_sandbox": "False"}, "allow_unsafe_sandbox"),
]


@pytest.mark.parametrize(("name", "options", "field"), REFUSED)
def test_options_out_of_range_are_named_with_their_value(name, options, field):
    value = next(iter(options.values())) if len(options) == 1 else ""
    with pytest.raises(ValueError, match=rf"{field} must be .*, got .*{re.escape(str(value))}"):
        make_env(name, **options)


HOTPOT = {
    "question": "Who?",
    "answer": "Ann",
    "context": {"title": ["Ann"], "sentences": [["Ann."]]},
    "supporting_facts": {"title": ["Ann"], "sent_id": [0]},
}
OTHER_ROWS = [
    ("countdown", {"numbers": [1, 2], "target": 3}, "columns of data"),
    ("countdown", {"nums": [1], "target": 1}, "nums"),
    ("countdown", {"nums": [1, 2.5], "target": 1}, "nums"),
    ("countdown", {"nums": [1, 2], "target": -3}, "target"),
    ("metamath_qa", {"question": "?"}, "columns of data"),
    ("metamath_qa", {"query": "?", "response": 7, "original_question": "?"}, "response"),
    ("search_qa", {**HOTPOT, "question": ""}, "question"),
    ("search_qa", {**HOTPOT, "answer": None}, "answer"),
    ("search_qa", {**HOTPOT, "context": [["title", ["a"]]]}, "context"),
    ("search_qa", {**HOTPOT, "context": {"title": ["a"], "sentences": []}}, "context"),
    ("search_qa", {**HOTPOT, "context": {"title": [], "sentences": []}}, "context"),
    ("search_qa", {**HOTPOT, "supporting_facts": None}, "supporting_facts"),
    ("deepcoder", {"question": "?", "tests": "[]"}, "columns of data"),
    ("deepcoder", {"problem": " ", "tests": "[]"}, "problem"),
    ("deepcoder", {"problem": "?", "tests": "[{"}, "tests"),
    ("deepcoder", {"problem": "?", "tests": '{"inputs": []}'}, "tests"),
    ("deepcoder", {"problem": "?", "tests": '[{"input": "1"}]'}, "tests"),
    ("deepcoder", {"problem": "?", "tests": "3"}, "tests"),
]


@pytest.mark.parametrize(
    ("name", "row", "field"), [pytest.param(*case, marks=needs_of(case[0])) for case in OTHER_ROWS]
)
def test_data_of_another_schema_are_refused_by_their_column(tmp_path, name, row, field):
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(row))
    with pytest.raises(ValueError, match=f"{field}.* must"):
        for split in SPLITS:
            list(make_env(name).tasks(0, split, str(data)))


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban", "bandit"])
def test_tasks_that_are_generated_take_no_data(name):
    with pytest.raises(ValueError, match=r"data must be .*None.*, got 'rows'"):
        make_env(name).dataset(1, data="rows")


# What a player reaches who looks at nothing, measured with thousands of held-out tasks, and how near 250 come.
FLOORS = {
    "bandit": (0.5, 0.05),
    "countdown": (0.035, 0.02),
    "frozen_lake": (0.2, 0.05),
    "metamath_qa": (0.012, 0.012),
    "search_qa": (0.037, 0.025),
    "sokoban": (0.056, 0.03),
    "webshop": (0.013, 0.013),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOORS)
def test_a_player_who_looks_at_nothing_solves_little(name):
    several = {"multi_turn": True} if name in ("search_qa", "webshop") else {}
    floor, near = FLOORS[name]
    rows = list(islice(make_env(name, **several).tasks(9, "test", None), 250))
    assert random_baseline(make_env(name, **several), rows, samples=4) == pytest.approx(floor, abs=near)


@pytest.mark.parametrize(("name", "multi_turn"), MISSING_MODES)
def test_modes_that_a_task_does_not_have_are_refused(name, multi_turn):
    with pytest.raises(ValueError, match=f"multi_turn must be {not multi_turn} for {name}, got {multi_turn}"):
        make_env(name, multi_turn=multi_turn)


@every_task
def test_bad_arguments_of_datasets_are_named_with_what_is_allowed(name):
    env, data = environment(name), data_of(name)
    with pytest.raises(ValueError, match=r"split must be one of \['train', 'test'\], got 'val'"):
        env.dataset(1, split="val", data=data)
    with pytest.raises(ValueError, match="num_prompts must be an integer between 1 and 10000000, got 0"):
        env.dataset(0, data=data)
    if data is None:
        with pytest.raises(ValueError, match=f"num_prompts must be given for {name}.*got None"):
            env.dataset()
    else:
        with pytest.raises(ValueError, match=r"num_prompts must be at most \d+.*got 1000000"):
            env.dataset(1_000_000, data=data)


# Rows


def checksums():
    """Of all that a seed decides, for every task."""
    sums = {}
    for name, multi_turn in MODES:
        env = environment(name, multi_turn)
        rows = rows_of(env, 10, seed=5)
        plays = [env.play(row, random.Random(row["seed"])) for row in rows]
        rng = random.Random(0)
        told = [play.respond(format_response("", actions)) for play in plays for actions in turns(play, rng)]
        demonstrations = demonstrations_of(env, 10, seed=5) if has_solver(first_episode(env)) else []
        everything = (rows, told, [play.outcome for play in plays], demonstrations)
        sums[f"{name}, multi_turn={multi_turn}"] = zlib.crc32(repr(everything).encode())
    return sums


@pytest.mark.slow
def test_equal_arguments_give_equal_rows_and_plays_in_every_process():
    script = "import json, test_environments\nprint(json.dumps(test_environments.checksums()))"
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        check=True,
        text=True,
    )
    random.seed(1)  # the other process has a global generator in another state
    assert json.loads(there.stdout.splitlines()[-1]) == checksums()


@every_task
def test_global_generators_are_left_alone(name):
    def states():
        return random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()

    before = states()
    env = environment(name)
    rows = rows_of(env, 5)
    for row in rows:
        for seed in range(3):
            play = env.play(row, random.Random(seed))
            for actions in turns(play, random.Random(seed)):
                play.respond(format_response("", actions))
    if has_solver(first_episode(env)):
        demonstrations_of(env, 5)
    assert states() == before


@every_mode
def test_first_rows_of_a_longer_dataset_are_the_shorter_one(name, multi_turn):
    env, data = environment(name, multi_turn), data_of(name)
    longer = rows_of(env, 20, seed=3)
    assert env.dataset(len(longer) // 2, 3, data=data).to_list() == longer[: len(longer) // 2]


@pytest.mark.slow
@every_task
def test_seeds_of_rows_tell_tasks_apart(name):
    env = environment(name)
    rows = [row for split in SPLITS for row in rows_of(env, 200, split=split)]
    assert all(type(row["seed"]) is int for row in rows)
    tasks = {row["seed"]: row for row in rows}
    assert all(tasks[row["seed"]] == row for row in rows)
    assert len({json.dumps(row["prompt"]) for row in rows}) > 1


@pytest.mark.slow
@every_mode
def test_splits_never_meet(name, multi_turn):
    env = environment(name, multi_turn)
    train, test = ({row["prompt"][-1]["content"] for row in rows_of(env, 300, split=split)} for split in SPLITS)
    assert train and test and not train & test


# Prompts


@every_mode
@pytest.mark.parametrize("protocol", ["text", "tools"])
def test_prompt_is_a_short_system_and_user_message(name, multi_turn, protocol):
    if protocol == "tools" and ENVIRONMENTS[name].tools is None:
        pytest.skip(f"{name} has no tools")
    env = environment(name, multi_turn, protocol=protocol)
    for row in rows_of(env, 20):
        system, user = row["prompt"]
        assert (system["role"], user["role"]) == ("system", "user")
        assert system.keys() == user.keys() == {"role", "content"}
        shown = env.episode(row, random.Random(0)).observation()
        assert 0 < len(system["content"]) < 800 and len(user["content"]) - len(shown) < 200
        assert len(shown) < 1000 or data_of(name) is not None  # texts of others are as long as they are
        if protocol == "text":
            assert shown in user["content"] and f"<answer>{env.example}</answer>" in user["content"]
        else:
            assert user["content"] == "" and "<answer>" not in system["content"]


# Play


def test_an_invalid_turn_earns_what_the_environment_is_told():
    for reward in (0.0, -0.5):
        env = make_env("frozen_lake", invalid_reward=reward)
        play = env.play(env.dataset(1)[0], random.Random(0))
        play.respond("I give up.")
        assert play.outcome.episode_return == reward and env.options["invalid_reward"] == reward
    with pytest.raises(ValueError, match=r"invalid_reward must be between -10\.0 and 0\.0, got 0\.5"):
        make_env("frozen_lake", invalid_reward=0.5)


@every_mode
def test_an_unknown_action_costs_a_tenth_once_and_the_others_are_carried_out(name, multi_turn):
    env = environment(name, multi_turn)
    row, episode = rows_of(env, 1)[0], first_episode(env)
    if episode.is_action(NONSENSE) or not has_random_player(episode):
        pytest.skip(f"{name} has no unknown actions, or no random player")
    for seed in range(20):
        play, beyond = env.play(row, random.Random(0)), env.play(row, random.Random(0))
        action = play.episode.random_action(random.Random(seed))
        known = [action] * (env.max_actions - 1)
        without = env.play(row, random.Random(0))
        play.take([NONSENSE, *known])
        without.take(known or [NONSENSE])
        assert play.outcome.valid_turns == 0
        assert play.outcome.episode_return == pytest.approx(without.outcome.episode_return - 0.1 * bool(known))
        assert play.episode.observation() == without.episode.observation()
        beyond.take([action] * env.max_actions + [NONSENSE])
        assert beyond.outcome.valid_turns == 1


@every_mode
def test_play_ends_with_its_turns(name, multi_turn):
    env = environment(name, multi_turn)
    play = env.play(rows_of(env, 1)[0], random.Random(0))
    messages = [play.respond("") for _ in range(env.max_turns)]
    assert [message is None for message in messages] == [False] * (env.max_turns - 1) + [True]
    assert play.done and not play.episode.done
    assert play.outcome.turns == env.max_turns
    assert play.outcome.episode_return == pytest.approx(-0.1 * env.max_turns)


@every_mode
def test_the_return_is_the_sum_of_the_rewards_that_were_told(name, multi_turn):
    env, rng = environment(name, multi_turn), random.Random(0)
    for row in rows_of(env, 20):
        read, taken = env.play(row, random.Random(1)), env.play(row, random.Random(1))
        told = []
        for actions in turns(read, rng):
            status = taken.take(actions)
            message = read.respond(format_response("", actions))
            assert message is None or message.startswith(status)
            (reward,) = re.findall(r"Reward (-?\d+(?:\.\d+)?(?:e-?\d+)?)\.(?: |$)", status)
            told.append(float(reward))
        assert read.outcome == taken.outcome
        assert (taken.outcome.turns, taken.done) == (len(told), True)
        assert sum(told) == pytest.approx(read.outcome.episode_return, abs=1e-4)


@pytest.mark.slow
@every_mode
def test_plays_side_by_side_are_plays_one_by_one(name, multi_turn):
    env = environment(name, multi_turn)
    rows = rows_of(env, 12)
    texts = first_texts(env, rows)

    def outcomes(workers):
        plays = [env.play(row, random.Random(0)) for row in rows]
        messages = respond_all(plays, texts, workers)
        return messages, [play.outcome for play in plays]

    assert outcomes(workers=4) == outcomes(workers=1)


# Hostile text


PIECES = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "||", " ", "\n", "<", "\x00", "\ud800", "1"])


@cache
def _fuzzed(name, multi_turn):
    """A task, actions that its players take there, and the best return that its solver reaches."""
    env = environment(name, multi_turn)
    row = rows_of(env, 1)[0]
    known, best = {NONSENSE, env.example}, math.inf
    if has_random_player(first_episode(env)):
        known |= {env.episode(row, random.Random(0)).random_action(random.Random(seed)) for seed in range(20)}
    if has_solver(first_episode(env)):
        plans = [env.episode(row, random.Random(0)).plan(random.Random(seed))[1] for seed in range(5)]
        known |= {action for plan in plans for action in plan}
        best = max(solve(env.play(row, random.Random(seed)), random.Random(seed)).episode_return for seed in range(20))
    return env, row, sorted(known), best


@pytest.mark.slow
@every_fuzzed_mode
@settings(max_examples=60)
@given(data=st.data())
def test_no_text_raises_and_none_earns_more_than_the_solver(name, multi_turn, data):
    env, row, known, best = _fuzzed(name, multi_turn)
    actions = st.lists(st.one_of(st.text(max_size=30), st.sampled_from(known)), max_size=12)
    texts = st.one_of(
        st.text(max_size=60), st.lists(PIECES, max_size=20).map("".join), actions.map(lambda a: format_response("", a))
    )
    play = env.play(row, random.Random(0))
    while not play.done:
        message = play.respond(data.draw(texts))
        assert play.done == (message is None)
    assert math.isfinite(play.outcome.episode_return)
    assert play.outcome.episode_return <= best + 1e-9
    assert 1 <= play.outcome.turns <= env.max_turns


@every_fuzzed_mode
@settings(max_examples=60)
@given(action=st.text())
def test_no_text_in_an_action_raises(name, multi_turn, action):
    env, row, _, _ = _fuzzed(name, multi_turn)
    episode = env.episode(row, random.Random(0))
    if episode.is_action(action):
        assert math.isfinite(episode.step(action))
        assert isinstance(episode.observation(), str)


# Reward functions


@every_single_turn
def test_reward_functions_play_single_turns(name):
    env = environment(name)
    rows = [row for row in rows_of(env, 8) for _ in range(3)]
    texts = first_texts(env, rows)
    (returns,) = env.reward_funcs
    assert (returns.__name__, env.success_func.__name__) == (f"{name}_return", f"{name}_success")
    plays = env.plays([row["seed"] for row in rows], columns_of(rows))
    respond_all(plays, texts)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    arguments = {"prompts": [row["prompt"] for row in rows], "completions": completions, **columns_of(rows)}
    assert returns(**arguments) == [play.outcome.episode_return for play in plays]
    assert env.success_func(**arguments) == [float(play.outcome.success) for play in plays]


def acted(num_actions, acting_turns, effective_turns):
    return {"num_actions": num_actions, "acting_turns": acting_turns, "effective_turns": effective_turns}


@every_mode
def test_episodes_that_were_played_are_not_played_again(name, multi_turn):
    env = environment(name, multi_turn)
    row = rows_of(env, 1)[0]
    episodes = [
        {"episode_return": 0.25, "success": False, "turns": 4, "valid_turns": 3, **acted(5, 3, 1)},
        {"episode_return": 7.5, "success": True, "turns": 2, "valid_turns": 2, **acted(4, 2, 2)},
    ]
    rewards, logged = rewards_of(env, [row, row], **{EPISODE: episodes})
    assert rewards == [0.25, 7.5]
    assert rewards_of(env, [row, row], env.success_func, **{EPISODE: episodes})[0] == [0.0, 1.0]
    assert logged == {
        f"env/{name}/failed": 0.0,
        f"env/{name}/success": 0.5,
        f"env/{name}/return": pytest.approx(3.875),
        f"env/{name}/turns": 3.0,
        f"env/{name}/valid_rate": pytest.approx(5 / 6),
        f"env/{name}/num_actions": 4.5,
        f"env/{name}/action_is_valid": pytest.approx((3 / 4 + 1) / 2),  # every episode counts as much
        f"env/{name}/action_is_effective": pytest.approx((1 / 4 + 1) / 2),
        f"env/{name}/pass@2": 1.0,
    }


def test_pass_at_k_is_left_out_where_groups_are_not_whole():
    env = environment("frozen_lake")
    first, second = rows_of(env, 2)
    assert "env/frozen_lake/pass@2" in rewards_of(env, [first, first, second, second])[1]
    assert not [key for key in rewards_of(env, [first, first, second])[1] if "pass@" in key]


@every_multi_turn
def test_completions_of_several_turns_have_to_be_played_first(name):
    env = environment(name, multi_turn=True)
    message = rf"rollout_func must be TextRollout\(env\) for {name} with max_turns={env.max_turns}: .*max_turns=1"
    with pytest.raises(ValueError, match=message):
        rewards_of(env, rows_of(env, 2))


# Tools


@every_mode_with_tools
def test_text_and_tools_give_the_same_for_the_same_actions(name, multi_turn):
    env, tool_env = environment(name, multi_turn), environment(name, multi_turn, protocol="tools")
    player, rng = tool_env.environment_factory(), random.Random(0)
    for number, row in enumerate(rows_of(env, 30)):
        play = env.play(row, random.Random(number))
        assert player.reset(**row) == play.episode.observation()
        player._play = tool_env.play(row, random.Random(number))  # the same chance events
        for actions in turns(play, rng):
            told, message = player._take(actions), play.respond(format_response("", actions))
            assert player._play.outcome == play.outcome
            if message is None:
                assert told.endswith("The episode is over.")
            else:
                shown = play.episode.observation()
                assert told.endswith(f"\n{shown}") and shown in message
        before = player._play.outcome
        assert player._take([env.example]) == "The episode is over."
        assert player._play.outcome == before


@every_mode_with_tools
def test_tools_can_be_described_to_a_model(name, multi_turn):
    player = environment(name, multi_turn, protocol="tools").environment_factory()
    names = [key for key in dir(player) if not key.startswith("_") and key not in ("reset", "get_reward")]
    assert names  # TRL makes a tool of each of them
    for tool in names:
        schema = get_json_schema(getattr(player, tool))["function"]
        assert schema["name"] == tool and schema["description"]
        assert all(parameter["description"] for parameter in schema["parameters"]["properties"].values())


@every_mode_with_tools
def test_arguments_of_a_wrong_type_make_a_turn_invalid(name, multi_turn):
    env = environment(name, multi_turn, protocol="tools")
    player, row = env.environment_factory(), rows_of(env, 1)[0]
    for actions in [[1], [None], [["Up"]], [{"a": 1}], [], None, 7, {"a": 1}]:
        player.reset(**row)
        assert player._take(actions).startswith("Invalid answer. Reward -0.1.")
        assert player._play.outcome == EpisodeOutcome(
            -0.1, success=False, turns=1, valid_turns=0, measures=player._play.episode.measures
        )


@every_mode
def test_tools_are_for_the_tool_protocol(name, multi_turn):
    with pytest.raises(ValueError, match="protocol must be 'tools' for an environment_factory, got 'text'"):
        _ = environment(name, multi_turn).environment_factory


@every_mode
def test_demonstrations_are_whole_episodes_that_solve_their_tasks(name, multi_turn):
    env = make_env(name, multi_turn=multi_turn)
    if not has_solver(first_episode(env)):
        pytest.skip(f"{name} has no solver")
    rows, told = rows_of(env, 30, seed=7), demonstrations_of(env, 30, seed=7)
    for row, conversation in zip(rows, told, strict=True):
        play = env.play(row, random.Random(0))
        assert conversation["prompt"] == row["prompt"]
        *earlier, last = conversation["completion"]
        answers = [answer["content"] for answer in earlier[::2]]
        for number, (answer, reply) in enumerate(zip(earlier[::2], earlier[1::2], strict=True)):
            check_answer(env, answer)
            told_now = {"role": "user", "content": play.respond(answer["content"])}
            assert reply == told_now or reply["content"] in replies(env, row, answers[: number + 1])
        check_answer(env, last)
        assert play.respond(last["content"]) is None
        assert play.outcome.success


def replies(env, row, answers):
    """What the last of some answers may be told: chance is drawn anew."""
    for seed in range(60):
        play = env.play(row, random.Random(seed))
        yield [play.respond(answer) for answer in answers][-1]


def check_answer(env, answer):
    assert answer["role"] == "assistant"
    response = parse_response(answer["content"], split=env.splits_answers)
    assert response.reasoning and 1 <= len(response.actions) <= env.max_actions


def test_demonstrations_that_chance_has_spoiled_are_left_out():
    env = FrozenLake(slip=0.5)
    rows = env.demonstrations(100, seed=0)
    assert 0 < len(rows) < 100
    clean = FrozenLake(slip=0.0).demonstrations(100, seed=0)
    assert len(clean) == 100


def test_demonstrations_of_pictures_show_them_and_those_of_tools_are_refused():
    rows = FrozenLake(observation="image").demonstrations(3, seed=0)
    assert all(isinstance(row["image"], Image.Image) for row in rows)
    with pytest.raises(ValueError, match=r"protocol must be 'text' for demonstrations, .* got 'tools'"):
        FrozenLake(protocol="tools").demonstrations(1, seed=0)


def test_tasks_without_a_solver_say_so():
    class Unsolvable(Episode):
        def observation(self):
            return ""

        def is_action(self, action):
            return True

        def step(self, action):
            return 0.0

    class NoSolver(FrozenLake):
        def episode(self, row, rng):
            return Unsolvable()

    with pytest.raises(NotImplementedError, match="Unsolvable has no solver"):
        NoSolver().demonstrations(1, seed=0)
    with pytest.raises(NotImplementedError, match="Unsolvable has no random baseline"):
        Unsolvable().random_action(random.Random(0))
    with pytest.raises(NotImplementedError, match="Unsolvable has no pictures"):
        Unsolvable().image()


@every_task
def test_every_task_says_whether_it_has_pictures(name):
    env = environment(name)
    episode = env.episode(rows_of(env, 1)[0], random.Random(0))
    assert (name in PICTURED) == (type(episode).image is not Episode.image)
    assert not env.shows_images and "image" not in rows_of(env, 1)[0]


# Pictures


@every_picture
def test_pictures_come_back_from_a_dataset_as_they_were_drawn(name):
    env = environment(name, observation="image")
    assert env.shows_images and len({json.dumps(row["prompt"]) for row in env.dataset(5)}) == 1  # in no words
    for row in env.dataset(5):
        image = row["image"]
        assert isinstance(image, Image.Image) and image.mode == "RGB"
        assert min(image.size) >= 64 and max(image.size) <= 1024
        drawn = env.episode(row, random.Random(0)).image()
        assert drawn.mode == "RGB" and ImageChops.difference(image, drawn).getbbox() is None


@every_picture
def test_pictures_are_refused_where_later_turns_are_text(name):
    with pytest.raises(ValueError, match=r"observation .*got 'image'"):
        environment(name, multi_turn=True, observation="image")


@every_picture
@pytest.mark.parametrize("multi_turn", [False, True])
def test_pictures_begin_and_answer_the_calls_of_tools(name, multi_turn):
    env = environment(name, multi_turn, protocol="tools", observation="image")
    player, row = env.environment_factory(), env.dataset(1)[0]
    assert "image" not in row  # TRL would look for a place for it
    (picture,) = player.reset(**row)
    drawn = env.episode(row, random.Random(0)).image()
    assert picture["image"].tobytes() == drawn.tobytes()
    answers = [player.move([NONSENSE]) for _ in range(env.max_turns - 1)]
    for shown, words in answers:
        assert shown["image"].tobytes() == drawn.tobytes()
        assert words == {"type": "text", "text": "Invalid answer. Reward -0.1."}
