"""The filter in TRL's asynchronous trainer: which groups are trained, and what is refused."""

import asyncio
import json
import queue
import threading
import time
import types

import async_cpu
import numpy as np
import pytest
import torch
from async_cpu import (
    DEAD,
    LIVE,
    Server,
    StubWorker,
    make_async,
    make_sent,
    note_decisions,
    note_inputs,
    parity,
    prompts_with_dead,
    rows_of_group,
    send,
    text_of,
)
from async_cpu import on_a_cpu as on_a_cpu
from conftest import log_rows, parameters_of
from launching import launch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl.experimental.async_grpo import AsyncGRPOTrainer

from ragen2_trl import SNRFilteredAsyncGRPOConfig, SNRFilteredAsyncGRPOTrainer
from ragen2_trl.metrics import metric
from ragen2_trl.sampling.policy import Pilots, Policy
from ragen2_trl.trainers import async_groups
from ragen2_trl.trainers.async_groups import TAG, RowTag
from ragen2_trl.trainers.async_rollouts import FilteredRolloutLoop, ScoredOnce
from ragen2_trl.trainers.selection import Selection

pytestmark = pytest.mark.usefixtures("on_a_cpu")


def advantages_trained(trainer):
    """The advantages of the completions of each micro-batch, one a completion; filled while it trains."""
    seen, compute_loss = [], trainer.compute_loss

    def spy(model, inputs, *args, **kwargs):
        there = inputs["token_index"] >= 0
        advantages, segments = inputs["advantages"][there], inputs["segment_id"][there]
        seen.append([advantages[segments == one][0].item() for one in segments.unique()])
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = spy
    return seen


def test_every_trained_row_has_an_advantage(policy_path, tmp_path):
    trainer = make_async(policy_path, tmp_path, Server(), snr_strategy="nonzero", max_steps=4)
    seen = advantages_trained(trainer)
    trainer.train()
    assert [len(one) for one in seen] == [16] * 4
    assert min(abs(value) for one in seen for value in one) > 0.1
    # Random texts, half of them even; 30 % of the prompts are alive: so many groups have signal.
    zero = sum(row["snr/zero_variance_fraction"] for row in log_rows(trainer)) / 4
    assert 0.5 < zero < 0.9


def test_an_async_filtered_update_is_trls_on_a_queue_of_the_kept_groups(policy_path, tmp_path):
    groups = [DEAD, LIVE, DEAD, LIVE, LIVE, DEAD, LIVE, LIVE, LIVE]
    kept = [row for number, one in enumerate(groups) if one is LIVE for row in rows_of_group(number, one)]
    plain = make_sent(policy_path, tmp_path / "plain", kept, plain=True, max_steps=2)
    own = make_sent(policy_path, tmp_path / "own", groups, max_steps=2)
    plain.train()
    own.train()
    assert all(torch.equal(value, parameters_of(plain)[name]) for name, value in parameters_of(own).items())


def test_reward_speaks_for_all_groups_that_were_sampled(policy_path, tmp_path):
    # All of the row: four live groups, and the one that TRL fetches ahead.
    trainer = make_sent(policy_path, tmp_path, [DEAD, LIVE, DEAD, DEAD, LIVE, *[LIVE] * 2])
    trainer.train()
    (row,) = log_rows(trainer)
    assert row["reward"] == row["rewards/parity"] == pytest.approx(4 * 0.5 / 7)
    assert row["snr/kept_fraction"] == pytest.approx(4 / 7)
    assert row["snr/kept_groups"] == 4 and row["snr/zero_variance_fraction"] == pytest.approx(3 / 7)
    assert row["batch/groups_per_step"] == 2
    ours = {key for key in row if key.startswith(("snr/", "health/", "mi/", "cost/"))}
    assert sorted(key for key in ours if metric(key) is None) == []


def test_groups_are_ranked_among_the_latest_ones(policy_path, tmp_path):
    """Of groups with signal, `top_p` drops those of little variance, though each arrives alone."""
    small = [0.5, 0.6, 0.5, 0.6]
    trainer = make_sent(policy_path, tmp_path, [LIVE, small] * 4 + [LIVE] * 4, max_steps=2, snr_strategy="top_p")
    seen = note_decisions(trainer)
    trainer.train()
    variances, kept = (torch.cat([getattr(one, name) for _, one, _ in seen]) for name in ("scores", "groups"))
    assert (variances < 0.01).sum() >= 3 and not kept[variances < 0.01].any()
    assert kept[variances > 0.01].double().mean() > 0.7


