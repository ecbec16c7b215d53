"""What transformers' `generate` saves where each prompt is read once for all of its completions.

    python -m research.benchmarks.prefill    # a quarter of an hour on one core

A model of the shape of SmolLM2-135M with random weights samples 8 completions of 128 tokens of one prompt, as TRL
calls it and with the prompt read once, in turns, from the same seed. Times are CPU seconds of the process.

Writes `research/benchmarks/results/prefill.md`.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from ragen2_trl.trainers.generation import reading_prompts_once
from research.benchmarks.measuring import machine

RESULTS = Path(__file__).parent / "results" / "prefill.md"
PROMPTS = (512, 2_000)  # tokens
COMPLETIONS, NEW_TOKENS = 8, 128


def model() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1_536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8_192,
            tie_word_embeddings=True,
        )
        return LlamaForCausalLM(config).eval()


def measure(policy: Any, tokens: int, rounds: int) -> tuple[dict[str, float], bool]:
    """Least CPU seconds by method, and whether both have sampled the same tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 400, (1, tokens), generator=generator).expand(COMPLETIONS, -1)
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None)
    whole = SimpleNamespace(unwrap_model=lambda wrapped: wrapped)
    trainer = SimpleNamespace(_reads_prompts_once=True, accelerator=whole, model_wrapped=policy)
    methods: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "once per completion": nullcontext,
        "once": partial(reading_prompts_once, trainer),
    }
    seconds: dict[str, float] = {}
    sampled: dict[str, torch.Tensor] = {}
    for name, around in list(methods.items()) * rounds:
        with torch.random.fork_rng(), torch.no_grad(), around():
            torch.manual_seed(7)
            start = time.process_time()
            sampled[name] = policy.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config
            )
            seconds[name] = min(seconds.get(name, float("inf")), time.process_time() - start)
    return seconds, torch.equal(*sampled.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each case; the fastest counts")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    policy = model()
    lines = ["# Prompts read once", "", "Made by `python -m research.benchmarks.prefill`.", ""]
    lines += [", ".join(f"{name} {value}" for name, value in machine().items()), ""]
    lines += ["| tokens of the prompt | once per completion | once | ratio | same tokens |", "|---" * 5 + "|"]
    for tokens in PROMPTS:
        seconds, same = measure(policy, tokens, arguments.rounds)
        plain, once = seconds["once per completion"], seconds["once"]
        lines.append(f"| {tokens:,} | {plain:.1f} s | {once:.1f} s | {once / plain:.2f} | {'yes' if same else 'no'} |")
        print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
