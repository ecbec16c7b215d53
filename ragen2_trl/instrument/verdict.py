"""Whether reasoning depends on its prompt, by the measurements of a run: the one place that decides.

`findings` words it. A measurement has a verdict only if it could have come out otherwise, and *collapse* is a change:
it is said only of reasoning that has depended on its prompt before the weights moved on, and whose upper confidence
bound has come down.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, Literal

Regime = Literal[
    "diverse",  # depends on its prompt, and varies between samples
    "compressed",  # depends on its prompt, and hardly varies
    "template_collapse",  # depended once and no longer does, or much less; varies between samples
    "low_entropy_collapse",  # the same, and hardly varies
    "weaker",  # depends less than half as much as before, which chance may explain
    "independent",  # dependence has not been shown so far, and half of full dependence is excluded
    "inconclusive",  # too few reasoning traces to tell
    "foreign",  # less likely under the own prompt than chance allows: not of these prompts, or not of this model
]

DEPENDENT, COLLAPSES = ("diverse", "compressed"), ("template_collapse", "low_entropy_collapse")
# The paper publishes no thresholds; these are ours.
ALPHA = 0.01  # probability of each error: that chance looks like dependence, or dependence like the lack of it
BEST_ALPHA = 0.001  # of the dependence that later measurements are compared with: the best of many is often chance
RATIO = 0.5  # dependence below this share of its best is a collapse; of full dependence, is none
MIN_STREAK = 2  # measurements in a row that make a collapse: one alone may be a batch of hard prompts
ENTROPY_RATIO = 0.5  # H(Z|X) per token is low below this share of its start: models and tasks differ too much
LOW_ENTROPY = 0.1  # nats per token; where there is no start: the sampled token has a probability of 0.9
FOREIGN_ALPHA = 1e-3  # see `is_foreign`
# Optimizer steps between measurements where every step is logged. One costs about half a step of the demo, so that it
# stays below a twentieth of the run.
MIN_STEPS_BETWEEN = 10

ROUNDING = 1e-6  # of a hit: means of shares are not exact


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
class Judgement:
    """What a measurement says, seen with those before it.

    Args:
        regime: Where it stands.
        evidence: The measurement.
        start: The first one of the run, or the same.
        entropy_is_low: Whether H(Z|X) is below `ENTROPY_RATIO` of its start, or `LOW_ENTROPY` where there is no run.
        best: The earlier one that its reasoning is compared with, the one that depended most surely; if any.
        since: Optimizer step of the first measurement of a collapse; `None` outside of one.
        upper: What retrieval accuracy may be at most, at 1 - `ALPHA`, by all measurements of the collapse together.
    """

    regime: Regime
    evidence: Evidence
    start: Evidence
    entropy_is_low: bool = False
    best: Evidence | None = None
    since: int | None = None
    upper: float = 1.0

    @property
    def is_collapsed(self) -> bool:
        return self.regime in COLLAPSES

    @property
    def has_depended(self) -> bool:
        return self.best is not None or self.regime in DEPENDENT

    @property
    def enough(self) -> int:
        """The number of reasoning traces that would tell, if their retrieval accuracy were the same."""
        evidence, trials = self.evidence, self.evidence.trials
        while not _is_conclusive(evidence.retrieval_accuracy * trials, trials, evidence.retrieval_chance):
            trials += 1
        return trials


def judge(measurements: Sequence[Evidence]) -> list[Judgement]:
    """What each measurement of a run says, in their order.

    With e = (accuracy - chance)/(1 - chance), which is 0 at chance and 1 where every reasoning trace is retrieved: a
    measurement depends if a one-sided binomial test against chance passes at `ALPHA`. It is compared with the earlier
    one whose e has the highest lower bound, at `BEST_ALPHA`, if that is above 0. A collapse is a streak of
    `MIN_STREAK` measurements or more with e below `RATIO` of that bound, whose hits together are too few, at `ALPHA`,
    for any e that is not. Measurements before the first update, foreign ones, and those whose reasoning traces are
    too few to be told from chance say nothing, for or against it.
    """
    judgements: list[Judgement] = []
    best, least = None, 0.0  # the earlier measurement to compare with, and the lower bound of its e
    streak: list[Evidence] = []
    for evidence in measurements:
        hits, trials, chance = evidence.hits, evidence.trials, evidence.retrieval_chance
        counts = evidence.updates != 0 and not evidence.is_foreign and is_attainable(trials, chance)
        is_low = best is not None and above_chance(hits / trials, chance) < RATIO * least
        if counts:
            streak = [*streak, evidence] if is_low else []
        of_streak = sum(one.hits for one in streak), sum(one.trials for one in streak)
        is_collapsed = counts and len(streak) >= MIN_STREAK
        is_collapsed = is_collapsed and at_most(*of_streak, chance + RATIO * least * (1 - chance)) <= ALPHA
        start = measurements[0]
        bound = LOW_ENTROPY if evidence.step is None else ENTROPY_RATIO * start.conditional_entropy_token
        has_low_entropy = evidence.conditional_entropy_token < bound
        judgements.append(
            Judgement(
                _regime(evidence, has_low_entropy, is_collapsed, len(streak)),
                evidence,
                start,
                has_low_entropy,
                best=best,
                since=streak[0].step if is_collapsed else None,
                upper=upper_bound(*of_streak, ALPHA) if streak else 1.0,
            )
        )
        sure = above_chance(lower_bound(hits, trials, BEST_ALPHA), chance)
        if sure > least:
            best, least = evidence, sure
    return judgements


def is_stale(judgements: Sequence[Judgement], step: int) -> bool:
    """Whether a run could not be measured for more than twice as long as ever before."""
    steps = [0, *(judgement.evidence.step or 0 for judgement in judgements)]
    longest = max(after - before for before, after in pairwise(steps))
    if len(judgements) == 1:  # often at step 1, which does not mean that every step is measured
        longest = max(longest, MIN_STEPS_BETWEEN)
    return step - steps[-1] > 2 * longest


def is_attainable(trials: int, chance: float) -> bool:
    """Whether so many reasoning traces, all of them retrieved, would be told from chance at `ALPHA`."""
    return chance**trials <= ALPHA


def above_chance(accuracy: float, chance: float) -> float:
    """0 at chance, 1 where every reasoning trace is retrieved."""
    return (accuracy - chance) / max(1 - chance, 1e-12)


def _is_conclusive(hits: float, trials: int, chance: float) -> bool:
    """Whether reasoning traces depend on their prompts, or too few of them are retrieved for half of full dependence.

    Neither, where even full retrieval would not have been told from chance.
    """
    if chance >= 1:
        return True
    if not is_attainable(trials, chance):
        return False
    return at_least(hits, trials, chance) <= ALPHA or at_most(hits, trials, chance + RATIO * (1 - chance)) <= ALPHA


def _regime(evidence: Evidence, has_low_entropy: bool, is_collapsed: bool, streak: int) -> Regime:
    if evidence.is_foreign:
        return "foreign"
    if is_collapsed:
        return "low_entropy_collapse" if has_low_entropy else "template_collapse"
    if streak == 1:
        return "weaker"
    if evidence.p_value <= ALPHA:
        return "compressed" if has_low_entropy else "diverse"
    conclusive = _is_conclusive(evidence.hits, evidence.trials, evidence.retrieval_chance)
    return "independent" if conclusive else "inconclusive"


def begins(judgements: Sequence[Judgement]) -> bool:
    """Whether something that should be warned of begins with the last measurement: a template, or foreign completions.

    A low-entropy collapse is not: entropy shows it, too. Of one collapse, entropy may cross its bound again and again.
    """
    *earlier, last = judgements
    if last.regime == "foreign":
        return not earlier or earlier[-1].regime != "foreign"
    told = any(one.since == last.since and one.regime == last.regime for one in earlier)
    return last.regime == "template_collapse" and not told


def regime_flags(judgement: Judgement) -> dict[str, float]:
    """What a measurement says, for the logs: 1 or 0 each, and nothing of what it cannot tell."""
    regime = judgement.regime
    conclusive = regime in (*DEPENDENT, *COLLAPSES, "independent")
    flags = {"conclusive": conclusive, "collapsed": judgement.is_collapsed, "low_entropy": judgement.entropy_is_low}
    if conclusive:
        flags["depends_on_prompt"] = regime in DEPENDENT
    return {f"mi/regime/{name}": float(value) for name, value in flags.items()}


# Exact binomial tails, and the bounds that follow from them: how sure a share of so many trials is. The core does
# without SciPy, which has them, too.


def chance_p_value(metrics: Mapping[str, float]) -> float:
    """One-sided binomial test: how probable so high a retrieval accuracy is when reasoning is independent of prompts.

    Each reasoning is a trial: under that hypothesis those of one prompt are no more alike than any others. A fraction
    of a hit, which ties make, counts as a whole one.

    >>> chance_p_value({"retrieval_accuracy": 0.25, "retrieval_chance": 0.25, "num_completions": 4.0}) > 0.5
    True
    """
    trials, chance = round(metrics["num_completions"]), metrics["retrieval_chance"]
    return at_least(metrics["retrieval_accuracy"] * trials, trials, chance)


@lru_cache(maxsize=2**16)
def at_least(hits: float, trials: int, chance: float) -> float:
    """The probability of so many hits or more; a fraction of a hit counts as a whole one.

    >>> at_least(2, 2, 0.5)
    0.25
    """
    return _sum(range(math.ceil(hits - ROUNDING), trials + 1), trials, chance)


@lru_cache(maxsize=2**16)
def at_most(hits: float, trials: int, chance: float) -> float:
    """The probability of so many hits or fewer; a fraction of a hit counts as a whole one."""
    return _sum(range(math.ceil(hits - ROUNDING) + 1), trials, chance)


@lru_cache(maxsize=2**16)
def lower_bound(hits: float, trials: int, alpha: float) -> float:
    """The share below which so many hits or more have at most probability `alpha` (Clopper and Pearson, 1934).

    >>> round(lower_bound(2, 2, 0.25), 3), lower_bound(0, 2, 0.25)
    (0.5, 0.0)
    """
    whole = math.floor(hits + ROUNDING)
    return 0.0 if whole == 0 else _bisect(lambda share: at_least.__wrapped__(whole, trials, share) <= alpha)


@lru_cache(maxsize=2**16)
def upper_bound(hits: float, trials: int, alpha: float) -> float:
    """The share above which so many hits or fewer have at most probability `alpha`."""
    whole = math.ceil(hits - ROUNDING)
    return 1.0 if whole >= trials else _bisect(lambda share: at_most.__wrapped__(whole, trials, share) > alpha)


def _bisect(is_below: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2


def _sum(counts: range, trials: int, chance: float) -> float:
    if chance in (0.0, 1.0):
        return float(round(chance * trials) in counts)
    log_hit, log_miss = math.log(chance), math.log1p(-chance)
    every = math.lgamma(trials + 1)
    terms = (
        math.exp(every - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * log_hit + (trials - k) * log_miss)
        for k in counts
    )
    return min(1.0, math.fsum(terms))
