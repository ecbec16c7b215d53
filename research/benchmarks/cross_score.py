"""How much cheaper cross-scoring is than the reference's way, and what the callback costs a run.

    python -m research.benchmarks.cross_score            # everything, about twelve minutes on two cores
    python -m research.benchmarks.cross_score --quick    # vocabulary 8k only
    python -m research.benchmarks.cross_score --caches   # kinds of caches only, half a minute; the other results stay

Three measurements, each side by side in one run:

1. *Cross-scoring.* The reference (mll-lab-nu/RAGEN, `collapse_metrics.py` over verl 0.6) runs each prompt with every
   reasoning in full, four rows at a time (`log_prob_micro_batch_size_per_gpu` of its base configuration), all
   traces padded to the longest, with logits of every position and their entropy, which it discards. Ours is
   `cross_score`. They take turns, and the best of up to three rounds counts. Lengths of traces follow a
   gamma distribution of shape 6, so that their standard deviation is 0.4 of their mean. Timed is one of the N prompts:
   they are the same work each. Memory is what a process of its own needs beyond model and data, for one prompt.
2. *Caches.* Models of one size with caches of every kind: elements that caches hold at most, counted after each
   forward pass, and seconds. Beside each, what a copy of the prompt's cache for every row of a chunk holds and takes.
3. *The callback.* A training run of 16 prompts x 8 completions: seconds spent measuring over all others.

Writes `research/benchmarks/results/cross_score.{json,md}`.
"""

import argparse
import copy
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, cross_score
from ragen2_trl.cli.shipped import recipe_path
from ragen2_trl.envs import make_env
from ragen2_trl.instrument import count_tokens, scoring
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.benchmarks.measuring import count_cache_elements, machine, now, peak_memory, reset_peak_memory

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
SHAPES = {"8 x 128": (8, 128, 300, 100), "64 x 64": (64, 64, 600, 150)}  # N, NK, P, T
MODELS = {  # hidden size, layers
    "hidden 256, 4 layers": (256, 4),
    "hidden 768, 8 layers": (768, 8),
}
CASES = [  # shape, model, vocabulary, rounds
    *[(shape, "hidden 256, 4 layers", 8_192, 3) for shape in SHAPES],
    *[(shape, "hidden 256, 4 layers", 151_936, 1) for shape in SHAPES],
    ("64 x 64", "hidden 768, 8 layers", 8_192, 1),
]
ROWS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 8_192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
PLAIN = "Qwen3: full attention"
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # model type, and what it has beside SIZES
    PLAIN: ("qwen3", {}),
    "Mistral: a window of 128": ("mistral", {"sliding_window": 128}),
    "Gemma 3: three of four layers with a window of 128": (
        "gemma3_text",
        {"sliding_window": 128, "layer_types": [SLIDING, SLIDING, SLIDING, FULL]},
    ),
    "LFM2: three of four layers convolutions": ("lfm2", {"layer_types": ["conv", "conv", "conv", FULL]}),
    "Qwen3-Next: three of four layers recurrences": (
        "qwen3_next",
        {
            "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 384,
            "shared_expert_intermediate_size": 384,
        },
    ),
}
CACHE_SHAPE = (2, 16, 600, 60)  # N, NK, P, T


def make_case(shape: str, model: str, vocabulary: int):
    """A random model, and prompts and traces of random ids."""
    hidden, layers = MODELS[model]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    policy = Qwen2ForCausalLM(config).eval()
    if torch.cuda.is_available():
        policy = policy.to("cuda", torch.bfloat16)
    return policy, *make_texts(*SHAPES[shape], vocabulary)


def make_texts(num_prompts: int, num_traces: int, prompt_length: int, length: int, vocabulary: int):
    """Prompts and traces of random ids, with these numbers of tokens on average."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    prompts = [ids(rng.randint(prompt_length * 9 // 10, prompt_length * 11 // 10)) for _ in range(num_prompts)]
    # Expected order statistics instead of one draw, so that the mean is `length` and the longest as long as usual.
    draws = sorted(rng.gammavariate(6, length / 6) for _ in range(1000 * num_traces))
    lengths = [round(sum(draws[i : i + 1000]) / 1000) for i in range(0, len(draws), 1000)]
    traces = [ids(length) for length in rng.sample(lengths, num_traces)]
    return prompts, traces


@torch.no_grad()
def reference(model, prompts, traces) -> torch.Tensor:
    """(B, N) the reference's way, from a description of what it computes."""
    longest = max(len(trace) for trace in traces)
    device = model.device
    ids = torch.tensor([[*reasoning, *[0] * (longest - len(reasoning))] for reasoning in traces], device=device)
    lengths = torch.tensor([len(trace) for trace in traces], device=device)
    mask = torch.arange(longest, device=device) < lengths[:, None]  # (B, T)
    columns = []
    for prompt in prompts:
        before = torch.tensor([prompt], device=device)
        scores = []
        for targets, valid in zip(ids.split(ROWS), mask.split(ROWS), strict=True):
            inputs = torch.cat([before.expand(len(targets), -1), targets], dim=1)
            attention = torch.cat([torch.ones_like(before).expand(len(targets), -1), valid.long()], dim=1)
            positions = torch.arange(inputs.shape[1], device=device).expand(len(targets), -1)
            logits = model(inputs, attention_mask=attention, position_ids=positions, use_cache=False).logits
            logits.div_(1.0)
            logits = logits[:, -longest - 1 : -1]
            normalizers = torch.stack([row.logsumexp(dim=-1) for row in logits])
            logps = logits.gather(-1, targets[..., None]).squeeze(-1) - normalizers
            _entropy = logits.logsumexp(dim=-1) - (logits.softmax(dim=-1) * logits).sum(dim=-1)
            scores.append((logps * valid).sum(dim=1))
        columns.append(torch.cat(scores))
    return torch.stack(columns, dim=1).float().cpu()


