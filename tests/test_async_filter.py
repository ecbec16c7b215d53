"""The filter in TRL's asynchronous trainer: which groups are trained, and what is refused."""

import async_cpu
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
    rows_logged,
    rows_of_group,
    send,
)
from async_cpu import on_a_cpu as on_a_cpu
from conftest import parameters_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl.experimental.async_grpo import AsyncGRPOTrainer

from ragen2_trl import SNRFilteredAsyncGRPOConfig, SNRFilteredAsyncGRPOTrainer
from ragen2_trl.metrics import metric
from ragen2_trl.trainers.async_groups import TAG, RowTag

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
    zero = sum(row["snr/zero_variance_fraction"] for row in rows_logged(trainer)) / 4
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
    (row,) = rows_logged(trainer)
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


def test_a_reward_that_nobody_gives_is_refused_by_its_name(policy_path, tmp_path):
    trainer = make_sent(policy_path, tmp_path, [LIVE], snr_score_reward="success")
    with pytest.raises(ValueError, match=r"snr_score_reward='success'.*parity"):
        trainer.train()


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
    assert all(
        name in message for name in ("group_id=0", "num_generations=4", TAG, "RowTag", "one for each conversation")
    )


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


def test_entropies_are_refused_where_a_selector_asks(policy_path, tmp_path):
    trainer = make_sent(policy_path, tmp_path, [LIVE] * 3, selector=lambda groups: groups.entropies() > 0)
    with pytest.raises(ValueError, match="entropies need a forward pass"):
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


@pytest.mark.parametrize("trainer_class", [LosesTheLoader, LosesTheStep, LosesTheLog])
def test_an_async_subclass_that_loses_the_filter_is_refused_before_a_wrong_update(
    trainer_class, policy_path, tmp_path, monkeypatch
):
    monkeypatch.setattr(async_cpu, "SNRFilteredAsyncGRPOTrainer", trainer_class)
    trainer = make_sent(policy_path, tmp_path, [LIVE] * 16, max_steps=3, gradient_accumulation_steps=2)
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


def train(path, folder, **settings):
    sent = [*all_rows(), *rows_of_group(8, [1, 0, 1, 0]), *rows_of_group(9, [1, 0, 1, 0])]
    trainer = make_sent(path, folder, sent, **settings)
    seen = note_inputs(trainer)
    trainer.train()
    return trainer, seen


@pytest.mark.parametrize("budget", [0, 100], ids=["fixed count", "token budget"])
def test_async_lossless_is_the_update_of_trl(policy_path, tmp_path, budget):
    settings = {"gradient_accumulation_steps": 2, "token_budget": budget}
    settings |= {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 1e9}
    plain, of_plain = train(policy_path, tmp_path / "plain", plain=True, **settings)
    own, of_own = train(policy_path, tmp_path / "own", snr_strategy="lossless", **settings)
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
    _, seen = train(policy_path, tmp_path, snr_strategy="lossless", per_device_train_batch_size=12)
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
    plain, _ = train(policy_path, tmp_path / "plain", plain=True)
    own, _ = train(policy_path, tmp_path / "own", snr_strategy="all")
    assert all(torch.equal(value, parameters_of(plain)[name]) for name, value in parameters_of(own).items())
    for name in ("reward", "reward_std", "rewards/parity", "loss", "batch/samples_per_row"):
        assert own.state.log_history[0][name] == plain.state.log_history[0][name], name
