"""Promise 6: nothing hides. Log rows and saved completions tell their generation."""

import math
from pathlib import Path

import pandas as pd
import pytest
from algorithms import GRPO, PPO, RLOO, for_each, replay_of, slow
from conftest import PROMPTS
from dynamic_samplings import FIRST, replay_of_pilots

TWICE = {"num_iterations": 2, "max_steps": 6}


def numbers(trainer):
    return [row["snr/generation"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("strategy", ["top_p", slow("all")])
@for_each
def test_rows_that_reuse_a_generation_repeat_its_number(algorithm, strategy, policy_path, tmp_path):
    args = algorithm.args(tmp_path, **TWICE, snr_strategy=strategy)
    trainer = algorithm.make(policy_path, args, replay_of(policy_path))
    trainer.train()
    assert numbers(trainer) == [1, 1, 2, 2, 3, 3]
    trainer.train()
    assert numbers(trainer) == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"logging_steps": 2}, [2, 4, 6]),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, [2, 4, 6, 8, 10, 12]),
        ({"steps_per_generation": 4}, [1, 1, 1, 1, 2, 2]),
    ],
)
def test_a_row_has_the_number_of_its_newest_generation(layout, expected, policy_path, tmp_path):
    trainer = GRPO.make(policy_path, GRPO.args(tmp_path, max_steps=6, **layout), replay_of(policy_path))
    trainer.train()
    assert numbers(trainer) == expected


@pytest.mark.parametrize("at", [3, 4], ids=["amid a generation", "between two"])
def test_a_resumed_run_counts_on(at, policy_path, tmp_path):
    args = GRPO.args(tmp_path, **TWICE, save_strategy="steps", save_steps=1)
    GRPO.make(policy_path, args, replay_of(policy_path)).train()
    resumed = GRPO.make(policy_path, args, replay_of(policy_path))
    resumed.train(str(tmp_path / f"checkpoint-{at}"))
    assert numbers(resumed) == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("way", ["plain", "rounds", "pilots"])
@pytest.mark.parametrize("algorithm", [GRPO, slow(RLOO), slow(PPO)], ids=["grpo", "rloo", "ppo"])
def test_completions_have_the_number_of_their_generation(algorithm, way, policy_path, tmp_path):
    replay = replay_of_pilots(policy_path) if way == "pilots" else replay_of(policy_path)
    settings = {
        "plain": {"snr_strategy": "all"},
        "rounds": {"snr_strategy": "nonzero", "snr_dynamic_sampling_rounds": 2},
        "pilots": {"snr_strategy": "nonzero", "snr_pilot_generations": FIRST},
    }[way]
    args = algorithm.args(tmp_path, **TWICE, **settings, per_device_train_batch_size=32, log_completions=True)
    trainer = algorithm.make(policy_path, args, replay)
    seen, log = [], trainer.log

    def logged(*given, **named):
        log(*given, **named)
        columns = trainer._logs["extra"]["generation"], trainer._logs["prompt"]
        seen.append((trainer._empty_steps.generation, *map(list, columns)))

    trainer.log = logged
    trainer.train()
    for newest, generations, prompts in seen[:6]:
        assert len(generations) == len(prompts) > 0
        assert generations[-1] == newest and generations == sorted(generations)
        # A generation of fewer completions than TRL's table has room for leaves some of the one before.
        assert way == "pilots" or set(generations) == {newest}
    if algorithm.name == "grpo":  # TRL's RLOO writes no file
        for step, (_, generations, _) in enumerate(seen[:6], start=1):
            table = pd.read_parquet(Path(args.output_dir, "completions", f"completions_{step:05d}.parquet"))
            assert table["generation"].tolist() == generations


def test_completions_of_an_evaluation_are_of_no_generation(policy_path, tmp_path):
    settings = {"per_device_eval_batch_size": 8, "eval_strategy": "steps", "eval_steps": 1, "log_completions": True}
    args = GRPO.args(tmp_path, **settings, per_device_train_batch_size=32, max_steps=1)
    trainer = GRPO.make(policy_path, args, replay_of(policy_path), eval_dataset=[{"prompt": PROMPTS[0]}] * 2)
    trainer.train()
    (table,) = map(pd.read_parquet, Path(args.output_dir, "completions").iterdir())
    found = [None if math.isnan(one) else one for one in table["generation"]]
    assert found == [1] * 24 + [None] * 8


def test_a_column_of_that_name_that_a_reward_function_logs_stays(policy_path, tmp_path):
    def reward(completion_ids, log_extra, **columns):
        log_extra("generation", ["own"] * len(completion_ids))
        return [float(len(ids) % 2) for ids in completion_ids]

    args = GRPO.args(tmp_path, log_completions=True, max_steps=1)
    GRPO.make(policy_path, args, reward, PROMPTS).train()
    (table,) = map(pd.read_parquet, Path(args.output_dir, "completions").iterdir())
    assert table["generation"].tolist() == ["own"] * 8
