"""Logs of trainers, ours and other people's, as rows: files of JSON, tables, trackers' files, and console output."""

import codecs
import csv
import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from ragen2_trl.messages import counted, printable
from ragen2_trl.record.checks import check_history
from ragen2_trl.record.completions import read_completion_log
from ragen2_trl.record.files import HISTORY_FILE, MAX_BYTES, STATE_FILE, read_text
from ragen2_trl.record.run import NoLogError, read_run
from ragen2_trl.record.settings import steps_per_generation

ALLOWED = (
    f"the folder of a run, {STATE_FILE}, {HISTORY_FILE}, rows as lines of JSON, a CSV with a column of steps, a file "
    "of TensorBoard or Trackio, or the console output of TRL, verl or OpenRLHF"
)
# Logs in a folder, by preference: ms-swift's, W&B's copy of the console, a saved console, TensorBoard's, Trackio's.
IN_FOLDERS = ("logging.jsonl", "**/files/output.log", "*.log", "*.out", "**/events.out.tfevents*", "*.db")
HOW_TO_LOG = (
    "TRL saves its log at checkpoints: set save_steps, or write the console output to a file (python train.py 2>&1 | "
    "tee train.log) and give that file"
)
MAX_LINE = 2**20  # bytes of a printed row, which takes some 10,000
_BLOCK = 2**16  # bytes read at a time
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_NUMBER = r"-?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|inf|nan)"
# verl: `step:N - key:value - …`, where NumPy may have printed its type as well.
_VERL = re.compile(r"(?:^|\s)step:(\d{1,12}) - ")
_VERL_PAIR = re.compile(rf"([\w@/.\-]{{1,200}}):(?:np\.\w+\()?({_NUMBER})", re.ASCII)
# transformers: a dictionary as Python prints it, since its fifth release with numbers in quotes; OpenRLHF names the
# step before it.
_OPENRLHF = re.compile(r"Global step (\d{1,12})\b")
_PRINTED_PAIR = re.compile(rf"'([\w@/.\- ]{{1,200}})': '?({_NUMBER}|None)\b", re.ASCII)
_TRAINING = {"epoch", "learning_rate", "reward", "grad_norm"}  # a dictionary with one of these keys is a row
# tqdm's bar of training, which has no description.
_BAR = re.compile(r"(?:^|\]:?)\s*\d{1,3}%\|[^|]{0,80}\|\s*(\d{1,12})/(\d{1,12}) \[")
_STEPS = ("step", "train/global_step", "global_step", "Step", "_step")  # the first that is there
_OF_WANDB = re.compile(r"(?:(.*) - )?(.+?)(__MIN|__MAX)?")  # a column of an export: "<run> - <key>", and its bounds


@dataclass(frozen=True)
class Log:
    """The rows of a log.

    Args:
        rows: With `step` where the log tells it.
        notes: Sentences about what was left out or assumed.
        steps_per_generation: Optimizer steps that train on one generation; `None` where the log does not tell.
    """

    rows: list[dict[str, Any]]
    notes: tuple[str, ...] = ()
    steps_per_generation: Fraction | None = None


def read_folder(folder: Path) -> Log:
    """The rows of a run's folder: of its newest state or, before its first checkpoint, of a log file in it, or else
    what its completions or recorded rewards tell.

    Raises:
        ValueError: If it holds none of these, or a state with a wrong value; the message is one line.
        OSError: If a file cannot be read.
    """
    left, each = [], None
    try:
        run = read_run(folder)
        each = steps_per_generation(run.settings)
        if run.log_history:
            return Log(run.log_history, steps_per_generation=each)
    except NoLogError:
        pass
    for pattern in IN_FOLDERS:
        files = filter(Path.is_file, folder.glob(pattern))
        for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
            try:
                log = read_log(path)
            except (ValueError, OSError) as error:
                left.append(str(error))
                continue
            notes = (f"No checkpoint has log rows yet: {path.relative_to(folder)} is read.", *log.notes, *left)
            return Log(log.rows, notes, each)
    try:
        rows = read_completion_log(folder).rows
    except ValueError as error:
        shown = " ".join([*left, *([str(error)] if (folder / "completions").is_dir() else [])])
        raise ValueError(f"{str(folder)!r} holds no log rows. {HOW_TO_LOG}. {shown}".rstrip()) from error
    said = f"No log rows are saved yet: rewards of {counted(len(rows), 'step')} are read from its completions."
    return Log(rows, (f"{said} For length, entropy and valid answers: {HOW_TO_LOG}.", *left), each)


