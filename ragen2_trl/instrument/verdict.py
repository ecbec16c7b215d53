"""What the measurements of a run say together: the one place that decides. `wording` has the words for it.

A measurement has a verdict only if it could have come out otherwise, and *collapse* is a change: it is said only of
reasoning that has depended on its prompt before the weights moved on, and whose upper confidence bound has come down.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragen2_trl.instrument.binomial import at_least, at_most, lower_bound, upper_bound

Regime = Literal[
    "diverse",  # depends on its prompt, and varies between samples
    "compressed",  # depends on its prompt, and hardly varies
    "template_collapse",  # depended once and no longer does, or much less; varies between samples
    "low_entropy_collapse",  # the same, and hardly varies
    "weaker",  # depends less than half as much as before, which chance may explain
    "independent",  # has not depended on its prompt so far
    "undecided",  # too few reasonings to tell
    "foreign",  # less likely under the own prompt than chance allows: not of these prompts, or not of this model
]
Mood = Literal["healthy", "recovered", "suspect", "collapsed", "open", "unknown"]

DEPENDENT, COLLAPSES = ("diverse", "compressed"), ("template_collapse", "low_entropy_collapse")
# The paper publishes no thresholds; these are ours.
ALPHA = 0.01  # probability of each error: that chance looks like dependence, or dependence like the lack of it
BEST_ALPHA = 0.001  # of the dependence that later measurements are compared with: the best of many is often chance
RATIO = 0.5  # dependence below this share of its best is a collapse; of full dependence, is none
PATIENCE = 2  # measurements in a row that make a collapse: one alone may be a batch of hard prompts
ENTROPY_RATIO = 0.5  # H(Z|X) per token is low below this share of its start: models and tasks differ too much
LOW_ENTROPY = 0.1  # nats per token; where there is no start: the sampled token has a probability of 0.9
FORMAT_RATIO = 0.5  # share of closed reasoning, of that at the start, below which the format has collapsed
FOREIGN_ALPHA = 1e-3  # see `is_foreign`
# Optimizer steps between measurements where every step is logged. One costs about half a step of the demo, so that it
# stays below a twentieth of the run.
MIN_STEPS_BETWEEN = 10


@dataclass(frozen=True)
class Evidence:
    """What a verdict needs to know of a measurement; the names are those of `information_metrics` and of the logs.

    Args:
        step: Optimizer step; `None` where there is no run.
        updates: Optimizer steps before it that have moved the weights; `None` where there is no run.
        valid_thinking_rate: Share of turns whose reasoning is closed by a tag.
        success: Share of episodes that solved their task.
        clipped_ratio: Share of completions that were cut at the length limit.
    """

    step: int | None
    retrieval_accuracy: float
    retrieval_chance: float
    num_completions: float
    mi_seq: float
    mi_upper_bound: float
    conditional_entropy_token: float
    updates: int | None = None
    valid_thinking_rate: float | None = None
    success: float | None = None
    clipped_ratio: float | None = None

    METRICS: ClassVar[tuple[str, ...]] = (
        "retrieval_accuracy",
        "retrieval_chance",
        "num_completions",
        "mi_seq",
        "mi_upper_bound",
        "conditional_entropy_token",
    )

    @classmethod
    def of(cls, metrics: Mapping[str, Any], **others: Any) -> "Evidence":
        """From metrics of `information_metrics`, with what else is known.

        Raises:
            KeyError: If a metric is missing.
        """
        return cls(**{"step": None, **{name: float(metrics[name]) for name in cls.METRICS}, **others})

    @property
    def hits(self) -> float:
        return self.retrieval_accuracy * self.num_completions

    @property
    def trials(self) -> int:
        return round(self.num_completions)

    @property
    def p_value(self) -> float:
        """How probable so high a retrieval accuracy is by chance."""
        return at_least(self.hits, self.trials, self.retrieval_chance)

    @property
    def is_foreign(self) -> bool:
        """Whether the completions are too unlikely under their own prompts to come from them and this model.

        Of the completions that a model samples for a prompt, the mean of exp(-I), with I = L_own - log mean exp L, is
        1 at most. By Markov's inequality the I of n of them sum to log(a) or less with at most the probability a. That
        holds exactly; a margin as large as the bound itself is for rounding, and for weights that are a step newer.
        """
        improbable = self.mi_seq * self.num_completions < math.log(FOREIGN_ALPHA)
        return improbable and self.mi_seq < -self.mi_upper_bound and self.p_value > ALPHA


@dataclass(frozen=True)
class Finding:
    """What a measurement says, seen with those before it.

    Args:
        regime: Where it stands.
        evidence: The measurement.
        start: The first one of the run, or the same.
        entropy_is_low: Whether H(Z|X) is below `ENTROPY_RATIO` of its start, or `LOW_ENTROPY` where there is no run.
        best: The earlier one that its reasoning is compared with, the one that depended most surely; if any.
        since: Optimizer step of the first measurement of a collapse; `None` outside of one.
        upper: What retrieval accuracy may be at most, at 1 - `ALPHA`, by all measurements of the collapse together.
        format_since: Optimizer step of the first measurement of a format collapse; `None` outside of one.
    """

    regime: Regime
    evidence: Evidence
    start: Evidence
    entropy_is_low: bool = False
    best: Evidence | None = None
    since: int | None = None
    upper: float = 1.0
    format_since: int | None = None

    @property
    def is_collapsed(self) -> bool:
        return self.regime in COLLAPSES

    @property
    def has_depended(self) -> bool:
        return self.best is not None or self.regime in DEPENDENT

    @property
    def enough(self) -> int:
        """The number of reasonings that would tell, if their retrieval accuracy were the same."""
        evidence, trials = self.evidence, self.evidence.trials
        while not _is_decided(evidence.retrieval_accuracy * trials, trials, evidence.retrieval_chance):
            trials += 1
        return trials


@dataclass(frozen=True)
class Collapse:
    """Consecutive measurements, two at least, in one of the collapsed regimes or without the format of reasoning.

    Args:
        regime: `template_collapse`, `low_entropy_collapse` or `format_collapse`.
        first: Optimizer step of the first of them.
        last: Optimizer step of the last; `None` if the run ended with it.
    """

    regime: str
    first: int
    last: int | None


@dataclass(frozen=True)
class Trace:
    """How dependence went over the measurements of runs; all arrays are (..., T).

    Args:
        depends: Whether retrieval is above chance at `ALPHA`.
        best: Measurement before it that depended most surely, by its lower bound; -1 if none did.
        streak: Measurements in a row, up to this, that lie below `RATIO` of the best one.
        streak_hits, streak_trials: Hits and reasonings of the streak.
        collapsed: Whether the streak is a collapse.
    """

    depends: NDArray[np.bool_]
    best: NDArray[np.int64]
    streak: NDArray[np.int64]
    streak_hits: NDArray[np.float64]
    streak_trials: NDArray[np.int64]
    collapsed: NDArray[np.bool_]


_at_least = np.vectorize(at_least, otypes=[float])
_at_most = np.vectorize(at_most, otypes=[float])
_lower_bound = np.vectorize(lower_bound, otypes=[float])


def trace(hits: ArrayLike, trials: ArrayLike, chance: ArrayLike, counts: ArrayLike = True) -> Trace:
    """Follows runs by the counts of their measurements, any number of runs at once.

    With e = (accuracy - chance)/(1 - chance), which is 0 at chance and 1 where every reasoning is retrieved: a
    measurement depends if a one-sided binomial test against chance passes at `ALPHA`. It is compared with the earlier
    one whose e has the highest lower bound, at `BEST_ALPHA`, if that is above 0. A collapse is a streak of `PATIENCE`
    measurements or more with e below `RATIO` of that bound, whose hits together are too few, at `ALPHA`, for any e
    that is not.

    Args:
        hits: (..., T) reasonings that were retrieved, of T measurements in their order.
        trials: Reasonings, broadcast to the shape of `hits`; as are
        chance: probability of a hit by guessing, and
        counts: whether a measurement may end a dependence: not before the weights have moved. None does whose
            reasonings are too few to be told from chance: it could not have come out otherwise.
    """
    hits = np.asarray(hits, dtype=float)
    trials, chance, counting = (np.broadcast_to(values, hits.shape) for values in (trials, chance, counts))
    counting = counting & is_attainable(trials, chance)
    depends = _at_least(hits, trials, chance) <= ALPHA
    sure = np.maximum(above_chance(_lower_bound(hits, trials, BEST_ALPHA), chance), 0.0)
    excess = above_chance(hits / trials, chance)
    made = {"best": np.zeros(hits.shape, int) - 1, "streak": np.zeros(hits.shape, int)}
    made |= {"streak_hits": np.zeros(hits.shape), "streak_trials": np.zeros(hits.shape, int)}
    best, streak, streak_hits, streak_trials = (values[..., 0].copy() for values in made.values())
    collapsed, before = np.zeros(hits.shape, bool), np.zeros(hits.shape[:-1])
    for t in range(hits.shape[-1]):
        low = (before > 0) & (excess[..., t] < RATIO * before)
        counted = low & counting[..., t]
        # A measurement that cannot count says nothing, for or against.
        goes_on = counted | ~counting[..., t]
        streak = np.where(goes_on, streak + counted, 0)
        streak_hits = np.where(goes_on, streak_hits + counted * hits[..., t], 0.0)
        streak_trials = np.where(goes_on, streak_trials + counted * trials[..., t], 0)
        long = counted & (streak >= PATIENCE)
        if long.any():
            floor = np.asarray(chance[..., t] + RATIO * before * (1 - chance[..., t]))
            collapsed[..., t][long] = _at_most(streak_hits[long], streak_trials[long], floor[long]) <= ALPHA
        for name, values in (("best", best), ("streak", streak), ("streak_hits", streak_hits)):
            made[name][..., t] = values
        made["streak_trials"][..., t] = streak_trials
        best = np.where(sure[..., t] > before, t, best)
        before = np.maximum(before, sure[..., t])
    return Trace(depends, collapsed=collapsed, **made)


def judge(measurements: Sequence[Evidence]) -> list[Finding]:
    """What each measurement of a run says, in their order."""
    if not measurements:
        return []
    start = measurements[0]
    path = trace(
        [one.hits for one in measurements],
        [one.trials for one in measurements],
        [one.retrieval_chance for one in measurements],
        [one.updates != 0 and not one.is_foreign for one in measurements],
    )
    findings: list[Finding] = []
    low_since = format_since = None
    format_streak = 0
    for t, evidence in enumerate(measurements):
        before, streak = (int(path.streak[t - 1]) if t else 0), int(path.streak[t])
        if streak <= 1:  # where it goes on beyond a measurement that says nothing, it began earlier
            low_since = low_since if streak == before == 1 else evidence.step
        format_streak = format_streak + 1 if _lost_format(evidence, start) else 0
        format_since = (format_since if format_streak > 1 else evidence.step) if format_streak else None
        best = int(path.best[t])
        floor = LOW_ENTROPY if evidence.step is None else ENTROPY_RATIO * start.conditional_entropy_token
        is_low = evidence.conditional_entropy_token < floor
        trials = int(path.streak_trials[t])
        findings.append(
            Finding(
                _regime(evidence, is_low, path, t),
                evidence,
                start,
                is_low,
                best=measurements[best] if best >= 0 else None,
                since=low_since if path.collapsed[t] else None,
                upper=upper_bound(float(path.streak_hits[t]), trials, ALPHA) if trials else 1.0,
                format_since=format_since if format_streak >= PATIENCE else None,
            )
        )
    return findings


def collapses(findings: Sequence[Finding]) -> list[Collapse]:
    """All there were, the latest last: one that lasts, and a regime rather than a format."""
    found = []
    for regimes, since in (
        ([one.regime if one.is_collapsed else "" for one in findings], [one.since for one in findings]),
        (
            ["" if one.format_since is None else "format_collapse" for one in findings],
            [one.format_since for one in findings],
        ),
    ):
        for is_collapsed, numbers in groupby(range(len(findings)), key=lambda number: bool(regimes[number])):
            streak = list(numbers)
            if is_collapsed:
                last = None if streak[-1] == len(findings) - 1 else findings[streak[-1]].evidence.step
                found.append(Collapse(regimes[streak[-1]], since[streak[0]] or 0, last))
    return sorted(found, key=lambda one: (one.last is None, one.last or 0, one.regime in COLLAPSES))


def mood(findings: Sequence[Finding], step: int = 0) -> Mood:
    """How a run is, after `step` optimizer steps.

    Suspect is one whose last measurement alone is low, and one that could not be measured for more than twice as long
    as ever before; open is one that nothing can be said of, or that has not depended on its prompt yet.
    """
    if not findings:
        return "unknown"
    found = collapses(findings)
    if found and found[-1].last is None:
        return "collapsed"
    regime = findings[-1].regime
    if regime in ("independent", "undecided", "foreign"):
        return "open"
    if regime == "weaker" or is_stale(findings, step):
        return "suspect"
    return "recovered" if found else "healthy"


def is_stale(findings: Sequence[Finding], step: int) -> bool:
    """Whether a run could not be measured for more than twice as long as ever before."""
    steps = [0, *(finding.evidence.step or 0 for finding in findings)]
    longest = max(after - before for before, after in pairwise(steps))
    if len(findings) == 1:  # often at step 1, which does not mean that every step is measured
        longest = max(longest, MIN_STEPS_BETWEEN)
    return step - steps[-1] > 2 * longest


def is_attainable(trials: Any, chance: Any) -> Any:
    """Whether so many reasonings, all of them retrieved, would be told from chance at `ALPHA`."""
    return chance**trials <= ALPHA


def above_chance(accuracy: Any, chance: Any) -> Any:
    """0 at chance, 1 where every reasoning is retrieved."""
    return (accuracy - chance) / np.maximum(1 - np.asarray(chance), 1e-12)


def _is_decided(hits: float, trials: int, chance: float) -> bool:
    """Whether reasonings depend on their prompts, or too few of them are retrieved for half of full dependence.

    Neither, where even full retrieval would not have been told from chance.
    """
    if chance >= 1:
        return True
    if not is_attainable(trials, chance):
        return False
    return at_least(hits, trials, chance) <= ALPHA or at_most(hits, trials, chance + RATIO * (1 - chance)) <= ALPHA


def _regime(evidence: Evidence, is_low: bool, path: Trace, t: int) -> Regime:
    if evidence.is_foreign:
        return "foreign"
    if path.collapsed[t]:
        return "low_entropy_collapse" if is_low else "template_collapse"
    if path.streak[t] == 1:
        return "weaker"
    if path.depends[t]:
        return "compressed" if is_low else "diverse"
    decided = _is_decided(evidence.hits, evidence.trials, evidence.retrieval_chance)
    return "independent" if decided else "undecided"


def _lost_format(evidence: Evidence, start: Evidence) -> bool:
    if evidence.valid_thinking_rate is None or start.valid_thinking_rate is None:
        return False
    return evidence.valid_thinking_rate < FORMAT_RATIO * start.valid_thinking_rate
