"""One limit on the programs that run at a time, for all processes of a user on this machine.

Trainer, evaluation and servers know nothing of one another, and more programs than cores would only take each other's
time. A place is a file in a folder of the user's, locked by whoever has it; the kernel takes the lock from the dead.
"""

import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PAUSE_SECONDS = 0.01  # between two looks at the places

_turn = threading.Lock()  # one thread of a process looks, the others wait for it in order


def _forget_turn() -> None:
    global _turn
    _turn = threading.Lock()


if hasattr(os, "register_at_fork"):  # a child has the lock as it was, but not the thread that would give it back
    os.register_at_fork(after_in_child=_forget_turn)


def runtime_folder() -> Path:
    """The user's own folder for what processes share, made if it is missing; the same whatever the environment says.

    Raises:
        PermissionError: If somebody else could write to it.
    """
    own = Path(f"/run/user/{os.getuid()}")
    folder = own / "ragen2-trl" if os.access(own, os.W_OK) else Path(f"/tmp/ragen2-trl-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder that belongs to you and is closed to others.")
    return folder


@contextmanager
def slot(count: int) -> Iterator[int]:
    """Wait for one of `count` places, and keep it; gives its number."""
    import fcntl  # not where there are no programs to run, on Windows

    folder = runtime_folder()
    with _turn:
        while (place := _free_place(folder, count)) is None:
            time.sleep(_PAUSE_SECONDS)
    number, file = place
    try:
        yield number
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a process forked in the meantime holds the file open as well
        os.close(file)


def _free_place(folder: Path, count: int) -> tuple[int, int] | None:
    import fcntl

    for number in range(count):
        file = os.open(folder / f"slot-{number}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
        except BaseException:
            os.close(file)
            raise
        else:
            return number, file
    return None
