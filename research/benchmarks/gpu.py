"""What filtering and measuring cost on one NVIDIA GPU, with models of the shapes of Qwen2.5.

    research/benchmarks/gpu.sh                # at most nine minutes
    WHEELS=folder research/benchmarks/gpu.sh  # packages that are missing from wheels in `folder`, without a network
    research/benchmarks/gpu.sh --dry          # all of it with sizes cut, on a CPU, too: whether it runs, not how fast

Writes `research/benchmarks/results/gpu_<device>.{json,md}`.

Nothing is downloaded: weights are random, in bfloat16, and texts are made. Each number is measured side by side with
what it is compared to. Parts come in the order of their worth, each with a share of the time; what one leaves over
goes to those after it. A case that would not fit is skipped and named, and results are written after every case.

1. *Updates*: optimizer steps less generation, on 32 replayed completions of 1,024 to 4,096 tokens behind prompts of
   512, plain TRL and the filter in mode `drop`. Median of the steps after the first; peak of allocated memory.
2. *Cross-scoring* against the reference's way (`cross_score.py`), and against one pair after the other in bfloat16 and
   in float32: how far reuse of a cache and forward passes of other sizes are from rounding alone.
3. *Steps* with generation (transformers', no vLLM) on FrozenLake: its share, that of the update, and the callback's.
"""

import argparse
import functools
import gc
import json
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, cross_score
from ragen2_trl.envs import make_env
from ragen2_trl.instrument import count_tokens
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.benchmarks.cross_score import make_texts, reference
from research.benchmarks.filter_step_time import BASE, StepTimes, make_trainer
from research.benchmarks.gpu_tables import markdown, scoring_line, step_line, update_line
from research.benchmarks.measuring import machine, now, peak_memory, reset_peak_memory

RESULTS = Path(__file__).parent / "results"
SMALL, MIDDLE, LARGE = "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B"
SHAPES = {  # hidden size, intermediate size, layers, heads; 2 heads of keys and values
    SMALL: (896, 4_864, 24, 14),
    MIDDLE: (1_536, 8_960, 28, 12),
    LARGE: (2_048, 11_008, 36, 16),
}
FILTERED = "drop, kept 0.50, with the callback"
CASES = (("plain", 1.0), *(("drop", fraction) for fraction in (0.5, 0.25, 0.75)))


@dataclass(frozen=True)
class Sizes:
    """How large everything is: on a GPU, and with `DRY` anywhere."""

    vocabulary: int = 151_936
    prompt: int = 512
    completion: tuple[int, int] = (1_024, 4_096)
    rows: tuple[int, ...] = (1, 8, 4, 2)  # per device, by worth
    steps: int = 3  # the first warms up
    texts: tuple[tuple[int, int, int, int], ...] = ((64, 64, 600, 150), (8, 128, 300, 100))  # as in `cross_score.py`
    tokens: tuple[int, ...] = (2_048, 8_192, 16_384)  # of a forward pass, beside the default
    rounds: int = 3
    generated: int = 256


FULL = Sizes()
DRY = Sizes(512, 8, (8, 24), (8, 2), 2, ((2, 6, 24, 8),), (64, 256), 1, 8)
DRY_SHAPE = (32, 64, 1, 2)


@dataclass(frozen=True)
class CaseList:
    """Cases of one kind: `measure(*case)` gives a row, and `line(row)` prints it."""

    title: str
    share: float  # of the time
    cases: list[tuple[Any, ...]]  # by worth
    measure: Callable[..., dict[str, Any]]
    line: Callable[[dict[str, Any]], str]


def make_model(size: str, sizes: Sizes) -> Qwen2ForCausalLM:
    hidden, intermediate, layers, heads = SHAPES[size] if sizes is FULL else DRY_SHAPE
    config = Qwen2Config(
        vocab_size=sizes.vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_tokenizer().eos_token_id,
        pad_token_id=_tokenizer().pad_token_id,
    )
    torch.manual_seed(0)
    if not torch.cuda.is_available():  # where bfloat16 is slow, and nothing is learnt from it
        return Qwen2ForCausalLM(config)
    with torch.device("cuda"):
        model: Any = Qwen2ForCausalLM(config)  # whose `to` is wrapped in a way that hides its arguments
        return model.to(torch.bfloat16)


@functools.cache
def _tokenizer():
    """The shipped one: nothing here depends on which ids a text has."""
    return AutoTokenizer.from_pretrained(TINY_MODEL_PATH)


