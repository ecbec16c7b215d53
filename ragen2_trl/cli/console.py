"""The terminal as the commands use it."""

import time
import warnings
from types import TracebackType

from rich.console import Console
from rich.text import Text


def make_console() -> Console:
    """A console of our own, without the loading bars and the deprecations that TRL and transformers owe each other."""
    from transformers.utils import logging  # which takes seconds, and some commands do without

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*deprecated", category=FutureWarning)
    return Console()


class ProgressLine:
    """One line about what a command is at, with the seconds so far: renewed in a terminal, now and then elsewhere.

    Args:
        console: Where it stands.
        every: Seconds between two lines where there is no terminal to renew one in.
    """

    def __init__(self, console: Console, every: float = 60.0):
        self._console, self._every = console, every
        self._status = console.status("")
        self._started = time.monotonic()
        self._printed: float | None = None

    def __enter__(self) -> "ProgressLine":
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def begin(self, text: str) -> None:
        """Something new begins: said at once."""
        self._printed = None
        self.say(text)

    def note(self, text: str) -> None:
        """What stays to be read."""
        self._console.print(Text(text), soft_wrap=True)

    def say(self, text: str) -> None:
        """How far it is."""
        now = time.monotonic()
        line = Text(f"{text}, {now - self._started:.0f} s")
        if self._console.is_terminal:
            self._status.update(line)
        elif self._printed is None or now >= self._printed + self._every:
            self._console.print(line, soft_wrap=True)
            self._printed = now
