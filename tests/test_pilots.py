"""Pilots through real training runs: a few completions of each prompt, then the rest of those that are worth it."""

import itertools
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from algorithms import GRPO, STILL, cases, for_each
from conftest import PROMPTS, assert_same_parameters, parameters_of
from datasets import IterableDataset
from pilot_replay import FIRST, PILOTS, replay_of_pilots, sampled_in_full
from players import LAKE, Player, make_trainer, multi_turn_args
from players import policy_fixture as policy_fixture
from players import tokenizer_fixture as tokenizer_fixture
from replay import GROUP_SIZE, REWARDS, Recorder, assert_close, move_away
from test_promises_resume import log_rows
from test_tool_environments import TEMPLATE
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import qwen3_template

from ragen2_trl import CostCallback
from ragen2_trl.envs import make_env
from ragen2_trl.rollout_events import listen
from ragen2_trl.rollouts import TextRollout
from ragen2_trl.sampling import policy as pilots
from ragen2_trl.sampling.posterior import RewardPosterior
from ragen2_trl.trainers.checks import check_pilots, pilots_of

ALL = {**PILOTS, "per_device_train_batch_size": 32, "shuffle_dataset": False}  # all eight prompts in a generation


def varied(prompts):
    return [prompt for prompt in prompts if max(REWARDS[prompt]) - min(REWARDS[prompt]) > 1e-6]


@cases(
    slow=("ppo-shared",),
    grpo={"kl": {"beta": 0.1, "loss_type": "grpo"}, "batch": {"beta": 0.1, "scale_rewards": "batch"}},
    rloo={"kl": {"beta": 0.1}},
    ppo={"shared": {"beta": 0.1, "critic_lr": 0.0}, "separate": {"value_head": "separate", "critic_lr": 0.0}},
)
def test_the_update_is_the_plain_one_on_the_groups_that_were_sampled_whole(algorithm, settings, policy_path, tmp_path):
    """And each completion that was sampled is scored once."""
    replay, recorder = replay_of_pilots(policy_path), Recorder()
    args = algorithm.args(tmp_path, **{**ALL, **STILL, **settings, "max_steps": 1})
    trainer = algorithm.make(policy_path, args, replay, callbacks=[recorder])
    move_away(trainer.model)
    trainer.train()
    whole = [PROMPTS[number] for number in sampled_in_full(trainer)]
    assert 2 <= len(varied(whole)) < len(varied(PROMPTS))
    plain = algorithm.plain_gradient(policy_path, varied(whole), **settings)
    assert_close(recorder.gradients[0], plain)
    expected = {(prompt, member) for prompt in PROMPTS for member in range(GROUP_SIZE if prompt in whole else FIRST)}
    assert Counter(replay.scored) == Counter(expected)
    (row,) = log_rows(trainer)
    assert row["snr/sampled_completions"] == len(expected)
    assert row["snr/sampled_fraction"] == len(expected) / 32
    assert row["snr/trained_groups"] == len(varied(whole))
    firsts = [reward for rewards in REWARDS.values() for reward in rewards[:FIRST]]
    assert row["snr/pilot_reward"] == pytest.approx(sum(firsts) / len(firsts))


@for_each
def test_dynamic_sampling_fills_batches_for_fewer_completions(algorithm, policy_path, tmp_path):
    sampled = []
    for first in (0, FIRST):
        settings = {"per_device_train_batch_size": 16, "snr_dynamic_sampling_rounds": 20, "max_steps": 4}
        replay = replay_of_pilots(policy_path, varied={0, 3})
        args = algorithm.args(tmp_path, **{**PILOTS, **settings, "snr_pilot_generations": first})
        trainer = algorithm.make(policy_path, args, replay)
        trainer.train()
        assert [row["snr/trained_groups"] for row in log_rows(trainer)] == [4] * 4
        sampled.append(len(replay.scored))
    assert sampled[1] < 0.95 * sampled[0]  # where a pilot is three quarters of a group


