"""An experiment as its YAML file says it: a grid of trainings with seeds, and what decides its claim.

Settings are those of `ragen2-trl train`. A *run* is one training: settings and a seed. Its key is made of both and
nothing else, so that experiments which share a run run it once.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import date
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from research.settings import (
    OF_THE_RUNNER,
    WARM_START,
    Fields,
    as_stored,
    check_unset,
    digest,
    json_text,
    merged,
    read_fields,
    read_yaml,
    with_warm_start,
)

SCALES = ("tiny", "middle", "paper")
LARGER = ("middle_scale", "paper_scale")  # of a file


@dataclass(frozen=True)
class PlannedRun:
    """One training of an experiment.

    Args:
        fields: Arguments of `ragen2-trl train` without the seed and what is the runner's.
        seed: Of the run.
        levels: Where it stands in the experiment's grid: axis -> level.
        retired: Whether it has settings that no longer exist.
    """

    fields: Fields
    seed: int
    levels: dict[str, str]
    retired: bool = False

    @cached_property
    def key(self) -> str:
        """12 hexadecimal digits that tell its settings and seed from all others."""
        return digest({"fields": self.fields, "seed": self.seed})

    @property
    def model_key(self) -> str | None:
        """As many digits for what its warm start says; `None` for a run without one."""
        return digest(self.fields[WARM_START]) if WARM_START in self.fields else None

    @property
    def name(self) -> str:
        """Its levels and seed in a line."""
        return ", ".join([*(f"{axis} {level}" for axis, level in self.levels.items()), f"seed {self.seed}"])


@dataclass(frozen=True)
class LargerScale:
    """How the same grid runs on GPUs: at the paper's size, or with a model of 0.5B on one GPU.

    Args:
        base: Files of settings in place of the experiment's.
        launch: File of `accelerate launch --config_file`.
        processes: For `--num_processes`.
        fields: Settings on top of those files.
        skip: Combinations of levels that are left out at that size, beside the experiment's.
        seeds: How many seeds, the first ones; by default all.
    """

    base: tuple[Path, ...]
    launch: Path
    processes: int
    fields: Fields = field(default_factory=dict)
    skip: tuple[dict[str, str], ...] = ()
    seeds: int | None = None


@dataclass(frozen=True)
class Experiment:
    """What an experiment's file says.

    Args:
        id: Short name, that of the file.
        claim: What it puts to the test, in one sentence.
        source: Table or figure that the claim is from.
        base: Files of settings, of which the last one that has a setting says.
        seeds: One run of each run for each.
        checks: What decides, as `research.checks` reads it.
        settings_fixed: The day on which settings and checks were fixed, before any of its runs ran.
        paper: What the paper reports, in a sentence.
        fields: Settings on top of `base`.
        axes: The grid: axis -> level -> settings.
        level_files: Of levels that have files of settings besides, by scale: scale -> axis -> level -> files. They
            come after `base` and before all other settings, those of the last axis first.
        skip: Combinations of levels that are left out.
        retired: Combinations of levels with settings that no longer exist. Their stored runs are analysed; none is
            trained.
        quick: Settings on top of all others for a quick look, with the first seed alone.
        larger: The same on GPUs, by scale: `middle_scale` and `paper_scale` of the file.
        figures: What shows the claim, as `research.figures` reads it.
        note: What else a reader of the results must know.
        flaw: Why its runs cannot decide the claim, if they cannot; there is no verdict then.
        page: Whether it has a page of results, and not just a line on the first one.
        others: The experiments of `runs_of`, whose runs are this one's.
        path: The file.
    """

    id: str
    claim: str
    source: str
    base: tuple[Path, ...]
    seeds: tuple[int, ...]
    checks: tuple[Mapping[str, Any], ...]
    settings_fixed: date
    paper: str = ""
    fields: Fields = field(default_factory=dict)
    axes: dict[str, dict[str, Fields]] = field(default_factory=dict)
    level_files: Mapping[str, Mapping[str, Mapping[str, tuple[Path, ...]]]] = field(default_factory=dict)
    skip: tuple[dict[str, str], ...] = ()
    retired: tuple[dict[str, str], ...] = ()
    quick: Fields = field(default_factory=dict)
    larger: Mapping[str, LargerScale] = field(default_factory=dict)
    figures: tuple[Mapping[str, Any], ...] = ()
    note: str = ""
    flaw: str = ""
    page: bool = True
    others: tuple["Experiment", ...] = ()
    path: Path = Path()
    overrides: Fields = field(default_factory=dict)

    def settings(self, scale: str = "tiny", levels: Mapping[str, str] | None = None) -> Fields:
        """What all runs begin with, or those of some levels.

        Raises:
            ValueError: If the experiment has no such scale.
        """
        if scale not in SCALES:
            raise ValueError(f"scale={scale!r} is not supported; allowed values: {', '.join(SCALES)}.")
        if self.others:
            return {}
        files = self.level_files.get(scale, {})
        last_first = reversed(list((levels or {}).items()))
        further = [read_fields(one) for axis, level in last_first for one in files.get(axis, {}).get(level, ())]
        if scale == "tiny":
            return merged([*map(read_fields, self.base), *further, self.fields])
        if scale not in self.larger:
            raise ValueError(f"{self.path}: scale={scale!r} needs {scale}_scale, which the file does not have.")
        return merged([*map(read_fields, self.larger[scale].base), *further, self.larger[scale].fields])

    def planned_runs(self, quick: bool = False, scale: str = "tiny") -> list[PlannedRun]:
        """All of them, seed by seed; within one the first axis changes fastest, so that what is compared runs side by
        side."""
        if self.others:
            return list(
                {planned.key: planned for one in self.others for planned in one.planned_runs(quick, scale)}.values()
            )
        grid = [
            dict(reversed(list(zip(reversed(self.axes), levels, strict=True))))
            for levels in product(*reversed(self.axes.values()))
        ]
        larger = self.larger.get(scale)
        skip = (*self.skip, *(larger.skip if larger else ()))
        if quick or scale != "tiny" or self.overrides:
            skip += self.retired  # no such run is stored
        grid = [levels for levels in grid if not _is_among(levels, skip)]
        seeds = self.seeds[: 1 if quick else larger.seeds if larger else None]
        last = [self.quick if quick else {}, self.overrides]
        settings = []
        for levels in grid:
            own = [self.axes[axis][level] for axis, level in levels.items()]
            settings.append(merged([self.settings(scale, levels), *own, *last]))
        for one in settings:
            if WARM_START in one and "model" in one:
                raise ValueError(f"{self.path}: model must be left out beside {WARM_START}, which makes it.")
            if not str(one.get("max_steps", 0)).lstrip("-").isdecimal():
                raise ValueError(f"{self.path}: max_steps must be a whole number, got {one['max_steps']!r}")
            if one.get("snr_dynamic_sampling_rounds") and one.get("snr_pilot_generations") is None:
                raise ValueError(
                    f"{self.path}: snr_dynamic_sampling_rounds={one['snr_dynamic_sampling_rounds']} needs "
                    "snr_pilot_generations beside it, since stored runs without it sampled whole groups; allowed: 0, "
                    "or how many are sampled first."
                )
        return [
            PlannedRun(one, seed, levels, _is_among(levels, self.retired))
            for seed in seeds
            for levels, one in zip(grid, settings, strict=True)
        ]


def read_experiment(path: Path, overrides: Fields | None = None, above: tuple[Path, ...] = ()) -> Experiment:
    """The experiment of a file.

    Args:
        path: The file; those it names are relative to it.
        overrides: Settings on top of all others, to try it.
        above: The files that have its runs through their `runs_of`.

    Raises:
        ValueError: If the file is not as it should be; the message names file, field, value and what is allowed.
        OSError: If it, or a file that it names, cannot be read.
    """
    read = _check_mapping(read_yaml(path), path, "")
    allowed = {one.name for one in fields(Experiment)} - {"path", "overrides", "others", "level_files", "larger"}
    allowed |= {"runs_of", *LARGER}
    own = ("axes", "base", "fields", *LARGER, "quick", "retired", "seeds", "skip") if "runs_of" in read else ()
    _check_names(read, allowed - set(own), path, "")
    required = ("id", "claim", "source", "seeds", "checks", "settings_fixed")
    _check_required(read, [name for name in required if name not in own], path, "")
    others = tuple(read_experiment(one, overrides, (*above, path)) for one in _others(read, path, above))
    for name in ("id", "claim", "source", "paper", "note", "flaw"):
        if not isinstance(read.get(name, ""), str):
            raise ValueError(f"{path}: {name} must be a text, got {read[name]!r}")
    if read.get("page", True) is not True and not (read["page"] is False and read.get("flaw")):
        raise ValueError(f"{path}: page must be left out, or false beside a flaw, got {read['page']!r}")
    if read["id"] != path.stem:
        raise ValueError(f"{path}: id must be the name of the file, {path.stem!r}, got {read['id']!r}")
    if type(read["settings_fixed"]) is not date:
        raise ValueError(f"{path}: settings_fixed must be a day such as 2026-01-31, got {read['settings_fixed']!r}")
    axes: dict[str, dict[str, Fields]] = {}
    files: dict[str, dict[str, dict[str, tuple[Path, ...]]]] = {scale: {} for scale in SCALES}
    for axis, levels in _check_mapping(read.get("axes", {}), path, "axes").items():
        named = {
            _level(level, path, f"axes.{axis}"): dict(_check_mapping(own, path, f"axes.{axis}.{level}"))
            for level, own in _check_mapping(levels, path, f"axes.{axis}").items()
        }
        for scale, name in (("tiny", "base"), ("paper", "paper_base")):
            files[scale][str(axis)] = {
                level: _files(own.pop(name), path, f"axes.{axis}.{level}.{name}")
                for level, own in named.items()
                if name in own
            }
        files["middle"] = files["paper"]
        axes[str(axis)] = {level: _fields(own, path, f"axes.{axis}.{level}") for level, own in named.items()}
    known = dict(axes)
    for axis, levels in (item for one in others for item in one.axes.items()):  # checks name what all of them have
        known[axis] = {**known.get(axis, {}), **levels}

    def gridded(name: str) -> Iterable[dict[str, Any]]:
        return (_on_grid(one, known, path, f"{name}[{n}]") for n, one in enumerate(_list_at(read, name, path)))

    if empty := [axis for axis, levels in axes.items() if not levels]:
        raise ValueError(f"{path}: axes.{empty[0]} must have at least one level, got none")
    if not others and not any(axes[axis].keys() == named.keys() for axis, named in files["tiny"].items()):
        _check_required(read, ("base",), path, "")
    experiment = Experiment(
        id=read["id"],
        claim=read["claim"],
        source=read["source"],
        paper=read.get("paper", ""),
        base=_files(read["base"], path, "base") if "base" in read else (),
        seeds=max((one.seeds for one in others), key=len) if others else _seeds(read["seeds"], path),
        checks=tuple(gridded("checks")),
        settings_fixed=read["settings_fixed"],
        fields=_fields(read.get("fields", {}), path, "fields"),
        axes=axes,
        level_files=files,
        skip=_combinations(read, axes, path, "skip"),
        retired=_combinations(read, axes, path, "retired"),
        quick=_fields(read.get("quick", {}), path, "quick"),
        larger=others[0].larger if others else _larger_scales(read, axes, path),
        figures=tuple(gridded("figures")),
        note=read.get("note", ""),
        flaw=read.get("flaw", ""),
        page=read.get("page", True),
        others=others,
        path=path,
        overrides=_fields(overrides or {}, path, "set"),
    )
    if not replace(experiment, overrides={}).planned_runs():  # overrides are for the scale that is then run
        raise ValueError(f"{path}: skip leaves no run.")
    return experiment


def read_experiments(paths: Iterable[Path], overrides: Fields | None = None) -> list[Experiment]:
    """Several of them.

    Raises:
        ValueError: As `read_experiment`, and if two have the same id.
    """
    experiments = [read_experiment(path, overrides) for path in paths]
    seen: dict[str, Path] = {}
    for one in experiments:
        if one.id in seen:
            raise ValueError(f"{one.path}: id={one.id!r} is that of {seen[one.id]}, too; allowed: one file an id.")
        seen[one.id] = one.path
    return experiments


def question(check: Mapping[str, Any]) -> str:
    """What a check asks, whatever its name and whether or not it is primary: alike for checks that ask alike."""
    of_its_rank = ("name", "primary", "true_effect", "beside")  # the last one in records of old
    return json_text(as_stored({name: value for name, value in check.items() if name not in of_its_rank}))


def _fields(value: Any, path: Path, where: str) -> Fields:
    """Settings of an experiment's own."""
    own = dict(_check_mapping(value, path, where))
    if taken := sorted(OF_THE_RUNNER & own.keys()):
        raise ValueError(
            f"{path}: {where}.{taken[0]} is set by the runner; allowed: arguments of `ragen2-trl train` "
            f"other than {', '.join(sorted(OF_THE_RUNNER))}."
        )
    _check_mapping(own.get("env_args", {}), path, f"{where}.env_args")
    check_unset(own, f"{path}: {where}.")
    return with_warm_start(own, path)


