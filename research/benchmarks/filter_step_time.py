"""How much time an update takes with dropped groups, as a fraction of plain TRL's.

    python -m research.benchmarks.filter_step_time            # everything, about a quarter of an hour on two cores
    python -m research.benchmarks.filter_step_time --quick    # the tiny model only

Three measurements, each side by side in one run:

1. *Update time.* Plain `trl.GRPOTrainer` and the filter train on the same replayed completions, of whose groups a
   known fraction has reward variance and is kept. Timed is the optimizer step less generation and reward: packing,
   forward, backward, optimizer. Part of what `drop` saves is padding that plain TRL computes. Variants take turns, so
   that a slow minute hits all; the median step counts.
2. *Step time with generation*, 16 prompts x 8 completions of the tiny model: plain TRL and the default filter.
3. *Peak memory* of a process that does nothing but such updates.

Writes `research/benchmarks/results/filter_step_time.{json,md}`.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.benchmarks.measuring import machine, now, peak_memory

RESULTS = Path(__file__).parent / "results"
GROUPS, GROUP_SIZE = 8, 4  # 32 completions a step
FRACTIONS = (0.25, 0.5, 0.75)
ROWS_PER_DEVICE = (1, 4, 32)
VARIANTS = ("plain", "off", "drop")
OFF: dict[str, Any] = {"snr_strategy": "all"}
BASE: dict[str, Any] = {
    "report_to": "none",
    "use_cpu": not torch.cuda.is_available(),
    "bf16": torch.cuda.is_available(),
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "num_generations": GROUP_SIZE,
}


class StepTimes(TrainerCallback):
    """Seconds of each optimizer step, with and without generation, by the wall's clock or another."""

    def __init__(self, clock=now):
        self.clock = clock
        self.steps, self.updates, self.generation = [], [], 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.start, self.generation = self.clock(), 0.0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(self.clock() - self.start)
        self.updates.append(self.steps[-1] - self.generation)

    def watch(self, trainer):
        generate = trainer._generate_and_score_completions

        def timed(inputs):
            start = self.clock()
            batch = generate(inputs)
            self.generation += self.clock() - start
            return batch

        trainer._generate_and_score_completions = timed


def replay(prompt_length: int, completion_lengths: tuple[int, int], fraction: float):
    """A rollout function, a reward function and a dataset: `fraction` of the groups has rewards that vary."""
    draw = random.Random(0)
    prompts = [f"prompt {number}" for number in range(GROUPS)]
    completions = {
        prompt: [[draw.randrange(5, 200) for _ in range(draw.randint(*completion_lengths))] for _ in range(GROUP_SIZE)]
        for prompt in prompts
    }
    varying = set(prompts[: round(fraction * GROUPS)])

    def rollout(batch, trainer):
        return {
            "prompt_ids": [[7] * prompt_length for _ in batch],
            "completion_ids": [completions[prompt][number % GROUP_SIZE] for number, prompt in enumerate(batch)],
            "logprobs": None,
            "member": [number % GROUP_SIZE for number in range(len(batch))],
        }

    def reward(prompts, completions, member, **kwargs):
        return [float(prompt in varying and number % 2) for prompt, number in zip(prompts, member, strict=True)]

    return rollout, reward, Dataset.from_dict({"prompt": prompts})


def make_trainer(
    variant: str, model: str | PreTrainedModel, rows: int, steps: int, fraction: float, lengths, times, **others
):
    """A trainer of replayed completions; `others` are further settings, and `tokenizer` where a model is given."""
    prompt_length, completion_lengths = lengths
    rollout, reward, dataset = replay(prompt_length, completion_lengths, fraction)
    tokenizer = others.pop("tokenizer", None)
    settings = {
        **BASE,
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": GROUPS * GROUP_SIZE // rows // int(os.environ.get("WORLD_SIZE", "1")),
        "max_steps": steps,
        "max_completion_length": lengths[1][1],
        **others,
    }
    if variant == "plain":
        trainer_class, args = GRPOTrainer, GRPOConfig(**settings)
    else:
        # `nonzero` keeps exactly the groups with variance: the fraction is known.
        snr = OFF if variant == "off" else {"snr_strategy": "nonzero"}
        trainer_class, args = SNRFilteredGRPOTrainer, SNRFilteredGRPOConfig(**settings, **snr)
    if isinstance(model, str):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = trainer_class(
        model, reward, args, dataset, processing_class=tokenizer, rollout_func=rollout, callbacks=[times]
    )
    trainer.remove_callback(transformers.PrinterCallback)
    times.watch(trainer)
    return trainer


def measure_updates(model_path: str, lengths, rounds: int, steps: int) -> list[dict]:
    results = []
    for rows in ROWS_PER_DEVICE:
        cases = [("plain", 1.0), ("off", 1.0), *(("drop", fraction) for fraction in FRACTIONS)]
        seconds: dict[tuple[str, float], list[float]] = {case: [] for case in cases}
        for _ in range(rounds):
            for case in cases:
                times = StepTimes()
                make_trainer(case[0], model_path, rows, steps, case[1], lengths, times).train()
                seconds[case] += times.updates[1:]  # the first step warms up
        plain = statistics.median(seconds["plain", 1.0])
        for (variant, fraction), values in seconds.items():
            median = statistics.median(values)
            row = {"rows_per_device": rows, "variant": variant, "kept": fraction, "seconds": median}
            results.append({**row, "of_plain": median / plain})
            print(
                f"  {rows:>2} rows  {variant:<5} kept {fraction:.2f}  {median:7.3f} s  {median / plain:.3f} of plain"
            )
    return results


