"""Files are written whole, and a saved state is checked before it is loaded, since files of a run may be anybody's.

A form is an annotation: a type, `form | None`, a list, tuple or dictionary of forms, a `TypedDict` or a dataclass.
"""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np
import torch
from torch import Tensor

IN_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Tensor: "a tensor",
    list: "a list",
    tuple: "a list",
    dict: "an object",
}
UNFINISHED = ".unfinished."  # beginning of the names of files that are being written
SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)  # neither is on Windows
REMEDY = "allowed: a checkpoint as it was written; resume from another one, or begin a new run"


def replace_whole(path: Path, write: Callable[[BinaryIO], object], mode: int = 0o666) -> None:
    """Write a file whole or not at all, as in a folder where others may have put links: none is followed.

    Args:
        path: Of the file; a link there is replaced.
        write: Gets the open file.
        mode: Of a new file, less what the process's mask takes.
    """
    # Nobody can have foreseen the name, and another process may be writing the file, too.
    unfinished = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}.{path.name}")
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, mode), "wb") as file:
            write(file)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Remove what kills have left of files of this name, or of any; for who knows that nobody is writing them."""
    for path in folder.glob(f"{UNFINISHED}*.{name}"):
        path.unlink(missing_ok=True)


def check_form(value: Any, form: Any, field: str) -> None:
    """Raise a `ValueError` of one line that names the first field of another form.

    Args:
        value: What was read.
        form: What it must be.
        field: Its name; of a whole file, the file's and a colon.

    >>> check_form({"steps": [1, 2]}, dict[str, list[int]], "run")
    >>> check_form({"steps": [1, "2"]}, dict[str, list[int]], "run")
    Traceback (most recent call last):
    ValueError: run.steps[1] must be a whole number, got '2'
    """
    origin, of = get_origin(form), get_args(form)
    if form is Any:
        return
    if origin in (Union, UnionType):
        if value is not None:
            check_form(value, of[0], field)
    elif origin is np.ndarray:  # saved as a tensor
        _check_type(value, Tensor, field)
    elif origin is Literal:
        if value not in of:
            raise wrong(field, f"one of {', '.join(map(repr, of))}", value)
    elif is_typeddict(form) or is_dataclass(form):
        _check_fields(value, form, field)
    elif origin is dict:
        _check_type(value, dict, field)
        for key, one in value.items():
            _check_type(key, of[0], f"a key of {field}")
            check_form(one, of[1], _inside(field, short(key)[1:-1]))
    elif origin in (list, tuple):
        _check_type(value, list, field)
        if origin is tuple and len(value) != len(of):
            raise wrong(field, f"a list of {len(of)}", value)
        for number, one in enumerate(value):
            check_form(one, of[number] if origin is tuple else of[0], f"{field}[{number}]")
    else:
        _check_type(value, form, field)


def _check_fields(value: Any, form: Any, field: str) -> None:
    _check_type(value, dict, field)
    if is_typeddict(form):
        needed = form.__required_keys__
    else:
        needed = {one.name for one in fields(form) if one.default is MISSING and one.default_factory is MISSING}
        if unknown := value.keys() - {one.name for one in fields(form)}:
            raise ValueError(f"{field} has a field {short(min(map(str, unknown)))}, which is not known")
    if missing := needed - value.keys():
        raise ValueError(f"{_inside(field, min(missing))} is missing")
    for name, hint in get_type_hints(form).items():
        if name in value:
            check_form(value[name], hint, _inside(field, name))


def _inside(field: str, name: str) -> str:
    return f"{field} {name}" if field.endswith(":") else f"{field}.{name}"


def _check_type(value: Any, kind: Any, field: str) -> None:
    types: Any = {float: (int, float), list: (list, tuple), dict: Mapping}.get(kind, kind)
    if not isinstance(value, types) or (isinstance(value, bool) and kind is not bool):
        raise wrong(field, IN_WORDS[kind], value)


def load_tensors(path: str | os.PathLike[str], form: Any) -> Any:
    """The content of a file that `torch.save` has written, on the CPU.

    Raises:
        ValueError: if it cannot be read, or has another form.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}); {REMEDY}.") from error
    with of_checkpoint():
        check_form(saved, form, f"{path}:")
    return saved


def kept_by_callback(state: Any, name: str, form: Any) -> Any:
    """The state that a callback has kept under a name in a `TrainerState`; `None` without any.

    Raises:
        ValueError: if a checkpoint has brought one of another form.
    """
    kept = state.stateful_callbacks.get(name)
    with of_checkpoint():
        check_form(kept, form | None, f"the checkpoint's trainer_state.json: {name}")
    return kept


@contextmanager
def of_checkpoint() -> Iterator[None]:
    """Around checks of what a checkpoint has brought: their errors say what to do."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; {REMEDY}.") from None


def wrong(field: str, allowed: str, value: Any) -> ValueError:
    """The error about a field of another form."""
    return ValueError(f"{field} must be {allowed}, got {short(value)}")


def short(value: Any) -> str:
    """At most 80 characters of a value, in one line of ASCII."""
    if isinstance(value, int) and abs(value) > 2**63:  # too many digits to be written at all
        return f"an integer of {value.bit_length()} bits"
    return ascii(value)[:80]
