"""The command line: `ragen2-trl <command>`, one module a command, each with a `main(args)` of its own."""

import sys
from importlib import import_module

COMMANDS = ("warm_start", "train", "evaluate")


def main(args: list[str] | None = None) -> None:
    """Runs the command that the first argument names with the arguments after it.

    Raises:
        SystemExit: If the first argument is not a command; the message lists them.
    """
    args = sys.argv[1:] if args is None else args
    if not args or args[0] not in COMMANDS:
        raise SystemExit(f"usage: ragen2-trl {{{','.join(COMMANDS)}}} [--help] [arguments]")
    # Imported only now: a command should not wait for the imports of the others.
    import_module(f"{__name__}.{args[0]}").main(args[1:])
