"""How soon a method reaches plain TRL's final success, and how far it is after the same time.

    python -m research.benchmarks.time_to_success             # hours on two cores: trains what is left, then writes
    python -m research.benchmarks.time_to_success --tables    # writes from what there is

The runs are those of `research/experiments/ours2.yaml`: plain TRL, the filter that masks, the filter that drops, with
dynamic sampling, with prompt selection and with both, each on 256 fixed FrozenLake prompts of which 0, 30, 50 or 70 %
are impossible and on Countdown, 1,024 drawn in a run, with five seeds. One process per core, methods interleaved, so
that noise hits all alike. Every run resumes where it was stopped, and its numbers are in `research/results/` as soon
as it ends.

A table of held-out success at the end (the mean of the last fifth of the steps), and three for each cost (processor
time, wall clock, sampled tokens, floating-point operations of the update):

- what a method had spent when its held-out success first was that of plain TRL at its end (the mean of its last fifth,
  same seed), as a share of what plain TRL had spent when it first was there: geometric mean over seeds with Student's
  95 % interval on the scale of logarithms. A run that never got there counts with all it has spent, which makes the
  ratio a lower bound (>=), an upper one (<=) where it is plain TRL's, and neither (?) where there are both. Seeds with
  which plain TRL ends no higher than the model was before training are left out: there is no time to that.
- the same for a success five points above that of the model before training.
- held-out success when both had spent what the cheaper of the two has, less plain TRL's, in points.

Writes `research/benchmarks/results/time_to_success.md`.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from research.__main__ import main as research
from research.checks import show
from research.drawing import MIN_SEEDS
from research.grid import Grid, Notes
from research.kinds import KINDS
from research.measures import FinishedRun, read_finished, statistic
from research.page import over_seeds, read_grid
from research.plan import read_experiment
from research.store import Store

RESULTS = Path(__file__).parent / "results"
RESEARCH = Path(__file__).parents[1]
PLAIN = "TRL"
GAIN = 0.05  # of held-out success
TO_FINAL = "of plain TRL's to reach its final success"
TO_GAIN = "of plain TRL's to reach five points above the model before training"
AT_EQUAL = "points ahead of plain TRL at equal cost"
AT_END = "Success at the end"
TITLES = {
    "cpu_seconds": "processor time",
    "seconds": "wall clock",
    "sampled_tokens": "sampled tokens",
    "update_flops": "FLOPs of the update",
}


def at_end(grid: Grid, method: str, prompts: str) -> str:
    return over_seeds(runs_of(grid, prompts, method), "success/last_fifth")


def entry_of(grid: Grid, table: str, cost: str, method: str, prompts: str) -> str:
    """One entry of the table of a cost; empty where the method has not been run."""
    if not runs_of(grid, prompts, method):
        return ""
    plain = {"method": PLAIN, "prompts": prompts}
    check = {"of": {"method": method, "prompts": prompts}, "against": plain, "expects": "<"}
    if table == AT_EQUAL:
        return shown(grid, "difference", check | {"statistic": f"at_equal/{cost}"})
    target = plain if table == TO_FINAL else before_training(grid, prompts) + GAIN
    return shown(grid, "ratio", check | {"statistic": f"{cost}_to_reach", "target": target})


def shown(grid: Grid, kind: str, check: dict[str, Any]) -> str:
    estimate, unit, seeds = KINDS[kind].evaluate(grid, check, Notes())
    if not seeds:
        return "none"
    if seeds < MIN_SEEDS:
        estimate = replace(estimate, low=math.nan, high=math.nan)
    number = show(estimate, unit).replace(" points", "").replace(" times", "")  # which the title says
    return number if seeds == len(grid.seeds) else f"{number}, {seeds} seeds"


def runs_of(grid: Grid, prompts: str, *methods: str) -> list[FinishedRun]:
    """In the order of their seeds; of all methods if none is named."""
    runs = (run for run in grid.runs.values() if run.levels["prompts"] == prompts)
    return sorted((run for run in runs if not methods or run.levels["method"] in methods), key=lambda run: run.seed)


def before_training(grid: Grid, prompts: str) -> float:
    """Held-out success at step 0, which all runs on these tasks have."""
    return float(np.mean([statistic(run, "success/first") for run in runs_of(grid, prompts)]))


def grid_of(file: Path, results: Path) -> Grid:
    experiment = read_experiment(file)
    finished = read_finished(Store(results), [planned.key for planned in experiment.planned_runs()])
    return read_grid(experiment, finished, "tiny", False)


def as_page(grid: Grid) -> str:
    methods = list(grid.experiment.axes["method"])
    others = [method for method in methods if method != PLAIN]
    lines = [
        "# Time to success",
        "",
        "Made by `python -m research.benchmarks.time_to_success`, which says what is measured.",
        "",
        f"{len(grid.runs)} of {len(grid.planned_runs)} runs are done. With some seed plain TRL (<=), the method (>=) "
        "or both (?) did not get there; where it says none, plain TRL ended no higher than it began.",
        *table_of(grid, AT_END, methods, partial(at_end, grid)),
    ]
    for table in (TO_FINAL, TO_GAIN, AT_EQUAL):
        for cost, name in TITLES.items():
            title = f"{name[0].upper()}{name[1:]}: {table}"
            lines += table_of(grid, title, others, partial(entry_of, grid, table, cost))
    return "\n".join([*lines, ""])


def table_of(grid: Grid, title: str, methods: list[str], entry: Callable[[str, str], str]) -> list[str]:
    """The lines of a table: a row a method, a column a kind of prompts."""
    prompts = list(grid.experiment.axes["prompts"])
    lines = ["", f"## {title}", "", f"| method | {' | '.join(prompts)} |", "|---" * (len(prompts) + 1) + "|"]
    return lines + [f"| {method} | {' | '.join(entry(method, one) for one in prompts)} |" for method in methods]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="only write what there is")
    parser.add_argument("--results", type=Path, default=RESEARCH / "results")
    parser.add_argument("--jobs", default=None, help="runs trained at once (default: the cores)")
    args = parser.parse_args()
    file = str(RESEARCH / "experiments" / "ours2.yaml")
    if not args.tables:
        research(["run", file, "--results", str(args.results), *(["--jobs", args.jobs] if args.jobs else [])])
    page = as_page(grid_of(Path(file), args.results))
    (RESULTS / "time_to_success.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
