"""What `GradientSNRCallback` costs, and the figure of gradients at three points of a training.

    python -m research.benchmarks.gradient_snr            # the cost, some minutes
    ragen2-trl train --recipe frozen_lake_tiny --run_name demo_gradients --env_args frozen=0.8 --max_steps 140 --save_steps 70 --num_generations 8 --per_device_train_batch_size 32 --gradient_accumulation_steps 4 --learning_rate 1e-4 --logging_steps 1
    python -m research.benchmarks.gradient_snr --figure runs/demo_gradients   # docs/gradients.png

*Cost.* A measurement in each step of TRL's own `GRPOTrainer`, whose time less the measurement's is what a step takes
without it; the median step counts. Terms of the loss are added one by one. Writes
`research/benchmarks/results/gradient_snr.{json,md}`.

*Figure.* The tiny model and the run's checkpoints at steps 70 and 140, each on the same 64 held-out tasks with 8
completions, by `ragen2-trl diagnose --gradients`. Writes `docs/gradients.png` and `research/benchmarks/results/gradients.json`.
"""  # noqa: E501 -- commands

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import GradientSNRCallback
from ragen2_trl.cli import main as command
from ragen2_trl.envs import make_env
from ragen2_trl.reporting import plot_gradients
from ragen2_trl.reporting.saved_gradients import read_gradients
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.benchmarks.measuring import machine

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
EVERY = 50  # the callback's default
CASES = {
    "task": {},
    "task, entropy": {"entropy_coef": 0.001},
    "task, entropy, KL": {"entropy_coef": 0.001, "beta": 0.01},
}
DEMO: dict[str, Any] = {
    "num_generations": 8,
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 4,
    "max_completion_length": 64,
    "learning_rate": 1e-4,
    "loss_type": "dapo",
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": not torch.cuda.is_available(),
    "bf16": torch.cuda.is_available(),
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


def cost(settings: dict, steps: int) -> dict[str, float]:
    """Median seconds of a measurement and of a step without it; the first step warms up."""
    env = make_env("frozen_lake")
    args = GRPOConfig(tempfile.mkdtemp(), max_steps=steps + 1, **DEMO, **settings)
    reward_funcs: list[Any] = env.reward_funcs
    trainer = GRPOTrainer(str(TINY_MODEL_PATH), reward_funcs, args, env.dataset(256, seed=0))
    trainer.add_callback(GradientSNRCallback(trainer, every=1))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "grad/seconds" in row][1:]
    measured = [row["grad/seconds"] for row in rows]
    return {
        "measurement": statistics.median(measured),
        "step": statistics.median(row["step_time"] - seconds for row, seconds in zip(rows, measured, strict=True)),
    }


def measure_cost(steps: int) -> None:
    costs = {name: cost(settings, steps) for name, settings in CASES.items()}
    results = {"machine": machine(), "steps": steps, "seconds": costs}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gradient_snr.json").write_text(json.dumps(results, indent=2) + "\n")
    lines = [
        "# What GradientSNRCallback costs",
        "",
        f"16 prompts x 8 completions, the tiny model; median of {steps} steps. "
        + ", ".join(f"{key} {value}" for key, value in machine().items())
        + ".",
        "",
        f"| measured | a measurement, s | a step without, s | measurement / step | of a run with every={EVERY} |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in costs.items():
        ratio = seconds["measurement"] / seconds["step"]
        lines.append(
            f"| {name} | {seconds['measurement']:.2f} | {seconds['step']:.2f} | {ratio:.2f} | {ratio / EVERY:.1%} |"
        )
    (RESULTS / "gradient_snr.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def draw_figure(run: Path, prompts: int) -> None:
    checkpoints = {0: "tiny", **{step: str(run / f"checkpoint-{step}") for step in (70, 140)}}
    measurements = []
    for step, model in checkpoints.items():
        with tempfile.TemporaryDirectory() as folder:
            options = f"--gradients true --num_prompts {prompts} --num_samples 8 --max_new_tokens 64"
            command(["diagnose", "--model", model, *options.split(), "--output_dir", folder])
            measurements.append(replace(read_gradients(Path(folder) / "gradients_00000.json"), step=step))
    plot_gradients(measurements).savefig(ROOT / "docs" / "gradients.png", metadata={"Software": None})
    (RESULTS / "gradients.json").write_text(json.dumps([asdict(one) for one in measurements], indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="A run with checkpoints 70 and 140, as above.")
    parser.add_argument("--prompts", type=int, default=64, help="Tasks of the figure.")
    parser.add_argument("--steps", type=int, default=5, help="Measured steps of each case.")
    arguments = parser.parse_args()
    if arguments.figure:
        draw_figure(arguments.figure, arguments.prompts)
    else:
        measure_cost(arguments.steps)