def measure_case(shape: str, model: str, vocabulary: int, rounds: int) -> dict:
    policy, prompts, traces = make_case(shape, model, vocabulary)
    chosen = prompts[:1]
    cross_score(policy, prompts[:1], traces[:4])  # warm
    spent: dict[str, list[float]] = {"reference": [], "ours": []}
    tokens: dict[str, float] = {}
    matrices: dict[str, torch.Tensor] = {}
    for name, score in (("reference", reference), ("ours", cross_score)) * rounds:
        with count_tokens(policy) as counts:
            start = now()
            matrices[name] = score(policy, chosen, traces)
            spent[name].append(now() - start)
        tokens[name] = sum(counts)
    # Whether a cache can be reused is tried once, on the first of all N prompts, in the three passes after its own.
    tokens["ours"] -= sum(counts[1:4]) * (1 - 1 / len(prompts))
    seconds = {name: min(values) for name, values in spent.items()}
    bound = len(chosen[0]) + sum(map(len, traces))
    memory = {}
    for name in seconds:
        command = [
            sys.executable,
            "-m",
            "research.benchmarks.cross_score",
            "--memory-of",
            name,
            shape,
            model,
            str(vocabulary),
        ]
        memory[name] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    row = {
        "shape": shape,
        "model": model,
        "vocabulary": vocabulary,
        "seconds": seconds,
        "speedup": seconds["reference"] / seconds["ours"],
        "tokens_of_bound": tokens["ours"] / bound,
        "tokens_reference_of_ours": tokens["reference"] / tokens["ours"],
        "memory_mib": memory,
        "memory_of_reference": memory["ours"] / memory["reference"],
        "largest_difference_nats": (matrices["ours"] - matrices["reference"]).abs().max().item(),
    }
    print(
        f"  {shape}, {model}, vocabulary {vocabulary}: {row['speedup']:.1f} x faster, "
        f"{row['tokens_of_bound']:.3f} of the token bound, {row['memory_of_reference']:.2f} of the memory"
    )
    return row


def print_extra_memory(name: str, shape: str, model: str, vocabulary: str) -> None:
    policy, prompts, traces = make_case(shape, model, int(vocabulary))
    in_use = reset_peak_memory()
    longest = sorted(traces, key=len)[-16:]  # the most there is to pad, and enough to fill a chunk
    ways: dict[str, Callable[..., torch.Tensor]] = {"reference": reference, "ours": cross_score}
    ways[name](policy, prompts[:1], longest)
    print(peak_memory() - in_use)


def copied_cache(cache, rows: int):
    """A copy for every row, in place of `scoring.share`."""
    copied = copy.deepcopy(cache)
    copied.reorder_cache(torch.zeros(rows, dtype=torch.long))
    return copied


def measure_caches() -> list[dict]:
    """Elements held and seconds for each kind of cache, shared and copied in turn; the best of three rounds."""
    num_prompts, num_traces, prompt_length, length = CACHE_SHAPE
    rng = random.Random(0)
    prompts = [[rng.randrange(8_192) for _ in range(prompt_length)] for _ in range(num_prompts)]
    traces = [[rng.randrange(8_192) for _ in range(length)] for _ in range(num_traces)]
    rows: list[dict] = []
    for kind, (model_type, particular) in KINDS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**SIZES | particular)).eval()
        cross_score(model, prompts[:1], traces[:4])  # warm
        ways = {"shared": scoring.share, "copied": copied_cache}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        elements, matrices = {}, {}
        for way, share in list(ways.items()) * 3:
            scoring.share = share
            with count_cache_elements(model) as counts:
                start = now()
                matrices[way] = cross_score(model, prompts, traces)
                seconds[way].append(now() - start)
            elements[way] = max(counts)
        scoring.share = ways["shared"]
        row: dict[str, Any] = {
            "kind": kind,
            "elements": elements,
            "seconds": {way: min(values) for way, values in seconds.items()},
        }
        row["largest_difference_nats"] = (matrices["shared"] - matrices["copied"]).abs().max().item()
        rows.append(row)
        row["elements_of_plain"] = {way: elements[way] / rows[0]["elements"]["shared"] for way in ways}
        print(f"  {kind}: {row['elements_of_plain']['shared']:.2f} of a plain cache's elements")
    return rows


