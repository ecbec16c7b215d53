"""How much cheaper cross-scoring is than the reference's way, and what the callback costs a run.

    python benchmarks/cross_score.py            # everything, about twelve minutes on two cores
    python benchmarks/cross_score.py --quick    # vocabulary 8k only

Two measurements, each side by side in one run:

1. *Cross-scoring.* The reference (mll-lab-nu/RAGEN, `collapse_metrics.py` over verl 0.6) runs each prompt with every
   reasoning in full, four rows at a time (`log_prob_micro_batch_size_per_gpu` of its base configuration), all
   reasonings padded to the longest, with logits of every position and their entropy, which it discards. Ours is
   `cross_score`. They take turns, and the best of up to three rounds counts. Lengths of reasonings follow a
   gamma distribution of shape 6, so that their standard deviation is 0.4 of their mean. Timed is one of the N prompts:
   they are the same work each. Memory is what a process of its own needs beyond model and data, for one prompt.
2. *The callback.* A training run in the setting of the demo: seconds spent measuring over all others.

Writes `benchmarks/results/cross_score.{json,md}`.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
import yaml
from measuring import machine, now, peak_memory, reset_peak_memory
from transformers import Qwen2Config, Qwen2ForCausalLM

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, cross_score
from ragen2_trl.envs import make_env
from ragen2_trl.instrument import count_tokens
from ragen2_trl.tiny import TINY_MODEL_PATH

ROOT = Path(__file__).parents[1]
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


def make_case(shape: str, model: str, vocabulary: int):
    """A random model, and prompts and reasonings of random ids."""
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
    num_prompts, num_reasonings, prompt_length, length = SHAPES[shape]
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    prompts = [ids(rng.randint(prompt_length * 9 // 10, prompt_length * 11 // 10)) for _ in range(num_prompts)]
    # Expected order statistics instead of one draw, so that the mean is `length` and the longest as long as usual.
    draws = sorted(rng.gammavariate(6, length / 6) for _ in range(1000 * num_reasonings))
    lengths = [round(sum(draws[i : i + 1000]) / 1000) for i in range(0, len(draws), 1000)]
    reasonings = [ids(length) for length in rng.sample(lengths, num_reasonings)]
    return policy, prompts, reasonings


@torch.no_grad()
def reference(model, prompts, reasonings) -> torch.Tensor:
    """(B, N) the reference's way, from a description of what it computes."""
    longest = max(len(reasoning) for reasoning in reasonings)
    device = model.device
    ids = torch.tensor([[*reasoning, *[0] * (longest - len(reasoning))] for reasoning in reasonings], device=device)
    lengths = torch.tensor([len(reasoning) for reasoning in reasonings], device=device)
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
    policy, prompts, reasonings = make_case(shape, model, vocabulary)
    chosen = prompts[:1]
    cross_score(policy, prompts[:1], reasonings[:4])  # warm
    seconds, tokens, matrices = {"reference": [], "ours": []}, {}, {}
    for name, score in (("reference", reference), ("ours", cross_score)) * rounds:
        with count_tokens(policy) as counts:
            start = now()
            matrices[name] = score(policy, chosen, reasonings)
            seconds[name].append(now() - start)
        tokens[name] = sum(counts)
    seconds = {name: min(values) for name, values in seconds.items()}
    bound = len(chosen[0]) + sum(map(len, reasonings))
    memory = {}
    for name in seconds:
        command = [sys.executable, __file__, "--memory-of", name, shape, model, str(vocabulary)]
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
    policy, prompts, reasonings = make_case(shape, model, int(vocabulary))
    in_use = reset_peak_memory()
    longest = sorted(reasonings, key=len)[-16:]  # the most there is to pad, and enough to fill a chunk
    {"reference": reference, "ours": cross_score}[name](policy, prompts[:1], longest)
    print(peak_memory() - in_use)


def measure_callback(steps: int) -> dict:
    """Share of a run's time that measuring takes, in the demo's setting with the callback's defaults."""
    recipe = yaml.safe_load((ROOT / "recipes" / "frozen_lake_tiny.yaml").read_text())
    fields = SNRFilteredGRPOConfig.__dataclass_fields__
    settings = {name: value for name, value in recipe.items() if name in fields and name != "run_name"}
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"output_dir": folder, "max_steps": steps, "save_strategy": "no", "disable_tqdm": True}
        settings |= {"use_cpu": not torch.cuda.is_available()}
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


def markdown(results: dict) -> str:
    lines = ["# Cross-scoring", "", "Made by `python benchmarks/cross_score.py`, which says what is measured.", ""]
    lines += [", ".join(f"{name} {value}" for name, value in results["machine"].items()), ""]
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
    callback = results["callback"]
    lines += [
        "",
        "8 x 128: prompts of 300 and reasonings of 100 tokens on average; 64 x 64: 600 and 150.",
        "",
        "## The callback at its defaults, in the demo's setting",
        "",
        f"{callback['measurements']} measurements of {callback['seconds_each']:.2f} s in {callback['steps']} steps of "
        f"{callback['step_seconds']:.2f} s: {callback['share']:.1%} on top of training.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="vocabulary 8k and the small model only")
    parser.add_argument("--memory-of", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.memory_of:
        print_extra_memory(*arguments.memory_of)
        return
    cases = CASES[:2] if arguments.quick else CASES
    results = {"machine": machine()}
    results["callback"] = measure_callback(40)
    results["cases"] = [measure_case(*case) for case in cases]
    if not arguments.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "cross_score.json").write_text(json.dumps(results, indent=2) + "\n")
        (RESULTS / "cross_score.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