def test_a_selector_keeps_single_completions_with_the_advantages_of_their_group(policy_path, tmp_path):
    trainer = make_sent(policy_path, tmp_path, [LIVE] * 12, max_steps=2, selector=lambda groups: groups.rewards > 0)
    seen = advantages_trained(trainer)
    trainer.train()
    assert [len(one) for one in seen] == [8, 8]
    assert all(value == pytest.approx(1, abs=1e-4) for one in seen for value in one)


def test_groups_are_scored_by_one_of_several_rewards(policy_path, tmp_path):
    worker = send([LIVE] * 8)
    for row in worker.rows:  # the sum varies everywhere, this one in odd groups
        row.metrics["rewards/own"] = row.metrics["reward"] * (row.group_id % 2)
    scored = {"snr_strategy": "top_p", "snr_value": 1.0, "snr_score_reward": "own"}
    trainer = make_sent(policy_path, tmp_path, worker, **scored)
    trainer.train()
    assert trainer.latest_selection.groups.tolist() == [group % 2 == 1 for group in range(8)]


FORKED = [2, 1, 3, 1]


def tagged(groups):
    """A worker that sends groups of forked conversations, and says which row is which."""
    worker = send(groups, forks=FORKED)
    for number, row in enumerate(worker.rows):
        row.metrics[TAG] = RowTag(7, [0, 0, 1, 2, 2, 2, 3][number % 7])
    return worker


def test_forks_of_a_foreign_worker_that_tags_its_rows_are_kept_and_counted_whole(policy_path, tmp_path):
    worker = tagged([DEAD, LIVE, DEAD, LIVE, LIVE, LIVE, LIVE])
    trainer = make_sent(policy_path, tmp_path, worker, max_steps=2, per_device_train_batch_size=7)
    seen = advantages_trained(trainer)
    trainer.train()
    assert [len(one) for one in seen] == [7, 7] and min(abs(value) for one in seen for value in one) > 0.9
    assert len(trainer._groups.ledger) == 4


def test_a_selector_keeps_conversations_of_a_foreign_worker_that_tags_its_rows(policy_path, tmp_path):
    settings = {"max_steps": 2, "per_device_train_batch_size": 6, "snr_score_reward": "parity"}
    settings["selector"] = lambda groups: (groups.rewards > 0) & (groups.advantages() > 0)
    trainer = make_sent(policy_path, tmp_path, tagged([LIVE] * 12), **settings)
    seen = advantages_trained(trainer)
    trainer.train()
    assert [len(one) for one in seen] == [6, 6]  # three rows a group: the first and the last conversation
    assert all(value == pytest.approx(1, abs=1e-4) for one in seen for value in one)


def refused(policy_path, tmp_path, rows, **settings):
    """The error that ends a run with these rows."""
    trainer = make_sent(policy_path, tmp_path, rows, **settings)
    with pytest.raises(ValueError) as error:
        trainer.train()
    return str(error.value)


@pytest.mark.parametrize("strategy", ["nonzero", "lossless", "all"])
def test_more_rows_than_completions_are_refused_unless_tags_tell_them_apart(policy_path, tmp_path, strategy):
    rows = send([LIVE], forks=FORKED).rows
    message = refused(policy_path, tmp_path, rows, snr_strategy=strategy)  # at the fifth: the worker sends no more
    assert all(name in message for name in ("group_id=0", "num_generations=4", TAG, "RowTag", "one per conversation"))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("group_id=None", lambda row: setattr(row, "group_id", None)),
        ("group_id=-1", lambda row: setattr(row, "group_id", -1)),
        ("metrics['reward']=None", lambda row: row.metrics.pop("reward")),
        ("metrics['reward']='high'", lambda row: row.metrics.update(reward="high")),
        ("metrics['rewards/parity']=None", lambda row: row.metrics.pop("rewards/parity")),
        ("metrics['snr_tag']=(4, 0)", lambda row: row.metrics.update({TAG: (4, 0)})),
        ("metrics['snr_tag']=RowTag(rows=4, member=4", lambda row: row.metrics.update({TAG: RowTag(4, 4)})),
    ],
)
@pytest.mark.parametrize("place", [0, 2])
def test_a_row_that_does_not_say_what_is_needed_is_refused_by_the_field(policy_path, tmp_path, field, change, place):
    rows = send([LIVE, LIVE, LIVE]).rows
    change(rows[4 + place])
    if "rewards/" in field and place == 0:
        field = "metrics['rewards/<name"
    message = refused(policy_path, tmp_path, rows)
    assert field in message and "allowed" in message


def test_a_group_with_tags_in_some_of_its_rows_is_refused(policy_path, tmp_path):
    rows = send([LIVE, LIVE]).rows
    for number, row in enumerate(rows[4:7]):
        row.metrics[TAG] = RowTag(4, number)
    assert "metrics['snr_tag']=None" in refused(policy_path, tmp_path, rows)


