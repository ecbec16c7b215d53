"""Prompts of which few have signal, and what a trainer makes of them when it samples further ones or pilots first."""

import numpy as np
import torch
from algorithms import _tokenizer, replay_of
from replay import GROUP_SIZE, REWARDS, Replay
from trl import RLOOTrainer

WORDS = ["Go right", "Up", "Down", "Left or right", "Where is the goal", "The lake is frozen", "Go up", "Go left"]
VARIED, FLAT = [1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]


def replay_with(policy_path, varied):
    """Replayed completions: the prompts whose numbers are given have reward variance, the others none."""
    return replay_of(policy_path, {prompt: VARIED if n in varied else FLAT for n, prompt in enumerate(WORDS)})


def rows_of(trainer):
    return [row for row in trainer.state.log_history if "snr/sampling_rounds" in row]


class Seen:
    """Every batch that a trainer's loss sees, and the prompts that generation was asked for."""

    def __init__(self, trainer):
        self.batches, self.asked = [], []
        compute, sample = trainer._compute_loss, trainer._sample_round

        def kept(model, inputs):
            self.batches.append({k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)})
            return compute(model, inputs)

        def asked(inputs, number):
            self.asked.append([row["prompt"] for row in inputs])
            return sample(inputs, number)

        trainer._compute_loss, trainer._sample_round = kept, asked


# Replayed completions for two stages: of each group three, then the fourth.

FIRST = 3  # so that a call that asks for one completion of a prompt asks for the rest
PILOTS = {"snr_pilot_generations": FIRST, "snr_strategy": "nonzero"}


class PilotReplay(Replay):
    """A group's completions in their order, whoever asks for how many of them.

    `scored` has the prompt and the member of every completion that was scored.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scored = []

    def members(self, trainer, count):
        asked = trainer.num_generations
        first = FIRST if asked == GROUP_SIZE - FIRST else 0
        return [first + number % asked for number in range(count)]

    def attach(self, trainer):
        prompts = {tuple(self.tokenizer(prompt)["input_ids"]): prompt for prompt in self.rewards}

        def generate(prompt_ids, *args):
            members = self.members(trainer, len(prompt_ids))
            names = [prompts[tuple(ids)] for ids in prompt_ids]
            completions = [list(self.completions[name][member]) for name, member in zip(names, members, strict=True)]
            return completions if isinstance(trainer, RLOOTrainer) else (completions, None)

        trainer._generate_single_turn = generate

    def rollout(self, prompts, trainer):
        members = self.members(trainer, len(prompts))
        return {
            "prompt_ids": [self.tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": [self.completions[one][member] for one, member in zip(prompts, members, strict=True)],
            "logprobs": None,
        }

    def score(self, prompts, completion_ids, **kwargs):
        found = [
            (prompt, self.completions[prompt].index(list(ids)))
            for prompt, ids in zip(prompts, completion_ids, strict=True)
        ]
        self.scored += found
        return [self.rewards[prompt][member] for prompt, member in found]


def replay_of_pilots(policy_path, varied=None):
    """Of the usual rewards, or of prompts whose numbers are given with variance and others without."""
    rewards = {prompt: VARIED if n in varied else FLAT for n, prompt in enumerate(WORDS)} if varied else REWARDS
    return PilotReplay(_tokenizer(policy_path), rewards)


def sampled_in_full(trainer):
    """Numbers of the prompts of the latest round whose groups were sampled in full."""
    return np.flatnonzero(trainer._sampler.policy.choice.in_full)
