"""Does the answer use the prompt, and does it use the reasoning: answers scored after another's prompt or reasoning.

An answer is scored three times: after its own prompt and reasoning, after its own prompt and the reasoning of another
prompt, and after another prompt. What it loses says what it used. Two probabilities p (own) and q (other) of the same
answer make 1 - softplus(log q - log p)/log 2 bits: on average the divergence of p from the mean of both, 0 if they are
equal and 1 if the answer is impossible without its own. It estimates the causal strength of Janzing et al. (2013) of
the arrow that was cut, pair by pair, and not the conditional mutual information I(A;Z|X); only the swap within a
prompt's own group is a lower bound of that. Interventions on reasoning are those of Lanham et al. (2307.13702).
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ragen2_trl.instrument.diagnosis import NotMeasurableError, Sampling, draw
from ragen2_trl.instrument.reasoning import CLOSE_ANSWER, CLOSE_TAG, OPEN_ANSWER, OPEN_TAG, Trajectories, Turn
from ragen2_trl.instrument.scoring import context_length, cross_score
from ragen2_trl.instrument.verdict import ALPHA, at_least, lower_bound, upper_bound

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FindAnswer = Callable[[str], str | None]

NUM_DONORS = 4  # of each answer; rows dominate the error, so that more donors buy little
MIN_ROWS = 8  # fewer say too little
MAX_COMPARED = 10**6  # answers of a measurement; more cannot have been scored
SEQUENCES = 2 + 3 * NUM_DONORS  # that are scored for each answer, at most
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
OPEN_BOX = "\\boxed{"
WHERE = f"{OPEN_ANSWER}…{CLOSE_ANSWER}, {OPEN_CALL}…{CLOSE_CALL}, {OPEN_BOX}…}}, or text after {CLOSE_TAG}"


@dataclass(frozen=True)
class Answer:
    """An answer, as the very ids that were sampled.

    Args:
        context: Everything before the turn.
        thought: What the model wrote in the turn before the answer, its opening tag included. May be empty.
        tokens: The answer with its closing tag.
    """

    context: tuple[int, ...]
    thought: tuple[int, ...]
    tokens: tuple[int, ...]


def find_answer(turn: Turn, tokenizer: "PreTrainedTokenizerBase", find: FindAnswer | None = None) -> Answer | None:
    """The answer of a turn; `None` where there is none, or it was cut off.

    It is what stands in the last `<answer>…</answer>` after the reasoning, else in all `<tool_call>…</tool_call>`,
    else in the last balanced `\\boxed{…}`, else everything after `</think>`. The closing tag belongs to it, the
    opening one does not. A token that holds the beginning of an answer belongs to it whole, so that nothing of the
    answer stands before it.

    Args:
        turn: From `find_turns`.
        tokenizer: Decodes the ids.
        find: Gives the answer in the text of a turn, or `None`, in place of these rules. Where its text stands more
            than once, the last place counts.

    Raises:
        ValueError: If `find` gives a text that the turn does not hold.
    """
    words = turn.words

    def text_of(count: int) -> str:
        decode: Any = tokenizer.decode  # a string for ids of one text
        text: str = decode(list(words[:count]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    text = text_of(len(words))
    span = _span(text) if find is None else _span_of(text, find(text))
    if span is None:
        return None
    counts = range(len(words) + 1)
    first = bisect_right(counts, span[0], key=lambda count: len(text_of(count))) - 1
    end = bisect_left(counts, span[1], key=lambda count: len(text_of(count)))
    return Answer(turn.context, words[:first], words[first:end])


def _span(text: str) -> tuple[int, int] | None:
    """(first, last + 1) characters of the answer in the text of a turn."""
    closed = text.find(CLOSE_TAG, max(0, text.find(OPEN_TAG)))
    start = 0 if closed < 0 else closed + len(CLOSE_TAG)
    if (close := text.rfind(CLOSE_ANSWER, start)) >= 0:
        opened = text.rfind(OPEN_ANSWER, start, close)  # none where the opening tag ends the context
        return _inside(text, start if opened < 0 else opened + len(OPEN_ANSWER), close, CLOSE_ANSWER)
    if text.find(OPEN_ANSWER, start) >= 0:
        return None
    opened, close = text.find(OPEN_CALL, start), text.rfind(CLOSE_CALL, start)
    if 0 <= opened < close:
        return _inside(text, opened + len(OPEN_CALL), close, CLOSE_CALL)
    if (boxed := _boxed(text, start)) is not None:
        return _inside(text, *boxed, "}")
    return None if closed < 0 else _inside(text, start, len(text.rstrip()), "")


def _inside(text: str, first: int, close: int, tag: str) -> tuple[int, int] | None:
    """From the first letter to the end of the closing tag; `None` where nothing stands before that."""
    inner = text[first:close].lstrip()
    return (close - len(inner), close + len(tag)) if inner else None


def _boxed(text: str, start: int) -> tuple[int, int] | None:
    """(first, last + 1) characters in the last box whose braces are balanced."""
    opened = len(text)
    while (opened := text.rfind(OPEN_BOX, start, opened)) >= 0:
        depth = 0
        for place in range(opened + len(OPEN_BOX) - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return opened + len(OPEN_BOX), place
    return None


def _span_of(text: str, answer: str | None) -> tuple[int, int] | None:
    if answer is None or not answer.strip():
        return None
    place = text.rfind(answer)
    if place < 0:
        raise ValueError(
            f"answer must return a part of the turn's text, unchanged, or None, got {answer[:80]!r} for {text[:80]!r}"
        )
    return place, place + len(answer)


# Mathematics


def swap_bits(own: Tensor, swapped: Tensor) -> Tensor:
    """Mean over donors of 1 - softplus(l_j - l_own)/log 2, in bits (`research/results/answers.md`).

    Its expectation over answers of the own distribution p is the mean of KL(p || (p + q_j)/2), in [0, 1] whatever the
    number of donors; a single row may lie below 0.

    Args:
        own: (B,) log-probability of each answer in its own place, in nats.
        swapped: (B, K) the same with something of a donor's in place of the own; NaN where there is no donor.

    Returns:
        (B,) bits; NaN for rows without donors.

    >>> swap_bits(torch.tensor([-1.0, -1.0]), torch.tensor([[-1.0, -1.0], [-90.0, torch.nan]]))
    tensor([0., 1.], dtype=torch.float64)
    """
    loss = (swapped - own[:, None]).double()  # nats
    return (1 - torch.logaddexp(loss, torch.zeros_like(loss)) / math.log(2)).nanmean(dim=1)


def win_rates(own: Tensor, others: Tensor) -> Tensor:
    """How often an answer is likelier in its own place than in another, equal ones as half.

    Args:
        own: (B,) log-probability of each answer after its own prompt.
        others: (B, K) after other prompts; NaN where there is none.

    Returns:
        (B,) in [0, 1]; NaN for rows without another.

    >>> win_rates(torch.tensor([-1.0]), torch.tensor([[-2.0, -1.0, 0.0, torch.nan]]))
    tensor([0.5000])
    """
    wins = (own[:, None] > others).float() + 0.5 * (own[:, None] == others)
    return wins.masked_fill(others.isnan(), torch.nan).nanmean(dim=1)


# Measurement


@dataclass(frozen=True)
class _Drawn:
    position: int
    answer: Answer
    other: Answer | None  # of another sample of the same prompt


def measure_answers(
    model: nn.Module,
    trajectories: Trajectories,
    groups: Sequence[int],
    generator: torch.Generator,
    sampling: Sampling,
    find: FindAnswer | None = None,
) -> dict[str, float]:
    """Scores answers after reasoning and prompts that are not their own.

    A completion is drawn, of each group one before any has two, then one of its turns that has an answer. Its donors
    are the answers at seeded cyclic shifts among those of the same turn position, at most four. With (x, z, a) the
    prompt, reasoning and answer of a row, (x_j, z_j, a_j) those of a donor and z' the reasoning of another sample of
    x:

    - `thought_swap_bits`: `swap_bits` of a after (x, z) and (x, z_j), for donors whose prompt, reasoning and answer
      all differ from the own; `thought_swap_standard_error` over rows;
    - `thought_swap_in_group_bits`: the same with z', whatever it and its answer are, which makes its mean a lower
      bound of I(A;Z|X). First turns only, since contexts of later ones are all different;
    - `prompt_swap_bits`: of a after (x, z) and (x_j, z), for donors whose prompt and answer differ;
    - `prompt_win_rate`: how often a is likelier after (x, z') than after (x_j, z_j), for donors whose prompt differs.
      It is 0.5 by chance, also if a rests on reasoning that does not depend on the prompt. First turns only;
    - `same_in_group`, `same_across`: answers that are the same in another sample of their prompt, and in pairs of
      different prompts;
    - `num_swaps`, `num_compared`: rows behind `thought_swap_bits` and behind `prompt_win_rate`;
    - `without_answer`: share of the turns looked at that have none.

    What has fewer than eight rows is left out.

    Args:
        model: The policy.
        trajectories: Turns of each completion, read as they are needed.
        groups: Group of each completion.
        generator: Draws rows and donors.
        sampling: `num_answers` rows; of an answer the first `max_tokens` tokens.
        find: See `find_answer`.

    Raises:
        NotMeasurableError: With fewer than eight answers.
        ValueError: If the model gives a log-probability that is not finite.
    """
    rows, without = _rows(trajectories, groups, generator, sampling, find)
    if len(rows) < MIN_ROWS:
        raise NotMeasurableError(f"{len(rows)} turns have an answer ({WHERE}), and {MIN_ROWS} are needed")
    places = _places(rows, generator, sampling, context_length(model))
    logps = _score(model, {place for of_row in places for found in of_row.values() for place in found}, sampling)
    scores = {name: _padded([[logps[place] for place in of_row[name]] for of_row in places]) for name in places[0]}
    own, in_group = scores["own"][:, 0], scores["in_group"][:, 0]
    thought = swap_bits(own, scores["thought"])
    reasoned = torch.tensor([row.other is not None and bool(row.answer.thought + row.other.thought) for row in rows])
    found = {
        "thought_swap_bits": thought,
        "thought_swap_in_group_bits": swap_bits(own, scores["in_group"]).where(reasoned, torch.nan),
        "prompt_swap_bits": swap_bits(own, scores["prompt"]),
        "prompt_win_rate": win_rates(in_group, scores["others"]).where(in_group.isfinite(), torch.nan),
        "same_in_group": torch.tensor(
            [torch.nan if row.other is None else float(row.other.tokens == row.answer.tokens) for row in rows]
        ),
    }
    counts = {name: int(values.isfinite().sum()) for name, values in found.items()}
    metrics = {"without_answer": without}
    metrics |= {name: values.nanmean().item() for name, values in found.items() if counts[name] >= MIN_ROWS}
    pairs = [_other_answer(row, other) for row in rows for other in rows if _other_prompt(row, other)]
    if pairs:
        metrics["same_across"] = 1 - sum(pairs) / len(pairs)
    if "thought_swap_bits" in metrics:
        spread = thought[thought.isfinite()].std().item()
        metrics["thought_swap_standard_error"] = spread / math.sqrt(counts["thought_swap_bits"])
        metrics["num_swaps"] = float(counts["thought_swap_bits"])
    if "prompt_win_rate" in metrics:
        metrics["num_compared"] = float(counts["prompt_win_rate"])
    return metrics


_Place = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # context, reasoning, answer: ids of each


def _rows(
    trajectories: Trajectories,
    groups: Sequence[int],
    generator: torch.Generator,
    sampling: Sampling,
    find: FindAnswer | None,
) -> tuple[list[_Drawn], float]:
    """The answers to score, and the share of turns without one among those that were looked at."""
    read: dict[int, list[Answer | None]] = {}

    def answers_of(number: int) -> list[Answer | None]:
        if number not in read:
            read[number] = [find_answer(turn, trajectories.tokenizer, find) for turn in trajectories[number]]
        return read[number]

    shuffled = torch.randperm(len(trajectories), generator=generator).tolist()
    members: dict[int, list[int]] = defaultdict(list)
    for number in shuffled:
        members[groups[number]].append(number)
    # Of each group one before any has two: answers to one prompt are alike.
    order = sorted(shuffled, key=lambda number: members[groups[number]].index(number))
    rows: list[_Drawn] = []
    looked_at: list[Answer | None] = []
    for number in order:
        if len(rows) == (sampling.num_answers or sampling.num_completions):
            break
        looked_at += answers_of(number)
        answered = [(position, answer) for position, answer in enumerate(answers_of(number)) if answer is not None]
        if answered:
            position, answer = draw(answered, 1, generator)[0]
            others = [other for other in members[groups[number]] if other != number] if position == 0 else []
            of_others = (answers_of(other)[0] for other in others if answers_of(other))
            same = (other for other in of_others if other is not None and other.context == answer.context)
            rows.append(_Drawn(position, answer, next(same, None)))
    return rows, sum(answer is None for answer in looked_at) / max(1, len(looked_at))


def _other_prompt(row: _Drawn, other: _Drawn) -> bool:
    return row.position == other.position and row.answer.context != other.answer.context


def _other_answer(row: _Drawn, other: _Drawn) -> bool:
    return row.answer.tokens != other.answer.tokens


def _other_thought(row: _Drawn, other: _Drawn) -> bool:
    return bool(row.answer.thought and other.answer.thought) and row.answer.thought != other.answer.thought


def _places(
    rows: Sequence[_Drawn], generator: torch.Generator, sampling: Sampling, limit: int | None
) -> list[dict[str, list[_Place]]]:
    """For each row where its answer is scored: in its own place, and in those of donors."""
    shifts = [1 + shift for shift in torch.randperm(len(rows) - 1, generator=generator).tolist()]  # of all rows alike
    found = []
    for number, row in enumerate(rows):
        context, thought, tokens = row.answer.context, row.answer.thought, row.answer.tokens[: sampling.max_tokens]
        around = [rows[(number + shift) % len(rows)] for shift in shifts]
        around = [other for other in around if _other_prompt(row, other)]
        differing = [other for other in around if _other_answer(row, other)]
        swaps = {
            "own": [(context, thought, tokens)],
            "thought": [(context, one.answer.thought, tokens) for one in differing if _other_thought(row, one)],
            "prompt": [(one.answer.context, thought, tokens) for one in differing],
            "in_group": [(context, row.other.thought, tokens)] if row.other else [],
            "others": [(one.answer.context, one.answer.thought, tokens) for one in around] if row.other else [],
        }
        fits = {
            name: [place for place in places if limit is None or sum(map(len, place)) <= limit]
            for name, places in swaps.items()
        }
        found.append({name: places[:NUM_DONORS] for name, places in fits.items()})
    return found


def _score(model: nn.Module, places: Iterable[_Place], sampling: Sampling) -> dict[_Place, float]:
    """The log-probability of each answer after its context and reasoning, in nats."""
    answers: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, ...]]] = defaultdict(list)
    for context, thought, tokens in sorted(places):
        answers[context, thought].append(tokens)
    prompts: dict[tuple[int, ...], int] = {}
    asked: list[tuple[tuple[int, ...], int, int]] = []  # ids, how many of them are not scored, number of the prompt
    for (context, thought), of_both in answers.items():
        # Reasoning that several answers follow is run once, if to run its context again costs less.
        shared = len(context) < (len(of_both) - 1) * len(thought)
        before, given = (context + thought, ()) if shared else (context, thought)
        number = prompts.setdefault(before, len(prompts))
        asked += [(given + tokens, len(given), number) for tokens in of_both]
    logps = cross_score(
        model,
        list(prompts),
        [ids for ids, _, _ in asked],
        lead_in=[skipped for _, skipped, _ in asked],
        under=[[number] for _, _, number in asked],
        temperature=sampling.temperature,
        max_tokens_per_forward=sampling.max_tokens_per_forward,
        split_over_processes=sampling.split_over_processes,
    )
    values = [logps[row, number].item() for row, (_, _, number) in enumerate(asked)]
    if (broken := next((value for value in values if not math.isfinite(value)), None)) is not None:
        raise ValueError(f"log-probabilities of answers must be finite, got {broken}: check weights and dtype")
    scored = ((*both, tokens) for both, of_both in answers.items() for tokens in of_both)
    return dict(zip(scored, values, strict=True))


def _padded(values: Sequence[Sequence[float]]) -> Tensor:
    """(B, K) with NaN where a row has fewer; K is at least 1."""
    width = max(1, *map(len, values))
    return torch.tensor([[*row, *[torch.nan] * (width - len(row))] for row in values], dtype=torch.float64)


# Evidence


@dataclass(frozen=True)
class AnswerEvidence:
    """What findings about answers need of a measurement; the names are those of `measure_answers`.

    Args:
        step: Optimizer step; `None` where there is no run.
    """

    step: int | None = None
    prompt_win_rate: float | None = None
    num_compared: float = 0.0
    thought_swap_bits: float | None = None
    thought_swap_standard_error: float = 0.0
    same_across: float | None = None

    @classmethod
    def of(cls, metrics: Mapping[str, Any], step: int | None = None) -> "AnswerEvidence":
        """From metrics of `measure_answers`, of which some may be missing."""
        names = [name for name in cls.__dataclass_fields__ if name != "step" and name in metrics]
        return cls(step, **{name: float(metrics[name]) for name in names})

    @property
    def is_possible(self) -> bool:
        """Whether it says anything, and nothing that cannot be: anyone may have written the log."""
        shares = [one for one in (self.prompt_win_rate, self.same_across) if one is not None]
        known = self.thought_swap_bits is not None or shares
        counted = self.prompt_win_rate is None or 1 <= self.num_compared <= MAX_COMPARED
        return bool(known) and counted and all(0 <= one <= 1 for one in shares)

    @property
    def wins(self) -> float:
        return (self.prompt_win_rate or 0.0) * self.num_compared

    @property
    def p_value(self) -> float:
        """How probable so high a win rate is by chance, at most: rows count as single comparisons."""
        return at_least(math.floor(self.wins), round(self.num_compared), 0.5)

    @property
    def uses_prompt(self) -> bool:
        return self.prompt_win_rate is not None and self.p_value <= ALPHA

    @property
    def highest(self) -> float:
        """The win rate beyond which chance is excluded, at `ALPHA`."""
        return upper_bound(self.wins, round(self.num_compared), ALPHA)

    @property
    def lowest(self) -> float:
        return lower_bound(self.wins, round(self.num_compared), ALPHA)
