"""What a person should read last: a line in place of a traceback, or below it, and not above it."""

from collections.abc import Callable
from typing import Any


class InputError(ValueError):
    """What was typed, or a file or a function that was named, cannot be used: a command says so in a line."""


def tell_last(error: BaseException, message: str, log: Callable[[str], Any]) -> None:
    """A line below the traceback of an error that ends a program. `log` is not used any more."""
    error.add_note(message)
