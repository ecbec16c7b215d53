"""What dynamic sampling buys when most prompts carry no signal.

    python -m research.benchmarks.dynamic_sampling    # about five minutes on two cores

The tiny model trains on FrozenLake tasks of which 70 % give no reward at all, whatever is answered. Plain TRL, the
filter, and dynamic sampling that keeps all groups with variance each get the same number of sampled tokens, and are
then compared on held-out tasks. One seed unless `--seeds` says more. Writes
`research/benchmarks/results/dynamic_sampling.{json,md}`.
"""

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.cli.evaluate import evaluate_model
from ragen2_trl.envs import make_env
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.benchmarks.measuring import machine, now

RESULTS = Path(__file__).parent / "results"
DEAD = 0.7
DYNAMIC_SAMPLING = {"snr_dynamic_sampling_rounds": 4, "snr_pilot_generations": 0, "snr_strategy": "none"}
VARIANTS = {"plain TRL": None, "filter": {}, "dynamic sampling, all with variance": DYNAMIC_SAMPLING}


class TokenBudget(TrainerCallback):
    """Ends training once as many tokens were sampled."""

    def __init__(self, trainer, budget: int):
        self.trainer, self.budget = trainer, budget

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.state.num_input_tokens_seen >= self.budget:
            control.should_training_stop = True


def train(settings: dict | None, budget: int, seed: int) -> dict[str, float]:
    env = make_env("frozen_lake")
    dataset = env.dataset(2048, seed=seed)
    rng = random.Random(seed)
    dataset = dataset.add_column("dead", [rng.random() < DEAD for _ in range(len(dataset))])

    def reward(completions, dead, **columns):
        rewards = env.success_func(completions=completions, **columns)
        return [0.0 if is_dead else value for value, is_dead in zip(rewards, dead, strict=True)]

    common: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 4,
        "num_generations": 8,
        "max_completion_length": 64,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "max_steps": 10_000,
        "loss_type": "dapo",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "no",
        "seed": seed,
    }
    if settings is None:
        trainer = GRPOTrainer(str(TINY_MODEL_PATH), reward, GRPOConfig(**common), dataset)
    else:
        args = SNRFilteredGRPOConfig(**common, **settings)
        trainer = SNRFilteredGRPOTrainer(str(TINY_MODEL_PATH), reward, args, dataset)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(TokenBudget(trainer, budget))
    start = now()
    trainer.train()
    seconds = now() - start
    rows = [row for row in trainer.state.log_history if "reward" in row]
    trained = "snr/trained_groups" if settings and "snr_dynamic_sampling_rounds" in settings else "snr/kept_groups"
    return {
        "success": evaluate(trainer.model),
        "seconds": seconds,
        "steps": trainer.state.global_step,
        "tokens": float(trainer.state.num_input_tokens_seen),
        "groups_trained_on": statistics.mean(row.get(trained, 16.0) for row in rows),
    }


def evaluate(model) -> float:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL_PATH)
    env = make_env("frozen_lake")
    return evaluate_model(model, tokenizer, env, num_prompts=384, num_samples=4, max_new_tokens=64)["success"]


def markdown(results: dict) -> str:
    made_by = "Made by `python -m research.benchmarks.dynamic_sampling`, which says what is measured."
    lines = ["# Dynamic sampling", "", made_by, ""]
    lines += [", ".join(f"{name} {value}" for name, value in results["machine"].items()), ""]
    lines += [
        f"Held-out success before: {results['before']:.1%}. Budget: {results['budget']:,} sampled tokens "
        f"(prompts included), {DEAD:.0%} of the prompts without any reward.",
        "",
        "| | success after, by seed | gain per million tokens | gain per minute | steps | groups a step with signal |",
        "|---" * 6 + "|",
    ]
    for name, runs in results["runs"].items():
        gains = [run["success"] - results["before"] for run in runs]
        per_token = statistics.mean(g / run["tokens"] * 1e6 for g, run in zip(gains, runs, strict=True))
        per_minute = statistics.mean(g / run["seconds"] * 60 for g, run in zip(gains, runs, strict=True))
        success = ", ".join(f"{run['success']:.1%}" for run in runs)
        steps = ", ".join(str(run["steps"]) for run in runs)
        groups = (
            "" if name == "plain TRL" else f"{statistics.mean(run['groups_trained_on'] for run in runs):.1f} of 16"
        )
        lines.append(f"| {name} | {success} | {per_token:+.1%} | {per_minute:+.1%} | {steps} | {groups} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=int, default=500_000, help="sampled tokens of each run")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    before = evaluate(AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH, dtype=torch.float32))
    results = {"machine": machine(), "before": before, "budget": arguments.budget, "runs": {}}
    for name, settings in VARIANTS.items():
        results["runs"][name] = [train(settings, arguments.budget, seed) for seed in range(arguments.seeds)]
        print(name, results["runs"][name])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "dynamic_sampling.json").write_text(json.dumps(results, indent=2) + "\n")
    (RESULTS / "dynamic_sampling.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