class OwnLoop(async_cpu.async_rollout_worker._AsyncRolloutLoop):
    """A loop derived from TRL's, as that of OpenEnv's harness is."""


@pytest.mark.parametrize("loop", [async_cpu.async_rollout_worker._AsyncRolloutLoop, OwnLoop])
def test_rows_of_forked_conversations_are_told_apart_by_our_loop(policy_path, tmp_path, monkeypatch, loop):
    """TRL's own worker, or one derived from it, whose conversations are two rows each."""
    monkeypatch.setattr(async_cpu.ThreadWorker, "_loop_cls", loop)
    chain = async_cpu.async_rollout_worker._chain_to_sequences

    def forked(*args):
        rows, tally = chain(*args)
        return rows * 2, tally

    monkeypatch.setattr(async_cpu.async_rollout_worker, "_chain_to_sequences", forked)
    trainer = make_async(
        policy_path, tmp_path, Server(), max_steps=2, dataset=async_cpu.prompts_with_dead(40, 0),
        selector=lambda groups: groups.rewards == groups.rewards.max(),
    )  # fmt: skip
    seen = note_decisions(trainer)
    trainer.train()
    for group, selection, rows in seen:
        assert group.members == [0, 0, 1, 1, 2, 2, 3, 3] and not group.rewards().isnan().any()
        assert len(rows) == 2 * int(selection.kept.sum())
    assert max(group.rewards().var().item() for group, *_ in seen) > 0


def test_the_last_group_of_a_worker_that_sends_no_more_is_complete(policy_path, tmp_path):
    """Nothing comes after it: a worker may wait for the weights that this group is needed for."""
    trainer = make_sent(policy_path, tmp_path, [LIVE] * 4)
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_group_with_fewer_rows_is_complete_when_another_begins(policy_path, tmp_path):
    """A conversation without a token to train has no row."""
    rows = [row for group in range(6) for row in rows_of_group(group, LIVE)[: 4 - group % 2]]
    trainer = make_sent(policy_path, tmp_path, rows, per_device_train_batch_size=7)
    trainer.train()
    assert trainer.latest_selection.rewards.isnan().sum(dim=1).tolist()[:3] == [0, 1, 0]


def test_rows_of_two_groups_that_are_mixed_are_refused(policy_path, tmp_path):
    first, second = rows_of_group(0, LIVE), rows_of_group(1, LIVE)
    rows = [*first[:2], *second, *first[2:], *rows_of_group(2, LIVE)]
    trainer = make_sent(policy_path, tmp_path, rows, per_device_train_batch_size=16)
    with pytest.raises(ValueError, match=r"group_id=0 after that group was complete.*one after the other"):
        trainer.train()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("snr_dynamic_sampling_rounds", 1),
        ("snr_prompt_selection", True),
        ("snr_share_prompts", False),
        ("snr_score", "entropy"),
        ("snr_pilot_generations", 8),
        ("num_generations", 1),
    ],
)
def test_async_settings_without_a_meaning_are_refused_by_their_name(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}.*allowed"):
        SNRFilteredAsyncGRPOConfig(str(tmp_path), **{"use_cpu": True, "bf16": False, name: value})


def test_an_async_config_takes_lengths_as_scores_as_trl_masks_no_completion_there(tmp_path):
    assert SNRFilteredAsyncGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, snr_score="length")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"snr_score_reward": "success"}, r"snr_score_reward='success'.*parity"),
        ({"selector": lambda groups: groups.entropies() > 0}, "entropies need a forward pass"),
    ],
)
def test_rewards_that_nobody_gives_and_entropies_are_refused(settings, said, policy_path, tmp_path):
    trainer = make_sent(policy_path, tmp_path, [LIVE] * 3, **settings)
    with pytest.raises(ValueError, match=said):
        trainer.train()


class LosesTheLoader(SNRFilteredAsyncGRPOTrainer):
    name, updates = "get_train_dataloader", 0

    def get_train_dataloader(self):
        return AsyncGRPOTrainer.get_train_dataloader(self)


class LosesTheStep(SNRFilteredAsyncGRPOTrainer):
    name, updates = "training_step", 0

    def training_step(self, *args, **kwargs):
        return AsyncGRPOTrainer.training_step(self, *args, **kwargs)


class LosesTheLog(SNRFilteredAsyncGRPOTrainer):
    """Seen where a second step comes: TRL logs after an update, which is the right one."""

    name, updates = "_log_step_metrics", 1

    def _log_step_metrics(self):
        AsyncGRPOTrainer._log_step_metrics(self)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("trainer_class", [LosesTheLoader, LosesTheStep, LosesTheLog])
