"""Where generation stands against the machine's limit, and what transformers' settings change about it.

    python -m research.benchmarks.generation    # some ten minutes on two cores

The tiny model samples 16 FrozenLake prompts, 8 completions each. Per setting: the
processor time of a call, its ratio to the default, and whether the same seed gives the same tokens. Repeats are
interleaved, so that noise hits all settings alike, and the least of each counts.

The limit is what the call must at least do: matrix products of its live tokens at the rate that this machine reaches
for products of that shape. Beside it stands what rows cost that had ended already, and prompts that were read once for
each completion. Writes `research/benchmarks/results/generation.{json,md}`.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig, GenerationConfig

from ragen2_trl.envs import make_env
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.benchmarks.measuring import machine

RESULTS = Path(__file__).parent / "results"
PROMPTS, GROUP_SIZE, LONGEST = 16, 8, 64
ON_CPUS: Any = CompileConfig()
ON_CPUS._compile_all_devices = True  # transformers compiles on accelerators alone unless told so
COMPILED = "static cache, compiled forward"
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    COMPILED: {"cache_implementation": "static", "compile_config": ON_CPUS},
}


def seconds(call: Callable[[], object], repeats: int = 1) -> float:
    """Least processor time of a call."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return min(times)


def wall_seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def matrix_rate(rows: int, width: int, out: int) -> float:
    """Floating-point operations a second of a product (rows, width) x (width, out)."""
    left, right = torch.randn(rows, width), torch.randn(width, out)
    times = max(1, 10**9 // (rows * width * out))
    return 2 * rows * width * out * times / seconds(lambda: [left @ right for _ in range(times)], repeats=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)

    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL_PATH)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH).eval()
    env = make_env("frozen_lake")
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        for row in env.dataset(PROMPTS, seed=0)
    ]
    rows: list[Any] = [ids for ids in prompts for _ in range(GROUP_SIZE)]
    inputs = tokenizer.pad([{"input_ids": ids} for ids in rows], padding_side="left", return_tensors="pt")
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": LONGEST}

    def generate(**setting) -> torch.Tensor:
        torch.manual_seed(0)
        with torch.no_grad():
            return model.generate(**inputs, **sampling, use_cache=True, **setting)[:, inputs["input_ids"].size(1) :]

    tokens = generate()
    compile_seconds = wall_seconds(lambda: generate(**SETTINGS[COMPILED]))
    equal = {name: bool(torch.equal(tokens, generate(**setting))) for name, setting in SETTINGS.items()}
    least = dict.fromkeys(SETTINGS, float("inf"))
    for _ in range(args.repeats):
        for name, setting in SETTINGS.items():
            least[name] = min(least[name], seconds(partial(generate, **setting)))

    few = rows[:GROUP_SIZE]  # continuous batching on one group: it is far from the others
    config = GenerationConfig(**sampling, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    batch = {name: value[:GROUP_SIZE] for name, value in inputs.items()}
    with torch.no_grad():
        one_group = seconds(lambda: model.generate(**batch, **sampling, use_cache=True), args.repeats)
    continuous = seconds(lambda: model.generate_batch(few, generation_config=config, progress_bar=False))

    threads = {}
    for count in (1, 2):
        torch.set_num_threads(count)
        threads[count] = min(wall_seconds(generate) for _ in range(args.repeats))
    torch.set_num_threads(1)

    lengths = (tokens != tokenizer.pad_token_id).sum(dim=1)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    live, sampled = int(lengths.sum()), tokens.numel()
    read = int(inputs["attention_mask"].sum())
    hidden, inner = model.config.hidden_size, model.config.intermediate_size
    rate_of_prompts, rate_of_tokens = matrix_rate(read, hidden, inner), matrix_rate(len(rows), hidden, inner)
    limit = 2 * parameters * (read / GROUP_SIZE / rate_of_prompts + live / rate_of_tokens)
    of_copies = 2 * parameters * read * (1 - 1 / GROUP_SIZE) / rate_of_prompts
    of_ended = 2 * parameters * (sampled - live) / rate_of_tokens
    cache = model.config.num_hidden_layers * 2 * model.config.num_key_value_heads * model.config.head_dim * 4
    moved = sum(2 * cache * len(rows) * (inputs["input_ids"].size(1) + step) for step in range(tokens.size(1)))

    measured = {
        "machine": machine(),
        "seconds": least,
        "same_tokens": equal,
        "compile_seconds": compile_seconds,
        "continuous_batching_ratio_one_group": continuous / one_group,
        "wall_seconds_by_threads": threads,
        "limit_seconds": limit,
        "prompt_copies_seconds": of_copies,
        "ended_rows_seconds": of_ended,
        "share_of_ended_positions": 1 - live / sampled,
        "cache_bytes_copied": moved,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / "generation.json").write_text(json.dumps(measured, indent=1) + "\n")
    page = as_page(measured)
    (args.results / "generation.md").write_text(page)
    print(page)


def as_page(measured: dict) -> str:
    default = measured["seconds"]["default"]
    lines = [
        "# Generation",
        "",
        "Made by `python -m research.benchmarks.generation`, which says what is measured.",
        "",
        ", ".join(f"{key} {value}" for key, value in measured["machine"].items()),
        "",
        "| setting | processor seconds | of the default's | same tokens |",
        "|---|---|---|---|",
        *(
            f"| {name} | {value:.2f} | {value / default:.2f} | {'yes' if measured['same_tokens'][name] else 'no'} |"
            for name, value in measured["seconds"].items()
        ),
        "| continuous batching (`generate_batch`), one group | | "
        f"{measured['continuous_batching_ratio_one_group']:.1f} | other draws |",
        "",
        f"The first compiled call took {measured['compile_seconds']:.0f} s. Two threads took "
        f"{measured['wall_seconds_by_threads'][2] / measured['wall_seconds_by_threads'][1]:.2f} of one thread's time.",
        "",
        "| part of the default's time | seconds |",
        "|---|---|",
        f"| limit: matrix products of live tokens, each prompt read once | {measured['limit_seconds']:.2f} |",
        f"| prompts read once more for each further completion | {measured['prompt_copies_seconds']:.2f} |",
        f"| rows that have ended ({measured['share_of_ended_positions']:.0%} of sampled positions) | "
        f"{measured['ended_rows_seconds']:.2f} |",
        f"| the rest: attention, {measured['cache_bytes_copied'] / 1e9:.1f} GB of cache read and written again as it "
        "grows, small operations, Python | "
        f"{default - sum(measured[f'{part}_seconds'] for part in ('limit', 'prompt_copies', 'ended_rows')):.2f} |",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
