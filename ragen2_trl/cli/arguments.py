"""Arguments that several commands share."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trl import TrlParser

from ragen2_trl.envs import Environment, make_env


class InputError(ValueError):
    """What was typed, or a file that was named, cannot be used: the command line says so without a traceback."""


@contextmanager
def checked_input() -> Iterator[None]:
    """Makes errors in here errors of input.

    Raises:
        InputError: In place of a `ValueError` or an `OSError`, with its message.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error


def parse(parser: TrlParser, args: list[str] | None) -> tuple[Any, ...]:
    """The dataclasses of a parser, filled from arguments and the file of `--config`.

    Raises:
        InputError: If an argument is not known, which is said before anything else, or a value is not allowed.
    """
    args = sys.argv[1:] if args is None else list(args)
    without_file = list(args)
    if "--config" in without_file:  # which TrlParser reads on its own
        place = without_file.index("--config")
        del without_file[place : place + 2]
    _, unknown = parser.parse_known_args(without_file)
    if unknown:
        raise InputError(f"not known: {' '.join(unknown)}; `--help` lists the arguments.")
    with checked_input():
        return parser.parse_args_and_config(args)


@dataclass
class EnvironmentArguments:
    """Which task to play. In YAML the task is `env_name`: TrlParser keeps `env` for environment variables."""

    env_name: str = field(
        default="frozen_lake", metadata={"aliases": ["--env"], "help": "Task, by its name in `make_env`."}
    )
    env_args: list[str] = field(
        default_factory=list,
        metadata={"help": "Options of the task: `key=value` pairs or one JSON object; in YAML a mapping will do."},
    )

    multi_turn: bool = field(
        default=False, metadata={"help": "Play in several turns, also where a task does not need them."}
    )
    data: str | None = field(
        default=None, metadata={"help": "Hub id or local path of the tasks; default: the task makes its own."}
    )

    def make_env(self) -> Environment:
        """The task with its options."""
        options = parse_env_args(self.env_args)
        if self.multi_turn:
            options["multi_turn"] = True
        return make_env(self.env_name, **options)


def parse_env_args(env_args: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Options from `key=value` strings, JSON objects, or the mapping that a YAML file gives.

    Values are read as JSON where they are JSON, `True` and `False` as well, and are strings elsewhere.

    Raises:
        ValueError: If an item is neither a pair nor a JSON object.

    >>> parse_env_args(["size=5", "observation=both", '{"slip": 0.1}'])
    {'size': 5, 'observation': 'both', 'slip': 0.1}
    """
    if isinstance(env_args, Mapping):
        return dict(env_args)
    options: dict[str, Any] = {}
    for item in env_args:
        key, equals, value = item.partition("=")
        if item.lstrip().startswith("{"):
            options.update(json.loads(item))
        elif equals:
            options[key] = _json_or_text(value)
        else:
            raise ValueError(f"env_args must be `key=value` pairs or a JSON object, got {item!r}")
    return options


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value.lower() if value in ("True", "False") else value)
    except json.JSONDecodeError:
        return value
