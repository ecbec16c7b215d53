"""Checks that what a run has left is of the form that is read here: checkpoints and run records may be anybody's.

Each check raises a `ValueError` of one line that names the file and the field.
"""

import math
from collections.abc import Mapping
from typing import Any

from ragen2_trl.metrics import STEP_OF_MI
from ragen2_trl.saved_state import short, wrong

MAX_STEP = 10**12


def check_state(state: Mapping[str, Any], where: str) -> None:
    """Of `trainer_state.json`."""
    _check_step(state.get("global_step"), where, "global_step")
    if state.get("max_steps") is not None:
        _check_step(state["max_steps"], where, "max_steps")
    check_history(state.get("log_history"), where, "log_history")
    check_callbacks(state.get("stateful_callbacks"), where)


def check_callbacks(callbacks: Any, where: str) -> None:
    """Of what our callbacks have kept in a trainer's state."""
    kept = _mapping(callbacks, where, "stateful_callbacks")
    lifecycle = _mapping(kept.get("ragen2_run"), where, "ragen2_run")
    if not isinstance(lifecycle.get("ended", False), bool):
        raise wrong(f"{where}: ragen2_run.ended", "true or false", lifecycle["ended"])
    _check_step(lifecycle.get("drawn", 0), where, "ragen2_run.drawn")
    for step in _list(lifecycle.get("resumed_at"), where, "ragen2_run.resumed_at"):
        _check_step(step, where, "ragen2_run.resumed_at")
    information = _mapping(kept.get("ragen2_mutual_information"), where, "ragen2_mutual_information")
    if not isinstance(information.get("silence"), str | None):
        raise wrong(f"{where}: ragen2_mutual_information.silence", "a text or null", information["silence"])
    watch = _mapping(information.get("watch"), where, "ragen2_mutual_information.watch")
    for one in _list(watch.get("measurements"), where, "watch.measurements"):
        if not isinstance(one, Mapping):
            raise wrong(f"{where}: watch.measurements", "objects", one)
        _check_step(one.get("step"), where, "watch.measurements.step")


def check_history(rows: Any, where: str, field: str = "") -> None:
    """Of `log_history.json`: rows of numbers, texts and nothing else."""
    if not isinstance(rows, list):
        raise wrong(f"{where}: {field or 'all of it'}", "a list of objects", rows)
    for number, row in enumerate(rows):
        name = f"{field}[{number}]"
        if not isinstance(row, Mapping):  # left out by who reads it
            continue
        for key, value in row.items():
            if not isinstance(value, str | int | float | None) or (isinstance(value, int) and abs(value) > 2**63):
                raise wrong(f"{where}: {name}.{short(key)}", "a number of at most 64 bits, a text or null", value)
        for key in ("step", STEP_OF_MI):
            if row.get(key) is not None:
                _check_step(row[key], where, f"{name}.{key}")


def check_about(about: Mapping[str, Any], where: str) -> None:
    """Of `run.json`: settings, and versions by package."""
    for package, version in _mapping(about.get("versions"), where, "versions").items():
        if not isinstance(version, str):
            raise wrong(f"{where}: versions.{short(package)}", "a text", version)
    settings = _mapping(about.get("settings"), where, "settings")
    if not (environment := _mapping(settings.get("environment"), where, "settings.environment")):
        return
    if not isinstance(environment.get("name"), str):
        raise wrong(f"{where}: settings.environment.name", "a text", environment.get("name"))
    if not isinstance(environment.get("options"), Mapping):
        raise wrong(f"{where}: settings.environment.options", "an object", environment.get("options"))
    for name in ("max_turns", "max_actions"):
        _check_step(environment.get(name), where, f"settings.environment.{name}")


def check_evaluation(metrics: Mapping[str, Any], where: str) -> None:
    """Of `evaluation_before.json` and `evaluation_after.json`."""
    for name in ("success", "success_ci_low", "success_ci_high"):
        value = metrics.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise wrong(f"{where}: {name}", "a fraction", value)
    for name, value in metrics.items():
        if isinstance(value, int) and abs(value) > 2**63:
            raise wrong(f"{where}: {short(name)}", "a number of at most 64 bits", value)


def _check_step(value: Any, where: str, field: str) -> None:
    is_whole = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_whole or (isinstance(value, float) and not math.isfinite(value)) or not -1 <= value <= MAX_STEP:
        raise wrong(f"{where}: {field}", f"a number between -1 and {MAX_STEP}", value)


def _mapping(value: Any, where: str, field: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise wrong(f"{where}: {field}", "an object", value)
    return value or {}


def _list(value: Any, where: str, field: str) -> list[Any] | tuple[Any, ...]:
    if value is not None and not isinstance(value, list | tuple):
        raise wrong(f"{where}: {field}", "a list", value)
    return value or ()
