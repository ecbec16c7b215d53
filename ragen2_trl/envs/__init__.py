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
from ragen2_trl.envs.responses import Response, completion_text, format_response, parse_response
from ragen2_trl.envs.search_qa import SearchQA
from ragen2_trl.envs.sokoban import Sokoban
from ragen2_trl.envs.tools import ToolEnvironment
from ragen2_trl.envs.webshop import WebShop

ENVIRONMENTS: dict[str, type[Environment]] = {
    task.name: task for task in (FrozenLake, Sokoban, Countdown, MetaMathQA, SearchQA, WebShop, DeepCoder, Bandit)
}


def make_env(name: str, **options: Any) -> Environment:
    """The task called `name`, with the options its class takes.

    Raises:
        ValueError: If the name, an option or the value of an option is not known.

    >>> make_env("frozen_lake", size=5).name
    'frozen_lake'
    """
    if name not in ENVIRONMENTS:
        raise ValueError(f"environment must be one of {sorted(ENVIRONMENTS)}, got {name!r}")
    allowed = [*_options(ENVIRONMENTS[name].__init__), *_options(Environment.__init__)]
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ValueError(f"options of {name} must be among {allowed}, got {unknown}")
    return ENVIRONMENTS[name](**options)


def _options(init: Callable[..., None]) -> list[str]:
    _self, *parameters = inspect.signature(init).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


__all__ = [
    "ENVIRONMENTS",
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
    "parse_response",
    "respond_all",
]
