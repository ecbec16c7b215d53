"""Check TRL: whether the release that is installed has all that the trainers lean on.

ragen2-trl check-trl
"""

import trl
from packaging.version import Version
from rich.table import Table
from rich.text import Text

from ragen2_trl.cli.arguments import parse_plain
from ragen2_trl.cli.console import make_console
from ragen2_trl.trainers.trl_contract import IMPORTED, OLDEST_ASYNC, installed, needs, untested


def main(args: list[str] | None = None) -> None:
    """Print the table of what is needed.

    Raises:
        SystemExit: with code 1, if something is missing.
    """
    parse_plain("check-trl", args)
    console = make_console()
    missing = []
    has_async = Version(trl.__version__) >= Version(OLDEST_ASYNC)
    for who in IMPORTED:
        if who == "AsyncGRPOTrainer" and not has_async:
            continue
        table = Table(title=f"{who} on {installed()}")
        for column in ("what", "how it is used", "there"):
            table.add_column(column, overflow="fold")
        for need in needs(who):
            if need.problem is not None:
                missing.append(f"{need.name} {need.problem}")
            there = "yes" if need.problem is None else Text(need.problem, style="bold")
            table.add_row(Text(need.name), need.use, there)
        console.print(table)
    for line in missing:
        console.print(Text(line), soft_wrap=True)
    if missing:
        raise SystemExit(1)
    if not has_async:
        console.print(Text(f"SNRFilteredAsyncGRPOTrainer needs TRL {OLDEST_ASYNC} or later."), soft_wrap=True)
    if (warning := untested()) is not None:
        console.print(Text(warning))