def _combinations(read: Mapping[str, Any], axes: dict[str, dict[str, Fields]], path: Path, where: str) -> Any:
    """Combinations of levels, each of some axes or of all."""
    listed = enumerate(_list_at(read, where.rpartition(".")[2], path))
    return tuple(_levels(_check_mapping(one, path, f"{where}[{n}]"), axes, path, f"{where}[{n}]") for n, one in listed)


def _is_among(levels: Mapping[str, str], combinations: Iterable[Mapping[str, str]]) -> bool:
    return any(one.items() <= levels.items() for one in combinations)


def _larger_scales(
    experiment: Mapping[str, Any], axes: dict[str, dict[str, Fields]], path: Path
) -> dict[str, LargerScale]:
    found = {}
    for name in LARGER:
        if experiment.get(name) is None:
            continue
        read = _check_mapping(experiment[name], path, name)
        _check_names(read, {one.name for one in fields(LargerScale)}, path, f"{name}.")
        _check_required(read, ("base", "launch", "processes"), path, f"{name}.")
        for number in ("processes", *(["seeds"] if "seeds" in read else [])):
            if type(read[number]) is not int or read[number] <= 0:
                raise ValueError(f"{path}: {name}.{number} must be a whole number above 0, got {read[number]!r}")
        (launch,) = _files([read["launch"]], path, f"{name}.launch")
        found[name.removesuffix("_scale")] = LargerScale(
            base=_files(read["base"], path, f"{name}.base"),
            launch=launch,
            processes=read["processes"],
            fields=_fields(read.get("fields", {}), path, f"{name}.fields"),
            skip=_combinations(read, axes, path, f"{name}.skip"),
            seeds=read.get("seeds"),
        )
    return found


