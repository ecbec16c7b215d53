"""Evaluation: how often a model solves held-out tasks, and how sure we can be of it.

python scripts/evaluate.py --model tiny
python scripts/evaluate.py --model runs/my_run --env frozen_lake --env_args size=5 --output results.json
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist, fmean, stdev

import torch
from datasets import Dataset
from rich.table import Table
from rich.text import Text
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import TrlParser

from ragen2_trl.cli.arguments import EnvironmentArguments
from ragen2_trl.cli.console import make_console
from ragen2_trl.envs import Environment
from ragen2_trl.tiny import resolve_model

Z_95 = NormalDist().inv_cdf(0.975)


@dataclass
class SamplingArguments(EnvironmentArguments):
    """Which model plays how many held-out tasks, and how it is sampled."""

    model: str = field(default="tiny", metadata={"help": "`tiny`, a path or a Hub id."})
    dtype: str = field(default="auto", metadata={"help": "Weights' dtype; `auto` takes the one they were saved in."})
    num_prompts: int = field(default=256, metadata={"help": "Number of held-out tasks."})
    num_samples: int = field(default=8, metadata={"help": "Completions per task."})
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature; 0 is greedy."})
    max_new_tokens: int = field(default=128, metadata={"help": "Longest completion in tokens."})
    batch_size: int = field(default=128, metadata={"help": "Completions generated at once."})
    seed: int = field(default=0, metadata={"help": "Seed of the tasks and of the sampling."})


@dataclass
class EvaluateArguments(SamplingArguments):
    """What to evaluate, on how many held-out tasks, and how to sample."""

    num_samples: int = field(default=8, metadata={"help": "Completions per task; pass@k is reported up to it."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the metrics."})


def main(args: list[str] | None = None) -> None:
    """Evaluates a model, shows a table and, with `--output`, writes the metrics as JSON."""
    console = make_console()
    (script_args,) = TrlParser(EvaluateArguments).parse_args_and_config(args)
    env = script_args.make_env()
    metrics = evaluate_model(
        *load_model(script_args.model, script_args.dtype),
        env,
        num_prompts=script_args.num_prompts,
        num_samples=script_args.num_samples,
        temperature=script_args.temperature,
        max_new_tokens=script_args.max_new_tokens,
        batch_size=script_args.batch_size,
        seed=script_args.seed,
    )
    console.print(metrics_table(metrics, title=f"{script_args.model} on held-out {env.name}"))
    if script_args.output is not None:
        Path(script_args.output).write_text(json.dumps(metrics, indent=2) + "\n")


def load_model(name: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, on the accelerator if there is one, and its tokenizer; `name` is `tiny`, a path or a Hub id."""
    path = resolve_model(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    return model, AutoTokenizer.from_pretrained(path)


def evaluate_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    env: Environment,
    *,
    num_prompts: int = 256,
    num_samples: int = 8,
    temperature: float = 1.0,
    max_new_tokens: int = 128,
    batch_size: int = 128,
    seed: int = 0,
) -> dict[str, float]:
    """Samples held-out tasks (split `"test"`) and measures success, reward, format and length.

    The model's training mode and torch's random state are left as they were found, so that a run with an evaluation
    in it is the same run as without.

    Args:
        model: A causal LM.
        tokenizer: Its tokenizer, with a chat template.
        env: The task.
        num_prompts: Number of tasks N.
        num_samples: Completions per task G.
        temperature: Sampling temperature; 0 is greedy, and then `num_samples` must be 1.
        max_new_tokens: Longest completion in tokens.
        batch_size: Completions generated at once.
        seed: Seed of the tasks and of the sampling.

    Returns:
        `success`, `pass@k` for k = 1, 2, 4, … up to G, `format_valid` (fractions), `reward` (the sum of the task's
        rewards) and `completion_length` (tokens, the end token included), each a mean over completions with
        `…_ci_low` and `…_ci_high`, bounds of a 95 % confidence interval; `num_prompts` and `num_samples`.

        Completions of one prompt are not independent, so prompts are the unit of every interval: Wilson with the
        effective sample size for fractions (see `fraction_interval`), normal over the N means of the prompts for
        reward and length.

    Raises:
        ValueError: If an argument is outside its range.
    """
    rows, completion_ids = sample_completions(
        model,
        tokenizer,
        env,
        num_prompts=num_prompts,
        num_samples=num_samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
    )
    prompts = rows["prompt"][:]
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {name: rows[name][:] for name in rows.column_names if name != "prompt"}
    success = env.success_func(prompts=prompts, completions=completions, **columns)
    rewards = [func(prompts=prompts, completions=completions, **columns) for func in env.reward_funcs]
    return summarize(
        num_samples,
        success=success,
        format_valid=[float(env.is_valid(text)) for text in texts],
        reward=[sum(values) for values in zip(*rewards, strict=True)],
        completion_length=[float(len(ids)) for ids in completion_ids],
    )


