"""A training run as its report and its model card tell it, made of a trainer or of what it left on disk."""

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ragen2_trl.instrument.answers import AnswerEvidence
from ragen2_trl.instrument.findings import (
    Finding,
    answer_findings,
    log_findings,
    nothing_learnt,
    reasoning_finding,
    training_finding,
)
from ragen2_trl.instrument.health import NAMES, Health, health, is_number
from ragen2_trl.instrument.verdict import Evidence, Judgement, judge
from ragen2_trl.messages import counted
from ragen2_trl.metrics import ANSWER, CLIPPED, EMPTY_STEPS, FIRST_TURN, KEPT, STEP_OF_MI, VALID_THINKING
from ragen2_trl.record.checks import MAX_STEP, check_about, check_evaluation, check_history, check_state
from ragen2_trl.record.cost import Cost, cost_of
from ragen2_trl.record.files import (
    DIAGNOSIS_FILE,
    DIAGNOSTICS,
    EPISODE_FILES,
    EVALUATIONS,
    HISTORY_FILE,
    MEASUREMENTS,
    RUN_FILE,
    STATE_FILE,
    measured_step,
    numbered,
    read_json,
    write_json,
)
from ragen2_trl.record.held_out import HeldOutCurve, curves_of
from ragen2_trl.record.rows import find_files
from ragen2_trl.record.settings import settings_of, settings_of_state, steps_per_generation, versions_of_packages

MAX_COMPLETIONS = 10**6  # of a measurement; more cannot have been scored
MAX_CURVES = 8  # tasks
MAX_REWARDS = 8  # reward functions
MEAN_OVER = 10  # log rows: single training steps are noisy
# What callbacks keep in `TrainerState.stateful_callbacks`, which every checkpoint carries.
MI_STATE, RUN_STATE, HEALTH_STATE = "ragen2_mutual_information", "ragen2_run", "ragen2_health"
COST_STATE = "ragen2_costs"
_OF_FUNCTION = re.compile(r"rewards/(.+)/mean")  # TRL's key for one reward function
NO_SETTINGS = (
    f"No {DIAGNOSTICS}/{RUN_FILE} was left: of the settings only those in the trainer's state are known. Before "
    "training: trainer.add_callback(MutualInformationCallback(trainer))"
)


class NoLogError(ValueError):
    """A folder holds no log of a run."""


