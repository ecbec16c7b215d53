"""One run at a time in a folder: a lock that the process has which trains, and that goes with it however it ends."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate.logging import get_logger

LOCK = "_lock"  # in the run's folder; what begins with an underscore is left out of uploads
logger = get_logger(__name__)
_held: dict[Path, int] = {}  # by this process, which may train again within a command that has it already


def _forget() -> None:
    """A child that outlives its parent must not keep the lock."""
    for file in _held.values():
        os.close(file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep the runs of other processes out of a run's folder, on other machines too where its file system has locks.

    Raises:
        ValueError: If another process has it; the message names the process.
    """
    path = folder.resolve() / LOCK
    file = None if path in _held else _take(path, folder)
    if file is None:
        yield
        return
    _held[path] = file
    try:
        yield
    finally:
        del _held[path]
        os.close(file)


def _take(path: Path, folder: Path) -> int | None:
    """The open file with the lock, or `None` where there are no locks to be had."""
    try:
        import fcntl  # not on Windows

        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except (ImportError, OSError) as error:
        _warn(folder, error)
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
    except BlockingIOError:
        holder = os.read(file, 1000).decode(errors="replace")
        os.close(file)
        raise ValueError(
            f"output_dir={str(folder)!r} is in use by {holder or 'another process'}, whose run has not ended; "
            "allowed: another folder, or this one once it has."
        ) from None
    except OSError as error:
        os.close(file)
        _warn(folder, error)
        return None
    return file


def _warn(folder: Path, error: Exception) -> None:
    logger.warning(f"{folder} cannot be locked ({error}): nothing keeps another run from writing there, too.")
