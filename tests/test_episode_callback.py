"""Episodes that training keeps: what the model played, in whole groups, with the same parameters as without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import assert_same_parameters, parameters_of
from played_episodes import lake
from players import GROUP, Player, make_trainer, multi_turn_args
from players import policy_fixture as policy_fixture
from players import tokenizer_fixture as tokenizer_fixture
from transformers import AutoModelForCausalLM

from ragen2_trl import EpisodeCallback, SNRFilteredGRPOTrainer, TextRollout
from ragen2_trl.callbacks.episodes import in_groups, whole_groups
from ragen2_trl.envs import TaskMixture, make_env
from ragen2_trl.record.run import read_run
from ragen2_trl.record.saved_episodes import read_episodes, save_episodes


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
    assert trainer.state.global_step == 2 and "could not be written" in caplog.text


def test_episodes_are_written_where_the_locale_cannot_say_the_folders_name(tmp_path):
    code = (
        "import sys; from pathlib import Path; from ragen2_trl.record.saved_episodes import save_episodes\n"
        "save_episodes(Path(sys.argv[1]), [])"
    )
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "földer")], check=True, env=ascii_only)
    assert [path.suffix for path in sorted((tmp_path / "földer").iterdir())] == [".jsonl"]
