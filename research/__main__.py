"""Run experiments, see how far they are, and tell what came of them.

python -m research run research/experiments/*.yaml
python -m research analyse research/experiments/*.yaml
"""

import argparse
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragen2_trl.cli.console import ProgressLine, make_console
from ragen2_trl.cli.typed import InputError, checked_input
from research.commands import (
    QueuedRun,
    command_of,
    model_folder,
    queue,
    training_fields,
    warm_start_command,
    write_config,
    write_warm_start,
)
from research.plan import Experiment, read_experiments
from research.runner import MADE, Progress, Runner, is_locked
from research.store import Store, check_folder

ACTIONS = {
    "run": "train the runs that are not done",
    "status": "how many are",
    "analyse": "tables, figures and verdicts from what there is",
    "list": "the runs, with the command of each",
}
# Where results are kept, and where runs are trained.
FOLDERS = {
    "tiny": (Path("research/results"), Path("runs/experiments")),
    "paper": (Path("research/results/paper"), Path("runs/paper")),
    "quick": (Path("runs/quick/results"), Path("runs/quick/runs")),
}
PLAIN_EVERY = 60.0  # seconds between two lines where there is no terminal


@dataclass(frozen=True)
class Asked:
    """What a command is about: the experiments, their runs that were asked for, and the folders."""

    arguments: argparse.Namespace
    experiments: list[Experiment]
    jobs: list[QueuedRun]
    store: Store
    runs: Path


def main(args: list[str] | None = None) -> None:
    """Do what the first argument says with the experiments after it.

    Raises:
        SystemExit: With code 1 if a run failed, 130 after Ctrl-C or SIGTERM. With code 2, and one line on stderr, for
            files, settings and folders that cannot be used, before anything runs.
    """
    try:
        _main(args)
    except InputError as error:
        Console(stderr=True).print(f"python -m research: {error}", highlight=False, markup=False)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("python -m research: interrupted", highlight=False, markup=False)
        raise SystemExit(130) from None


def _main(args: list[str] | None) -> None:
    console = Console()
    arguments = make_parser().parse_args(args)
    with checked_input():
        experiments = read_experiments(arguments.files, _pairs(arguments.set))
        _check_claims(experiments)
        only: dict[str, list[str]] = {}
        for axis, level in (_pair(text, "only") for text in arguments.only):
            only.setdefault(axis, []).append(level)
        planned = queue(experiments, arguments.quick, arguments.scale, only, arguments.seeds)
        if arguments.jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {arguments.jobs}")
        if not arguments.limit > 0:
            raise ValueError(f"limit must be above 0, got {arguments.limit:g}")
        results, runs = FOLDERS["quick" if arguments.quick else arguments.scale]
        results, runs = arguments.results or results, arguments.runs or runs
        store = Store(results)
        store.check_folder()
        check_folder(runs, "runs")
        for one in experiments:
            store.check(one, arguments.scale, arguments.quick)
    done = store.done()
    jobs = [job for job in planned if not job.planned.retired or job.planned.key in done]
    if len(jobs) < len(planned):
        gone = f"{len(planned) - len(jobs)} runs are left out: their settings no longer exist (`retired`)."
        console.print(Text(gone), soft_wrap=True)
    do = {"run": _run, "status": _status, "analyse": _analyse, "list": _list}
    assert do.keys() == ACTIONS.keys()
    do[arguments.action](console, Asked(arguments, experiments, jobs, store, runs))


def _run(console: Console, asked: Asked) -> None:
    done = asked.store.done()
    if left := [job for job in asked.jobs if job.planned.key not in done]:
        _check_settings(left, asked.arguments.set)
    unrecorded = {source.id: source for one in asked.experiments for source in (*one.others, one)}

    def added(job: QueuedRun) -> None:
        for name in job.experiments:
            if (experiment := unrecorded.pop(name, None)) is not None:
                asked.store.write_record(experiment, asked.arguments.scale, asked.arguments.quick)

    at_once = 1 if asked.arguments.scale == "paper" else asked.arguments.jobs
    if asked.arguments.scale == "paper":
        _show_launches(console, asked.jobs, asked.runs)
    with ProgressLine(console, PLAIN_EVERY) as line:
        try:
            say = lambda progress: line.say(_told(progress))  # noqa: E731
            limit = 3600.0 * asked.arguments.limit
            outcome = Runner(asked.store, asked.runs, at_once, added, say, limit).run(asked.jobs)
        except KeyboardInterrupt:
            console.print("Stopped. The same command goes on with the runs that are left, from their checkpoints.")
            sys.exit(130)
    console.print(Text(f"{len(outcome.done)} of {len(asked.jobs)} runs are done, in {asked.store.folder}."))
    for failure in outcome.failed:
        told = f"Failed: {failure.job.name}\n  {failure.command}\n  {failure.reason}"
        console.print(Text(told), soft_wrap=True)  # a command is copied whole
    if outcome.failed:
        sys.exit(1)


