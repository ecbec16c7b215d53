"""The pages of `results/`: eight claims on one screen, all of them, the paper's figures, a page a claim, how to read.

They are written from the store alone, by `python -m research analyse research/experiments/*.yaml`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os.path import relpath
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ragen2_trl.record.files import write_text
from ragen2_trl.saved_state import replace_whole
from research import figures
from research.checks import (
    INCONCLUSIVE,
    NO_VERDICT,
    NOT_RUN,
    OPPOSITE,
    SUPPORTED,
    Result,
    evaluate,
    null_of,
    validate,
    verdict,
)
from research.commands import ROOT
from research.drawing import MIN_SEEDS
from research.grid import Grid, gathered, of_one_machine
from research.kinds import Check, unit_of
from research.measures import Finished, FinishedRun, read_finished, statistic, versions
from research.plan import Experiment
from research.settings import UNSET, read_yaml
from research.statistics import mean_interval
from research.store import Store

PAGE, ALL, METHOD, MAP, CLAIM = "README.md", "all.md", "method.md", "paper.md", "claim.md"  # each with its template
CHOSEN = Path(__file__).with_name(
    "paper.yaml"
)  # what stands on the first page, and the figures and tables of the paper
# Of each setting: what the table of a claim shows; peak is what the paper reports.
COLUMNS = {
    "random baseline": "random_baseline/first",
    "before": "success/first",
    "last": "success/last",
    "last fifth": "success/last_fifth",
    "area": "success/area",
    "peak": "success/peak",
    "CPU seconds": "cpu_seconds/last",
    "sampled tokens": "sampled_tokens/last",
    "update FLOPs": "update_flops/last",
    "retrieval before": "retrieval/first",
    "retrieval, last fifth": "retrieval/last_fifth",
}
OF_ARMS = {"median gradient norm": "grad_norm/median", "clipped steps": "clipped/mean"}  # on other groups
MEANINGS = {  # in the order of the claims on the first page
    SUPPORTED: "The primary check is significant as expected.",
    OPPOSITE: "The primary check is significant the other way.",
    INCONCLUSIVE: "The primary check is not significant.",
}
FINDINGS = {1: "as expected", -1: "opposite", 0: "inconclusive"}
# Of each run, where they are few.
RUN_COLUMNS = {
    "before": "success/first",
    "last": "success/last",
    "CPU seconds": "cpu_seconds/last",
    "sampled tokens": "sampled_tokens/last",
    "retrieval before": "retrieval/first",
    "retrieval, last": "retrieval/last",
}
MAX_SETTINGS = 60  # rows of a table; a sweep of more is what its figure shows
MAX_RUNS = 20  # of the table of runs
MAX_FIRST = 8  # of the first page


@dataclass(frozen=True)
class Claim:
    """What the page says of an experiment."""

    experiment: Experiment
    results: Sequence[Result]
    notes: Sequence[str]
    verdict: str
    page: str  # or the file of an experiment without one
    images: Sequence[tuple[str, str]]  # file, what it shows
    planned: int
    done: int
    seeds: str
    machine: str
    versions: str
    time: str
    wall_time: str
    base: str
    settings: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[str]]
    run_rows: Sequence[Sequence[str]]

    @property
    def ours(self) -> str:
        """The primary check with its number; all checks of a claim without a page, which stand nowhere else."""
        return "; ".join(f"{one.name}: {one.shown}" for one in self.results[: 1 if self.experiment.page else None])

    @property
    def conditions(self) -> str:
        """Under which arms that train on different groups were compared; empty for other claims."""
        return conditions(self.experiment)

    @property
    def has_run(self) -> bool:
        return self.verdict != NOT_RUN

    @property
    def decides(self) -> bool:
        return self.has_run and not self.verdict.startswith(NO_VERDICT)

    @property
    def rank(self) -> int:
        """Where it stands on the first page; what has no verdict stands last."""
        return next((n for n, said in enumerate(MEANINGS) if self.verdict.startswith(said)), len(MEANINGS))

    @property
    def meaning(self) -> str:
        return next((means for said, means in MEANINGS.items() if self.verdict.startswith(said)), "")


def analyse(experiments: Sequence[Experiment], folder: Path, scale: str = "tiny", quick: bool = False) -> None:
    """Write the pages and the figures of some experiments into the folder of their results.

    Args:
        experiments: In the order of the page.
        folder: Of the store.
        scale: Whose runs count, see `Experiment.runs`.
        quick: Likewise.

    Raises:
        ValueError: If a check or a figure of one of them cannot be read.
    """
    for one in experiments:
        check_readable(one)
    store = Store(folder)
    folder.mkdir(parents=True, exist_ok=True)
    planned_runs = [planned for one in experiments for planned in one.planned_runs(quick, scale)]
    finished = read_finished(store, [planned.key for planned in planned_runs])
    claims = [_claim(read_grid(one, finished, scale, quick), store.fixed_checks(one), folder) for one in experiments]
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    chosen = read_yaml(CHOSEN)
    by_id = {claim.experiment.id: claim for claim in claims}
    first = [by_id[name] for name in chosen["first_page"] if name in by_id]
    if len(first) < len(chosen["first_page"]):  # of a part of the claims, the first ones
        first = sorted(claims, key=lambda claim: claim.rank)[:MAX_FIRST]
    items = [{**one, "claims": [by_id.get(name) for name in one.get("experiments", [])]} for one in chosen["items"]]
    has_map = all(claim is not None for one in items for claim in one["claims"])
    templates.globals.update(escaped=_escaped, expected=_expected, told=FINDINGS, digits=_digits, power=_power)
    done = finished.runs(planned_runs)
    said = {
        "claims": claims,
        "first": first,
        "items": items,
        "has_map": has_map,
        "number_of_checks": sum(len(claim.results) for claim in claims),
        "done": len(done),
        "wall_time": _duration(_wall_seconds(list(done.values()))),
        "number_planned": len({planned.key for planned in planned_runs}),
        "quick": quick,
        "root": relpath(ROOT, folder.resolve()),
        "docs": relpath(ROOT / "research" / "README.md", folder.resolve()),
    }
    for page in (PAGE, ALL, METHOD, *([MAP] if has_map else [])):
        write_text(folder / page, templates.get_template(f"{page}.jinja").render(said))
    for claim in claims:
        if not claim.experiment.page:
            continue
        tables = {
            "Every setting": _without_empty(["setting", "seeds", *_columns(claim.experiment)], claim.rows),
            "Every run": _without_empty(["setting", "seed", *RUN_COLUMNS, "health"], claim.run_rows),
        }
        write_text(folder / claim.page, templates.get_template(f"{CLAIM}.jinja").render(claim=claim, tables=tables))


def check_readable(experiment: Experiment) -> None:
    """Raise a `ValueError` if a check or a figure of an experiment is not as it should be."""
    validate(experiment)
    for n, spec in enumerate(experiment.figures):
        figures.validate(spec, f"{experiment.path}: figures[{n}]")


def read_grid(experiment: Experiment, finished: Finished, scale: str, quick: bool) -> Grid:
    planned_runs = experiment.planned_runs(quick, scale)
    others = [read_grid(one, finished, scale, quick) for one in experiment.others]
    return Grid(experiment, planned_runs, finished.runs(planned_runs), others)


def _claim(grid: Grid, fixed: Sequence[Check] | None, folder: Path) -> Claim:
    experiment, runs = grid.experiment, list(grid.runs.values())
    results = evaluate(grid, fixed)
    said = verdict(grid, results)
    seeds = Counter(run.seed for run in runs)
    return Claim(
        experiment=experiment,
        results=results,
        notes=_notes(results),
        verdict=said,
        page=f"{experiment.id}.md" if experiment.page else relpath(experiment.path, folder),
        images=_draw_all(grid, folder) if said != NOT_RUN and experiment.page else [],
        planned=len({planned.key for planned in grid.planned_runs}),
        done=len(runs),
        seeds=", ".join(f"{seed} ({number} runs)" for seed, number in sorted(seeds.items())) or "none yet",
        machine=_machines(runs),
        versions=_versions(runs),
        time=_duration(sum(float(run.record["seconds"]) for run in runs)),
        wall_time=_duration(_wall_seconds(runs)),
        base=", ".join(_link(path, folder) for path in experiment.base),
        settings=_settings(experiment, folder),
        rows=_rows(grid) if not experiment.others else [],
        run_rows=_run_rows(grid) if len(grid.planned_runs) <= MAX_RUNS else [],
    )


def _notes(results: Sequence[Result]) -> list[str]:
    """What is said of runs once for all checks, then what is said of one."""
    own = [f"{result.name}: {' '.join(result.notes.others)}" for result in results if result.notes.others]
    return [*gathered(result.notes for result in results).sentences(), *own]


def _draw_all(grid: Grid, folder: Path) -> list[tuple[str, str]]:
    """File and caption of each figure that has something to show."""
    images = []
    for number, spec in enumerate(grid.experiment.figures, 1):
        figure = figures.draw(grid, spec)
        if figure is not None:
            name = f"{grid.experiment.id}{f'_{number}' if number > 1 else ''}.png"
            options: dict[str, Any] = {"format": "png", "metadata": {"Software": None}}
            replace_whole(folder / name, partial(figure.savefig, **options))
            images.append((name, str(spec.get("caption", grid.experiment.claim))))
    return images


def _columns(experiment: Experiment) -> dict[str, str]:
    return {**COLUMNS, **(OF_ARMS if conditions(experiment) else {})}


def conditions(experiment: Experiment) -> str:
    """Under which the arms of an experiment were compared, if they differ in the groups that they train on."""
    settings = [
        own for one in experiment.others or (experiment,) for axis in one.axes.values() for own in axis.values()
    ]
    names = {name for own in settings for name in (*own, *own.get(UNSET, []))}
    if not any(name.startswith("snr_") for name in names):
        return ""
    same = [
        what
        for name, what in (("learning_rate", "learning rate"), ("max_grad_norm", "gradient clip"))
        if name not in names
    ]
    return f"at the same {' and '.join(same)}" if same else "each at its own learning rate and gradient clip"


def _rows(grid: Grid) -> list[list[str]]:
    """Of each setting that has run: its statistics with their intervals over seeds."""
    rows = []
    for levels in grid.settings:
        runs = [run for seed in grid.seeds if (run := grid.run(levels, seed)) is not None]
        if runs:
            numbers = (over_seeds(runs, name) for name in _columns(grid.experiment).values())
            rows.append([", ".join(levels.values()) or "all", str(len(runs)), *numbers])
    return rows[:MAX_SETTINGS]


def _run_rows(grid: Grid) -> list[list[str]]:
    """Of each run: start, end and costs, whether its text depends on its prompt, and the states of its training."""
    runs = [run for levels in grid.settings for seed in grid.seeds if (run := grid.run(levels, seed)) is not None]
    return [
        [
            ", ".join(run.levels.values()) or "all",
            str(run.seed),
            *(over_seeds([run], name) for name in RUN_COLUMNS.values()),
            "; ".join(f"{one.title} since {one.since}" for one in run.health.history[1:]) or run.health.state.title,
        ]
        for run in runs
    ]


def _without_empty(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """A table's header and rows without the columns that no row has."""
    kept = [n for n in range(len(columns)) if any(row[n] for row in rows)]
    return [columns[n] for n in kept], [[row[n] for n in kept] for row in rows]


