"""Check TRL: whether the release that is installed has all that the trainers lean on.

ragen2-trl check-trl
"""

import trl
from packaging.version import Version
from rich.table import Table
from rich.text import Text
from trl import GRPOTrainer, RLOOTrainer

from ragen2_trl.cli.arguments import trl_parser
from ragen2_trl.cli.console import make_console
from ragen2_trl.trainers.trl_contract import OLDEST_ASYNC, installed, needs, untested


def main(args: list[str] | None = None) -> None:
    """Print the table of what is needed.

    Raises:
        SystemExit: with code 1, if something is missing.
    """
    trl_parser().parse_args(args)
    console = make_console()
    missing = []
    trainers: list[type] = [GRPOTrainer, RLOOTrainer]
    if Version(trl.__version__) >= Version(OLDEST_ASYNC):
        from ragen2_trl.trainers.trl_async import AsyncGRPOTrainer

        trainers.append(AsyncGRPOTrainer)
    for trainer_class in trainers:
        table = Table(title=f"{trainer_class.__name__} of {installed()}")
        for column in ("what", "how it is used", "there"):
            table.add_column(column, overflow="fold")
        for need in needs(trainer_class):
            if need.problem is not None:
                missing.append(f"{need.name} {need.problem}")
            table.add_row(Text(need.name), need.use, "yes" if need.problem is None else Text("no", style="bold"))
        console.print(table)
    for line in missing:
        console.print(Text(line), soft_wrap=True)
    if missing:
        raise SystemExit(1)
    if len(trainers) == 2:
        console.print(Text(f"SNRFilteredAsyncGRPOTrainer needs TRL {OLDEST_ASYNC} or later."), soft_wrap=True)
    if (warning := untested()) is not None:
        console.print(Text(warning))
