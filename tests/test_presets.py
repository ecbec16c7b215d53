"""Presets of RAGEN-2: what a player sees, may do and gets, as in the reference; its sentences are ours."""

import hashlib
import itertools
import random

import pytest
import yaml

from ragen2_trl.envs import ENVIRONMENTS, PRESETS, make_env, options_of, presets_of
from ragen2_trl.envs.ragen2.protocol import TEXTS
from ragen2_trl.envs.random_baseline import random_baseline

COORDINATES = "Coordinates: \nBoard size: 6 rows x 6 cols (zero-indexed)."

ROOMS = {123: "######/######/#O####/#XP###/#__###/######", 125: "######/#__O_#/#____#/#_X__#/#_P###/######"}

# SHA-256 of the grids of seeds 123 to 634, and of 10000 to 10799, joined by empty lines.
HASHES = {
    "sokoban": (
        "aefc3a61de148ccf1615380a4c518c82fbaed0d80643815c5d55d3c676b740e6",
        "87a1a2f93cd600ab0d77ff7e1ebed1d22c3d7d1ac2228d091f4b4c525a072be6",
    ),
    "frozen_lake": (
        "96cd1c9aba3339de29acd76135232e553132eebb43e0d6b639fb85915a10da68",
        "7a932d4dd1df2d93d027d3b637594d94befa813d1cac1de51acbcb43d5e80607",
    ),
}


# Texts that are short and told apart, for whoever looks at the layout.
MARKS = {
    "helper": "Helper. ",
    "instruction": "Rules.\n",
    "legend": "\nLegend:\n{legend}",
    "actions": "\nActions:\n{actions}\nAt most {total}.",
    "warning": "Warning.\n",
    "left": "{left} left. ",
    "format": "Format {format}. ",
    "length": "Length.",
}

FORM = "Format <think> [Your thoughts] </think> <answer> [your answer] </answer>. Length."

GRIDDED = ["sokoban", "frozen_lake"]


def ragen2(name, **options):
    return make_env(name, preset="ragen2", **options)


@pytest.fixture(name="marked")
def marked_fixture(tmp_path):
    """Makes a task under the preset with the texts of `MARKS`."""
    path = tmp_path / "prompts.yaml"
    path.write_text(yaml.safe_dump(MARKS))
    return lambda name, **options: ragen2(name, prompts=str(path), **options)


def numbered_play(env, seed):
    (row,) = itertools.islice(env.numbered_tasks(iter([seed]), "test", None), 1)
    return env.play(row, random.Random(0))


def said(*actions):
    return f"I go.</think> <answer>{' || '.join(actions)}</answer>"


def test_the_check_grid_of_the_larger_room_comes_out():
    env = ragen2("sokoban", size=8, boxes=2, search_depth=10, observation="grid")
    shown = "########/#_____##/#__O__##/#_X#__##/#XP___##/#O___###/#_##_###/########"
    assert numbered_play(env, 123).episode.observation() == shown.replace("/", "\n")


@pytest.mark.parametrize("name", GRIDDED)
def test_all_validation_grids_are_the_reference_s(name):
    env = ragen2(name, observation="grid")
    grids = [numbered_play(env, seed).episode.observation() for seed in range(123, 635)]
    assert hashlib.sha256("\n\n".join(grids).encode()).hexdigest() == HASHES[name][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDDED)
def test_the_first_training_grids_are_the_reference_s(name):
    env = ragen2(name, observation="grid")
    grids = [numbered_play(env, seed).episode.observation() for seed in range(10_000, 10_800)]
    assert hashlib.sha256("\n\n".join(grids).encode()).hexdigest() == HASHES[name][1]


@pytest.mark.parametrize("name", GRIDDED)
def test_reference_splits_are_numbered_from_10000_and_123(name):
    env = ragen2(name, split="ragen2")
    for split, first in (("train", 10_000), ("test", 123)):
        assert env.dataset(3, seed=42, split=split)["seed"][:] == [first, first + 1, first + 2]


# Layout


def test_messages_of_sokoban_are_laid_out_as_in_the_reference(marked):
    env = marked("sokoban")
    legend = "#: wall, _: empty, O: target, √: box on target, X: box, P: player, S: player on target"
    play = numbered_play(env, 123)
    system, user = env.prompt({"seed": 123, "room": ROOMS[123].replace("/", "\n")})
    assert system["content"] == (f"Helper. Rules.\n\nLegend:\n{legend}\nActions:\nUp, Down, Left, Right\nAt most 10.")
    room = "######\n######\n#O####\n#XP###\n#__###\n######"
    state = f"{COORDINATES}\nTargets: (2, 1)\nBoxes: (3, 1)\nPlayer: (3, 2)\nGrid Map: \n{room}"
    assert user["content"] == f"\nTurn 1:\nState:\n{state}\n10 left. {FORM}"
    moved = state.replace("(3, 2)", "(4, 1)").replace("#XP###\n#__###", "#X_###\n#P_###")
    assert play.respond(said("Down", "Left")) == f"Reward:\n-0.2\n\nTurn 2:\nState:\n{moved}\n8 left. {FORM}"
    warned = f"Reward:\n0\n\nTurn 3:\nState:\n{moved}\nWarning.\n8 left. {FORM}"
    assert play.respond("What now?") == warned


