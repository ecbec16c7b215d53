"""The report shows runs side by side on one HTML page, which loads nothing, runs nothing, and opens from a file."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Template
from markupsafe import Markup

from ragen2_trl.instrument.health import TITLES, Name
from ragen2_trl.instrument.verdict import COLLAPSES, REGIMES, collapse_label
from ragen2_trl.messages import counted, printable
from ragen2_trl.metrics import ACCURACY, BOUND, CHANCE, ENTROPY, INFORMATION, KEPT, label
from ragen2_trl.record.files import UNREADABLE
from ragen2_trl.record.group_rewards import read_group_rewards
from ragen2_trl.record.held_out import differ, tasks_of, tasks_to_tell
from ragen2_trl.record.run import Run, running_means
from ragen2_trl.record.saved_measurement import SavedMeasurement
from ragen2_trl.record.settings import has_effect
from ragen2_trl.remedies import WhatIf, what_if
from ragen2_trl.report.episodes import CHOICES, Album, read_album
from ragen2_trl.report.examples import (
    MAX_PROMPTS,
    MAX_SHARED,
    Excerpt,
    Group,
    ReasoningTrace,
    distinguishing,
    excerpt,
    pick_traces,
    read_groups,
    read_measurements,
)
from ragen2_trl.report.gallery import arrows_svg, figures_of
from ragen2_trl.report.plots import plot_comparison, points_of
from ragen2_trl.report.style import html_templates, svg

TEMPLATE = "report.html.jinja"
OF_TRL = "times plain TRL"
MAX_STREAKS = 30  # regimes of a run, in the table
MAX_PROBLEMS = 8  # warnings of a run
MAX_NAMED = 3  # runs in the headline
MAX_DIFFERING = 4  # settings beside the name of a run
HEADLINED: tuple[Name, ...] = ("failing", "nothing_to_learn")  # states of training in the headline
# What a reader who wants the missing part would have to do.
NO_ROWS = "No training step was logged: the run ended before its first log, or logs less often than it had steps."
NOT_MEASURED = "Mutual information was not measured, so nothing here says whether reasoning depends on its prompt"
NO_INFORMATION = f"{NOT_MEASURED}. Before training: trainer.add_callback(MutualInformationCallback(trainer))"
NOTHING_LEARNT = "No step had a group to train on: the weights are those that the run began with."
NO_MEASUREMENTS = (
    "No measurement with its texts is in _measurements/, so there is no matrix and no reasoning trace to read. "
    "Texts stay on the machine of the run: they are never uploaded."
)
NO_COMPLETIONS = "No completions were saved. Before training: log_completions=True in the trainer's settings."


@dataclass(frozen=True)
class Number:
    """A quantity of a run from start to end, as text; empty where it is not known."""

    label: str
    start: str = ""
    end: str = ""
    note: str = ""


@dataclass(frozen=True)
class Streak:
    """Consecutive measurements in one regime."""

    regime: str
    first: int
    last: int
    count: int

    @property
    def is_collapsed(self) -> bool:
        return self.regime in COLLAPSES

    @property
    def words(self) -> str:
        return REGIMES.get(self.regime, self.regime)


@dataclass(frozen=True)
class RunSection:
    """A run as the page shows it.

    Args:
        label: Its name, made distinct from those of the other runs.
        run: What it is made of.
        numbers: For the first screen.
        figures: (caption, SVG).
        streaks: Its regimes over time.
        groups: Completions by prompt.
        traces: Reasoning traces of the last measurement.
        measured_at: Its step.
        problems: What is missing or cannot be read.
        album: Its episodes, where any were saved.
        remedies: What its log says of remedies; where it cannot be read, why not.
    """

    label: str
    run: Run
    numbers: list[Number]
    figures: list[tuple[str, Markup]]
    streaks: list[Streak]
    groups: list[Group]
    traces: list[ReasoningTrace]
    measured_at: int | None
    problems: list[str]
    album: Album | None
    remedies: WhatIf | str | None

    @property
    def verdict_status(self) -> str:
        """Chooses colour and shape."""
        return self.run.verdict_status

    @property
    def status(self) -> str:
        resumed = ", ".join(map(str, self.run.resumed_at))
        return self.run.status + (f", resumed at step {resumed}" if resumed else "")


@dataclass(frozen=True)
class Example:
    """A prompt with the groups that runs have of it, by the label of the run."""

    prompt: Excerpt
    full: Excerpt
    groups: dict[str, Group]


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
    shared, own = _pick_examples(parts)
    settings = _table([part.run.settings for part in parts])
    page: str = _template().render(
        headline=headline(parts),
        parts=parts,
        columns=_columns(parts),
        comparison=_comparison(parts),
        shared=shared,
        own=own,
        contents=contents(parts, shared, own),
        settings=settings,
        differing=[row for row in settings if row[2]][:MAX_DIFFERING],
        versions=_table([part.run.versions for part in parts]),
        max_streaks=MAX_STREAKS,
        episode_choices=CHOICES,
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
    """What the page says first: how runs ended, which of them fail or learn nothing, and where reasoning collapsed."""
    played = [f"{_quoted(part)}: {part.album.summary}" for part in parts if part.run.is_played and part.album]
    trained = [part for part in parts if not part.run.is_played] or ([] if played else parts)
    said = [*_outcomes(trained), *_states(trained), *_collapses(trained)]
    if len(trained) == 1:
        said[0] = f"{_quoted(trained[0])}: {_lower(said[0])}"
    said = [*played[:MAX_NAMED], *said]
    if not said:
        return f"In none of {len(parts)} runs has reasoning become a template"
    return "; ".join([said[0], *map(_lower, said[1:])])


def _unsure(before: Mapping[str, float], after: Mapping[str, float], nothing: str) -> str:
    """`nothing`, where chance may have made the difference, with the tasks that it would take to know."""
    if differ(before, after):
        return ""
    tasks = tasks_to_tell(before["success"], after["success"])
    return nothing + ("" if tasks is None else f": about {tasks:,} held-out tasks would tell")


def _outcomes(parts: Sequence[RunSection]) -> list[str]:
    """Held-out success of each run, the best end first, and whether the best two differ; for a single run without any
    its own outcome."""
    ends = [part for part in parts if "after" in part.run.evaluations]
    ends.sort(key=lambda part: part.run.evaluations["after"]["success"], reverse=True)
    if not ends:
        return [parts[0].run.outcome.rstrip(".")] if len(parts) == 1 and parts[0].run.outcome else []
    said = []
    for part in ends[:MAX_NAMED]:
        before, after = (part.run.evaluations.get(when) for when in ("before", "after"))
        assert after is not None  # asked above
        name = (
            "" if len(parts) == 1 else f"{_quoted(part)}{' (nothing filtered)' if part.run.filters_nothing else ''} "
        )
        began = f"{before['success']:.0%} → " if before else ""
        unsure = before and _unsure(before, after, "no change shown")
        said.append(f"{name}{began}{after['success']:.0%}{f' ({unsure})' if unsure else ''}")
    more = f" and {len(ends) - MAX_NAMED} more" if len(ends) > MAX_NAMED else ""
    found = [f"Held-out success {', '.join(said)}{more}"]
    if len(ends) > 1:
        best, second = (part.run.evaluations["after"] for part in ends[:2])
        found += [unsure] if (unsure := _unsure(best, second, "the best two are not shown to differ")) else []
    return found


def _states(parts: Sequence[RunSection]) -> list[str]:
    said = []
    for name in HEADLINED:
        runs = [
            f"{_quoted(part)} since step {part.run.state.since}"
            for part in parts
            if part.run.state is not None and part.run.state.name == name
        ]
        if runs:
            named = ", ".join(runs[:MAX_NAMED]) + (f" and {len(runs) - MAX_NAMED} more" * (len(runs) > MAX_NAMED))
            said.append(f"training is {TITLES[name]} in {len(runs)} of {counted(len(parts), 'run')}: {named}")
    return said


def _collapses(parts: Sequence[RunSection]) -> list[str]:
    """Where reasoning has become a template; for a single run its verdict."""
    if len(parts) == 1:
        return [parts[0].run.verdict]
    collapsed = [part for part in parts if part.verdict_status == "collapsed"]
    named = ", ".join(f"{_quoted(part)} since step {part.run.collapses[-1].first}" for part in collapsed[:MAX_NAMED])
    more = f" and {len(collapsed) - MAX_NAMED} more" if len(collapsed) > MAX_NAMED else ""
    found = [f"In {len(collapsed)} of {len(parts)} runs reasoning is a template: {named}{more}"] if collapsed else []
    unmeasured = sum(part.verdict_status == "unknown" for part in parts)
    return found + ([f"Reasoning was not measured in {unmeasured} of {len(parts)} runs"] if unmeasured else [])


def _quoted(part: RunSection) -> str:
    return f"“{part.label}”"


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _template() -> Template:
    environment = html_templates()
    environment.globals.update(arrows_of=arrows_svg)
    return environment.get_template(TEMPLATE)


def _make_part(label: str, run: Run) -> RunSection:
    problems = list(run.problems)
    measurements = read_measurements(run, problems)
    groups = read_groups(run, problems)
    album = read_album(run, problems)
    problems += _missing(run)
    last = measurements[-1] if measurements else None
    return RunSection(
        label=label,
        run=run,
        numbers=_numbers(run),
        figures=_figures(label, run, measurements),
        streaks=_streaks(run),
        groups=groups,
        traces=pick_traces(last) if last else [],
        measured_at=last.step if last else None,
        problems=problems[:MAX_PROBLEMS],
        album=album,
        remedies=_remedies(run) if groups or read_group_rewards(run.folder) else None,
    )


def _remedies(run: Run) -> WhatIf | str:
    """Which remedy would pay off on this run's data, or why its log cannot tell."""
    try:
        return what_if(run.folder)
    except UNREADABLE as error:
        return " ".join(str(error).split())


