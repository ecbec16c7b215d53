"""Check the sandbox: which defences against model-written programs hold on this machine.

ragen2-trl check-sandbox
"""

import os

from rich.table import Table
from rich.text import Text

from ragen2_trl.cli.arguments import parse_plain
from ragen2_trl.cli.console import make_console
from ragen2_trl.cli.typed import InputError
from ragen2_trl.envs.deepcoder.sandbox import SandboxFailedError, SandboxUnavailableError
from ragen2_trl.envs.deepcoder.sandbox_defences import find_defences


def main(args: list[str] | None = None) -> None:
    """Try the defences and print them as a table.

    Raises:
        InputError: If programs cannot be isolated here; it names the reason.
    """
    parse_plain("check-sandbox", args)
    try:
        defences = find_defences()
    except (SandboxUnavailableError, SandboxFailedError) as error:
        raise InputError(str(error)) from None
    user = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"  # which decides what isolates programs
    table = Table(title=f"Sandbox, started by {user}")
    for column in ("defence", "active", "how, or why not"):
        table.add_column(column, overflow="fold")
    for defence in defences:
        table.add_row(defence.name, "yes" if defence.active else Text("no", style="bold"), Text(defence.detail))
    make_console().print(table)
