"""Which remedy pays on the data of a training, estimated from its log before anything is changed.

No model is loaded. The rules are those of the trainers themselves, replayed on the groups of the log: selection,
pilots, posterior, refill, micro-batches, shared prompts. Where a log cannot tell, a sentence says so in place of a
number. Intervals are of 95 %, by bootstrap over prompts, or over generations for positions of an update.

Remedies are compared by one number, the *gain*: reward variance of trained rows for each unit of cost, 1 for plain
TRL. A unit of cost is a step of plain TRL: `sampling_share` of it is sampling, and the rest the update.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ragen2_trl.filtering import group_score, zero_variance
from ragen2_trl.instrument.health import is_number
from ragen2_trl.messages import counted
from ragen2_trl.record.completions import CompletionLog, Count, Floats, read_completion_log, text_of
from ragen2_trl.sampling.policy import AUDIT, CANDIDATES, EXPLORE, HALF_LIFE, RECENT, least_worth, round_size
from ragen2_trl.sampling.posterior import RewardPosterior
from ragen2_trl.trainers.dealing import Sharing, deal_rows
from ragen2_trl.trainers.prompt_tree import tree_size
from ragen2_trl.trainers.selection import Groups, equal_rewards, seeded_generator, strategy_of

Mask = NDArray[np.bool_]
Ratio = Callable[[Floats], Floats]
"""From sums (..., K) to one number for each row of them (...)."""

REPLICATES = 400  # of a bootstrap: ends of a 95 % interval to about a tenth of its width
PILOTS = (2, 3, 4)
SHUFFLES = 3  # of the members of each group, by which a replay of pilots depends less on their order
ENOUGH = 4000  # groups; a log with at least as many needs only one replay of pilots
ROUNDS_OF = 8  # groups that a replay of pilots takes together at least; its threshold looks back over 256 in any case
MOST_GENERATIONS = 100  # for which rows are dealt, the slowest part
MOST_VALUES = 16  # rewards that groups have earned throughout, for an estimate of larger groups
TWICE = 16  # fewest prompts logged more than once for an estimate from them
LARGEST = 16  # completions of a prompt, up to which groups are estimated, and at least twice as many as there are
DRAWS = 20  # replays of prompt selection
REFILLED = 200  # batches that dynamic sampling is simulated for
MANY = 0.5  # smallest share of solved or failed groups that is named as a fault
CUT = 0.9  # smallest share of completions cut at the length limit that is named as a fault
FEW = 5  # live groups below which a note warns of the gains
PAYS = 1.05  # least gain, at the lower end of its interval, for which a remedy is advised
_DRAW = 0x3F1F  # tells our draws from others of the same seed


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval. The ends are NaN for a single prompt or generation."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def percent(self) -> str:
        return f"{self.value:.0%}{self._interval('{:.0f}', 100)}"

    def number(self) -> str:
        digits = 1 if abs(self.value) >= 10 else 2
        return f"{self.value:.{digits}f}{self._interval(f'{{:.{digits}f}}', 1)}"

    def _interval(self, form: str, scale: float) -> str:
        ends = [form.format(end * scale) for end in (self.low, self.high) if math.isfinite(end)]
        return f" ({'–'.join(ends)})" if len(ends) == 2 else ""  # noqa: RUF001 - a range


@dataclass(frozen=True)
class Remedy:
    """A row of the table.

    Args:
        name: Of the remedy.
        setting: Of our configurations, that turns it on; empty for a change of TRL's own settings or of the rewards.
        finding: What it would have cost and bought, or why the log cannot tell.
        gain: Reward variance of trained rows for each unit of cost, relative to plain TRL; `None` where the remedy
            changes something else or the log cannot tell.
        numbers: All estimates by name. Shares are fractions, completions and rounds are counts.
        is_known: Whether the log can tell.
    """

    name: str
    setting: str
    finding: str
    gain: Estimate | None = None
    numbers: Mapping[str, Estimate] = field(default_factory=dict)
    is_known: bool = True


@dataclass(frozen=True)
class WhatIf:
    """What a log says of remedies.

    Args:
        log: The groups that were read.
        live: Share of groups whose rewards vary.
        faults: What is wrong with the training, worst first; sentences.
        remedies: Sorted by gain; rows without a gain follow, and rows that the log cannot tell come last.
        advice: One sentence.
        notes: What was read and assumed; sentences.
    """

    log: CompletionLog
    live: Estimate
    faults: Sequence[str]
    remedies: Sequence[Remedy]
    advice: str
    notes: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """The findings without the arrays of the log, for JSON; NaN becomes `None`."""
        return {
            "source": self.log.name,
            "groups": len(self.log),
            "completions": self.log.rewards.size,
            "num_generations": self.log.size,
            "groups_per_generation": self.log.groups_per_generation,
            "prompts": len(np.unique(self.log.prompts)) if self.log.knows_prompts else None,
            "steps": len(np.unique(self.log.steps)),
            "live": _plain(self.live),
            "faults": list(self.faults),
            "advice": self.advice,
            "remedies": [
                {
                    "name": one.name,
                    "setting": one.setting,
                    "known": one.is_known,
                    "finding": one.finding,
                    "gain": _plain(one.gain),
                    "numbers": {name: _plain(value) for name, value in one.numbers.items()},
                }
                for one in self.remedies
            ],
            "notes": list(self.notes),
        }


def _plain(estimate: Estimate | None) -> dict[str, float | None] | None:
    if estimate is None:
        return None
    return {name: value if math.isfinite(value) else None for name, value in vars(estimate).items()}


def what_if(
    source: str | Path | CompletionLog,
    *,
    num_generations: int | None = None,
    groups_per_generation: int | None = None,
    rewards: Sequence[str] = (),
    reward_weights: Sequence[float] = (),
    micro_batch: int | None = None,
    tokenizer: str | None = None,
    sampling_share: float = 0.5,
    seed: int = 0,
) -> WhatIf:
    """Estimate from a training's log which remedy for groups without signal would have paid.

    Args:
        source: The `output_dir` of a TRL run with `log_completions=True`, a run of ours, a folder of parquet or JSONL
            (verl's rollout dumps), a *.parquet, *.jsonl or *.csv file of `prompt`, `completion` and `reward`, or a log
            that `read_completion_log` has read.
        num_generations, groups_per_generation: G and N, where equal prompts do not tell them.
        rewards, reward_weights: Columns with the rewards of one function each, and their weights.
        micro_batch: Completions of a micro-batch, where the trainer's state does not tell it.
        tokenizer: Path or Hub id, to count tokens; by default they are estimated from characters.
        sampling_share: Of the time of a step that goes into sampling, from 0 to 1. TRL does not log it.
        seed: Of the bootstrap and the replays; the global random state is left alone.

    Raises:
        ValueError: If the source cannot be read, or a value is out of range; one line.
        OSError: If a file cannot be read.
    """
    if not 0 <= sampling_share <= 1:
        raise ValueError(f"sampling_share must be from 0 to 1, got {sampling_share!r}")
    if micro_batch is not None and micro_batch < 1:
        raise ValueError(f"micro_batch must be at least 1, got {micro_batch!r}")
    if isinstance(source, CompletionLog):
        log = source
    else:
        log = read_completion_log(
            Path(source),
            num_generations=num_generations,
            groups_per_generation=groups_per_generation,
            rewards=rewards,
            reward_weights=reward_weights,
            count=None if tokenizer is None else token_counter(tokenizer),
        )
    if micro_batch is not None:
        log = replace(log, micro_batch=micro_batch)
    prompts = Bootstrap(log.prompts, seed)
    live, variances = live_groups(log), group_variances(log)
    share = prompts.share(live)
    shapes = other_shapes(log, prompts) if live.any() else {}
    faults = find_faults(log, shapes)
    if not live.any():
        advice = "No group's rewards vary, so that no remedy has anything to work with: see what is wrong."
        return WhatIf(log, share, faults, [], advice, _notes(log, share, prompts, sampling_share))
    remedies = [
        lossless(log, seed, sampling_share),
        nonzero(live, prompts, sampling_share),
        top_p(log, variances, prompts, seed, sampling_share),
        dynamic_sampling(log, live, prompts, seed, sampling_share),
        *_every_pilot(log, live, variances, prompts, seed, sampling_share),
        prompt_selection(log, live, variances, seed, sampling_share),
        *shapes.values(),
        score_by_one(log, live, prompts),
    ]
    order = sorted(remedies, key=lambda one: (not one.is_known, one.gain is None, -(one.gain or Estimate(0)).value))
    return WhatIf(log, share, faults, order, _advice(order), _notes(log, share, prompts, sampling_share))


def token_counter(name: str) -> Count:
    """Counts tokens as TRL makes them: the chat template on messages, and an end token after each completion."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(name)
    last: list[Any] = [None, 0]  # a group's prompt comes G times in a row

    def count(prompt: Any, completion: Any) -> tuple[int, int]:
        if prompt != last[0]:
            if isinstance(prompt, str):
                ids = tokenizer(prompt)["input_ids"]
            else:
                messages = [{key: value for key, value in one.items() if value is not None} for one in prompt]
                made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
                ids = made["input_ids"]
            last[:] = prompt, len(ids)
        text = text_of("completion", completion, "the log")
        return last[1], len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1

    return count


# Intervals


class Bootstrap:
    """Intervals of ratios of sums, by drawing units with replacement.

    Args:
        units: (N,) the unit of each group: its prompt, or its generation.
        seed: Of the draws.
    """

    def __init__(self, units: NDArray[np.int64], seed: int):
        self.units = np.unique(units, return_inverse=True)[1].reshape(-1)
        self.count = int(self.units.max()) + 1
        rng = np.random.default_rng([_DRAW, seed])
        drawn = [
            np.bincount(rng.integers(self.count, size=self.count), minlength=self.count) for _ in range(REPLICATES)
        ]
        self.weights = np.stack(drawn).astype(np.float32)  # (REPLICATES, units)

    def sums(self, values: Floats) -> tuple[Floats, Floats]:
        """(K,) sums of (N, K) values, and (REPLICATES, K) of each draw."""
        by_unit = np.stack([np.bincount(self.units, column, minlength=self.count) for column in values.T], axis=1)
        return by_unit.sum(axis=0), self.weights.astype(np.float64) @ by_unit

    def estimate(self, values: Sequence[NDArray[Any]], ratio: Ratio) -> Estimate:
        """The ratio of the sums of (N,) columns, and its interval.

        Args:
            values: K columns.
            ratio: From (..., K) sums. Draws with a ratio that is not finite are left out.
        """
        whole, drawn = self.sums(np.stack([np.asarray(one, dtype=np.float64) for one in values], axis=1))
        with np.errstate(divide="ignore", invalid="ignore"):
            value, replicates = float(ratio(whole[None])[0]), ratio(drawn)
        replicates = replicates[np.isfinite(replicates)]
        if self.count < 2 or not len(replicates):
            return Estimate(value)
        low, high = np.quantile(replicates, [0.025, 0.975])
        return Estimate(value, float(low), float(high))

    def share(self, mask: Mask) -> Estimate:
        """The share of groups in a mask. Draws from none or from all claim certainty; the exact bound does not."""
        found = self.estimate([mask, np.ones(len(mask))], lambda sums: sums[..., 0] / sums[..., 1])
        bound = 1 - 0.025 ** (1 / self.count)
        if found.value == 0:
            return Estimate(0.0, 0.0, bound)
        return Estimate(1.0, 1 - bound, 1.0) if found.value == 1 else found


# What a group holds


def live_groups(log: CompletionLog) -> Mask:
    """(N,) bool, groups whose rewards vary: the filter's own rule."""
    mask: Mask = ~zero_variance(torch.from_numpy(log.rewards)).numpy()
    return mask


def group_variances(log: CompletionLog) -> Floats:
    """(N,) reward variances, 0 for groups that are not live."""
    scores: Floats = group_score(torch.from_numpy(log.rewards)).numpy()
    return scores


def rows_with_advantage(log: CompletionLog) -> Mask:
    """(N, G) bool, completions that TRL's loss does not multiply by zero, its rounding of equal rewards left out."""
    rewards = torch.from_numpy(log.rewards).float()
    if log.advantages is not None:
        advantages = torch.from_numpy(log.advantages).nan_to_num()
    else:
        advantages = (rewards - rewards.nanmean(dim=1, keepdim=True)).nan_to_num()
    mask: Mask = ((advantages != 0) & ~equal_rewards(rewards).unsqueeze(1)).numpy()
    return mask


# The remedies


def _gain(variance: Ratio, completions: Ratio, update: Ratio, share: float) -> Ratio:
    """Reward variance over cost, each relative to plain TRL."""
    return lambda sums: variance(sums) / (share * completions(sums) + (1 - share) * update(sums))


def _all(sums: Floats) -> Floats:
    return np.ones(sums.shape[:-1])


def lossless(log: CompletionLog, seed: int, share: float) -> Remedy:
    """TRL's own update for less: rows without advantage, padding and repeated prompts are not computed."""
    setting = "snr_strategy='lossless'"
    rows = rows_with_advantage(log)
    if log.lengths is None or log.prompt_lengths is None:
        dead = Bootstrap(log.prompts, seed).estimate(
            [rows.sum(axis=1), np.full(len(log), log.size)], lambda sums: sums[..., 0] / sums[..., 1]
        )
        said = f"{dead.percent()} of TRL's rows have an advantage; padding and shared prompts need lengths"
        return Remedy("lossless", setting, said, _of_update(dead, share), {"rows": dead})
    numbers, found = update_positions(log, rows)
    over = Bootstrap(numbers, seed)
    parts = {
        name: over.estimate([found[:, place], found[:, 0]], lambda sums: sums[..., 0] / sums[..., 1])
        for place, name in enumerate(("dead_rows", "padding", "shared_prompts"), start=1)
    }
    dead, padding, shared = parts.values()
    said = (
        f"computes {shared.percent()} of TRL's update positions: {dead.value:.0%} without dead rows, "
        f"{padding.value:.0%} without their padding, {shared.value:.0%} with shared prompts. Old log-probs, where TRL "
        f"computes them, are of {dead.value:.0%} of its rows. Same training"
    )
    return Remedy("lossless", setting, said, _of_update(shared, share), parts)


def _of_update(update: Estimate, share: float) -> Estimate:
    """The gain of a smaller update alone."""
    costs = (share + (1 - share) * one for one in (update.value, update.low, update.high))
    value, high, low = (1 / cost if cost else math.inf for cost in costs)
    return Estimate(value, low, high)


def update_positions(log: CompletionLog, rows: Mask) -> tuple[NDArray[np.int64], Floats]:
    """Positions of an update with less and less in it, of up to `MOST_GENERATIONS` generations, evenly spaced.

    One process and one optimizer step for each generation, which are TRL's defaults. Positions alone
    count: attention, which grows with the square of the length, is left out.

    Args:
        log: With lengths.
        rows: (N, G) bool, completions with an advantage.

    Returns:
        (n,) numbers of generations; (n, 4) positions of plain TRL, without dead rows, without padding either, and
        with shared prompts, too.
    """
    assert log.lengths is not None and log.prompt_lengths is not None  # asked before
    generations = log.generations
    numbers = np.unique(generations)
    numbers = numbers[np.unique(np.linspace(0, len(numbers) - 1, min(MOST_GENERATIONS, len(numbers))).astype(int))]
    bounds = np.searchsorted(generations, [numbers, numbers + 1])
    whole, of_prompts = np.ceil(log.lengths).clip(1).astype(int), np.ceil(log.prompt_lengths).clip(1).astype(int)
    found = []
    for start, stop in bounds.T:
        lengths, before = whole[start:stop], of_prompts[start:stop]
        widest = int(before.max())
        width = widest + int(lengths.max())
        place, member = np.nonzero(rows[start:stop])
        if not len(place):  # an optimizer step without any row computes one, whose gradient is zero
            place, member = np.array([0]), np.array([0])
        completions = lengths[place, member].tolist()
        prompts = list(zip(place.tolist(), before[place].tolist(), strict=True))
        every = [completion + prompt for completion, (_, prompt) in zip(completions, prompts, strict=True)]
        micro = log.micro_batch or lengths.size
        steps = -(-lengths.size // micro)

        def padded(batch: Sequence[int], completions: list[int] = completions, widest: int = widest) -> int:
            return len(batch) * (widest + max(completions[row] for row in batch))

        trimmed = sum(padded(batch) for batch in _micro_batches(every, steps, micro, None))
        packed = 0
        for batch in _micro_batches(every, steps, micro, Sharing([prompts], micro * width)):
            shared = tree_size(
                *zip(*((prompts[row][1], completions[row], prompts[row][0]) for row in batch), strict=True)
            )
            packed += min(shared, padded(batch))
        found.append([lengths.size * width, len(place) * width, trimmed, packed])
    return numbers, np.array(found, dtype=np.float64)


def _micro_batches(lengths: list[int], steps: int, micro: int, sharing: Sharing | None) -> list[list[int]]:
    """Numbers of the rows in each micro-batch that has any."""
    dealt = deal_rows([lengths], [steps], micro, None, sharing)
    return [[row for _, row in shares[0]] for shares in dealt if shares[0]]


def nonzero(live: Mask, prompts: Bootstrap, share: float) -> Remedy:
    """Training on live groups alone (DAPO): the mean of the loss is over fewer rows."""
    values = [live, np.ones(len(live))]
    kept = prompts.share(live)
    factor = prompts.estimate(values, lambda sums: sums[..., 1] / sums[..., 0])
    gain = prompts.estimate(values, _gain(_all, _all, lambda sums: sums[..., 0] / sums[..., 1], share))
    said = f"keeps {kept.percent()} of groups and all reward variance; the mean gradient grows by {factor.number()}"
    return Remedy("nonzero", "snr_strategy='nonzero'", said, gain, {"kept": kept, "gradient": factor})


def top_p(log: CompletionLog, variances: Floats, prompts: Bootstrap, seed: int, share: float) -> Remedy:
    """The paper's filter at 0.9, generation by generation as the trainer runs it."""
    kept = kept_by_filter(log, seed)
    values = [kept, np.ones(len(log)), kept * variances, variances]
    groups = prompts.share(kept)
    variance = prompts.estimate(values, lambda sums: sums[..., 2] / sums[..., 3])
    factor = prompts.estimate(values, lambda sums: sums[..., 1] / sums[..., 0])
    gain = prompts.estimate(
        values,
        _gain(lambda sums: sums[..., 2] / sums[..., 3], _all, lambda sums: sums[..., 0] / sums[..., 1], share),
    )
    said = (
        f"keeps {groups.percent()} of groups and {variance.percent()} of the reward variance; the mean gradient grows "
        f"by {factor.number()}"
    )
    return Remedy("top_p 0.9", "snr_strategy='top_p'", said, gain, {
        "kept": groups, "kept_variance": variance, "gradient": factor
    })  # fmt: skip


def kept_by_filter(log: CompletionLog, seed: int, strategy: str = "top_p", value: float = 0.9) -> Mask:
    """(N,) bool, groups that a strategy keeps in the course of the run."""
    args = SimpleNamespace(
        snr_strategy=strategy,
        snr_value=value,
        snr_score="reward_variance",
        groups_per_generation=log.groups_per_generation,
        seed=seed,
    )
    group_filter, kept = strategy_of(args), []
    rewards = torch.from_numpy(log.rewards)
    for batch in rewards.split(np.bincount(log.generations).tolist()):
        groups = Groups(
            batch,
            batch.unsqueeze(2),
            torch.ones(batch.shape),
            seeded_generator(seed),
            group_filter.see(batch),
            lambda: torch.empty(0),
        )
        kept.append(group_filter.select(groups)[1].any(dim=1))
    mask: Mask = torch.cat(kept).numpy()
    return mask


def dynamic_sampling(log: CompletionLog, live: Mask, prompts: Bootstrap, seed: int, share: float) -> Remedy:
    """Further prompts until every batch is full of live groups."""
    values = [live, np.ones(len(live))]
    each = prompts.estimate(values, lambda sums: log.size * sums[..., 1] / sums[..., 0])
    gain = prompts.estimate(values, _gain(_all, _all, lambda sums: sums[..., 0] / sums[..., 1], share))
    of_share = prompts.share(live)
    shares = of_share.value, of_share.high, of_share.low  # fewer live groups, more rounds
    mean, fewest, most = (
        refill_rounds(one, log.groups_per_generation, seed) if one > 0 else np.array([math.nan]) for one in shares
    )
    rounds = Estimate(float(mean.mean()), float(fewest.mean()), float(most.mean()))
    limit = max(1, int(np.quantile(mean, 0.95)))
    said = (
        f"{each.number()} completions for each full group of {log.size}, {rounds.number()} further rounds a batch "
        f"(95% of batches need at most {limit})"
    )
    setting = f"snr_strategy='nonzero', snr_dynamic_sampling_rounds={limit}, snr_pilot_generations=0"
    return Remedy("dynamic sampling", setting, said, gain, {"completions": each, "rounds": rounds})


def refill_rounds(share: float, groups: int, seed: int) -> NDArray[np.int64]:
    """(REFILLED,) further rounds that batches need, one after another, surplus groups being carried over.

    Args:
        share: Of prompts whose groups are live.
        groups: Of a batch.
        seed: Of the draws.
    """
    rng = np.random.default_rng([_DRAW, seed, 1])
    rounds, waiting = [], 0
    for _ in range(REFILLED):
        found, sampled, number = int(rng.binomial(groups, share)), groups, 0
        pool = waiting + found
        while pool < groups and number < 1000:
            size = round_size(groups - pool, found, sampled, groups, 1, 1)
            new = int(rng.binomial(size, share))
            pool, found, sampled, number = pool + new, found + new, sampled + size, number + 1
        rounds.append(number)
        waiting = min(max(0, pool - groups), groups)
    return np.array(rounds, dtype=np.int64)


def pilots(
    log: CompletionLog, live: Mask, variances: Floats, prompts: Bootstrap, first: int, seed: int, share: float
) -> Remedy:
    """A few completions of each prompt first, the others where rewards may vary; trained as `nonzero`."""
    size = log.size
    whole = sampled_whole(log, first, seed)
    values = [
        first + whole * (size - first),
        whole * live,
        live,
        whole * variances,
        variances,
        np.ones(len(log)),
    ]
    each = prompts.estimate(values, lambda sums: sums[..., 0] / sums[..., 1])
    missed = prompts.estimate(values, lambda sums: 1 - sums[..., 1] / sums[..., 2])
    gain = prompts.estimate(
        values,
        _gain(
            lambda sums: sums[..., 3] / sums[..., 4],
            lambda sums: sums[..., 0] / (size * sums[..., 5]),
            lambda sums: sums[..., 1] / sums[..., 5],
            share,
        ),
    )
    said = f"{each.number()} completions for each full group of {size}; misses {missed.percent()} of live groups"
    setting = f"snr_strategy='nonzero', snr_pilot_generations={first}, snr_dynamic_sampling_rounds=1"
    return Remedy(f"pilots, G0 = {first}", setting, said, gain, {"completions": each, "missed": missed})


def _every_pilot(
    log: CompletionLog, live: Mask, variances: Floats, prompts: Bootstrap, seed: int, share: float
) -> list[Remedy]:
    sizes = [first for first in PILOTS if first < log.size]
    if not sizes:
        said = f"the log cannot tell: groups of {log.size} leave no completion to save"
        return [Remedy("pilots", "snr_pilot_generations=2", said, is_known=False)]
    return [pilots(log, live, variances, prompts, first, seed, share) for first in sizes]


def sampled_whole(log: CompletionLog, first: int, seed: int) -> Floats:
    """(N,) how often each group is sampled in full when `first` of its completions are looked at, audits included.

    Which completions come first is drawn anew in `SHUFFLES` replays of a short run.
    """
    rounds = max(ROUNDS_OF, log.groups_per_generation)
    rng = np.random.default_rng([_DRAW, seed, 2])
    found = np.zeros(len(log))
    replays = SHUFFLES if len(log) < ENOUGH else 1
    for _ in range(replays):
        looked = rng.permuted(log.rewards, axis=1)[:, :first]
        posterior, recent = RewardPosterior(0, 1.0), np.empty(0)
        for start in range(0, len(log), rounds):
            pilot = looked[start : start + rounds]
            posterior.see(pilot)
            posterior.learn_prior(pilot)
            expected = posterior.group_variance(pilot, log.size - first)
            recent = np.r_[recent, expected][-RECENT:]
            worth = expected >= least_worth(recent, first, log.size)
            if not worth.any():
                worth[expected.argmax()] = True  # a round continues with one prompt at least
            found[start : start + rounds] += np.where(worth, 1.0, AUDIT)
    return found / replays


def prompt_selection(log: CompletionLog, live: Mask, variances: Floats, seed: int, share: float) -> Remedy:
    """Prompts chosen by their earlier groups, from the second epoch on: replayed on prompts logged more than once."""
    name, setting = "prompt selection", "snr_strategy='nonzero', snr_prompt_selection=True"
    if not log.knows_prompts:
        return Remedy(name, setting, "the log does not say which groups have the same prompt", is_known=False)
    earlier, later = repeated(log.prompts)
    number = len(np.unique(log.prompts[later]))
    if number < TWICE:
        said = f"the log cannot tell: it holds {counted(number, 'prompt')} more than once, of at least {TWICE}"
        return Remedy(name, setting, said, is_known=False)
    if not live[later].any():
        return Remedy(name, setting, "no prompt that came again had rewards that vary", is_known=False)
    chosen = chosen_again(log, earlier, seed)
    prompts = Bootstrap(log.prompts[later], seed)
    ones = np.ones(len(later))
    values = [chosen, chosen * live[later], chosen * variances[later], ones, live[later], variances[later]]
    then = prompts.estimate(values, lambda sums: sums[..., 1] / sums[..., 0])
    before = prompts.estimate(values, lambda sums: sums[..., 4] / sums[..., 3])
    gain = prompts.estimate(
        values,
        _gain(
            lambda sums: sums[..., 2] / sums[..., 0] / (sums[..., 5] / sums[..., 3]),
            _all,
            lambda sums: sums[..., 1] / sums[..., 0],
            share,
        ),
    )
    more = prompts.estimate(values, lambda sums: sums[..., 2] / sums[..., 0] / (sums[..., 5] / sums[..., 3]))
    said = (
        f"{then.percent()} of groups live in place of {before.value:.0%}, with {more.number()} times the reward "
        f"variance, from the second epoch on; estimated from {number} prompts"
    )
    return Remedy(name, setting, said, gain, {"live": then, "live_before": before, "variance": more})


def repeated(prompts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(n,) numbers of groups whose prompt comes again, and (n,) of the group where it does next."""
    order = np.argsort(prompts, kind="stable")
    same = prompts[order][1:] == prompts[order][:-1]
    return order[:-1][same], order[1:][same]


def chosen_again(log: CompletionLog, earlier: NDArray[np.int64], seed: int) -> Floats:
    """How often each prompt with an earlier group is chosen, (n,); the mean is 1/CANDIDATES.

    The trainer's rule: four candidates compete for each place of a batch. Nine places in ten go to the largest
    variances drawn from the posterior, the others to any candidate. Evidence is an epoch old.
    """
    count = len(earlier)
    posterior = RewardPosterior(count, HALF_LIFE * count)
    posterior.observe(np.arange(count), log.rewards[earlier], np.ones(count, dtype=bool))
    posterior.clock += count
    rng = np.random.default_rng([_DRAW, seed, 3])
    candidates = min(CANDIDATES * log.groups_per_generation, count)
    chosen = np.zeros(count)
    for _ in range(DRAWS):
        drawn = posterior.sample(np.arange(count), rng)
        order = rng.permutation(count)
        for start in range(0, count - candidates + 1, candidates):
            block = order[start : start + candidates]
            places = max(1, candidates // CANDIDATES)
            best = block[np.argsort(-drawn[block], kind="stable")[:places]]
            chosen[best] += 1 - EXPLORE
            chosen[block] += EXPLORE * places / len(block)
    return chosen / DRAWS


def other_shapes(log: CompletionLog, prompts: Bootstrap) -> dict[int, Remedy]:
    """Other groups for as many completions, by their size: `size` completions of G / `size` times as many prompts."""
    sizes = [log.size * 2**power for power in range(1, 4) if power == 1 or log.size * 2**power <= LARGEST]
    fit = functools.cache(lambda: Sameness.fit(log.rewards, prompts))
    found = {size: _other_shape(log, size, prompts, fit) for size in (*sizes, log.size // 2) if size >= 2}
    return {size: one for size, one in found.items() if one.is_known or size == sizes[0]}


def _other_shape(log: CompletionLog, size: int, prompts: Bootstrap, fit: Callable[[], "Sameness | None"]) -> Remedy:
    name, setting, how = f"groups of {size}", f"num_generations={size}", ""
    columns: Sequence[NDArray[Any]] | None
    if size < log.size:
        columns = live_with(log.rewards, size), live_groups(log), np.ones(len(log))
    elif columns := pooled(log, size, prompts):
        how = "; from all completions of a prompt, as if the policy had stayed the same between its groups"
    if columns:
        then = prompts.estimate(columns, lambda sums: sums[..., 0] / sums[..., 2])
        now = prompts.estimate(columns, lambda sums: sums[..., 1] / sums[..., 2])
        ratio = prompts.estimate(columns, lambda sums: sums[..., 0] / sums[..., 1] * log.size / size)
    elif log.size < 3:
        said = (
            "the log cannot tell: two completions do not show how prompts differ, and the groups of a prompt are too "
            "few or differ by more than chance"
        )
        return Remedy(name, setting, said, is_known=False)
    elif (fitted := fit()) is None:
        said = f"the log cannot tell: equal rewards have more than {MOST_VALUES} values, or no group is whole"
        return Remedy(name, setting, said, is_known=False)
    else:
        now, then, ratio = fitted.live(log.size), fitted.live(size), fitted.ratio(size, log.size)
    said = (
        f"{then.percent()} of groups live in place of {now.value:.0%}; for equal completions {ratio.number()} of "
        f"today's live groups, and the same reward variance{how}"
    )
    return Remedy(name, setting, said, None, {"live": then, "live_groups": ratio})


def pooled(log: CompletionLog, size: int, prompts: Bootstrap) -> tuple[Floats, Floats, Floats] | None:
    """Larger groups from the completions of a prompt in all of its groups.

    Returns:
        For each group, (N,) all: the probability that `size` completions of its prompt differ in reward, whether the
        group is live, and 1; all are 0 where the prompt has fewer completions. `None` if most groups are 0, or if the
        groups of a prompt differ by more than chance, as when the policy learned between them.
    """
    units, live = prompts.units, live_groups(log)
    number = np.bincount(units, (~np.isnan(log.rewards)).sum(axis=1))
    enough = (number >= size)[units]
    if not log.knows_prompts or enough.mean() < 0.5 or len(np.unique(units[enough])) < TWICE:
        return None
    alike = live_with(log.rewards, log.size, units)[units] - live
    drift = prompts.estimate([alike * enough, enough], lambda sums: sums[..., 0] / sums[..., 1])
    if drift.low > 0 or not live[enough].any():
        return None
    return live_with(log.rewards, size, units)[units] * enough, (live & enough).astype(float), enough.astype(float)


def live_with(rewards: Floats, size: int, units: NDArray[np.int64] | None = None) -> Floats:
    """(U,) probability that `size` completions drawn from a unit, without replacement, do not all earn the same.

    1 - sum over values v of C(n_v, size) / C(n, size): unbiased for a group of that size, as members are exchangeable.

    Args:
        rewards: (N, G), NaN where there is none.
        size: At least 2; a unit with fewer rewards has probability 0.
        units: (N,) unit of each group, from 0 to U - 1; by default each group is one.

    >>> live_with(np.array([[1.0, 0.0, 0.0, 0.0]]), 2).tolist()
    [0.5]
    """
    units = np.arange(len(rewards)) if units is None else units
    known = ~np.isnan(rewards)
    values, places = np.unique(np.round(rewards[known], 6), return_inverse=True)  # float noise is no variance
    owners = np.repeat(units, known.sum(axis=1))
    kinds, earned = np.unique(owners * len(values) + places.reshape(-1), return_counts=True)
    owner, total = kinds // max(1, len(values)), np.bincount(owners, minlength=int(units.max()) + 1)
    same = np.ones(len(kinds))
    for drawn in range(size):
        same *= (earned - drawn).clip(0) / (total[owner] - drawn).clip(1)
    return np.where(total >= size, 1 - np.bincount(owner, same, minlength=len(total)), 0.0)


@dataclass(frozen=True)
class Sameness:
    """How likely all completions of a group are to earn the same, for groups of any size.

    A prompt's chance of a reward is taken as Beta distributed over prompts, and fitted by likelihood to the counts of
    groups, for each reward that some group has earned throughout.

    Args:
        whole: (V, 2) alpha and beta of each such reward.
        drawn: (V, REPLICATES, 2) of the bootstrap.
    """

    whole: Floats
    drawn: Floats

    @classmethod
    def fit(cls, rewards: Floats, prompts: Bootstrap) -> "Sameness | None":
        """From (N, G) rewards; `None` without a group of known rewards, or with too many values."""
        rounded, size = np.round(rewards, 6), rewards.shape[1]
        known = ~np.isnan(rounded).any(axis=1)
        values = np.unique(rounded[known & (rounded == rounded[:, :1]).all(axis=1), 0])
        if not known.any() or len(values) > MOST_VALUES:
            return None
        means = 1 / (1 + np.exp(-np.linspace(-6, 6, 97)))
        strengths = np.exp(np.linspace(math.log(0.02), math.log(500), 97))
        alpha, beta = (part.reshape(-1) for part in (means * strengths[:, None], (1 - means) * strengths[:, None]))
        likelihood, cells = log_beta_binomial(alpha, beta, size), np.stack([alpha, beta], axis=1)
        whole, drawn = np.empty((len(values), 2)), np.empty((len(values), REPLICATES, 2))
        for place, value in enumerate(values):
            earned = np.where(known, (rounded == value).sum(axis=1), -1)
            counts, of_draws = prompts.sums(np.equal(earned[:, None], np.arange(size + 1)).astype(np.float64))
            whole[place] = cells[(likelihood @ counts).argmax()]
            drawn[place] = cells[(likelihood @ of_draws.T).argmax(axis=0)]
        return cls(whole, drawn)

    def live(self, size: int) -> Estimate:
        """Share of groups of a size whose rewards vary."""
        return self._estimate(lambda shares: shares(size))

    def ratio(self, size: int, former: int) -> Estimate:
        """Live groups of a size for each of a former size, with equal completions."""
        return self._estimate(lambda shares: shares(size) / shares(former) * former / size)

    def _estimate(self, function: Callable[[Callable[[int], Floats]], Floats]) -> Estimate:
        def shares(parameters: Floats) -> Callable[[int], Floats]:  # (V, n, 2) to (n,)
            alpha, beta = parameters.reshape(-1, 2).T
            shape = parameters.shape[:2]
            return lambda size: (1 - all_of_beta(alpha, beta, size).reshape(shape).sum(axis=0)).clip(0)

        with np.errstate(divide="ignore", invalid="ignore"):
            value, drawn = function(shares(self.whole[:, None])), function(shares(self.drawn))
        drawn = drawn[np.isfinite(drawn)]
        # Without a group of equal rewards there is nothing to draw, which is no certainty.
        if not len(self.whole) or not len(drawn):
            return Estimate(float(value[0]))
        low, high = np.quantile(drawn, [0.025, 0.975])
        return Estimate(float(value[0]), float(low), float(high))


def log_beta_binomial(alpha: Floats, beta: Floats, size: int) -> Floats:
    """(n, size + 1) log-probabilities of each number of successes, for (n,) parameters."""
    a, b = torch.from_numpy(alpha)[:, None], torch.from_numpy(beta)[:, None]
    k = torch.arange(size + 1, dtype=torch.float64)
    ways = (
        torch.lgamma(torch.tensor(size + 1.0, dtype=torch.float64)) - torch.lgamma(k + 1) - torch.lgamma(size - k + 1)
    )
    logs: Floats = (ways + _log_beta(a + k, b + size - k) - _log_beta(a, b)).numpy()
    return logs


def _log_beta(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


def all_of_beta(alpha: Floats, beta: Floats, size: int) -> Floats:
    """(n,) probability that a group of a size succeeds throughout, its prompt's chance being Beta distributed.

    >>> round(float(all_of_beta(np.array([1.0]), np.array([1.0]), 4)[0]), 6)  # uniform: 1 / (size + 1)
    0.2
    """
    probability: Floats = np.exp(log_beta_binomial(alpha, beta, size)[:, -1])
    return probability


def score_by_one(log: CompletionLog, live: Mask, prompts: Bootstrap) -> Remedy:
    """Groups with varying reward sums in which one of the rewards does not vary."""
    name = "score by one reward"
    if len(log.by_function) < 2:
        return Remedy(name, "snr_score_reward=…", "the log has one reward", is_known=False)
    said, numbers = [], {}
    for function, rewards in log.by_function.items():
        flat = live & zero_variance(torch.from_numpy(rewards)).numpy()
        found = prompts.estimate([flat, live], lambda sums: sums[..., 0] / sums[..., 1])
        numbers[function] = found
        example = f", as for {_beginning(log, int(np.flatnonzero(flat)[0]))!r}" if flat.any() else ""
        said.append(f"{found.percent()} of live groups are equal in {function}{example}")
    first = max(numbers, key=lambda function: numbers[function].value)
    return Remedy(name, f"snr_score_reward={first!r}", "; ".join(said), None, numbers)


def _beginning(log: CompletionLog, group: int) -> str:
    """The last words of a prompt's beginning: prompts mostly begin alike."""
    text = log.beginnings[log.prompts[group]] if log.knows_prompts else ""
    return " ".join(text.split())[-40:]


# What is wrong, and what to do


def find_faults(log: CompletionLog, shapes: Mapping[int, Remedy] | None = None) -> list[str]:
    """Problems that no remedy here solves, or that make the numbers doubtful; sentences.

    Args:
        log: The groups.
        shapes: What is known of groups of another size, see `other_shapes`.
    """
    live, rewards = live_groups(log), log.rewards
    known, faults = rewards[~np.isnan(rewards)], []
    if not known.size:
        return ["No completion has a reward."]
    low, high = float(known.min()), float(known.max())
    if high - low <= 1e-6:
        faults.append(f"Every reward is {high:g}: the reward function tells nothing apart.")
    else:
        tops, floors = (
            ~live
            & (np.abs(np.nan_to_num(rewards, nan=end) - end) <= 1e-6).all(axis=1)
            & ~np.isnan(rewards).all(axis=1)
            for end in (high, low)
        )
        for mask, word, what in ((tops, "solved", "harder"), (floors, "failed", "easier")):
            if mask.mean() >= MANY:
                end = high if word == "solved" else low
                cure = _cure(log, float(mask.mean()), end, f"{what} prompts", shapes or {})
                faults.append(f"{mask.mean():.0%} of groups are all {word} (every reward is {end:g}): {cure}.")
    clipped = [
        row["completions/clipped_ratio"] for row in log.history if is_number(row.get("completions/clipped_ratio"))
    ]
    if clipped and float(np.mean(clipped)) >= CUT:
        faults.append(
            f"{np.mean(clipped):.0%} of completions are cut at the length limit: raise max_completion_length."
        )
    spans = {name: np.nanmax(one) - np.nanmin(one) for name, one in log.by_function.items() if not np.isnan(one).all()}
    flat = [name for name, span in spans.items() if span <= 1e-6]
    if flat and len(flat) < len(spans):
        vary = [name for name in spans if name not in flat]
        faults.append(f"Only {', '.join(vary)} varies; {', '.join(flat)} is the same in every completion.")
    equal = equal_rewards(torch.from_numpy(rewards)).numpy()
    if rounded := int((~live & ~equal).sum()):
        faults.append(
            f"Rewards differ by rounding alone in {counted(rounded, 'group')}: TRL trains on it, the filter does not."
        )
    if log.advantages is not None and (noisy := int((equal & (np.nan_to_num(log.advantages) != 0).any(axis=1)).sum())):
        largest = np.abs(np.nan_to_num(log.advantages)[equal]).max()
        parts = [~zero_variance(torch.from_numpy(one)).numpy() for one in log.by_function.values()]
        mixed = len(parts) > 1 and np.any(parts, axis=0)[equal].any()  # sums that only these weights make equal
        why = "perhaps because of other weights: see --reward_weights" if mixed else "by TRL's rounding"
        faults.append(f"Advantages are up to {largest:.1g} in {counted(noisy, 'group')} of equal rewards, {why}.")
    if missing := int(np.isnan(rewards).sum()):
        faults.append(f"No reward in {missing} of {rewards.size} completions.")
    return faults


def _cure(log: CompletionLog, share: float, end: float, other: str, shapes: Mapping[int, Remedy]) -> str:
    """What helps where a share of groups earns `end` throughout: larger groups, unless hardly any would be live."""
    known = {size: one.numbers["live"].value for size, one in shapes.items() if one.is_known and size > log.size}
    largest, most = max(known, default=0), max(LARGEST, 2 * log.size)
    if known and known[largest] >= MANY:
        return f"larger groups, as groups of {largest} would be live in {known[largest]:.0%}"
    # Moments of a prompt's chance are log-convex: at least so many of the largest groups earn `end` throughout.
    single = float((np.abs(log.rewards - end) <= 1e-6).sum() / (~np.isnan(log.rewards)).sum())
    least = (share ** (most - 1) / single ** (most - log.size)) ** (1 / (log.size - 1))
    is_hopeless = largest == most or least >= MANY
    return other if is_hopeless else f"larger groups or {other}, the log cannot tell which"


def _advice(remedies: Sequence[Remedy]) -> str:
    paying = [one for one in remedies if one.gain is not None and _least(one.gain) >= PAYS]
    if not paying:
        return "No remedy here clearly buys more than it costs: stay with TRL, or take lossless, which only saves."
    best, gain = paying[0], paying[0].gain
    assert gain is not None  # asked above
    return f"Begin with {best.name}: {gain.number()} times the reward variance for the same cost. {best.setting}"


def _least(gain: Estimate) -> float:
    return gain.low if math.isfinite(gain.low) else 0.0


def _notes(log: CompletionLog, live: Estimate, prompts: Bootstrap, share: float) -> list[str]:
    steps = np.unique(log.steps)
    groups = f"{counted(len(log), 'group')} of {log.size}"
    of_prompts = f" of {counted(len(np.unique(log.prompts)), 'prompt')}" if log.knows_prompts else ""
    of_steps = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    few = int(live_groups(log).sum())
    notes = [
        *([f"Every gain here rests on {counted(few, 'live group')}: log more steps."] if 0 < few < FEW else []),
        f"{log.rewards.size} completions are read: {groups}{of_prompts}, {of_steps}.",
        *log.notes,
    ]
    if len(steps) > 1:
        early, mask = log.steps <= np.median(steps), live_groups(log)
        halves = [f"{mask[half].mean():.0%}" for half in (early, ~early) if half.any()]
        notes.append(f"Live groups: {live.percent()}; by halves of the steps {' and '.join(halves)}.")
    else:
        notes.append(f"Live groups: {live.percent()}; one step shows no drift.")
    if log.unit and log.unit != "tokens":
        notes.append(f"Lengths are {log.unit}; --tokenizer counts tokens.")
    if log.lengths is not None and log.micro_batch is None:
        notes.append("The size of a micro-batch is not logged: a generation is taken as one; --micro_batch says it.")
    times = [row["step_time"] for row in log.history if is_number(row.get("step_time"))]
    timed = f" A step took {np.mean(times):.3g} s." if times else ""
    notes.append(
        f"Sampling is taken as {share:.0%} of a step's cost (--sampling_share), which TRL does not log.{timed}"
    )
    return notes