def over_seeds(runs: Sequence[FinishedRun], name: str) -> str:
    """The mean of a statistic with its interval, as tables have it; nothing where no run has it."""
    found = mean_interval([value for run in runs if math.isfinite(value := statistic(run, name))])
    if math.isnan(found.value):
        return ""
    if unit_of(name) != "points":
        return f"{found.value:,.0f}" if 10 <= found.value < 1e6 else f"{found.value:.{3 if found.value > 10 else 2}g}"
    percent = f"{100 * found.value:.1f} %"
    if found.n < MIN_SEEDS or found.low == found.high:
        return percent
    return f"{percent} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def _settings(experiment: Experiment, folder: Path) -> list[tuple[str, str]]:
    """What its runs have beside the base files: for all of them, and for each level."""
    found = [("all runs", _flow(experiment.fields))] if experiment.fields else []
    files = experiment.level_files.get("tiny", {})
    for axis, levels in experiment.axes.items():
        for level, fields in levels.items():
            own = [_link(path, folder) for path in files.get(axis, {}).get(level, ())]
            found.append((f"{axis}: {level}", ", ".join([*own, *filter(None, [_flow(fields)])]) or "as the base"))
    return found


def _link(path: Path, folder: Path) -> str:
    return f"[{path.name}]({relpath(path, folder)})"