def test_an_async_subclass_that_loses_the_filter_is_refused_before_a_wrong_update(
    trainer_class, micro_batches, policy_path, tmp_path, monkeypatch
):
    monkeypatch.setattr(async_cpu, "SNRFilteredAsyncGRPOTrainer", trainer_class)
    trainer = make_sent(policy_path, tmp_path, [LIVE] * 16, max_steps=3, gradient_accumulation_steps=micro_batches)
    before = parameters_of(trainer)
    said = rf"{trainer_class.__name__}\.{trainer_class.name} must call super\(\)\.{trainer_class.name}"
    with pytest.raises(RuntimeError, match=said):
        trainer.train()
    assert trainer.state.global_step == trainer_class.updates
    moved = any(not torch.equal(value, before[name]) for name, value in parameters_of(trainer).items())
    assert moved == (trainer_class.updates > 0)


def test_a_plain_async_configuration_gets_the_defaults_of_the_filter(policy_path, tmp_path, monkeypatch):
    monkeypatch.setattr(async_cpu, "SNRFilteredAsyncGRPOConfig", async_cpu.AsyncGRPOConfig)
    trainer = make_async(policy_path, tmp_path, Server(), rollout_worker=StubWorker(), max_steps=1)
    assert trainer.args.snr_strategy == "top_p" and trainer.args.groups_per_generation == 1


# `lossless` is TRL's own update without the rows that add nothing

# Live and dead groups, and one with members at the mean. Of the third, TRL's mean is off by rounding.
REWARDS = [[1, 0, 0, 1], [0] * 4, [0.1] * 4, [0, 0.5, 1, 0.5], [0] * 4, [1, 1, 1, 0], [0] * 4, [0] * 4]


def all_rows():
    rows = [row for number, rewards in enumerate(REWARDS) for row in rows_of_group(number, rewards)]
    for row in rows[8:12]:
        row.advantage = 1e-9
    return rows


def trained_on_all(path, folder, **settings):
    sent = [*all_rows(), *rows_of_group(8, [1, 0, 1, 0]), *rows_of_group(9, [1, 0, 1, 0])]
    trainer = make_sent(path, folder, sent, **settings)
    seen = note_inputs(trainer)
    trainer.train()
    return trainer, seen


@pytest.mark.parametrize("budget", [0, 100], ids=["fixed count", "token budget"])
def test_async_lossless_is_the_update_of_trl(policy_path, tmp_path, budget):
    settings = {"gradient_accumulation_steps": 2, "token_budget": budget}
    settings |= {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 1e9}
    plain, of_plain = trained_on_all(policy_path, tmp_path / "plain", plain=True, **settings)
    own, of_own = trained_on_all(policy_path, tmp_path / "own", snr_strategy="lossless", **settings)
    before = plain.model.__class__.from_pretrained(policy_path)
    start = {name: value.detach() for name, value in before.named_parameters()}
    largest = max((value - start[name]).abs().max() for name, value in parameters_of(plain).items())
    assert largest > 1e-3
    for name, value in parameters_of(own).items():
        torch.testing.assert_close(value, parameters_of(plain)[name], rtol=0, atol=float(1e-5 * largest + 1e-7))
    tokens = [sum(int(one["attention_mask"].sum()) for one in seen) for seen in (of_plain, of_own)]
    assert tokens[1] < 0.7 * tokens[0]
    totals = [[float(one["global_n_tokens"][0]) for one in seen] for seen in (of_plain, of_own)]
    assert totals[0] == totals[1]
    assert 0 < own.state.log_history[0]["snr/update_compute_fraction"] < 0.7


def test_async_lossless_computes_no_row_whose_group_has_equal_rewards(policy_path, tmp_path):
    _, seen = trained_on_all(policy_path, tmp_path, snr_strategy="lossless", per_device_train_batch_size=12)
    (inputs,) = seen[:1]
    assert int(inputs["segment_id"].max()) + 1 == 4  # of three groups only the first: 0.1 four times is no advantage
    assert float(inputs["advantages"].abs().min()) > 0.9


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_the_longest_row_stays_where_it_decides_on_the_rotary_embeddings_of_all(kind, policy_path, tmp_path):
    policy = AutoModelForCausalLM.from_pretrained(policy_path)
    policy.config.rope_parameters |= {"rope_type": kind, "factor": 4.0}
    for each in (policy, AutoTokenizer.from_pretrained(policy_path)):
        each.save_pretrained(tmp_path / "policy")
    longest = []
    for settings in ({"plain": True}, {"snr_strategy": "lossless"}):
        rewards = [LIVE, DEAD] * 2  # the second micro-batch is only read ahead
        rows = [
            row for number, one in enumerate(rewards) for row in rows_of_group(number, one, length=6 + 24 * number)
        ]
        trainer = make_sent(str(tmp_path / "policy"), tmp_path, rows, **settings)
        seen = note_inputs(trainer)
        trainer.train()
        longest.append(int(seen[0]["position_ids"].max()))
    assert (longest[0] == longest[1]) == (kind == "dynamic")