@dataclass(frozen=True)
class Run:
    """What is known of a run, whether it is over or not.

    Args:
        folder: The trainer's `output_dir`.
        log_history: The rows of every `log()`.
        evidence: What each measurement of mutual information found.
        step: Optimizer steps done.
        max_steps: Optimizer steps planned.
        ended: Whether training is over: `train()` came to its end, or all of `max_steps` are done.
        resumed_at: Optimizer steps at which training went on from a checkpoint.
        settings: `SETTINGS`, `snr_*`, and the names of trainer, model and environment.
        versions: By package.
        evaluations: Held-out metrics, by `before` and `after`, of the curve where there is one.
        drawn: How many of its `rows` the figures in `diagnostics/` show; 0 if there are none.
        is_played: Whether it is no training, but a folder of episodes, as `evaluate --episodes` leaves.
        is_diagnosed: Whether it is no training, but a diagnosis, as `diagnose` leaves: rows are of what it measured.
        health_keys: Further log keys that health reads.
        silence: Why mutual information was not measured when it last should have been; `None` without the callback.
        problems: What of it cannot be read.
    """

    folder: Path
    log_history: list[dict[str, Any]]
    evidence: list[Evidence] = field(default_factory=list)
    step: int = 0
    max_steps: int = 0
    ended: bool = False
    resumed_at: list[int] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    drawn: int = 0
    health_keys: dict[str, str] = field(default_factory=dict)
    silence: str | None = None
    problems: list[str] = field(default_factory=list)
    is_played: bool = False
    is_diagnosed: bool = False

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of training steps, or of the measurements of a diagnosis."""
        return [row for row in self.log_history if self.is_diagnosed or row.get("reward") is not None]

    @property
    def environment(self) -> str | None:
        """The task whose success was logged under `env/<task>/`."""
        return self.success_metric.split("/")[1] if self.success_metric else None

    @cached_property
    def success_metric(self) -> str | None:
        keys = (key for row in self.rows for key in row if key.startswith("env/") and key.endswith("/success"))
        return next(keys, None)

    @cached_property
    def held_out(self) -> dict[str, HeldOutCurve]:
        """Held-out success over the steps by task, that of the trained task first."""
        curves = curves_of(self.log_history)
        return dict(sorted(curves.items(), key=lambda item: item[0] != self.environment)[:MAX_CURVES])

    def points(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of the training rows that have a finite value."""
        values = ((step_of(row, key), row.get(key)) for row in self.rows)
        return [(step, value) for step, value in values if is_number(value)]

    @cached_property
    def outcomes(self) -> list[tuple[str, list[tuple[int, float]], bool]]:
        """Name, (step, value) points, and whether values are fractions: TRL's own evaluations first, then success and
        reward in training as running means, then each reward function where there are several."""
        evaluated = [(row.get("step", 0), row.get("eval_reward")) for row in self.log_history]
        functions = [match[1] for key in self.rows[-1] if (match := _OF_FUNCTION.fullmatch(key))] if self.rows else []
        keys = {self.success_metric: "success in training", "reward": "reward in training"}
        if len(functions) > 1:
            keys |= {f"rewards/{name}/mean": f"{name} in training" for name in functions[:MAX_REWARDS]}
        found = [("eval_reward", [(step, value) for step, value in evaluated if is_number(value)], False)]
        for key, name in keys.items():
            if key is not None:
                found.append((name, running_means(self.points(key)), key == self.success_metric))
        return [one for one in found if one[1]]

    @property
    def is_below_random(self) -> bool:
        """Whether held-out success ended no better than random play, where that was measured."""
        after = self.evaluations.get("after", {})
        return is_number(after.get("random_success")) and after["success"] <= after["random_success"]

    @property
    def cost(self) -> Cost | None:
        """Sampling and updates against plain TRL, where they were counted."""
        return cost_of(self.log_history)

    @cached_property
    def findings(self) -> list[Finding]:
        """What may be said of the run: of its training, answers, reasoning and log, in this order.

        First comes the state of training. There is none of a diagnosis, and nothing is said of episodes alone.
        """
        if self.is_played:
            return []
        answers = answer_findings(self.answers)
        lost = bool(self.answers) and not self.answers[-1].uses_prompt
        of_reasoning = reasoning_finding(self.judgements, self.step, self.silence, lost)
        if self.is_diagnosed:
            return [*answers, of_reasoning]
        state = training_finding(self.health.state)
        kept = self.points(KEPT)
        return [
            replace(state, severity="note") if state.severity == "good" and self.is_below_random else state,
            *([nothing_learnt()] if kept and not any(share for _, share in kept) else []),
            *answers,
            of_reasoning,
            *log_findings(self.log_history, len(self.rows), self.problems),
        ]

    @cached_property
    def judgements(self) -> list[Judgement]:
        """What each measurement says, seen with those before it."""
        return judge(self.evidence)

    @cached_property
    def health(self) -> Health:
        """The states of training, by the log rows."""
        return health(self.log_history, self.health_keys, steps_per_generation=steps_per_generation(self.settings))

    @cached_property
    def answers(self) -> list[AnswerEvidence]:
        """What each measurement of answers found, by the log rows."""
        found = []
        for row in self.rows:
            metrics = {key.removeprefix(f"{ANSWER}/"): value for key, value in row.items() if key.startswith(ANSWER)}
            evidence = AnswerEvidence.of({name: value for name, value in metrics.items() if is_number(value)})
            if evidence.is_possible:
                found.append(replace(evidence, step=step_of(row, ANSWER)))
        return found

    @property
    def status(self) -> str:
        if self.is_played:
            return "played"
        if self.is_diagnosed:
            return "diagnosed"
        planned = f" of {self.max_steps}" if self.max_steps > 0 else ""
        if not self.ended:
            return f"unfinished: at step {self.step}{planned}"
        if self.step >= self.max_steps:
            return f"finished {counted(self.step, 'step')}"
        return f"stopped at step {self.step}{planned}"

    @property
    def filters_nothing(self) -> bool:
        """Whether every completion was trained on, as in plain TRL."""
        of_trl = self.settings.get("trainer") in ("GRPOTrainer", "RLOOTrainer")
        return of_trl or {kept for _, kept in self.points(KEPT)} == {1.0}

    @property
    def _measured(self) -> Path:
        return self.folder if self.is_diagnosed else self.folder / MEASUREMENTS

    @property
    def measurements(self) -> list[Path]:
        """Files of its measurements, by step."""
        return numbered(self._measured, "measurement", ".json", self.step)

    @property
    def completions(self) -> list[Path]:
        """Files of completions that TRL has saved, by step, or that a diagnosis has sampled."""
        if self.is_diagnosed:
            return [path for path in (self.folder / "completions.parquet",) if path.is_file()]
        folder = self.folder / "completions"
        files = find_files(folder) if folder.is_dir() else []
        of_steps = [file for file in files if measured_step(file) is not None]  # others beside them are copies
        return [file for file in of_steps or files if (measured_step(file) or 0) <= self.step]


