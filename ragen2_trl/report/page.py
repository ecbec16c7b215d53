"""The report shows runs side by side on one HTML page, which loads nothing, runs nothing, and opens from a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from ragen2_trl.instrument.findings import Finding
from ragen2_trl.instrument.health import is_number
from ragen2_trl.messages import counted, printable
from ragen2_trl.metrics import ACCURACY, INFORMATION, KEPT
from ragen2_trl.record.facts import COMPUTED, SAMPLED, Fact, facts, outcomes
from ragen2_trl.record.files import EPISODES, MEASUREMENTS, UNREADABLE, unreadable
from ragen2_trl.record.held_out import differ, tasks_to_tell
from ragen2_trl.record.run import Run
from ragen2_trl.record.saved_measurement import SavedMeasurement, read_measurement
from ragen2_trl.record.settings import has_effect
from ragen2_trl.report.figures import figures_of, plot_comparison, points_of
from ragen2_trl.report.samples import Group, pick_samples
from ragen2_trl.report.style import svg

TEMPLATE = "report.html.jinja"
COLUMNS = (SAMPLED, COMPUTED, KEPT, ACCURACY, INFORMATION)  # of the first table, beside the outcome
MAX_PROBLEMS = 8  # files of a run that cannot be read
MAX_NAMED = 3  # runs in the headline
MAX_DIFFERING = 4  # settings beside the name of a run
# Findings in the headline.
HEADLINED = ("failing", "nothing_to_learn", "nothing_learnt", "template_collapse", "low_entropy_collapse")
# What a reader who wants the missing part would have to do.
NO_COMPLETIONS = "No completions were saved. Before training: log_completions=True in the trainer's settings."


@dataclass(frozen=True)
class RunSection:
    """A run as the page shows it.

    Args:
        label: Its name, made distinct from those of the other runs.
        run: What it is made of.
        outcome: What training was for.
        facts: Its numbers.
        findings: What may be said of it.
        figures: (caption, SVG).
        groups: Texts that it has written, by prompt.
        problems: What is missing or cannot be read.
    """

    label: str
    run: Run
    outcome: Fact | None
    facts: list[Fact]
    findings: list[Finding]
    figures: list[tuple[str, Markup]]
    groups: list[Group]
    problems: list[str]

    @property
    def status(self) -> str:
        resumed = ", ".join(map(str, self.run.resumed_at))
        return self.run.status + (f", resumed at step {resumed}" if resumed else "")

    @property
    def files(self) -> list[str]:
        """What of its folder the page does not show."""
        texts = {"completions": "completions", EPISODES: "episodes", MEASUREMENTS: "measurements with their texts"}
        found = [(self.run.folder / name, what) for name, what in texts.items()]
        return [f"{path.name}/: {what}" for path, what in found if path.is_dir()]

    @property
    def headlined(self) -> list[Finding]:
        """The findings of the first table."""
        return [one for one in self.findings if one.kind in ("training", "reasoning")]

    def fact(self, key: str) -> Fact | None:
        return next((fact for fact in self.facts if fact.key == key), None)


def render_report(runs: Sequence[Run]) -> str:
    """One HTML page that compares runs, self-contained and without scripts; a run that is given twice is shown once.

    Text that a model wrote is escaped, and the page forbids its browser to load or run anything.

    Raises:
        ValueError: If there is no run.
    """
    distinct = {run.folder.resolve(): run for run in runs}
    if not distinct:
        raise ValueError("runs must hold at least one run, got none")
    labels = distinct_labels(list(distinct))
    parts = [_make_part(label, run) for label, run in zip(labels, distinct.values(), strict=True)]
    settings = _table([part.run.settings for part in parts])
    titles = {fact.key: _upper(fact.title) for part in parts for fact in part.facts if fact.key in COLUMNS}
    named = dict.fromkeys(part.outcome.title for part in parts if part.outcome)
    titles["outcome"] = _upper(" or ".join(named)) or "Outcome"
    page: str = _template().render(
        headline=headline(parts),
        parts=parts,
        columns=[key for key in COLUMNS if key in titles],
        titles=titles,
        comparison=_comparison(parts),
        settings=settings,
        differing=[row for row in settings if row[2]][:MAX_DIFFERING],
        versions=_table([part.run.versions for part in parts]),
    )
    return page + "\n"


def distinct_labels(folders: Sequence[Path]) -> list[str]:
    """What runs are called side by side: the name of each folder, with as many parents as tell it from the others.

    >>> distinct_labels([Path("/a/run"), Path("/b/run"), Path("/b/other")])
    ['a/run', 'b/run', 'other']
    """

    def name(folder: Path, depth: int) -> str:
        return printable("/".join(folder.parts[-depth:])).replace("\n", "\N{REPLACEMENT CHARACTER}")

    labels = []
    for folder in folders:
        depth = 1
        while sum(name(other, depth) == name(folder, depth) for other in folders) > 1 and depth < len(folder.parts):
            depth += 1
        labels.append(name(folder, depth))
    return labels


def headline(parts: Sequence[RunSection]) -> str:
    """What the page says first: how the runs ended, the best first, and which of them fail, learn nothing or write
    templates."""

    def held_out(part: RunSection) -> float:
        return part.run.evaluations.get("after", {}).get("success", -1.0)

    ranked = sorted(parts, key=held_out, reverse=True)
    said = [f"“{part.label}”{_control(part.run)}: {_outcome(part)}" for part in ranked[:MAX_NAMED]]
    said += [f"and {counted(len(parts) - MAX_NAMED, 'more run')}"] if len(parts) > MAX_NAMED else []
    if len(parts) > 1 and held_out(ranked[1]) >= 0:
        best, second = (part.run.evaluations["after"] for part in ranked[:2])
        said += [unsure] if (unsure := _unsure(best, second, "the best two are not shown to differ")) else []
    bad = [(part, finding) for part in parts for finding in part.findings if finding.name in HEADLINED]
    for part, finding in bad[:MAX_NAMED]:
        since = "" if finding.since is None else f" since step {finding.since}"
        said.append(f"“{part.label}”: {finding.name.replace('_', ' ')}{since}")
    return "; ".join(said)


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _control(run: Run) -> str:
    return " (nothing filtered)" if run.filters_nothing and run.evaluations else ""


def _outcome(part: RunSection) -> str:
    """The end of a run beside its beginning, in a few words."""
    one = part.outcome
    if one is None or one.last is None:
        return part.run.status
    before, after = (part.run.evaluations.get(when) for when in ("before", "after"))
    unsure = _unsure(before, after, "no change shown") if before and after else ""
    began = f"{one.number(one.first)} → " if one.first else ""
    size = f" ({one.note})" if part.run.is_played else ""
    return f"{one.label} {began}{one.number(one.last)}{size}{f' ({unsure})' if unsure else ''}"


def _unsure(before: dict[str, float], after: dict[str, float], nothing: str) -> str:
    """`nothing`, where chance may have made the difference, with the tasks that it would take to know."""
    if differ(before, after):
        return ""
    tasks = tasks_to_tell(before["success"], after["success"])
    return nothing + ("" if tasks is None else f": about {tasks:,} held-out tasks would tell")


def _template() -> Template:
    def shown(value: Any) -> Any:
        return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE)


def _make_part(label: str, run: Run) -> RunSection:
    problems: list[str] = []
    measurements = _measurements(run, problems)
    groups = pick_samples(run, problems)
    if not groups and not problems and not run.is_played:
        problems.append(NO_COMPLETIONS)
    figures = _figures(label, run, measurements)
    first = next(iter(outcomes(run)), None)
    return RunSection(label, run, first, facts(run), run.findings, figures, groups, problems[:MAX_PROBLEMS])


def _figures(label: str, run: Run, measurements: Sequence[SavedMeasurement]) -> list[tuple[str, Markup]]:
    return [
        (caption, Markup(svg(figure, f"{label} {caption}"))) for _, caption, figure in figures_of(run, measurements)
    ]


def _comparison(parts: Sequence[RunSection]) -> Markup | None:
    logged = [part for part in parts if points_of(part.run.rows, "reward", "entropy")]
    if len(logged) < 2:
        return None
    figure = plot_comparison(
        {part.label: part.run.rows for part in logged}, {part.label: part.run.success_metric for part in logged}
    )
    return Markup(svg(figure, "comparison"))


def _measurements(run: Run, problems: list[str]) -> list[SavedMeasurement]:
    """The first and the last of the measurements that can be read; one, if there is no more, or none."""
    found: dict[int, SavedMeasurement] = {}
    for paths in (run.measurements, run.measurements[::-1]):
        for path in paths:
            try:
                measurement = read_measurement(path)
                _check(measurement)
            except UNREADABLE as error:
                if (problem := unreadable(path, error)) not in problems:
                    problems.append(problem)
                continue
            found[measurement.step] = measurement
            break
    return list(found.values())


def _check(measurement: SavedMeasurement) -> None:
    """Raises a `ValueError` for a measurement that cannot be drawn: anyone may have written it."""
    rows, columns = len(measurement.traces), len(measurement.prompts)
    for name, shape in (("cross_logps", (rows, columns)), ("lengths", (rows,)), ("prompt_index", (rows,))):
        if (found := tuple(getattr(measurement, name).shape)) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {found}")
    if not rows or columns < 2:
        raise ValueError("there must be at least one reasoning trace and two prompts")
    if not measurement.cross_logps.isfinite().all():
        raise ValueError("cross_logps must be finite")
    if measurement.lengths.min() < 1:
        raise ValueError("lengths must be at least 1")
    if measurement.prompt_index.min() < 0 or measurement.prompt_index.max() >= columns:
        raise ValueError(f"prompt_index must be between 0 and {columns - 1}")
    if measurement.scores.dim() != 1:
        raise ValueError(f"scores must have shape (groups,), got {tuple(measurement.scores.shape)}")
    if measurement.kept is not None and measurement.kept.shape != measurement.scores.shape:
        raise ValueError("kept must have as many values as scores")
    for name in ("retrieval_accuracy", "retrieval_chance"):
        if not is_number(measurement.metrics.get(name)):
            raise ValueError(f"metrics must hold the number {name}")


def _table(columns: Sequence[dict[str, Any]]) -> list[tuple[str, list[str], bool]]:
    """(name, value for each run, whether those that have one differ); those that differ first, then those that not
    every run has. What does nothing in any run is left out."""
    names = dict.fromkeys(name for column in columns for name, value in column.items() if has_effect(name, value))
    rows = []
    for name in names:
        values = [_plain(column[name]) if name in column else "" for column in columns]
        rows.append((name, [value[:200] for value in values], len({*values} - {""}) > 1))
    return sorted(rows, key=lambda row: (not row[2], "" not in row[1]))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return str(value)
