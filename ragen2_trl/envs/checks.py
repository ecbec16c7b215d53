"""Checks of options and of what is installed; their errors name the field, the value and what is allowed or needed."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec


def check_choice(field: str, value: object, allowed: Iterable[object]) -> None:
    """Raises a `ValueError` that names the field, the value and the allowed set unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{field} must be one of {list(allowed)}, got {value!r}")


def check_count(field: str, value: object, low: int, high: int) -> None:
    """Like `check_range`, for whole numbers."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{field} must be an integer between {low} and {high}, got {value!r}")


def check_range(field: str, value: float, low: float, high: float) -> None:
    """Raises a `ValueError` that names the field, the value and the range unless `low <= value <= high`."""
    if not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{field} must be between {low} and {high}, got {value!r}")


def check_flags(**flags: object) -> None:
    """Raises a `ValueError` unless each of them is true or false."""
    for field, value in flags.items():
        check_choice(field, value, (True, False))


def check_limits(**limits: object) -> None:
    """Raises a `ValueError` unless each of them is a whole number of 1 or more, or there is none."""
    for field, value in limits.items():
        if value is not None:
            check_count(field, value, 1, 1_000_000)


def check_text_or_messages(field: str, value: object, where: str, pictures: bool = False) -> None:
    """Raises a `ValueError` that names the place unless it is text, or a list of messages as in TRL.

    Args:
        field: Name of the column.
        value: What it holds.
        where: File and row.
        pictures: Whether messages may have parts that are no text.
    """
    if isinstance(value, str):
        return
    got = type(value).__name__
    if isinstance(value, list):
        wrong = [one for one in value if not (isinstance(one, Mapping) and isinstance(one.get("role"), str))]
        wrong += [one for one in value if not wrong and not _is_content(one.get("content", 0), pictures)]
        if not wrong:
            return
        got = f"{wrong[0]!r:.60}"
    raise ValueError(
        f"{field} must be a string or a list of messages, got {got} in {where}; a message has role and content, "
        "which is text or parts {'type': 'text', 'text': …}"
    )


def _is_content(content: object, pictures: bool) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, Mapping) and _is_part(part, pictures) for part in content)
    return content is None or isinstance(content, str)


def _is_part(part: Mapping[str, object], pictures: bool) -> bool:
    kind = part.get("type")
    return isinstance(part.get("text"), str) if kind == "text" else pictures and isinstance(kind, str)


def check_installed(task: str, *packages: str) -> None:
    """Raises an `ImportError` unless the packages of a task's extra are installed; nothing is imported.

    >>> check_installed("frozen_lake")
    """
    if missing := [package for package in packages if find_spec(package.replace("-", "_")) is None]:
        extra = task.replace("_", "-")
        raise ImportError(f"{task} needs {' and '.join(missing)}, not installed: pip install 'ragen2-trl[{extra}]'")