def _others(read: Mapping[str, Any], path: Path, above: tuple[Path, ...]) -> list[Path]:
    """The files of `runs_of`, none of which may lead back to this one."""
    names = _list_at(read, "runs_of", path)
    if not names and "runs_of" in read:
        raise ValueError(f"{path}: runs_of must name at least one experiment, got []")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not path.with_name(f"{name}.yaml").is_file():
            raise ValueError(f"{path}: runs_of must name experiments beside this one, got {name!r}")
        if path.with_name(f"{name}.yaml") in (path, *above):
            raise ValueError(f"{path}: runs_of must name experiments without this one's runs, got {name!r}")
    return [path.with_name(f"{name}.yaml") for name in names]


def _files(value: Any, path: Path, where: str) -> tuple[Path, ...]:
    names = _listed(value)
    if not names or not all(isinstance(one, str) for one in names):
        raise ValueError(f"{path}: {where} must name files, relative to this one, got {value!r}")
    files = tuple(Path(os.path.normpath(path.parent / one)) for one in names)
    if missing := [str(one) for one in files if not one.is_file()]:
        raise ValueError(f"{path}: {where} names {missing[0]}, which does not exist.")
    return files


def _seeds(value: Any, path: Path) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
    if not whole or not value or len(set(value)) < len(value):
        raise ValueError(f"{path}: seeds must be a list of different whole numbers, got {value!r}")
    return tuple(value)


