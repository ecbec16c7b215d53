"""The tasks, by name. A task is one file: its rules, its text and its rewards."""

import inspect
from typing import Any

from ragen2_trl.envs.base import Environment, Response, completion_text, format_response, parse_response
from ragen2_trl.envs.frozen_lake import FrozenLake

ENVIRONMENTS: dict[str, type[Environment]] = {FrozenLake.name: FrozenLake}


def make_env(name: str, **options: Any) -> Environment:
    """The task called `name`, with the options its class takes.

    Raises:
        ValueError: If the name, an option or the value of an option is not known.

    >>> make_env("frozen_lake", size=5).name
    'frozen_lake'
    """
    if name not in ENVIRONMENTS:
        raise ValueError(f"environment must be one of {sorted(ENVIRONMENTS)}, got {name!r}")
    allowed = sorted(inspect.signature(ENVIRONMENTS[name]).parameters)
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ValueError(f"options of {name} must be among {allowed}, got {unknown}")
    return ENVIRONMENTS[name](**options)


__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "FrozenLake",
    "Response",
    "completion_text",
    "format_response",
    "make_env",
    "parse_response",
]