def measure_update(
    size: str, rows: int, checkpointing: bool, variant: str, kept: float, sizes: Sizes
) -> dict[str, Any]:
    """Seconds and peak memory of an update, and what they are of the plain one's where that was measured before."""
    lengths, times = (sizes.prompt, sizes.completion), StepTimes()
    settings = {"gradient_checkpointing": checkpointing, "tokenizer": _tokenizer(), "learning_rate": 1e-6}
    reset_peak_memory()
    trainer = make_trainer(variant, make_model(size, sizes), rows, sizes.steps, kept, lengths, times, **settings)
    trainer.train()
    return {
        "model": size,
        "rows": rows,
        "checkpointing": checkpointing,
        "variant": variant,
        "kept": kept,
        "seconds": statistics.median(times.updates[1:]),
        "memory_mib": peak_memory(),
    }


@torch.no_grad()
def one_by_one(model: Qwen2ForCausalLM, prompt: list[int], traces: list[list[int]]) -> torch.Tensor:
    """(B, 1) log-probabilities in nats, one pair after the other, normalised in float32."""
    scores = []
    for ids in traces:
        inputs = torch.tensor([[*prompt, *ids]], device=model.device)
        logits = model(inputs, use_cache=False, logits_to_keep=len(ids) + 1).logits[0, :-1].float()
        scores.append(-cross_entropy(logits, inputs[0, len(prompt) :], reduction="sum"))
    return torch.stack(scores)[:, None].cpu()


def measure_scoring(size: str, shape: tuple[int, int, int, int], sizes: Sizes) -> dict[str, Any]:
    """Ours on 8 of the N prompts, the reference's way on one of them: they are the same work each."""
    policy = make_model(size, sizes).eval().to(torch.bfloat16)
    prompts, traces = make_texts(*shape, sizes.vocabulary)
    chosen = prompts[:8]
    ways: dict[str, Callable[..., torch.Tensor]] = {"reference": reference, "default": cross_score}
    ways |= {str(tokens): partial(cross_score, max_tokens_per_forward=tokens) for tokens in sizes.tokens}
    cross_score(policy, chosen[:1], traces[:4])  # warm
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    memory, tokens, matrices = {}, {}, {}
    for name, score in list(ways.items()) * sizes.rounds:
        of = chosen[:1] if name == "reference" else chosen
        in_use = reset_peak_memory()
        with count_tokens(policy) as counts:
            start = now()
            matrices[name] = score(policy, of, traces)[:, :1]
            seconds[name].append((now() - start) / len(of))
        memory[name] = peak_memory() - in_use
        tokens[name] = sum(counts)
    rounded = one_by_one(policy, chosen[0], traces)
    exact = one_by_one(policy.float(), chosen[0], traces)
    differences = {name: matrix - exact for name, matrix in [*matrices.items(), ("one by one", rounded)]}
    best = {name: min(values) for name, values in seconds.items()}
    return {
        "model": size,
        "shape": shape,
        "seconds": best,
        "speedup": best["reference"] / best["default"],
        "memory_mib": memory,
        "tokens_of_bound": tokens["default"] / (sum(map(len, chosen)) + len(chosen) * sum(map(len, traces))),
        "mean_nats": exact.mean().item(),
        "root_mean_square_nats": {name: value.square().mean().sqrt().item() for name, value in differences.items()},
        "largest_nats": {name: value.abs().max().item() for name, value in differences.items()},
    }


