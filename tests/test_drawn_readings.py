"""Completions are drawn first, and only what is drawn is read."""

import pytest
import torch
from conftest import PROMPTS
from datasets import Dataset
from measured_runs import rows_of, run
from replay import REWARDS, Replay
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen2_trl import SNRFilteredGRPOTrainer
from ragen2_trl.instrument import Sampling, Trajectories, measure_first_turn, reasoning

GROUP_SIZE, DRAWN = 6, 7


@pytest.fixture
def reads(monkeypatch):
    """The contexts of all turns that are read, in order."""
    contexts, read = [], reasoning._read_turn

    def count(ids, start, *rest):
        contexts.append(tuple(ids[:start]))
        return read(ids, start, *rest)

    monkeypatch.setattr(reasoning, "_read_turn", count)
    return contexts


def test_a_measurement_reads_no_more_completions_than_it_scores(policy_path, make_args, reads, monkeypatch):
    monkeypatch.setattr("ragen2_trl.trainers.runs.COMPANIONS", ())  # health counts what is valid of all
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    for group in replay.completions.values():  # no white space, which counts as no reasoning at either end
        group[:] = [[40 + token % 100 for token in completion] for completion in group]
    trainer, _ = run(
        SNRFilteredGRPOTrainer,
        policy_path,
        make_args(per_device_train_batch_size=32, max_steps=1),
        Dataset.from_dict({"prompt": PROMPTS}),
        Replay.reward,
        {"every": 1, "num_completions": DRAWN, "scopes": ("first_turn", "trajectory")},  # answers need a turn of each
        rollout_func=replay.rollout,
    )
    (row,) = rows_of(trainer)
    assert row["mi/first_turn/num_completions"] == len(reads) == DRAWN < 32
    assert row["mi/valid_thinking_rate"] == 0.0


def measured(policy_path, without_reasoning=()):
    """Trajectories drawn by a measurement of 24 completions; those named have no reasoning."""
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    texts = ["<think></think>" if i in without_reasoning else f"<think>{i}</think>" for i in range(24)]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    groups = [i // GROUP_SIZE for i in range(24)]
    prompts = [tokenizer(PROMPTS[group])["input_ids"] for group in groups]
    model = AutoModelForCausalLM.from_pretrained(policy_path)
    trajectories = Trajectories(prompts, ids, tokenizer)
    measurement = measure_first_turn(model, trajectories, groups, torch.Generator().manual_seed(3), Sampling(DRAWN))
    assert measurement.columns == [0, 6, 12, 18]
    assert measurement.prompt_index.tolist() == [i // GROUP_SIZE for i in measurement.trajectories]
    return measurement.trajectories


def test_where_all_have_reasoning_the_draw_is_that_of_their_numbers(policy_path, reads):
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3)).tolist()
    assert measured(policy_path) == sorted(order[:DRAWN])
    assert len(reads) == DRAWN


def test_a_completion_without_reasoning_makes_room_for_the_next(policy_path, reads):
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3)).tolist()
    without = {order[0], order[4], order[20]}
    assert measured(policy_path, without) == sorted([i for i in order if i not in without][:DRAWN])
    assert len(reads) == DRAWN + 2


def test_where_fewer_have_reasoning_than_are_wanted_all_of_them_are_scored(policy_path):
    assert measured(policy_path, set(range(24)) - {2, 9, 23}) == [2, 9, 23]
