"""Prompts chosen before they are sampled, through real training runs."""

import random

import numpy as np
import pytest
import torch
from algorithms import ALGORITHMS, GRPO, PPO, RLOO, STILL, for_each, replay_of, slow
from conftest import PROMPTS, assert_same_parameters, parameters_of
from datasets import Dataset, IterableDataset
from dynamic_samplings import WORDS, Seen, replay_with
from replay import Recorder, move_away
from test_promises_resume import assert_same_optimizer_states, log_rows

from ragen2_trl.envs import make_env
from ragen2_trl.tiny import resolve_model

SELECTS = {"snr_prompt_selection": True, "snr_strategy": "nonzero"}
quickest = pytest.mark.parametrize("algorithm", [GRPO, slow(RLOO), slow(PPO)], ids=ALGORITHMS)


def selecting_run(algorithm, policy_path, folder, varied=(0, 3, 5), **settings):
    args = algorithm.args(folder, **{**SELECTS, **settings})
    return algorithm.make(policy_path, args, replay_with(policy_path, set(varied)))


@for_each
def test_in_a_stream_of_fresh_prompts_nothing_changes(algorithm, policy_path, tmp_path):
    """Eight prompts, two a step: one epoch is four steps."""
    seen, ends = [], []
    for on in (False, True):
        trainer = selecting_run(algorithm, policy_path, tmp_path, snr_prompt_selection=on, max_steps=4)
        seen.append(Seen(trainer))
        trainer.train()
        ends.append(parameters_of(trainer))
    assert seen[0].asked == seen[1].asked
    assert_same_parameters(*ends)


@pytest.mark.slow
@quickest
def test_one_candidate_a_place_is_trl_in_every_epoch(algorithm, policy_path, tmp_path, monkeypatch):
    monkeypatch.setattr("ragen2_trl.sampling.policy.CANDIDATES", 1)
    ends = []
    for on in (False, True):
        trainer = selecting_run(algorithm, policy_path, tmp_path, snr_prompt_selection=on, max_steps=9)
        trainer.train()
        ends.append(parameters_of(trainer))
    assert_same_parameters(*ends)


@quickest
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


