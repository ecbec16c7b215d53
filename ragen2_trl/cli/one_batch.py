"""Looks at the gradients of one rollout batch of a checkpoint without training.

ragen2-trl diagnose --model runs/my_run --gradients true
"""

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragen2_trl.callbacks import GradientSNRCallback
from ragen2_trl.cli.arguments import DiagnoseArguments
from ragen2_trl.cli.models import load_model
from ragen2_trl.cli.typed import checked_input
from ragen2_trl.envs.mixture import AnyTask
from ragen2_trl.instrument.gradients import WHOLE, GradientMeasurement
from ragen2_trl.reporting.measurement_plots import plot_gradients
from ragen2_trl.reporting.saved_gradients import save_gradients
from ragen2_trl.rollout_events import LocalRollout, listen
from ragen2_trl.rollouts import TextRollout
from ragen2_trl.trainers import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer

ROWS = 8  # completions in a forward and backward pass
ENTROPY_COEF = 0.001  # the paper's, of the entropy bonus whose gradient is measured


def look_at_one_batch(arguments: DiagnoseArguments, folder: Path, console: Console) -> None:
    """Sample a batch of held-out tasks as GRPO would, and show and write what was asked for.

    Args:
        arguments: which model, on which tasks, how many; `gradients` writes `gradients_00000.json` and
            `gradients.png`.
        folder: to write to.
        console: to show it on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        trainer, inputs = _make_trainer(arguments, scratch)
        seen: list[LocalRollout] = []
        listen(trainer, on_rollout=seen.append)
        trainer.model.train()
        console.print(Text(f"Sampling {len(inputs)} completions ..."))
        trainer._generate_and_score_completions(inputs)
        (sampled,) = seen
        callback = GradientSNRCallback(trainer, entropy_coef=ENTROPY_COEF)
        measurement, cost = callback.measure(sampled, step=0)
        console.print(gradients_table(measurement, f"{cost['seconds']:.1f} s"))
        save_gradients(measurement, folder)
        plot_gradients([measurement]).savefig(folder / "gradients.png")
    console.print(Text(f"Written to {folder}"))


def _make_trainer(arguments: DiagnoseArguments, scratch: str) -> tuple[SNRFilteredGRPOTrainer, list[dict[str, Any]]]:
    """A trainer that never trains, and the rows that it samples for: each task as often as it has completions."""
    with checked_input():
        env = arguments.make_env()
        tasks = env.dataset(arguments.num_prompts, arguments.seed, split="test", data=arguments.data)
    on_gpu = torch.cuda.is_available()
    count = len(tasks) * arguments.num_samples
    rows = math.gcd(count, ROWS)
    with checked_input():
        args = SNRFilteredGRPOConfig(
            scratch,
            num_generations=arguments.num_samples,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=count // rows,
            max_completion_length=arguments.max_new_tokens or _longest_episode(env, arguments.max_turn_tokens),
            temperature=arguments.temperature,
            chat_template_kwargs=arguments.chat_template_kwargs or {},
            seed=arguments.seed,
            report_to="none",
            use_cpu=not on_gpu,
            bf16=on_gpu,
            gradient_checkpointing=on_gpu,
            disable_tqdm=True,
        )
    model, tokenizer = load_model(arguments.model)
    rollout: dict[str, Any] = (
        {"rollout_func": TextRollout(env, arguments.max_turn_tokens)} if env.needs_rollout else {}
    )
    trainer = SNRFilteredGRPOTrainer(model, env.reward_funcs, args, tasks, processing_class=tokenizer, **rollout)
    return trainer, [row for row in tasks for _ in range(arguments.num_samples)]


def _longest_episode(env: AnyTask, max_turn_tokens: int | None) -> int:
    """Tokens that hold all turns of a task; with several, as much again for what the environment answers."""
    turn = max_turn_tokens or env.max_turn_tokens or 128
    return turn if env.max_turns == 1 else 2 * turn * env.max_turns


def gradients_table(measurement: GradientMeasurement, cost: str) -> Table:
    """The gradients of each bucket, of the whole model, and of its parts for all samples."""
    table = Table(title="Gradients of the mean sample, by reward variance", caption=f"measured in {cost}")
    for name in ("", "reward std", "part", "norm", "squared, less noise", "cosine with batch", "of halves"):
        left = name in ("", "part")
        table.add_column(name, justify="left" if left else "right", no_wrap=left)

    def add(label: str, std: str, part: str, bucket: Any, group: str) -> None:
        one = bucket.parts[part][group]
        numbers = (
            f"{one.norm:.4g}",
            f"{one.squared_norm_debiased:.3g}",
            f"{one.cosine:.2f}",
            f"{one.half_cosine:.2f}",
        )
        table.add_row(label, std, part, *numbers)

    named = {f"bucket {number}": bucket for number, bucket in enumerate(measurement.buckets, start=1)}
    for label, bucket in {**named, "all": measurement.whole}.items():
        for part in bucket.parts:
            add(label, f"{bucket.reward_std[1]:.3f}", part, bucket, WHOLE)
        table.add_section()
    for part, groups in measurement.whole.parts.items():
        for group in groups:
            if group != WHOLE:
                add(f"all: {group}", "", part, measurement.whole, group)
    return table
