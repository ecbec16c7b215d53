"""The one reader of completions: what TRL, verl, this package or anybody has saved, as rows of the same columns.

Files may be anybody's. Nothing is unpickled or evaluated, a few bytes of Parquet may not stand for more rows than fit
into memory, and what is wrong is said in one line that names file, row and column.
"""

import csv
import json
import math
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from ragen2_trl.columns import GENERATION, SUCCESS
from ragen2_trl.record.checks import MAX_STEP
from ragen2_trl.record.files import MEASUREMENTS, STATE_FILE, measured_step, read_text
from ragen2_trl.record.group_rewards import FILE as GROUP_REWARDS
from ragen2_trl.text import check_text_or_messages

MAX_ROWS = 2_000_000  # of a file
MAX_BYTES = 2 * 2**30  # of the values of a Parquet file, as they are in memory
MAX_LINE = 2**24  # characters of a line of text
BATCH = 256  # rows of Parquet that are decoded before it is looked how large they are

TABLES, LINES, SHEETS = (".parquet",), (".jsonl", ".json"), (".csv",)
# Beginnings of the names of other tables beside completions: episodes, and the control of a diagnosis.
OTHERS = ("evaluation_", "train_", "completions_control")
# What a column is called, by TRL and by verl's rollout dumps.
ALIASES = {"prompt": ("prompt", "input"), "completion": ("completion", "output"), "reward": ("reward", "score")}
NO_REWARDS = ("step", "advantage", "group", SUCCESS, "clipped", GENERATION)
ALLOWED = (
    "the output_dir of a TRL run with log_completions=True, a folder of *.parquet, *.jsonl or *.csv, or a "
    "*.parquet, *.jsonl, *.json or *.csv file with prompt and completion (input and output in verl's dumps)"
)


class NoCompletionsError(ValueError):
    """A folder holds no completions, or a file something else."""


Row = dict[str, Any]
"""`prompt` and `completion` (text, or messages as in TRL), `step` and `generation` (whole numbers, or `None`), and the
other columns of the file under their own names."""


def find_files(path: Path) -> list[Path]:
    """Files of completions, by step: a file itself, or those of a run's folder or of a folder of such files.

    Raises:
        ValueError: If there is no file or folder, or a file of another form.
    """
    if path.is_file():
        if path.suffix not in TABLES + LINES + SHEETS or path.name == STATE_FILE:
            raise NoCompletionsError(f"{str(path)!r} has an unknown form; allowed: {ALLOWED}")
        return [path]
    if not path.is_dir():
        raise ValueError(f"{str(path)!r} is not a file or folder; allowed: {ALLOWED}")
    is_recorded = (path / MEASUREMENTS / GROUP_REWARDS).is_file()  # other tables beside a record are somebody else's
    for folder in (path / "completions", *(() if is_recorded else (path,))):
        for suffix in (".parquet", ".jsonl", ".csv"):
            files = [one for one in folder.glob(f"*{suffix}") if one.is_file() and not one.name.startswith(OTHERS)]
            if files:
                return sorted(files, key=lambda file: (measured_step(file) or 0, file.name))
    return []


def read_rows(path: Path, notes: list[str] | None = None, pictures: bool = True) -> Iterator[Row]:
    """Rows of completions in the order of their files, decoded as they are asked for.

    Args:
        path: See `find_files`.
        notes: Takes in that the last line is half written; without it, that is an error, too.
        pictures: Whether messages may have parts that are no text.

    Raises:
        ValueError: If there is no file, or one holds something else or more than the limits allow.
        OSError: If a file cannot be read.
    """
    for file in find_files(path):
        yield from _rows_of(file, notes, pictures)


def read_table(file: Path, notes: list[str] | None = None, pictures: bool = True) -> list[Row]:
    """The rows of one file; see `read_rows`.

    Raises:
        ValueError: Also if it has no row.
    """
    rows = list(read_rows(file, notes, pictures))
    if not rows:
        raise ValueError(f"completions must hold at least one row, got none in {file.name}")
    return rows


def reward_columns(row: Row, functions: Container[str] = ()) -> list[str]:
    """The columns that hold rewards: those of these functions, else their sum, else all numbers, else success."""
    # A log's names are sorted; columns stand in the order of TRL's `reward_funcs`, and so of its `reward_weights`.
    named = [name for name in row if name in functions]
    total = [name for name in ALIASES["reward"] if name in row][:1]
    numbers = [name for name, value in row.items() if name not in NO_REWARDS and type(value) in (int, float)]
    return named or total or numbers or [name for name in (SUCCESS,) if name in row]


def number(name: str, value: Any, where: str) -> float:
    """A finite number, or NaN where there is none.

    Raises:
        ValueError: If it is something else; the message names the column and where it stands.
    """
    if value is None or value == "":
        return math.nan
    try:
        found = float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        found = None
    if found is None:
        raise ValueError(f"{_line(name)} must be a number, got {value!r:.60} in {where}")
    return found if math.isfinite(found) else math.nan


