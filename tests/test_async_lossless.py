"""`snr_strategy="lossless"` in TRL's asynchronous trainer is its own update without the rows that add nothing."""

import async_cpu
import pytest
import torch
from async_cpu import Server, StubWorker, make_async, rows_of_group
from conftest import parameters_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    async_cpu.patch(monkeypatch.setattr)


# Live and dead groups, and one with members at the mean. Of the third, TRL's mean is off by rounding.
REWARDS = [[1, 0, 0, 1], [0] * 4, [0.1] * 4, [0, 0.5, 1, 0.5], [0] * 4, [1, 1, 1, 0], [0] * 4, [0] * 4]


def groups():
    rows = [row for number, rewards in enumerate(REWARDS) for row in rows_of_group(number, rewards)]
    for row in rows[8:12]:
        row.advantage = 1e-9
    return rows


def train(path, folder, **settings):
    worker = StubWorker([*groups(), *rows_of_group(8, [1, 0, 1, 0]), *rows_of_group(9, [1, 0, 1, 0])])
    trainer = make_async(path, folder, Server(), rollout_worker=worker, max_steps=1, **settings)
    seen, compute_loss = [], trainer.compute_loss

    def spy(model, inputs, *args, **kwargs):
        seen.append({name: value.clone() for name, value in inputs.items()})
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = spy
    trainer.train()
    return trainer, seen


@pytest.mark.parametrize("budget", [0, 100], ids=["fixed count", "token budget"])
def test_async_lossless_is_the_update_of_trl(policy_path, tmp_path, budget):
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "token_budget": budget}
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
        rewards = [[1, 0, 0, 1], [0] * 4] * 2  # the second micro-batch is only read ahead
        worker = StubWorker(
            [row for number, one in enumerate(rewards) for row in rows_of_group(number, one, length=6 + 24 * number)]
        )
        settings |= {"per_device_train_batch_size": 8, "rollout_worker": worker, "max_steps": 1}
        trainer = make_async(str(tmp_path / "policy"), tmp_path, Server(), **settings)
        compute_loss = trainer.compute_loss

        def spy(model, inputs, *args, compute_loss=compute_loss, **kwargs):
            longest.append(int(inputs["position_ids"].max()))
            return compute_loss(model, inputs, *args, **kwargs)

        trainer.compute_loss = spy
        trainer.train()
    assert (longest[0] == longest[1]) == (kind == "dynamic")


def test_a_micro_batch_without_advantages_keeps_one_row_and_moves_nothing(policy_path, tmp_path):
    worker = StubWorker([row for number in range(8) for row in rows_of_group(number, [0, 0, 0, 0])])
    settings = {"per_device_train_batch_size": 8, "snr_strategy": "lossless"}
    trainer = make_async(policy_path, tmp_path, Server(), rollout_worker=worker, max_steps=2, **settings)
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
        make_async(
            str(tmp_path / "experts"), tmp_path, Server(), rollout_worker=StubWorker(), max_steps=1,
            snr_strategy="lossless",
        )  # fmt: skip


def test_async_all_is_trl_bit_for_bit(policy_path, tmp_path):
    plain, _ = train(policy_path, tmp_path / "plain", plain=True, per_device_train_batch_size=8)
    own, _ = train(policy_path, tmp_path / "own", snr_strategy="all", per_device_train_batch_size=8)
    assert all(torch.equal(value, parameters_of(plain)[name]) for name, value in parameters_of(own).items())
    for name in ("reward", "reward_std", "rewards/parity", "loss", "batch/samples_per_row"):
        assert own.state.log_history[0][name] == plain.state.log_history[0][name], name