def _level(level: Any, path: Path, where: str) -> str:
    if level is None or isinstance(level, bool):
        raise ValueError(f"{path}: {where} has the level {level!r}, which YAML makes of words such as off: quote it.")
    return str(level)


def _levels(value: Mapping[Any, Any], axes: Mapping[str, Mapping[str, Any]], path: Path, where: str) -> dict[str, str]:
    """Axis -> level, both of the grid."""
    _check_names(value, set(axes), path, f"{where}.")
    levels = {axis: _level(level, path, f"{where}.{axis}") for axis, level in value.items()}
    for axis, level in levels.items():
        if level not in axes[axis]:
            raise ValueError(f"{path}: {where}.{axis} must be one of {list(axes[axis])}, got {level!r}")
    return levels


def _on_grid(value: Any, axes: Mapping[str, Mapping[str, Any]], path: Path, where: str) -> dict[str, Any]:
    """A check or a figure, whose axes and levels are of the grid."""
    read = dict(_check_mapping(value, path, where))
    for name in ("of", "against", "where", "without", "target"):
        if name in read and (name != "target" or isinstance(read[name], Mapping)):  # a target may be a number
            read[name] = _levels(_check_mapping(read[name], path, f"{where}.{name}"), axes, path, f"{where}.{name}")
    for name in ("axis", "lines", "rows", "columns", "marks"):
        for axis in _listed(read.get(name, [])):
            if axis not in list(axes):  # whatever YAML made of it
                raise ValueError(f"{path}: {where}.{name} must be one of {list(axes)}, got {axis!r}")
    if isinstance(read.get("axis"), list):
        raise ValueError(f"{path}: {where}.axis must be one of {list(axes)}, got {read['axis']!r}")
    for level in axes[read["axis"]] if "axis" in read else ():
        try:
            float(level)
        except ValueError:
            raise ValueError(f"{path}: {where}.axis must have numbers for levels, got {level!r}") from None
    return read


