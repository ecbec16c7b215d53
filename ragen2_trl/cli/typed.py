"""What was typed is read here: arguments and YAML files become dataclasses, wrong input becomes one line."""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import yaml

from ragen2_trl.cli.shipped import recipe_path
from ragen2_trl.messages import InputError as InputError

if TYPE_CHECKING:
    from trl import TrlParser

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)
KINDS = {"int": "an integer", "float": "a number"}


@contextmanager
def checked_input() -> Iterator[None]:
    """Makes errors in here errors of input.

    Raises:
        InputError: With the message of a `ValueError`, an `OSError`, an `ImportError` or a `NotImplementedError`.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        raise InputError(str(error)) from error


def option(default: Any, help: str) -> Any:
    """A field of arguments with its help text; a list is another one in each instance."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": help})
    return field(default=default, metadata={"help": help})


def in_a_line(parser: Parser) -> Parser:
    """The parser, with an `InputError` for whatever it cannot parse, and no longer hundreds of lines of usage."""

    def refuse(message: str) -> NoReturn:
        raise InputError(message)

    parser.error = refuse  # type: ignore[method-assign]
    return parser


def parser_of(command: str, *dataclasses: type, **options: Any) -> "TrlParser":
    """The parser of a command whose arguments are the fields of these dataclasses."""
    from trl import TrlParser  # not for commands with arguments of their own

    # TrlParser names the type of its classes by a `NewType` that no class of ours can have.
    kinds = cast(Any, dataclasses)
    return in_a_line(TrlParser(kinds, prog=f"ragen2-trl {command}", allow_abbrev=False, **options))


def parse(parser: "TrlParser", args: list[str] | None) -> tuple[Any, ...]:
    """The dataclasses of a parser, filled from arguments and the files of `--recipe` and `--config`.

    As in TRL, `env` in a file is a mapping of environment variables to set.

    Raises:
        InputError: If an argument is not known, which is told before anything else, or a value is not allowed.
    """
    args = sys.argv[1:] if args is None else list(args)
    if "--help_all" in args:
        parser.print_help()
        raise SystemExit(0)
    with checked_input():
        files, typed = config_files(args)
        # TRL's name for what is `model` here, so that neither hides the other.
        typed = [re.sub(r"^--model([_-])name\1or\1path(?==|$)", "--model", word) for word in typed]
        if unknown := parser.parse_known_args(typed)[1]:
            names = [word[2:].partition("=")[0] for word in unknown if word.startswith("--")]
            raise _not_known(" ".join(unknown), names, parser, "--")
        for file in files:
            _check_settings(parser, read_configs([file]), file)
        settings = read_configs(files)
        os.environ.update({name: str(value) for name, value in settings.pop("env", {}).items()})
        _choose_device(parser, [*(word.lstrip("-").partition("=")[0] for word in typed), *settings])
        parser.set_defaults_with_config(**settings)
        return parser.parse_args_into_dataclasses(typed, look_for_args_file=False)


def _not_known(what: str, names: Iterable[str], parser: argparse.ArgumentParser, dashes: str = "") -> InputError:
    """The error for unknown arguments, with the nearest known ones."""
    known = [name[2:] for action in parser._actions for name in action.option_strings if "-" not in name[2:]]
    alike: set[str] = set()
    for name in names:
        alike.update([one for one in known if one.startswith(name)] or get_close_matches(name, known, n=2))
    allowed = [*(dashes + one for one in sorted(alike)), "others, see `--help`"]
    return InputError(f"not known: {what}; allowed: {', '.join(allowed)}.")


def _check_settings(parser: argparse.ArgumentParser, settings: dict[str, Any], file: str) -> None:
    """Refuses settings of a file that are no arguments, or of another kind: YAML has kinds, and `yes` is one."""
    actions = {action.dest: action for action in parser._actions}
    if not isinstance(settings.get("env", {}), dict):
        raise ValueError(f"env must be a mapping of environment variables, got {settings['env']!r} in {file}")
    for name, value in settings.items():
        if name == "env":
            continue
        if name not in actions:
            raise _not_known(f"{name} in {file}", [str(name)], parser)
        read: Any = actions[name].type
        kind = KINDS.get(getattr(read, "__name__", ""))
        if kind is not None and actions[name].nargs is None and value is not None:
            try:
                read(str(value))
            except ValueError:
                raise ValueError(f"{name} must be {kind}, got {value!r} in {file}") from None


def _choose_device(parser: argparse.ArgumentParser, given: Sequence[str]) -> None:
    """Trains on the CPU, in float32, where there is nothing else and nobody has said what to train on."""
    import torch  # not to ask for help
    from rich.console import Console

    trains = any(action.dest == "use_cpu" for action in parser._actions)
    if trains and not torch.accelerator.is_available() and "use_cpu" not in given:
        Console(stderr=True).print("No GPU here: training on the CPU.", highlight=False)
        parser.set_defaults(use_cpu=True, **({} if {"bf16", "fp16"} & set(given) else {"bf16": False}))


def config_files(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files of `--recipe`, then those of `--config`, and the arguments without them.

    Raises:
        ValueError: If there is no recipe of a name, or nothing comes after one of the two.
    """
    parser = in_a_line(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    for option in ("--recipe", "--config"):
        parser.add_argument(option, nargs="+", action="extend", default=[], metavar="NAME")
    found, rest = parser.parse_known_args(args)
    return [*(str(recipe_path(name)) for name in found.recipe), *found.config], rest


def read_configs(files: Sequence[str]) -> dict[str, Any]:
    """The settings of YAML files; where several have one, the last of them wins. `model_name_or_path` is `model`.

    Raises:
        ValueError: If a file holds something else.
    """
    settings: dict[str, Any] = {}
    for file in files:
        try:
            read = yaml.safe_load(Path(file).read_text(encoding="utf-8-sig")) or {}
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            said = " ".join(str(error).split())[:300]
            raise ValueError(f"config cannot be read as YAML: {said} ({file})") from error
        if not isinstance(read, dict):
            raise ValueError(f"config must be a YAML mapping, got a {type(read).__name__} in {file}")
        if "model_name_or_path" in read:
            read["model"] = read.pop("model_name_or_path")
        settings |= read
    return settings