def measure_step(size: str, variant: str, sizes: Sizes) -> dict[str, Any]:
    """A step of 8 prompts with 8 completions each, of which half the groups have rewards that vary."""
    env, times, filtered = make_env("frozen_lake"), StepTimes(), variant == FILTERED

    def alternating(completions: list[Any], **columns: Any) -> list[float]:
        return [float(number // 8 % 2 and number % 2) for number in range(len(completions))]

    rewards: list[Any] = [*env.reward_funcs, alternating]
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            **BASE,
            "output_dir": folder,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 8,
            "num_generations": 8,
            "gradient_checkpointing": True,
            "max_steps": sizes.steps,
            "max_completion_length": sizes.generated,
            "learning_rate": 1e-6,
            "logging_strategy": "steps",
            "logging_steps": 1,
        }
        snr: dict[str, Any] = {"snr_strategy": "nonzero"}  # keeps exactly the groups with variance
        trainer = (SNRFilteredGRPOTrainer if filtered else GRPOTrainer)(
            make_model(size, sizes),
            rewards,
            SNRFilteredGRPOConfig(**settings, **snr) if filtered else GRPOConfig(**settings),
            env.dataset(8 * sizes.steps, seed=0),
            processing_class=_tokenizer(),
            callbacks=[times],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        times.watch(trainer)
        if filtered:
            trainer.add_callback(MutualInformationCallback(trainer, every=1))
        trainer.train()
    measured = [row["mi/seconds"] for row in trainer.state.log_history if "mi/seconds" in row][1:]
    measuring = statistics.median(measured) if measured else 0.0
    step, update = statistics.median(times.steps[1:]), statistics.median(times.updates[1:])
    return {
        "model": size,
        "variant": variant,
        "generation": step - update - measuring,  # measuring comes with it: nothing has been dropped yet
        "update": update,
        "measuring": measuring,
        "generation_share": (step - update - measuring) / (step - measuring),
        "callback_share": measuring / (10 * (step - measuring)),  # its default: every tenth step
    }


def make_parts(sizes: Sizes, results: dict[str, list[dict[str, Any]]]) -> dict[str, CaseList]:
    def updates(title: str, share: float, name: str, models: tuple[str, ...], on: bool, rows: tuple[int, ...], cases):
        every = [(size, count, on, *case) for size in models for count in rows for case in cases]
        line = partial(update_line, rows=results[name])
        return CaseList(title, share, every, partial(measure_update, sizes=sizes), line)

    large = (MIDDLE, LARGE)
    scored = [(SMALL, shape) for shape in sizes.texts] + [(size, sizes.texts[0]) for size in large]
    names = ("updates", "scoring", "steps", "without_checkpointing", "larger_models")
    for name in names:
        results[name] = []
    parts = (
        updates("Updates, gradient checkpointing on", 0.3, names[0], (SMALL,), True, sizes.rows, CASES),
        CaseList("Cross-scoring", 0.12, scored, partial(measure_scoring, sizes=sizes), scoring_line),
        CaseList(
            "Steps", 0.15, [(SMALL, "plain TRL"), (SMALL, FILTERED)], partial(measure_step, sizes=sizes), step_line
        ),
        updates("Updates, gradient checkpointing off", 0.2, names[3], (SMALL,), False, sizes.rows, CASES),
        updates("Updates of larger models", 0.23, names[4], large, True, (2,), CASES[:2]),
    )
    return dict(zip(names, parts, strict=True))


def run_part(
    part: CaseList, until: float, rows: list[dict[str, Any]], missing: list[str], save: Callable[[], None]
) -> None:
    """Measures the cases that end before `until`, a value of `now()`; what is not measured is told, and why."""
    longest = 0.0
    for case in part.cases:
        named = f"{part.title}: {', '.join(map(str, case))}"
        started = time.perf_counter()
        if started + 1.2 * longest >= until:
            missing.append(f"{named}: no time left")
            print(f"  {missing[-1]}", flush=True)
            continue
        try:
            rows.append(part.measure(*case))
            print(f"  {part.line(rows[-1])}", flush=True)
        except torch.OutOfMemoryError:
            missing.append(f"{named}: out of memory")
            print(f"  {missing[-1]}", flush=True)
        gc.collect()  # trainers hold themselves in circles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        longest = max(longest, time.perf_counter() - started)
        save()


def main(args: list[str] | None = None) -> int:
    """Measures and writes; 1 if a part has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="sizes cut; needs no GPU, results go to a new folder")
    parser.add_argument("--seconds", type=float, default=500.0, help="time for all parts (default: 500)")
    parser.add_argument("--results", type=Path, help="folder to write to (default: research/benchmarks/results)")
    arguments = parser.parse_args(args)
    if not arguments.dry and not torch.cuda.is_available():
        parser.error("no GPU was found; allowed: --dry")
    started = time.perf_counter()
    sizes = DRY if arguments.dry else FULL
    folder = arguments.results or (Path(tempfile.mkdtemp()) if arguments.dry else RESULTS)
    rows: dict[str, list[dict[str, Any]]] = {}
    parts, described = make_parts(sizes, rows), machine()
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        described |= {"memory": f"{memory:.0f} GiB", "CUDA": str(torch.version.cuda)}
    missing: list[str] = []
    results = {"machine": described, "sizes": asdict(sizes), "dry": arguments.dry, "rows": rows, "missing": missing}
    titles = {key: part.title for key, part in parts.items()}
    name = "gpu_" + ("dry" if arguments.dry else re.sub(r"[^a-z0-9]+", "_", described["device"].lower()).strip("_"))

    def save() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
        (folder / f"{name}.md").write_text(markdown(results, titles))

    failed, share = False, 0.0
    for key, part in parts.items():
        share += part.share
        print(part.title, flush=True)
        try:
            run_part(part, started + share * arguments.seconds, rows[key], missing, save)
        except Exception as error:  # noqa: BLE001 -- told here and in the results; an hour with a GPU is rare
            traceback.print_exc()
            missing.append(f"{part.title}: failed with {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            failed = True
        save()
    print(markdown(results, titles))
    print(f"written to {folder / name}.md after {time.perf_counter() - started:.0f} s")
    return int(failed)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sys.exit(main())
