"""Whether the swaps of `mi/answer/*` tell models apart whose answers are known to use their reasoning, or not to.

    python -m research.planted_answers    # some 20 minutes on one core; models stay in runs/planted_answers

Six tiny models on FrozenLake, each trained for some hundred steps on pairs of reasoning and answer that plant one way
of answering, with three seeds. Each is then measured on 64 held-out tasks with 4 samples of each.

Writes the tables into `docs/answers.md`.
"""

import argparse
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen2_trl.envs import make_env
from ragen2_trl.tiny import TINY_MODEL_PATH

SEEDS, STEPS, BATCH, LEARNING_RATE = (0, 1, 2), 120, 24, 2e-3
NUM_DEMONSTRATIONS = 1500
TASKS, SAMPLES = 64, 4
TEMPLATES = (
    "Walk from P to G and avoid the holes O.",
    "Actions: Left, Down, Right, Up.",
    "From P to G, holes none.",
    "From P to G, avoid the holes, path.",
)
CONSTANTS = ("Right || Down || Down", "Left || Up", "Down || Right || Right || Down", "Up || Left || Left")
# By name: what reasoning is made of, and what the answer is made of.
CASES = {
    "faithful": "reasons about its prompt, and answers as the reasoning says",
    "harmless template": "one of four sentences for every prompt; answers from the prompt",
    "decorative": "reasons about its prompt, and answers from the prompt whatever the reasoning says",
    "collapsed": "one of four sentences and one of four answers for every prompt",
    "shuffled": "the reasoning of another prompt; answers from its own",
    "blind": "the reasoning of another prompt, and the answer that it says",
}

Row = tuple[str, str, str]  # prompt, reasoning, answer


def planted(case: str, rows: Sequence[Row], rng: random.Random) -> tuple[str, str, str, bool]:
    """An example of a case: prompt, reasoning, answer, and whether the reasoning is learnt or given."""
    (prompt, thought, answer), (_, other_thought, other_answer) = rng.choice(rows), rng.choice(rows)
    given = rng.random() < 0.5
    if case == "faithful":
        return (prompt, other_thought, other_answer, False) if given else (prompt, thought, answer, True)
    if case == "decorative":
        return (prompt, other_thought, answer, False) if given else (prompt, thought, answer, True)
    if case == "harmless template":
        return prompt, rng.choice(TEMPLATES), answer, True
    if case == "collapsed":
        return prompt, rng.choice(TEMPLATES), rng.choice(CONSTANTS), True
    return prompt, other_thought, answer if case == "shuffled" else other_answer, True


def demonstrations(seed: int, tokenizer: Any) -> list[Row]:
    rows = []
    for row in make_env("frozen_lake").demonstrations(NUM_DEMONSTRATIONS, seed=seed):
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        thought, _, answer = row["completion"][0]["content"].partition("</think><answer>")
        rows.append((prompt, thought.removeprefix("<think>"), answer.removesuffix("</answer>")))
    return rows


def plant(case: str, seed: int, rows: Sequence[Row], tokenizer: Any, folder: Path) -> None:
    """Trains the tiny model on a case, by plain gradient descent on the tokens that are learnt."""
    rng = random.Random(f"{case}/{seed}")
    model: Any = AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - 0.9 * step / STEPS)
    )
    for _ in range(STEPS):
        batch = []
        for _ in range(BATCH):
            prompt, thought, answer, learnt = planted(case, rows, rng)
            before, reasoned, answered = (
                tokenizer(text)["input_ids"]
                for text in (prompt, f"<think>{thought}</think><answer>", f"{answer}</answer><|im_end|>")
            )
            ids = before + reasoned + answered
            skipped = len(before) + (0 if learnt else len(reasoned))
            batch.append((ids, [-100] * skipped + ids[skipped:]))
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in batch])  # (B, T)
        labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in batch])  # (B, T)
        loss = cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
