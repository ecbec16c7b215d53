"""Trainings that drop the groups of some prompts, by the filter alone or with a refill, measured at each step."""

import math

import pytest
import torch
from conftest import PROMPTS, parameters_of
from datasets import Dataset
from replay import Replay
from transformers import AutoTokenizer

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOTrainer

VARIED = (0, 3, 5, 6)  # prompts whose groups have reward variance; the others are dropped
REFILL = {"snr_dynamic_sampling_rounds": 2}
SELECT = {"snr_prompt_selection": True, "max_steps": 5}  # the second epoch begins with step 3
both = pytest.mark.parametrize("snr", [{}, REFILL], ids=["filter", "refill"])
all_ways = pytest.mark.parametrize("snr", [{}, REFILL, SELECT], ids=["filter", "refill", "selection"])


def text_of(prompt):
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return text if isinstance(text, str) else text[-1]["text"]


def alternating(prompts, **kwargs):
    """0, 1, 0, 1 in the groups of the varied prompts, 0 in the others."""
    return [number % 2 * float(row_of(text_of(prompt)) in VARIED) for number, prompt in enumerate(prompts)]


def row_of(text):
    """Number of the prompt that a text holds."""
    return max((n for n, prompt in enumerate(PROMPTS) if prompt in text), key=lambda n: len(PROMPTS[n]))


def dataset_of(**columns):
    return Dataset.from_dict({"prompt": PROMPTS, **columns})


def run(policy, args, dataset=None, reward=alternating, prepare=None, resume=None, **kwargs):
    """A trained trainer, measured at every step; `trainer.seen` are the batches that reached the loss."""
    dataset = dataset_of() if dataset is None else dataset
    trainer = SNRFilteredGRPOTrainer(policy, reward, args, dataset, **kwargs)
    trainer.seen, trainer.weights, compute = [], [], trainer._compute_loss

    def seeing(model, inputs):
        if model.training:
            trainer.seen.append(inputs)
            trainer.weights.append(trainer._micro_step.weight)
        return compute(model, inputs)

    trainer._compute_loss = seeing
    if prepare is not None:
        prepare(trainer)
    trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=2))
    start = parameters_of(trainer)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == args.max_steps
    rows = rows_of(trainer)
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    assert min(row["snr/kept_fraction"] for row in rows) < 1
    if args.learning_rate:
        assert any(not torch.equal(start[name], value) for name, value in parameters_of(trainer).items())
    if args.snr_dynamic_sampling_rounds:
        assert any(row["snr/sampling_rounds"] for row in rows)
    if args.snr_prompt_selection:
        assert any(row["snr/skipped_prompts"] for row in rows)
    return trainer


def rows_of(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


def varied_rows_only(trainer):
    """Whether the rows with a weight in the update are all of varied prompts."""
    batches = [b["prompt_ids"] for b, weight in zip(trainer.seen, trainer.weights, strict=True) if weight > 0]
    texts = [text for ids in batches for text in trainer._tokenizer.batch_decode(ids, skip_special_tokens=True)]
    return set(texts) <= {PROMPTS[number] for number in VARIED}


def replay_of(policy_path, kind=Replay):
    rewards = {p: [0.0, 1.0, 0.0, 0.5] if n in VARIED else [0.0] * 4 for n, p in enumerate(PROMPTS)}
    return kind(AutoTokenizer.from_pretrained(policy_path), rewards)