def test_a_micro_batch_without_advantages_keeps_one_row_and_moves_nothing(policy_path, tmp_path):
    trainer = make_sent(policy_path, tmp_path, [DEAD] * 8, snr_strategy="lossless", max_steps=2)
    before = parameters_of(trainer)
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in parameters_of(trainer).items())
    assert trainer.state.log_history[0]["batch/samples_per_row"] == 1
    assert len(trainer._groups.ledger) == 4  # rows that are left out are done, too


def test_async_lossless_is_refused_with_a_router_loss(policy_path, tmp_path):
    small = AutoConfig.from_pretrained(policy_path)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    config = Qwen3MoeConfig(
        **{name: getattr(small, name) for name in names}, num_key_value_heads=2, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=8, output_router_logits=True, router_aux_loss_coef=0.1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "experts")
    AutoTokenizer.from_pretrained(policy_path).save_pretrained(tmp_path / "experts")
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0.1"):
        make_sent(str(tmp_path / "experts"), tmp_path, StubWorker(), snr_strategy="lossless")


def test_async_all_is_trl_bit_for_bit(policy_path, tmp_path):
    plain, _ = trained_on_all(policy_path, tmp_path / "plain", plain=True)
    own, _ = trained_on_all(policy_path, tmp_path / "own", snr_strategy="all")
    assert all(torch.equal(value, parameters_of(plain)[name]) for name, value in parameters_of(own).items())
    for name in ("reward", "reward_std", "rewards/parity", "loss", "batch/samples_per_row"):
        assert own.state.log_history[0][name] == plain.state.log_history[0][name], name


# Groups of the asynchronous trainer are done when they are done: what epochs, checkpoints and resumed runs count.


def trained_with(policy_path, tmp_path, sent, steps=1, **settings):
    trainer = make_sent(policy_path, tmp_path, sent, max_steps=steps, **settings)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("groups", "rows", "done"),
    [
        ([LIVE] * 8, 8, 2),  # a micro-batch that is fetched ahead is not; TRL's own: 4
        ([DEAD, LIVE, DEAD, LIVE, DEAD, LIVE, LIVE], 8, 5),  # dropped ones are
        ([LIVE] * 8, 6, 1),  # one cut in two is with its last row
    ],
)
def test_groups_are_done_that_are_trained_or_dropped(groups, rows, done, policy_path, tmp_path):
    trainer = trained_with(policy_path, tmp_path, groups, per_device_train_batch_size=rows)
    assert len(trainer._trained_groups) == done and done not in trainer._trained_groups


def test_stale_and_oversize_rows_are_done(policy_path, tmp_path):
    stale, long = rows_of_group(0, LIVE, version=-9), rows_of_group(1, LIVE, length=80)
    rows = [row for number in range(2, 9) for row in rows_of_group(number, LIVE)]
    settings = {"max_staleness": 4, "token_budget": 60}
    trainer = trained_with(policy_path, tmp_path, [*stale, *long, *rows], steps=2, **settings)
    assert {0, 1, 2} <= {group for group in range(9) if group in trainer._trained_groups}
    logged = trainer.state.log_history
    assert sum(row.get("sample/dropped_stale_total", 0) for row in logged) == 4
    assert sum(row.get("batch/dropped_oversize_total", 0) for row in logged) == 4
    assert not trainer._groups.ledger.rows.keys() & {0, 1}


def test_a_group_is_as_stale_as_its_first_row(policy_path, tmp_path):
    rows = [row for number in range(8) for row in rows_of_group(number, LIVE)]
    for row in rows[1::4]:
        row.model_version = 1
    first = trained_with(policy_path, tmp_path, rows)
    staleness = [row["snr/sampled_staleness"] for row in first.state.log_history if "snr/sampled_staleness" in row]
    for row in rows[::4]:
        row.model_version = -3
    stale = trained_with(policy_path, tmp_path, rows)
    later = [row["snr/sampled_staleness"] for row in stale.state.log_history if "snr/sampled_staleness" in row]
    assert later == [one + 3 for one in staleness] and staleness


