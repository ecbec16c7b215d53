"""Prompts chosen before they are sampled, through real training runs."""

import pytest
import torch
from algorithms import GRPO, cases, for_each
from conftest import assert_same_parameters, parameters_of
from datasets import Dataset, IterableDataset
from refills import WORDS, Seen, replay_with
from test_promises_resume import assert_same_optimizer_states, log_rows

SELECTS = {"snr_prompt_selection": True, "snr_strategy": "none"}


def selecting_run(algorithm, policy_path, folder, varied=(0, 3, 5), **settings):
    args = algorithm.args(folder, **{**SELECTS, **settings})
    return algorithm.make(policy_path, args, replay_with(policy_path, set(varied)))


@for_each
def test_in_a_stream_of_fresh_prompts_nothing_changes(algorithm, policy_path, tmp_path):
    """Eight prompts, two a step: one epoch is four steps."""
    runs = [selecting_run(algorithm, policy_path, tmp_path, snr_prompt_selection=on, max_steps=4) for on in (0, 1)]
    seen = [Seen(trainer) for trainer in runs]
    for trainer in runs:
        trainer.train()
    assert seen[0].asked == seen[1].asked
    assert_same_parameters(*map(parameters_of, runs))


@for_each
def test_one_candidate_a_place_is_trl_in_every_epoch(algorithm, policy_path, tmp_path):
    options = ({"snr_prompt_selection": False}, {"snr_candidates": 1})
    runs = [selecting_run(algorithm, policy_path, tmp_path, max_steps=9, **one) for one in options]
    for trainer in runs:
        trainer.train()
    assert_same_parameters(*map(parameters_of, runs))


@for_each
def test_prompts_that_teach_nothing_are_sampled_less_and_none_starves(algorithm, policy_path, tmp_path):
    trainer = selecting_run(algorithm, policy_path, tmp_path, max_steps=30, learning_rate=0.0)
    seen = Seen(trainer)
    trainer.train()
    asked = [prompt for one in seen.asked[4:] for prompt in one]
    times = {word: asked.count(word) / 4 for word in WORDS}
    taught = [times[WORDS[number]] for number in (0, 3, 5)]
    others = [times[word] for number, word in enumerate(WORDS) if number not in (0, 3, 5)]
    assert sum(taught) > 2 * sum(others)
    assert min(others) >= 1


@for_each
def test_resuming_continues_the_same_run(algorithm, policy_path, tmp_path):
    settings = {"max_steps": 9, "save_steps": 6, "save_strategy": "steps", "snr_refill_rounds": 2}
    whole = selecting_run(algorithm, policy_path, tmp_path / "whole", **settings)
    whole.train()
    resumed = selecting_run(algorithm, policy_path, tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    assert_same_parameters(parameters_of(whole), parameters_of(resumed))
    assert_same_optimizer_states(whole, resumed)
    assert log_rows(resumed) == log_rows(whole)
    assert any(row["snr/skipped_prompts"] for row in log_rows(whole)[6:])
