"""What listens to the asynchronous trainer: mutual information, health, cost, the record of a run and its card."""

import json
import runpy
from pathlib import Path

import async_cpu
import datasets
import pytest
import torch
from async_cpu import ASYNC_RUN, LIVE, Server, StubWorker, Transfer, make_async, make_sent, note_inputs, rows_of_group
from async_cpu import on_a_cpu as on_a_cpu
from conftest import log_rows, parameters_of
from transformers import AutoTokenizer

from ragen2_trl import (
    CostCallback,
    EnvironmentEvalCallback,
    EpisodeCallback,
    MutualInformationCallback,
    SNRFilteredAsyncGRPOConfig,
    SNRFilteredAsyncGRPOTrainer,
)
from ragen2_trl.envs import make_env
from ragen2_trl.metrics import metric
from ragen2_trl.record.run import read_run
from ragen2_trl.rollout_events import gather_rollout, listen
from ragen2_trl.trainers.async_groups import ArrivedGroup, RowTag
from ragen2_trl.trainers.async_grpo import _local_rollout

pytestmark = pytest.mark.usefixtures("on_a_cpu")


@pytest.fixture(scope="module")
def run(policy_path, tmp_path_factory):
    """A run with everything that listens."""
    with pytest.MonkeyPatch.context() as patch:
        async_cpu.patch(patch.setattr)
        patch.setattr(async_cpu.async_grpo_trainer, "AsyncRolloutWorker", async_cpu.ThreadWorker)
        server = Server()
        settings = {"snr_strategy": "nonzero", "max_steps": 4, "learning_rate": 1e-3}
        trainer = make_async(policy_path, tmp_path_factory.mktemp("run"), server, **settings)
        trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=4))
        trainer.add_callback(CostCallback(trainer))
        told = []
        listen(trainer, on_rollout=told.append)
        trainer.train()
        trainer.create_model_card()
    return trainer, server, told


def test_mutual_information_is_measured_on_all_that_was_sampled(run):
    trainer, _, told = run
    row = log_rows(trainer)[0]
    assert 0 <= row["mi/first_turn/retrieval_accuracy"] <= 1
    assert row["mi/first_turn/num_prompts"] >= 8  # dropped groups too: the first step keeps four
    assert all(one.rewards.shape[1] == 4 and len(one.completion_ids) == one.rewards.numel() for one in told)
    saved = Path(trainer.args.output_dir, "_measurements").glob("measurement_*.json")
    assert len(list(saved)) == sum("mi/tokens" in row for row in log_rows(trainer)) >= 2


def test_health_counts_the_completions_of_the_asynchronous_trainer(run):
    trainer, _, told = run
    counts = [row["health/completions"] for row in log_rows(trainer)]
    assert counts == [one.rewards.numel() for one in told]


def test_cost_counts_what_was_sampled_and_computed(run):
    trainer, server, told = run
    row = log_rows(trainer)[-1]
    assert row["cost/sampled_completions"] == sum(one.rewards.numel() for one in told) <= server.completions
    assert row["cost/sampled_tokens"] == sum(len(ids) for one in told for ids in one.completion_ids)
    forwarded = sum(one["batch/forwarded_tokens_per_step"] for one in log_rows(trainer))
    assert row["cost/update_tokens"] == forwarded  # neither measurements nor rows of dropped groups
    assert row["cost/plain_completions"] == 16 * len(told)


def test_every_metric_of_ours_is_in_the_registry(run):
    trainer, *_ = run
    ours = {key for row in log_rows(trainer) for key in row if key.startswith(("snr/", "mi/", "health/", "cost/"))}
    assert {"snr/sampled_staleness", "mi/first_turn/mi_seq", "cost/seconds"} <= ours
    assert sorted(key for key in ours if metric(key) is None) == []


def test_the_record_and_the_card_know_the_asynchronous_trainer(run):
    trainer, *_ = run
    folder = Path(trainer.args.output_dir)
    card = (folder / "README.md").read_text()
    assert "RAGEN-2" in card and "retrieval accuracy" in card
    found = read_run(folder)
    assert found.settings["trainer"] == "SNRFilteredAsyncGRPOTrainer"
    assert found.settings["snr_strategy"] == "nonzero" and found.settings["reward_funcs"] == ["parity"]
    lines = [json.loads(line) for line in (folder / "_measurements" / "group_rewards.jsonl").read_text().splitlines()]
    assert sum(len(line["rewards"]) for line in lines) >= 24 and any(not all(line["kept"]) for line in lines)


def test_forward_passes_aside_leave_trls_attention_as_it_was(run):
    trainer, *_ = run
    assert trainer.model.config._attn_implementation == "tree_fa3"


