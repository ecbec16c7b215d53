"""Logs of trainers, ours and other people's, as rows: TRL's JSON, or what verl and the paper's code print."""

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ragen2_trl.record.checks import check_history
from ragen2_trl.record.files import HISTORY_FILE, MAX_BYTES, STATE_FILE, read_text

ALLOWED = (
    f"{STATE_FILE}, {HISTORY_FILE}, rows as lines of JSON, or a console log with lines such as 'step:1 - key:0.5'"
)
MAX_LINE = 2**20  # bytes of a printed row, which takes some 10,000
_ESCAPES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
_ROW = re.compile(r"(?:^|\s)step:(\d{1,12}) - ")
# `key:value`, where NumPy may have printed its type as well, and a progress bar may follow without a space.
_PAIR = re.compile(r"([\w@/.\-]{1,200}):(?:np\.\w+\()?(-?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|inf|nan))", re.ASCII)


def read_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a log, and how many lines were too long to be read.

    Args:
        path: `trainer_state.json`, `log_history.json`, rows as lines of JSON (ms-swift's `logging.jsonl`), or the
            console log of verl or RAGEN, whose rows are printed as `step:N - key:value - …`.

    Raises:
        ValueError: If it is none of these; the message is one line.
        OSError: If it cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is no file; allowed: {ALLOWED}.")
    with path.open("rb") as file:
        is_json = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"[")
    if is_json and path.suffix != ".log":
        return _read_json(path), 0
    too_long: list[int] = []
    rows = list(_read_console(path, too_long))
    if not rows:
        raise ValueError(f"{str(path)!r} holds no log rows; allowed: {ALLOWED}.")
    return rows, len(too_long)


def _read_json(path: Path) -> list[dict[str, Any]]:
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{str(path)!r} has {size} bytes; allowed: {MAX_BYTES}.")
    try:
        text = read_text(path)
        rows = _rows(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as JSON: {' '.join(str(error).split())[:200]}") from error
    check_history(rows, str(path), "log_history")
    found = [_with_step(row) for row in rows or () if isinstance(row, dict)]
    if not found:
        raise ValueError(f"{str(path)!r} holds no log rows; allowed: {ALLOWED}.")
    return found


def _rows(text: str) -> Any:
    """The rows of JSON, or of lines of JSON where the first line is an object of its own."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        if not error.msg.startswith("Extra data") or len(lines) < 2:
            raise
        rows = []
        for number, line in lines:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as wrong:
                raise ValueError(f"line {number} holds no object of JSON: {wrong.msg}") from wrong
        # ms-swift ends with a summary that holds the rows again.
        return [row for row in rows if not (isinstance(row, Mapping) and "log_history" in row)]
    return content.get("log_history") if isinstance(content, Mapping) else content


def _with_step(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its `step`, which ms-swift writes as `"global_step/max_steps": "5/400"` or `"iteration": "5/400"`."""
    places = (re.fullmatch(r"(\d{1,12})/\d+", str(row.get(key))) for key in ("global_step/max_steps", "iteration"))
    place = next((found for found in places if found), None)
    return row if place is None or row.get("step") is not None else {**row, "step": int(place[1])}


def _read_console(path: Path, too_long: list[int]) -> Iterator[dict[str, Any]]:
    number = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE):
            number += 1
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                too_long.append(number)
                while (line := file.readline(MAX_LINE)) and not line.endswith(b"\n"):
                    pass
                continue
            if b"step:" not in line:
                continue
            text = _ESCAPES.sub(b"", line).decode("utf-8", errors="replace")
            if (row := _ROW.search(text)) is not None:
                pairs = (_PAIR.match(part) for part in text[row.end() :].split(" - "))
                yield {"step": int(row[1]), **{pair[1]: float(pair[2]) for pair in pairs if pair}}
