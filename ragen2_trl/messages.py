"""What a person should read last: a line in place of a traceback, or below it, and not above it."""

import sys
from collections.abc import Callable
from typing import Any


class InputError(ValueError):
    """What was typed, or a file or a function that was named, cannot be used: a command says so in a line."""


def tell_last(error: BaseException, message: str, log: Callable[[str], Any]) -> None:
    """A line for whoever sees an error end a program: below its traceback, or logged before it in Python 3.10."""
    if sys.version_info >= (3, 11):
        error.add_note(message)
    else:
        log(message)
