"""The example for the asynchronous trainer runs, with a small model and a server of the tests."""

import runpy
from pathlib import Path

import async_cpu
import datasets
from async_cpu import ASYNC_RUN, Server, Transfer
from async_cpu import on_a_cpu as on_a_cpu
from transformers import AutoTokenizer

from ragen2_trl import SNRFilteredAsyncGRPOConfig, SNRFilteredAsyncGRPOTrainer

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
