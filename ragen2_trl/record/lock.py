"""One run at a time in a folder: a lock of the process that trains, which ends with it however it ends."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate.logging import get_logger
from filelock import FileLock, Timeout

from ragen2_trl.record.files import read_text
from ragen2_trl.saved_state import SAFELY

LOCK = "_lock"  # in the run's folder; what begins with an underscore is left out of uploads
logger = get_logger(__name__)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep the runs of other processes out of a run's folder, on other machines too where its file system has locks.

    A process may take the lock again within itself. Where there are no locks, a line in the log says so.

    Raises:
        ValueError: If another process has it; the message names the process.
    """
    path = folder.resolve() / LOCK
    lock = FileLock(path, blocking=False, is_singleton=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"output_dir={str(folder)!r} is in use by {_holder(path)}, whose run has not ended; allowed: another "
            "folder, or this one after that run."
        ) from None
    except OSError as error:
        logger.warning(f"{folder} cannot be locked ({error}): make sure that no other run writes there.")
        yield
        return
    try:
        with suppress(OSError):  # Windows lets nobody write to a locked file
            file = os.open(path, os.O_WRONLY | os.O_TRUNC | SAFELY)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
            os.close(file)
        yield
    finally:
        lock.release()


def _holder(path: Path) -> str:
    with suppress(OSError, ValueError):
        return read_text(path)[:1000] or "another process"
    return "another process"
