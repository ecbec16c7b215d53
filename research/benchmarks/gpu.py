"""What filtering and measuring cost on one NVIDIA GPU, with models of the shapes of Qwen2.5.

    research/benchmarks/gpu.sh                # at most nine minutes
    WHEELS=folder research/benchmarks/gpu.sh  # packages that are missing from wheels in `folder`, without a network
    research/benchmarks/gpu.sh --dry          # all of it with sizes cut, on a CPU, too: whether it runs, not how fast

Writes `research/benchmarks/results/gpu_<device>.{json,md}`.

Nothing is downloaded: weights are random, in bfloat16, and texts are made. Each number is measured side by side with
what it is compared to. Parts come in the order of their worth, each with a share of the time; what one leaves over
goes to those after it. A case that would not fit is skipped and named, and results are written after every case.

1. *Updates* on given completions (`bench.py`): plain TRL, `lossless` without and with shared prompts, with
   gradient checkpointing, for one agent's turn and for maths, with no dead group and with half of them dead, under
   SDPA and, where its package is there, FlashAttention. Seconds of an optimizer step less its rollout, of the first
   with its lengths (cold) and of later ones with the same; positions through the model, peak of allocated memory.
2. *Cross-scoring* of a whole matrix and of the part that is scored where a measurement would cost too much, against
   the reference's way (`bench.py`), and against one pair after the other in bfloat16 and in float32: how far
   reuse of a cache is from rounding alone.
3. *Steps* with generation (transformers', no vLLM) on FrozenLake, with each prompt read once and once per completion:
   its share, that of the update, and the callback's.
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
from transformers.utils import is_flash_attn_2_available
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, cross_score
from ragen2_trl.envs import make_env
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.benchmarks.bench import BASE, METHODS, Shape, StepTimes, make_texts, reference, train
from research.benchmarks.gpu_tables import markdown
from research.benchmarks.measuring import machine, now, peak_memory, reset_peak_memory

RESULTS = Path(__file__).parent / "results"
SMALL, MIDDLE, LARGE = "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B"
SHAPES = {  # hidden size, intermediate size, layers, heads; 2 heads of keys and values
    SMALL: (896, 4_864, 24, 14),
    MIDDLE: (1_536, 8_960, 28, 12),
    LARGE: (2_048, 11_008, 36, 16),
}
AGENT = Shape(prompt=2_048, completion=200, spread=0.3)
MATHS = Shape(prompt=200, completion=1_000, spread=0.5)
STEPS: dict[str, dict[str, Any] | None] = {
    "plain TRL": None,
    "lossless, with the callback": {"snr_strategy": "lossless"},
    "lossless, prompts read once per completion": {"snr_strategy": "lossless", "snr_share_prompts": False},
}


@dataclass(frozen=True)
class Sizes:
    """How large everything is: on a GPU, and with `DRY` anywhere."""

    vocabulary: int = 151_936
    agent: Shape = AGENT
    maths: Shape = MATHS
    steps: int = 4  # the first is cold
    texts: tuple[int, int, int, int] = (64, 64, 2_000, 500)  # N, NK, P, T, as in `bench.py`
    scored: int = 128  # tokens of a trace, where a measurement would cost too much
    rounds: int = 2
    generated: int = 256


FULL = Sizes()
DRY = Sizes(512, Shape(24, 8, 0.3), Shape(8, 24, 0.5), 2, (2, 6, 24, 16), 8, 1, 8)
DRY_SHAPE = (32, 64, 1, 2)


@dataclass(frozen=True)
class CaseList:
    """Cases of one kind, of which `measure(*case)` gives a row."""

    title: str
    share: float  # of the time
    cases: list[tuple[Any, ...]]  # by worth
    measure: Callable[..., dict[str, Any]]


def make_model(size: str, sizes: Sizes, attention: str = "sdpa") -> Qwen2ForCausalLM:
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
    config._attn_implementation = attention
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


def measure_update(size: str, shape: str, dead: float, method: str, attention: str, sizes: Sizes) -> dict[str, Any]:
    """Seconds and peak memory of an update, and the positions that went through the model."""
    policy = make_model(size, sizes, attention)
    reset_peak_memory()
    settings: dict[str, Any] = {"gradient_checkpointing": True, "learning_rate": 1e-6}
    given = getattr(sizes, shape)
    trained = train(METHODS[method], given, dead, steps=sizes.steps, policy=policy, clock=now, **settings)
    return {
        "model": size,
        "shape": shape,
        "dead": dead,
        "method": method,
        "attention": attention,
        "cold": trained["seconds"][0],
        "seconds": statistics.median(trained["seconds"][1:]),
        "positions": trained["positions"] / sizes.steps,
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


def measure_scoring(size: str, sizes: Sizes) -> dict[str, Any]:
    """Ours on 8 of the N prompts, the reference's way on one of them: they are the same work each."""
    policy = make_model(size, sizes).eval().to(torch.bfloat16)
    prompts, traces = make_texts(*sizes.texts, sizes.vocabulary)
    chosen, cut = prompts[:8], [trace[: sizes.scored] for trace in traces]
    ways: dict[str, tuple[Callable[..., torch.Tensor], int, list[list[int]]]] = {
        "reference": (reference, 1, traces),
        "whole": (cross_score, 8, traces),
        "cut": (cross_score, 8, cut),
    }
    cross_score(policy, chosen[:1], traces[:4])  # warm
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    memory, matrices = {}, {}
    for name, (score, count, scored) in list(ways.items()) * sizes.rounds:
        of = chosen[:count]
        in_use = reset_peak_memory()
        start = now()
        matrices[name] = score(policy, of, scored)[:, :1]
        seconds[name].append((now() - start) / len(of))
        memory[name] = peak_memory() - in_use
    rounded = one_by_one(policy, chosen[0], traces)
    exact = one_by_one(policy.float(), chosen[0], traces)
    differences = {"whole": matrices["whole"] - exact, "one by one": rounded - exact}
    best = {name: min(values) for name, values in seconds.items()}
    return {
        "model": size,
        "seconds": {name: value * sizes.texts[0] for name, value in best.items()},
        "memory_mib": memory,
        "mean_nats": exact.mean().item(),
        "root_mean_square_nats": {name: value.square().mean().sqrt().item() for name, value in differences.items()},
    }


