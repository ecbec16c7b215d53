"""Evaluation: how often a model solves held-out tasks, and how sure we can be of it.

python scripts/evaluate.py --model tiny
python scripts/evaluate.py --model runs/my_run --env_name frozen_lake --env_args size=5 --output results.json
python scripts/evaluate.py --model tiny --env_name sokoban --multi_turn true
python scripts/evaluate.py --model oracle --env_name sokoban     # the task's solver; `random` is a player who guesses
"""

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any, cast

from datasets import Dataset
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import TrlParser

from ragen2_trl.cli.arguments import EvaluateArguments, checked_input, parse
from ragen2_trl.cli.console import make_console
from ragen2_trl.cli.sampling import held_out_plays, load_model, sample_trajectories
from ragen2_trl.envs import Environment, Play, respond_all
from ragen2_trl.envs.floor import oracle_response, random_floor, random_response
from ragen2_trl.envs.mixture import TASK, AnyTask, TaskMixture
from ragen2_trl.reporting.files import write_json

Z_95 = NormalDist().inv_cdf(0.975)
SCRIPTED = {"oracle": oracle_response, "random": random_response}


def main(args: list[str] | None = None) -> None:
    """Evaluates a model, shows a table and, with `--output`, writes the metrics as JSON."""
    console = make_console()
    (script_args,) = parse(TrlParser(EvaluateArguments, prog="ragen2-trl evaluate"), args)
    with checked_input():
        env = script_args.make_env()
    tasks = {
        "num_prompts": script_args.num_prompts,
        "num_samples": script_args.num_samples,
        "seed": script_args.seed,
        "data": script_args.data,
    }
    if script_args.model in SCRIPTED:
        metrics = evaluate_scripted(script_args.model, env, **tasks)
    else:
        metrics = evaluate_model(
            *load_model(script_args.model, script_args.dtype),
            env,
            temperature=script_args.temperature,
            max_new_tokens=script_args.max_new_tokens,
            batch_size=script_args.batch_size,
            max_turn_tokens=script_args.max_turn_tokens,
            context_options=script_args.context_options,
            chat_template_kwargs=script_args.chat_template_kwargs,
            **tasks,
        )
    console.print(metrics_table(metrics, title=f"{script_args.model} on held-out {env.name}"))
    if script_args.output is not None:
        write_json(Path(script_args.output), metrics, indent=2)


