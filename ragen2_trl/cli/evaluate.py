"""Evaluation: how often a model solves held-out tasks, and how sure we can be of it.

python scripts/evaluate.py --model tiny
python scripts/evaluate.py --model runs/my_run --env_name frozen_lake --env_args size=5 --output results.json
python scripts/evaluate.py --model tiny --env_name sokoban --multi_turn true
python scripts/evaluate.py --model oracle --env_name sokoban     # the task's solver; `random` is a player who guesses
"""

import random
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import TrlParser

from ragen2_trl.cli.arguments import EvaluateArguments, checked_input, parse
from ragen2_trl.cli.console import make_console
from ragen2_trl.cli.models import load_model
from ragen2_trl.envs import Environment, Play, format_response, respond_all
from ragen2_trl.reporting.files import write_json
from ragen2_trl.rollouts.outcomes import outcomes_of, summarize
from ragen2_trl.rollouts.sampling import held_out_plays, sample_trajectories

SCRIPTED = ("oracle", "random")


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
            chat_template_kwargs=script_args.chat_template_kwargs,
            **tasks,
        )
    console.print(metrics_table(metrics, title=f"{script_args.model} on held-out {env.name}"))
    if script_args.output is not None:
        write_json(Path(script_args.output), metrics, indent=2)


def evaluate_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    env: Environment,
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
            limit but 128 tokens a turn.
        batch_size: Completions generated at once.
        seed: Seed of the tasks and of the sampling.
        data: Where the tasks come from; default: the task's own source.
        max_turn_tokens: Longest turn in tokens.
        chat_template_kwargs: For the chat template.

    Returns:
        `success`, `pass@k` for k = 1, 2, 4, … up to G, `valid_rate` (fractions, the last of an episode's turns),
        `return` (the sum of an episode's rewards), `turns`, and `completion_length` (tokens that the model wrote, end
        tokens included),
        each a mean over completions with `…_ci_low` and `…_ci_high`, bounds of a 95 % confidence interval;
        `num_prompts` and `num_samples`.

        Completions of one prompt are not independent, so prompts are the unit of every interval: Wilson with the
        effective sample size for fractions (see `fraction_interval`), normal over the N means of the prompts for
        the others.

    Raises:
        ValueError: If an argument is outside its range.
    """
    _, trajectories = sample_trajectories(
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
    )
    lengths = [float(sum(trajectory.env_mask)) for trajectory in trajectories]
    plays = [trajectory.play for trajectory in trajectories]
    return summarize(num_samples, **outcomes_of(plays), completion_length=lengths)


def evaluate_scripted(
    policy: str,
    env: Environment,
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
    _, plays = held_out_plays(env, num_prompts, num_samples, seed, data)
    running = [(play, random.Random(f"{policy}/{seed}/{number}")) for number, play in enumerate(plays)]
    while running := [(play, rng) for play, rng in running if not play.done]:
        texts = [_scripted(policy, play, rng) for play, rng in running]
        respond_all([play for play, _ in running], texts, env.workers)
    return summarize(num_samples, **outcomes_of(plays))


def _scripted(policy: str, play: Play, rng: random.Random) -> str:
    if policy == "oracle":
        reasoning, actions = play.episode.plan(rng)
        return format_response(reasoning, actions[: play.env.max_actions])
    count = play.env.max_actions if play.env.splits_answers else 1
    return format_response("", [play.episode.random_action(rng) for _ in range(count)])


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
