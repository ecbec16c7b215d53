"""Promise 9: mechanisms compose. Faults live where two of them meet, so each test runs two together."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl
from algorithms import GRPO, RLOO, STILL, for_each, replay_of
from conftest import ENDS, PROMPTS, parameters_of
from dynamic_samplings import FIRST, PILOTS, WORDS, Seen, replay_of_pilots, sampled_in_full
from packaging.version import Version
from replay import GROUP_SIZE
from test_promises_resume import log_rows
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from ragen2_trl import SNRFilteredGRPOTrainer
from ragen2_trl.rollout_events import listen
from ragen2_trl.sampling import policy as pilots
from ragen2_trl.sampling.policy import Policy, PromptOrder
from ragen2_trl.sampling.sampler import PromptSampler
from ragen2_trl.trainers.selection import Groups, strategy_of

ALL = {"per_device_train_batch_size": 32, "shuffle_dataset": False}  # the eight prompts in their order


def best_and_worst(groups):
    """(N, G), of each group the completions of the highest and the lowest reward."""
    kept = torch.zeros(groups.rewards.shape, dtype=torch.bool)
    kept.scatter_(1, groups.rewards.argmax(dim=1, keepdim=True).cpu(), True)
    return kept.scatter_(1, groups.rewards.argmin(dim=1, keepdim=True).cpu(), True)


def rows_in_the_loss(trainer):
    """Numbers of rows of each micro-batch with a token in the loss, filled while it trains."""
    rows, compute = [], trainer._compute_loss

    def count(model, inputs):
        mask = inputs["completion_mask"] * inputs.get("tool_mask", torch.ones_like(inputs["completion_mask"]))
        rows.append(int(mask.any(dim=1).sum()))
        return compute(model, inputs)

    trainer._compute_loss = count
    return rows


@pytest.mark.parametrize("way", ["dynamic sampling", "pilots"])
@for_each
def test_a_selector_of_completions_keeps_its_completions_however_they_were_sampled(
    algorithm, way, policy_path, tmp_path
):
    if way == "pilots":
        replay, settings = replay_of_pilots(policy_path), {"snr_pilot_generations": FIRST}
    else:
        replay, settings = replay_of(policy_path), {"snr_dynamic_sampling_rounds": 1}
    args = algorithm.args(tmp_path, **ALL, **settings, max_steps=1)
    trainer = algorithm.make(policy_path, args, replay, selector=best_and_worst)
    rows = rows_in_the_loss(trainer)
    trainer.train()
    (row,) = log_rows(trainer)
    kept = trainer.latest_selection.kept
    assert row["snr/kept_fraction"] == float(kept.double().mean()) <= 0.5
    assert sum(rows) == int(kept.sum()) > 0


# Rewards to score, by a column


def logs_in_steps(steps, replay, kind=float):
    """A reward function that logs its rewards as a column, in some steps."""

    def reward(prompts, completion_ids, trainer_state, log_extra, **columns):
        rewards = replay.score(prompts, completion_ids=completion_ids)
        if trainer_state.global_step in steps:
            log_extra("solved", [kind(value) for value in rewards])
        return rewards

    return reward


def scored_by_column(policy_path, tmp_path, steps, kind=float, **settings):
    replay = replay_of_pilots(policy_path) if "snr_pilot_generations" in settings else replay_of(policy_path)
    args = GRPO.args(tmp_path, **{**ALL, "snr_score_reward": "solved", "snr_strategy": "nonzero", **settings})
    trainer = GRPO.make(policy_path, args, logs_in_steps(steps, replay, kind), PROMPTS)
    replay.attach(trainer)
    trainer.train()
    return trainer


@pytest.mark.parametrize("settings", [{}, {"snr_pilot_generations": FIRST}], ids=["whole", "pilots"])
def test_a_column_that_a_step_does_not_log_is_not_read_from_an_earlier_one(settings, policy_path, tmp_path):
    with pytest.raises(ValueError, match="snr_score_reward='solved'"):
        scored_by_column(policy_path, tmp_path, {0}, **settings)


def test_a_column_that_only_the_pilots_log_scores_no_group(policy_path, tmp_path):
    replay, calls = replay_of_pilots(policy_path), []

    def reward(prompts, completion_ids, log_extra, **columns):
        calls.append(len(prompts))
        rewards = replay.score(prompts, completion_ids=completion_ids)
        if len(calls) % 2:
            log_extra("solved", rewards)
        return rewards

    args = GRPO.args(tmp_path, **ALL, **PILOTS, snr_score_reward="solved")
    trainer = GRPO.make(policy_path, args, reward, PROMPTS)
    replay.attach(trainer)
    with pytest.raises(ValueError, match="snr_score_reward='solved'"):
        trainer.train()
    assert len(calls) == 2


def test_a_column_of_an_evaluation_decides_nothing(policy_path, tmp_path):
    """The evaluation logs zeros, by which no group would be kept."""
    replay = replay_of(policy_path)

    def reward(prompts, completion_ids, log_extra, **columns):
        rewards = replay.score(prompts)
        log_extra("solved", rewards if trainer.model.training else [0.0] * len(rewards))
        return rewards

    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 32}
    args = GRPO.args(tmp_path, **ALL, **evaluates, snr_score_reward="solved", snr_strategy="nonzero")
    trainer = GRPO.make(policy_path, args, reward, PROMPTS, eval_dataset=[{"prompt": one} for one in PROMPTS])
    replay.attach(trainer)
    trainer.train()
    rows = [row["snr/kept_groups"] for row in trainer.state.log_history if "loss" in row]
    assert rows == [rows[0]] * 3 and rows[0] > 0


@pytest.mark.parametrize(
    "kind",
    [
        np.float32,
        lambda value: np.int64(value > 0.5),
        lambda value: np.bool_(value > 0.5),
        torch.tensor,
        lambda v: v > 0,
    ],
    ids=["float32", "int64", "numpy bool", "tensor", "bool"],
)
def test_numbers_of_numpy_and_torch_are_numbers_of_a_column(kind, policy_path, tmp_path):
    trainer = scored_by_column(policy_path, tmp_path, {0, 1, 2}, kind, max_steps=1)
    assert log_rows(trainer)[0]["snr/kept_groups"] >= 4


def test_a_column_of_text_is_no_column_of_numbers(policy_path, tmp_path):
    with pytest.raises(ValueError, match="snr_score_reward='solved'"):
        scored_by_column(policy_path, tmp_path, {0}, str, max_steps=1)


def test_two_reward_functions_may_log_the_same_column_beside_pilots(policy_path, tmp_path):
    replay = replay_of_pilots(policy_path)
    first = logs_in_steps({0, 1, 2}, replay)

    def second(prompts, log_extra, **columns):
        log_extra("solved", [-1.0] * len(prompts))
        return [0.0] * len(prompts)

    trainer = GRPO.make(policy_path, GRPO.args(tmp_path, **ALL, **PILOTS, max_steps=1), [first, second], PROMPTS)
    replay.attach(trainer)
    trainer.train()
    column = list(trainer._logs["extra"]["solved"])
    whole = [PROMPTS[number] for number in sampled_in_full(trainer)]
    assert (
        column[: len(column) // 2]
        == [reward for prompt in whole for reward in replay.rewards[prompt]][: len(column) // 2]
    )
    assert column[len(column) // 2 :] == [-1.0] * (len(column) // 2)


# The order of prompts


@pytest.mark.parametrize("settings", [{}, {"snr_pilot_generations": FIRST}], ids=["whole", "pilots"])
def test_further_prompts_follow_the_order_of_a_dataset_that_is_not_shuffled(settings, policy_path, tmp_path):
    """A curriculum stays one: what a step draws beyond its first prompts are the next ones, and none twice."""
    replay = (
        replay_of_pilots(policy_path, varied=set(range(0, 8, 2)))
        if settings
        else replay_of(
            policy_path, {word: [0.0, 1.0, 0.0, 1.0] if n % 2 == 0 else [0.0] * 4 for n, word in enumerate(WORDS)}
        )
    )
    rows = {"per_device_train_batch_size": 8, "max_steps": 2, "shuffle_dataset": False}
    args = GRPO.args(tmp_path, **rows, **settings, snr_strategy="nonzero", snr_dynamic_sampling_rounds=3)
    trainer = GRPO.make(policy_path, args, replay)
    asked = []
    listen(trainer, on_rows=lambda inputs: asked.extend(dict.fromkeys(row["prompt"] for row in inputs)))
    trainer.train()
    drawn = list(dict.fromkeys(asked))
    assert len(drawn) > 2 and drawn == WORDS[: len(drawn)]


def test_a_process_gets_its_share_of_further_prompts_and_copies_none_before_it_is_sampled(monkeypatch):
    monkeypatch.setattr(copy, "deepcopy", lambda value, *_: pytest.fail("a row was copied"))
    accelerator = SimpleNamespace(num_processes=4, process_index=1)
    rows = [{"prompt": str(number)} for number in range(64)]
    trainer = SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(num_generations=16))
    policy = Policy(PromptOrder(64, lambda epoch: range(64)), None)
    own = PromptSampler(trainer, policy, rows)._own_rows([*range(8)])
    assert [row["prompt"] for row in own] == ["2"] * 16 + ["3"] * 16
    assert len({id(row) for row in own}) == 2


def test_each_completion_has_a_row_of_its_own_once_it_is_sampled(policy_path, tmp_path):
    seen = []
    replay = replay_of_pilots(policy_path)
    args = GRPO.args(tmp_path, **{**ALL, **PILOTS}, snr_dynamic_sampling_rounds=1, max_steps=1)
    trainer = GRPO.make(policy_path, args, replay)
    listen(trainer, on_rows=lambda inputs: seen.extend(inputs))
    trainer.train()
    assert len({id(row) for row in seen}) == len(seen) == len(replay.scored)


# Settings, truncation, rounding


@pytest.mark.parametrize("algorithm", [GRPO, RLOO], ids=["grpo", "rloo"])
@pytest.mark.parametrize("plain", [False, True], ids=["ours", "TRL's"])
def test_a_setting_that_is_changed_after_construction_counts(algorithm, plain, policy_path, tmp_path):
    args = algorithm.args(tmp_path, plain, max_steps=3)
    trainer = algorithm.make(policy_path, args, replay_of(policy_path), trainer_class=algorithm.trainer)
    args.max_steps = 1
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.skipif(not ENDS, reason="completions end by chance in this release of TRL")
def test_a_selection_of_completions_without_tokens_is_none(policy_path):
    """The group has a token to train, in a completion that is not selected."""
    lengths, kept = torch.tensor([[0, 5], [5, 0]]), torch.tensor([[True, False], [True, False]])
    groups = Groups(torch.eye(2), torch.eye(2)[..., None], lengths, torch.Generator(), None, lambda: lengths)
    args = SimpleNamespace(snr_strategy="top_p", snr_value=0.9, snr_score="reward_variance", groups_per_generation=8)
    _, found = strategy_of(args, lambda groups: kept).select(groups)
    assert found.tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize("strategy", ["top_p", "nonzero", "lossless"])
def test_a_group_of_truncated_completions_is_not_kept_and_ends_the_run(strategy, policy_path, tmp_path):
    """Their tokens are masked: an update on them is none, however their rewards vary. `lossless` goes on like TRL."""
    settings = {"mask_truncated_completions": True, "max_steps": 4, "snr_max_empty_steps": 2, "snr_strategy": strategy}
    replay = replay_of(policy_path)
    for completions in replay.completions.values():
        for ids in completions:
            ids[:] = [one if one % 8 else one + 1 for one in ids]  # none ends with an end token
    trainer = GRPO.make(policy_path, GRPO.args(tmp_path, **ALL, **settings), replay)
    trainer.train()
    steps = 4 if strategy == "lossless" else 2
    assert [row["snr/kept_fraction"] for row in log_rows(trainer)] == [0.0] * steps
    assert trainer.state.global_step == steps


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
def test_equal_rewards_move_no_parameter_where_trl_takes_rounding_for_an_advantage(reward, policy_path, tmp_path):
    settings = {"per_device_train_batch_size": 8, "num_generations": 8, "max_steps": 3, "learning_rate": 1e-3}
    moved = {}
    for plain in (True, False):
        args = GRPO.args(tmp_path, plain, **settings, **({} if plain else {"snr_strategy": "lossless"}))
        trainer = GRPO.make(policy_path, args, lambda completions, **_: [reward] * len(completions), PROMPTS)
        before = parameters_of(trainer)
        trainer.train()
        after = parameters_of(trainer)
        moved[plain] = max((after[name] - before[name]).abs().max().item() for name in before)
        if not plain:
            assert all(row["snr/kept_fraction"] == 0 for row in log_rows(trainer))
    assert moved[True] > 1e-4
    assert moved[False] == 0


@pytest.mark.parametrize("noise", ["clipped", "summed"])
def test_rewards_that_clipping_or_summing_makes_equal_move_no_parameter(noise, policy_path, tmp_path):
    """RLOO clips sums, and 0.1 + 0.1 + 0.6 is not 0.6 + 0.1 + 0.1 in float32."""
    parts = [[0.1, 0.1, 0.6], [0.6, 0.1, 0.1]] if noise == "summed" else [[1.0, 0.0, 0.0], [2.0, 0.0, 0.0]]
    functions = [lambda completions, n=n, **_: [parts[i % 2][n] for i in range(len(completions))] for n in range(3)]
    algorithm = RLOO if noise == "clipped" else GRPO
    settings = {"per_device_train_batch_size": 8, "num_generations": 8, "max_steps": 3, "learning_rate": 1e-3}
    settings |= {"reward_clip_range": (0.0, 0.7)} if noise == "clipped" else {}
    args = algorithm.args(tmp_path, **settings, beta=0.0, snr_strategy="lossless")
    trainer = algorithm.make(policy_path, args, functions, PROMPTS)
    before = parameters_of(trainer)
    trainer.train()
    assert all(row["snr/kept_fraction"] == 0 for row in log_rows(trainer))
    assert all(torch.equal(value, before[name]) for name, value in parameters_of(trainer).items())


@for_each
def test_a_batch_of_live_groups_alone_is_sorted_and_trimmed(algorithm, policy_path, tmp_path):
    """For every strategy but `all`, which leaves the batch as TRL made it."""
    rewards = {prompt: [0.0, 1.0, 0.0, 1.0] for prompt in PROMPTS}
    computed = {}
    for strategy in ("all", "nonzero", *(() if algorithm.name == "ppo" else ("lossless",))):
        settings = {**STILL, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "max_steps": 1}
        args = algorithm.args(tmp_path, **settings, snr_strategy=strategy, beta=0.0)
        trainer = algorithm.make(policy_path, args, replay_of(policy_path, rewards))
        trainer.train()
        (row,) = log_rows(trainer)
        assert row["snr/kept_fraction"] == 1
        computed[strategy] = row["snr/update_compute_fraction"]
    assert computed.pop("all") == 1
    assert computed.pop("nonzero") < 0.6
    # lossless keeps the padding of short prompts; before TRL 1.16, which takes log-probs of packed rows, all prompts
    most = 0.96 if Version(trl.__version__) >= Version("1.16") else 0.99
    assert all(share < most for share in computed.values())


def test_weights_that_a_checkpoint_lacks_are_an_error_and_tied_ones_are_not(policy_path, tmp_path):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = GRPO.make(policy_path, GRPO.args(tmp_path, **settings), replay_of(policy_path))
    trainer.train()
    checkpoint = tmp_path / "checkpoint-1"
    GRPO.make(policy_path, GRPO.args(tmp_path, **settings), replay_of(policy_path)).train(str(checkpoint))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(policy_path)
    weights = {f"other.{name}": value.clone() for name, value in model.state_dict().items() if "lm_head" not in name}
    from safetensors.torch import save_file

    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    (checkpoint / "snr_manifest.json").unlink()
    again = GRPO.make(policy_path, GRPO.args(tmp_path, **settings), replay_of(policy_path))
    with pytest.raises(ValueError, match=r"lacks \d+ weights"):
        again.train(str(checkpoint))


@pytest.mark.parametrize(
    "hook", ["_generate", "_calculate_rewards", "_generate_and_score_completions", "_prepare_inputs", "_get_grad_norm"]
)
def test_a_trainer_made_without_init_has_the_hooks_of_trl(hook, monkeypatch):
    """As TRL's own unit tests make theirs."""
    trainer = object.__new__(SNRFilteredGRPOTrainer)
    trainer.model = SimpleNamespace(training=True)
    monkeypatch.setattr(GRPOTrainer, hook, lambda self, given, **_: ("TRL's", given))
    assert getattr(trainer, hook)(["a"]) == ("TRL's", ["a"])