@pytest.mark.parametrize("strategy", ["nonzero", "lossless", "all"])
def test_an_epoch_ends_when_its_data_have_been_seen(policy_path, tmp_path, strategy):
    server = Server()
    trainer = make_async(
        policy_path, tmp_path, server, snr_strategy=strategy, num_train_epochs=1, max_steps=-1,
        max_inflight_tasks=4, queue_maxsize=4,
    )  # fmt: skip
    trainer.train()
    done = len(trainer._trained_groups)
    assert 40 <= done <= 40 + 30  # dropped groups behind the last step's are done as well
    steps = trainer.state.global_step
    assert steps >= (10 if strategy in ("lossless", "all") else 2)
    if strategy != "nonzero":
        assert steps == 10  # 40 groups of 4 rows, 16 a step


def test_an_epoch_is_not_over_before_its_first_group_is(policy_path, tmp_path):
    """A straggler of the first epoch arrives after groups of the second."""
    order = [*range(1, 6), 6, 0, *range(7, 14)]
    rows = [row for number in order for row in rows_of_group(number, LIVE)]
    epoch = {"num_train_epochs": 1, "dataset": prompts_with_dead(6)}
    trainer = trained_with(policy_path, tmp_path, rows, steps=-1, **epoch)
    assert trainer.state.global_step == 4  # TRL's own ends after three steps, with six groups of seven


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("nonzero", r"6 groups in a row had nothing.*max_empty_steps=3.*same reward, 0\."),
        ("lossless", "max_empty_steps=3"),
    ],
)
def test_all_prompts_dead_end_the_run_with_the_reason(strategy, said, policy_path, tmp_path):
    with pytest.raises(RuntimeError, match=said):
        trained_with(policy_path, tmp_path, [DEAD] * 20, snr_max_empty_steps=3, snr_strategy=strategy, steps=10)


@pytest.mark.slow
def test_a_dead_worker_ends_the_run_with_trls_message(policy_path, tmp_path):
    worker = send([LIVE, DEAD, DEAD])
    worker.healthy = False
    with pytest.raises(RuntimeError, match="Rollout worker child has failed"):
        trained_with(policy_path, tmp_path, worker)


class Held(StubWorker):
    """Sends four groups, and two more for each further version of the weights, whatever becomes of them."""

    def start(self):
        self.send(16)

    def update_model_version(self, version):
        if version > 1:
            self.send(8)

    def send(self, number):
        for row in self.rows[:number]:
            self.rollout_buffer.put(row)
        del self.rows[:number]


def test_a_worker_that_waits_for_the_trainer_ends_the_run_with_the_reason(policy_path, tmp_path, monkeypatch):
    """Two groups for a version are both dropped, and without others the trainer never gets to the next version."""
    held = Held(send([LIVE, LIVE, LIVE, LIVE, DEAD, DEAD, LIVE, LIVE, LIVE, LIVE]).rows)
    monkeypatch.setattr(async_cpu.async_grpo_trainer.RolloutQueueDataset.__init__, "__defaults__", (3, 0.2, None))
    with pytest.raises(RuntimeError, match=r"sent nothing for .* dropped.*max_staleness"):
        trained_with(policy_path, tmp_path, held, steps=9, heartbeat_stale_after_s=1.0)


def test_a_slow_worker_is_waited_for(policy_path, tmp_path, monkeypatch):
    monkeypatch.setattr(async_cpu.async_grpo_trainer.RolloutQueueDataset.__init__, "__defaults__", (3, 0.2, None))
    worker = send([LIVE, LIVE, DEAD])
    late = send([LIVE] * 6).rows[12:]
    threading.Timer(1.5, lambda: [worker.rollout_buffer.put(row) for row in late]).start()
    trainer = trained_with(policy_path, tmp_path, worker, heartbeat_stale_after_s=30.0)
    assert trainer.state.global_step == 1


def test_time_in_which_nobody_asks_is_no_silence_of_the_worker():
    """An update may take longer than a worker may be silent."""

    def drop(group):
        rewards = group.rewards()
        return Selection(rewards, rewards[:, 0], rewards > 9, group.lengths()), []

    args = types.SimpleNamespace(
        num_generations=4, max_staleness=9, snr_max_empty_steps=0, generation_batch_size=8, heartbeat_stale_after_s=0.3
    )
    worker = send([DEAD, DEAD])
    worker.start()
    groups = async_groups.GroupQueue(
        types.SimpleNamespace(args=args, rollout_worker=worker, model_version=0, _decide=drop)
    )
    with pytest.raises(queue.Empty):
        groups.get(timeout=0.05)
    assert 0 in groups.ledger and 1 in groups.ledger
    time.sleep(0.5)
    with pytest.raises(queue.Empty):
        groups.get(timeout=0.05)
    with pytest.raises(RuntimeError, match="sent nothing"):
        for _ in range(20):
            with pytest.raises(queue.Empty):
                groups.get(timeout=0.05)