def json_lines(file: Path, notes: list[str] | None = None) -> Iterator[Row]:
    """The objects of a file of JSON, one a line; of a `.json` also those of one list.

    Args:
        file: In UTF-8, with or without a byte order mark.
        notes: See `read_rows`.

    Raises:
        ValueError: If it holds something else; one line that names file and row.
    """
    with file.open(encoding="utf-8-sig") as opened:
        lines = (line for line in _lines(opened, file) if line.strip())
        for place, line in enumerate(lines):
            if not place and file.suffix == ".json" and line.lstrip().startswith("["):
                yield from _list(file)
                return
            try:
                row = json.loads(line)
                if "\\ud" in line.lower():
                    json.dumps(row, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"row {place} of {file.name} must be text in UTF-8: {error.reason}") from error
            except (ValueError, RecursionError) as error:
                if notes is not None and place and not line.endswith("\n"):
                    notes.append(f"The last line of {file.name} is half written and is left out.")
                    return
                raise ValueError(f"row {place} of {file.name} must be an object of JSON in a line: {error}") from error
            yield _object(row, place, file)


def _rows_of(file: Path, notes: list[str] | None, pictures: bool) -> Iterator[Row]:
    by_name = measured_step(file) if file.suffix in LINES else None  # of verl's dumps; TRL's tables have a column
    read = _parquet if file.suffix in TABLES else _sheet if file.suffix in SHEETS else json_lines
    for place, row in enumerate(read(file, notes)):
        where = f"row {place} of {file.name}"
        if place >= MAX_ROWS:
            raise ValueError(f"{file.name} must have at most {MAX_ROWS} rows, got more")
        for name in ("prompt", "completion"):
            column = next((one for one in ALIASES[name] if one in row), None)
            if column is None:
                columns = _line(", ".join(map(str, row)))
                raise NoCompletionsError(f"{where} must have {name}, got the columns {columns}")
            value = row.pop(column)
            check_text_or_messages(name, value, where, pictures)
            row[name] = value if isinstance(value, str) else list(map(_without_empty, value))
        row["step"] = _step(row.get("step"), by_name, where)
        generation = row.get(GENERATION)
        row[GENERATION] = generation if isinstance(generation, int) and abs(generation) <= MAX_STEP else None
        yield row


def _without_empty(message: Row) -> Row:
    """In Parquet messages have the keys of all of them, empty where a message has none."""
    return {key: value for key, value in message.items() if value is not None}


def _step(given: Any, otherwise: int | None, where: str) -> int | None:
    if given is None:
        return otherwise
    value = number("step", given, where)
    if isinstance(given, bool) or value % 1 or not abs(value) <= MAX_STEP:
        raise ValueError(f"step must be a whole number, got {given!r:.60} in {where}")
    return int(value)


def _parquet(file: Path, notes: list[str] | None) -> Iterator[Row]:
    size = 0
    try:
        table = pq.ParquetFile(file)  # its footer alone
        if table.metadata.num_rows > MAX_ROWS:
            raise ValueError(f"rows must be at most {MAX_ROWS}, got {table.metadata.num_rows}")
        for batch in table.iter_batches(BATCH):
            size += batch.nbytes
            if size > MAX_BYTES:
                raise ValueError(f"values must have at most {MAX_BYTES} bytes, got more")
            yield from batch.to_pylist()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name} must hold text in UTF-8: {error}") from error
    except (pa.ArrowException, OSError, OverflowError, RuntimeError, ValueError) as error:  # half a file, among others
        raise OSError(f"{file.name} cannot be read as Parquet: {_line(str(error))}") from error


def _list(file: Path) -> Iterator[Row]:
    """Rows of a file that is one list."""
    try:
        rows = json.loads(read_text(file))
        json.dumps(rows, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise NoCompletionsError(f"{file.name} must be a list of objects of JSON: {error}") from error
    yield from (_object(row, place, file) for place, row in enumerate(rows))


def _object(row: Any, place: int, file: Path) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"row {place} of {file.name} must be an object of JSON, got {type(row).__name__}")
    return row


def _sheet(file: Path, notes: list[str] | None) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig", newline="") as opened:
        try:
            for place, row in enumerate(csv.DictReader(_lines(opened, file))):
                if None in row:
                    raise ValueError(f"row {place} of {file.name} must have as many values as the header, got more")
                yield {name: _cell(name, value) for name, value in row.items()}
        except csv.Error as error:
            raise ValueError(f"{file.name} cannot be read as CSV: {error}") from error


def _cell(name: str, text: str | None) -> Any:
    """A cell of a sheet: text in the columns of texts, elsewhere a number where it is one."""
    if text is None or name in (*ALIASES["prompt"], *ALIASES["completion"]):
        return text
    try:
        value = float(text)
    except ValueError:
        return text or None
    return int(value) if value.is_integer() and abs(value) <= MAX_STEP else value


def _lines(opened: TextIO, file: Path) -> Iterator[str]:
    try:
        while line := opened.readline(MAX_LINE):
            if len(line) == MAX_LINE and not line.endswith("\n"):
                raise ValueError(f"a row of {file.name} must have at most {MAX_LINE} characters")
            yield line
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name} must hold text in UTF-8: {error}") from error


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