def measure_steps(steps: int) -> dict:
    """Step time with generation on the tiny model, plain TRL and the default filter, in turns."""
    env = make_env("frozen_lake")
    dataset = env.dataset(1024, seed=0)
    seconds: dict[str, list[float]] = {"plain": [], "filter": []}
    kept: list[float] = []
    reward_funcs: list[Any] = env.reward_funcs
    for round_number in range(2):
        for variant in seconds:
            settings = {
                **BASE,
                "output_dir": tempfile.mkdtemp(),
                "per_device_train_batch_size": 32,
                "gradient_accumulation_steps": 4,
                "max_steps": steps,
                "max_completion_length": 64,
                "learning_rate": 3e-5,
                "logging_strategy": "steps",
                "logging_steps": 1,
                "seed": round_number,
            }
            plain = variant == "plain"
            args = (GRPOConfig if plain else SNRFilteredGRPOConfig)(**settings)
            times = StepTimes()
            trainer = (GRPOTrainer if plain else SNRFilteredGRPOTrainer)(
                str(TINY_MODEL_PATH), reward_funcs, args, dataset, callbacks=[times]
            )
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
            seconds[variant] += times.steps[1:]
            kept += [row["snr/kept_fraction"] for row in trainer.state.log_history if "snr/kept_fraction" in row]
    medians = {variant: statistics.median(values) for variant, values in seconds.items()}
    return {**medians, "of_plain": medians["filter"] / medians["plain"], "kept": statistics.mean(kept)}


def measure_memory(model_path: str, lengths) -> dict[str, float]:
    """Peak memory in MiB of a process of its own for each variant (resident, or allocated on the GPU).

    `drop` keeps seven of eight groups: it really packs, and keeps as much as it can while doing so.
    """
    peaks = {}
    for variant in VARIANTS:
        command = [
            sys.executable,
            "-m",
            "research.benchmarks.filter_step_time",
            "--memory-of",
            variant,
            model_path,
            json.dumps(lengths),
        ]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks[variant] = float(output.splitlines()[-1])
        print(f"  {variant:<5} {peaks[variant]:7.0f} MiB  {peaks[variant] / peaks['plain']:.3f} of plain")
    return peaks


def print_peak_memory(variant: str, model_path: str, lengths) -> None:
    fraction = 1.0 if variant in ("plain", "off") else 0.875
    make_trainer(variant, model_path, 8, 3, fraction, lengths, StepTimes()).train()
    print(peak_memory())


def random_model(folder: str) -> str:
    """A random model of about 100M parameters with the tiny model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL_PATH)
    config = Qwen3Config(
        vocab_size=16_384,
        hidden_size=768,
        intermediate_size=2_560,
        num_hidden_layers=11,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    print(f"  {model.num_parameters() / 1e6:.0f}M parameters")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def markdown(results: dict) -> str:
    lines = ["# Filter step time", "", "Made by `python -m research.benchmarks.filter_step_time` (`make bench`).", ""]
    lines += [", ".join(f"{name} {value}" for name, value in results["machine"].items()), ""]
    for name, rows in results["update"].items():
        lines += [f"## Update time as a fraction of plain TRL's, {name}", ""]
        drop_columns = "".join(f" drop, kept {fraction:.2f} |" for fraction in FRACTIONS)
        lines += [f"| rows per device | plain | filter off |{drop_columns}", "|---" * 6 + "|"]
        for rows_per_device in ROWS_PER_DEVICE:
            cells = [row for row in rows if row["rows_per_device"] == rows_per_device]
            plain, *others = cells
            ratios = "".join(f" {row['of_plain']:.3f} |" for row in others)
            lines.append(f"| {rows_per_device} | {plain['seconds']:.2f} s |{ratios}")
        lines.append("")
    step = results["step"]
    lines += [
        "## Step time with generation, tiny model, 16 prompts x 8 completions",
        "",
        f"Plain {step['plain']:.2f} s, filter {step['filter']:.2f} s: {step['of_plain']:.3f} of plain at a kept "
        f"fraction of {step['kept']:.2f}.",
        "",
        "## Peak memory of a process",
        "",
        "| model | " + " | ".join(VARIANTS) + " |",
        "|---|" + "---|" * len(VARIANTS),
    ]
    for name, peaks in results["memory_mib"].items():
        lines.append(f"| {name} | " + " | ".join(f"{peaks[variant]:.0f} MiB" for variant in VARIANTS) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the tiny model only")
    parser.add_argument("--memory-only", action="store_true", help="measure memory again, keep the other results")
    parser.add_argument("--memory-of", nargs=3, metavar=("VARIANT", "MODEL", "LENGTHS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.memory_of:
        variant, model_path, lengths = arguments.memory_of
        print_peak_memory(variant, model_path, json.loads(lengths))
        return

    torch.manual_seed(0)
    results: dict[str, Any] = {"machine": machine(), "update": {}, "memory_mib": {}}
    if arguments.memory_only:
        results = {**json.loads((RESULTS / "filter_step_time.json").read_text()), "memory_mib": {}}
    with tempfile.TemporaryDirectory() as folder:
        models = {"tiny (1M)": (str(TINY_MODEL_PATH), (60, (24, 64)), 4, 6)}
        if not arguments.quick:
            models["random 100M"] = (random_model(folder), (24, (8, 40)), 1, 3)
        if not arguments.memory_only:
            for name, (path, lengths, rounds, steps) in models.items():
                print(f"update time, {name}")
                results["update"][name] = measure_updates(path, lengths, rounds, steps)
            print("step time with generation, tiny model, 16 prompts x 8 completions")
            results["step"] = measure_steps(steps=20)
            print(results["step"])
        for name, (path, lengths, *_) in models.items():
            print(f"peak memory, {name}")
            results["memory_mib"][name] = measure_memory(path, lengths)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "filter_step_time.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "filter_step_time.md").write_text(markdown(results))
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
