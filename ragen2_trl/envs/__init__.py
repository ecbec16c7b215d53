"""The tasks, by name. A task is one file, or a folder where it takes several: its rules, its text and its rewards.

What RAGEN-2 does differently is in `ragen2`, a file a task, and made with `make_env(name, preset="ragen2")`.
"""

import inspect
from typing import Any

from ragen2_trl.envs.bandit import Bandit
from ragen2_trl.envs.checks import check_choice
from ragen2_trl.envs.countdown import Countdown
from ragen2_trl.envs.deepcoder import DeepCoder
from ragen2_trl.envs.environment import Environment
from ragen2_trl.envs.episode import Episode, Limits
from ragen2_trl.envs.frozen_lake import FrozenLake
from ragen2_trl.envs.metamath_qa import MetaMathQA
from ragen2_trl.envs.mixture import TaskMixture
from ragen2_trl.envs.outcomes import EpisodeOutcome
from ragen2_trl.envs.own_data import DatasetEnvironment
from ragen2_trl.envs.play import Play, respond_all
from ragen2_trl.envs.ragen2 import RAGEN2, RagenProtocol
from ragen2_trl.envs.reasoning_gym import ReasoningGym
from ragen2_trl.envs.responses import Response, completion_text, format_response, parse_response
from ragen2_trl.envs.search_qa import SearchQA
from ragen2_trl.envs.sokoban import Sokoban
from ragen2_trl.envs.tools import ToolEnvironment
from ragen2_trl.envs.webshop import WebShop
from ragen2_trl.names import named_object

_TASKS = (FrozenLake, Sokoban, Countdown, MetaMathQA, SearchQA, WebShop, DeepCoder, Bandit, ReasoningGym)
ENVIRONMENTS: dict[str, type[Environment]] = {task.name: task for task in _TASKS}
# By name: each task as somebody else has configured it.
PRESETS: dict[str, dict[str, type[RagenProtocol]]] = {"ragen2": RAGEN2}


def make_env(name: str, preset: str | None = None, **options: Any) -> Environment:
    """The task called `name`, with the options its class takes.

    Args:
        name: One of `ENVIRONMENTS`, or `package.module:Class` of a task of your own.
        preset: `"ragen2"` for the task as RAGEN-2 configures it; see `PRESETS`.
        **options: Those of the task's class, see `options_of`.

    Raises:
        ImportError: If a package of the task's extra is missing.
        ValueError: If the name, the preset, an option or the value of an option is not known or not allowed.

    >>> make_env("frozen_lake", size=5).name
    'frozen_lake'
    """
    task = task_class(name)
    if preset is not None:
        check_choice("preset", preset, presets_of(name))
        task = PRESETS[preset][name]
    allowed = options_of(task)
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        who = name if preset is None else f"{name} with preset={preset!r}"
        raise ValueError(f"options of {who} must be among {[*allowed, 'preset']}, got {unknown}")
    env = task(**options)
    if preset is not None:
        env.options = {"preset": preset, **options}  # from which it can be made again
    return env


def task_class(name: str) -> type[Environment]:
    """The class of a task, by one of `ENVIRONMENTS` or as `package.module:Class`.

    Raises:
        ValueError: If there is no such class, or it is no task.
    """
    if ":" not in name:
        check_choice("environment", name, [*sorted(ENVIRONMENTS), "package.module:Class"])
        return ENVIRONMENTS[name]
    task = named_object(name, "environment")
    if not (isinstance(task, type) and issubclass(task, Environment)):
        raise ValueError(f"environment={name!r} must name a subclass of ragen2_trl.envs.Environment, got {task!r}")
    return task


def presets_of(name: str) -> list[str]:
    """The presets that a task has."""
    return sorted(preset for preset, tasks in PRESETS.items() if name in tasks)


def options_of(task: type[Environment]) -> dict[str, inspect.Parameter]:
    """The options that a class of tasks takes, by name: its own, then those of the classes that it hands others on to.

    >>> list(options_of(PRESETS["ragen2"]["bandit"]))[:2]
    ['prompts', 'split']
    """
    holders = [holder for holder in task.__mro__ if "__init__" in vars(holder) and issubclass(holder, Environment)]
    fixed: set[str] = set()
    if issubclass(task, RagenProtocol):  # which sets the options of all tasks itself, and some of the task's
        holders, fixed = holders[:-1], set(task.fixed)
    options: dict[str, inspect.Parameter] = {}
    for holder in holders:
        for name, parameter in list(inspect.signature(holder.__init__).parameters.items())[1:]:
            if parameter.kind is not parameter.VAR_KEYWORD and name not in fixed:
                options.setdefault(name, parameter)
    return options


__all__ = [
    "ENVIRONMENTS",
    "PRESETS",
    "Bandit",
    "Countdown",
    "DatasetEnvironment",
    "DeepCoder",
    "Environment",
    "Episode",
    "EpisodeOutcome",
    "FrozenLake",
    "Limits",
    "MetaMathQA",
    "Play",
    "ReasoningGym",
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
    "presets_of",
    "respond_all",
    "task_class",
]