def _numbers(run: Run) -> list[Number]:
    def percent(value: float) -> str:
        return f"{value:.0%}"

    accuracy, information = run.points(ACCURACY), run.points(INFORMATION)
    # Of the measurement that is shown: another one may have had another number of prompts.
    bounds, chances = dict(run.points(BOUND)), dict(run.points(CHANCE))
    bound = bounds.get(information[-1][0]) if information else None
    chance = chances.get(accuracy[-1][0]) if accuracy else None
    cost, updates = run.cost, run.cost and run.cost.update_ratio
    return [
        _success(run),
        Number("Completions sampled", "", f"{cost.sampling_ratio:.2f}", f"{OF_TRL}: {cost.sampling}")
        if cost
        else Number("Completions sampled"),
        Number("Update positions", "", "" if updates is None else f"{updates:.2f}", "" if updates is None else OF_TRL),
        _number(label(KEPT).capitalize(), running_means(run.points(KEPT)), percent, "by the filter"),
        _number(
            label(ACCURACY).capitalize(),
            accuracy,
            percent,
            "" if chance is None else f"own prompt found; chance {chance:.1%}",
        ),
        _number(
            "Mutual information",
            information,
            lambda value: f"{round(value, 2) + 0.0:.2f}",  # never -0.00
            "" if bound is None else f"nats, at most {bound:.2f}",
        ),
        _number("Entropy", running_means(run.points(ENTROPY)), lambda value: f"{value:.2f}", "nats per token"),
    ]


