"""Options of tasks, as they are typed after `--env_args` or stand in a file."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def parse_env_args(env_args: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Options from `key=value` strings, JSON objects, or the mapping that a YAML file gives.

    Values are read as JSON where they are JSON, `True` and `False` as well, and are strings elsewhere.

    Raises:
        ValueError: If an item is neither a pair nor a JSON object.

    >>> parse_env_args(["size=5", "observation=both", '{"slip": 0.1}'])
    {'size': 5, 'observation': 'both', 'slip': 0.1}
    """
    options: dict[str, Any] = dict(env_args) if isinstance(env_args, Mapping) else {}
    for item in () if isinstance(env_args, Mapping) else env_args:
        key, equals, value = item.partition("=")
        if item.lstrip().startswith("{"):
            options.update(json.loads(item))
        elif equals:
            options[key] = _json_or_text(value)
        else:
            raise ValueError(f"env_args must be `key=value` pairs or a JSON object, got {item!r}")
    if "name" in options:
        raise ValueError(f"env_args must be options of the task, which env_name names, got name={options['name']!r}")
    return options


def options_by_task(
    options: Mapping[str, Any], names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Options of all tasks, and by task those of one: `{"sokoban.size": 7, "multi_turn": True}`."""
    for_all: dict[str, Any] = {}
    for_one: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in options.items():
        name, dot, own = key.partition(".")
        if dot and name not in for_one:
            raise ValueError(f"env_args must name one of the tasks {list(names)} before the dot, got {key!r}")
        (for_one[name] if dot else for_all)[own if dot else key] = value
    for name, own_options in for_one.items():
        if twice := sorted(set(own_options) & set(for_all)):
            raise ValueError(f"env_args must give {twice} for all tasks or for {name}, got both")
    return for_all, for_one


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value.lower() if value in ("True", "False") else value)
    except json.JSONDecodeError:
        return value