def test_messages_of_frozen_lake_are_laid_out_as_in_the_reference(marked):
    env = marked("frozen_lake")
    play = numbered_play(env, 123)
    system, user = env.prompt({"seed": 123, "grid": "FFFF\nFFHS\nGFFF\nFFFF"})
    legend = "P: player, _: empty, O: hole, G: goal, X: player in hole, √: player on goal"
    assert system["content"] == (f"Helper. Rules.\n\nLegend:\n{legend}\nActions:\nLeft, Down, Right, Up\nAt most 10.")
    state = (
        "Coordinates: \nBoard size: 4 rows x 4 cols (zero-indexed).\nStart: (1, 3)\nGoal: (2, 0)\nPlayer: (1, 3)\n"
        "Holes: (1, 2)\nGrid Map: \n____\n__OP\nG___\n____"
    )
    assert user["content"] == f"\nTurn 1:\nState:\n{state}\n10 left. {FORM}"
    # The start is kept in the list and is ice in the grid; rewards are whole numbers.
    moved = state.replace("Player: (1, 3)", "Player: (2, 3)").replace("__OP\nG___", "__O_\nG__P")
    assert play.respond(said("Down")) == f"Reward:\n0\n\nTurn 2:\nState:\n{moved}\n9 left. {FORM}"
    assert "Holes" not in numbered_play(env, 125).episode.observation()


def test_bandit_has_no_rules_and_says_nothing_of_payments(marked):
    env = ragen2("bandit")
    row = env.dataset(1, seed=0).to_list()[0]
    system, user = row["prompt"]
    assert system["content"] == "You're a helpful assistant. "
    state = user["content"].split("State:\n")[1].rsplit("\n", 1)[0]
    assert all(state.count(name) == 2 for name in row["names"]) and not any(letter.isdigit() for letter in state)
    assert [line.endswith(" ") for line in state.split("\n")].count(True) == 3
    assert marked("bandit").prompt(row)[1]["content"].endswith(f"\n1 left. {FORM}")


@pytest.mark.parametrize(("symbols", "line"), [("W.GCBA@", "WBAWWW"), ("#_O√XPS", "#XP###")])
def test_other_symbols_have_the_right_legend(symbols, line):
    env = ragen2("sokoban", symbols=symbols)
    play = numbered_play(env, 123)
    assert line in play.episode.observation().split("\n")
    cells = ("wall", "empty", "target", "box on target", "box", "player", "player on target")
    assert ", ".join(map("{}: {}".format, symbols, cells)) in env.system_text()
    _, _, target, _, box, player, _ = symbols
    reasoning, _ = play.episode.plan(random.Random(0))
    assert reasoning.startswith(f"{player} c4, {box} b4, {target} b3")
    lake = ragen2("frozen_lake", symbols="@.^$!+")
    assert "_" not in numbered_play(lake, 123).episode.observation().split("Grid Map")[1]
    assert "@: player, .: empty, ^: hole, $: goal" in lake.system_text()


@pytest.mark.parametrize("symbols", ["W.GCBA", "WWGCBA@", "W GCBA@", 7])
def test_symbols_that_cannot_be_told_apart_are_refused(symbols):
    with pytest.raises(ValueError, match="symbols must be 7 different characters"):
        ragen2("sokoban", symbols=symbols)


# Response, turn reward as told, penalty, whether warned, actions used, whether the episode is over. In room 125 the
# player can go up once and then pushes the box onto no target; two actions a turn.
OUTCOMES = {
    "one of two": (said("Up", "jump"), -0.1, True, False, 1),
    "the second of two": (said("jump", "Up"), -0.1, True, False, 1),
    "none of two": (said("jump", "fly"), 0, True, True, 0),
    "an empty answer": (said(""), 0, True, True, 0),
    "nothing but separators": (said("", ""), 0, True, True, 0),
    "unreadable": ("Up", 0, True, True, 0),
    "words between the blocks": ("a</think> so <answer>Up</answer>", 0, True, True, 0),
    "letter case aside": ("a</think><answer>UP||down</answer>", -0.2, False, False, 2),
    "three names": (said("Up", "Down", "Up"), -0.2, False, False, 2),
    "a third that is none": (said("Up", "Down", "jump"), -0.2, False, False, 2),
}


