"""What a measurement costs, and how much of it a share of the update's tokens pays for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ragen2_trl.instrument.answers import SEQUENCES
from ragen2_trl.instrument.diagnosis import ANSWERS, Sampling

ALWAYS = 300_000
"""Tokens that a measurement may score whatever the update: all that small models and short texts need."""

LEAST_TOKENS, LEAST_PROMPTS = 128, 16
"""Of each reasoning trace, and of a scope with the own one: below, retrieval says little."""

ANSWERS_SHARE, LEAST_ANSWERS = 0.12, 16
"""Answers cost this share of the first turns' matrix, or are this few. Measured it is up to a fifth, because turns are
longer than the reasoning in them, and the same reasoning is computed once in the matrix."""


@dataclass(frozen=True)
class Texts:
    """Sizes of what a measurement draws from.

    Args:
        contexts: tokens before the first turn, for each completion.
        turns: mean tokens of a turn, for each completion.
        completions: tokens of each completion.
        num_turns: most turns of a completion.
        num_prompts: groups.
    """

    contexts: Sequence[int]
    turns: Sequence[float]
    completions: Sequence[int]
    num_turns: int
    num_prompts: int


def expected_tokens(scopes: Sequence[str], sampling: Sampling, texts: Texts) -> float:
    """Tokens that all scopes score together: N·P + B·N·T each, by position for a trajectory, and twice there.

    >>> texts = Texts([2000] * 64, [500.0] * 64, [500] * 64, num_turns=1, num_prompts=64)
    >>> expected_tokens(["first_turn"], Sampling(), texts)
    2176000.0
    """
    limit, most = sampling.max_tokens or max(texts.completions), sampling.max_prompts
    before, turn = fmean(texts.contexts), fmean(min(length, limit) for length in texts.turns)
    rows = min(sampling.num_completions, len(texts.contexts))
    total = 0.0
    for scope in scopes:
        columns: float
        if scope == "first_turn":
            columns = min(most, texts.num_prompts)
            total += columns * before + rows * columns * turn
        elif scope == ANSWERS:
            of_one = SEQUENCES * fmean(texts.turns)
            count = num_answers(sampling, texts)
            total += min(count, texts.num_prompts) * before + count * of_one
        elif texts.num_turns > 1:
            later = before + fmean(texts.completions) / 2
            at_each = rows / texts.num_turns
            columns = min(most, at_each)
            total += 2 * texts.num_turns * (columns * later + at_each * columns * turn)
    return total


def num_answers(sampling: Sampling, texts: Texts) -> int:
    """The answers to score beside a matrix of first turns."""
    matrix = expected_tokens(["first_turn"], sampling, texts)
    of_one = fmean(texts.contexts) + SEQUENCES * fmean(texts.turns)
    return min(sampling.num_completions, max(LEAST_ANSWERS, int(ANSWERS_SHARE * matrix / of_one)))


def affordable(scopes: Sequence[str], sampling: Sampling, texts: Texts, budget: float) -> Sampling:
    """The largest sampling whose scopes together score no more tokens than a budget, or the least there is.

    Each trace is cut first, to half and half again, down to `LEAST_TOKENS`; then prompts are halved, down to
    `LEAST_PROMPTS`. Steps of a factor of two keep measurements of one run comparable while lengths change.
    """
    smaller = sampling
    for smaller in _smaller(scopes, sampling, texts):
        if expected_tokens(scopes, smaller, texts) <= max(ALWAYS, budget):
            break
    return smaller


def _smaller(scopes: Sequence[str], sampling: Sampling, texts: Texts) -> Iterator[Sampling]:
    yield sampling
    tokens, longest = LEAST_TOKENS, max(texts.turns)
    while 2 * tokens < longest:
        tokens *= 2
    while tokens >= LEAST_TOKENS and tokens < longest:
        sampling = replace(sampling, max_tokens=tokens)
        yield sampling
        tokens //= 2
    prompts = sampling.max_prompts
    if "trajectory" not in scopes or texts.num_turns == 1:
        prompts = min(prompts, texts.num_prompts)  # a later turn has a column per row, and rows can be more
    while prompts > LEAST_PROMPTS:
        prompts = max(LEAST_PROMPTS, prompts // 2)
        yield replace(sampling, max_prompts=prompts)
