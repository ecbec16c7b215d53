"""Episodes on disk: what was played, in Parquet and in JSONL alike, whoever wrote the texts."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_same_parameters, parameters_of
from every_task import every_picture, rows_of
from played_episodes import lake
from players import GROUP, Player, make_trainer, multi_turn_args
from players import policy_fixture as policy_fixture
from players import tokenizer_fixture as tokenizer_fixture
from reported_runs import HOSTILE
from transformers import AutoModelForCausalLM

from ragen2_trl import EpisodeCallback, SNRFilteredGRPOTrainer, TextRollout, cli
from ragen2_trl.callbacks.episodes import in_groups, whole_groups
from ragen2_trl.envs import TaskMixture, format_response, make_env
from ragen2_trl.envs.drawing import draw_board
from ragen2_trl.record.run import read_run
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


# Episodes that training keeps


def saved(args):
    folder = Path(args.output_dir) / "_episodes"
    return {int(path.stem.split("_")[1]): read_episodes(path) for path in sorted(folder.glob("train_*.jsonl"))}


def test_what_was_played_is_saved_and_training_is_the_same(policy_path, tokenizer, make_args):
    parameters = []
    for every in (None, 2):
        policy = AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=1024)
        args = multi_turn_args(make_args, max_steps=4)
        trainer, _ = make_trainer(policy, tokenizer, args)
        player = Player(trainer, tokenizer)
        if every is not None:
            trainer.add_callback(EpisodeCallback(trainer, every))
        trainer.train()
        parameters.append(parameters_of(trainer))
    assert_same_parameters(*parameters)
    assert list(saved(args)) == [1, 3]
    said = [tokenizer.decode(answer, skip_special_tokens=True) for _, answers, _ in player.calls for answer in answers]
    rows = {row["step"]: row for row in trainer.state.log_history if "loss" in row}
    for step, episodes in saved(args).items():
        assert [(one.group, one.sample) for one in episodes] == [(n // GROUP, n % GROUP) for n in range(16)]
        assert {one.step for one in episodes} == {step}
        for one in episodes:
            texts = [message["content"] for message in one.messages if message["role"] == "assistant"]
            assert len(texts) == len(one.turns) == len(one.boards) - 1 and set(texts) <= set(said)
            assert [turn.valid for turn in one.turns] == ["no tags" not in text for text in texts]
        assert rows[step]["env/frozen_lake/success"] == sum(one.success for one in episodes) / 16
        returns = [one.episode_return for one in episodes]
        assert rows[step]["env/frozen_lake/return"] == pytest.approx(sum(returns) / 16)
    assert read_run(Path(args.output_dir)).step == 4


def test_single_turns_are_kept_by_the_reward_function_up_to_whole_groups(policy_path, tokenizer, make_args):
    env = make_env("frozen_lake")
    policy = AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=512)
    args = make_args(per_device_train_batch_size=16, max_steps=1)
    dataset = env.dataset(8, seed=0)
    trainer = SNRFilteredGRPOTrainer(policy, env.reward_funcs, args, dataset, processing_class=tokenizer)
    trainer.add_callback(EpisodeCallback(trainer, max_episodes=10))
    trainer.train()
    ((_, episodes),) = saved(args).items()
    assert len(episodes) == 2 * GROUP and len({one.seed for one in episodes}) == 2
    assert all([message["role"] for message in one.messages] == ["system", "user", "assistant"] for one in episodes)


@pytest.mark.parametrize("by_rollout", [False, True])
def test_episodes_of_all_tasks_of_a_mixture_are_kept(by_rollout, policy_path, tokenizer, make_args):
    mixture = TaskMixture([make_env("frozen_lake"), make_env("bandit")])
    policy = AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=512)
    args = make_args(per_device_train_batch_size=16, max_steps=2)
    rollout = {"rollout_func": TextRollout(mixture)} if by_rollout else {}
    trainer = SNRFilteredGRPOTrainer(
        policy, mixture.reward_funcs, args, mixture.dataset(8, seed=0), processing_class=tokenizer, **rollout
    )
    trainer.add_callback(EpisodeCallback(trainer, every=1))
    trainer.train()
    episodes = [one for step in saved(args).values() for one in step]
    assert len(episodes) == 32
    assert {one.task for one in episodes} == {"frozen_lake", "bandit"}


def test_a_training_that_begins_anew_leaves_no_later_episodes(policy, tokenizer, make_args):
    args = multi_turn_args(make_args, max_steps=1)
    folder = Path(args.output_dir) / "_episodes"
    save_episodes(folder, lake(0.5), "train", 11)
    save_episodes(folder, lake(0.5), "evaluation", 0)
    trainer, _ = make_trainer(policy, tokenizer, args)
    Player(trainer, tokenizer)
    trainer.add_callback(EpisodeCallback(trainer))
    trainer.train()
    assert sorted(path.name for path in folder.glob("*.jsonl")) == ["evaluation_00000.jsonl", "train_00001.jsonl"]


def test_bad_arguments_are_named(policy, tokenizer, make_args):
    args = multi_turn_args(make_args)
    trainer, _ = make_trainer(policy, tokenizer, args)
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        EpisodeCallback(trainer, 0)


def test_groups_that_lie_on_several_processes_come_together():
    whole = lake(0.5, members=4, tasks=2)
    other = lake(0.5, seed=5, members=4, tasks=2)
    # Two processes, two generations of a step.
    parts = [{(0, 0): whole[:3], (1, 0): other[:6]}, {(0, 0): whole[3:], (1, 0): other[6:]}]
    joined = in_groups(parts)
    assert [(one.group, one.sample) for one in joined] == [(g, s) for g in range(4) for s in range(4)]
    assert [one.seed for one in joined] == [one.seed for one in [*whole, *other]]
    assert len(whole_groups(joined, 11)) == 8 and len(whole_groups(joined, 1)) == 4
    assert whole_groups([], 5) == []


def test_episodes_that_cannot_be_written_do_not_end_the_training(policy, tokenizer, make_args, caplog):
    args = multi_turn_args(make_args, max_steps=2)
    trainer, _ = make_trainer(policy, tokenizer, args)
    Player(trainer, tokenizer)
    trainer.add_callback(EpisodeCallback(trainer, 1))
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    (Path(args.output_dir) / "_episodes").write_text("no folder")
    trainer.train()
    assert trainer.state.global_step == 2 and "Saving the episodes" in caplog.text
