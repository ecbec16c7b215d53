"""Taking the place of `GRPOTrainer` in an existing script, and bad input. Promises: `test_promises_*`."""

import async_cpu
import pytest
import torch
from algorithms import GRPO, PPO, RLOO, for_each, length_reward, replay_of
from async_cpu import Server, StubWorker, make_async
from conftest import PROMPTS, log_rows, parameters_of
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer

# Drop-in


def test_a_plain_grpo_config_gets_the_default_filter(policy_path, prompts, make_args):
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, make_args(snr=False, max_steps=1), prompts)
    assert trainer.args.snr_strategy == "top_p"
    assert trainer.args.snr_value == 0.9
    trainer.train()
    assert "snr/kept_fraction" in log_rows(trainer)[0]


def test_a_config_of_another_trainer_is_refused(policy_path, prompts, make_args):
    class OtherConfig(GRPOConfig):
        pass

    with pytest.raises(TypeError, match=r"OtherConfig.*SNRFilteredGRPOConfig"):
        SNRFilteredGRPOTrainer(policy_path, length_reward, OtherConfig(use_cpu=True, bf16=False), prompts)


# Bad input


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"snr_strategy": "top-p"},
            ["snr_strategy", "'top-p'", "all", "lossless", "nonzero", "top_p", "top_k", "min_p"],
        ),
        ({"snr_score": "variance"}, ["snr_score", "'variance'", "reward_variance", "random"]),
        ({"snr_selector": "hardest"}, ["snr_selector", "'hardest'", "package.module:name"]),
        ({"snr_dynamic_sampling_rounds": -1}, ["snr_dynamic_sampling_rounds", "-1", "0 or more"]),
        ({"snr_value": 1.5}, ["snr_value", "1.5", "0 < value <= 1"]),
        ({"snr_value": float("nan")}, ["snr_value", "nan", "0 < value <= 1"]),
        ({"num_generations": 1}, ["num_generations", "1", ">= 2"]),
    ],
)
def test_settings_out_of_range_are_refused_by_name_value_and_allowed_set(settings, parts, make_args):
    with pytest.raises(ValueError) as error:
        make_args(**settings)
    for part in parts:
        assert part in str(error.value)


def test_a_dataset_without_prompts_is_refused(policy_path, make_args):
    dataset = Dataset.from_dict({"question": PROMPTS})
    with pytest.raises(ValueError, match=r"'question'.*'prompt'"):
        SNRFilteredGRPOTrainer(policy_path, length_reward, make_args(), dataset)


def test_prompts_made_by_a_transform_are_welcome(policy_path, make_args):
    dataset = Dataset.from_dict({"question": PROMPTS}).with_transform(lambda rows: {"prompt": rows["question"]})
    args = make_args(max_steps=1, remove_unused_columns=False)
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, args, dataset)
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": 3, "steps_per_generation": 2}, {}], ids=str)
def test_iterable_datasets_train(settings, policy_path, prompts, make_args):
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, make_args(**settings), prompts.to_iterable_dataset())
    trainer.train()
    assert trainer.state.global_step == 3


def test_lora_trains_the_adapter_alone(policy_path, prompts, make_args):
    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    args = make_args(gradient_accumulation_steps=2, beta=0.1)
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, args, prompts, peft_config=adapter)
    start = parameters_of(trainer)
    trainer.train()
    moved = {name for name, value in parameters_of(trainer).items() if not torch.equal(value, start[name])}
    assert moved and all("lora_" in name for name in moved)


def test_defaults_are_the_papers():
    config = SNRFilteredGRPOConfig(use_cpu=True, bf16=False)
    assert (config.snr_strategy, config.snr_value, config.snr_score) == ("top_p", 0.9, "reward_variance")
    assert config.snr_selector is None


def test_a_group_size_that_does_not_divide_the_batch_is_refused_with_its_numbers(make_args):
    with pytest.raises(ValueError, match=r"6.*4"):
        make_args(per_device_train_batch_size=6, num_generations=4)


# Options of the filter that leave one another without effect are refused, by name.


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
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


@pytest.mark.slow
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
