"""Values of an experiment's file, and errors that name file, place, value and what is allowed."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def listed(value: Any) -> list[Any]:
    """A list as it is, and another value as the only one of a list."""
    return value if isinstance(value, list) else [value]


def check_mapping(value: Any, path: Path, where: str) -> Mapping[Any, Any]:
    """The value, if it is a mapping; `where` is empty for the whole file."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: {where or 'all of it'} must be a mapping, got {value!r}")
    return value


def list_at(read: Mapping[str, Any], name: str, path: Path) -> list[Any]:
    """The list of that name, empty where there is none."""
    value = read.get(name, [])
    if not isinstance(value, list):
        raise ValueError(f"{path}: {name} must be a list, got {value!r}")
    return value


def check_names(read: Mapping[Any, Any], allowed: Iterable[str], path: Path, where: str) -> None:
    """Raise a `ValueError` for a name that is not among these."""
    if unknown := [str(name) for name in read if name not in set(allowed)]:
        raise ValueError(f"{path}: {where}{unknown[0]} is not known; allowed: {', '.join(sorted(allowed))}.")


def check_required(read: Mapping[str, Any], names: Iterable[str], path: Path, where: str) -> None:
    """Raise a `ValueError` for a name that is not there."""
    if missing := [name for name in names if name not in read]:
        raise ValueError(f"{path}: {where}{missing[0]} is missing; required: {', '.join(names)}.")