def measure_step(size: str, variant: str, sizes: Sizes) -> dict[str, Any]:
    """A step of 8 prompts with 8 completions each, of which half the groups have rewards that vary."""
    env, times, snr = make_env("frozen_lake"), StepTimes(), STEPS[variant]

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
        trainer = (GRPOTrainer if snr is None else SNRFilteredGRPOTrainer)(
            make_model(size, sizes),
            rewards,
            GRPOConfig(**settings) if snr is None else SNRFilteredGRPOConfig(**settings, **snr),
            env.dataset(8 * sizes.steps, seed=0),
            processing_class=_tokenizer(),
            callbacks=[times],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        times.watch(trainer)
        if "callback" in variant:
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
    models = (SMALL, MIDDLE, LARGE) if sizes is FULL else (SMALL,)
    updates = [
        (size, shape, dead, method, attention)
        for attention in ("sdpa", *(["flash_attention_2"] if is_flash_attn_2_available() else []))
        for shape, dead in (("agent", 0.0), ("maths", 0.0), ("agent", 0.5), ("maths", 0.5))
        for size in models
        for method in METHODS
    ]
    steps = [(SMALL, variant) for variant in STEPS]
    scored = [(size,) for size in models]
    parts = {
        "updates": CaseList("Updates", 0.65, updates, partial(measure_update, sizes=sizes)),
        "scoring": CaseList("Cross-scoring", 0.2, scored, partial(measure_scoring, sizes=sizes)),
        "steps": CaseList("Steps", 0.15, steps, partial(measure_step, sizes=sizes)),
    }
    results.update({name: [] for name in parts})
    return parts


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
            print(f"  {rows[-1]}", flush=True)
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
    flash = is_flash_attn_2_available()
    left_out = [] if flash else ["Updates under FlashAttention: the package flash_attn is missing, or a GPU for it"]
    for line in (*left_out, "Whatever there is no time for, from the end of each part"):
        print(f"Left out: {line}", flush=True)
    results = {"machine": described, "sizes": asdict(sizes), "dry": arguments.dry, "rows": rows, "missing": missing}
    results["left_out"] = left_out
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
