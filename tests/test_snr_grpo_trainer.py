"""Taking the place of `GRPOTrainer` in an existing script, and bad input. Promises: `test_promises_*`."""

import pytest
import torch
from conftest import PROMPTS, parameters_of
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer


def length_reward(completions, **kwargs):
    return [len(completion) / 10 for completion in completions]


def log_rows(trainer) -> list[dict]:
    return [row for row in trainer.state.log_history if "loss" in row]


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


def test_the_card_names_the_method_and_the_paper(policy_path, prompts, make_args, tmp_path):
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, make_args(max_steps=1), prompts)
    trainer.create_model_card(model_name="lake")
    card = (tmp_path / "run" / "README.md").read_text()
    for part in ("SNR-filtered GRPO", "2604.06268", "snr-filter"):
        assert part in card


def test_defaults_are_the_papers():
    config = SNRFilteredGRPOConfig(use_cpu=True, bf16=False)
    assert (config.snr_strategy, config.snr_value, config.snr_score) == ("top_p", 0.9, "reward_variance")
    assert config.snr_selector is None


def test_a_group_size_that_does_not_divide_the_batch_is_refused_with_its_numbers(make_args):
    with pytest.raises(ValueError, match=r"6.*4"):
        make_args(per_device_train_batch_size=6, num_generations=4)
