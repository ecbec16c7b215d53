"""The tasks, by name. A task is one file, or a folder where it takes several: its rules, its text and its rewards."""

import inspect
from collections.abc import Callable
from typing import Any

from ragen2_trl.envs.bandit import Bandit
from ragen2_trl.envs.base import Environment
from ragen2_trl.envs.countdown import Countdown
from ragen2_trl.envs.deepcoder import DeepCoder
from ragen2_trl.envs.episode import Episode, Limits
from ragen2_trl.envs.frozen_lake import FrozenLake
from ragen2_trl.envs.metamath_qa import MetaMathQA
from ragen2_trl.envs.mixture import TaskMixture
from ragen2_trl.envs.play import Outcome, Play, respond_all
from ragen2_trl.envs.presets import PRESETS, preset_options
from ragen2_trl.envs.responses import Response, completion_text, format_response, parse_response
from ragen2_trl.envs.search_qa import SearchQA
from ragen2_trl.envs.sokoban import Sokoban
from ragen2_trl.envs.tools import ToolEnvironment
from ragen2_trl.envs.webshop import WebShop

ENVIRONMENTS: dict[str, type[Environment]] = {
    task.name: task for task in (FrozenLake, Sokoban, Countdown, MetaMathQA, SearchQA, WebShop, DeepCoder, Bandit)
}


def make_env(name: str, preset: str | None = None, **options: Any) -> Environment:
    """The task called `name`, with the options its class takes.

    Args:
        name: One of `ENVIRONMENTS`.
        preset: A named set of options, such as `"ragen2"`, the task as RAGEN-2 configures it; see `PRESETS`.
        **options: Those of the task's class, and those of `Environment`; with a preset, none that contradicts it.

    Raises:
        ValueError: If the name, the preset, an option or the value of an option is not known or not allowed.

    >>> make_env("frozen_lake", size=5).name
    'frozen_lake'
    """
    if name not in ENVIRONMENTS:
        raise ValueError(f"environment must be one of {sorted(ENVIRONMENTS)}, got {name!r}")
    allowed = options_of(name)
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ValueError(f"options of {name} must be among {[*allowed, 'preset']}, got {unknown}")
    if preset is None:
        return ENVIRONMENTS[name](**options)
    env = ENVIRONMENTS[name](**preset_options(name, preset, options))
    env.preset, env.options = preset, {"preset": preset, **options}  # from which it can be made again
    return env


def options_of(name: str) -> list[str]:
    """The options that a task takes, its own before those that all have."""
    return [*_options(ENVIRONMENTS[name].__init__), *_options(Environment.__init__)]


def _options(init: Callable[..., None]) -> list[str]:
    _self, *parameters = inspect.signature(init).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


__all__ = [
    "ENVIRONMENTS",
    "PRESETS",
    "Bandit",
    "Countdown",
    "DeepCoder",
    "Environment",
    "Episode",
    "FrozenLake",
    "Limits",
    "MetaMathQA",
    "Outcome",
    "Play",
    "Response",
    "SearchQA",
    "Sokoban",
    "TaskMixture",
    "ToolEnvironment",
    "WebShop",
    "completion_text",
    "format_response",
    "make_env",
    "options_of",
    "parse_response",
    "respond_all",
]
