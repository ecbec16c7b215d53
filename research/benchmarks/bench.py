"""What updates, generation and cross-scoring cost: each measured side by side with what it is compared to, in turns.

    python -m research.benchmarks.bench filter_step_time   # a quarter of an hour on two cores; --quick: tiny model
    python -m research.benchmarks.bench lossless           # an hour on one core
    python -m research.benchmarks.bench prefill            # a quarter of an hour on one core
    python -m research.benchmarks.bench cross_score        # twelve minutes on two cores; --quick: vocabulary 8k only

Each writes `research/benchmarks/results/<name>.md`, and what it was made of as JSON beside it; its function says what
is measured. Weights are random and completions are given, unless it says otherwise, so that lengths and the share of
dead groups (equal rewards) are known.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import yaml
from datasets import Dataset
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, cross_score
from ragen2_trl.cli.shipped import recipe_path
from ragen2_trl.envs import make_env
from ragen2_trl.instrument import count_tokens
from ragen2_trl.tiny import TINY_MODEL_PATH
from ragen2_trl.trainers.generation import reading_prompts_once
from research.benchmarks.measuring import machine, now, peak_memory, reset_peak_memory
from research.statistics import mean_interval

RESULTS = Path(__file__).parent / "results"
MODULE = "research.benchmarks.bench"
BASE: dict[str, Any] = {
    "report_to": "none",
    "use_cpu": not torch.cuda.is_available(),
    "bf16": torch.cuda.is_available(),
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}
GROUP_SIZE = 8
METHODS: dict[str, dict[str, Any] | None] = {  # settings of the filtered trainer, or TRL's own
    "TRL": None,
    "dead rows and padding": {"snr_strategy": "lossless", "snr_share_prompts": False},
    "all": {"snr_strategy": "lossless"},
}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "off": {"snr_strategy": "all"},
    "drop": {"snr_strategy": "nonzero"},  # exactly the groups with variance: the fraction is known
}


# What measurements share


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def save(name: str, title: str, results: dict[str, Any] | None, lines: list[str], note: str = "") -> None:
    """Write a page of results, and the results themselves if there are any beside it."""
    described = ", ".join(f"{key} {value}" for key, value in machine().items())
    command = f"{MODULE} {name}" if name in BENCHMARKS else f"research.benchmarks.{name}"
    made = f"Made by `python -m {command}`, which says what is measured."
    RESULTS.mkdir(exist_ok=True)
    if results is not None:
        (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    whole = [f"# {title}", "", made, "", described + (f". {note}" if note else ""), "", *lines]
    (RESULTS / f"{name}.md").write_text("\n".join(whole) + "\n")
    print("\n".join(whole))


def random_model(kind: str, **sizes: Any) -> PreTrainedModel:
    """A model with random weights, the same for equal arguments, and no random state moved."""
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**ids, **sizes}))


def model_12m() -> PreTrainedModel:
    sizes = {"vocab_size": 512, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "head_dim": 64}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    return random_model("qwen3", **sizes, **heads)


def model_100m() -> PreTrainedModel:
    sizes = {"vocab_size": 16_384, "hidden_size": 768, "intermediate_size": 2_560, "num_hidden_layers": 11}
    return random_model("qwen3", **sizes, num_attention_heads=12, num_key_value_heads=12, head_dim=64)


POLICIES: dict[str, Callable[[], PreTrainedModel]] = {
    "12M": model_12m,
    "random 100M": model_100m,
    "tiny (1M)": lambda: AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH, dtype=torch.float32),
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


class Given:
    """A rollout function that returns drawn completions, and a reward function for them."""

    def __init__(self, shape: Shape, dead: int, prompts: int, seed: int, clock: Callable[[], float]):
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.dead, self.generator = shape, dead, generator
        self.prompts = [self._tokens(shape.prompt) for _ in range(prompts)]
        self.clock, self.seconds = clock, list[float]()  # of each rollout
        self.state = generator.get_state()

    def _tokens(self, number: int) -> list[int]:
        return torch.randint(5, 200, (number,), generator=self.generator).tolist()

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


def prompts_for(dead: float) -> int:
    """Prompts of a generation: two, or as many as a share of dead ones needs."""
    return max(2, round(1 / (1 - dead)))


def train(
    own: dict[str, Any] | None,
    shape: Shape,
    dead: float,
    *,
    seed: int = 0,
    steps: int = 1,
    updates: int = 1,
    policy: PreTrainedModel | None = None,
    clock: Callable[[], float] = time.process_time,
    prompts: int | None = None,
    size: int = GROUP_SIZE,
    rows: int = GROUP_SIZE,
    **others: Any,
) -> dict[str, Any]:
    """Seconds of each generation less its rollout, their positions together, and the parameters at the end.

    Seconds hold packing, old log-probs, forward, backward and optimizer; positions pass through the model, padding
    included. The comparison of shared prompts with padded rows that a run makes once is in neither.

    Args:
        own: settings of the filtered trainer; `None` for TRL's.
        shape, dead: of the completions, and the share of groups with equal rewards.
        seed: of the completions.
        steps, updates: generations, and optimizer steps of each.
        policy: in place of the model of 12M parameters.
        clock: returns seconds.
        prompts, size, rows: of a generation, completions of a prompt, rows of a micro-batch.
        others: further settings of the trainer.
    """
    prompts = prompts or prompts_for(dead)
    given = Given(shape, round(dead * prompts), prompts, seed, clock)
    micro_batches = prompts * size // rows
    settings = {
        **BASE,
        "output_dir": tempfile.mkdtemp(),
        "seed": seed,
        "max_steps": steps * updates,
        "num_generations": size,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": micro_batches // updates,
        "steps_per_generation": micro_batches,
        "learning_rate": 3e-5,
        "weight_decay": 0.1,
        "beta": 0.0,
        "max_completion_length": 4096,
        **others,
    }
    args = GRPOConfig(**settings) if own is None else SNRFilteredGRPOConfig(**settings, **own)
    times = StepTimes(clock)
    trainer: Any = (GRPOTrainer if own is None else SNRFilteredGRPOTrainer)(
        model_12m() if policy is None else policy,
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
    spent = [sum(times.steps[start : start + updates]) for start in range(0, len(times.steps), updates)]
    spent[0] -= checks.seconds
    seconds = [total - rollout for total, rollout in zip(spent, given.seconds, strict=True)]
    return {"seconds": seconds, "positions": sum(positions), "after": list(trainer.model.parameters())}


def peak_of(**case: Any) -> float:
    """Peak memory in MiB of a process of its own that does nothing but this case: resident, or allocated on a GPU."""
    command = [sys.executable, "-m", MODULE, "peak", "--case", json.dumps(case)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def print_peak(scoring_way: str = "", **case: Any) -> None:
    """What `peak_of` asks for: of cross-scoring beyond model and data, of an update all of it."""
    if scoring_way:
        policy, prompts, traces = make_case(*case["of"])
        in_use = reset_peak_memory()
        longest = sorted(traces, key=len)[-16:]  # the most there is to pad, and enough to fill a chunk
        WAYS[scoring_way](policy, prompts[:1], longest)
        print(peak_memory() - in_use)
        return
    train(policy=POLICIES[case.pop("policy")](), shape=Shape(**case.pop("shape")), **case)
    print(peak_memory())


# Updates


def filter_step_time(quick: bool, **_: Any) -> None:
    """How much time an update takes with dropped groups, as a fraction of plain TRL's.

    1. *Update time.* Plain TRL, the filter off and the filter, of whose groups a known fraction has variance and is
       kept, by rows of a micro-batch. Part of what `drop` saves is padding that plain TRL computes; the median counts.
    2. *Step time with generation*, 16 prompts x 8 completions of the tiny model: plain TRL and the default filter.
    3. *Peak memory* of a process with such updates; `drop` keeps seven of eight groups, so that it really packs.
    """
    fractions, rows_per_device = (0.25, 0.5, 0.75), (1, 4, 32)
    shapes = {"tiny (1M)": (Shape(60, 40, 0.3), 4, 6), "random 100M": (Shape(24, 20, 0.4), 1, 3)}
    if quick:
        del shapes["random 100M"]
    results: dict[str, Any] = {"machine": machine(), "update": {}, "memory_mib": {}}
    cases = [("plain", 1.0), ("off", 1.0), *(("drop", fraction) for fraction in fractions)]
    lines = []
    for name, (shape, rounds, steps) in shapes.items():
        shown = []
        for rows in rows_per_device:
            seconds: dict[tuple[str, float], list[float]] = {case: [] for case in cases}
            for variant, kept in cases * rounds:
                own: dict[str, Any] = {"steps": steps, "prompts": 8, "size": 4, "rows": rows, "clock": now}
                trained = train(VARIANTS[variant], shape, 1 - kept, policy=POLICIES[name](), **own)
                seconds[variant, kept] += trained["seconds"][1:]  # the first step warms up
            medians = {case: statistics.median(values) for case, values in seconds.items()}
            plain = medians["plain", 1.0]
            results["update"].setdefault(name, []).extend(
                {"rows_per_device": rows, "variant": case[0], "kept": case[1], "seconds": m, "of_plain": m / plain}
                for case, m in medians.items()
            )
            shown.append([str(rows), f"{plain:.2f} s", *(f"{medians[case] / plain:.3f}" for case in cases[1:])])
        header = ["rows per device", "plain", "filter off", *(f"drop, kept {fraction:.2f}" for fraction in fractions)]
        lines += [f"## Update time as a fraction of plain TRL's, {name}", "", *table(header, shown), ""]
    results["step"] = step = measure_steps(steps=20)
    lines += ["## Step time with generation, tiny model, 16 prompts x 8 completions", ""]
    shares = f"{step['of_plain']:.3f} of plain at a kept fraction of {step['kept']:.2f}"
    lines += [f"Plain {step['plain']:.2f} s, filter {step['filter']:.2f} s: {shares}."]
    for name, (shape, *_rest) in shapes.items():
        common = {"policy": name, "shape": vars(shape), "steps": 3, "prompts": 8, "size": 4, "rows": 8}
        results["memory_mib"][name] = {
            variant: peak_of(own=own, dead=0.125 if variant == "drop" else 0.0, **common)
            for variant, own in VARIANTS.items()
        }
    peaks = [[name, *(f"{one:.0f} MiB" for one in of.values())] for name, of in results["memory_mib"].items()]
    lines += ["", "## Peak memory of a process", "", *table(["model", *VARIANTS], peaks)]
    save("filter_step_time", "Filter step time", results, lines)


def measure_steps(steps: int) -> dict[str, float]:
    """Step time with generation on the tiny model, plain TRL and the default filter, in turns."""
    env = make_env("frozen_lake")
    seconds: dict[str, list[float]] = {"plain": [], "filter": []}
    kept: list[float] = []
    rewards: list[Any] = env.reward_funcs
    for seed, variant in [(seed, variant) for seed in range(2) for variant in seconds]:
        settings = {**BASE, "output_dir": tempfile.mkdtemp(), "max_steps": steps, "learning_rate": 3e-5, "seed": seed}
        settings |= {"num_generations": 4, "per_device_train_batch_size": 32, "gradient_accumulation_steps": 4}
        settings |= {"max_completion_length": 64, "logging_strategy": "steps", "logging_steps": 1}
        plain, times = variant == "plain", StepTimes()
        made, args = (GRPOTrainer, GRPOConfig) if plain else (SNRFilteredGRPOTrainer, SNRFilteredGRPOConfig)
        dataset = env.dataset(1024, seed=0)
        trainer = made(str(TINY_MODEL_PATH), rewards, args(**settings), dataset, callbacks=[times])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        seconds[variant] += times.steps[1:]
        kept += [row["snr/kept_fraction"] for row in trainer.state.log_history if "snr/kept_fraction" in row]
    medians = {variant: statistics.median(values) for variant, values in seconds.items()}
    return {**medians, "of_plain": medians["filter"] / medians["plain"], "kept": statistics.mean(kept)}


def lossless(rounds: int, note: str, **_: Any) -> None:
    """What `snr_strategy="lossless"` takes of plain TRL's update, and how far apart the two end.

    A model of 12M parameters is trained on one generation. Times are CPU seconds of the process.
    """
    shapes = {
        "maths": Shape(prompt=100, completion=250, spread=0.5),
        "short maths": Shape(prompt=100, completion=60, spread=0.5),
        "agent, one turn": Shape(prompt=512, completion=128, spread=0.3),
        "agent, five turns": Shape(prompt=512, completion=250, spread=0.3, turns=5),
        "agent, long prompts": Shape(prompt=1024, completion=128, spread=0.3),
    }
    train(METHODS["all"], Shape(prompt=16, completion=16, spread=0.5), 0.5)  # warms up
    before: list[torch.Tensor] = list(model_12m().parameters())
    rows, memory = [], []
    for name, shape in shapes.items():
        for dead in (0.0, 0.5, 0.75):
            for updates in (1, 2) if (name, dead) == ("agent, one turn", 0.5) else (1,):
                found: dict[str, list[float]] = {}
                for seed in range(rounds):
                    ends = {m: train(own, shape, dead, seed=seed, updates=updates) for m, own in METHODS.items()}
                    plain = ends.pop("TRL")
                    found.setdefault("moved", []).append(largest_difference(before, plain["after"]))
                    for method, end in ends.items():
                        ratios = {"seconds": sum(end["seconds"]) / sum(plain["seconds"])}
                        ratios["positions"] = end["positions"] / plain["positions"]
                        ratios["apart"] = largest_difference(end["after"], plain["after"])
                        for key, value in ratios.items():
                            found.setdefault(f"{method} {key}", []).append(value)
                cells = [name + ", two updates a generation" * (updates > 1), f"{dead:.2f}"]
                for method in [method for method in METHODS if method != "TRL"]:
                    positions = statistics.fmean(found[f"{method} positions"])
                    cells += [_ratio(found[f"{method} seconds"]), f"{positions:.2f}"]
                rows.append([*cells, f"{max(found['all apart']):.1e}", f"{min(found['moved']):.1e}"])
                print(rows[-1], flush=True)
        peaks = [peak_of(own=own, policy="12M", shape=vars(shape), dead=0.0) for own in METHODS.values()]
        memory.append([name, *(f"{peak:.0f}" for peak in peaks)])
    told = (
        f"12M parameters, two to four prompts x {GROUP_SIZE} completions, float32, given completions. CPU time of one "
        "update as a fraction of plain TRL's (95 % interval over rounds), positions through the model likewise, the "
        "largest difference of a parameter from plain TRL's at the end, and how far the farthest one moved."
    )
    header = ["shape", "dead groups", "dead rows and padding: time", "positions", "with shared prompts: time"]
    header += ["positions", "parameters differ by", "and moved by"]
    lines = [told, "", *table(header, rows), "", "Peak memory of the process in MiB:", ""]
    save("lossless", "Lossless", None, [*lines, *table(["shape", *METHODS], memory)], note)


@torch.no_grad()
def largest_difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(first, second, strict=True))


def _ratio(values: list[float]) -> str:
    """A geometric mean, with its interval over rounds."""
    logs = [math.log(value) for value in values]
    middle = math.exp(statistics.fmean(logs))
    if len(values) < 2:
        return f"{middle:.2f}"
    estimate = mean_interval(logs)
    return f"{middle:.2f} ({math.exp(estimate.low):.2f} to {math.exp(estimate.high):.2f})"


# Generation


def prefill(rounds: int, **_: Any) -> None:
    """What transformers' `generate` saves where each prompt is read once for all of its completions.

    A model of the shape of SmolLM2-135M samples 8 completions of 128 tokens of one prompt, as TRL calls it and with
    the prompt read once, from the same seed. Times are CPU seconds of the process, the fastest round's.
    """
    sizes = {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1_536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8_192}
    policy: Any = random_model("llama", **sizes, **heads, tie_word_embeddings=True).eval()
    config = GenerationConfig(max_new_tokens=128, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None)
    whole = SimpleNamespace(unwrap_model=lambda wrapped: wrapped)
    trainer = SimpleNamespace(_reads_prompts_once=True, accelerator=whole, model_wrapped=policy)
    methods: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "once per completion": nullcontext,
        "once": partial(reading_prompts_once, trainer),
    }
    rows = []
    for tokens in (512, 2_000):
        ids = torch.randint(5, 400, (1, tokens), generator=torch.Generator().manual_seed(0)).expand(8, -1)
        seconds: dict[str, float] = {}
        sampled: dict[str, torch.Tensor] = {}
        for name, around in list(methods.items()) * rounds:
            with torch.random.fork_rng(), torch.no_grad(), around():
                torch.manual_seed(7)
                start = time.process_time()
                mask = torch.ones_like(ids)
                sampled[name] = policy.generate(input_ids=ids, attention_mask=mask, generation_config=config)
                seconds[name] = min(seconds.get(name, math.inf), time.process_time() - start)
        plain, once = seconds.values()
        same = "yes" if torch.equal(*sampled.values()) else "no"
        rows.append([f"{tokens:,}", f"{plain:.1f} s", f"{once:.1f} s", f"{once / plain:.2f}", same])
    header = ["tokens of the prompt", "once per completion", "once", "ratio", "same tokens"]
    save("prefill", "Prompts read once", None, table(header, rows))


# Cross-scoring

TEXTS = {"8 x 128": (8, 128, 300, 100), "64 x 64": (64, 64, 600, 150)}  # N, NK, P, T
SCORED = {"hidden 256, 4 layers": (256, 4), "hidden 768, 8 layers": (768, 8)}
CASES = [  # texts, model, vocabulary, rounds
    *[(texts, "hidden 256, 4 layers", 8_192, 3) for texts in TEXTS],
    *[(texts, "hidden 256, 4 layers", 151_936, 1) for texts in TEXTS],
    ("64 x 64", "hidden 768, 8 layers", 8_192, 1),
]


def make_case(texts: str, model: str, vocabulary: int):
    """A random model, and prompts and traces of random ids."""
    hidden, layers = SCORED[model]
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": 3 * hidden}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
    policy = random_model("qwen2", **sizes, **heads, num_hidden_layers=layers, max_position_embeddings=4096).eval()
    if torch.cuda.is_available():
        policy = policy.to("cuda", torch.bfloat16)
    return policy, *make_texts(*TEXTS[texts], vocabulary)


def make_texts(num_prompts: int, num_traces: int, prompt_length: int, length: int, vocabulary: int):
    """Prompts and traces of random ids, with these numbers of tokens on average.

    Lengths of traces follow a gamma distribution of shape 6, so that their standard deviation is 0.4 of their mean.
    """
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    prompts = [ids(rng.randint(prompt_length * 9 // 10, prompt_length * 11 // 10)) for _ in range(num_prompts)]
    # Expected order statistics instead of one draw, so that the mean is `length` and the longest as long as usual.
    draws = sorted(rng.gammavariate(6, length / 6) for _ in range(1000 * num_traces))
    lengths = [round(sum(draws[i : i + 1000]) / 1000) for i in range(0, len(draws), 1000)]
    return prompts, [ids(length) for length in rng.sample(lengths, num_traces)]


@torch.no_grad()
def reference(model, prompts, traces, rows: int = 4) -> torch.Tensor:
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
        for targets, valid in zip(ids.split(rows), mask.split(rows), strict=True):
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


WAYS: dict[str, Callable[..., torch.Tensor]] = {"reference": reference, "ours": cross_score}


def cross_scoring(quick: bool, **_: Any) -> None:
    """How much cheaper cross-scoring is than the reference's way, and what the callback costs a run.

    1. *Cross-scoring.* The reference (mll-lab-nu/RAGEN, `collapse_metrics.py` over verl 0.6) runs each prompt with
       every reasoning in full, four rows at a time (`log_prob_micro_batch_size_per_gpu` of its base configuration),
       all traces padded to the longest, with logits of every position and their entropy, which it discards. Ours is
       `cross_score`. The best of up to three rounds counts. Timed is one of the N prompts: they are the same work.
       Memory is what a process of its own needs beyond model and data, for one prompt.
    2. *The callback.* A training run of 16 prompts x 8 completions: seconds spent measuring over all others.
    """
    results: dict[str, Any] = {"machine": machine(), "callback": measure_callback(40)}
    results["cases"] = [measure_case(*case) for case in (CASES[:2] if quick else CASES)]
    header = ["N x NK, model", "vocabulary", "reference, s a prompt", "ours", "speed-up", "tokens, of N·P + N·NK·T"]
    header += ["memory, of the reference's", "largest difference, nats"]
    rows = []
    for row in results["cases"]:
        seconds, memory = row["seconds"], row["memory_mib"]
        in_mib = f"{row['memory_of_reference']:.2f} ({memory['ours']:.0f} of {memory['reference']:.0f} MiB)"
        cells = [f"{row['shape']}, {row['model']}", str(row["vocabulary"]), f"{seconds['reference']:.2f}"]
        cells += [f"{seconds['ours']:.2f}", f"{row['speedup']:.1f}", f"{row['tokens_of_bound']:.3f}", in_mib]
        rows.append([*cells, f"{row['largest_difference_nats']:.1e}"])
    told = "8 x 128: prompts of 300 and traces of 100 tokens on average; 64 x 64: 600 and 150."
    lines = [*table(header, rows), "", told]
    callback = results["callback"]
    lines += [
        "",
        "## The callback at its defaults, 16 prompts x 8 completions a step",
        "",
        f"{callback['measurements']} measurements of {callback['seconds_each']:.2f} s in {callback['steps']} steps of "
        f"{callback['step_seconds']:.2f} s: {callback['share']:.1%} on top of training.",
    ]
    save("cross_score", "Cross-scoring", results, lines)


def measure_case(texts: str, model: str, vocabulary: int, rounds: int) -> dict[str, Any]:
    policy, prompts, traces = make_case(texts, model, vocabulary)
    chosen = prompts[:1]
    cross_score(policy, chosen, traces[:4])  # warm
    spent: dict[str, list[float]] = {name: [] for name in WAYS}
    tokens: dict[str, float] = {}
    matrices: dict[str, torch.Tensor] = {}
    for name, score in list(WAYS.items()) * rounds:
        with count_tokens(policy) as counts:
            start = now()
            matrices[name] = score(policy, chosen, traces)
            spent[name].append(now() - start)
        tokens[name] = sum(counts)
    # Whether a cache can be reused is tried once, on the first of all N prompts, in the three passes after its own.
    tokens["ours"] -= sum(counts[1:4]) * (1 - 1 / len(prompts))
    seconds = {name: min(values) for name, values in spent.items()}
    memory = {name: peak_of(scoring_way=name, of=(texts, model, vocabulary)) for name in WAYS}
    return {
        "shape": texts,
        "model": model,
        "vocabulary": vocabulary,
        "seconds": seconds,
        "speedup": seconds["reference"] / seconds["ours"],
        "tokens_of_bound": tokens["ours"] / (len(chosen[0]) + sum(map(len, traces))),
        "tokens_reference_of_ours": tokens["reference"] / tokens["ours"],
        "memory_mib": memory,
        "memory_of_reference": memory["ours"] / memory["reference"],
        "largest_difference_nats": (matrices["ours"] - matrices["reference"]).abs().max().item(),
    }


def measure_callback(steps: int) -> dict[str, float]:
    """Share of a run's time that measuring takes, 16 prompts x 8 completions a step, callback at its defaults."""
    recipe = yaml.safe_load(recipe_path("frozen_lake_tiny").read_text())
    fields = SNRFilteredGRPOConfig.__dataclass_fields__
    settings = {name: value for name, value in recipe.items() if name in fields and name != "run_name"}
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"output_dir": folder, "max_steps": steps, "save_strategy": "no", "disable_tqdm": True}
        settings |= {"use_cpu": not torch.cuda.is_available(), "steps_per_generation": None, "logging_steps": 1}
        settings |= {"num_generations": 8, "per_device_train_batch_size": 32, "gradient_accumulation_steps": 4}
        env = make_env(recipe["env_name"])
        args = SNRFilteredGRPOConfig(**settings)
        trainer = SNRFilteredGRPOTrainer(str(TINY_MODEL_PATH), env.reward_funcs, args, env.dataset(1024, seed=0))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(MutualInformationCallback(trainer))
        start = now()
        trainer.train()
        total = now() - start
    measured = [row["mi/seconds"] for row in trainer.state.log_history if "mi/seconds" in row]
    return {
        "steps": steps,
        "measurements": len(measured),
        "seconds_each": sum(measured) / len(measured),
        "step_seconds": (total - sum(measured)) / steps,
        "share": sum(measured) / (total - sum(measured)),
    }


BENCHMARKS: dict[str, Callable[..., None]] = {
    "filter_step_time": filter_step_time,
    "lossless": lossless,
    "prefill": prefill,
    "cross_score": cross_scoring,
}


def main(args: list[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ", ".join(BENCHMARKS)
    parser.add_argument("name", choices=[*BENCHMARKS, "peak"], metavar="NAME", help=names)
    parser.add_argument("--quick", action="store_true", help="smaller cases only")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case of lossless and prefill (default: 3)")
    parser.add_argument("--note", default="", help="what else is to be known of the machine")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args(args)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.name == "peak":
        print_peak(**arguments.case)
    else:
        BENCHMARKS[arguments.name](**vars(arguments))


if __name__ == "__main__":
    main()
