"""A training run as its report and its model card tell it: from a trainer, or from what it left on disk."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from transformers import Trainer

from ragen2_trl.instrument.information import FORMAT_RATIO, PATIENCE
from ragen2_trl.reporting.files import (
    DIAGNOSTICS,
    EVALUATIONS,
    HISTORY_FILE,
    MEASUREMENTS,
    RUN_FILE,
    STATE_FILE,
    numbered,
    read_json,
    write_whole,
)
from ragen2_trl.reporting.settings import settings_of, versions_of_packages

FIRST_TURN = "mi/first_turn"  # log keys of the scope that regimes are told by
# What callbacks keep in `TrainerState.stateful_callbacks`, which every checkpoint carries.
MI_STATE, RUN_STATE = "ragen2_mutual_information", "ragen2_run"

REGIME_FLAGS = ("mi/regime/depends_on_prompt", "mi/regime/low_entropy")
REGIME_BY_FLAGS = {
    (1, 0): "diverse",
    (1, 1): "compressed",
    (0, 0): "template_collapse",
    (0, 1): "low_entropy_collapse",
}
COLLAPSES = ("template_collapse", "low_entropy_collapse")


@dataclass(frozen=True)
class Collapse:
    """Consecutive measurements, two at least, in one of the collapsed regimes or without the format of reasoning.

    Args:
        regime: `template_collapse`, `low_entropy_collapse` or `format_collapse` (see `RegimeWatch`).
        first: Optimizer step of the first of them.
        last: Optimizer step of the last; `None` if the run ended with it.
    """

    regime: str
    first: int
    last: int | None


@dataclass(frozen=True)
class Run:
    """What is known of a run, whether it is over or not.

    Args:
        folder: The trainer's `output_dir`.
        log_history: The rows of every `log()`.
        regimes: (optimizer step, regime) of each measurement of mutual information.
        step: Optimizer steps done.
        max_steps: Optimizer steps planned.
        ended: Whether training is over: `train()` came to its end, or all of `max_steps` are done.
        resumed_at: Optimizer steps at which training went on from a checkpoint.
        settings: `SETTINGS`, `snr_*`, and the names of trainer, model and environment.
        versions: By package.
        evaluations: Held-out metrics, by `before` and `after`.
        drawn: How many of its `rows` the figures in `diagnostics/` show; 0 if there are none.
        silence: Why mutual information was not measured when it last should have been; `None` without the callback.
    """

    folder: Path
    log_history: list[dict[str, Any]]
    regimes: list[tuple[int, str]] = field(default_factory=list)
    step: int = 0
    max_steps: int = 0
    ended: bool = False
    resumed_at: list[int] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    drawn: int = 0
    silence: str | None = None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of training steps."""
        return [row for row in self.log_history if row.get("reward") is not None]

    @property
    def environment(self) -> str | None:
        """The task whose success was logged under `env/<task>/`."""
        return self.success_metric.split("/")[1] if self.success_metric else None

    @cached_property
    def success_metric(self) -> str | None:
        keys = (key for row in self.rows for key in row if key.startswith("env/") and key.endswith("/success"))
        return next(keys, None)

    def points(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of the training rows that have a finite value."""
        values = ((row.get("step", 0), row.get(key)) for row in self.rows)
        return [(step, value) for step, value in values if isinstance(value, int | float) and math.isfinite(value)]

    @property
    def collapses(self) -> list[Collapse]:
        """All there were, the latest last: one that lasts, and a regime rather than a format."""
        valid = self.points("mi/valid_thinking_rate")
        formats = [(step, "format_collapse" if rate < FORMAT_RATIO * valid[0][1] else "") for step, rate in valid]
        found = [*_streaks(formats, ("format_collapse",)), *_streaks(self.regimes, COLLAPSES)]
        return sorted(found, key=lambda one: (one.last is None, one.last or 0, one.regime in COLLAPSES))

    @property
    def status(self) -> str:
        planned = f" of {self.max_steps}" if self.max_steps > 0 else ""
        if not self.ended:
            return f"unfinished: at step {self.step}{planned}"
        return (
            f"finished {self.step} steps" if self.step >= self.max_steps else f"stopped at step {self.step}{planned}"
        )

    @property
    def verdict(self) -> str:
        """In a few words, whether reasoning depends on its prompt."""
        if not self.regimes:
            return "Not measured"
        names = {
            "template_collapse": "Template collapse",
            "low_entropy_collapse": "Low-entropy collapse",
            "format_collapse": "Format collapse",
        }
        step, regime = self.regimes[-1]
        latest = self.collapses[-1] if self.collapses else None
        if self.mood == "collapsed":
            return f"{names[latest.regime]} since step {latest.first}"
        if regime in COLLAPSES:
            return f"{names[regime]} in the last measurement, at step {step}"
        if self.mood == "suspect":
            return f"Reasoning depended on its prompt when last measured, at step {step}"
        if latest is not None:
            return f"Recovered: {names[latest.regime].lower()} from step {latest.first} to {latest.last}"
        return "Reasoning depends on its prompt"

    @property
    def mood(self) -> str:
        """`unknown`, `collapsed`, `suspect`, `recovered` or `healthy`.

        Suspect is a run whose last measurement alone is a collapse, and one that could not be measured for more than
        twice as long as ever before.
        """
        if not self.regimes:
            return "unknown"
        collapses = self.collapses
        if collapses and collapses[-1].last is None:
            return "collapsed"
        steps = [0, *(step for step, _ in self.regimes)]
        longest = max(after - before for before, after in pairwise(steps))
        if self.regimes[-1][1] in COLLAPSES or self.step - steps[-1] > 2 * longest:
            return "suspect"
        return "recovered" if collapses else "healthy"

    @property
    def has_learnt_nothing(self) -> bool:
        """Whether no step had a group to train on, so that the weights are those that the run began with."""
        kept = self.points("snr/kept_fraction")
        return bool(kept) and not any(share for _, share in kept)

    @property
    def measurements(self) -> list[Path]:
        """Files of its measurements, by step."""
        return numbered(self.folder / MEASUREMENTS, "measurement", ".json", self.step)

    @property
    def completions(self) -> list[Path]:
        """Files of completions that TRL has saved, by step."""
        return numbered(self.folder / "completions", "completions", ".parquet", self.step)


def run_of(trainer: Trainer) -> Run:
    """The run that a trainer is in, or has done."""
    return _make_run(
        Path(trainer.args.output_dir),
        vars(trainer.state),
        settings_of(trainer),
        {"python": platform.python_version(), **versions_of_packages()},
    )


def read_run(folder: Path) -> Run:
    """The run that left its files in `folder`.

    `diagnostics/` says most: it is written when training begins and ends, and with every card, before the checkpoint
    of the same step. Without it, the newest checkpoint speaks.

    Raises:
        ValueError: If `folder` holds no log of a run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is no folder; allowed: the output_dir of a trainer.")
    checkpoints = [state for path in folder.glob(f"checkpoint-*/{STATE_FILE}") if (state := _read_state(path))]
    newest = max(checkpoints, key=lambda state: state["global_step"], default=None)
    state = _read_state(folder / DIAGNOSTICS / STATE_FILE) or _read_state(folder / STATE_FILE) or newest
    if newest and state["log_history"] and _goes_on(state["log_history"], newest["log_history"]):
        state = newest  # training went on without us
    history = read_json(folder / HISTORY_FILE, list)
    if state is None and history is None:
        raise ValueError(
            f"{str(folder)!r} holds no log of a run; allowed: the output_dir of a trainer, with "
            f"{DIAGNOSTICS}/{STATE_FILE}, {HISTORY_FILE} or checkpoint-*/{STATE_FILE}."
        )
    if state is None or (state["log_history"] and _goes_on(state["log_history"], history or [])):
        last = max((row["step"] for row in _rows(history) if isinstance(row.get("step"), int)), default=0)
        state = {
            **(state or {}),
            "log_history": history,
            "global_step": max(last, (state or {}).get("global_step", 0)),
        }
    about = read_json(folder / DIAGNOSTICS / RUN_FILE, dict) or {}
    return _make_run(folder, state, _mapping(about, "settings"), _mapping(about, "versions"))


def write_run(trainer: Trainer) -> Run:
    """Write into `diagnostics/` what `read_run` reads, and give it."""
    folder = Path(trainer.args.output_dir) / DIAGNOSTICS
    folder.mkdir(parents=True, exist_ok=True)
    run = run_of(trainer)
    # The path of a best checkpoint is of no use to anyone but its owner.
    state = {**vars(trainer.state), "best_model_checkpoint": None}
    write_whole(folder / STATE_FILE, _one_row_a_line(state))
    about = {"settings": run.settings, "versions": run.versions}
    write_whole(folder / RUN_FILE, json.dumps(about, indent=2) + "\n")
    return run


def _one_row_a_line(state: Mapping[str, Any]) -> str:
    """JSON of a trainer's state, of which a long log is nearly all; with an indent it takes twice as long."""
    text = json.JSONEncoder(sort_keys=True, default=str).encode
    parts = {name: text(value) for name, value in state.items() if name != "log_history"}
    parts["log_history"] = "[\n" + ",\n".join(map(text, state["log_history"])) + "\n]"
    return "{\n" + ",\n".join(f'"{name}": {part}' for name, part in sorted(parts.items())) + "\n}\n"


def _goes_on(known: list[Any], history: list[Any]) -> bool:
    """Whether a log is of the same training and longer."""
    same = json.dumps(history[: len(known)], sort_keys=True) == json.dumps(known, sort_keys=True)
    return same and len(history) > len(known)


def _rows(history: Any) -> list[dict[str, Any]]:
    return [row for row in history or () if isinstance(row, dict)]


def _mapping(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _make_run(folder: Path, state: Mapping[str, Any], settings: dict[str, Any], versions: dict[str, str]) -> Run:
    kept = _mapping(state, "stateful_callbacks")
    lifecycle, history = _mapping(kept, RUN_STATE), _rows(state.get("log_history"))
    step, max_steps = state.get("global_step") or 0, state.get("max_steps") or 0
    ended = lifecycle.get("ended", False) or 0 < max_steps <= step
    # An "after" beside a run that goes on was measured before it was resumed.
    shown = {when: folder / file for when, file in EVALUATIONS.items() if ended or when == "before"}
    evaluations = {when: read_json(path, dict) for when, path in shown.items()}
    return Run(
        folder=folder,
        log_history=history,
        regimes=max(_regimes_kept(kept), _regimes_logged(history), key=len),
        step=step,
        max_steps=max_steps,
        ended=ended,
        resumed_at=lifecycle.get("resumed_at", []),
        settings=settings,
        versions=versions,
        drawn=lifecycle.get("drawn", 0),
        silence=_mapping(kept, MI_STATE).get("silence"),
        evaluations={when: metrics for when, metrics in evaluations.items() if metrics and _is_evaluation(metrics)},
    )


def _is_evaluation(metrics: Mapping[str, Any]) -> bool:
    return all(isinstance(metrics.get(f"success{bound}"), int | float) for bound in ("", "_ci_low", "_ci_high"))


def _streaks(measured: Sequence[tuple[int, str]], collapsed: Sequence[str]) -> list[Collapse]:
    """Measurements in a row that are in any of the collapsed regimes, called after the last of them."""
    streaks = [list(streak) for _, streak in groupby(measured, key=lambda one: one[1] in collapsed)]
    return [
        Collapse(streak[-1][1], streak[0][0], None if streak is streaks[-1] else streak[-1][0])
        for streak in streaks
        if streak[0][1] in collapsed and len(streak) >= PATIENCE
    ]


def _regimes_kept(callbacks: Mapping[str, Any]) -> list[tuple[int, str]]:
    """What `MutualInformationCallback` has kept of them."""
    watch = _mapping(_mapping(callbacks, MI_STATE), "watch")
    return [(int(step), regime) for step, regime in watch.get("regimes") or ()]


def _regimes_logged(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """The same by the rows of a log that is all there is, or newer than the state; means of two regimes tell none."""
    flags = ((row.get("step", 0), tuple(map(row.get, REGIME_FLAGS))) for row in rows)
    return [(step, REGIME_BY_FLAGS[values]) for step, values in flags if values in REGIME_BY_FLAGS]


def _read_state(path: Path) -> dict[str, Any] | None:
    state = read_json(path, dict)
    is_state = state and isinstance(state.get("global_step"), int) and isinstance(state.get("log_history"), list)
    return state if is_state else None
