"""What a person should read last: below a traceback, which may be long, and not above it."""

import sys
from collections.abc import Callable
from typing import Any


def tell_last(error: BaseException, message: str, log: Callable[[str], Any]) -> None:
    """A line for whoever sees an error end a program: below its traceback, or logged before it in Python 3.10."""
    if sys.version_info >= (3, 11):
        error.add_note(message)
    else:
        log(message)