def evaluate_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    env: AnyTask,
    *,
    num_prompts: int = 256,
    num_samples: int = 8,
    temperature: float = 1.0,
    max_new_tokens: int | None = None,
    batch_size: int = 128,
    seed: int = 0,
    data: str | None = None,
    max_turn_tokens: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    context_options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Plays held-out tasks (split `"test"`) and measures success, return, format and length.

    The model's training mode and torch's random state are left as they were found, so that a run with an evaluation
    in it is the same run as without.

    Args:
        model: A causal LM.
        tokenizer: Its tokenizer, with a chat template.
        env: The task.
        num_prompts: Number of tasks N.
        num_samples: Completions per task G.
        temperature: Sampling temperature; 0 is greedy, and then `num_samples` must be 1.
        max_new_tokens: Longest completion in tokens, all turns and the environment's answers included; default: no
            limit but the task's `max_turn_tokens`, or 128 tokens a turn.
        batch_size: Completions generated at once.
        seed: Seed of the tasks and of the sampling.
        data: Where the tasks come from; default: the task's own source.
        max_turn_tokens: Longest turn in tokens.
        chat_template_kwargs: For the chat template.
        context_options: What of an episode a turn is sampled from: `context`, `context_turns` and `drop_oldest_turns`
            of `TextRollout`. Where turns have contexts of their own, `max_new_tokens` bounds each of them.

    Returns:
        `success`, `pass@k` for k = 1, 2, 4, … up to G, `valid_rate` (fractions, the last of an episode's turns),
        `return` (the sum of an episode's rewards), `turns`, and `completion_length` (tokens that the model wrote, end
        tokens included),
        each a mean over completions with `…_ci_low` and `…_ci_high`, bounds of a 95 % confidence interval;
        `num_prompts` and `num_samples`; and `random_success`, that of a player who guesses on the same tasks, where
        `random_floor` knows it. Of several tasks the same for each, as `<task>/success`.

        Completions of one prompt are not independent, so prompts are the unit of every interval: Wilson with the
        effective sample size for fractions (see `fraction_interval`), normal over the N means of the prompts for
        the others.

    Raises:
        ValueError: If an argument is outside its range.
    """
    rows, trajectories = sample_trajectories(
        model,
        tokenizer,
        env,
        num_prompts=num_prompts,
        num_samples=num_samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        data=data,
        max_turn_tokens=max_turn_tokens,
        chat_template_kwargs=chat_template_kwargs,
        context_options=context_options,
    )
    lengths = [float(sum(map(len, trajectory.answers))) for trajectory in trajectories]
    plays = [trajectory.play for trajectory in trajectories]
    values = {**outcomes_of(plays), "completion_length": lengths}
    return _metrics(env, rows, num_samples, values)


def evaluate_scripted(
    policy: str,
    env: AnyTask,
    *,
    num_prompts: int = 256,
    num_samples: int = 8,
    seed: int = 0,
    data: str | None = None,
) -> dict[str, float]:
    """Like `evaluate_model`, but played by the task's solver (`"oracle"`) or by a player who guesses (`"random"`).

    Raises:
        NotImplementedError: If the task has no such player.
    """
    rows, plays = held_out_plays(env, num_prompts, num_samples, seed, data)
    running = [(play, random.Random(f"{policy}/{seed}/{number}")) for number, play in enumerate(plays)]
    while running := [(play, rng) for play, rng in running if not play.done]:
        texts = [SCRIPTED[policy](cast(Environment, play.env), play, rng) for play, rng in running]
        respond_all([play for play, _ in running], texts, env.workers)
    return _metrics(env, rows, num_samples, outcomes_of(plays), with_floor=policy != "random")


def _metrics(
    env: AnyTask, rows: Dataset, num_samples: int, values: Mapping[str, Sequence[float]], with_floor: bool = True
) -> dict[str, float]:
    """Metrics of all episodes; of several tasks also those of each, as `<task>/success` and so on."""
    metrics = summarize(num_samples, **values)
    if not isinstance(env, TaskMixture):
        return metrics | (random_success(env, rows, num_samples) if with_floor else {})
    tasks = rows[TASK][:]
    for name, task in env.environments.items():
        numbers = [number for number, of in enumerate(tasks) if of == name]
        own = rows.select(numbers)
        own = own.remove_columns([column for column in own.column_names if all(v is None for v in own[column][:])])
        of_task = {key: [column[number] for number in numbers] for key, column in values.items()}
        metrics |= {f"{name}/{key}": v for key, v in _metrics(task, own, num_samples, of_task, with_floor).items()}
    return metrics


def random_success(env: Environment, rows: Dataset, num_samples: int) -> dict[str, float]:
    """What success has to be compared with, as a metric; `rows` hold each task `num_samples` times in a row."""
    floor = random_floor(env, rows.select(range(0, len(rows), num_samples)))
    return {} if floor is None else {"random_success": floor}


def outcomes_of(plays: Sequence[Play]) -> dict[str, list[float]]:
    """Columns for `summarize`, one value an episode."""
    outcomes = [play.outcome for play in plays]
    return {
        "success": [float(outcome.success) for outcome in outcomes],
        "valid_rate": [outcome.valid_turns / outcome.turns for outcome in outcomes],
        "return": [outcome.episode_return for outcome in outcomes],
        "turns": [float(outcome.turns) for outcome in outcomes],
    }


def summarize(num_samples: int, **values: Sequence[float]) -> dict[str, float]:
    """Means and 95 % confidence intervals of N·G values a metric, group by group; see `evaluate_model`.

    `success` and `valid_rate` are fractions, and `success` gives `pass@k` too.
    """
    groups = {
        name: [list(flat[i : i + num_samples]) for i in range(0, len(flat), num_samples)]
        for name, flat in values.items()
    }
    metrics: dict[str, float] = {}
    for name, rows in groups.items():
        means = [fmean(row) for row in rows]
        if name not in ("success", "valid_rate"):
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
        if name == "success" and "random_success" in metrics:
            table.add_row("of a player who guesses", f"{metrics['random_success']:.3f}", "")
    return table


def _add(metrics: dict[str, float], name: str, value: float, interval: tuple[float, float]) -> None:
    metrics[name] = value
    metrics[f"{name}_ci_low"], metrics[f"{name}_ci_high"] = interval
