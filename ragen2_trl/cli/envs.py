"""List the tasks: their names, options and presets.

ragen2-trl envs
ragen2-trl envs sokoban
"""

import inspect
import re

from rich.table import Table
from rich.text import Text

from ragen2_trl.cli.arguments import parse_plain
from ragen2_trl.cli.console import make_console
from ragen2_trl.cli.typed import checked_input
from ragen2_trl.envs import ENVIRONMENTS, PRESETS, Environment, options_of, presets_of, task_class

_OPTION = re.compile(r"^ {4,8}(\w+): (.+(?:\n {9,}.+)*)", re.MULTILINE)


def main(args: list[str] | None = None) -> None:
    """Print all tasks, or one of them with its options.

    Raises:
        InputError: If there is no task of that name.
    """
    name = parse_plain("envs", args).name
    console = make_console()
    if name is None:
        console.print(all_tasks())
        console.print("Options of a task: ragen2-trl envs NAME", highlight=False)
        return
    with checked_input():
        task = task_class(name)
    console.print(options_table(name, task))
    for preset in presets_of(name):
        console.print(options_table(f"{name} with preset={preset}", PRESETS[preset][name]))


def all_tasks() -> Table:
    """The tasks, what each is, its own options and its presets."""
    table = Table(title="Tasks (--env_name), options (--env_args key=value), presets (--env_args preset=NAME)")
    for column in ("task", "what it is", "its own options", "presets"):
        table.add_column(column, overflow="fold")
    shared = options_of(Environment)  # type: ignore[type-abstract]  # its signature is read, nothing is made
    for name, task in sorted(ENVIRONMENTS.items()):
        what = " ".join((inspect.getdoc(task) or "").split("\n\n")[0].split())
        own = [option for option in options_of(task) if option not in shared]
        table.add_row(*map(Text, (name, what, ", ".join(own), ", ".join(presets_of(name)))))
    return table


def options_table(title: str, task: type[Environment]) -> Table:
    """The options of a task, their defaults and what they mean: its own, then those that every task has."""
    table = Table(title=f"Options of {title}")
    for column in ("option", "default", "what it is"):
        table.add_column(column, overflow="fold")
    for option in described_options(task):
        table.add_row(*map(Text, option))
    return table


def described_options(task: type[Environment]) -> list[tuple[str, str, str]]:
    """Name, default and meaning of each option of a task, the meaning from the docstrings of its classes."""
    meanings: dict[str, str] = {}
    for holder in reversed(task.__mro__):
        meanings.update(_OPTION.findall(holder.__doc__ or ""))
    return [
        (name, repr(parameter.default), " ".join(meanings.get(name, "").split()))
        for name, parameter in options_of(task).items()
    ]
