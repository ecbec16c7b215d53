"""Prompts of which few have signal, and what a trainer makes of them when it samples further ones."""

import torch
from algorithms import replay_of

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
