"""The filter in TRL's asynchronous trainer, where 70 % of the prompts never earn a reward.

    python -m research.benchmarks.async_filter    # some five minutes on two cores

The tiny model trains 8 steps of 16 rows, ten seeds. In place of vLLM there is a server that answers at random
(`tests/async_cpu.py`), and the rollout loop runs in a thread: what is counted does not depend on the speed of either.
Rows with an advantage are those in the loss; completions are those of the groups that arrived at the trainer, for each
group it kept. Writes `research/benchmarks/results/async_filter.{json,md}`.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import transformers
from transformers import TrainerCallback

from ragen2_trl.tiny import TINY_MODEL_PATH
from ragen2_trl.trainers.async_groups import GroupQueue
from research.benchmarks.measuring import machine

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # what stands in for vLLM on a CPU

import async_cpu  # noqa: E402

RESULTS = Path(__file__).parent / "results"
DEAD = 0.7
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "TRL, G = 4": (4, {"plain": True}),
    "lossless, G = 4": (4, {"snr_strategy": "lossless"}),
    "filter, G = 4": (4, {"snr_strategy": "nonzero"}),
    "filter, G = 16": (16, {"snr_strategy": "nonzero", "snr_pilot_generations": 0}),
    "filter and pilots of 2, G = 16": (16, {"snr_strategy": "nonzero", "snr_pilot_generations": 2}),
    "filter and pilots of 4, G = 16": (16, {"snr_strategy": "nonzero", "snr_pilot_generations": 4}),
}


class Arrived(TrainerCallback):
    """Counts completions and kept groups of those that arrived."""

    def __init__(self, trainer: Any):
        self.trainer, self.latest = trainer, None
        self.completions = self.kept = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        selection = self.trainer.latest_selection
        if selection is not self.latest:
            self.latest = selection
            self.completions += int((~selection.rewards.isnan()).sum())
            self.kept += int(selection.groups.sum())


def count_rows(trainer: Any) -> dict[str, int]:
    """Rows and tokens of the loss, counted while it trains."""
    found, compute_loss = {"rows": 0, "with_advantage": 0, "tokens": 0}, trainer.compute_loss

    def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        there = inputs["token_index"] >= 0
        advantages, of_row = inputs["advantages"][there], inputs["segment_id"][there]
        for row in of_row.unique():
            found["rows"] += 1
            found["with_advantage"] += bool(advantages[of_row == row][0].abs() > 1e-6)
        found["tokens"] += int(inputs["attention_mask"].sum())
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = counted
    return found


def measured(size: int, settings: dict[str, Any], steps: int, seed: int) -> dict[str, float]:
    """One run."""
    server = async_cpu.Server()
    server.random.seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        dataset = async_cpu.prompts_with_dead(400, round(10 * DEAD)).shuffle(seed=seed)
        trainer = async_cpu.make_async(
            str(TINY_MODEL_PATH), folder, server, num_generations=size, max_steps=steps, dataset=dataset, seed=seed,
            logging_strategy="no", **settings,
        )  # fmt: skip
        found: dict[str, float] = {}
        rows = count_rows(trainer)
        seconds, groups = [0.0], [0]
        if "plain" not in settings:
            trainer.add_callback(arrived := Arrived(trainer))
        close = GroupQueue._close

        def timed(queue: GroupQueue) -> None:
            started = time.thread_time()
            close(queue)
            seconds[0] += time.thread_time() - started
            groups[0] += 1

        with patch.object(GroupQueue, "_close", timed):
            trainer.train()
        found |= {"rows": rows["rows"], "with_advantage": rows["with_advantage"], "tokens": rows["tokens"]}
        if "plain" in settings:
            found |= {"completions": rows["rows"], "live_groups": rows["with_advantage"] / size}
        else:
            found |= {"completions": arrived.completions, "live_groups": arrived.kept}
            found["ms_a_group"] = 1000 * seconds[0] / max(1, groups[0])
    server.http.shutdown()
    return found


def cost(runs: list[dict[str, float]]) -> float:
    """Completions for each live group, over all runs."""
    return sum(run["completions"] for run in runs) / sum(run["live_groups"] for run in runs)


def markdown(results: dict[str, Any]) -> str:
    """The tables of the results."""
    told = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    lines = ["# The filter in TRL's asynchronous trainer", ""]
    lines += ["Made by `python -m research.benchmarks.async_filter`, which says what is measured.", "", told, ""]
    lines += [
        f"{results['steps']} steps of 16 rows, {results['seeds']} seeds, {DEAD:.0%} dead prompts; sums over seeds, "
        "and the range of single seeds in brackets.",
        "",
        "| | rows in the loss | advantage | tokens computed | completions a live group | filter, CPU ms a group |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in results["runs"].items():
        rows, live, tokens = (sum(run[key] for run in runs) for key in ("rows", "with_advantage", "tokens"))
        costs = [run["completions"] / max(1, run["live_groups"]) for run in runs]
        own = [run["ms_a_group"] for run in runs if "ms_a_group" in run]
        lines.append(
            f"| {name} | {rows:.0f} | {live / rows:.1%} | {tokens:.0f} | {cost(runs):.1f} "
            f"({min(costs):.1f} to {max(costs):.1f}) | {f'{statistics.median(own):.2f}' if own else ''} |"
        )
    alone = cost(results["runs"]["filter, G = 16"])
    of_alone = {number: cost(results["runs"][f"filter and pilots of {number}, G = 16"]) / alone for number in (2, 4)}
    lines += [
        "",
        f"A live group of 16 costs {of_alone[2]:.2f} of the completions with pilots of 2, and {of_alone[4]:.2f} with "
        "pilots of 4.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run")
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    async_cpu.patch()
    async_cpu.async_grpo_trainer.AsyncRolloutWorker = async_cpu.ThreadWorker
    results: dict[str, Any] = {
        "machine": machine(),
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "runs": {
            name: [measured(size, settings, arguments.steps, seed) for seed in range(arguments.seeds)]
            for name, (size, settings) in MODES.items()
        },
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "async_filter.json").write_text(json.dumps(results, indent=2) + "\n")
    (RESULTS / "async_filter.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
