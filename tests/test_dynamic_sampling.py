"""Dynamic sampling through real training runs: a batch that keeps too little is filled up."""

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from algorithms import ALGORITHMS, GRPO, PPO, RLOO, STILL, cases, for_each, replay_of, slow
from conftest import PROMPTS, assert_same_parameters, parameters_of
from datasets import Dataset, IterableDataset
from dynamic_samplings import FIRST, PILOTS, WORDS, Seen, replay_of_pilots, replay_with, rows_of, sampled_in_full
from players import LAKE, Player, make_trainer, multi_turn_args
from players import policy_fixture as policy_fixture
from players import tokenizer_fixture as tokenizer_fixture
from replay import GROUP_SIZE, REWARDS, Recorder, Replay, assert_close, move_away
from test_promises_resume import assert_same_optimizer_states, log_rows
from test_tool_environments import TEMPLATE
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import qwen3_template

from ragen2_trl import CostCallback, SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.rollout_events import listen
from ragen2_trl.rollouts import TextRollout
from ragen2_trl.sampling import policy as pilots
from ragen2_trl.sampling.policy import round_size
from ragen2_trl.trainers.checks import check_pilots, pilots_of

FILLED = {"per_device_train_batch_size": 16, "snr_strategy": "nonzero"}


def made(policy_path, args, replay):
    dataset = Dataset.from_dict({"prompt": WORDS})
    return SNRFilteredGRPOTrainer(policy_path, Replay.reward, args, dataset, rollout_func=replay.rollout)


def train(policy_path, args, replay):
    trainer = made(policy_path, args, replay)
    trainer.train()
    return trainer


@pytest.mark.parametrize("varied", [{0, 3}, {5}, {1, 2, 3, 4, 5, 6, 7}])
def test_a_batch_is_filled_up_with_kept_groups(policy_path, make_args, varied):
    args = make_args(**FILLED, snr_dynamic_sampling_rounds=50, max_steps=2)
    trainer = train(policy_path, args, replay_with(policy_path, varied))
    for row in rows_of(trainer):
        assert row["snr/trained_groups"] == 4
        assert row["snr/prompts_used"] >= 4
    assert trainer.state.num_input_tokens_seen > 0


def test_the_cap_trains_on_what_there_is(policy_path, make_args):
    args = make_args(**FILLED, snr_dynamic_sampling_rounds=1, max_steps=1)
    trainer = train(policy_path, args, replay_with(policy_path, {5}))
    (row,) = rows_of(trainer)
    assert row["snr/sampling_rounds"] == 1
    assert 0 <= row["snr/trained_groups"] < 4
    assert row["snr/prompts_used"] == 8


@pytest.mark.parametrize("varied", [{5}, {1, 2, 6}])
def test_what_is_kept_is_a_share_of_all_that_a_step_sampled(varied, policy_path, make_args):
    """As TRL's reward in the same row is, and not of its first prompts alone."""
    args = make_args(**FILLED, snr_dynamic_sampling_rounds=3, max_steps=2)
    rows = rows_of(train(policy_path, args, replay_with(policy_path, varied)))
    assert any(row["snr/sampling_rounds"] for row in rows)
    for row in rows:
        assert row["snr/kept_fraction"] == pytest.approx(row["snr/kept_groups"] / row["snr/prompts_used"])
        assert row["snr/zero_variance_fraction"] == pytest.approx(1 - row["snr/kept_fraction"])
        assert row["snr/zero_variance_fraction"] == pytest.approx(row["frac_reward_zero_std"], abs=0.2)


def test_a_full_batch_needs_no_round_and_trains_as_without(policy_path, make_args):
    replay = replay_with(policy_path, set(range(8)))
    states = []
    for rounds in (0, 5):
        args = make_args(**FILLED, snr_dynamic_sampling_rounds=rounds, max_steps=3)
        trainer = train(policy_path, args, replay)
        states.append(parameters_of(trainer))
    assert [row["snr/sampling_rounds"] for row in rows_of(trainer)] == [0, 0, 0]
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-4, atol=1e-5)


def surplus_run(policy_path, make_args, **overrides):
    """Few groups at first, so that a round overshoots: more are kept than there is room for."""
    settings = {**FILLED, "snr_dynamic_sampling_rounds": 20, "max_steps": 6, **overrides}
    return make_args(**settings), replay_with(policy_path, {0, 3, 5})


