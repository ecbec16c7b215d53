"""Replayed completions: every run of a test trains on the same ones, so that gradients can be compared."""

import torch
from conftest import PROMPTS
from datasets import Dataset
from transformers import TrainerCallback
from trl import RLOOTrainer

GROUP_SIZE = 4

# Prompts 0, 2, 5 and 6 are kept by top-p at 0.9; 1, 3, 4 have no variance, 7 has too little of it.
REWARDS = {
    PROMPTS[0]: [1.0, 0.0, 0.0, 1.0],
    PROMPTS[1]: [1.0, 1.0, 1.0, 1.0],
    PROMPTS[2]: [0.5, 0.0, 1.0, 1.0],
    PROMPTS[3]: [0.0, 0.0, 0.0, 0.0],
    PROMPTS[4]: [0.3, 0.30000004, 0.3, 0.3],
    PROMPTS[5]: [0.0, 0.0, 0.0, 1.0],
    PROMPTS[6]: [0.2, 1.0, 0.0, 0.7],
    PROMPTS[7]: [0.0, 0.1, 0.0, 0.1],
}
KEPT = [PROMPTS[0], PROMPTS[2], PROMPTS[5], PROMPTS[6]]


class Replay:
    """Gives every prompt the same completions and rewards in every run, by the place of a row in its group.

    As a rollout function with `reward`, or for every trainer by `attach` with `score`. `rewards` maps a prompt to its
    group's rewards; completions are random token ids of varying lengths.
    """

    def __init__(self, tokenizer, rewards: dict[str, list[float]], equal_lengths: bool = False):
        self.tokenizer = tokenizer
        self.rewards = rewards
        self.group_size = len(next(iter(rewards.values())))
        self.completions = {}
        generator = torch.Generator().manual_seed(11)
        for prompt in rewards:
            lengths = torch.randint(2, 11, (self.group_size,), generator=generator).tolist()
            self.completions[prompt] = [
                torch.randint(1, 200, (6 if equal_lengths else length,), generator=generator).tolist()
                for length in lengths
            ]

    def rollout(self, prompts, trainer):
        completion_ids, rewards = [], []
        first = trainer.accelerator.process_index * len(prompts)
        for number, prompt in enumerate(prompts, start=first):
            member = number % self.group_size
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

    def attach(self, trainer):
        """Take the place of generation. For one process."""
        prompts = {tuple(self.tokenizer(prompt)["input_ids"]): prompt for prompt in self.rewards}

        def generate(prompt_ids, *args):
            rows = enumerate(prompts[tuple(ids)] for ids in prompt_ids)
            completions = [self.completions[prompt][number % self.group_size] for number, prompt in rows]
            return completions if isinstance(trainer, RLOOTrainer) else (completions, None)

        trainer._generate_single_turn = generate

    def score(self, prompts, **kwargs):
        return [self.rewards[prompt][number % self.group_size] for number, prompt in enumerate(prompts)]


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
    move_away(trainer.model)
    trainer.train()
    return recorder.gradients


def move_away(model):
    """Away from the reference policy, where the KL term has no gradient, and from a critic without an opinion."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


def mean_gradient(gradients):
    return {name: torch.stack([g[name] for g in gradients]).mean(dim=0) for name in gradients[0]}


def assert_close(first, second):
    """To float32 noise, which has the size of the whole gradient where terms of several rows cancel."""
    assert first.keys() == second.keys()
    norm = torch.stack([gradient.norm() for gradient in second.values()]).norm().item()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-6 * max(1.0, norm))


class Recorder(TrainerCallback):
    """Gradients just before each optimizer step."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


def second_half(text):
    """An answer for completions without any: what stands in the second half of their text."""
    return text[len(text) // 2 :] or None
