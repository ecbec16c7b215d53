"""The command line: `ragen2-trl <command>`, one module a command, each with a `main(args)` of its own."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from ragen2_trl.cli.arguments import COMMANDS as COMMANDS
from ragen2_trl.cli.arguments import command_parser
from ragen2_trl.messages import InputError, Stopped, printable
from ragen2_trl.trainers import imported


def keep_freed_memory() -> None:
    """Lets glibc keep what the process frees: it would give a key-value cache back to the kernel with every token and
    fault it in again with the next. `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` in the environment decide
    instead, where they are set; other C libraries have no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    for name, number in (("MALLOC_MMAP_THRESHOLD_", -3), ("MALLOC_TRIM_THRESHOLD_", -1)):  # <malloc.h>
        if mallopt is not None and name not in os.environ and not mallopt(number, 2**31 - 1):
            mallopt(number, 2**25)  # the most that older releases take


@contextmanager
def _imports() -> Iterator[None]:
    """Modules stay: looking for garbage among them would be a seventh of the time that importing them takes."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.freeze()


def main(args: list[str] | None = None) -> None:
    """Run the command that the first argument names with the arguments after it.

    Raises:
        SystemExit: if the first argument is not a command; the message lists them. With code 2, and one line on
            stderr, for arguments and files that cannot be used, with another where training can be resumed; with code
            130 after Ctrl-C, and 128 and the signal's number after another.
    """
    command, *rest = (sys.argv[1:] if args is None else args) or [""]
    if command not in COMMANDS:
        listing = "\n".join(f"  {name:<15} {purpose}" for name, purpose in COMMANDS.items())
        usage = f"usage: ragen2-trl <command> [--help] [arguments]\n\n{listing}"
        if command in ("-h", "--help"):
            Console().print(usage, highlight=False, markup=False)
            return
        raise SystemExit(f"command={command!r}; allowed: {', '.join(COMMANDS)}\n\n{usage}")
    if "--help" in rest or "-h" in rest:
        command_parser(command).print_help()
        return
    if os.getcwd() not in sys.path:  # where modules of one's own are, which arguments name
        sys.path.append(os.getcwd())
    keep_freed_memory()
    # Imported only now: a command should not wait for the imports of the others.
    status = Console(stderr=True).status(f"ragen2-trl {command} begins")  # in a terminal alone; imports take seconds
    try:
        with status, _imports():
            run = imported(f"{__name__}.{command.replace('-', '_')}", "main")
        run(rest)
    except KeyboardInterrupt as stopped:
        Console(stderr=True).print(f"ragen2-trl {command}: interrupted", highlight=False, markup=False)
        raise SystemExit(stopped.code if isinstance(stopped, Stopped) else 130) from None
    except InputError as error:
        # A model's text may be in what a reward raised.
        said = printable("\n".join([f"ragen2-trl {command}: {error}", *getattr(error, "__notes__", ())]))
        Console(stderr=True).print(said, highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(2) from None