def sample_completions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    env: Environment,
    *,
    num_prompts: int,
    num_samples: int,
    temperature: float,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
) -> tuple[Dataset, list[list[int]]]:
    """Rows of the split `"test"`, each `num_samples` times in a row, and the token ids of a completion for each.

    Arguments, errors and what is left untouched are those of `evaluate_model`.
    """
    for name, value, least in (
        ("num_prompts", num_prompts, 2),  # one prompt has no spread to make an interval of
        ("num_samples", num_samples, 1),
        ("batch_size", batch_size, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value!r}")
    if temperature < 0 or (temperature == 0 and num_samples > 1):
        raise ValueError(f"temperature must be above 0, or 0 with num_samples=1, got {temperature!r}")

    rows = env.dataset(num_prompts, seed, split="test")
    rows = rows.select([index for index in range(num_prompts) for _ in range(num_samples)])  # groups stay together
    with _evaluation_mode(model, seed):
        completion_ids = generate(
            model,
            tokenizer,
            rows["prompt"][:],
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
        )
    return rows, completion_ids


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[dict[str, str]]],
    *,
    temperature: float,
    max_new_tokens: int,
    batch_size: int,
) -> list[list[int]]:
    """Token ids of one completion for each conversational prompt, the end token included where there is one."""
    eos = tokenizer.eos_token_id
    pad = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    # Every sampling setting is named: what is left out would come from the checkpoint's own generation config.
    config = GenerationConfig(
        do_sample=temperature > 0,
        temperature=temperature if temperature > 0 else 1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    completion_ids: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        prompt_ids = tokenize_prompts(tokenizer, batch)
        width = max(len(ids) for ids in prompt_ids)
        # Padded here, on the left, so that the tokenizer keeps the padding side it has.
        input_ids = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompt_ids], device=model.device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids], device=model.device)
        output = model.generate(input_ids=input_ids, attention_mask=mask, generation_config=config)
        completion_ids += [_until(ids, eos) for ids in output[:, width:].tolist()]
    return completion_ids


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[dict[str, str]]]
) -> list[list[int]]:
    """Token ids of conversational prompts, up to where the model's turn begins."""
    return tokenizer.apply_chat_template(list(prompts), add_generation_prompt=True)["input_ids"]


def summarize(num_samples: int, **values: Sequence[float]) -> dict[str, float]:
    """Means and 95 % confidence intervals of N·G values a metric, group by group; see `evaluate_model`.

    `success` and `format_valid` are fractions, and `success` gives `pass@k` too.
    """
    groups = {
        name: [list(flat[i : i + num_samples]) for i in range(0, len(flat), num_samples)]
        for name, flat in values.items()
    }
    metrics: dict[str, float] = {}
    for name, rows in groups.items():
        means = [fmean(row) for row in rows]
        if name not in ("success", "format_valid"):
            _add(metrics, name, fmean(means), mean_interval(means))
            continue
        _add(metrics, name, fmean(means), fraction_interval(means, num_samples))
    solved = [round(sum(row)) for row in groups["success"]]
    k = 1
    while k <= num_samples:
        estimates = [pass_at_k(num_samples, count, k) for count in solved]
        _add(metrics, f"pass@{k}", fmean(estimates), fraction_interval(estimates, num_samples))
        k *= 2
    return metrics | {"num_prompts": float(len(solved)), "num_samples": float(num_samples)}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right when c of n were (arXiv 2107.03374).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def fraction_interval(means: Sequence[float], num_samples: int) -> tuple[float, float]:
    """Wilson's 95 % interval for the mean of N per-prompt fractions, with the effective sample size of the prompts.

    N·G completions in groups count for n = p(1 - p) / Var(mean) independent ones, where the variance of the mean comes
    from the spread of the N prompts. n is kept between N (members of a group all alike) and N·G (independent).

    >>> tuple(round(bound, 3) for bound in fraction_interval([0.0, 1.0, 0.0, 1.0], num_samples=8))
    (0.15, 0.85)
    """
    p, prompts = fmean(means), len(means)
    variance, spread = stdev(means) ** 2 / prompts, p * (1 - p)
    # Where every completion agrees nothing is known of their correlation: take members of a group as all alike.
    n = prompts if spread == 0 else prompts * num_samples
    if variance > 0:
        n = min(max(spread / variance, prompts), n)
    center = (p + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 / (1 + Z_95**2 / n) * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n**2))
    # Rounding must not push a bound past the estimate or out of the unit interval.
    return max(0.0, min(p, center - half)), min(1.0, max(p, center + half))


def mean_interval(means: Sequence[float]) -> tuple[float, float]:
    """Normal 95 % interval for the mean of N per-prompt means."""
    half = Z_95 * stdev(means) / math.sqrt(len(means))
    return fmean(means) - half, fmean(means) + half


def metrics_table(metrics: dict[str, float], title: str) -> Table:
    """The metrics of `evaluate_model` as a table."""
    caption = f"{metrics['num_prompts']:.0f} tasks, {metrics['num_samples']:.0f} samples each"
    table = Table(title=Text(title), caption=caption)
    table.add_column("metric")
    table.add_column("mean", justify="right")
    table.add_column("95 % interval", justify="right")
    for name, value in metrics.items():
        if f"{name}_ci_low" in metrics:
            low, high = metrics[f"{name}_ci_low"], metrics[f"{name}_ci_high"]
            table.add_row(name, f"{value:.3f}", f"{low:.3f} to {high:.3f}")
    return table


def _add(metrics: dict[str, float], name: str, value: float, interval: tuple[float, float]) -> None:
    metrics[name] = value
    metrics[f"{name}_ci_low"], metrics[f"{name}_ci_high"] = interval


def _until(ids: list[int], eos: int) -> list[int]:
    return ids[: ids.index(eos) + 1] if eos in ids else ids


@contextmanager
def _evaluation_mode(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Eval mode, no gradients and a random state of our own; all as before afterwards."""
    training = model.training
    devices = [model.device] if model.device.type == "cuda" else []
    model.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(seed)
            yield
    finally:
        model.train(training)
