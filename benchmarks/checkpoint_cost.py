"""What a checkpoint costs beside plain TRL's.

    python benchmarks/checkpoint_cost.py    # about two minutes on two cores

Plain TRL, the filter, and the filter with the callback train the tiny model on FrozenLake, with a checkpoint and a
measurement at every step; one of each in turn, as often as `--rounds` says. A checkpoint is all that happens in
`_save_checkpoint`: card, weights, optimizer, state, and what is ours. Halfway the log is made as long as that of
`--long` steps, by repeating its rows, because a log is written anew each time. The first checkpoint of a process
imports what all later ones use and is left out. Ending is from the last step to the end of `train()`, where figures
are drawn. Writes `benchmarks/results/checkpoint_cost.{json,md}`.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import transformers
from measuring import machine, now
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.tiny import TINY_MODEL_PATH

RESULTS = Path(__file__).parent / "results"
VARIANTS = ("plain TRL", "filter", "filter + callback")
STEPS = 8
TARGET = 0.3  # seconds over plain TRL's


class Halfway(TrainerCallback):
    """Makes the log of a short run as long as that of a long one."""

    def __init__(self, trainer, rows: int):
        self.trainer, self.rows = trainer, rows

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == STEPS // 2:
            history = state.log_history
            history[:0] = [dict(history[number % len(history)]) for number in range(self.rows)]


class Ending(TrainerCallback):
    """When the last checkpoint is done; the first of the callbacks that hear of the end."""

    def on_train_end(self, args, state, control, **kwargs):
        self.since = now()


def train(variant: str, rows: int) -> dict[str, list[float] | float]:
    """Seconds of each checkpoint, with a short log and a long one, and of the ending."""
    env = make_env("frozen_lake")
    common = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 48,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_steps": 1,
        "save_total_limit": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    dataset = env.dataset(256, seed=0)
    if variant == "plain TRL":
        trainer = GRPOTrainer(str(TINY_MODEL_PATH), env.reward_funcs, GRPOConfig(**common), dataset)
    else:
        args = SNRFilteredGRPOConfig(**common)
        trainer = SNRFilteredGRPOTrainer(str(TINY_MODEL_PATH), env.reward_funcs, args, dataset)
    if variant == "filter + callback":
        trainer.add_callback(MutualInformationCallback(trainer, every=1))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(Halfway(trainer, rows))
    ending = Ending()
    trainer.callback_handler.callbacks.insert(0, ending)
    seconds = []
    save = trainer._save_checkpoint

    def timed(*arguments, **keywords):
        start = now()
        save(*arguments, **keywords)
        seconds.append(now() - start)

    trainer._save_checkpoint = timed
    trainer.train()
    return {"short": seconds[1 : STEPS // 2], "long": seconds[STEPS // 2 :], "ending": now() - ending.since}


def markdown(results: dict) -> str:
    lines = ["# Checkpoints", "", "Made by `python benchmarks/checkpoint_cost.py`, which says what is measured.", ""]
    lines += [", ".join(f"{name} {value}" for name, value in results["machine"].items()), ""]
    lines += [
        f"Medians over {results['rounds']} rounds, in seconds. Target: less than {TARGET} s over plain TRL's.",
        "",
        f"| | after a few steps | over plain TRL | of plain TRL | after {results['long']:,} steps | over plain TRL "
        "| of plain TRL | ending, with figures |",
        "|---" * 8 + "|",
    ]
    plain = results["medians"]["plain TRL"]
    for name, medians in results["medians"].items():
        cells = [name]
        for length in ("short", "long"):
            over, ratio = medians[length] - plain[length], medians[length] / plain[length]
            cells += [f"{medians[length]:.3f}", f"{over:+.3f}", f"{ratio:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {medians['ending']:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=2000, help="log rows of a long run")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    runs: dict[str, list[dict]] = {name: [] for name in VARIANTS}
    for _ in range(arguments.rounds):
        for name in VARIANTS:
            runs[name].append(train(name, arguments.long))
    medians = {
        name: {
            "short": statistics.median(value for run in done for value in run["short"]),
            "long": statistics.median(value for run in done for value in run["long"]),
            "ending": statistics.median(run["ending"] for run in done),
        }
        for name, done in runs.items()
    }
    results = {"machine": machine(), "rounds": arguments.rounds, "long": arguments.long, "medians": medians}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "checkpoint_cost.json").write_text(json.dumps({**results, "runs": runs}, indent=2) + "\n")
    (RESULTS / "checkpoint_cost.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