# A run that is killed, and resumed


@pytest.mark.slow
def test_a_killed_run_goes_on_with_nothing_lost_and_nothing_twice(policy_path, tmp_path):
    """SIGKILL at step 6, resumed from the checkpoint of step 4."""
    journals = [tmp_path / "first", tmp_path / "second"]
    command = ("async_killed.py", 1, policy_path, tmp_path / "run")
    with pytest.raises(AssertionError, match=r"ended with \[-9\]"):
        launch(*command, journals[0], "kill")
    launch(*command, journals[1])
    first, second = ([json.loads(line) for line in one.read_text().splitlines()] for one in journals)
    first = [one for one in first if "group" in one]
    before = {one["group"] for one in first if one["step"] <= 4}
    start = second[0]["start"]
    after = [start + one["group"] for one in second[1:-1]]
    assert max(one["step"] for one in first) >= 5 and len(before) >= 16
    assert len(after) == len(set(after)) and not before & set(after)  # nothing twice
    seen = before | set(after)
    assert set(range(start)) <= before and start > 0  # nothing lost
    assert before - set(range(start)), "no straggler: the test shows nothing"
    frontier = start + second[-1]["frontier"]
    assert frontier > max(before) and set(range(frontier)) <= seen
    assert second[0]["range"] == [0.0, 1.0]  # the filter's state


# Pilots in the loop of TRL's rollout worker: what is sampled, and what is handed on.


CALLS = []


def counted(completions, dead, **columns):
    CALLS.extend(map(id, completions))
    return parity(completions, dead, **columns)


async def awaited(completions, dead, **columns):
    await asyncio.sleep(0)
    return counted(completions, dead, **columns)


def with_pilots(policy_path, tmp_path, server, pilots=4, reward=parity, steps=4, **settings):
    trainer = make_async(
        policy_path, tmp_path, server, reward=reward, num_generations=16, snr_pilot_generations=pilots,
        snr_strategy="nonzero", max_steps=steps, **settings,
    )  # fmt: skip
    trainer.train()
    return trainer


def of_step(trainer, key):
    return [row[key] for row in trainer.state.log_history if key in row]


def test_prompts_without_varying_pilots_cost_their_pilots_alone(policy_path, tmp_path):
    server = Server()
    trainer = with_pilots(policy_path, tmp_path, server, dataset=prompts_with_dead(1000))  # each is sampled once
    counts = list(server.asked.values())
    assert set(counts) <= set(range(17)) and counts.count(16) >= 4
    assert counts.count(4) > 0.4 * len(counts)  # seven of ten prompts are dead
    assert server.completions < 0.65 * 16 * len(counts)
    assert min(of_step(trainer, "snr/sampled_fraction")) < 0.8
    assert 0 < min(of_step(trainer, "snr/committed_fraction")) < 0.6


def test_groups_that_go_on_are_trained_whole_and_those_given_up_not_at_all(policy_path, tmp_path):
    server = Server()
    trainer = make_async(
        policy_path, tmp_path, server, num_generations=16, snr_pilot_generations=4, snr_strategy="nonzero", max_steps=3
    )
    decided = note_decisions(trainer)
    trainer.train()
    seen = [
        (group.tags[0].given_up, len(group.rows), len(rows), group.rewards().isnan().sum().item())
        for group, _, rows in decided
    ]
    assert {one for one in seen if one[0]} == {(True, 4, 0, 12)}
    whole = [one for one in seen if not one[0]]
    assert all(number == 16 and missing == 0 and kept in (0, 16) for _, number, kept, missing in whole)
    assert sum(kept == 16 for _, _, kept, _ in whole) >= 3


def test_a_group_that_was_given_up_is_dropped_though_its_pilots_vary(policy_path, tmp_path):
    """Their variance may be below what is worth the other completions."""
    rows = [row for number in range(12) for row in rows_of_group(number, LIVE)]
    for number, row in enumerate(rows):
        row.metrics[TAG] = RowTag(4, number % 4, given_up=row.group_id % 2 == 0)
    trainer = make_sent(policy_path, tmp_path, rows)
    trainer.train()
    assert trainer.latest_selection.groups.tolist() == [False, True] * 4