def test_surplus_groups_wait_for_the_next_step(policy_path, make_args):
    args, replay = surplus_run(policy_path, make_args)
    rows = rows_of(train(policy_path, args, replay))
    waiting = [row["snr/waiting_groups"] for row in rows]
    assert any(waiting)
    assert [row["snr/carried_groups"] for row in rows] == [0, *waiting[:-1]]
    assert not any(row["snr/stale_groups"] for row in rows)


def test_groups_that_would_be_two_updates_old_are_left_behind(policy_path, make_args):
    args, replay = surplus_run(policy_path, make_args, num_iterations=2, max_steps=12)
    rows = rows_of(train(policy_path, args, replay))
    assert any(row["snr/stale_groups"] for row in rows)
    assert not any(row["snr/waiting_groups"] or row["snr/carried_groups"] for row in rows)


def test_callbacks_see_the_first_prompts_of_a_step_and_no_further_round(policy_path, make_args):
    args, replay = surplus_run(policy_path, make_args, max_steps=3)
    trainer, seen = made(policy_path, args, replay), []
    listen(trainer, on_rollout=lambda rollout: seen.append(rollout.rewards.shape))
    trainer.train()
    assert any(row["snr/sampling_rounds"] for row in rows_of(trainer))
    assert seen == [(4, GROUP_SIZE)] * 3


def test_each_round_asks_for_whole_groups_of_prompts_from_the_dataset(policy_path, make_args):
    args, replay = surplus_run(policy_path, make_args, max_steps=2)
    trainer = made(policy_path, args, replay)
    seen = Seen(trainer)
    trainer.train()
    assert len(seen.asked) > 2
    for asked in seen.asked:
        groups = [asked[i : i + GROUP_SIZE] for i in range(0, len(asked), GROUP_SIZE)]
        assert all(len(set(group)) == 1 and group[0] in WORDS for group in groups)


def test_a_round_is_as_large_as_the_kept_fraction_makes_it():
    sizes = {"most": 16, "unit": 4, "processes": 1}
    assert round_size(missing=4, kept=8, sampled=16, **sizes) == 8
    assert round_size(missing=8, kept=1, sampled=16, **sizes) == 16
    assert round_size(missing=8, kept=0, sampled=16, **sizes) == 16
    assert round_size(missing=1, kept=16, sampled=16, most=16, unit=4, processes=3) == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"snr_dynamic_sampling_rounds": 2}, "snr_dynamic_sampling_rounds=2 draws prompts by their row"),
        ({"snr_prompt_selection": True}, r"snr_prompt_selection=True.* got IterableDataset"),
    ],
)
def test_datasets_without_rows_are_refused(settings, said, policy_path, make_args):
    dataset = IterableDataset.from_generator(lambda: ({"prompt": prompt} for prompt in WORDS))
    with pytest.raises(ValueError, match=said):
        SNRFilteredGRPOTrainer(policy_path, Replay.reward, make_args(**settings), dataset)


@pytest.mark.parametrize(
    ("setting", "value"), [("scale_rewards", "batch"), ("multi_objective_aggregation", "normalize_then_sum")]
)
def test_settings_over_the_batch_are_refused_by_name(make_args, setting, value):
    with pytest.raises(ValueError, match=f"{setting}='{value}'"):
        make_args(snr_dynamic_sampling_rounds=1, **{setting: value})


# Prompts chosen before they are sampled, through real training runs.


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


# Pilots through real training runs: a few completions of each prompt, then the rest of those that are worth it.


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
def test_dynamic_sampling_of_large_groups_has_pilots_by_default(settings, pilots, policy_path, tmp_path, caplog):
    args = GRPO.args(tmp_path, **settings)
    trainer = GRPO.make(policy_path, args, no_reward, PROMPTS)
    assert trainer.pilot_generations == pilots
    assert args.snr_pilot_generations == settings.get("snr_pilot_generations")  # another trainer has its own default
    is_told = pilots > 0 and "snr_pilot_generations" not in settings
    assert (f"snr_pilot_generations={pilots}" in caplog.text) == is_told


def no_reward(completions, **columns):
    return [0.0] * len(completions)


@pytest.mark.parametrize(("rows", "pilots"), [(16, 2), (8, 0)])
def test_where_processes_share_groups_there_are_none_by_default(rows, pilots):
    shared = {"num_generations": 16, "per_device_train_batch_size": rows, "steps_per_generation": 1, "world_size": 2}
    choice = {"snr_dynamic_sampling_rounds": 1, "keeps_every_varying_group": True}
    args = SimpleNamespace(snr_pilot_generations=None, **shared, **choice)
    assert pilots_of(args, GRPO.trainer) == pilots


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