@for_each
def test_no_round_samples_more_whole_groups_than_a_batch_has(algorithm, policy_path, tmp_path):
    """Also where it has looked at more prompts, since the first ones were all dead and the others are not."""
    asked = []

    def reward(prompts, completion_ids, **columns):
        asked.append(len(prompts))
        values = [float(sum(ids) % 2) for ids in completion_ids]
        return [0.0 if prompt.startswith("dead") else value for prompt, value in zip(prompts, values, strict=True)]

    prompts = [f"dead {number}" for number in range(4)] + [f"{number}" for number in range(60)]
    settings = {"num_generations": 8, "per_device_train_batch_size": 32, "shuffle_dataset": False, "max_steps": 1}
    settings |= {"snr_strategy": "nonzero", "snr_pilot_generations": 2, "snr_dynamic_sampling_rounds": 1}
    trainer = algorithm.make(policy_path, algorithm.args(tmp_path, **settings), reward, prompts)
    trainer.train()
    groups = trainer.args.groups_per_generation
    assert asked[2] == 4 * groups * 2  # four times as many pilots
    assert asked[3] == groups * 6
    (row,) = log_rows(trainer)
    assert row["snr/trained_groups"] + row["snr/waiting_groups"] <= groups + 1


@cases(grpo={"alone": {}, "selection": {"snr_prompt_selection": True}})
def test_a_resumed_run_looks_and_goes_on_as_before(algorithm, settings, policy_path, tmp_path, monkeypatch):
    monkeypatch.setattr(pilots, "AUDIT", 0.3)
    settings = {
        **{**PILOTS, "per_device_train_batch_size": 16, "snr_dynamic_sampling_rounds": 2, "max_steps": 8},
        **{"save_strategy": "steps", "save_steps": 5},
        **settings,
    }

    def run(folder, checkpoint=None):
        replay = replay_of_pilots(policy_path, varied={0, 3, 5})
        trainer = algorithm.make(policy_path, algorithm.args(tmp_path / folder, **settings), replay)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    whole = run("whole")
    resumed = run("resumed", str(tmp_path / "whole" / "checkpoint-5"))
    assert_same_parameters(parameters_of(whole), parameters_of(resumed))
    assert log_rows(resumed) == log_rows(whole)
    assert "snr/missed_variance" in log_rows(whole)[-1]  # some were looked into


def test_what_is_missed_is_the_share_of_variance_in_prompts_not_gone_on_with(policy_path, tmp_path, monkeypatch):
    """Exactly, where all of them are sampled whole to find out."""
    monkeypatch.setattr(pilots, "AUDIT", 1.0)
    trainer = GRPO.make(policy_path, GRPO.args(tmp_path, **ALL, max_steps=1), replay_of_pilots(policy_path))
    trainer.train()
    variances = np.array([np.var(REWARDS[prompt], ddof=1) for prompt in PROMPTS])
    missed = variances[~trainer._sampler.policy.choice.committed].sum() / variances.sum()
    assert 0 < missed < 1
    (row,) = log_rows(trainer)
    assert row["snr/missed_variance"] == pytest.approx(missed)
    assert row["snr/sampled_fraction"] == 1


def test_listeners_hear_of_every_token_and_of_whole_groups(policy_path, tmp_path):
    replay = replay_of_pilots(policy_path)
    trainer = GRPO.make(policy_path, GRPO.args(tmp_path, **ALL, max_steps=2), replay)
    rows, rollouts = [], []
    listen(trainer, on_rows=lambda told: rows.append(len(told)), on_rollout=rollouts.append)
    trainer.add_callback(CostCallback(trainer))
    trainer.train()
    tokens = sum(len(replay.completions[prompt][member]) for prompt, member in replay.scored)
    assert log_rows(trainer)[-1]["cost/sampled_tokens"] == tokens
    assert rows[0] == 8 * FIRST and sum(rows) == len(replay.scored)
    (*_, last) = rollouts
    whole = [PROMPTS[number] for number in sampled_in_full(trainer)]
    assert last.rewards.tolist() == torch.tensor([REWARDS[prompt] for prompt in whole]).tolist()
    assert last.completion_ids == [ids for prompt in whole for ids in replay.completions[prompt]]
    assert [row["prompt"] for row in last.inputs] == [prompt for prompt in whole for _ in range(GROUP_SIZE)]


def test_what_reward_functions_log_stays_with_its_completion(policy_path, tmp_path):
    replay = replay_of_pilots(policy_path)

    def score(prompts, completion_ids, log_extra, **columns):
        log_extra("tokens", [len(ids) for ids in completion_ids])
        return replay.score(prompts, completion_ids)

    trainer = GRPO.make(policy_path, GRPO.args(tmp_path, **ALL, max_steps=1), score, PROMPTS)
    replay.attach(trainer)
    trainer.train()
    whole = [PROMPTS[number] for number in sampled_in_full(trainer)]
    expected = [len(ids) for prompt in whole for ids in replay.completions[prompt]]
    assert list(trainer._logs["extra"]["tokens"]) == expected
    assert list(trainer._logs["prompt"]) == [prompt for prompt in whole for _ in range(GROUP_SIZE)]


