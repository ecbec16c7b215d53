"""What `snr_strategy="lossless"` takes of plain TRL's update, and how far apart the two end.

    python -m research.benchmarks.lossless    # an hour on one core

A model of 12M parameters with random weights is trained on one generation of given completions and rewards, so that
lengths and the share of dead groups (equal rewards) are known. Methods take turns, so that a slow minute hits all.
Times are CPU seconds of the process for a step less its rollout: packing, old log-probs, forward, backward, optimizer.
Positions are those that pass through the model, padding included.

Writes `research/benchmarks/results/lossless.md`.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.benchmarks.filter_step_time import BASE, StepTimes
from research.benchmarks.measuring import machine, peak_memory
from research.statistics import mean_interval

RESULTS = Path(__file__).parent / "results" / "lossless.md"
DEAD = (0.0, 0.5, 0.75)
GROUP_SIZE = 8


@dataclass(frozen=True)
class Shape:
    """Tokens of prompts and completions.

    Args:
        prompt: of each prompt.
        completion: median of a completion, whose logarithm is normal.
        spread: standard deviation of that logarithm.
        turns: the environment writes half of the tokens after the first turn, which are not in the loss.
    """

    prompt: int
    completion: int
    spread: float
    turns: int = 1


SHAPES = {
    "maths": Shape(prompt=100, completion=250, spread=0.5),
    "short maths": Shape(prompt=100, completion=60, spread=0.5),
    "agent, one turn": Shape(prompt=512, completion=128, spread=0.3),
    "agent, five turns": Shape(prompt=512, completion=250, spread=0.3, turns=5),
    "agent, long prompts": Shape(prompt=1024, completion=128, spread=0.3),
}
METHODS: dict[str, dict[str, Any] | None] = {
    "TRL": None,
    "dead rows and padding": {"snr_strategy": "lossless", "snr_share_prompts": False},
    "all": {"snr_strategy": "lossless"},
}
SETTINGS = {
    **BASE,
    "per_device_train_batch_size": GROUP_SIZE,
    "num_generations": GROUP_SIZE,
    "learning_rate": 3e-5,
    "weight_decay": 0.1,
    "beta": 0.0,
    "max_completion_length": 4096,
}


def prompts_for(dead: float) -> int:
    """Prompts of a generation: two, or as many as a share of dead ones needs."""
    return max(2, round(1 / (1 - dead)))


class Given:
    """A rollout function that returns drawn completions, and a reward function for them."""

    def __init__(self, shape: Shape, dead: float, seed: int, clock: Callable[[], float]):
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.generator, number = shape, generator, prompts_for(dead)
        self.dead, self.prompts = round(dead * number), [self._tokens(shape.prompt) for _ in range(number)]
        self.clock, self.seconds = clock, list[float]()  # of each rollout
        self.state = generator.get_state()

    def _tokens(self, number: int) -> list[int]:
        return torch.randint(5, 400, (number,), generator=self.generator).tolist()

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        start = self.clock()
        self.generator.set_state(self.state)  # each generation has the lengths of the first
        draws = torch.randn(len(prompts), generator=self.generator)
        lengths = (self.shape.completion * (self.shape.spread * draws).exp()).round().int().clamp(4).tolist()
        first = [length // self.shape.turns for length in lengths]
        masks = [
            [int(place < own or place % 2 == 0) for place in range(length)]
            for own, length in zip(first, lengths, strict=True)
        ]
        rollout = {
            "prompt_ids": [self.prompts[int(prompt)] for prompt in prompts],
            "completion_ids": [self._tokens(length) for length in lengths],
            "logprobs": None,
            "env_mask": masks,
            "given": [float(int(prompt) >= self.dead and row % 2) for row, prompt in enumerate(prompts)],
        }
        self.seconds.append(self.clock() - start)
        return rollout

    @staticmethod
    def reward(completions: Any, given: list[float], **columns: Any) -> Any:
        return given


class Checks:
    """Around the comparison of shared prompts with padded rows, which is made once in a run: its seconds."""

    def __init__(self, clock: Callable[[], float], check: Callable[[Any], None] | None):
        self.clock, self.check = clock, check
        self.seconds, self.running = 0.0, False

    def __call__(self, batch: Any) -> None:
        assert self.check is not None  # plain TRL makes none
        start, self.running = self.clock(), True
        self.check(batch)
        self.seconds, self.running = self.seconds + self.clock() - start, False


def model() -> Qwen3ForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=512,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=8192,
        )
        return Qwen3ForCausalLM(config)


def train(
    method: str,
    shape: Shape,
    dead: float,
    *,
    seed: int = 0,
    steps: int = 1,
    two: bool = False,
    policy: PreTrainedModel | None = None,
    clock: Callable[[], float] = time.process_time,
    **others: Any,
) -> dict[str, Any]:
    """Seconds of each generation, their positions together, and the parameters at the end.

    The comparison of shared prompts with padded rows that a run makes once is in neither.

    Args:
        method: one of `METHODS`.
        shape, dead: of the completions, and the share of groups with equal rewards.
        seed: of the completions.
        steps: generations.
        two: whether a generation serves two optimizer steps.
        policy: in place of the model of 12M parameters.
        clock: returns seconds.
        others: further settings of the trainer.
    """
    own, given = METHODS[method], Given(shape, dead, seed, clock)
    prompts = len(given.prompts)
    settings = {
        **SETTINGS,
        "output_dir": tempfile.mkdtemp(),
        "seed": seed,
        "max_steps": steps * (1 + two),
        "gradient_accumulation_steps": prompts // (1 + two),
        "steps_per_generation": prompts,
        **others,
    }
    args = GRPOConfig(**settings) if own is None else SNRFilteredGRPOConfig(**settings, **own)
    times = StepTimes(clock)
    trainer: Any = (GRPOTrainer if own is None else SNRFilteredGRPOTrainer)(
        model() if policy is None else policy,
        given.reward,
        args,
        Dataset.from_dict({"prompt": [str(number) for number in range(prompts)]}),
        processing_class=AutoTokenizer.from_pretrained(TINY_MODEL_PATH),
        rollout_func=given.rollout,
        callbacks=[times],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    checks = Checks(clock, getattr(trainer, "_check_sharing", None))
    trainer._check_sharing = checks
    positions: list[int] = []
    trainer.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: None if checks.running else positions.append(kwargs["input_ids"].numel()),
        with_kwargs=True,
    )
    trainer.train()
    spent = [sum(times.steps[start : start + 1 + two]) for start in range(0, len(times.steps), 1 + two)]
    spent[0] -= checks.seconds
    seconds = [total - rollout for total, rollout in zip(spent, given.seconds, strict=True)]
    return {"seconds": seconds, "positions": sum(positions), "after": list(trainer.model.parameters())}


@torch.no_grad()
def largest_difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(first, second, strict=True))


def measure(shape: Shape, dead: float, rounds: int, two: bool) -> dict[str, list[float]]:
    """For each method the ratios to TRL's seconds and positions, and how far parameters end from TRL's."""
    found: dict[str, list[float]] = {}
    for seed in range(rounds):
        ends = {method: train(method, shape, dead, seed=seed, two=two) for method in METHODS}
        plain = ends["TRL"]
        found.setdefault("moved", []).append(largest_difference(list(model().parameters()), plain["after"]))
        for method, end in ends.items():
            if method != "TRL":
                found.setdefault(f"{method} seconds", []).append(sum(end["seconds"]) / sum(plain["seconds"]))
                found.setdefault(f"{method} positions", []).append(end["positions"] / plain["positions"])
                found.setdefault(f"{method} apart", []).append(largest_difference(end["after"], plain["after"]))
    return found


def _ratio(values: list[float]) -> str:
    """A geometric mean, with its interval over rounds."""
    logs = [math.log(value) for value in values]
    middle = math.exp(statistics.fmean(logs))
    if len(values) < 2:
        return f"{middle:.2f}"
    estimate = mean_interval(logs)
    return f"{middle:.2f} ({math.exp(estimate.low):.2f} to {math.exp(estimate.high):.2f})"


def peak_of(method: str, shape: str) -> float:
    """MiB of a process that trains a step."""
    command = [sys.executable, "-m", "research.benchmarks.lossless", "--peak", method, "--shape", shape]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def markdown(rows: list[tuple[str, float, dict[str, list[float]]]], memory: dict[str, list[float]], note: str) -> str:
    lines = ["# Lossless", "", "Made by `python -m research.benchmarks.lossless`.", ""]
    lines += [", ".join(f"{name} {value}" for name, value in machine().items()) + (f". {note}" if note else ""), ""]
    lines += [
        f"12M parameters, two to four prompts x {GROUP_SIZE} completions, float32, given completions. CPU time of one "
        "update as a fraction of plain TRL's (95 % interval over rounds), positions through the model likewise, the "
        "largest difference of a parameter from plain TRL's at the end, and how far the farthest one moved.",
        "",
        "| shape | dead groups | dead rows and padding: time | positions | with shared prompts: time | positions "
        "| parameters differ by | and moved by |",
        "|---" * 8 + "|",
    ]
    for name, dead, row in rows:
        cells = [_ratio(row[f"{method} seconds"]) for method in METHODS if method != "TRL"]
        counted = [f"{statistics.fmean(row[f'{method} positions']):.2f}" for method in METHODS if method != "TRL"]
        lines.append(
            f"| {name} | {dead:.2f} | {cells[0]} | {counted[0]} | {cells[1]} | {counted[1]} "
            f"| {max(row['all apart']):.1e} | {min(row['moved']):.1e} |"
        )
    lines += [
        "",
        "Peak memory of the process in MiB:",
        "",
        "| shape | " + " | ".join(METHODS) + " |",
        "|---" * 4 + "|",
    ]
    lines += [f"| {name} | " + " | ".join(f"{one:.0f}" for one in values) + " |" for name, values in memory.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case")
    parser.add_argument("--note", default="", help="what else is to be known of the machine")
    parser.add_argument("--peak", choices=METHODS, help="only print the peak memory of a run with this method")
    parser.add_argument("--shape", choices=SHAPES, help="only this shape")
    arguments = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.peak:
        train(arguments.peak, SHAPES[arguments.shape], 0.0)
        print(peak_memory())
        return
    train("all", Shape(prompt=16, completion=16, spread=0.5), 0.5)  # warms up
    shapes = {name: one for name, one in SHAPES.items() if arguments.shape in (None, name)}
    rows, memory = [], {}
    for name, shape in shapes.items():
        for dead in DEAD:
            for two in (False, True) if (name, dead) == ("agent, one turn", 0.5) else (False,):
                label = f"{name}, two updates a generation" if two else name
                rows.append((label, dead, measure(shape, dead, arguments.rounds, two)))
                print(label, dead, {key: round(statistics.fmean(value), 7) for key, value in rows[-1][2].items()})
        memory[name] = [peak_of(method, name) for method in METHODS]
        RESULTS.write_text(markdown(rows, memory, arguments.note))
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
