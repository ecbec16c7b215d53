"""Episodes on disk: what was played, in Parquet and in JSONL alike, whoever wrote the texts."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from every_task import every_picture, rows_of
from reported_runs import HOSTILE

from ragen2_trl import cli
from ragen2_trl.envs import format_response, make_env
from ragen2_trl.envs.drawing import draw_board
from ragen2_trl.record.saved_episodes import episodes_of, read_episodes, save_episodes

SECRET = f"sk-{'0123456789abcdef' * 2}"


def played(texts, members=2, **options):
    """Plays of two FrozenLake tasks, each `members` times, whose players say `texts` one after the other."""
    env = make_env("frozen_lake", **{"multi_turn": True, "size": 3, **options})
    rows = env.dataset(2, seed=0).select([0] * members + [1] * members)
    plays = env.plays(rows["seed"][:], {"grid": rows["grid"][:]})
    for play in plays:
        for text in texts:
            play.respond(text)
    return rows, plays


def records(texts, **options):
    rows, plays = played(texts)
    return episodes_of(rows["prompt"][:], rows["seed"][:], plays, **options)


def test_a_play_keeps_what_was_said_named_and_seen():
    _, plays = played(["no form", format_response("Go.", ["Up", "Up", "Down", "Left"])], members=1)
    for play in plays:
        wrong, right = play.turns
        assert (wrong.text, wrong.actions, wrong.valid, wrong.reward) == ("no form", (), False, -0.1)
        assert (right.actions, right.valid, right.reward) == (("Up", "Up"), True, play.turn_rewards[1])
        assert wrong.board == play.first_board and right.board == play.episode.board_letters()
        assert "Invalid answer" in wrong.reply and (right.reply is None) == play.done


@every_picture
def test_a_board_is_drawn_as_the_task_draws_itself(name):
    env = make_env(name, multi_turn=True)
    for row in rows_of(env, 8):
        rng = random.Random(row["seed"])
        episode = env.episode(row, rng)
        for _ in range(6):
            assert np.array_equal(np.asarray(draw_board(episode.board_letters())), np.asarray(episode.image()))
            if not episode.done:
                episode.step(episode.random_action(rng))


def test_what_is_read_is_what_was_saved(tmp_path):
    saved = records([format_response("Go.", ["Right"]), "?", format_response("", ["Down", "Down"])], step=7)
    path = save_episodes(tmp_path / "new", saved, "train", step=7)
    assert path.name == "train_00007.jsonl"
    assert read_episodes(path) == saved
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, episode in zip(lines, saved, strict=True):
        roles = [message["role"] for message in line["messages"]]
        assert roles[:3] == ["system", "user", "assistant"]
        assert line["return"] == pytest.approx(sum(turn["reward"] for turn in line["turns"]))
        assert [turn["valid"] for turn in line["turns"]] == [turn.valid for turn in episode.turns]
        assert len(line["boards"]) == len(line["turns"]) + 1
    places = [(line["group"], line["sample"], line["step"]) for line in lines]
    assert places == [(0, 0, 7), (0, 1, 7), (1, 0, 7), (1, 1, 7)]


def test_hostile_texts_are_kept_line_by_line_and_without_credentials(tmp_path):
    text = f'{HOSTILE}\ud800\n\u2028{{"a": 1}}\r\n api_key={SECRET} https://user:{SECRET}@host/x'
    path = save_episodes(tmp_path, records([text, format_response(SECRET, [SECRET, HOSTILE])]))
    lines = path.read_text().splitlines()
    assert len(lines) == 4  # also for readers who end lines at U+2028
    for line in map(json.loads, lines):
        assert "<script>document.title='owned'</script>" in line["messages"][2]["content"]
    assert SECRET.encode() not in path.read_bytes() and len(read_episodes(path)) == 4


def test_tool_calls_and_pictures_become_messages(tmp_path):
    rows, plays = played([])
    plays[0].take(["Up"])
    plays[0].turns[0].reply = "Reward 0."
    call = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "move", "arguments": {"directions": ["Up"]}}}],
    }
    answer = {
        "role": "tool",
        "name": "move",
        "content": [{"type": "image", "image": object()}, {"type": "text", "text": "Reward 0."}],
    }
    thought = {"role": "assistant", "reasoning_content": "Hm.", "content": None}
    said = [[call, answer, thought]] + [[]] * 3
    saved = episodes_of(rows["prompt"][:], rows["seed"][:], plays, completions=said)
    (episode, *_) = read_episodes(save_episodes(tmp_path, saved))
    assert episode.messages[2:] == [
        {"role": "assistant", "content": "", "tool_calls": call["tool_calls"]},
        {"role": "tool", "content": "[picture]\nReward 0."},
        {"role": "assistant", "content": "<think>Hm.</think>"},
    ]
    assert episode.turns[0].actions == ["Up"] and len(episode.boards) == 2


def test_numbers_that_no_json_has_are_missing(tmp_path):
    broken = replace(records(["?"])[0], episode_return=math.nan)
    rows, plays = played(["?"])
    plays[0].turns[0].reward = math.inf
    assert episodes_of(rows["prompt"][:], rows["seed"][:], plays)[0].episode_return is None
    path = save_episodes(tmp_path, [replace(broken, episode_return=None)])
    assert json.loads(path.read_text())["return"] is None
    assert read_episodes(path)[0].episode_return is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": "x"}, "seed"),
        ({"seed": 10**30}, "seed"),
        ({"extra": 1}, "extra"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]\.content"),
        ({"turns": [{"actions": [1], "valid": True, "reward": None}]}, r"turns\[0\]\.actions\[0\]"),
        ({"boards": [None]}, r"boards\[0\]"),
    ],
)
def test_a_file_of_others_is_refused_in_one_line(changes, said, tmp_path):
    path = save_episodes(tmp_path, records(["?"]))
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | changes), *others]))
    with pytest.raises(ValueError, match=f"row 0 of {path.name}: .*{said}") as refused:
        read_episodes(path)
    assert "\n" not in str(refused.value)


def test_what_is_no_file_of_episodes_is_refused(tmp_path):
    path = tmp_path / "train_00001.jsonl"
    for content in ("", "{", "[1]", '{"task": "x"}'):
        path.write_text(content)
        with pytest.raises(ValueError, match=path.name):
            read_episodes(path)
    with pytest.raises(ValueError, match="name must be small letters"):
        save_episodes(tmp_path, [], name="../x")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["random", "tiny"])
def test_evaluate_saves_what_it_played_and_measures_the_same(model, tmp_path):
    command = ["evaluate", "--model", model, "--num_prompts", "3", "--num_samples", "2", "--multi_turn", "true"]
    outputs = [tmp_path / name for name in ("with.json", "without.json")]
    cli.main([*command, "--output", str(outputs[0]), "--episodes", str(tmp_path / "played")])
    cli.main([*command, "--output", str(outputs[1])])
    metrics, without = (json.loads(path.read_text()) for path in outputs)
    assert metrics == without
    episodes = read_episodes(tmp_path / "played" / "evaluation_00000.jsonl")
    assert len(episodes) == 6 and len({episode.seed for episode in episodes}) == 3
    assert metrics["success"] == sum(episode.success for episode in episodes) / 6
    assert metrics["return"] == pytest.approx(sum(episode.episode_return for episode in episodes) / 6)
    assert metrics["turns"] == sum(len(episode.turns) for episode in episodes) / 6