def test_listeners_leave_an_asynchronous_training_as_it_is(policy_path, tmp_path):
    def train(folder, listens):
        trainer = make_sent(policy_path, folder, [[1, 0, 0, number % 2] for number in range(16)], max_steps=3)
        if listens:
            trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=2))
        trainer.train()
        return parameters_of(trainer)

    alone, beside = train(tmp_path / "alone", False), train(tmp_path / "beside", True)
    assert all(torch.equal(value, alone[name]) for name, value in beside.items())


def test_conversations_of_several_rows_are_told_as_turns():
    rows = rows_of_group(3, [1, 0, 0, 1], forks=[1, 2, 1, 0])
    group = ArrivedGroup(rows, [RowTag(4, member) for member in (0, 1, 1, 2)], 4, 4, 0)
    local = _local_rollout([group], group.rewards())
    assert [len(samples) for samples in local.turn_samples] == [0, 1, 0, 0]
    assert len(local.completion_ids) == 4 and local.completion_ids[3] == []
    assert [len(ids) for ids in local.prompt_ids] == [4] * 4 and len(gather_rollout(local).completion_ids) == 4


def test_a_callback_that_needs_trls_own_batches_is_refused_by_its_name(policy_path, tmp_path):
    trainer = make_async(policy_path, tmp_path, Server(), max_steps=1)
    with pytest.raises(TypeError, match=r"EnvironmentEvalCallback.*SNRFilteredAsyncGRPOTrainer"):
        EnvironmentEvalCallback(make_env("frozen_lake"), trainer)
    with pytest.raises(TypeError, match=r"EpisodeCallback.*SNRFilteredAsyncGRPOTrainer"):
        EpisodeCallback(trainer)


@pytest.mark.parametrize("strategy", ["nonzero", "lossless", "all"])
def test_every_completion_and_every_pass_is_counted(strategy, policy_path, tmp_path):
    """Completions without a reward, groups that come too late, and passes of every strategy."""
    groups = [rows_of_group(number, LIVE, version=-9 * (number == 0)) for number in range(10)]
    for rows in groups:
        rows[1].advantage = 0.0
        rows[1].metrics |= dict.fromkeys(("reward", "rewards/parity"), float("nan"))
    worker = StubWorker([row for rows in groups for row in rows])
    trainer = make_sent(policy_path, tmp_path, worker, snr_strategy=strategy, max_steps=2, max_staleness=4)
    taken, seen, announce = [], note_inputs(trainer), trainer._announce

    def announcing():
        taken.append((40 - worker.rollout_buffer.qsize()) // 4 * 4)  # rows of whole groups that have arrived
        announce()

    trainer._announce = announcing
    trainer.train()
    row = log_rows(trainer)[-1]
    assert row["cost/sampled_completions"] == taken[-1]
    assert row["cost/update_positions"] == row["cost/update_tokens"] > 0
    assert row["cost/update_rows"] == sum(int(one["segment_id"].max()) + 1 for one in seen) > 0
    assert (row["cost/update_positions"] < row["cost/plain_update_positions"]) == (strategy == "lossless")
    assert [one["snr/generation"] for one in log_rows(trainer)] == [1, 2]
    assert trainer._groups.state()["generations"] == 2


# The example for the asynchronous trainer runs, with a small model and a server of the tests.


EXAMPLE = Path(__file__).parents[1] / "examples" / "async_grpo.py"


def test_the_asynchronous_example_trains(policy_path, tmp_path, monkeypatch, on_a_cpu):
    monkeypatch.chdir(tmp_path)
    server = Server()
    config, init = SNRFilteredAsyncGRPOConfig.__init__, SNRFilteredAsyncGRPOTrainer.__init__
    asked, trained = {}, []

    def small(self, *args, **settings):
        asked.update(settings)
        settings |= {**ASYNC_RUN, "vllm_server_base_url": server.url, "max_steps": 2, "max_completion_length": 8}
        config(self, *args, **settings | {"num_generations": asked["num_generations"]})

    def made(self, model, reward_funcs, **given):
        tokenizer = AutoTokenizer.from_pretrained(policy_path)
        tokenizer.response_template = async_cpu.TEXT
        given |= {"processing_class": tokenizer, "weight_transfer": Transfer(server)}
        init(self, policy_path, async_cpu.parity, **given)
        trained.append(self)

    monkeypatch.setattr(SNRFilteredAsyncGRPOConfig, "__init__", small)
    monkeypatch.setattr(SNRFilteredAsyncGRPOTrainer, "__init__", made)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: async_cpu.prompts_with_dead())
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    (trainer,) = trained
    assert trainer.state.global_step == 2 and trainer.pilot_generations == asked["snr_pilot_generations"]
    assert 2 / 16 <= trainer.state.log_history[0]["snr/sampled_fraction"] < 1
