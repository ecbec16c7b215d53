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


def check_text_or_messages(field: str, value: object, where: str) -> None:
    """Raises a `ValueError` that names the place unless it is text, or a list of messages as in TRL."""
    if isinstance(value, str):
        return
    got = type(value).__name__
    if isinstance(value, list):
        wrong = [one for one in value if not (isinstance(one, Mapping) and isinstance(one.get("role"), str))]
        wrong += [one for one in value if not wrong and not _is_content(one.get("content", 0))]
        if not wrong:
            return
        got = f"{wrong[0]!r:.60}"
    raise ValueError(
        f"{field} must be a string or a list of messages, got {got} in {where}; a message has role and content, "
        "which is text or parts {'type': 'text', 'text': …}"
    )


def _is_content(content: object) -> bool:
    if isinstance(content, list):
        return all(
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        )
    return content is None or isinstance(content, str)


def check_installed(task: str, *packages: str) -> None:
    """Raises an `ImportError` unless the packages of a task's extra are installed; nothing is imported.

    >>> check_installed("frozen_lake")
    """
    if missing := [package for package in packages if find_spec(package.replace("-", "_")) is None]:
        extra = task.replace("_", "-")
        raise ImportError(f"{task} needs {' and '.join(missing)}, not installed: pip install 'ragen2-trl[{extra}]'")
