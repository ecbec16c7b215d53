"""Presets of RAGEN-2 from outside: what is refused, the floor of a player who guesses, the command line."""

import pytest
from test_presets import ragen2

from ragen2_trl.envs import ENVIRONMENTS, make_env, options_of
from ragen2_trl.envs.random_baseline import random_floor

# What is refused


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sokoban", {"preset": "paper"}, r"preset of sokoban must be one of \['ragen2'\], got 'paper'"),
        ("sokoban", {"max_turns": 3}, "max_turns must be 5 with preset='ragen2' of sokoban, got 3"),
        ("sokoban", {"protocol": "tools"}, "protocol must be 'text' with preset='ragen2' of sokoban, got 'tools'"),
        ("frozen_lake", {"frozen": 0.8}, "frozen must be 0.9 with preset='ragen2' of frozen_lake, got 0.8"),
        ("bandit", {"multi_turn": True}, "multi_turn must be False with preset='ragen2' of bandit, got True"),
        ("sokoban", {"observation": "image"}, "observation must be in words in several turns of the text protocol"),
        ("sokoban", {"wind": 1}, r"options of sokoban must be among \['size', .*'preset'\], got \['wind'\]"),
        ("sokoban", {"prompts": "nowhere.yaml"}, "nowhere.yaml"),
    ],
)
def test_what_contradicts_a_preset_is_named_in_one_line(name, options, message):
    with pytest.raises((ValueError, OSError), match=message) as raised:
        make_env(name, **{"preset": "ragen2", **options})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("helper: a\nwarnings: b", r"keys of prompts must be among \['helper', .*\], got \['warnings'\]"),
        ("- a", "prompts must hold texts by the keys"),
        ("helper: 7", "prompts must hold texts by the keys"),
        ("helper: [", "prompts must be a YAML or JSON file"),
    ],
)
def test_prompts_of_another_form_are_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "prompts.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        ragen2("sokoban", prompts=str(path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("option", ["force_think", "wording"])
def test_tools_have_neither_tags_nor_messages_of_the_reference(option):
    value = {"force_think": True, "wording": "ragen2"}[option]
    with pytest.raises(ValueError, match=f"{option} with protocol='tools' must be one of"):
        make_env("sokoban", protocol="tools", **{option: value})
    with pytest.raises(ValueError, match="prompts must be None but with wording='ragen2' or a preset"):
        make_env("sokoban", prompts="texts.yaml")


def test_a_room_of_our_own_needs_two_actions_a_box():
    with pytest.raises(ValueError, match="max_total_actions must be between 4 and 10000, got 3"):
        make_env("sokoban", multi_turn=True, boxes=2, max_total_actions=3)


def test_a_preset_cannot_be_served():
    server = pytest.importorskip("ragen2_trl.openenv.server")
    with pytest.raises(ValueError, match=r"env must be made without \['preset'\], which clients do not learn of"):
        server.make_server(ragen2("sokoban"))
    with pytest.raises(ValueError, match=r"env must be made without \['force_think'\]"):
        server.make_server(make_env("sokoban", force_think=True))


# The floor


def test_the_random_floor_is_what_a_naive_player_reaches():
    env = ragen2("bandit")
    assert random_floor(env, env.dataset(100, split="test"), samples=8) == pytest.approx(0.5, abs=0.06)
    env = make_env("sokoban", multi_turn=True)
    rows = env.dataset(20, split="test").to_list()
    assert random_floor(env, rows) == random_floor(env, rows)
    env.workers = 2  # where steps wait for something
    assert random_floor(env, rows) is None
    assert not ENVIRONMENTS["deepcoder"].quick


@pytest.mark.slow
@pytest.mark.parametrize(("name", "floor"), [("sokoban", 0.178), ("frozen_lake", 0.245)])
def test_the_random_floor_of_the_reference_s_validation_is_the_one_that_was_measured(name, floor):
    env = ragen2(name, split="reference")
    assert random_floor(env, env.dataset(512, split="test"), samples=8) == pytest.approx(floor, abs=0.02)


# The command line


def test_the_list_of_tasks_names_options_and_presets(capsys, monkeypatch):
    from ragen2_trl.cli.arguments import EnvironmentArguments
    from ragen2_trl.cli.envs import main
    from ragen2_trl.cli.typed import InputError

    monkeypatch.setenv("COLUMNS", "300")
    main([])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ENVIRONMENTS) and "search_depth" in shown and "ragen2" in shown
    for name in ENVIRONMENTS:
        main([name])
        shown = capsys.readouterr().out
        for option in options_of(name):
            (row,) = [line for line in shown.split("preset=")[0].splitlines() if line.startswith(f"│ {option} ")]
            assert len(row.split("│")[3].strip()) > 20, (name, option)  # it says what the option is
    with pytest.raises(InputError, match=r"name must be one of .*, got 'chess'"):
        main(["chess"])
    arguments = EnvironmentArguments(env_name="sokoban", env_args=["preset=ragen2", "observation=grid"])
    env = arguments.make_env()
    assert (env.preset, env.observation) == ("ragen2", "grid")
