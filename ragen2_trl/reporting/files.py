"""The files of a run's folder: their names, and how they are read and written."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Names of the parts of a run's folder. What begins with an underscore is left out when transformers uploads it:
# measurements hold prompts and completions word by word.
DIAGNOSTICS, MEASUREMENTS = "diagnostics", "_measurements"
STATE_FILE, RUN_FILE = "trainer_state.json", "run.json"
HISTORY_FILE = "log_history.json"  # of `ragen2-trl train`, also after Ctrl-C
EVALUATIONS = {when: f"evaluation_{when}.json" for when in ("before", "after")}
# What says how a training ended, and is of another one when training begins.
OUTCOMES = (HISTORY_FILE, "summary.json", EVALUATIONS["after"])

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
    except (OSError, ValueError):
        return None
    return content if isinstance(content, kind) else None


def write_whole(path: Path, text: str) -> None:
    """A kill leaves the former file or this one, never half of it."""
    replace_whole(path, lambda unfinished: unfinished.write_text(text))


def replace_whole(path: Path, write: Callable[[Path], object]) -> None:
    """The same for a file that `write` writes."""
    unfinished = path.with_name(f".{path.name}")
    write(unfinished)
    os.replace(unfinished, path)
