"""What a PPO run leaves on disk: the policy as others know it, and its critic apart."""

import pytest
import torch
from conftest import PROMPTS, assert_same_parameters, parameters_of
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from test_ppo import ppo_args
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from ragen2_trl import SNRFilteredPPOTrainer
from ragen2_trl.trainers.ppo.critic import FOLDER, WEIGHTS


def length_reward(completions, **kwargs):
    return [len(completion) / 10 for completion in completions]


def make_trainer(policy_path, args, **kwargs):
    return SNRFilteredPPOTrainer(policy_path, length_reward, args, Dataset.from_dict({"prompt": PROMPTS}), **kwargs)


@pytest.mark.parametrize("value_head", ["shared", "separate"])
def test_the_policy_is_saved_as_others_know_it_and_the_critic_apart(value_head, policy_path, make_args, tmp_path):
    trainer = make_trainer(policy_path, ppo_args(make_args, value_head=value_head))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    assert weights and not any("critic" in name for name in weights)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    policy = {name: value for name, value in parameters_of(trainer).items() if not name.startswith("critic.")}
    assert_same_parameters(policy, dict(alone.named_parameters()))
    saved = load_file(tmp_path / "saved" / FOLDER / WEIGHTS)
    assert_same_parameters(dict(trainer.critic.named_parameters()), saved)


def test_a_saved_critic_can_be_the_value_model_of_another_run(policy_path, make_args, tmp_path):
    args = ppo_args(make_args, value_head="separate")
    trainer = make_trainer(policy_path, args)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    again = make_trainer(policy_path, args, value_model=str(tmp_path / "saved" / FOLDER))
    assert_same_parameters(dict(trainer.critic.named_parameters()), dict(again.critic.named_parameters()))


@pytest.mark.parametrize(
    "kind", [{"value_head": "shared"}, {"value_head": "separate"}, {"value_head": "shared", "lora": True}], ids=str
)
def test_a_resumed_run_has_the_critic_and_the_moments_of_both_halves(kind, policy_path, make_args, tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 16}
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM") if kind.get("lora") else None

    def trainer_in(folder):
        args = ppo_args(make_args, output_dir=str(tmp_path / folder), value_head=kind["value_head"], **settings)
        torch.manual_seed(0)  # adapters begin at random
        return make_trainer(policy_path, args, peft_config=lora)

    whole = trainer_in("whole")
    whole.train()
    resumed = trainer_in("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same_parameters(parameters_of(whole), parameters_of(resumed))


def test_a_checkpoint_that_has_lost_its_critic_is_not_resumed_from(policy_path, make_args, tmp_path):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(policy_path, ppo_args(make_args, **settings)).train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    (checkpoint / FOLDER / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=f"{FOLDER}/{WEIGHTS} is missing"):
        make_trainer(policy_path, ppo_args(make_args, **settings)).train(resume_from_checkpoint=str(checkpoint))


def test_a_critic_of_another_kind_is_refused(policy_path, make_args, tmp_path):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(policy_path, ppo_args(make_args, **settings)).train()
    other = make_trainer(policy_path, ppo_args(make_args, value_head="separate", **settings))
    with pytest.raises(ValueError, match=r"critic\.safetensors holds .* the same value_head"):
        other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))


def test_inference_engines_are_given_the_policy_alone(policy_path, make_args, monkeypatch):
    """TRL copies the weights to them in `_generate`."""

    def generate(trainer, prompts):
        return [name for name, _ in trainer.model.named_parameters()]

    monkeypatch.setattr(GRPOTrainer, "_generate", generate)
    trainer = make_trainer(policy_path, ppo_args(make_args))
    trainer.use_vllm = True
    seen = trainer._generate(PROMPTS)
    assert seen and not any(name.startswith("critic.") for name in seen)
    assert any(name.startswith("critic.") for name, _ in trainer.model.named_parameters())


def test_the_critic_goes_to_the_hub_apart_from_the_policy(policy_path, make_args, tmp_path, monkeypatch):
    calls = {}
    monkeypatch.setattr("huggingface_hub.create_repo", lambda repo_id, **kwargs: calls.update(made=repo_id))
    monkeypatch.setattr("huggingface_hub.upload_folder", lambda **kwargs: calls.update(kwargs))
    trainer = make_trainer(policy_path, ppo_args(make_args))
    trainer.push_critic_to_hub("tester/lake-critic")
    assert calls["made"] == calls["repo_id"] == "tester/lake-critic"
    assert calls["folder_path"] == tmp_path / "run" / FOLDER
    assert (calls["folder_path"] / WEIGHTS).exists()