def test_episodes_of_several_turns_are_played_by_pilots_first(policy, tokenizer, make_args):
    args = multi_turn_args(make_args, max_steps=1, snr_pilot_generations=2)
    trainer, _ = make_trainer(policy, tokenizer, args)
    player, rows = Player(trainer, tokenizer), []
    listen(trainer, on_rows=lambda told: rows.append([row["seed"] for row in told]))
    scored = []
    (reward,) = trainer.reward_funcs[:1]
    trainer.reward_funcs[0] = lambda seed, **columns: scored.append(seed) or reward(seed=seed, **columns)
    trainer.train()
    groups = args.per_device_train_batch_size // args.num_generations
    assert scored == rows and len(scored[0]) == 2 * groups
    assert len(player.calls[0][0]) == 2 * groups


def test_tools_are_those_of_the_completion(policy_path, make_args):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    model = AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=1024)
    env = make_env("frozen_lake", multi_turn=True, size=3, protocol="tools")
    seen = []

    def turns(completions, environments, seed, **columns):
        """Each completion is scored with the environment that it has played in."""
        for completion, environment in zip(completions, environments, strict=True):
            called = sum(len(message.get("tool_calls") or []) for message in completion)
            seen.append((called, environment._play.outcome.turns))
        return [float(called) for called, _ in seen[-len(seed) :]]

    args = make_args(
        per_device_train_batch_size=16, max_completion_length=700, max_steps=1, snr_pilot_generations=FIRST
    )
    trainer = GRPO.make(
        model,
        args,
        turns,
        env.dataset(4, seed=0),
        processing_class=tokenizer,
        environment_factory=env.environment_factory,
    )
    numbers, members = itertools.count(), set()

    def generate(contexts, *others, **named):
        members.add((trainer.num_generations, trainer.args.num_generations))
        answers = []
        for context in contexts:
            done = tokenizer.decode(context).count("<tool_call>")
            call = '<tool_call>\n{"name": "move", "arguments": {"directions": ["Up"]}}\n</tool_call><|im_end|>'
            goes_on = next(numbers) % 3 if done == 0 else done < 2
            answers.append(tokenizer(call if goes_on else "Enough<|im_end|>")["input_ids"])
        return answers, None

    trainer._generate_single_turn = generate
    trainer.train()
    assert len(seen) == 4 * FIRST + len(sampled_in_full(trainer))
    assert all(called == played for called, played in seen)
    assert {called for called, _ in seen} == {0, 2}
    assert members == {(FIRST, FIRST), (GROUP_SIZE - FIRST, GROUP_SIZE - FIRST)}


def test_datasets_without_rows_and_evaluation_work(policy_path, tmp_path):
    """Only further prompts need rows; an evaluation samples all at once."""
    replay = replay_of_pilots(policy_path)
    dataset = IterableDataset.from_generator(lambda: ({"prompt": prompt} for prompt in PROMPTS))
    args = GRPO.args(tmp_path, **PILOTS, max_steps=1, eval_strategy="steps", eval_steps=1)
    trainer = GRPO.make(policy_path, args, replay, dataset, eval_dataset=dataset)
    trainer.train()
    assert len(replay.scored) - len(PROMPTS) * GROUP_SIZE < 8


@pytest.mark.parametrize("given", [1, 4, 5, -1])
def test_a_number_out_of_range_is_named(make_args, given):
    with pytest.raises(ValueError, match=f"snr_pilot_generations={given} .* num_generations=4"):
        make_args(snr_pilot_generations=given)


FURTHER = {
    **{"snr_strategy": "nonzero", "snr_dynamic_sampling_rounds": 1, "num_generations": 16},
    "per_device_train_batch_size": 32,
}


