"""The numbers of a run, each stated once: console, model card, report and `summary.json` print this list.

What may be said about a run in sentences is in `instrument.findings`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ragen2_trl.instrument.health import is_number
from ragen2_trl.instrument.information import RETRIEVAL_DEPTHS
from ragen2_trl.metrics import (
    ACCURACY,
    ANSWER,
    ANSWER_PROMPT,
    ANSWER_THOUGHT,
    BOUND,
    CHANCE,
    CLIPPED,
    CONDITIONAL_ENTROPY,
    ENTROPY,
    FIRST_TURN,
    INFORMATION,
    KEPT,
    MARGINAL_ENTROPY,
    VALID_THINKING,
    ZERO_VARIANCE,
    in_unit,
    label,
    metric,
)
from ragen2_trl.record.files import EPISODE_FILES, numbered
from ragen2_trl.record.held_out import HeldOutCurve, HeldOutPoint, tasks_of
from ragen2_trl.record.run import Run, running_means

HELD_OUT, SAMPLED, COMPUTED, STEPS = "held_out_success", "completions_sampled", "update_positions", "steps"
AGAINST_TRL = "times plain TRL"
CHOSEN = "of the prompts that were chosen, not of all"
# Means over training steps, then single measurements, each with the key of its chance or of its bound.
MEANS = (KEPT, ZERO_VARIANCE, ENTROPY)
MEASURED = {
    ANSWER_PROMPT: "",
    ANSWER_THOUGHT: "",
    ACCURACY: CHANCE,
    INFORMATION: BOUND,
    CONDITIONAL_ENTROPY: "",
    MARGINAL_ENTROPY: "",
    VALID_THINKING: "",
}
# What a diagnosis tells besides, as it is all that there is.
DIAGNOSED = {f"{FIRST_TURN}/retrieval_accuracy@{k}": f"{FIRST_TURN}/retrieval_chance@{k}" for k in RETRIEVAL_DEPTHS}
DIAGNOSED |= {f"{FIRST_TURN}/mi_token": "", CLIPPED: ""}
DIAGNOSED |= {f"{ANSWER}/{name}": "" for name in ("prompt_swap_bits", "thought_swap_in_group_bits", "same_across")}


@dataclass(frozen=True)
class Value:
    """A number of a fact.

    Args:
        number: In the unit of the fact.
        step: Its optimizer step, where it has one.
        beside: What it must be read with: its interval, chance or bound.
    """

    number: float
    step: int | None = None
    beside: str = ""


@dataclass(frozen=True)
class Fact:
    """A quantity of a run, from its start to its end.

    Args:
        key: For programs: a log key where it has one.
        label: For people. It may hold names of others, such as those of reward functions and tasks.
        unit: `fraction`, `count`, `nats`, `times plain TRL`, ...; it decides how values are written.
        last: At the end; `None` where it was measured at the start alone.
        first: At the start; `None` where there is no other value than the last.
        best: The highest; `None` where higher is not better, or there is one value.
        note: What the values do not say.
    """

    key: str
    label: str
    unit: str
    last: Value | None
    first: Value | None = None
    best: Value | None = None
    note: str = ""

    @property
    def title(self) -> str:
        """The label, with the unit where values do not show it."""
        return self.label if self.unit in ("", "fraction", "count") else f"{self.label} ({self.unit})"

    def number(self, value: Value | None) -> str:
        """A value as tables write it; empty for none."""
        return "" if value is None else in_unit(value.number, self.unit)

    def text(self, value: Value | None, with_step: bool = False) -> str:
        """A value with what it must be read with, and with its step where that is asked for."""
        if value is None:
            return ""
        step = f"step {value.step}" if with_step and value.step is not None else ""
        beside = ", ".join(filter(None, [value.beside, step]))
        return f"{self.number(value)} ({beside})" if beside else self.number(value)


def facts(run: Run) -> list[Fact]:
    """The facts of a run, those first that matter most: outcome, cost, what the filter kept, reasoning."""
    found = outcomes(run)
    if run.is_played:
        return found
    found += [*_cost(run), *_steps(run)]
    for key in MEANS:
        found += _logged(run, key, running_means(run.points(key)))
    for key, limit in (MEASURED | (DIAGNOSED if run.is_diagnosed else {})).items():
        found += _logged(run, key, run.points(key), limit)
    return found


def outcomes(run: Run) -> list[Fact]:
    """What training was for: held-out success, or else success and rewards in training; the first matters most."""
    return _played(run) if run.is_played else [*_held_out(run), *_in_training(run)]


def outcome(run: Run) -> str:
    """How a run ended, beside how it began, in a sentence; nothing where no success and no reward is known."""
    one = next((fact for fact in outcomes(run) if fact.last is not None), None)
    if one is None:
        return ""
    began = f"{one.number(one.first)} → " if one.first else ""
    return f"{one.label[:1].upper()}{one.label[1:]} {began}{one.text(one.last)}."


def summary(run: Run) -> dict[str, Any]:
    """What `summary.json` holds of a run: its facts and findings, and the held-out metrics at its ends."""
    ends = {when: run.evaluations.get(when) for when in ("before", "after")}
    said = [finding.to_dict() for finding in run.findings]
    return {"status": run.status, "steps": run.step, **ends, "facts": to_dicts(facts(run)), "findings": said}


def to_dicts(found: Sequence[Fact]) -> list[dict[str, Any]]:
    """Facts for JSON."""
    return [asdict(fact) for fact in found]


def evaluated(metrics: Mapping[str, float]) -> list[Fact]:
    """The facts of one evaluation, as `evaluate_model` measures it: means with their intervals."""
    found = []
    for name, value in metrics.items():
        if f"{name}_ci_low" in metrics:
            low, high = metrics[f"{name}_ci_low"], metrics[f"{name}_ci_high"]
            found.append(Fact(name, name, "", Value(value, beside=f"{low:.3f} to {high:.3f}")))
        if name == "success" and "random_success" in metrics:
            found.append(Fact("random_success", "random baseline", "", Value(metrics["random_success"])))
        if name == "failed":
            found.append(Fact(name, "failed, left out", "", Value(value)))
    return found


def _of(key: str, label: str, unit: str, values: Sequence[Value], note: str = "", has_best: bool = True) -> Fact:
    """A fact of at least one value, in the order of steps."""
    if len(values) == 1:
        return Fact(key, label, unit, values[0], note=note)
    best = max(values, key=lambda value: value.number) if has_best else None
    return Fact(key, label, unit, values[-1], values[0], best, note)


def _held_out(run: Run) -> list[Fact]:
    """A fact for each curve, or else one of the evaluations before and after training."""
    if run.held_out:
        return [_of_curve(curve, len(run.held_out) > 1) for curve in run.held_out.values()]
    before, after = (run.evaluations.get(when) for when in ("before", "after"))
    known = [metrics for metrics in (before, after) if metrics]
    if not known:
        return []
    notes = [tasks_of(known), _baseline(known[-1].get("random_success"))]
    ends = [None if metrics is None else _success(metrics) for metrics in (before, after)]
    found = [Fact(HELD_OUT, "held-out success", "fraction", ends[1], ends[0], note=_note(notes))]
    for key in (key for key in known[-1] if key.endswith("/success")):  # of several tasks that of each
        ends = [
            _success(metrics, key) if metrics and is_number(metrics.get(key)) else None for metrics in (before, after)
        ]
        task = key.removesuffix("/success")
        found.append(Fact(f"{HELD_OUT}/{task}", f"held-out success on {task}", "fraction", ends[1], ends[0]))
    return found


def _success(metrics: Mapping[str, float], key: str = "success") -> Value:
    low, high = (metrics.get(f"{key}_ci_{end}") for end in ("low", "high"))
    return Value(metrics[key], beside=f"{low:.1%} to {high:.1%}" if is_number(low) and is_number(high) else "")


def _of_curve(curve: HeldOutCurve, is_named: bool) -> Fact:
    def value(point: HeldOutPoint) -> Value:
        return Value(point.success, point.step, f"{point.low:.1%} to {point.high:.1%}")

    area = f"mean over the steps {curve.area:.1%}" if len(curve.points) > 1 else ""
    return _of(
        f"{HELD_OUT}/{curve.task}" if is_named else HELD_OUT,
        f"held-out success on {curve.task}" if is_named else "held-out success",
        "fraction",
        [value(point) for point in curve.points],
        _note([curve.tasks, area, _baseline(curve.random_baseline)]),
    )


def _baseline(success: Any) -> str:
    return f"random baseline {success:.1%}" if is_number(success) else ""


def _in_training(run: Run) -> list[Fact]:
    """Success and rewards of training steps, and TRL's own evaluations. Where prompts are chosen by what they
    promise, a mean over their completions is none over the data."""
    chosen = bool(run.settings.get("snr_prompt_selection"))
    chosen_rewards = chosen or bool(run.settings.get("snr_pilot_generations"))
    found = []
    for name, points, is_fraction in run.outcomes:
        in_training = name.endswith("in training")
        note = CHOSEN if in_training and (chosen if is_fraction else chosen_rewards) else ""
        name = "success" if run.is_diagnosed and is_fraction else name
        values = [Value(number, step) for step, number in points]
        found.append(_of(name.replace(" ", "_"), name, "fraction" if is_fraction else "", values, note))
    return found


def _cost(run: Run) -> list[Fact]:
    cost = run.cost
    if cost is None:
        return []
    rows = "" if cost.rows is None else f" for {cost.rows:,.0f} rows"
    note = f"{cost.sampled:,.0f}{rows}; plain TRL {cost.plain_sampled:,.0f}"
    found = [Fact(SAMPLED, "completions sampled", AGAINST_TRL, Value(cost.sampling_ratio), note=note)]
    if cost.update_ratio is not None:
        note = f"{cost.update:,.0f}; plain TRL {cost.plain_update:,.0f}"
        found.append(Fact(COMPUTED, "update positions", AGAINST_TRL, Value(cost.update_ratio), note=note))
    return found


def _steps(run: Run) -> list[Fact]:
    if run.is_diagnosed or not run.step:
        return []
    kept = run.points(KEPT)
    # Not by `snr/empty_steps`: with lossless a step without signal is one, as TRL takes it, too.
    empty = sum(share == 0 for _, share in kept)
    seconds = run.points("cost/seconds")
    notes = [
        f"of {run.max_steps:,}" if run.step < run.max_steps else "",
        f"no group kept in {empty} of {len(kept)} logged" if empty else "",
        f"{seconds[-1][1]:,.0f} s" if seconds else "",
    ]
    return [Fact(STEPS, "optimizer steps", "count", Value(run.step), note=_note(notes))]


def _logged(run: Run, key: str, points: Sequence[tuple[int, float]], limit: str = "") -> list[Fact]:
    """The fact of a log key, each value with the chance or the bound of its own measurement: another may have had
    another number of prompts."""
    one, at = metric(key), dict(run.points(limit)) if limit else {}
    if one is not None and one.unit == "fraction":  # among no more prompts than tries a hit says nothing
        points = [(step, number) for step, number in points if at.get(step) != 1]
    if not points or one is None:
        return []
    values = [
        Value(number, step, f"{label(limit)} {in_unit(at[step], one.unit)}" if step in at else "")
        for step, number in points
    ]
    name = one.label or f"{'answers: ' * key.startswith(ANSWER)}{key.rpartition('/')[2].replace('_', ' ')}"
    note = ""
    if key == ACCURACY and run.evidence:
        last = run.evidence[-1]
        note = f"{last.num_completions:.0f} reasoning traces, p = {last.p_value:.2g} by chance"
    return [_of(key, name, one.unit, values, note, key in (ACCURACY, INFORMATION))]


def _played(run: Run) -> list[Fact]:
    """Of a folder of episodes: the success of its latest evaluation, or else of its latest training step."""
    from ragen2_trl.record.saved_episodes import read_episodes  # with environments, which a training may not know

    for name in reversed(EPISODE_FILES):
        for path in reversed(numbered(run.folder, name, ".jsonl", run.step)):
            try:
                solved = [one.success for one in read_episodes(path)]
            except (OSError, ValueError):  # the page names the file
                continue
            value = Value(sum(solved) / len(solved))
            return [Fact("success", "success", "fraction", value, note=f"{len(solved):,} episodes")]
    return []


def _note(parts: Sequence[str]) -> str:
    return "; ".join(part for part in parts if part)
