"""The planned runs of an experiment, those that have run, and which of them belong together."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from ragen2_trl.messages import counted
from research.measures import FinishedRun
from research.plan import Experiment, PlannedRun
from research.store import SEVERAL

Levels = Mapping[str, str]


@dataclass
class Notes:
    """What a reader must know of the numbers, gathered on the way."""

    missing: dict[str, str] = field(default_factory=dict)  # runs that are not there: key of the run -> name
    early: dict[str, str] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)  # runs without what was asked for
    apart: dict[str, str] = field(default_factory=dict)  # runs of different machines, where times are compared
    somewhere: dict[str, str] = field(default_factory=dict)  # runs whose machine is not known, likewise
    others: list[str] = field(default_factory=list)

    def sentences(self) -> list[str]:
        """What to tell, a run once, also where several experiments share it."""
        kinds = (
            ("not there", self.missing),
            ("ended before the planned steps, with the last value from there on", self.early),
            ("left out of a check, for want of a number, its own or the other's of a pair", self.without),
            ("left out where times are compared: it, or the two of a pair, ran on several machines", self.apart),
            ("counted where times are compared, on a machine that was not recorded", self.somewhere),
        )
        found = ((what, len(runs), some(list(dict.fromkeys(runs.values())))) for what, runs in kinds if runs)
        return [*(f"{counted(number, 'run')} {what}: {names}." for what, number, names in found), *self.others]


@dataclass(frozen=True)
class Grid:
    """The planned runs of an experiment and those that have run."""

    experiment: Experiment
    planned_runs: Sequence[PlannedRun]
    runs: Mapping[str, FinishedRun]  # by key
    others: Sequence["Grid"] = ()  # those of `runs_of`

    @cached_property
    def seeds(self) -> list[int]:
        """Planned ones."""
        return list(dict.fromkeys(planned.seed for planned in self.planned_runs))

    @cached_property
    def settings(self) -> list[Levels]:
        """Planned ones, each once."""
        return list({tuple(planned.levels.items()): planned.levels for planned in self.planned_runs}.values())

    def has(self, levels: Levels) -> bool:
        return any((seed, frozenset(levels.items())) in self._keys for seed in self.seeds)

    def run(self, levels: Levels, seed: int) -> FinishedRun | None:
        return self.runs.get(self.key(levels, seed))

    def key(self, levels: Levels, seed: int) -> str:
        """Of a run; empty where none is planned."""
        return self._keys.get((seed, frozenset(levels.items())), "")

    @cached_property
    def _keys(self) -> dict[tuple[int, frozenset[tuple[str, str]]], str]:
        return {(planned.seed, frozenset(planned.levels.items())): planned.key for planned in self.planned_runs}


def pairs(grid: Grid, of: Levels, against: Levels) -> list[tuple[Levels, Levels]]:
    """Levels of both sides for each combination of the axes that neither fixes; combinations that are left out of the
    grid have no pair."""
    free = {axis: levels for axis, levels in grid.experiment.axes.items() if axis not in {*of, *against}}
    found: list[tuple[Levels, Levels]] = []
    for rest in product(*free.values()):
        levels = dict(zip(free, rest, strict=True))
        one, other = ({**levels, **side} for side in (of, {**of, **against}))
        if grid.has(one) and grid.has(other):
            found.append((one, other))
    return found


def by_seed(
    grid: Grid,
    settings: Sequence[Sequence[Levels]],
    number: Callable[[Sequence[FinishedRun]], float],
    notes: Notes,
    timed: bool = False,
) -> dict[int, list[float]]:
    """A number of each of some runs that belong together, for each seed that has all of them.

    A setting that no seed has is left out, and so is, if times are compared (`timed`), a seed with runs that belong
    together and are of different machines; `notes` tell.
    """
    values: dict[int, list[float]] = {}
    table = [[runs_of(grid, setting, seed, notes) for setting in settings] for seed in grid.seeds]
    there = [any(row[n] is not None for row in table) for n in range(len(settings))]
    for seed, row in zip(grid.seeds, table, strict=True):
        runs = [one for one, any_seed in zip(row, there, strict=True) if any_seed]
        if not runs or any(one is None for one in runs):
            continue
        if timed and (apart := [run for one in runs if not of_one_machine(one or ()) for run in one or ()]):
            notes.apart |= {run.key: named(grid, run.levels, seed) for run in apart}
            continue
        if timed:
            notes.somewhere |= {
                run.key: named(grid, run.levels, seed) for one in runs for run in one or () if not run.host
            }
        numbers = [number(one) for one in runs if one is not None]
        if not any(map(math.isnan, numbers)):
            values[seed] = numbers
        else:
            without = [run for one, x in zip(runs, numbers, strict=True) if math.isnan(x) for run in one or ()]
            notes.without |= {run.key: named(grid, run.levels, seed) for run in without}
    if not all(there) and any(there):
        left = sum(not one for one in there)
        notes.others.append(f"{left} of {len(there)} settings have not run with any seed, and are left out.")
    return values


def of_one_machine(runs: Collection[FinishedRun]) -> bool:
    """Whether their times are comparable, as far as the store knows."""
    hosts = {run.host for run in runs}
    return len(hosts) <= 1 and SEVERAL not in hosts


def gathered(several: Iterable[Notes]) -> Notes:
    """What several checks say of runs, without what is said of one check alone."""
    whole = Notes()
    for one in several:
        whole.missing |= one.missing
        whole.early |= one.early
        whole.without |= one.without
        whole.apart |= one.apart
        whole.somewhere |= one.somewhere
    return whole


def runs_of(grid: Grid, setting: Sequence[Levels], seed: int, notes: Notes) -> list[FinishedRun] | None:
    """Those of one seed that belong together; None, and a note, unless all of them are there."""
    found = []
    for levels in setting:
        run = grid.run(levels, seed)
        if run is None:
            notes.missing[grid.key(levels, seed)] = named(grid, levels, seed)
            continue
        found.append(run)
        if run.ended_early:
            notes.early[run.key] = named(grid, levels, seed)
    return found if len(found) == len(setting) else None


def named(grid: Grid, levels: Levels, seed: int) -> str:
    """The run of these levels and seed as a reader of the page knows it."""
    return PlannedRun({}, seed, {axis: levels[axis] for axis in grid.experiment.axes if axis in levels}).name


def some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{'; '.join(names[:most])}{more}"