@pytest.mark.parametrize(
    ("settings", "pilots"),
    [
        (FURTHER, 2),
        ({**FURTHER, "snr_strategy": "top_p", "snr_value": 1.0}, 2),
        ({**FURTHER, "snr_pilot_generations": 3}, 3),
        ({**FURTHER, "snr_pilot_generations": 0}, 0),
        ({**FURTHER, "num_generations": 8}, 0),
        ({**FURTHER, "snr_dynamic_sampling_rounds": 0}, 0),
        # What would choose otherwise than pilots do has whole groups to choose from.
        ({**FURTHER, "snr_strategy": "top_p"}, 0),
        ({"snr_strategy": "lossless"}, 0),
    ],
)
def test_dynamic_sampling_of_large_groups_has_pilots_by_default(settings, pilots, policy_path, tmp_path):
    args = GRPO.args(tmp_path, **settings)
    trainer = GRPO.make(policy_path, args, no_reward, PROMPTS)
    assert trainer.pilot_generations == pilots
    assert args.snr_pilot_generations == settings.get("snr_pilot_generations")  # another trainer has its own default


def no_reward(completions, **columns):
    return [0.0] * len(completions)


def test_completions_that_a_subclass_changes_are_not_looked_at_by_default(policy_path, tmp_path):
    class Cuts(GRPO.trainer):
        def _generate(self, prompts):
            return super()._generate(prompts)

    args = GRPO.args(tmp_path, **FURTHER)
    assert GRPO.make(policy_path, args, no_reward, PROMPTS, trainer_class=Cuts).pilot_generations == 0


@pytest.mark.parametrize(("rows", "pilots"), [(16, 2), (8, 0)])
def test_where_processes_share_groups_there_are_none_by_default(rows, pilots):
    shared = {"num_generations": 16, "per_device_train_batch_size": rows, "steps_per_generation": 1, "world_size": 2}
    choice = {"snr_dynamic_sampling_rounds": 1, "keeps_every_varying_group": True}
    args = SimpleNamespace(snr_pilot_generations=None, **shared, **choice)
    assert pilots_of(args, GRPO.trainer) == pilots


@for_each
def test_by_default_large_groups_are_looked_at_first(algorithm, policy_path, tmp_path, caplog):
    asked = []

    def reward(completion_ids, **columns):
        asked.append(len(completion_ids))
        return [float(sum(ids) % 2) for ids in completion_ids]

    trainer = algorithm.make(policy_path, algorithm.args(tmp_path, **FURTHER, max_steps=1), reward, PROMPTS)
    assert "snr_pilot_generations=2" in caplog.text
    trainer.train()
    assert asked[0] == trainer.args.groups_per_generation * 2
    (row,) = log_rows(trainer)
    assert row["snr/sampled_completions"] == sum(asked)


def test_groups_on_two_processes_are_refused():
    args = {"num_generations": 4, "steps_per_generation": 1}

    def check(rows, processes):
        trainer = SimpleNamespace(
            args=SimpleNamespace(**args, per_device_train_batch_size=rows),
            accelerator=SimpleNamespace(num_processes=processes),
            pilot_generations=2,
            train_dataset=None,
        )
        check_pilots(trainer, None)

    with pytest.raises(ValueError, match=r"snr_pilot_generations=2 .* 6 .* num_generations=4"):
        check(6, 2)
    check(6, 1)
    check(8, 2)


def test_episodes_of_several_samples_are_refused(policy, tokenizer, make_args):
    env = make_env("frozen_lake", **LAKE)
    args = multi_turn_args(make_args, snr_pilot_generations=2)
    with pytest.raises(ValueError, match="snr_pilot_generations=2"):
        GRPO.make(
            policy,
            args,
            env.reward_funcs,
            env.dataset(8, seed=0),
            processing_class=tokenizer,
            rollout_func=TextRollout(env, context="last"),
        )


# Which prompts are worth it


def test_the_prompts_gone_on_with_are_those_that_yield_most_variance_for_a_completion():
    rng = np.random.default_rng(0)
    for _ in range(50):
        expected = rng.gamma(0.3, size=6)
        first, size = 3, int(rng.integers(4, 20))
        threshold = pilots.least_worth(expected, first, size)

        def rate(chosen, expected=expected, first=first, size=size):
            return expected[list(chosen)].sum() / (6 * first + len(chosen) * (size - first))

        choices = [one for count in range(1, 7) for one in itertools.combinations(range(6), count)]
        best = max(choices, key=rate)
        assert rate(np.flatnonzero(expected >= threshold)) == pytest.approx(rate(best))