def read_log(path: Path) -> Log:
    """The rows of a log of TRL, ms-swift, verl, OpenRLHF, prime-rl or RAGEN.

    Keys are those of the trainer: what transformers adds for a tracker ("train/reward", "eval/reward") is taken off.

    Args:
        path: A file, by its content: see `ALLOWED`.

    Raises:
        ValueError: If it is none of these; the message is one line.
        OSError: If it cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is not a file or folder; allowed: {ALLOWED}, or the folder of a run.")
    with path.open("rb") as file:
        start = file.read(64)
    is_json = re.match(rb'\s*(\{\s*"|\[\s*\{)', start.removeprefix(codecs.BOM_UTF8))
    notes: list[str] = []
    is_table = path.name.startswith("events.out.tfevents") or start.startswith(b"SQLite format 3\0")
    if is_table and (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{str(path)!r} has {size} bytes; allowed: {MAX_BYTES}.")
    if path.name.startswith("events.out.tfevents"):
        rows = _read_tensorboard(path)
    elif start.startswith(b"SQLite format 3\0"):
        rows = _read_trackio(path, notes)
    elif path.suffix == ".csv":
        rows = _read_csv(path)
    elif is_json and path.suffix != ".log":
        rows = _read_json(path)
    else:
        rows = _read_console(path, notes)
    if not rows:
        raise ValueError(f"{str(path)!r} holds no log rows; allowed: {ALLOWED}.")
    rows = _with_own_keys(rows)
    check_history(rows, str(path), "rows")
    return Log(rows, tuple(notes))


def _read_json(path: Path) -> list[dict[str, Any]]:
    try:
        rows = _rows(_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as JSON: {' '.join(str(error).split())[:200]}") from error
    check_history(rows, str(path), "log_history")
    return [_with_step(row) for row in rows or () if isinstance(row, dict)]


def _text(path: Path) -> str:
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{str(path)!r} has {size} bytes; allowed: {MAX_BYTES}.")
    return read_text(path)


def _rows(text: str) -> Any:
    """The rows of JSON, or of lines of JSON where the first line is an object of its own."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        if not error.msg.startswith("Extra data") or len(lines) < 2:
            raise
        content = []
        for number, line in lines:
            try:
                content.append(json.loads(line))
            except json.JSONDecodeError as wrong:
                raise ValueError(f"line {number} is not valid JSON: {wrong.msg}") from wrong
        # ms-swift ends with a summary that holds the rows again.
        content = [row for row in content if not (isinstance(row, Mapping) and "log_history" in row)]
    if isinstance(content, Mapping):
        content = content.get("log_history", [content])
    if not isinstance(content, list):
        return content
    # verl's file logger keeps the values of a step under `data`.
    return [
        {"step": row.get("step"), **row["data"]}
        if isinstance(row, Mapping) and isinstance(row.get("data"), Mapping)
        else row
        for row in content
    ]


