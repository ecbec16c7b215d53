"""Evaluation: how often a model solves held-out tasks, and how sure we can be of it.

ragen2-trl evaluate --model tiny
ragen2-trl evaluate --model runs/my_run --env_name frozen_lake --env_args size=5 --output results.json
ragen2-trl evaluate --model tiny --env_name sokoban --multi_turn true
ragen2-trl evaluate --model runs/my_run --push_to_hub me/my_run  # into the model index of its card
ragen2-trl evaluate --model oracle --env_name sokoban     # the task's solver; `random` is the random baseline
"""

import random
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset
from huggingface_hub.utils import validate_repo_id
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragen2_trl.cli.arguments import EvaluateArguments
from ragen2_trl.cli.console import make_console
from ragen2_trl.cli.models import load_model
from ragen2_trl.cli.typed import InputError, checked_input, parse, parser_of
from ragen2_trl.columns import TASK
from ragen2_trl.envs import Play, respond_all
from ragen2_trl.envs.mixture import AnyTask, TaskMixture
from ragen2_trl.envs.random_baseline import random_success
from ragen2_trl.messages import counted
from ragen2_trl.record.facts import evaluated
from ragen2_trl.record.files import EVALUATION, write_json
from ragen2_trl.record.saved_episodes import episodes_of, episodes_path, save_episodes
from ragen2_trl.report.tables import facts_table
from ragen2_trl.rollouts.outcomes import outcomes_of, summarize
from ragen2_trl.rollouts.sampling import check_sampling, held_out_plays, held_out_rows, sample_trajectories

OnPlays: TypeAlias = Callable[[Dataset, list[Play]], None]
SCRIPTED = {"oracle": Play.solver_response, "random": Play.random_response}


def main(args: list[str] | None = None) -> None:
    """Evaluates a model, shows a table and, with `--output` and `--episodes`, writes metrics and what was played."""
    console = make_console()
    (script_args,) = parse(parser_of("evaluate", EvaluateArguments), args)
    with checked_input():
        env = script_args.make_env()
        check_evaluation(script_args, env)
        folder = episodes_folder(script_args)
        if script_args.output is not None:
            if Path(script_args.output).is_dir():
                raise ValueError(f"output={script_args.output!r} is a folder; allowed: a file.")
            Path(script_args.output).parent.mkdir(parents=True, exist_ok=True)
    keep = None if folder is None else partial(keep_episodes, folder)
    if script_args.model in SCRIPTED:
        tasks = {name: script_args.sampling[name] for name in ("num_prompts", "num_samples", "seed", "data")}
        try:
            metrics = evaluate_scripted(script_args.model, env, **tasks, on_played=keep)
        except NotImplementedError as error:
            raise InputError(f"model={script_args.model!r} cannot play {env.name}: {error}.") from error
    else:
        model, tokenizer = load_model(script_args.model)
        metrics = evaluate_model(model, tokenizer, env, **script_args.sampling, on_played=keep)
    samples = counted(script_args.num_samples, "sample")
    caption = f"{counted(script_args.num_prompts, 'task')}, {samples} each"
    console.print(facts_table(evaluated(metrics), f"{script_args.model} on held-out {env.name}", caption))
    if script_args.output is not None:
        write_json(Path(script_args.output), metrics, indent=2)
    if script_args.push_to_hub is not None:
        from ragen2_trl.report.hub import publish_metrics  # the card's module, for those who ask for it

        with checked_input():
            publish_metrics(script_args.push_to_hub, env.name, metrics)
        console.print(Text(f"The metrics are on the card of {script_args.push_to_hub}"), soft_wrap=True)
    if folder is not None:
        command = shlex.join(["ragen2-trl", "report", str(folder)])
        console.print(Text(f"The episodes are in {folder}. To look at them: {command}"), soft_wrap=True)


def check_evaluation(arguments: EvaluateArguments, env: AnyTask) -> None:
    """Raises a `ValueError` for what playing would refuse, before a model is loaded."""
    held_out_rows(env, arguments.num_prompts, arguments.num_samples, arguments.seed, arguments.data)
    if arguments.push_to_hub is not None:
        validate_repo_id(arguments.push_to_hub)
    if arguments.model in SCRIPTED:
        if arguments.context != "full" or arguments.drop_oldest_turns:
            raise ValueError(
                f"context must be 'full' for {arguments.model} (it reads none), got {arguments.context!r}"
            )
    else:
        check_sampling(
            env, arguments.num_samples, arguments.temperature, arguments.max_new_tokens, arguments.batch_size
        )