@pytest.mark.parametrize("processes", [1, 3])
def test_each_process_goes_on_with_as_many_of_its_own_prompts_first_the_audited_and_then_the_best(
    processes, monkeypatch
):
    rng, prompts, room = np.random.default_rng(0), 4, 3  # of each process; whole groups that fit on it
    for _ in range(60):
        expected = rng.gamma(0.3, size=processes * prompts).round(1)
        draws = rng.random(len(expected)) * 4 * pilots.AUDIT
        own = pilots.Pilots(2, 8, processes * room, seed=0, processes=processes)
        monkeypatch.setattr(own, "_expected", lambda rewards, *known, expected=expected: expected)
        monkeypatch.setattr(np.random, "default_rng", lambda key, d=draws: SimpleNamespace(random=lambda size: d))
        choice = own.choose(np.zeros((len(expected), 2)), key=(0,))
        monkeypatch.undo()

        worth = expected >= pilots.least_worth(expected, 2, 8)
        audited = ~worth & (draws < pilots.AUDIT)
        number = min(max(1, math.ceil((worth.sum() + audited.sum()) / processes)), room)
        whole = []
        for process in range(processes):
            mine = range(process * prompts, (process + 1) * prompts)
            best = sorted(mine, key=lambda prompt: (not audited[prompt], -expected[prompt]))[:number]
            whole += sorted(best)
        assert np.flatnonzero(choice.in_full).tolist() == whole
        assert np.flatnonzero(choice.audited).tolist() == [one for one in whole if audited[one]]
        assert np.flatnonzero(choice.committed).tolist() == [one for one in whole if not audited[one]]


def posterior_of(rewards):
    posterior = RewardPosterior(0, 1.0)
    posterior.see(rewards)
    posterior.learn_prior(rewards)
    return posterior


def log_beta(a, b):
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def test_expected_variance_of_two_values_is_the_sum_over_all_outcomes():
    low, high, further = -1.0, 2.0, 5
    drawn = np.random.default_rng(1).random((40, 3)) < 0.3
    posterior = posterior_of(np.where(drawn, high, low))
    rewards = np.array([[low, high, low], [low, low, np.nan], [high, high, high]])
    known = np.array([[8.0, 8 * low + 2 * 3.0, 7.0, 1.0], [0, 0, 0, 0], [2.0, 2 * low, 1.0, 0.0]])
    for pilot, before, found in zip(rewards, known, posterior.group_variance(rewards, further, known), strict=True):
        have = pilot[~np.isnan(pilot)]
        (a,), (b,) = posterior._beta(before[None])
        a, b = a + (have == high).sum(), b + (have == low).sum()
        expected = 0.0
        for wins in range(further + 1):
            chance = math.comb(further, wins) * math.exp(log_beta(a + wins, b + further - wins) - log_beta(a, b))
            group = [*have, *[high] * wins, *[low] * (further - wins)]
            expected += chance * np.var(group, ddof=1)
        assert found == pytest.approx(expected)


def test_expected_variance_of_more_values_is_that_of_groups_drawn_with_the_expected_one():
    rng = np.random.default_rng(2)
    posterior = posterior_of(rng.normal(size=(60, 3)))
    pilot, further, draws = np.array([[0.2, 1.0, -0.3]]), 6, 200_000
    (freedom,), (squares,) = posterior._inverse_chi_squared(np.array([[0.0, 0.0, 2.0, pilot.var() * 3]]))
    variance = squares / (freedom - 2)
    means = pilot.mean() + rng.normal(size=(draws, 1)) * (variance / 3) ** 0.5  # known from the pilot alone
    others = means + rng.normal(size=(draws, further)) * variance**0.5
    groups = np.concatenate([np.broadcast_to(pilot, (draws, 3)), others], axis=1)
    assert posterior.group_variance(pilot, further)[0] == pytest.approx(groups.var(axis=1, ddof=1).mean(), rel=0.01)


def test_the_prior_is_learned_from_pilots_alone():
    """Groups that were gone on with had pilots that vary: with all of their rewards the prior would be of these."""
    rng = np.random.default_rng(3)
    chances = rng.beta(1.2, 1.2, 4000)
    rewards = (rng.random((4000, 16)) < chances[:, None]).astype(float)
    flat = rewards[:, :3].std(axis=1) == 0
    rewards[flat, 3:] = np.nan
    posterior = RewardPosterior(4000, 1e9)
    posterior.observe(np.arange(4000), rewards, np.ones(4000, dtype=bool), first=3)
    variance = posterior._prior()[1]
    assert variance == pytest.approx(1.2**2 / (2.4 * 3.4), rel=0.1)
    biased = RewardPosterior(4000, 1e9)
    biased.observe(np.arange(4000), rewards, np.ones(4000, dtype=bool))
    assert biased._prior()[1] < variance
