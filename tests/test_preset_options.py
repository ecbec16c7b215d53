"""Presets of RAGEN-2 from outside: what is refused, the random baseline, the command line."""

import pytest
from test_presets import ragen2

from ragen2_trl.envs import ENVIRONMENTS, PRESETS, make_env, options_of, presets_of
from ragen2_trl.envs.random_baseline import random_baseline

# What is refused


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sokoban", {"preset": "paper"}, r"preset must be one of \['ragen2'\], got 'paper'"),
        ("sokoban", {"max_turns": 3}, r"options of sokoban with preset='ragen2' must .*, got \['max_turns'\]"),
        ("sokoban", {"protocol": "tools"}, r"options of sokoban with preset='ragen2' must .*, got \['protocol'\]"),
        ("frozen_lake", {"frozen": 0.8}, r"options of frozen_lake with preset='ragen2' must .*, got \['frozen'\]"),
        ("countdown", {"operators": "+-"}, r"with preset='ragen2' must .*, got \['operators'\]"),
        ("bandit", {"multi_turn": True}, r"multi_turn must be one of \[None, False\], got True"),
        ("sokoban", {"observation": "image"}, r"observation must be one of .*, got 'image'"),
        ("sokoban", {"split": "train"}, r"split must be one of \['held_out', 'ragen2'\], got 'train'"),
        ("sokoban", {"wind": 1}, r"must be among \['search_depth', .*'size', .*'preset'\], got \['wind'\]"),
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


def test_what_belongs_to_the_protocol_is_no_option_of_the_task():
    with pytest.raises(ValueError, match=r"options of sokoban must be among .*, got \['prompts', 'split'\]"):
        make_env("sokoban", prompts="texts.yaml", split="ragen2")
    with pytest.raises(ValueError, match="force_think with protocol='tools' must be one of"):
        make_env("sokoban", protocol="tools", force_think=True)


def test_a_room_of_our_own_needs_two_actions_a_box():
    with pytest.raises(ValueError, match="max_total_actions must be between 4 and 10000, got 3"):
        make_env("sokoban", multi_turn=True, boxes=2, max_total_actions=3)


@pytest.mark.parametrize("name", ["countdown", "frozen_lake"])
def test_numbered_tasks_are_never_made_impossible(name):
    options = {"data": "rows"} if name == "countdown" else {}
    with pytest.raises(ValueError, match=r"impossible with split='ragen2' must be one of \[0.0\], got 0.5"):
        ragen2(name, impossible=0.5, split="ragen2").dataset(1, **options)


# The random baseline


def test_the_random_baseline_is_what_a_naive_player_reaches():
    env = ragen2("bandit")
    assert random_baseline(env, env.dataset(100, split="test"), samples=8) == pytest.approx(0.5, abs=0.06)
    env = make_env("sokoban", multi_turn=True)
    rows = env.dataset(20, split="test").to_list()
    assert random_baseline(env, rows) == random_baseline(env, rows)
    env.workers = 2  # where steps wait for something
    assert random_baseline(env, rows) is None
    assert not ENVIRONMENTS["deepcoder"].quick


@pytest.mark.slow
@pytest.mark.parametrize(("name", "floor"), [("sokoban", 0.178), ("frozen_lake", 0.245)])
def test_the_random_baseline_of_ragens_validation_is_the_one_that_was_measured(name, floor):
    env = ragen2(name, split="ragen2")
    assert random_baseline(env, env.dataset(512, split="test"), samples=8) == pytest.approx(floor, abs=0.02)


# The command line


def test_the_list_of_tasks_names_options_and_presets(capsys, monkeypatch):
    from ragen2_trl.cli.arguments import EnvironmentArguments
    from ragen2_trl.cli.envs import main
    from ragen2_trl.cli.typed import InputError

    monkeypatch.setenv("COLUMNS", "300")
    main([])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ENVIRONMENTS) and "impossible" in shown and "ragen2" in shown
    for name in ENVIRONMENTS:
        main([name])
        shown = capsys.readouterr().out
        for table, task in zip(
            shown.split("with preset="),
            (ENVIRONMENTS[name], *(PRESETS[preset][name] for preset in presets_of(name))),
            strict=True,
        ):
            for option in options_of(task):
                (row,) = [line for line in table.splitlines() if line.startswith(f"│ {option} ")]
                assert len(row.split("│")[3].strip()) > 20, (task, option)  # it says what the option is
    with pytest.raises(InputError, match=r"environment must be one of .*, got 'chess'"):
        main(["chess"])
    arguments = EnvironmentArguments(env_name="sokoban", env_args=["preset=ragen2", "observation=grid"])
    env = arguments.make_env()
    assert (env.preset, env.observation) == ("ragen2", "grid")
