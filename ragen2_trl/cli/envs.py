"""List the tasks: their names, options and presets.

ragen2-trl envs
ragen2-trl envs sokoban
"""

import inspect
import re

from rich.table import Table
from rich.text import Text

from ragen2_trl.cli.arguments import envs_parser
from ragen2_trl.cli.console import make_console
from ragen2_trl.cli.typed import InputError
from ragen2_trl.envs import ENVIRONMENTS, PRESETS, Environment, options_of
from ragen2_trl.envs.presets import FREE

_OPTION = re.compile(r"^ {4,8}(\w+): (.+(?:\n {9,}.+)*)", re.MULTILINE)


def main(args: list[str] | None = None) -> None:
    """Print all tasks, or one of them with its options.

    Raises:
        InputError: If there is no task of that name.
    """
    name = envs_parser().parse_args(args).name
    console = make_console()
    if name is None:
        console.print(all_tasks())
        console.print("Options of a task: ragen2-trl envs NAME", highlight=False)
        return
    if name not in ENVIRONMENTS:
        raise InputError(f"name must be one of {sorted(ENVIRONMENTS)}, got {name!r}")
    console.print(options_table(name))
    for preset in sorted(PRESETS.get(name, {})):
        console.print(preset_table(name, preset))


def all_tasks() -> Table:
    """The tasks, what each is, its own options and its presets."""
    table = Table(title="Tasks (--env_name), options (--env_args key=value), presets (--env_args preset=NAME)")
    for column in ("task", "what it is", "its own options", "presets"):
        table.add_column(column, overflow="fold")
    shared = set(options_of_all())
    for name, task in sorted(ENVIRONMENTS.items()):
        what = " ".join((inspect.getdoc(task) or "").split("\n\n")[0].split())
        own = [option for option in options_of(name) if option not in shared]
        table.add_row(*map(Text, (name, what, ", ".join(own), ", ".join(sorted(PRESETS.get(name, {}))))))
    return table


def options_of_all() -> list[str]:
    """The options that every task has."""
    return list(inspect.signature(Environment.__init__).parameters)[1:]


def options_table(name: str) -> Table:
    """The options of a task, their defaults and what they mean: its own, then those that every task has."""
    table = Table(title=f"Options of {name}")
    for column in ("option", "default", "what it is"):
        table.add_column(column, overflow="fold")
    table.add_row("preset", "None", f"A set of options by name: {', '.join(sorted(PRESETS.get(name, {}))) or 'none'}.")
    for holder in (ENVIRONMENTS[name], Environment):
        meanings = dict(_OPTION.findall(holder.__doc__ or ""))
        for parameter in list(inspect.signature(holder.__init__).parameters.values())[1:]:
            if parameter.kind is not parameter.VAR_KEYWORD:
                meaning = " ".join(meanings.get(parameter.name, "").split())
                table.add_row(*map(Text, (parameter.name, repr(parameter.default), meaning)))
        table.add_section()
    return table


def preset_table(name: str, preset: str) -> Table:
    """What a preset sets, and which of it may be set otherwise."""
    chosen = PRESETS[name][preset]
    table = Table(title=f"preset={preset} of {name}")
    for column in ("option", "value", "may be another"):
        table.add_column(column, overflow="fold")
    for option, value in chosen.options.items():
        free = option in (*FREE, *chosen.free)
        table.add_row(*map(Text, (option, repr(value), "yes" if free else "no")))
    return table