# Values of a file, and errors that name file, place, value and what is allowed


def _listed(value: Any) -> list[Any]:
    """A list as it is, and another value as the only one of a list."""
    return value if isinstance(value, list) else [value]


def _check_mapping(value: Any, path: Path, where: str) -> Mapping[Any, Any]:
    """The value, if it is a mapping; `where` is empty for the whole file."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: {where or 'all of it'} must be a mapping, got {value!r}")
    return value


def _list_at(read: Mapping[str, Any], name: str, path: Path) -> list[Any]:
    """The list of that name, empty where there is none."""
    value = read.get(name, [])
    if not isinstance(value, list):
        raise ValueError(f"{path}: {name} must be a list, got {value!r}")
    return value


def _check_names(read: Mapping[Any, Any], allowed: Iterable[str], path: Path, where: str) -> None:
    """Raise a `ValueError` for a name that is not among these."""
    if unknown := [str(name) for name in read if name not in set(allowed)]:
        raise ValueError(f"{path}: {where}{unknown[0]} is not known; allowed: {', '.join(sorted(allowed))}.")


def _check_required(read: Mapping[str, Any], names: Iterable[str], path: Path, where: str) -> None:
    """Raise a `ValueError` for a name that is not there."""
    if missing := [name for name in names if name not in read]:
        raise ValueError(f"{path}: {where}{missing[0]} is missing; required: {', '.join(names)}.")
