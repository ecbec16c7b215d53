"""What a person should read last: a line in place of a traceback, or below it, and not above it."""

import signal
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

JOINERS = "\u200c\u200d"  # of Persian and of emoji; other format characters turn or hide the text around them


class InputError(ValueError):
    """What was typed, or a file or a function that was named, cannot be used: a command says so in a line."""


class Stopped(KeyboardInterrupt):
    """A signal by which a scheduler, a terminal or a person ends a program, to be cleaned up after like Ctrl-C."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def code(self) -> int:
        """The exit status that a shell gives to a program that this signal has ended."""
        return 128 + self.number


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Makes SIGTERM, SIGHUP and SIGUSR1, which would end the process at once, raise `Stopped`.

    The first one does; after it they are ignored, as schedulers repeat them, until what it has interrupted is tidied
    up. What already has a handler, or is ignored as `nohup` has it, stays.
    """
    names = [name for name in ("SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]  # Windows has the first
    ours = [number for name in names if signal.getsignal(number := getattr(signal, name)) is signal.SIG_DFL]

    def stop(number: int, frame: FrameType | None) -> None:
        for one in ours:
            signal.signal(one, signal.SIG_IGN)
        raise Stopped(number)

    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "run"), counted(0, "run")
    ('1 run', '0 runs')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """The text with what would steer a terminal, or hide or turn text, made visible.

    >>> printable("go" + chr(27) + "[31m " + chr(0x202E) + "right")
    'go�[31m �right'
    """
    return "".join(map(_printable, text.replace("\r\n", "\n")))


def _printable(char: str) -> str:
    shown = char.isprintable() or char in "\n\t" or char in JOINERS or unicodedata.category(char) == "Zs"
    return char if shown else "\N{REPLACEMENT CHARACTER}"