def step_of(row: Mapping[str, Any], key: str) -> int:
    """The optimizer step that a row's value of a key is of: a measurement's own, or the row's."""
    own = row.get(STEP_OF_MI) if key.startswith("mi/") else None
    return int(own) if is_number(own) else row.get("step") or 0


def running_means(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """(step, mean over the `mean_span` values up to there), from the first step that has as many."""
    span = mean_span(len(points))
    ends = range(span, len(points) + 1)
    return [(points[end - 1][0], sum(value for _, value in points[end - span : end]) / span) for end in ends]


def mean_span(count: int) -> int:
    """Over how many of so many values running means go: in short runs over fewer, so that first and last differ."""
    return max(1, min(MEAN_OVER, count // 2))


def run_of(trainer: Any) -> Run:
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

    A folder of episodes, or of a diagnosis, is a run that never trained.

    Raises:
        NoLogError: If `folder` holds no log of a run.
        ValueError: If a file there has a wrong value; the message is one line that names the file and the field.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is not a folder of a run, diagnosis or evaluation.")
    paths = list(folder.glob(f"checkpoint-*/{STATE_FILE}"))
    states = [state for path in paths if (state := _read_state(path))]
    newest = max(states, key=lambda state: state["global_step"], default=None)
    state = _read_state(folder / DIAGNOSTICS / STATE_FILE) or _read_state(folder / STATE_FILE) or newest
    if newest and state and state["log_history"] and _goes_on(state["log_history"], newest["log_history"]):
        state = newest  # training went on without us
    history = read_json(folder / HISTORY_FILE, list)
    if history is not None:
        check_history(history, str(folder / HISTORY_FILE))
    if state is None and history is None:
        if any(numbered(folder, name, ".jsonl", MAX_STEP) for name in EPISODE_FILES):
            return Run(folder, [], step=MAX_STEP, ended=True, is_played=True)
        diagnosis = read_json(folder / DIAGNOSIS_FILE, dict)
        if diagnosis is not None:
            return _diagnosed(folder, diagnosis)
        raise NoLogError(
            f"{str(folder)!r} holds no log of a run; allowed: the output_dir of a trainer, with "
            f"{DIAGNOSTICS}/{STATE_FILE}, {HISTORY_FILE} or checkpoint-*/{STATE_FILE}, or of a diagnosis, with "
            f"{DIAGNOSIS_FILE}."
        )
    if state is None or (state["log_history"] and _goes_on(state["log_history"], history or [])):
        last = max((row["step"] for row in _rows(history) if isinstance(row.get("step"), int)), default=0)
        state = {
            **(state or {}),
            "log_history": history,
            "global_step": max(last, (state or {}).get("global_step", 0)),
        }
    about = read_json(folder / DIAGNOSTICS / RUN_FILE, dict) or {}
    check_about(about, str(folder / DIAGNOSTICS / RUN_FILE))
    settings = _mapping(about, "settings")
    problems = [] if settings else [NO_SETTINGS]
    run = _make_run(folder, state, settings or settings_of_state(state), _mapping(about, "versions"))
    return replace(run, problems=problems)


def _diagnosed(folder: Path, diagnosis: Mapping[str, Any]) -> Run:
    """A diagnosis as its `diagnosis.json` tells it: its numbers under the log keys that a training has for them."""
    known = {
        "valid_thinking_rate": VALID_THINKING,
        "success": "env/diagnosed/success",
        "clipped_ratio": CLIPPED,
    }
    file, rows, evidence = str(folder / DIAGNOSIS_FILE), [], []
    for number, one in enumerate(_rows(diagnosis.get("path"))):
        metrics = {name: value for name, value in _mapping(one, "metrics").items() if is_number(value)}
        found = _evidence(metrics, metrics)
        if found is None:
            raise ValueError(f"{file!r} must have {Evidence.METRICS} in path[{number}], got {sorted(metrics)}")
        step = one["step"] if isinstance(one.get("step"), int) else None
        evidence.append(replace(found, step=step))
        rows.append(
            {"step": number if step is None else step}
            | {f"{FIRST_TURN}/{name}": value for name, value in metrics.items() if name not in known}
            | {key: metrics[name] for name, key in known.items() if name in metrics}
            | {f"{ANSWER}/{name}": value for name, value in _mapping(one, "answers").items() if is_number(value)}
        )
    if not rows:
        raise ValueError(f"{file!r} must have a measurement in path, got none")
    return Run(
        folder,
        rows,
        evidence,
        step=max(row["step"] for row in rows),
        ended=True,
        settings=_mapping(diagnosis, "settings"),
        versions=_mapping(diagnosis, "versions"),
        is_diagnosed=True,
    )


def write_run(trainer: Any) -> Run:
    """Write into `diagnostics/` what `read_run` reads, and give it."""
    folder = Path(trainer.args.output_dir) / DIAGNOSTICS
    folder.mkdir(parents=True, exist_ok=True)
    run = run_of(trainer)
    # The path of a best checkpoint is of no use to anyone but its owner.
    state = {**vars(trainer.state), "best_model_checkpoint": None}
    # Without an indent, which would take several times as long.
    write_json(folder / STATE_FILE, state, sort_keys=True, default=str)
    about = {"settings": run.settings, "versions": run.versions}
    write_json(folder / RUN_FILE, about, indent=2)
    return run


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
    found = {when: read_json(path, dict) for when, path in shown.items()}
    evaluations = {when: metrics for when, metrics in found.items() if metrics and _is_evaluation(metrics)}
    for when, metrics in evaluations.items():
        check_evaluation(metrics, str(shown[when]))
    run = Run(
        folder=folder,
        log_history=history,
        evidence=max(_evidence_kept(kept), _evidence_logged(history), key=len),
        step=step,
        max_steps=max_steps,
        ended=ended,
        resumed_at=list(lifecycle.get("resumed_at") or ()),
        settings=settings,
        versions=versions,
        drawn=lifecycle.get("drawn", 0),
        health_keys={
            key: name for key, name in _mapping(_mapping(kept, HEALTH_STATE), "keys").items() if name in NAMES
        },
        silence=_mapping(kept, MI_STATE).get("silence"),
        evaluations=evaluations,
    )
    curve = next(iter(run.held_out.values()), None)
    if curve is None:
        return run
    loaded = state.get("best_global_step") if settings.get("load_best_model_at_end") else None
    ends = {"after": curve.end(loaded).metrics} if ended else {}
    return replace(run, evaluations={"before": curve.first.metrics, **ends})


def _is_evaluation(metrics: Mapping[str, Any]) -> bool:
    return all(metrics.get(f"success{bound}") is not None for bound in ("", "_ci_low", "_ci_high"))


def _evidence_kept(callbacks: Mapping[str, Any]) -> list[Evidence]:
    """What `MutualInformationCallback` has kept of its measurements."""
    kept = _rows(_mapping(_mapping(callbacks, MI_STATE), "watch").get("measurements"))
    return [evidence for one in kept if (evidence := _evidence(one, one))]


def _evidence_logged(rows: Sequence[Mapping[str, Any]]) -> list[Evidence]:
    """The same by the rows of a log that is all there is, or newer than the state."""
    found = []
    for row in rows:
        if f"{FIRST_TURN}/{Evidence.METRICS[0]}" not in row:
            continue
        metrics = {key.removeprefix(f"{FIRST_TURN}/"): value for key, value in row.items()}
        step = step_of(row, FIRST_TURN)
        others = {
            "step": step,
            "updates": max(0, step - 1 - int(row.get(EMPTY_STEPS) or 0)),
            "valid_thinking_rate": row.get(VALID_THINKING),
            "success": next((row[key] for key in row if re.fullmatch("env/[^/]+/success", key)), None),
            "clipped_ratio": row.get(CLIPPED),
        }
        if evidence := _evidence(metrics, others):
            found.append(evidence)
    return found


def _evidence(metrics: Mapping[str, Any], others: Mapping[str, Any]) -> Evidence | None:
    """Of numbers that anyone may have written; `None` where one is missing that counts, or cannot be."""
    if not all(is_number(metrics.get(name)) for name in Evidence.METRICS):
        return None
    fractions = (metrics["retrieval_accuracy"], metrics["retrieval_chance"])
    if not all(0 <= fraction <= 1 for fraction in fractions) or not 1 <= metrics["num_completions"] <= MAX_COMPLETIONS:
        return None
    names = ("step", "updates", "valid_thinking_rate", "success", "clipped_ratio")
    known = {name: others[name] for name in names if is_number(others.get(name))}
    return Evidence.of(metrics, **{"step": 0, **known})


def _read_state(path: Path) -> dict[str, Any] | None:
    state: dict[str, Any] | None = read_json(path, dict)
    if state is None or state.get("global_step") is None or state.get("log_history") is None:  # something else
        return None
    check_state(state, str(path))
    return state
