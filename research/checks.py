"""What decides a claim: checks with an expected side, and one rule that makes a verdict of them.

A check is a mapping of an experiment's file with a `name`, a `kind` and what the kind asks for (`KINDS`). Holm's
correction is over the checks of an experiment; a check is significant where its adjusted p-value is at most 0.05. The
verdict is made by checks that state the claim: not by those `beside` it, and not by those that came after the runs.
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
from research.statistics import CONFIDENCE, IntervalEstimate, holm

SUPPORTED, IN_PART, OPPOSITE, INCONCLUSIVE, NOT_RUN = (
    "supported",
    "partly supported",
    "opposite",
    "inconclusive",
    "not run yet",
)
TO_REACH = "_to_reach"
OF_ORDER = ("correlation", "stronger_correlation")
CURVES_ONLY = "curves only, no verdict"  # of an experiment without checks


@dataclass(frozen=True)
class Result:
    """What came of a check.

    Args:
        name, kind, expects: As the file has them.
        estimate: With interval; ratios are ratios, not logarithms.
        unit: `points` (of a fraction, in hundredths), `ratio`, `correlation` or `number`.
        adjusted: Holm's p-value.
        seeds: That it rests on.
        notes: On what is missing.
    """

    name: str
    kind: str
    expects: str
    estimate: IntervalEstimate
    unit: str
    seeds: int
    notes: Notes = field(default_factory=Notes)
    adjusted: float = math.nan
    beside: bool = False
    later: bool = False

    @property
    def counts(self) -> bool:
        """Whether the verdict is made of it."""
        return not (self.beside or self.later)

    @property
    def finding(self) -> int:
        """1 as expected, -1 opposite, 0 inconclusive."""
        return self.estimate.side if self.adjusted <= 1 - CONFIDENCE else 0

    @property
    def shown(self) -> str:
        """The estimate with its interval."""
        return show(self.estimate, self.unit)


def show(estimate: IntervalEstimate, unit: str) -> str:
    """`+2.1 points (-0.4 to +4.6)`, `<= 0.28 times (0.18 to 0.42)`; without numbers, why there are none."""
    if math.isnan(estimate.value):
        return "no number"
    form: Callable[[float], str]
    if unit == "points":
        form = lambda x: f"{100 * x:+.1f}"  # noqa: E731
    elif unit == "ratio":
        form = lambda x: f"{x:.2f}"  # noqa: E731
    else:
        form = lambda x: f"{x:+.2f}" if abs(x) < 100 else f"{x:+.3g}"  # noqa: E731
    name = {"points": " points", "ratio": " times", "correlation": "", "number": ""}[unit]
    number = f"{estimate.bound} {form(estimate.value)}{name}".lstrip()
    if math.isnan(estimate.low):
        return f"{number} (no interval)"
    return f"{number} ({form(estimate.low)} to {form(estimate.high)})"


def evaluate(grid: Grid, fixed: Sequence[Check] | None = None) -> list[Result]:
    """The checks of an experiment, with Holm's correction over them.

    Args:
        grid: Its runs.
        fixed: The checks that there were before its runs ran; `None` if that is not known.
    """
    before = None if fixed is None else {question(check): bool(check.get("beside")) for check in fixed}

    def later(check: Check) -> bool:
        if before is None:
            return False
        was_beside = before.get(question(check))
        return was_beside is None or (was_beside and not check.get("beside"))

    results = [replace(_evaluate(grid, check), later=later(check)) for check in grid.experiment.checks]
    adjusted = holm([result.estimate.p for result in results])
    return [replace(result, adjusted=p) for result, p in zip(results, adjusted, strict=True)]


def verdict(grid: Grid, results: Sequence[Result]) -> str:
    """The rule, the same for all experiments: `supported` if every check that counts is significant as expected;
    `partly supported` if some are; `opposite` if one is significant the other way and none as expected; `inconclusive`
    otherwise. With fewer runs than planned it is a verdict so far, and `not run yet` while no check has a number.
    Without a check that counts there is none.
    """
    done, planned_runs = len(grid.runs), len({planned.key for planned in grid.planned_runs})
    counting = [result for result in results if result.counts]
    if not counting and done:
        made = "one seed" if len(grid.seeds) == 1 else f"{len(grid.seeds)} seeds"
        return f"{made}: {CURVES_ONLY}" + (f", so far ({done} of {planned_runs} runs)" if done < planned_runs else "")
    if not done or (done < planned_runs and all(math.isnan(result.estimate.value) for result in results)):
        return NOT_RUN
    findings = [result.finding for result in counting]
    if all(finding == 1 for finding in findings):
        said = SUPPORTED
    elif 1 in findings:
        said = IN_PART
    else:
        said = OPPOSITE if -1 in findings else INCONCLUSIVE
    if done >= planned_runs:
        return said
    return f"{said}, so far ({done} of {planned_runs} runs)"


# What a check says


def validate(experiment: Experiment) -> None:
    """Raise a `ValueError` that names file, check and what is allowed, if a check cannot be read."""
    for check in experiment.checks:
        where = f"{experiment.path}: check {check.get('name', '')!r}"
        if check.get("kind") not in list(KINDS):  # which also takes what cannot be a key
            raise ValueError(f"{where}: kind={check.get('kind')!r} is not supported; allowed: {', '.join(KINDS)}")
        kind = KINDS[check["kind"]]
        required = {"name", "kind", "expects", *kind.required}
        allowed = {*required, *kind.optional, "within", "beside"}
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
    if experiment.checks and all(check.get("beside", False) for check in experiment.checks):
        raise ValueError(f"{experiment.path}: checks must hold one that states the claim, all are beside it")


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
    "beside": (lambda value: isinstance(value, bool), "true, false"),
}
_OF_KIND = {
    "ratio": {"than": (lambda value: is_number(value) and value > 0, "a number above 0")},
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
    beside = check.get("beside", False)
    return Result(check["name"], check["kind"], check["expects"], estimate, unit, seeds, notes, beside=beside)
