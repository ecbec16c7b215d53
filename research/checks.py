"""What decides a claim: one primary check with an expected side. The other checks are secondary.

A check is a mapping of an experiment's file with a `name`, a `kind` and what the kind asks for (`KINDS`). One of them
has `primary: true` and the `true_effect` at which its power is stated. A check is significant where its p-value is at
most 0.05: the primary check's own if it was named before the runs, and Holm's over the others. A primary check named
after the runs is corrected with all others, since it was chosen with their results in sight.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ragen2_trl.instrument.health import is_number
from research.grid import Grid, Notes
from research.kinds import KINDS, Check
from research.measures import check_statistic
from research.plan import Experiment, question
from research.statistics import CONFIDENCE, IntervalEstimate, holm, power

SUPPORTED, OPPOSITE, INCONCLUSIVE, NO_VERDICT, NOT_RUN = (
    "supported",
    "opposite",
    "inconclusive",
    "no verdict",
    "not run yet",
)
VERDICTS = {1: SUPPORTED, -1: OPPOSITE, 0: INCONCLUSIVE}  # by the finding of the primary check
TO_REACH = "_to_reach"
OF_ORDER = ("correlation", "stronger_correlation")


@dataclass(frozen=True)
class Result:
    """What came of a check.

    Args:
        check: As the file has it.
        estimate: With interval; ratios are ratios, not logarithms.
        unit: `points` (of a fraction, in hundredths), `ratio`, `correlation` or `number`.
        seeds: That it rests on.
        notes: On what is missing.
        adjusted: The p-value after correction.
        level: The strictest level that this correction can ask of its own p-value.
        later: Whether it was added, or named primary, after the runs.
    """

    check: Check
    estimate: IntervalEstimate
    unit: str
    seeds: int
    notes: Notes = field(default_factory=Notes)
    adjusted: float = math.nan
    level: float = 1 - CONFIDENCE
    later: bool = False

    @property
    def name(self) -> str:
        return str(self.check["name"])

    @property
    def primary(self) -> bool:
        return bool(self.check.get("primary"))

    @property
    def finding(self) -> int:
        """1 as expected, -1 opposite, 0 inconclusive."""
        return self.estimate.side if self.adjusted <= 1 - CONFIDENCE else 0

    @property
    def shown(self) -> str:
        """The estimate with its interval."""
        return show(self.estimate, self.unit)

    @property
    def power(self) -> float:
        """Chance that the check comes out as expected if its `true_effect` is the truth and its runs scatter as
        they do; NaN without a standard error."""
        effect, null, within = self.check["true_effect"], null_of(self.check), self.check.get("within", 0.0)
        if self.unit == "ratio":
            effect, null, within = math.log(effect), math.log(null), math.log(1 + within)
        return power(effect - null, self.estimate, self.level, self.check["expects"], within)

    @property
    def true_effect(self) -> str:
        """In words."""
        return number(self.check["true_effect"], self.unit)


def show(estimate: IntervalEstimate, unit: str) -> str:
    """`+2.1 points (-0.4 to +4.6)`, `<= 0.28 times (0.18 to 0.42)`; without numbers, why there are none."""
    if math.isnan(estimate.value):
        return "no number"
    value = f"{estimate.bound} {number(estimate.value, unit)}".lstrip()
    if math.isnan(estimate.low):
        return f"{value} (no interval)"
    return f"{value} ({_digits(estimate.low, unit)} to {_digits(estimate.high, unit)})"


def number(value: float, unit: str) -> str:
    """`+2.1 points`, `0.28 times`, `+0.39`."""
    return _digits(value, unit) + {"points": " points", "ratio": " times"}.get(unit, "")


def _digits(value: float, unit: str) -> str:
    if unit == "points":
        return f"{100 * value:+.1f}"
    if unit == "ratio":
        return f"{value:.2f}"
    return f"{value:+.2f}" if abs(value) < 100 else f"{value:+.3g}"


def null_of(check: Check) -> float:
    """What an estimate is compared with."""
    if check["kind"] == "stronger_correlation":  # whose `than` is another predictor
        return 0.0
    return float(check.get("than", 1 if check["kind"] == "ratio" else 0))


def evaluate(grid: Grid, fixed: Sequence[Check] | None = None) -> list[Result]:
    """The checks of an experiment, with their correction: the primary check first.

    Args:
        grid: Its runs.
        fixed: The checks that there were before its runs ran; `None` if that is not known.
    """
    asked = {question(check): bool(check.get("primary")) for check in fixed or ()}

    def later(check: Check) -> bool:
        known = asked.get(question(check))
        return fixed is not None and (known is None or (bool(check.get("primary")) and not known))

    checks = sorted(grid.experiment.checks, key=lambda check: not check.get("primary"))
    results = [replace(_evaluate(grid, check), later=later(check)) for check in checks]
    alone = 1 if results and results[0].primary and not results[0].later else 0
    p_values = [result.estimate.p for result in results]
    adjusted = [*p_values[:alone], *holm(p_values[alone:])]
    levels = [1 - CONFIDENCE] * alone + [(1 - CONFIDENCE) / max(1, len(results) - alone)] * (len(results) - alone)
    return [replace(one, adjusted=p, level=level) for one, p, level in zip(results, adjusted, levels, strict=True)]


def verdict(grid: Grid, results: Sequence[Result]) -> str:
    """The finding of the primary check: `supported`, `opposite` or `inconclusive`.

    With fewer runs than planned it is a verdict so far, and `not run yet` while no check has a number. Where there is
    no check, or the file names a `flaw` for which the runs cannot decide, it is `no verdict`.
    """
    done, planned_runs = len(grid.runs), len({planned.key for planned in grid.planned_runs})
    no_number = bool(results) and all(math.isnan(result.estimate.value) for result in results)
    if not done or (done < planned_runs and no_number):
        return NOT_RUN
    primary = next((result for result in results if result.primary), None)
    said = NO_VERDICT if primary is None or grid.experiment.flaw else VERDICTS[primary.finding]
    return said if done >= planned_runs else f"{said}, so far ({done} of {planned_runs} runs)"


# What a check says


def validate(experiment: Experiment) -> None:
    """Raise a `ValueError` that names file, check and what is allowed, if a check cannot be read."""
    for check in experiment.checks:
        where = f"{experiment.path}: check {check.get('name', '')!r}"
        if check.get("kind") not in list(KINDS):  # which also takes what cannot be a key
            raise ValueError(f"{where}: kind={check.get('kind')!r} is not supported; allowed: {', '.join(KINDS)}")
        kind = KINDS[check["kind"]]
        required = {"name", "kind", "expects", *kind.required}
        allowed = {*required, *kind.optional, "within", "primary", "true_effect"}
        for names, what in ((required - check.keys(), "is missing"), (check.keys() - allowed, "is not known")):
            if names:
                one = min(map(str, names))
                raise ValueError(f"{where}: {one} {what}; allowed: {', '.join(sorted(allowed))}")
        _check_values(check, where)
        if check["expects"] not in (">", "<", "=") or (check["expects"] == "=") != ("within" in check):
            raise ValueError(
                f"{where}: expects={check['expects']!r} is not supported; allowed: '>', '<', and '=' with `within`"
            )
        for name in ("statistic", "x", "y", "than", "minus"):
            if isinstance(check.get(name), str):
                try:
                    check_statistic(check[name], of_pairs=name == "statistic" and kind.pairs)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from error
        for name in ("x", "y", "than", "minus"):
            if str(check.get(name, "")).endswith(TO_REACH):
                raise ValueError(f"{where}: {name}={check[name]!r} is not supported; allowed: as a ratio's statistic")
        if check["kind"] in OF_ORDER and check["expects"] == "=":
            raise ValueError(f"{where}: expects='=' is not supported; allowed for {check['kind']}: '>' and '<'")
        if str(check.get("statistic", "")).endswith(TO_REACH) and "target" not in check:
            raise ValueError(f"{where}: {check['statistic']} needs a target: a number, or levels whose end is it")
        if ("true_effect" in check) != bool(check.get("primary")):
            raise ValueError(f"{where}: true_effect must be there with `primary: true`, and with nothing else")
    primary = [check["name"] for check in experiment.checks if check.get("primary")]
    if experiment.checks and len(primary) != 1:
        raise ValueError(f"{experiment.path}: checks must hold one with `primary: true`, got {primary}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_levels(value: Any) -> bool:
    return isinstance(value, Mapping)


# Name in a check -> whether a value is one of those allowed, and these in words.
_TEXT = (_is_text, "a text")
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("name", "statistic", "x", "y", "minus", "first", "then", "axis"), _TEXT),
    **dict.fromkeys(("of", "against", "without"), (_is_levels, "levels by axis")),
    "target": (lambda value: is_number(value) or _is_levels(value), "a number, or levels by axis"),
    "than": (is_number, "a number"),
    "within": (lambda value: is_number(value) and value >= 0, "a number of at least 0"),
    "fall": (lambda value: is_number(value) and 0 < value < 1, "a number between 0 and 1"),
    "primary": (lambda value: value is True, "true, or left out"),
    "true_effect": (is_number, "a number"),
}
_ABOVE_0 = (lambda value: is_number(value) and value > 0, "a number above 0")
_OF_KIND = {
    "ratio": {"than": _ABOVE_0, "true_effect": _ABOVE_0},
    "stronger_correlation": {"than": _TEXT},
}


def _check_values(check: Check, where: str) -> None:
    """Raise a `ValueError` for a value of another type or range than its name has."""
    allowed = {**_VALUES, **_OF_KIND.get(check["kind"], {})}
    for name in check.keys() & allowed.keys():
        fine, words = allowed[name]
        if not fine(check[name]):
            raise ValueError(f"{where}: {name}={check[name]!r} is not supported; allowed: {words}")
    if ("of" in check) != ("against" in check) and check["kind"] in OF_ORDER:
        raise ValueError(f"{where}: of and against must be there together, or neither; got one of them")


def _evaluate(grid: Grid, check: Check) -> Result:
    notes = Notes()
    kind = KINDS[check["kind"]]
    estimate, unit, seeds = kind.evaluate(grid, check, notes)
    return Result(check, estimate, unit, seeds, notes)