def test_rewards_are_means_over_completions_and_not_over_groups(policy_path, tmp_path):
    rows = []
    for number in range(12):
        given_up = number % 2 == 0
        group = rows_of_group(number, [1, 1] if given_up else [1, 0, 0, 0])
        for member, row in enumerate(group):
            row.metrics[TAG] = RowTag(len(group), member, given_up)
        rows += group
    trainer = make_sent(policy_path, tmp_path, rows)
    decided = note_decisions(trainer)
    trainer.train()
    seen = [row.metrics["reward"] for group, *_ in decided for row in group.rows]
    assert trainer.state.log_history[0]["reward"] == pytest.approx(sum(seen) / len(seen))


@pytest.mark.parametrize("reward", [counted, awaited])
def test_no_completion_is_scored_twice(policy_path, tmp_path, reward):
    CALLS.clear()
    held = []  # so that no id comes twice
    generate = FilteredRolloutLoop._generate_one

    async def kept(self, *args, **kwargs):
        result = await generate(self, *args, **kwargs)
        held.append(result)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FilteredRolloutLoop, "_generate_one", kept)
        with_pilots(policy_path, tmp_path, Server(), reward=reward, steps=2)
    assert len(CALLS) == len(set(CALLS)) > 50


def test_pilots_see_the_reward_that_groups_are_scored_by(policy_path, tmp_path):
    def shaped(completions, **columns):
        return [float(len(text_of(text))) for text in completions]  # varies everywhere

    server = Server()
    trainer = make_async(
        policy_path, tmp_path, server, reward=[shaped, parity], num_generations=16, snr_pilot_generations=4,
        snr_strategy="top_p", snr_value=1.0, snr_score_reward="parity", max_steps=3, dataset=prompts_with_dead(1000),
    )  # fmt: skip
    trainer.train()
    counts = list(server.asked.values())
    assert counts.count(4) > 0.35 * len(counts)


def test_async_pilots_come_by_default_with_large_groups_and_trls_own_worker(policy_path, tmp_path):
    made = {"num_generations": 16, "snr_strategy": "nonzero", "max_steps": 1}
    assert make_async(policy_path, tmp_path, Server(), **made).pilot_generations == 2
    assert make_async(policy_path, tmp_path, Server(), **made | {"num_generations": 8}).pilot_generations == 0
    assert make_async(policy_path, tmp_path, Server(), **made | {"snr_strategy": "all"}).pilot_generations == 0
    foreign = make_async(policy_path, tmp_path, Server(), **made, rollout_worker=StubWorker())
    assert foreign.pilot_generations == 0


@pytest.mark.parametrize("name", ["rollout_worker", "environment_factory"])
def test_pilots_that_cannot_be_sampled_or_scored_are_refused(policy_path, tmp_path, name):
    with pytest.raises(ValueError, match=f"snr_pilot_generations=2.*{name}.*allowed"):
        make_async(policy_path, tmp_path, Server(), max_steps=1, snr_pilot_generations=2, **{name: StubWorker})


@pytest.mark.slow
def test_the_spawned_process_of_trls_worker_samples_pilots(policy_path, tmp_path, monkeypatch):
    monkeypatch.setattr(async_cpu.async_grpo_trainer, "AsyncRolloutWorker", async_cpu.ProcessWorker)
    server = Server()
    with_pilots(policy_path, tmp_path, server, steps=2, dataset=prompts_with_dead(1000))
    counts = list(server.asked.values())
    assert counts.count(4) > 0.3 * len(counts) and counts.count(16) >= 2


def test_audits_are_the_same_whichever_group_is_scored_first():
    """Each is drawn for its group, and depends on no other draw."""
    varies, equal = np.array([[1.0, 0, 0, 1]]), np.zeros((1, 4))

    def audits(order):
        policy = Policy(None, Pilots(4, 16, groups=1, seed=3))
        chosen = {number: policy.choose(varies if number % 10 < 3 else equal, number, fewest=0) for number in order}
        return {
            number for number, one in chosen.items() if one.audited[0] and 50 <= number < 750
        }  # once it has learned

    found = audits(range(800))
    assert found == audits(reversed(range(800))) and 3 <= len(found) <= 25


def test_a_reward_is_asked_for_the_completions_that_it_has_not_scored():
    asked = []

    def reward(completions, prompts, **columns):
        asked.append((completions, prompts))
        return [len(one) for one in completions]

    once, first, second = ScoredOnce(reward), ["a"], ["b", "c"]

    async def both():
        before = await once(completions=[first], prompts=["p"])
        return before, await once(completions=[second, first], prompts=["q", "p"])

    assert asyncio.run(both()) == ([1], [2, 1])
    assert asked == [([first], ["p"]), ([second], ["q"])]
    assert not once.known
