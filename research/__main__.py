"""Run experiments, and tell what came of them.

python -m research run research/experiments/fig3.yaml --fresh
python -m research analyse research/experiments/*.yaml
"""

import argparse
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from rich.console import Console
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
from research.runner import MADE, Runner
from research.store import Store, check_folder

ACTIONS = {
    "run": "train the runs that are not done",
    "analyse": "tables, figures and verdicts from what there is",
}
# Where results are kept, and where runs are trained.
FOLDERS = {
    "tiny": (Path("research/results"), Path("runs/experiments")),
    "middle": (Path("research/results/middle"), Path("runs/middle")),
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
        results, runs = _folders(arguments)
        store = Store(results)
        store.check_folder()
        check_folder(runs, "runs")
        for one in experiments:
            store.check(one, arguments.scale, arguments.quick)
    done = store.done()
    jobs = [job for job in planned if not job.planned.retired or job.planned.key in done]
    if arguments.action == "run":
        _say(console, _found(jobs, store, arguments))
    if len(jobs) < len(planned):
        _say(console, f"{len(planned) - len(jobs)} runs are left out: their settings no longer exist (`retired`).")
    do = {"run": _run, "analyse": _analyse}
    assert do.keys() == ACTIONS.keys()
    do[arguments.action](console, Asked(arguments, experiments, jobs, store, runs))


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)  # a command is copied whole


def _folders(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Of results and of runs: with `--fresh` in a new folder, and with `--results` the runs are inside of that one."""
    if arguments.fresh:
        if arguments.action != "run" or arguments.results or arguments.runs:
            raise ValueError("fresh makes a folder of its own; allowed: with `run`, without --results and --runs")
        folder = next(path for number in count(1) if not (path := Path(f"runs/fresh-{number}")).exists())
        return folder / "results", folder / "runs"
    results, runs = FOLDERS["quick" if arguments.quick else arguments.scale]
    if arguments.results:
        results, runs = arguments.results, arguments.results / "runs"
    return results, arguments.runs or runs


def _found(jobs: Sequence[QueuedRun], store: Store, arguments: argparse.Namespace) -> str:
    """How many runs are stored, how to train them anew, and what the others cost."""
    rows = store.finished().set_index("key")
    stored = [job for job in jobs if job.planned.key in rows.index]
    told = f"{len(stored)} of {len(jobs)} runs are stored in {store.folder}"
    if stored:
        own = rows.loc[[job.planned.key for job in stored]]
        hours = own["wall_seconds"].fillna(own["seconds"]).sum() / 3600
        told += f" and are not trained again ({hours:.1f} hours when they were). All anew: --fresh, or --results DIR"
    if left := [job for job in jobs if job not in stored and job.launch is not None]:
        hours = sum(job.gpu_hours for job in left)
        told += f"; the other {len(left)} take about {hours:,.0f} GPU hours, an estimate: nothing of it was run"
    return told + "."


def _run(console: Console, asked: Asked) -> None:
    done = asked.store.done()
    left = [job for job in asked.jobs if job.planned.key not in done]
    if left:
        _check_settings(left, asked.arguments.set)
    if asked.arguments.dry or asked.arguments.scale != "tiny":
        for job in left:
            hours = "" if job.launch is None else f": about {job.gpu_hours:.1f} GPU hours"
            _say(console, f"# {job.planned.key} {job.name}{hours}\n{_commands(asked.runs / job.planned.key, job)}")
    if asked.arguments.dry:
        return
    unrecorded = {source.id: source for one in asked.experiments for source in (*one.others, one)}

    def added(job: QueuedRun) -> None:
        for name in job.experiments:
            if (experiment := unrecorded.pop(name, None)) is not None:
                asked.store.write_record(experiment, asked.arguments.scale, asked.arguments.quick)

    at_once = asked.arguments.jobs if asked.arguments.scale == "tiny" else 1
    with ProgressLine(console, PLAIN_EVERY) as line:
        limit = 3600.0 * asked.arguments.limit
        runner = Runner(asked.store, asked.runs, at_once, added, line.say, limit)
        try:
            runner.run(asked.jobs)
        except KeyboardInterrupt:
            how = "The same command"
            if asked.arguments.fresh:
                how += f" with --results {asked.store.folder} --runs {asked.runs} in place of --fresh"
            _say(console, f"Stopped. {how} goes on with the runs that are left, from their checkpoints.")
            sys.exit(130)
    _say(console, f"{len(runner.done)} of {len(asked.jobs)} runs are done, in {asked.store.folder}.")
    for failure in runner.failed:
        _say(console, f"Failed: {failure.job.name}\n  {failure.command}\n  {failure.reason}")
    if runner.failed:
        sys.exit(1)


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
            _say(
                console,
                f"{one.id} has runs and no record of its checks: `python -m research run {one.path}` writes it.",
            )
    told = ", ".join(one.id for one in asked.experiments)
    _say(console, f"{asked.store.folder / 'README.md'} says what came of {told}.")


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
        help="tiny; or one run after the other with accelerate: middle (0.5B, one GPU) or paper (its sizes).",
    )
    add("--fresh", action="store_true", help="Train all runs anew, for results in a new folder runs/fresh-<n>.")
    add("--dry", action="store_true", help="Check the settings and say what would be trained and what that costs.")
    for number, (name, what) in enumerate((("results", "results"), ("runs", "trainings under way"))):
        tiny, paper, quick = (FOLDERS[kind][number] for kind in ("tiny", "paper", "quick"))
        default = f"default: {tiny}; {paper} at that scale, {quick} with --quick"
        default += "; DIR/runs with --results DIR" if name == "runs" else ""
        add(f"--{name}", type=Path, metavar="DIR", help=f"Folder of {what} ({default}).")
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
