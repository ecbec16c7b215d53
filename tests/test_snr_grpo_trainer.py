"""The trainer's promises, each through a real `trainer.train()`."""

import pytest
import torch
from conftest import PROMPTS, assert_same_parameters, parameters_of
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOTrainer

from ragen2_trl import SNRFilteredGRPOTrainer

LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]


def length_reward(completions, **kwargs):
    return [len(completion) / 10 for completion in completions]


def only_some_prompts_vary(prompts, completions, **kwargs):
    """Groups of prompts that start with 'Go' differ in reward, the others are solved or failed altogether."""
    return [
        len(completion) / 10 if prompt.startswith("Go") else float(prompt.startswith("Where"))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


class Recorder(TrainerCallback):
    """Gradients just before each optimizer step."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


# Promise 1


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_neutral_is_grpo(loss_type, policy_path, prompts, make_args):
    settings = {"loss_type": loss_type, "gradient_accumulation_steps": 2, "beta": 0.01, "entropy_coef": 0.01}
    plain = GRPOTrainer(policy_path, length_reward, make_args(snr=False, **settings), prompts)
    plain.train()
    neutral_filter = {"snr_value": 1.0, "snr_include_zero": True}
    neutral = SNRFilteredGRPOTrainer(policy_path, length_reward, make_args(**settings, **neutral_filter), prompts)
    before = parameters_of(neutral)
    neutral.train()
    assert_same_parameters(parameters_of(plain), parameters_of(neutral))
    assert not torch.equal(before["model.norm.weight"], neutral.model.model.norm.weight)


# Promise 2: completions are replayed, so that plain GRPO can be given the kept groups alone.

GROUP_SIZE = 4


class Replay:
    """A rollout function that gives every prompt the same completions and rewards in every run.

    `rewards` maps a prompt to its group's rewards; completions are random token ids of varying lengths.
    """

    def __init__(self, tokenizer, rewards: dict[str, list[float]], equal_lengths: bool = False):
        self.tokenizer = tokenizer
        self.rewards = rewards
        self.completions = {}
        generator = torch.Generator().manual_seed(11)
        for prompt in rewards:
            lengths = torch.randint(2, 11, (GROUP_SIZE,), generator=generator).tolist()
            self.completions[prompt] = [
                torch.randint(1, 200, (6 if equal_lengths else length,), generator=generator).tolist()
                for length in lengths
            ]

    def rollout(self, prompts, trainer):
        seen = {}
        completion_ids, rewards = [], []
        for prompt in prompts:
            member = seen.get(prompt, 0)
            seen[prompt] = member + 1
            completion_ids.append(self.completions[prompt][member])
            rewards.append(self.rewards[prompt][member])
        return {
            "prompt_ids": [self.tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": completion_ids,
            "logprobs": None,
            "replayed": rewards,
        }

    @staticmethod
    def reward(completions, replayed, **kwargs):
        return replayed


def gradients_of(trainer_class, policy_path, args, replay, prompt_names):
    recorder = Recorder()
    trainer = trainer_class(
        policy_path,
        Replay.reward,
        args,
        Dataset.from_dict({"prompt": prompt_names}),
        rollout_func=replay.rollout,
        callbacks=[recorder],
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in trainer.model.parameters():  # away from the reference policy, where the KL term has no gradient
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    trainer.train()
    return recorder.gradients


def mean_gradient(gradients):
    return {name: torch.stack([g[name] for g in gradients]).mean(dim=0) for name in gradients[0]}


def assert_close(first, second):
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-6)


# Prompts 0, 2, 5 and 6 are kept by top-p at 0.9; 1, 3, 4 have no variance, 7 has too little of it.
REWARDS = {
    PROMPTS[0]: [1.0, 0.0, 0.0, 1.0],
    PROMPTS[1]: [1.0, 1.0, 1.0, 1.0],
    PROMPTS[2]: [0.5, 0.0, 1.0, 1.0],
    PROMPTS[3]: [0.0, 0.0, 0.0, 0.0],
    PROMPTS[4]: [0.3, 0.1 + 0.2, 0.3, 0.3],
    PROMPTS[5]: [0.0, 0.0, 0.0, 1.0],
    PROMPTS[6]: [0.2, 1.0, 0.0, 0.7],
    PROMPTS[7]: [0.0, 0.1, 0.0, 0.1],
}
KEPT = [PROMPTS[0], PROMPTS[2], PROMPTS[5], PROMPTS[6]]

# (rows per device, gradient accumulation steps, steps per generation): 32 rows each, 16 of them kept
LAYOUTS = {
    "one micro-batch": (32, 1, 1),
    "four micro-batches": (8, 4, 4),
    "one row per device": (1, 32, 32),
    "five kept micro-batches of up to seven": (4, 8, 8),
    "four optimizer steps per generation": (4, 2, 8),
    "optimizer steps of one row": (1, 8, 32),
}


@pytest.mark.parametrize("mode", ["drop", "mask"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_filtered_update_is_grpo_on_the_kept_groups(loss_type, layout, mode, policy_path, make_args):
    rows, accumulation, steps = LAYOUTS[layout]
    # bnpo and the entropy bonus are means over the tokens of a micro-batch: with several of them, the same whichever
    # way rows are packed only if all rows are equally long.
    several = steps > 1
    bonus = 0.02 if mode == "drop" or loss_type in ("dapo", "cispo", "vespo", "bnpo") else 0.0
    settings = {
        "loss_type": loss_type,
        "beta": 0.1,
        "entropy_coef": bonus,
        "learning_rate": 0.0,
        "max_grad_norm": 0.0,
    }
    replay = Replay(build(policy_path), REWARDS, equal_lengths=several and (loss_type == "bnpo" or bonus > 0))
    plain = gradients_of(
        GRPOTrainer,
        policy_path,
        make_args(snr=False, per_device_train_batch_size=16, max_steps=1, **settings),
        replay,
        KEPT,
    )
    filtered = gradients_of(
        SNRFilteredGRPOTrainer,
        policy_path,
        make_args(
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=steps,
            max_steps=steps // accumulation,
            snr_mode=mode,
            **settings,
        ),
        replay,
        list(REWARDS),
    )
    assert len(filtered) == steps // accumulation
    # At learning rate 0 the steps of one generation batch see the same policy: their mean is the whole batch's.
    assert_close(mean_gradient(filtered), plain[0])


def build(policy_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(policy_path)