def _flow(fields: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(fields), default_flow_style=True, width=10_000, sort_keys=False).strip()
    return f"`{text[1:-1]}`" if fields else ""


def _machines(runs: Sequence[FinishedRun]) -> str:
    cores = _counted(
        f"{run.record['host_cores']} CPU cores{f' ({cpu})' if (cpu := run.processor) else ''}" for run in runs
    )
    several = not of_one_machine([run for run in runs if run.host])
    parts = [cores, *(["several machines, or several starts of one"] if several else [])]
    for what, unknown in (
        ("machine", sum(not run.host for run in runs)),
        ("CPU model", sum(not run.processor for run in runs)),
    ):
        if unknown:
            parts.append(f"{what} not recorded for {unknown} of {len(runs)} runs")
    return "; ".join(parts)


def _versions(runs: Sequence[FinishedRun]) -> str:
    names = dict.fromkeys(name for run in runs for name in versions(run))
    return "; ".join(f"{name} {_counted(versions(run).get(name, 'unknown') for run in runs)}" for name in names)


def _wall_seconds(runs: Sequence[FinishedRun]) -> float:
    """From start to end, with evaluations; of training alone where that is not known, as of resumed runs."""
    both = [(float(run.record["wall_seconds"]), float(run.record["seconds"])) for run in runs]
    return sum(wall if math.isfinite(wall) else training for wall, training in both)


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.0f} minutes"


def _counted(values: Any) -> str:
    """Different values, the most frequent first."""
    return ", ".join(value for value, _ in Counter(values).most_common()) or "unknown"


def _escaped(text: str) -> str:
    """As one field of a table."""
    return " ".join(str(text).replace("|", "\\|").split())


def _expected(check: Mapping[str, Any]) -> str:
    """What a check expects, in words."""
    kind, margin, null = check["kind"], check.get("within", 0), null_of(check)
    points = unit_of(check.get("statistic", "")) == "points" and kind != "ratio"
    number = f"{100 * float(null):g} points" if points and null else f"{null:g}"
    if check["expects"] == "=":
        return f"within {f'{100 * margin:g} points' if points else f'{margin:g}'} of {number}"
    return f"{'above' if check['expects'] == '>' else 'below'} {number}"


def _digits(p: float) -> str:
    return "" if math.isnan(p) else f"{p:.2g}"


def _power(result: Result) -> str:
    """Of a primary check, with what it is stated for."""
    if math.isnan(result.power):
        return "unknown"
    return f"{100 * result.power:.0f} % (at {result.true_effect}, level {result.level:.2g})"
