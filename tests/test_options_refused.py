"""Options of the filter that leave one another without effect are refused, by name."""

import async_cpu
import pytest
from algorithms import GRPO, PPO, RLOO, for_each, replay_of
from async_cpu import Server, StubWorker, make_async
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

# One that anybody can import.
SELECTOR = {"snr_selector": "ragen2_trl.filtering:zero_variance"}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({**SELECTOR, "snr_strategy": "top_k"}, ["snr_strategy='top_k'", "snr_selector=", "'top_p'"]),
        ({**SELECTOR, "snr_value": 0.5}, ["snr_value=0.5", "snr_selector=", "0.9"]),
        ({**SELECTOR, "snr_score": "length"}, ["snr_score='length'", "snr_selector=", "'reward_variance'"]),
        (
            {"snr_score": "length", "mask_truncated_completions": True},
            ["snr_score='length'", "mask_truncated_completions=True", "reward_variance"],
        ),
        ({"snr_score": "reward_sum"}, ["snr_strategy='top_p'", "snr_score='reward_sum'", "top_k"]),
        (
            {"snr_score": "reward_mean", "snr_strategy": "min_p", "snr_value": 0.1},
            ["snr_strategy='min_p'", "snr_score='reward_mean'", "top_k"],
        ),
        *[
            ({"snr_strategy": strategy, name: value}, [f"{name}={value!r}", f"snr_strategy={strategy!r}", allowed])
            for strategy in ("all", "nonzero")
            for name, value, allowed in (("snr_value", 0.5, "0.9"), ("snr_score", "length", "reward_variance"))
        ],
        ({"snr_strategy": "all", "snr_score_reward": "success"}, ["snr_score_reward='success'", "'all'"]),
        ({"snr_strategy": "all", "snr_dynamic_sampling_rounds": 1}, ["snr_dynamic_sampling_rounds=1", "'all'"]),
        ({"snr_strategy": "all", "snr_pilot_generations": 2}, ["snr_pilot_generations=2", "'all'"]),
    ],
)
def test_settings_that_leave_one_another_without_effect_are_refused_by_name(settings, parts, tmp_path):
    for algorithm in (GRPO, RLOO, PPO):
        with pytest.raises(ValueError) as refused:
            algorithm.args(tmp_path, **settings)
        assert all(part in str(refused.value) for part in parts)


NOTHING_TO_TRAIN = r"no parameter with requires_grad=True.*is_trainable=True.*peft_config"


@pytest.mark.parametrize("beta", [0.0, 0.1])
@for_each
def test_an_adapter_that_was_loaded_without_is_trainable_is_refused(algorithm, beta, policy_path, tmp_path):
    policy = AutoModelForCausalLM.from_pretrained(policy_path)
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(policy, adapter).save_pretrained(tmp_path / "adapter")
    replay = replay_of(policy_path)
    for is_trainable in (False, True):
        policy = AutoModelForCausalLM.from_pretrained(policy_path)
        model = PeftModel.from_pretrained(policy, tmp_path / "adapter", is_trainable=is_trainable)
        args = algorithm.args(tmp_path, beta=beta, max_steps=1)
        trainer = algorithm.make(model, args, replay, processing_class=replay.tokenizer)
        if is_trainable:
            trainer.train()
        else:
            with pytest.raises(ValueError, match=NOTHING_TO_TRAIN):
                trainer.train()
        assert trainer.state.global_step == is_trainable


def test_a_frozen_model_is_refused_by_the_asynchronous_trainer(policy_path, tmp_path, monkeypatch):
    async_cpu.patch(monkeypatch.setattr)
    trainer = make_async(policy_path, tmp_path, Server(), rollout_worker=StubWorker(), max_steps=1)
    trainer.model.requires_grad_(False)
    with pytest.raises(ValueError, match=NOTHING_TO_TRAIN):
        trainer.train()
