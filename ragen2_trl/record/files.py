"""The files of a run's folder have their names here, and are read and written here.

Whatever this package shows, it writes by `write_json`, `append_json` or `write_text`, which hide credentials; pictures
apart. What it reads back to go on from is written by `write_private`, as it is.
"""

import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ragen2_trl.redaction import MARKUP_ENDS, hide_credentials, without_credentials
from ragen2_trl.saved_state import SAFELY, replace_whole

# Names of the parts of a run's folder. What begins with an underscore is left out when transformers uploads it:
# measurements and episodes hold prompts and completions word by word.
DIAGNOSTICS, MEASUREMENTS, EPISODES = "diagnostics", "_measurements", "_episodes"
STATE_FILE, RUN_FILE = "trainer_state.json", "run.json"
DIAGNOSIS_FILE = "diagnosis.json"  # of `ragen2-trl diagnose`, whose folder has measurements beside it
HISTORY_FILE = "log_history.json"  # of `ragen2-trl train`, also after Ctrl-C
EVALUATIONS = {when: f"evaluation_{when}.json" for when in ("before", "after")}
# Beginnings of the names of files of episodes.
EPISODE_FILES = TRAINING, EVALUATION = "train", "evaluation"
# What says how a training ended, and is of another one when training begins.
OUTCOMES = (HISTORY_FILE, "summary.json", EVALUATIONS["after"])

# What reading a file may end with that is broken, or of another form: brackets nested without end, and numbers too
# large for a tensor, among them.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)

MAX_BYTES = 512 * 2**20  # of a file that is read whole

_AT_ONCE = getattr(os, "O_NONBLOCK", 0)  # not on Windows
_STEP = re.compile(r"[a-z]+_(\d+)")  # the name of a numbered file


def numbered(folder: Path, name: str, suffix: str, last: int) -> list[Path]:
    """The files `<name>_<step><suffix>` up to a step, in its order; later ones are of an earlier run."""
    found = [
        (int(match[1]), path) for path in folder.glob(f"{name}_*{suffix}") if (match := _STEP.fullmatch(path.stem))
    ]
    return [path for step, path in sorted(found) if step <= last]


def measured_step(path: Path) -> int | None:
    """The step that the name of a file ends with, such as `train_00010.jsonl` or verl's `10.jsonl`; `None` without."""
    match = re.search(r"(\d{1,12})$", path.stem)
    return match and int(match[1])


def read_json(path: Path, kind: type) -> Any:
    """`None` for a file that is not there, that a kill left half written, or that holds something else."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):  # brackets nested without end
        return None
    return content if isinstance(content, kind) else None


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, with or without a byte order mark.

    Raises:
        OSError: If it cannot be read, has more than `MAX_BYTES`, or is a pipe or a device, which may never end.
        UnicodeDecodeError: If it is other text.
    """
    # A pipe that nobody writes to would hold up an opening that waits.
    with os.fdopen(os.open(path, os.O_RDONLY | _AT_ONCE), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
            raise OSError(f"{str(path)!r} must be a file of at most {MAX_BYTES} bytes")
        return file.read(MAX_BYTES).decode("utf-8-sig")


def write_json(path: Path, value: Any, **options: Any) -> None:
    """Write a value without credentials as JSON; `options` are those of `json.dumps`."""
    _write_whole(path, json_text(value, **options))


def json_text(value: Any, **options: Any) -> str:
    """What `write_json` writes."""
    return json.dumps(without_credentials(value), **options) + "\n"


def append_json(path: Path, value: Any) -> None:
    """Add a value without credentials as a line of JSON; a kill may leave half of the last line."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | _AT_ONCE | SAFELY
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{str(path)!r} must be a file")
        file.write(json_text(value).encode())


def write_json_lines(path: Path, values: Iterable[Any]) -> None:
    """Write values without credentials as lines of JSON."""
    _write_whole(path, "".join(map(json_text, values)))


def write_text(path: Path, text: str) -> None:
    """Write HTML, SVG or Markdown without credentials."""
    _write_whole(path, hide_credentials(text, MARKUP_ENDS))


def write_private(path: Path, text: str) -> None:
    """Write what is read back, such as settings: as it is, so that nobody but its owner may read it."""

    replace_whole(path, lambda file: file.write(text.encode()), mode=0o600)


def unreadable(path: Path, error: Exception) -> str:
    """A file that cannot be read, in words."""
    return f"{path.name} cannot be read and is left out ({type(error).__name__}: {str(error)[:200]})."


def _write_whole(path: Path, text: str) -> None:
    """A kill leaves the former file or this one, never half of it."""
    if path.parts[:2] in (("/", "dev"), ("/", "proc")):  # such as /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    replace_whole(path, lambda file: file.write(text.encode()))