def episodes_folder(arguments: EvaluateArguments) -> Path | None:
    """Where episodes go, if anywhere.

    Raises:
        ValueError: If there are some of an earlier evaluation.
    """
    if arguments.episodes is None:
        return None
    folder = Path(arguments.episodes)
    if (path := episodes_path(folder, EVALUATION)).exists():
        raise ValueError(
            f"episodes={str(folder)!r} holds {path.name} of an earlier evaluation; allowed: another folder."
        )
    return folder


def keep_episodes(folder: Path, rows: Dataset, plays: Sequence[Play]) -> None:
    """Saves what was played: Parquet and JSONL in `folder`."""
    save_episodes(folder, episodes_of(rows["prompt"][:], rows["seed"][:], plays))


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
    on_played: OnPlays | None = None,
    **options: Any,
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
        on_played: Called with (rows, plays) of all episodes when they have been played.
        options: `data`, where the tasks come from (default: the task's own source); `max_turn_tokens`, the longest
            turn; `chat_template_kwargs`; and `context_options`, what of an episode a turn is sampled from: `context`,
            `context_turns` and `drop_oldest_turns` of `TextRollout`. Where turns have contexts of their own,
            `max_new_tokens` bounds each of them.

    Returns:
        `success`, `pass@k` for k = 1, 2, 4, … up to G, `valid_rate` (fractions, the last of an episode's turns), the
        task's own `measures` (fractions, too),
        `return` (the sum of an episode's rewards), `turns`, and `completion_length` (tokens that the model wrote, end
        tokens included),
        each a mean over completions with `…_ci_low` and `…_ci_high`, bounds of a 95 % confidence interval;
        `num_prompts` and `num_samples`; `failed`, the share of episodes that a lost connection has ended and that are
        left out, where there are any; and `random_success`, that of the random baseline on the same tasks, where the
        task has one. Of several tasks the same for each, as `<task>/success`.

        Completions of one prompt are not independent, so prompts are the unit of every interval: Wilson with the
        effective sample size for fractions (see `fraction_interval`), normal over the N means of the prompts for
        the others.

    Raises:
        ConnectionError: If too many episodes have failed.
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
        **options,
    )
    lengths = [float(sum(map(len, trajectory.answers))) for trajectory in trajectories]
    plays = [trajectory.play for trajectory in trajectories]
    if on_played is not None:
        on_played(rows, plays)
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
    on_played: OnPlays | None = None,
) -> dict[str, float]:
    """Like `evaluate_model`, but played by the task's solver (`"oracle"`) or by the random baseline (`"random"`).

    Raises:
        NotImplementedError: If the task has none.
    """
    rows, plays = held_out_plays(env, num_prompts, num_samples, seed, data)
    running = [(play, random.Random(f"{policy}/{seed}/{number}")) for number, play in enumerate(plays)]
    while running := [(play, rng) for play, rng in running if not play.done]:
        texts = [SCRIPTED[policy](play, rng) for play, rng in running]
        respond_all([play for play, _ in running], texts, env.workers)
    if on_played is not None:
        on_played(rows, plays)
    return _metrics(env, rows, num_samples, outcomes_of(plays), with_baseline=policy != "random")


def _metrics(
    env: AnyTask, rows: Dataset, num_samples: int, values: Mapping[str, Sequence[float]], with_baseline: bool = True
) -> dict[str, float]:
    """Metrics of all episodes; of several tasks also those of each, as `<task>/success` and so on."""
    metrics = summarize(num_samples, **values)
    if not isinstance(env, TaskMixture):
        return metrics | (random_success(env, rows, num_samples) if with_baseline else {})
    tasks = rows[TASK][:]
    for name, task in env.environments.items():
        numbers = [number for number, of in enumerate(tasks) if of == name]
        own = rows.select(numbers)
        own = own.remove_columns([column for column in own.column_names if all(v is None for v in own[column][:])])
        of_task = {key: [column[number] for number in numbers] for key, column in values.items()}
        metrics |= {f"{name}/{key}": v for key, v in _metrics(task, own, num_samples, of_task, with_baseline).items()}
    return metrics