@quickest
def test_resuming_continues_the_same_run(algorithm, policy_path, tmp_path):
    settings = {"max_steps": 9, "save_steps": 6, "save_strategy": "steps", "snr_dynamic_sampling_rounds": 2}
    whole = selecting_run(algorithm, policy_path, tmp_path / "whole", **settings)
    whole.train()
    resumed = selecting_run(algorithm, policy_path, tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    assert_same_parameters(parameters_of(whole), parameters_of(resumed))
    assert_same_optimizer_states(whole, resumed)
    assert log_rows(resumed) == log_rows(whole)
    assert any(row["snr/skipped_prompts"] for row in log_rows(whole)[6:])


@pytest.mark.slow
@quickest
def test_dynamic_sampling_fills_batches_with_prompts_that_teach(algorithm, policy_path, tmp_path, monkeypatch):
    """The further ones are drawn from the same stream."""
    monkeypatch.setattr("ragen2_trl.sampling.policy.HALF_LIFE", 8.0)
    settings = {"snr_dynamic_sampling_rounds": 8, "max_steps": 8, "learning_rate": 0.0}
    used = []
    for on in (False, True):
        trainer = selecting_run(algorithm, policy_path, tmp_path, **settings, snr_prompt_selection=on)
        trainer.train()
        rows = log_rows(trainer)
        assert all(row["snr/trained_groups"] == 2 for row in rows)
        used.append(sum(row["snr/prompts_used"] for row in rows[4:]))
    assert used[1] < used[0]


@pytest.mark.slow
def test_a_second_training_begins_with_nothing_known_also_with_another_dataset(policy_path, tmp_path):
    trainer = selecting_run(GRPO, policy_path, tmp_path, max_steps=6)
    trainer.train()
    assert trainer._sampler.policy.order.posterior.clock == 12
    trainer.train_dataset = Dataset.from_dict({"prompt": WORDS[:4]})
    seen = Seen(trainer)
    trainer.train()
    assert (
        trainer._sampler.policy.order.posterior.clock == 12 and len(trainer._sampler.policy.order.posterior.seen) == 4
    )
    assert {prompt for prompts in seen.asked for prompt in prompts} == set(WORDS[:4])


def test_a_checkpoint_of_another_dataset_is_refused(policy_path, tmp_path):
    settings = {"max_steps": 2, "save_steps": 1, "save_strategy": "steps"}
    selecting_run(GRPO, policy_path, tmp_path, **settings).train()
    other = selecting_run(GRPO, policy_path, tmp_path, **settings)
    other.train_dataset = Dataset.from_dict({"prompt": WORDS[:4]})
    with pytest.raises(ValueError, match="train_dataset has 4 rows; the checkpoint's snr_prompt_selection knows 8"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_rows_that_others_write_into_stay_as_they_are(policy_path, tmp_path):
    """A rollout function's outcomes and a task's own columns are written into the rows of a batch."""
    env = make_env("frozen_lake", size=3)
    args = GRPO.args(tmp_path, **SELECTS, max_steps=3)
    dataset = env.dataset(4, seed=0)
    rows = [dict(row) for row in dataset]

    def reward(completions, seed, **columns):
        return [random.Random(f"{one}{text}").random() for one, text in zip(seed, completions, strict=True)]

    vars(reward)["environment"] = env
    trainer = GRPO.make(policy_path, args, reward, dataset)
    trainer.train()
    assert [dict(row) for row in trainer._sampler.rows] == rows


def test_datasets_without_rows_are_refused(policy_path, make_args):
    dataset = IterableDataset.from_generator(lambda: ({"prompt": prompt} for prompt in WORDS))
    with pytest.raises(ValueError, match=r"snr_prompt_selection=True.* got IterableDataset"):
        GRPO.make(policy_path, make_args(snr_prompt_selection=True), lambda completions, **_: [0.0], dataset)


def flat(gradient):
    return torch.cat([gradient[name].flatten() for name in sorted(gradient)])


STEPS = 150  # the first four of them with fresh prompts


@pytest.mark.slow
def test_gradients_average_to_that_of_the_prompts_drawn_and_not_to_that_of_all(policy_path, tmp_path):
    """At weights that stay, of groups that are always the same."""
    plain = flat(GRPO.plain_gradient(policy_path, PROMPTS, loss_type="grpo"))
    neutral = {"snr_strategy": "all", "loss_type": "grpo", "max_steps": STEPS, **STILL}
    args = GRPO.args(tmp_path, **neutral, snr_prompt_selection=True)
    recorder = Recorder()
    trainer = GRPO.make(policy_path, args, replay_of(policy_path), callbacks=[recorder])
    move_away(trainer.model)
    seen = Seen(trainer)
    trainer.train()
    found = torch.stack([flat(gradient) for gradient in recorder.gradients[4:]])
    error = (found.var(dim=0).sum() / len(found)).sqrt()
    assert (found.mean(dim=0) - plain).norm() > 3 * error
    alone = {one: flat(GRPO.plain_gradient(policy_path, [one], loss_type="grpo")) for one in PROMPTS}
    drawn = [prompt for one in seen.asked[4:] for prompt in one]
    reweighted = torch.stack([alone[prompt] for prompt in drawn]).mean(dim=0)
    torch.testing.assert_close(found.mean(dim=0), reweighted, rtol=1e-3, atol=1e-5)


@pytest.mark.full
def test_on_lakes_of_which_most_are_dead_flat_groups_become_few(tmp_path):
    """The tiny model on 96 lakes, 70 % of which give no reward whatever is answered; the first epoch is 12 steps."""
    env = make_env("frozen_lake")
    dead = np.random.default_rng(0).random(96) < 0.7
    dataset = env.dataset(96, seed=0).add_column("dead", dead.tolist())

    def reward(completions, dead, **columns):
        rewards = env.success_func(completions=completions, **columns)
        return [0.0 if is_dead else value for value, is_dead in zip(rewards, dead, strict=True)]

    settings = {"per_device_train_batch_size": 64, "num_generations": 8, "max_completion_length": 64}
    args = GRPO.args(tmp_path, **SELECTS, **settings, max_steps=36, learning_rate=0.0)
    trainer = GRPO.make(resolve_model("tiny"), args, reward, dataset)
    trainer.train()
    flat = [row["snr/zero_variance_fraction"] for row in log_rows(trainer)]
    assert np.mean(flat[:12]) > 0.7
    assert np.mean(flat[18:]) < np.mean(flat[:12]) - 0.25
    assert log_rows(trainer)[-1]["snr/prediction_rank_correlation"] > 0.2