def _status(console: Console, asked: Asked) -> None:
    done = asked.store.done()
    table = Table("experiment", "runs", "done", "running", "begun", "left", "seeds done")
    for one in asked.experiments:
        own = [job for job in asked.jobs if one.id in job.experiments]
        open_ = [job for job in own if job.planned.key not in done]
        running = [job for job in open_ if is_locked(asked.runs / job.planned.key)]
        begun = [
            job for job in open_ if job not in running and any((asked.runs / job.planned.key).glob("checkpoint-*"))
        ]
        whole = [str(seed) for seed in one.seeds if own and not any(job.planned.seed == seed for job in open_)]
        counts = (len(own), len(own) - len(open_), len(running), len(begun), len(open_) - len(running) - len(begun))
        table.add_row(one.id, *map(str, counts), " ".join(whole) or "none")
    console.print(table)


def _list(console: Console, asked: Asked) -> None:
    if asked.arguments.scale == "paper":
        _show_launches(console, asked.jobs, asked.runs)
        return
    done = asked.store.done()
    for job in asked.jobs:
        state = "done" if job.planned.key in done else "left"
        command = _commands(asked.runs / job.planned.key, job) if state == "left" else ""
        console.print(Text(f"{job.planned.key}  {state}  {job.name}  {command}".rstrip()), soft_wrap=True)


def _commands(folder: Path, job: QueuedRun) -> str:
    """What trains a run, after what makes its model if that is not there."""
    commands = [command_of(write_config(folder, job), job)]
    model = model_folder(folder, job.planned)
    if model is not None and not (model / MADE).exists():
        commands.insert(0, warm_start_command(write_warm_start(model, job)))
    return " && ".join(map(shlex.join, commands))


def _analyse(console: Console, asked: Asked) -> None:
    from research.page import analyse  # matplotlib and scipy only where something is drawn

    with checked_input():
        analyse(asked.experiments, asked.store.folder, asked.arguments.scale, asked.arguments.quick)
    done = asked.store.done()
    for one in asked.experiments:
        has_runs = any(one.id in job.experiments and job.planned.key in done for job in asked.jobs)
        if has_runs and asked.store.fixed_checks(one) is None:
            told = f"{one.id} has runs and no record of its checks: `python -m research run {one.path}` writes it."
            console.print(Text(told), soft_wrap=True)
    console.print(
        Text(f"{asked.store.folder / 'README.md'} says what came of {', '.join(one.id for one in asked.experiments)}.")
    )


def _show_launches(console: Console, jobs: Sequence[QueuedRun], runs: Path) -> None:
    """Write the settings of all runs and show the line that trains each."""
    hours = 0.0
    for job in jobs:
        hours += job.gpu_hours
        command = shlex.join(command_of(write_config(runs / job.planned.key, job), job))
        console.print(Text(f"# {job.name}: about {job.gpu_hours:.0f} GPU hours\n{command}"), soft_wrap=True)
    told = f"{len(jobs)} runs, about {hours:,.0f} GPU hours: an estimate, nothing of it was run on a GPU."
    console.print(Text(told), soft_wrap=True)


def _told(progress: Progress) -> str:
    parts = [f"{progress.done}/{progress.total} runs done", f"{len(progress.running)} running"]
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    if progress.seconds_left is not None:
        minutes = round(progress.seconds_left / 60)
        parts.append(f"about {minutes // 60} h {minutes % 60:02} min left" if minutes else "less than a minute left")
    return ", ".join(parts)


def _check_claims(experiments: Sequence[Experiment]) -> None:
    """Raise a `ValueError` if a check or a figure of an experiment is not as it should be."""
    from research.page import check_readable  # matplotlib and scipy, which take a second

    for one in experiments:
        check_readable(one)