@pytest.mark.parametrize("preset", ["ragen2", None])
@pytest.mark.parametrize("case", OUTCOMES)
def test_partly_valid_turns_have_the_outcomes_of_the_reference(case, preset):
    text, told, penalised, warned, used = OUTCOMES[case]
    options = {"preset": preset} if preset else {"multi_turn": True, "max_total_actions": 10}
    env = make_env("sokoban", **options)
    play = env.play({"seed": 125, "room": ROOMS[125].replace("/", "\n")}, random.Random(0))
    message = play.respond(text)
    assert play.outcome.episode_return == pytest.approx(told - 0.1 * penalised)
    assert (play.executed, play.actions_left, play.outcome.valid_turns) == (used, 10 - used, not penalised)
    if preset:
        assert message.startswith(f"Reward:\n{told}\n\nTurn 2:\n")
        assert (TEXTS["warning"] in message) == warned
    else:
        kind = "Invalid answer. " if not used else "Partly invalid answer. " if penalised else ""
        assert message.startswith(f"{kind}Reward {play.outcome.episode_return:g}. Turn 2 of 5.")


def test_tags_left_inside_a_response_are_deleted_in_the_preset_and_text_by_default():
    text = "a</think>b</think> <answer>Up</answer>"
    read = ragen2("sokoban").read(text)
    assert (read.reasoning, read.actions) == ("ab", ("Up",))
    assert make_env("sokoban").read(text) is None
    assert ragen2("sokoban").read("a</think><answer><answer>Up<think> || Down</answer>").actions == ("Up", "Down")
    assert ragen2("sokoban").read("a</think></answer></think><answer>Up</answer>").reasoning == "a"


def test_with_one_action_left_the_first_of_two_ends_the_episode():
    play = numbered_play(ragen2("sokoban"), 125)
    for used in (2, 4, 6, 7, 9):
        actions = ["Left", "Left"] if used != 7 else ["Left", "jump"]
        over = play.respond(said(*actions)) is None
    assert over  # the fifth turn is the last
    own = make_env("sokoban", multi_turn=True, max_total_actions=3)
    play = own.play({"seed": 125, "room": ROOMS[125].replace("/", "\n")}, random.Random(0))
    assert play.respond(said("Left", "Left")) is not None and play.respond(said("Left", "Left")) is None
    assert (play.executed, play.outcome.episode_return) == (3, pytest.approx(-0.3))
    assert not play.outcome.success


def test_an_action_that_ends_the_episode_is_the_last_one():
    play = numbered_play(ragen2("sokoban"), 10001)  # pushed onto the target from the right
    play.respond(said("Right", "Up"))
    assert play.respond(said("Left", "jump")) is None
    assert play.outcome.success and play.outcome.episode_return == pytest.approx(-0.2 + 10.9 - 0.1)


def test_rewards_are_told_as_unrounded_sums():
    room = "########\n#______#\n#_O____#\n#PXO_X_#\n#______#\n#______#\n#______#\n########"
    env = ragen2("sokoban", size=8, boxes=2, search_depth=10)
    play = env.play({"seed": 0, "room": room}, random.Random(0))
    assert play.respond(said("Right", "Right")).startswith("Reward:\n-0.20000000000000007\n\nTurn 2:\n")


def test_bandit_pays_as_the_reference_and_success_is_the_bold_arm():
    env = ragen2("bandit")
    row = {"seed": 0, "names": ["Teacher", "Trader"], "bold": "Trader"}
    plays = [env.play(row, random.Random(seed)) for seed in range(400)]
    for number, play in enumerate(plays):
        assert play.respond(said("trader" if number % 2 else "TEACHER")) is None
    assert {play.outcome.episode_return for play in plays[::2]} == {0.1}
    assert {play.outcome.success for play in plays[::2]} == {False}
    bold = [play.outcome for play in plays[1::2]]
    assert all(outcome.success for outcome in bold)
    assert 0.15 < sum(outcome.episode_return for outcome in bold) / len(bold) < 0.35
    names = {
        split: {name for row in env.dataset(300, 0, split) for name in row["names"]} for split in ("train", "test")
    }
    assert (len(names["train"]), len(names["test"])) == (24, 16) and "Cryptominer" in names["train"]


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
        ("- a", "must map keys of .* to text"),
        ("helper: 7", "must map keys of .* to text"),
        ("helper: [", "is not valid YAML or JSON"),
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


@pytest.mark.parametrize("name", ["countdown", "frozen_lake"])
def test_numbered_tasks_are_never_made_impossible(name):
    options = {"data": "rows"} if name == "countdown" else {}
    with pytest.raises(ValueError, match=r"impossible with split='ragen2' must be one of \[0.0\], got 0.5"):
        ragen2(name, impossible=0.5, split="ragen2").dataset(1, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "floor"), [("sokoban", 0.178), ("frozen_lake", 0.245)])
def test_the_random_baseline_of_ragens_validation_is_the_one_that_was_measured(name, floor):
    env = ragen2(name, split="ragen2")
    assert random_baseline(env, env.dataset(512, split="test"), samples=8) == pytest.approx(floor, abs=0.02)


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