def _columns(parts: Sequence[RunSection]) -> list[str]:
    """What stands above the numbers: all that it is called, where runs have not the same of it."""
    columns = zip(*(part.numbers for part in parts), strict=True)
    return [" or ".join(dict.fromkeys(number.label for number in column)).capitalize() for column in columns]


def contents(
    parts: Sequence[RunSection], shared: Sequence[Example], own: Mapping[str, Sequence[Example]]
) -> list[str]:
    """The sections of the page beside its runs and their episodes, by their titles."""
    there = {
        "Completions": bool(shared or any(own.values())),
        "Reasoning traces": any(part.traces for part in parts),
        "Settings and versions": any(part.run.settings or part.run.versions for part in parts),
    }
    return [title for title, is_there in there.items() if is_there]


def _success(run: Run) -> Number:
    """Held out where the end was evaluated, else in training, else the reward."""
    before, after = (run.evaluations.get(when) for when in ("before", "after"))
    if run.held_out:
        curve = next(iter(run.held_out.values()))
        return Number("Held-out success", curve.start, f"{curve.last.success:.0%}", curve.note)
    if after:
        measured = [metrics for metrics in (before, after) if metrics]
        start = f"{before['success']:.0%}" if before else ""
        bounds = ", then ".join(f"{one['success_ci_low']:.0%} to {one['success_ci_high']:.0%}" for one in measured)
        tasks = tasks_of(measured)
        note = f"95 % interval {bounds}" + (f"; {tasks}" if tasks else "")
        return Number("Held-out success", start, f"{after['success']:.0%}", note)
    if run.is_diagnosed and run.success_metric:
        return _number("Success of what was diagnosed", run.points(run.success_metric), lambda x: f"{x:.0%}", "")
    if not run.outcomes:
        return Number("Success in training")
    name, points, is_fraction = run.outcomes[0]
    return _number(
        name[:1].upper() + name[1:], points, lambda value: f"{value:.0%}" if is_fraction else f"{value:.2f}", ""
    )