# Means over rows


def test_rewards_of_a_step_with_further_rounds_are_means_over_all_their_rows(policy_path, tmp_path):
    """Four prompts first, three of them live, and then two: TRL would average the two means."""
    rewards = {word: [0.0] * 4 if n == 3 else [0.0, 1.0, n > 3, n > 3] for n, word in enumerate(WORDS)}
    settings = {"per_device_train_batch_size": 16, "max_steps": 1, "shuffle_dataset": False}
    args = GRPO.args(tmp_path, **settings, snr_strategy="nonzero", snr_dynamic_sampling_rounds=1)
    trainer = GRPO.make(policy_path, args, replay_of(policy_path, rewards))
    seen = Seen(trainer)
    trainer.train()
    asked = [prompt for one in seen.asked for prompt in one]
    assert [len(one) for one in seen.asked] == [16, 8]
    (row,) = log_rows(trainer)
    every = [rewards[prompt][number % GROUP_SIZE] for number, prompt in enumerate(asked)]
    assert row["reward"] == pytest.approx(sum(every) / len(every), rel=1e-5)
    lengths = [
        len(ids) for prompt in dict.fromkeys(asked) for ids in replay_of(policy_path, rewards).completions[prompt]
    ]
    assert row["completions/max_length"] == max(lengths)
    assert row["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths), rel=1e-5)


def test_metrics_of_reward_functions_are_means_over_both_stages_of_pilots(policy_path, tmp_path):
    replay = replay_of_pilots(policy_path)

    def reward(prompts, completion_ids, log_metric, **columns):
        rewards = replay.score(prompts, completion_ids)
        log_metric("own/mean", sum(rewards) / len(rewards))
        log_metric("own/pass@3", 1.0)
        return rewards

    args = GRPO.args(tmp_path, **{**ALL, **PILOTS}, max_steps=1)
    trainer = GRPO.make(policy_path, args, reward, PROMPTS)
    replay.attach(trainer)
    trainer.train()
    (row,) = log_rows(trainer)
    every = [replay.rewards[prompt][member] for prompt, member in replay.scored]
    assert row["own/mean"] == pytest.approx(sum(every) / len(every))
    assert "own/pass@3" not in row  # neither stage has a whole group


# Pilots' memory


def test_the_threshold_of_pilots_remembers_the_latest_prompts_alone(policy_path, tmp_path, monkeypatch):
    monkeypatch.setattr(pilots, "RECENT", 5)
    trainer = GRPO.make(
        policy_path, GRPO.args(tmp_path, **{**ALL, **PILOTS}, max_steps=2), replay_of_pilots(policy_path)
    )
    seen, see = [], pilots.Pilots._expected
    monkeypatch.setattr(
        pilots.Pilots, "_expected", lambda self, *rewards: seen.append(see(self, *rewards)) or seen[-1]
    )
    trainer.train()
    assert trainer._sampler.policy.pilots.recent == np.concatenate(seen)[-5:].tolist()


def test_an_audit_stands_for_all_that_was_rejected(policy_path, tmp_path, monkeypatch):
    """With half of the rejected prompts audited, each audited one counts twice. Rewards of some rejected prompts vary
    after their pilots."""
    monkeypatch.setattr(pilots, "AUDIT", 0.5)
    monkeypatch.setattr(
        np.random, "default_rng", lambda seed: SimpleNamespace(random=lambda size: np.arange(size) % 2)
    )
    late, soon = [0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0]  # what a pilot of three does not see, and what it sees
    replay = replay_of_pilots(policy_path)
    replay.rewards = {prompt: soon if n in (1, 3, 5) else late for n, prompt in enumerate(replay.rewards)}
    trainer = GRPO.make(policy_path, GRPO.args(tmp_path, **{**ALL, **PILOTS}, max_steps=1), replay)
    learned, learn = [], Policy.learn
    monkeypatch.setattr(Policy, "learn", lambda self, rewards: learned.append(rewards) or learn(self, rewards))
    trainer.train()
    choice, (rewards,) = trainer._sampler.policy.choice, learned
    variances = np.nanvar(rewards, axis=1, ddof=1)
    missed = 2 * variances[choice.audited].sum()
    held = variances[choice.committed].sum()
    (row,) = log_rows(trainer)
    assert missed > 1 and held > 0.5
    assert row["snr/missed_variance"] == pytest.approx(missed / (missed + held))
