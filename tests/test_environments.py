"""What holds for the options, rows and prompts of every task, whose own rules and rewards have files of their own."""

import json
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from every_task import (
    MISSING_MODES,
    MODES,
    data_of,
    demonstrations_of,
    environment,
    every_mode,
    every_task,
    first_episode,
    has_solver,
    rows_of,
    turns,
)

from ragen2_trl.envs import ENVIRONMENTS, format_response, make_env, parse_response
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
def test_every_environment_is_known_by_its_own_name(name):
    assert make_env(name).name == name == ENVIRONMENTS[name].name


@every_task
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"wind": 1},
            r"options of {name} must be among \[.*'max_turns', .*'preset'\], got \['wind'\]",
        ),
        ({"max_turns": 0}, "max_turns must be an integer between 1 and 100, got 0"),
        ({"max_actions": 101}, "max_actions must be an integer between 1 and 100, got 101"),
        ({"protocol": "json"}, r"protocol must be one of \['text'(, 'tools')?\], got 'json'"),
    ],
)
def test_bad_options_are_named_with_what_is_allowed(name, options, message):
    with pytest.raises(ValueError, match=message.format(name=name)):
        make_env(name, **options)


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
        with pytest.raises(
            ValueError, match=f"num_prompts must be given where {name} makes its tasks itself, got None"
        ):
            env.dataset()
    else:
        with pytest.raises(ValueError, match=r"num_prompts must be at most \d+, the tasks there are, got 1000000"):
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


@every_task
def test_seeds_give_other_rows_or_another_order(name):
    env = environment(name)
    assert rows_of(env, 30, seed=0) != rows_of(env, 30, seed=1)


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


@every_task
def test_rows_come_back_from_arrow_as_they_were(name):
    env = environment(name)
    rows = rows_of(env, 20)
    for row, task in zip(rows, env.tasks(0, "train", data_of(name)), strict=False):
        assert {key: row[key] for key in task} == task


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


@every_mode
def test_what_is_shown_first_is_no_matter_of_chance(name, multi_turn):
    env = environment(name, multi_turn)
    for row in rows_of(env, 20):
        shown = {env.episode(row, random.Random(seed)).observation() for seed in range(5)}
        assert len(shown) == 1
        assert env.message(env.play(row, random.Random(7))) == row["prompt"][-1]["content"]


@every_mode
def test_the_example_of_an_answer_can_be_read(name, multi_turn):
    env = environment(name, multi_turn)
    response = parse_response(format_response("reasoning", [env.example]), split=env.splits_answers)
    assert response is not None and response.actions
