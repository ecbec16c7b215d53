"""What the runs of a machine share: places for them, and control groups where this process may make some.

Trainer, evaluation and servers know nothing of one another, and more programs than cores would only take each other's
time. A place is a file in a folder of the user's, locked by whoever has it; the kernel takes the lock from the dead.

Control groups are those of cgroup v2, for root or in a delegated subtree. What they add to the other defences: the
kernel's own memory is counted, and a run's processes end together by one write. Nothing is reconfigured: a group is
made below this process's own, or below the nearest one above it that can have groups, with the controllers that are
switched on there.
"""

import os
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


# Control groups

_SECONDS_TO_DIE = 10.0


@dataclass(frozen=True)
class CgroupParent:
    """A group in which runs can have groups of their own, and the controllers (`memory`, `pids`, `io`) they get."""

    path: Path
    controllers: frozenset[str]


@dataclass(frozen=True)
class Cgroup:
    """The group of one run."""

    path: Path

    def entering(self, command: list[str]) -> list[str]:
        """A command that enters the group and becomes `command`."""
        # What is forked by a process with threads must not run Python in between.
        return ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs" && exec "$@"', str(self.path), *command]

    def ran_out_of_memory(self) -> bool:
        events = self.path / "memory.events"
        return events.exists() and "\noom_kill 0\n" not in f"\n{events.read_text()}"

    def kill(self) -> None:
        """End all processes of the group, and wait for their end.

        Raises:
            TimeoutError: If the kernel does not end them.
        """
        (self.path / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + _SECONDS_TO_DIE
        while "populated 0" not in (self.path / "cgroup.events").read_text():
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes in {self.path} do not end")
            time.sleep(0.001)


def find_parent() -> CgroupParent | None:
    """The nearest group that can have groups with memory and pids counted, else the nearest that can have any."""
    own, mount = _own_group()
    if own is None:
        return None
    above = [folder for folder in (own, *own.parents) if folder.is_relative_to(mount)]
    parents = [CgroupParent(folder, _controllers(folder)) for folder in above if _can_have_groups(folder)]
    complete = [parent for parent in parents if {"memory", "pids"} <= parent.controllers]
    return next(iter(complete + parents), None)


def _own_group() -> tuple[Path | None, Path]:
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    points = [Path(fields[4]) for fields in mounts if fields[fields.index("-") + 1] == "cgroup2"]
    names = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    if not points or not names:
        return None, Path("/")
    own = points[0] / names[0].lstrip("/")
    return (own if own.is_dir() else points[0]), points[0]


def _controllers(folder: Path) -> frozenset[str]:
    return frozenset((folder / "cgroup.subtree_control").read_text().split()) & {"memory", "pids", "io"}


def _can_have_groups(folder: Path) -> bool:
    """Whether a process of ours can be moved into a group below, and be killed there."""
    if not os.access(folder, os.W_OK):
        return False
    trial = Cgroup(folder / f"ragen2-trl-trial-{os.getpid()}-{time.monotonic_ns()}")
    try:
        trial.path.mkdir()
    except OSError:  # read-only, or with threads of somebody's below
        return False
    try:
        moved = subprocess.run(trial.entering(["/bin/true"]), stderr=subprocess.DEVNULL, env={}).returncode == 0
        return moved and (trial.path / "cgroup.kill").exists()
    finally:
        trial.path.rmdir()


@contextmanager
def cgroup(parent: CgroupParent, number: int, memory_bytes: int, processes: int) -> Iterator[Cgroup]:
    """A group for a run; when it is left, nothing of it is alive and its folder is gone.

    Args:
        parent: Where it is made.
        number: Of the run's place (see `slot`). What a killed trainer left in that place is cleaned up first.
        memory_bytes: Of programs, files in memory and the kernel together.
        processes: Processes and threads together.
    """
    group = Cgroup(parent.path / f"ragen2-trl-{os.getuid()}-{number}")
    if group.path.exists():
        group.kill()
        group.path.rmdir()
    limits = {
        "memory.max": str(memory_bytes),
        "memory.swap.max": "0",
        "pids.max": str(processes),
        "io.weight": "default 10",  # of 1 to 10000; others have 100
    }
    group.path.mkdir()
    try:
        # Each file is there where its controller is switched on and the kernel was built with it.
        for name, value in limits.items():
            if (group.path / name).exists():
                (group.path / name).write_text(value)
        yield group
    finally:
        group.kill()
        group.path.rmdir()