def _with_step(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its `step`, which ms-swift writes as `"global_step/max_steps": "5/400"` or `"iteration": "5/400"`."""
    places = (re.fullmatch(r"(\d{1,12})/\d+", str(row.get(key))) for key in ("global_step/max_steps", "iteration"))
    place = next((found for found in places if found), None)
    named = next((row[key] for key in _STEPS if isinstance(row.get(key), int | float)), None)
    step = int(place[1]) if place is not None else named
    return row if step is None else {**row, "step": step}


def _read_csv(path: Path) -> list[dict[str, Any]]:
    """A table with a column of steps and one for each key, as W&B exports a run."""
    lines = csv.DictReader(_text(path).splitlines())
    keys: dict[str, str] = {}  # by column
    runs = set()
    for column in lines.fieldnames or ():
        match = _OF_WANDB.fullmatch(column)
        if match is not None and not match[3]:
            keys[column] = match[2]
            runs.add(match[1])
    if len(named := sorted(runs - {None})) > 1:
        shown = ", ".join(repr(printable(name)[:80]) for name in named[:3])
        raise ValueError(f"{str(path)!r} holds {len(named)} runs ({shown}); export one run a file.")
    if not any(key in _STEPS for key in keys.values()):
        raise ValueError(f"{str(path)!r} has no column of steps; allowed: {', '.join(_STEPS)}.")
    try:
        rows = [
            {keys[column]: value for column in keys if (value := _number(line.get(column))) is not None}
            for line in lines
        ]
    except csv.Error as error:
        raise ValueError(f"{str(path)!r}, line {lines.line_num}: {error}.") from error
    return [_with_step(row) for row in rows]


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def _read_tensorboard(path: Path) -> list[dict[str, Any]]:
    """Scalars by step."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ValueError(f"{str(path)!r} is a TensorBoard file; reading it needs: pip install tensorboard") from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    rows: dict[int, dict[str, Any]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            rows.setdefault(event.step, {"step": event.step})[tag] = event.value
    return [rows[step] for step in sorted(rows)]


def _read_trackio(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The latest run of a project's database."""
    try:
        with closing(sqlite3.connect(f"file:{path.resolve()}?mode=ro", uri=True)) as database:
            found = database.execute(
                "SELECT run_name, COUNT(*) FROM metrics GROUP BY run_name ORDER BY MAX(timestamp) DESC"
            ).fetchall()
            if not found:
                return []
            name = found[0][0]
            lines = database.execute("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY step", [name])
            rows = [{**json.loads(metrics), "step": step} for step, metrics in lines]
    except (sqlite3.Error, ValueError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{str(path)!r} cannot be read as a Trackio database: {reason}.") from error
    if len(found) > 1:
        notes.append(f"Of {len(found)} runs the latest is read: {printable(str(name))[:80]}.")
    return [{key: value for key, value in row.items() if isinstance(value, int | float)} for row in rows]


def _with_own_keys(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with TRL's keys, where transformers wrote them for a tracker, or prime-rl has two shares for one."""
    if any("train/global_step" in row or "train/epoch" in row for row in rows):
        rows = [
            {re.sub("^eval/", "eval_", key.removeprefix("train/")): value for key, value in row.items()}
            for row in rows
        ]
    for row in rows:
        none, every = row.get("batch/solve_none"), row.get("batch/solve_all")
        if isinstance(none, int | float) and isinstance(every, int | float) and none + every <= 1:  # shares, no counts
            row["frac_reward_zero_std"] = none + every
    return rows


def _read_console(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Rows that a trainer printed, between progress bars and what else was printed."""
    too_long: list[int] = []
    rows: list[dict[str, Any]] = []
    step, total, latest = None, None, None
    for text in _lines(path, too_long):
        bar = _BAR.search(text)
        if bar is not None:
            total = total or bar[2]
            step = int(bar[1]) if bar[2] == total else step  # another bar is of an evaluation
        row = _printed(text)
        if row is None or row == latest:  # one row a node
            continue
        latest = row
        if "step" not in row and step is not None:
            row = {**row, "step": step}
        rows.append(row)
    if too_long:
        notes.append(f"{len(too_long)} lines of more than a megabyte were left out.")
    return _in_order(rows)


def _lines(path: Path, too_long: list[int]) -> Iterator[str]:
    """Lines without escapes; carriage returns of a progress bar end one, too."""
    rest, number, skips = b"", 0, False
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            *whole, rest = re.split(rb"[\r\n]", rest + block)
            for line in whole:
                number += 1
                if not skips:
                    yield _ESCAPES.sub("", line.decode("utf-8", errors="replace"))
                skips = False
            if len(rest) > MAX_LINE:
                too_long += [] if skips else [number + 1]
                rest, skips = b"", True
    if rest and not skips:
        yield _ESCAPES.sub("", rest.decode("utf-8", errors="replace"))


def _printed(text: str) -> dict[str, Any] | None:
    """The row in a line, if there is one."""
    if (row := _VERL.search(text)) is not None:
        pairs: Iterable[Any] = (_VERL_PAIR.match(part) for part in text[row.end() :].split(" - "))
        return {"step": int(row[1]), **{pair[1]: float(pair[2]) for pair in pairs if pair}}
    start = text.find("{'")
    if start < 0:
        return None
    pairs = _PRINTED_PAIR.finditer(text, start)
    found: dict[str, Any] = {pair[1]: float(pair[2]) for pair in pairs if pair[2] != "None"}
    if (place := _OPENRLHF.search(text[:start])) is not None:
        return {**found, "step": int(place[1])} if found else None
    is_row = not _TRAINING.isdisjoint(found) and "train_runtime" not in found
    if not is_row:
        return None
    place = re.search(r"'(?:global_step/max_steps|iteration)': '(\d{1,12})/", text[start:])
    return found if place is None else {**found, "step": int(place[1])}


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of training with a step each: a bar is drawn ten times a second, and may lag behind fast steps."""
    latest = None
    for row in rows:
        if "step" in row and "reward" in row:
            row["step"] += row["step"] == latest
            latest = row["step"]
    return rows