def measure_callback(steps: int) -> dict:
    """Share of a run's time that measuring takes, 16 prompts x 8 completions a step, callback at its defaults."""
    recipe = yaml.safe_load(recipe_path("frozen_lake_tiny").read_text())
    fields = SNRFilteredGRPOConfig.__dataclass_fields__
    settings = {name: value for name, value in recipe.items() if name in fields and name != "run_name"}
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"output_dir": folder, "max_steps": steps, "save_strategy": "no", "disable_tqdm": True}
        settings |= {"use_cpu": not torch.cuda.is_available(), "steps_per_generation": None, "logging_steps": 1}
        settings |= {"num_generations": 8, "per_device_train_batch_size": 32, "gradient_accumulation_steps": 4}
        env = make_env(recipe["env_name"])
        trainer = SNRFilteredGRPOTrainer(
            str(TINY_MODEL_PATH),
            env.reward_funcs,
            SNRFilteredGRPOConfig(**settings),
            env.dataset(1024, seed=0),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(MutualInformationCallback(trainer))
        start = now()
        trainer.train()
        total = now() - start
    measured = [row["mi/seconds"] for row in trainer.state.log_history if "mi/seconds" in row]
    result = {
        "steps": steps,
        "measurements": len(measured),
        "seconds_each": sum(measured) / len(measured),
        "step_seconds": (total - sum(measured)) / steps,
        "share": sum(measured) / (total - sum(measured)),
    }
    print(f"  callback: {result['share']:.3f} of the time without it")
    return result


def describe(described: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in described.items())


def markdown(results: dict) -> str:
    lines = [
        "# Cross-scoring",
        "",
        "Made by `python -m research.benchmarks.cross_score`, which says what is measured.",
        "",
    ]
    lines += [describe(results["machine"]), ""]
    lines += [
        "| N x NK, model | vocabulary | reference, s a prompt | ours | speed-up | tokens, of N·P + N·NK·T | "
        "memory, of the reference's | largest difference, nats |",
        "|---" * 8 + "|",
    ]
    for row in results["cases"]:
        reference_seconds, ours = (row["seconds"][name] for name in ("reference", "ours"))
        memory = f"{row['memory_mib']['ours']:.0f} of {row['memory_mib']['reference']:.0f} MiB"
        lines.append(
            f"| {row['shape']}, {row['model']} | {row['vocabulary']} | {reference_seconds:.2f} | {ours:.2f} | "
            f"{row['speedup']:.1f} | {row['tokens_of_bound']:.3f} | {row['memory_of_reference']:.2f} ({memory}) | "
            f"{row['largest_difference_nats']:.1e} |"
        )
    callback, caches = results["callback"], results["caches"]
    lines += [
        "",
        "8 x 128: prompts of 300 and traces of 100 tokens on average; 64 x 64: 600 and 150.",
        "",
        "## Caches",
        "",
        "{} prompts, {} traces, {} and {} tokens; {}.".format(*CACHE_SHAPE, describe(caches["machine"])),
        "",
        "| model | elements held | of the plain cache's | seconds | a copy for every row: elements | seconds | "
        "largest difference, nats |",
        "|---" * 7 + "|",
    ]
    for row in caches["rows"]:
        elements, seconds = row["elements"], row["seconds"]
        lines.append(
            f"| {row['kind']} | {elements['shared']:,} | {row['elements_of_plain']['shared']:.2f} | "
            f"{seconds['shared']:.2f} | {elements['copied']:,} | {seconds['copied']:.2f} | "
            f"{row['largest_difference_nats']:.1e} |"
        )
    lines += [
        "",
        "## The callback at its defaults, 16 prompts x 8 completions a step",
        "",
        f"{callback['measurements']} measurements of {callback['seconds_each']:.2f} s in {callback['steps']} steps of "
        f"{callback['step_seconds']:.2f} s: {callback['share']:.1%} on top of training.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="vocabulary 8k and the small model only")
    parser.add_argument("--caches", action="store_true", help="kinds of caches only")
    parser.add_argument("--memory-of", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.memory_of:
        print_extra_memory(*arguments.memory_of)
        return
    caches = {"machine": machine(), "rows": measure_caches()}
    if arguments.caches:
        results = json.loads((RESULTS / "cross_score.json").read_text()) | {"caches": caches}
    else:
        results = {"machine": machine(), "caches": caches, "callback": measure_callback(40)}
        results["cases"] = [measure_case(*case) for case in (CASES[:2] if arguments.quick else CASES)]
    if not arguments.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "cross_score.json").write_text(json.dumps(results, indent=2) + "\n")
        (RESULTS / "cross_score.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
