"""What was typed is read here: arguments and YAML files become dataclasses, wrong input becomes one line."""

import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn, cast

import yaml

from ragen2_trl.cli.shipped import recipe_path
from ragen2_trl.messages import InputError as InputError

if TYPE_CHECKING:
    from trl import TrlParser


@contextmanager
def checked_input() -> Iterator[None]:
    """Makes errors in here errors of input.

    Raises:
        InputError: With the message of a `ValueError`, an `OSError`, an `ImportError`, a `NotImplementedError` or an
            error in YAML.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        raise InputError(str(error)) from error
    except yaml.YAMLError as error:
        raise InputError(f"config cannot be read as YAML: {' '.join(str(error).split())}") from error


def parser_of(command: str, *dataclasses: type, epilog: str | None = None) -> "TrlParser":
    """The parser of a command whose arguments are the fields of these dataclasses."""
    from trl import TrlParser  # an import of seconds, which commands with arguments of their own do without

    # TrlParser names the type of its classes by a `NewType` that no class of ours can have.
    return TrlParser(cast(Any, dataclasses), prog=f"ragen2-trl {command}", epilog=epilog, allow_abbrev=False)


def parse(parser: "TrlParser", args: list[str] | None) -> tuple[Any, ...]:
    """The dataclasses of a parser, filled from arguments and the files of `--recipe` and `--config`.

    Raises:
        InputError: If an argument is not known, which is told before anything else, or a value is not allowed.
    """
    args = sys.argv[1:] if args is None else list(args)
    if "--help_all" in args:
        parser.print_help()
        raise SystemExit(0)
    with checked_input():
        files, rest = config_files(args)
    # TRL's name for what is `model` here, so that neither hides the other.
    rest = [re.sub(r"^--model([_-])name\1or\1path(?==|$)", "--model", word) for word in rest]
    _, unknown = parser.parse_known_args(rest)
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings if "-" not in name[2:]]
        typed = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        alike = {name for word in typed for name in _alike(word, known)}
        allowed = (
            f"allowed: {', '.join(sorted(alike))} and others, see `--help`." if alike else "allowed: see `--help`."
        )
        raise InputError(f"not known: {' '.join(unknown)}; {allowed}")
    with checked_input():
        settings = read_configs(files)
        _check_kinds(parser, settings, files)
        _choose_device(parser, [*(word.lstrip("-").partition("=")[0] for word in rest), *settings])
        if not files:
            return parser.parse_args_and_config(rest)
        with TemporaryDirectory() as folder:  # TrlParser reads one file
            together = Path(folder) / "config.yaml"
            together.write_text(yaml.safe_dump(settings), encoding="utf-8")
            return parser.parse_args_and_config(["--config", str(together), *rest])


def _alike(word: str, names: Sequence[str]) -> list[str]:
    """What somebody may have meant."""
    return [name for name in names if name.startswith(word)] or get_close_matches(word, names, n=2)


def _choose_device(parser: "TrlParser", given: Sequence[str]) -> None:
    """Trains on the CPU, in float32, where there is nothing else and nobody has said what to train on."""
    import torch  # not to ask for help
    from rich.console import Console

    trains = any(action.dest == "use_cpu" for action in parser._actions)
    if trains and not torch.accelerator.is_available() and "use_cpu" not in given:
        Console(stderr=True).print("No GPU here: training on the CPU.", highlight=False)
        parser.set_defaults(use_cpu=True, **({} if {"bf16", "fp16"} & set(given) else {"bf16": False}))


def refuse_in_a_line(parser: "TrlParser") -> "TrlParser":
    """A parser whose errors are errors of input and no longer hundreds of lines of usage: of a file that another
    command writes, nobody typed its arguments."""

    def refuse(message: str) -> NoReturn:
        raise InputError(message)

    parser.error = refuse  # type: ignore[method-assign]
    return parser


def config_files(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files of `--recipe`, then those of `--config`, and the arguments without them.

    Raises:
        ValueError: If there is no recipe of a name, or nothing comes after one of the two.
    """
    recipes, rest = _values_of("--recipe", args)
    files, rest = _values_of("--config", rest)
    return [*(str(recipe_path(name)) for name in recipes), *files], rest


def _values_of(option: str, args: Sequence[str]) -> tuple[list[str], list[str]]:
    """What comes after an option, and the arguments without both."""
    if option not in args:
        return [], list(args)
    place = args.index(option)
    after = next((n for n in range(place + 1, len(args)) if args[n].startswith("--")), len(args))
    if after == place + 1:
        raise ValueError(f"{option[2:]} must be followed by one or more names, got none")
    return list(args[place + 1 : after]), [*args[:place], *args[after:]]


class _Strict(yaml.SafeLoader):
    """YAML of settings: names are texts, each once, and nothing multiplies itself by anchors within anchors."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        alias = self.peek_event() if self.check_event(yaml.AliasEvent) else None
        node: yaml.Node | None = super().compose_node(parent, index)
        if alias is not None and not isinstance(node, yaml.ScalarNode):
            raise ValueError(f"*{alias.anchor} in line {alias.start_mark.line + 1} must stand for a single value")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for name, _ in node.value:
            if name.tag != "tag:yaml.org,2002:str":
                raise ValueError(f"names must be texts, got {name.value!r} in line {name.start_mark.line + 1}")
            if name.value in seen:
                raise ValueError(
                    f"{name.value!r} must stand there once, got it again in line {name.start_mark.line + 1}"
                )
            seen.add(name.value)
        return super().construct_mapping(node, deep)


def _holds_nan(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_holds_nan, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and math.isnan(value)


def _check_kinds(parser: "TrlParser", settings: dict[str, Any], files: Sequence[str]) -> None:
    """Raises a `ValueError` for a value of another kind than its argument's: YAML has kinds, and `yes` is one."""
    kinds: dict[Any, str] = {int: "an integer", float: "a number"}
    for action in parser._actions:
        read: Any = action.type
        value, kind = settings.get(action.dest), kinds.get(read)
        if value is None or kind is None or action.nargs is not None:
            continue
        wrong = isinstance(value, bool | list | dict) or (read is int and isinstance(value, float) and value % 1)
        try:
            wrong = wrong or (isinstance(value, str) and read(value) is None)
        except ValueError:
            wrong = True
        if wrong:
            file = next(file for file in reversed(files) if action.dest in read_configs([file]))
            raise ValueError(f"{action.dest} must be {kind}, got {value!r} in {file}")


def read_configs(files: Sequence[str]) -> dict[str, Any]:
    """The settings of YAML files; where several have one, the last of them wins. `model_name_or_path` is `model`.

    Raises:
        ValueError: If a file holds something else.
    """
    settings: dict[str, Any] = {}
    for file in files:
        try:
            read = yaml.load(Path(file).read_text(encoding="utf-8-sig"), _Strict) or {}
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            said = " ".join(str(error).split())[:300]
            raise ValueError(f"config cannot be read as YAML: {said} ({file})") from error
        if not isinstance(read, dict):
            raise ValueError(f"config must be a YAML mapping, got a {type(read).__name__} in {file}")
        for name, value in read.items():
            if _holds_nan(value):
                raise ValueError(f"{name} must be a number, got NaN in {file}")
        if "model_name_or_path" in read:
            read["model"] = read.pop("model_name_or_path")
        settings |= read
    return settings
