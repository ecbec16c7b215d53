"""The files of a run's folder have their names here, and are read and written here.

Whatever this package shows, it writes by `write_json`, `append_json` or `write_text`, which hide credentials; pictures
apart. What it reads back to go on from is written by `write_private`, as it is.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ragen2_trl.redaction import MARKUP_ENDS, hide_credentials, without_credentials

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

UNFINISHED = ".unfinished."  # beginning of the names of files that are being written

_STEP = re.compile(r"[a-z]+_(\d+)")  # the name of a numbered file


def numbered(folder: Path, name: str, suffix: str, last: int) -> list[Path]:
    """The files `<name>_<step><suffix>` up to a step, in its order; later ones are of an earlier run."""
    found = [
        (int(match[1]), path) for path in folder.glob(f"{name}_*{suffix}") if (match := _STEP.fullmatch(path.stem))
    ]
    return [path for step, path in sorted(found) if step <= last]


def measured_step(path: Path) -> int | None:
    """The optimizer step of a numbered file, from its name; `None` for another file."""
    match = _STEP.fullmatch(path.stem)
    return match and int(match[1])


def read_json(path: Path, kind: type) -> Any:
    """`None` for a file that is not there, that a kill left half written, or that holds something else."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):  # brackets nested without end
        return None
    return content if isinstance(content, kind) else None


def write_json(path: Path, value: Any, **options: Any) -> None:
    """Write a value without credentials as JSON; `options` are those of `json.dumps`."""
    _write_whole(path, json_text(value, **options))


def json_text(value: Any, **options: Any) -> str:
    """What `write_json` writes."""
    return json.dumps(without_credentials(value), **options) + "\n"


def append_json(path: Path, value: Any) -> None:
    """Add a value without credentials as a line of JSON; a kill may leave half of the last line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json_text(value))


def write_json_lines(path: Path, values: Iterable[Any]) -> None:
    """Write values without credentials as lines of JSON."""
    _write_whole(path, "".join(map(json_text, values)))


def write_text(path: Path, text: str) -> None:
    """Write HTML, SVG or Markdown without credentials."""
    _write_whole(path, hide_credentials(text, MARKUP_ENDS))


def write_private(path: Path, text: str) -> None:
    """Write what is read back, such as settings: as it is, so that nobody but its owner may read it."""

    def write(unfinished: Path) -> None:
        unfinished.touch(0o600)
        unfinished.write_text(text, encoding="utf-8")

    replace_whole(path, write)


def unreadable(path: Path, error: Exception) -> str:
    """A file that cannot be read, in words."""
    return f"{path.name} cannot be read and is left out ({type(error).__name__}: {str(error)[:200]})."


def _write_whole(path: Path, text: str) -> None:
    """A kill leaves the former file or this one, never half of it."""
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    replace_whole(path, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))


def replace_whole(path: Path, write: Callable[[Path], object]) -> None:
    """The same for a file that `write` writes."""
    unfinished = path.with_name(f"{UNFINISHED}{os.getpid()}.{path.name}")  # another process may be writing it, too
    try:
        write(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Remove what kills have left of files of this name, or of any; for who knows that nobody is writing them."""
    for path in folder.glob(f"{UNFINISHED}*.{name}"):
        path.unlink(missing_ok=True)