def _check_settings(jobs: Sequence[QueuedRun], sets: Sequence[str] = ()) -> None:
    """Let the command that will train a run read its settings, once for all seeds of them.

    Args:
        jobs: Their runs.
        sets: What was typed after `--set`, which the message names.

    Raises:
        InputError: With the run's name, if a setting is not one of its algorithm's or has no allowed value.
    """
    from trl.trainer.model_config import ModelConfig  # these take seconds
    from trl.trainer.sft_config import SFTConfig

    from ragen2_trl.cli.arguments import TrainArguments, WarmStartArguments
    from ragen2_trl.cli.train import ALGORITHMS, algorithm_of
    from ragen2_trl.cli.typed import parse, parser_of
    from ragen2_trl.record.files import write_private

    make_console()  # its filters of warnings
    without_gpu = ["--use_cpu", "true", "--bf16", "false"]  # elsewhere than here, what needs one is allowed
    checked: set[str] = set()
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        for job in jobs:
            own_fields = training_fields(Path(folder) / "run", job.planned)
            text = yaml.safe_dump({**own_fields, "output_dir": folder})
            if text in checked:
                continue
            checked.add(text)
            args = ["--config", str(config), *(without_gpu if job.launch is not None else [])]
            try:
                if job.planned.model_key:
                    warm_start = write_warm_start(Path(folder) / "model", job)
                    of_warm_start = parser_of("warm-start", WarmStartArguments, SFTConfig, ModelConfig)
                    parse(of_warm_start, ["--config", str(warm_start), *args[2:]])
                write_private(config, text)
                config_class = ALGORITHMS[algorithm_of(args)][1]
                script_args, *_ = parse(parser_of("train", TrainArguments, config_class, ModelConfig), args)
                script_args.make_eval_envs(script_args.make_env())
            except ValueError as error:
                with_sets = f", with --set {shlex.join(sets)}" if sets else ""
                raise InputError(f"{job.name}{with_sets}: {error}") from error


def _pair(text: str, name: str) -> tuple[str, str]:
    before, equals, after = text.partition("=")
    if not (before and equals):
        raise ValueError(f"{name} must be NAME=VALUE pairs, got {text!r}")
    return before, after


def _pairs(texts: Sequence[str]) -> dict[str, Any]:
    """Names and values of `--set`, whose values are YAML."""
    found = {}
    for name, value in (_pair(text, "set") for text in texts):
        try:
            found[name] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError) as error:  # the latter of days such as 2026-13-45
            why = " ".join(str(error).split())
            raise ValueError(f"set={name}={value!r} is not valid YAML: {why}") from error
    return found


def make_parser() -> argparse.ArgumentParser:
    """Of all actions."""
    listing = "\n".join(f"  {name:<8} {purpose}" for name, purpose in ACTIONS.items())
    parser = argparse.ArgumentParser(
        "python -m research",
        description=f"Claims as YAML files: their trainings, and what came of them.\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    add("files", nargs="+", type=Path, metavar="FILE", help="Experiments; runs that they share are trained once.")
    add("--jobs", type=int, default=_cores(), help="Runs trained at once, each on a core (default: the cores).")
    add(
        "--limit",
        type=float,
        default=math.inf,
        metavar="HOURS",
        help="A training that has not ended after so many hours is ended and counts as failed (default: none is).",
    )
    add(
        "--quick",
        action="store_true",
        help="The first seed with each experiment's quick settings, in a store of its own.",
    )
    add(
        "--scale",
        default="tiny",
        help="tiny, or paper: its models and sizes, one run after the other with accelerate.",
    )
    for number, (name, what) in enumerate((("results", "results"), ("runs", "trainings under way"))):
        tiny, paper, quick = (FOLDERS[kind][number] for kind in ("tiny", "paper", "quick"))
        default = f"default: {tiny}; {paper} at that scale, {quick} with --quick"
        add(f"--{name}", type=Path, help=f"Folder of {what} ({default}).")
    add("--only", nargs="+", default=[], metavar="AXIS=LEVEL", help="Runs at these levels of the grid alone.")
    add("--seeds", nargs="+", type=int, metavar="SEED", help="Runs of these seeds alone.")
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="Settings on top of every run's, to try an experiment; they make other runs.",
    )
    return parser


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    main()