def _number(label: str, points: Sequence[tuple[int, float]], shown: Callable[[float], str], note: str) -> Number:
    if not points:
        return Number(label)
    start = shown(points[0][1]) if len(points) > 1 else ""
    return Number(label, start, shown(points[-1][1]), note)


def _streaks(run: Run) -> list[Streak]:
    streaks = [list(streak) for _, streak in groupby(run.regimes, key=lambda measured: measured[1])]
    return [Streak(streak[0][1], streak[0][0], streak[-1][0], len(streak)) for streak in streaks]


def _missing(run: Run) -> list[str]:
    if run.is_played or run.is_diagnosed:
        return []
    problems = [] if run.rows else [NO_ROWS]
    if run.has_learnt_nothing:
        problems.append(NOTHING_LEARNT)
    if not run.regimes and not run.points(INFORMATION):
        silent = f"{NOT_MEASURED}: {run.silence or 'no step asked for it'}."
        problems.append(NO_INFORMATION if run.silence is None else silent)
    elif not run.measurements:
        problems.append(NO_MEASUREMENTS)
    if not run.completions:
        problems.append(NO_COMPLETIONS)
    rows = counted(len(run.log_history), "log row")
    if stepless := sum(row.get("step") is None for row in run.log_history):
        problems.append(f"No step in {stepless} of {rows}. Figures leave them out.")
    broken = [(row.get("step"), names) for row in run.log_history if (names := _not_finite(row))]
    if broken:
        step, names = broken[0]
        problems.append(
            f"Values that are not finite numbers in {len(broken)} of {rows}, the first at step {step}: "
            f"{', '.join(names)}. Figures leave them out."
        )
    return problems


def _not_finite(row: dict[str, Any]) -> list[str]:
    return [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]


def _figures(label: str, run: Run, measurements: Sequence[SavedMeasurement]) -> list[tuple[str, Markup]]:
    return [
        (caption, Markup(svg(figure, f"{label} {caption}"))) for _, caption, figure in figures_of(run, measurements)
    ]


def _comparison(parts: Sequence[RunSection]) -> Markup | None:
    logged = [part for part in parts if points_of(part.run.rows, "reward", "entropy")]
    if len(logged) < 2:
        return None
    figure = plot_comparison(
        {part.label: part.run.rows for part in logged},
        {part.label: part.run.success_metric for part in logged},
        {
            part.label: (part.run.collapses[-1].first, collapse_label(part.run.collapses[-1]))
            for part in logged
            if part.run.collapses
        },
    )
    return Markup(svg(figure, "comparison"))


def _pick_examples(parts: Sequence[RunSection]) -> tuple[list[Example], dict[str, list[Example]]]:
    """Prompts that several runs have, and further ones by the label of the run that has them."""
    by_prompt: dict[str, dict[str, Group]] = {}
    for part in parts:
        for group in part.groups:
            by_prompt.setdefault(group.prompt, {})[part.label] = group
    short = distinguishing(by_prompt)

    def example(prompt: str) -> Example:
        return Example(excerpt(short[prompt]), excerpt(prompt, 4000), by_prompt[prompt])

    def variance(prompt: str) -> float:
        return max(group.variance for group in by_prompt[prompt].values())

    common = sorted((prompt for prompt, groups in by_prompt.items() if len(groups) > 1), key=variance, reverse=True)
    shared = common[:MAX_SHARED]
    own = {}
    for part in parts:
        rest = [group.prompt for group in part.groups if len(by_prompt[group.prompt]) == 1]
        own[part.label] = [example(prompt) for prompt in rest[: MAX_PROMPTS - len(shared)]]
    return [example(prompt) for prompt in shared], own


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
