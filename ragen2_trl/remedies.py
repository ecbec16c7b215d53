"""Which remedy pays on the data of a training, estimated from its log before anything is changed.

No model is loaded. Strategies and the policy of sampling are those of the trainers, replayed on the groups of the log.
Where a log cannot tell, a sentence says so in place of a number. Intervals are of 95 %, by bootstrap over prompts, or
over generations for positions of an update.

Remedies are compared by one number, the *gain*: reward variance of trained rows for each unit of cost, 1 for plain
TRL. A unit of cost is a step of plain TRL: `sampling_share` of it is sampling, and the rest the update.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ragen2_trl.estimates import MOST_VALUES, Bootstrap, Estimate, Floats, Sameness, live_with, seeded_draws
from ragen2_trl.filtering import group_score, zero_variance
from ragen2_trl.instrument.findings import ADVICE, Finding
from ragen2_trl.instrument.health import Health, is_number
from ragen2_trl.messages import counted
from ragen2_trl.record.completions import ASSUMED_GROUPS, CompletionLog, Count, read_completion_log
from ragen2_trl.record.logs import read_folder, read_log
from ragen2_trl.record.rows import NoCompletionsError
from ragen2_trl.sampling.policy import AUDIT, Pilots, Policy, PromptSelection
from ragen2_trl.text import flatten
from ragen2_trl.trainers.batches import tree_size
from ragen2_trl.trainers.dealing import Sharing, deal_rows
from ragen2_trl.trainers.selection import Groups, equal_rewards, seeded_generator, strategy_of

Mask = NDArray[np.bool_]
Numbers = NDArray[np.int64]

PILOTS = (2, 3, 4)
ASSUMED_SIZE = 8  # completions of a group, TRL's default
SHUFFLES = 3  # of the members of each group, by which a replay of pilots depends less on their order
ENOUGH = 4000  # groups; a log with at least as many needs one replay of pilots, and fewer of prompt selection
ROUNDS_OF = 8  # groups that a replay of pilots takes together at least; its threshold looks back over 256 in any case
MOST_GENERATIONS = 100  # for which rows are dealt, the slowest part
TWICE = 16  # fewest prompts logged more than once for an estimate from them
LARGEST = 16  # completions of a prompt, up to which groups are estimated, and at least twice as many as there are
EPOCHS = 20  # that prompt selection is replayed for at most
REFILLED = 200  # batches that dynamic sampling is simulated for
MOST_ROUNDS = 1000  # of a batch
SAME = 1e-6  # difference of rewards up to which they count as the same
MANY = 0.5  # smallest share of solved or failed groups that is named as a fault
CUT = 0.9  # smallest share of completions cut at the length limit that is named as a fault
FEW = 5  # live groups below which a note warns of the gains
PAYS = 1.05  # least gain, at the lower end of its interval, for which a remedy is advised


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
        faults: What is wrong with the training, worst first.
        remedies: Sorted by gain; rows without a gain follow, and rows that the log cannot tell come last.
        advice: One sentence.
        notes: What was read and assumed; sentences.
        has_completions: Whether `log` holds groups that were logged, or groups made up from logged shares.
    """

    log: CompletionLog
    live: Estimate
    faults: Sequence[Finding]
    remedies: Sequence[Remedy]
    advice: str
    notes: Sequence[str]
    has_completions: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The findings without the arrays of the log, for JSON; NaN becomes `None`."""
        log = self.log
        return {
            "source": log.name,
            "groups": len(log) if self.has_completions else None,
            "completions": log.rewards.size if self.has_completions else None,
            "num_generations": log.size,
            "groups_per_generation": log.groups_per_generation,
            "prompts": len(np.unique(log.prompts)) if log.knows_prompts else None,
            "steps": len(np.unique(log.steps)),
            "live": asdict(self.live, dict_factory=_plain),
            "faults": [fault.to_dict() for fault in self.faults],
            "advice": self.advice,
            "remedies": [asdict(one, dict_factory=_plain) for one in self.remedies],
            "notes": list(self.notes),
        }


def _plain(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Fields of a dataclass for JSON."""
    found = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields}
    return {"known" if name == "is_known" else name: value for name, value in found.items()}


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
            that `read_completion_log` has read. Without completions, a folder or log that `health` reads.
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
        try:
            log = read_completion_log(
                Path(source),
                num_generations=num_generations,
                groups_per_generation=groups_per_generation,
                rewards=rewards,
                reward_weights=reward_weights,
                count=None if tokenizer is None else token_counter(tokenizer),
            )
        except NoCompletionsError as error:
            shares = _logged_shares(Path(source), error)
            return _of_shares(str(source), shares, num_generations, groups_per_generation, seed, sampling_share)
    log = replace(log, micro_batch=micro_batch or log.micro_batch)
    replays = Replays(log, seed, sampling_share)
    with np.errstate(divide="ignore", invalid="ignore"):  # draws without a live group
        sizes = replays.other_sizes() if replays.live.any() else {}
        remedies = [*replays.remedies(), *sizes.values(), replays.score_by_one()] if replays.live.any() else []
    remedies.sort(key=lambda one: (not one.is_known, one.gain is None, -(one.gain or Estimate(0)).value))
    live = replays.prompts.share(replays.live)
    notes = _notes(log, live, sampling_share)
    return WhatIf(log, live, find_faults(log, sizes), remedies, _advice(remedies), notes)


def _logged_shares(source: Path, error: NoCompletionsError) -> Floats:
    """(n,) shares of groups with equal rewards in the rows of a log; raises `error` if it has none."""
    try:
        rows = (read_folder(source) if source.is_dir() else read_log(source)).rows
    except ValueError as unread:
        raise error from unread
    name_of = Health().name_of
    found = [row[key] for row in rows for key in row if name_of(key) == "zero_variance" and is_number(row[key])]
    if not found:
        raise error
    return np.array(found).clip(0, 1)


def _of_shares(
    name: str, shares: Floats, size: int | None, groups: int | None, seed: int, sampling_share: float
) -> WhatIf:
    """What (n,) logged shares of groups with equal rewards tell, replayed on groups that are made up to have them."""
    size, groups = size or ASSUMED_SIZE, groups or ASSUMED_GROUPS
    live = np.diff(np.cumsum((1 - shares) * groups).round(), prepend=0.0)
    rewards = np.zeros((len(shares), groups, size))
    rewards[..., 0] = np.arange(groups) < live[:, None]
    steps = np.repeat(np.arange(len(shares)), groups)
    made = rewards.reshape(-1, size)
    log = CompletionLog(name, steps, steps, made, groups_per_generation=groups, knows_prompts=False)
    replays = Replays(log, seed, sampling_share)
    share = replays.prompts.share(replays.live)
    with np.errstate(divide="ignore", invalid="ignore"):
        remedies = [replays.lossless(), replays.dynamic_sampling()] if replays.live.any() else []
    remedies.sort(key=lambda one: -(one.gain or Estimate(0)).value)
    dead = f"{1 - share.value:.0%} of groups, and of their completions, had equal rewards, which teach nothing."
    notes = [
        f"No completions are logged: this rests on the share of such groups in {counted(len(shares), 'row')}.",
        f"Groups of {size} and generations of {groups} groups are assumed (--num_generations, --groups), and that "
        "further prompts are live as often.",
        "For the other remedies and surer numbers, set log_completions=True and logging_steps=1.",
    ]
    fault = [Finding("data", "dead_groups", "warning", dead)] if share.value < 1 else []
    return WhatIf(log, share, fault, remedies, _advice(remedies), notes, has_completions=False)


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
                made = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
                ids = made["input_ids"]
            last[:] = prompt, len(ids)
        text = flatten(completion, joint="\n")
        return last[1], len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1

    return count


# What the trainers would do with the groups of a log


def group_variances(log: CompletionLog) -> Floats:
    """(N,) reward variances, 0 for groups that are not live."""
    scores: Floats = group_score(torch.from_numpy(log.rewards)).numpy()
    return scores


def live_groups(log: CompletionLog) -> Mask:
    """(N,) bool, groups whose rewards vary: the filter's own rule."""
    return group_variances(log) > 0


def repeated(prompts: Numbers) -> tuple[Numbers, Numbers]:
    """(n,) numbers of groups whose prompt comes again, and (n,) of the group where it does next."""
    order = np.argsort(prompts, kind="stable")
    same = prompts[order][1:] == prompts[order][:-1]
    return order[:-1][same], order[1:][same]


def generations_of(log: CompletionLog, fewest: int = 1) -> list[Numbers]:
    """Numbers of the groups of each generation, or as many in a row as have `fewest` groups."""
    joined = -(-fewest // log.groups_per_generation)
    return np.split(np.arange(len(log)), np.flatnonzero(np.diff(log.generations // joined)) + 1)


def kept_rows(log: CompletionLog, seed: int, strategy: str) -> Mask:
    """(N, G) bool, completions that a strategy keeps in the course of the run."""
    args = SimpleNamespace(snr_strategy=strategy, snr_value=0.9, snr_score="reward_variance", seed=seed)
    args.groups_per_generation = log.groups_per_generation
    of_run, kept = strategy_of(args), np.zeros(log.rewards.shape, dtype=bool)
    sums = torch.from_numpy(log.rewards).float()  # as TRL holds them, so that equal sums are equal
    means = sums.nanmean(dim=1, keepdim=True)
    advantages = (sums - means if log.advantages is None else torch.from_numpy(log.advantages)).nan_to_num()
    for groups in generations_of(log):
        rewards, own = torch.from_numpy(log.rewards[groups]), advantages[groups]
        batch = Groups(
            rewards,
            rewards.unsqueeze(2),
            lengths=torch.ones(rewards.shape),
            generator=seeded_generator(seed),
            reward_range=of_run.see(rewards),
            entropies=lambda: torch.empty(0),
            sums=sums[groups].double(),
            advantages=own.clone,  # of this generation
        )
        kept[groups] = of_run.select(batch)[1]
    return kept


def update_positions(log: CompletionLog, rows: Mask) -> Floats:
    """(n, 4) positions of the update of plain TRL, without dead rows, without padding either, and with shared prompts,
    too, in up to `MOST_GENERATIONS` generations, evenly spaced.

    One process and one optimizer step for each generation, which are TRL's defaults. Positions alone count: attention,
    which grows with the square of the length, is left out. `rows` are the completions with an advantage, (N, G).
    """
    assert log.lengths is not None and log.prompt_lengths is not None  # asked before
    every = generations_of(log)
    spaced = np.unique(np.linspace(0, len(every) - 1, min(MOST_GENERATIONS, len(every))).astype(int))
    lengths, prompts = (np.ceil(one).clip(1).astype(int) for one in (log.lengths, log.prompt_lengths))
    read = [every[number] for number in spaced]
    return np.array([_positions(lengths[one], prompts[one], rows[one], log.micro_batch) for one in read], dtype=float)


def _positions(lengths: Numbers, prompts: Numbers, rows: Mask, micro_batch: int | None) -> list[int]:
    """A row of `update_positions`, for (n, G) lengths of completions and (n,) of the prompts of a generation."""
    groups, members = np.nonzero(rows)
    if not len(groups):  # an optimizer step without any row computes one, whose gradient is zero
        groups, members = np.array([0]), np.array([0])
    of_rows = np.stack([prompts[groups], lengths[groups, members], groups])  # as `tree_size` takes them
    widest, width, micro = prompts.max(), prompts.max() + lengths.max(), micro_batch or lengths.size

    def dealt(sharing: Sharing | None) -> list[Numbers]:
        """(3, n) rows of each micro-batch that has any."""
        deal = deal_rows([of_rows[:2].sum(axis=0).tolist()], [-(-lengths.size // micro)], micro, None, sharing)
        return [of_rows[:, [row for _, row in shares[0]]] for shares in deal if shares[0]]

    def padded(batch: Numbers) -> int:
        return int(batch.shape[1] * (widest + batch[1].max()))

    of_prompts = list(zip(groups.tolist(), of_rows[0].tolist(), strict=True))
    trimmed = sum(map(padded, dealt(None)))
    shared = [min(padded(one), tree_size(*one.tolist())) for one in dealt(Sharing([of_prompts], int(micro * width)))]
    return [lengths.size * width, len(groups) * width, trimmed, sum(shared)]


def refill_rounds(share: float, groups: int, seed: int) -> Numbers:
    """(REFILLED,) further rounds of batches that follow one another, a share of prompts being live.

    Surplus groups are carried over to the next batch.
    """
    policy, rng = Policy(None, None, MOST_ROUNDS, groups), seeded_draws(seed, 1)
    waiting, rounds = 0, []
    for _ in range(REFILLED):
        policy.begin_step(groups)
        prompts, kept = groups, 0
        while prompts:
            kept += int(rng.binomial(prompts, share))
            prompts = policy.next_round(groups - waiting - kept, kept)
        rounds.append(policy.further)
        waiting = min(max(0, waiting + kept - groups), groups)
    return np.array(rounds)


def sampled_in_full(log: CompletionLog, count: int, seed: int) -> Floats:
    """(N,) how often each group is sampled in full after pilots of `count` completions, in `SHUFFLES` short runs.

    Which completions come first is drawn anew in each run. An audit counts by its probability, which is less noisy.
    """
    rng, found = seeded_draws(seed, 2), np.zeros(len(log))
    runs = SHUFFLES if len(log) < ENOUGH else 1
    for run in range(runs):
        rewards = rng.permuted(log.rewards, axis=1)
        policy = Policy(None, Pilots(count, log.size, len(log), seed))
        for step, groups in enumerate(generations_of(log, ROUNDS_OF)):
            choice = policy.choose(rewards[groups, :count], run, step)
            found[groups] += np.where(choice.committed, 1.0, AUDIT)
    return found / runs


def chosen_again(log: CompletionLog, earlier: Numbers, seed: int) -> Floats:
    """(n,) how often each prompt with an earlier group gets a place in epochs of prompt selection.

    Its evidence is always an epoch old. A step takes as large a share of the prompts as in the run.
    """
    count = len(earlier)
    order = PromptSelection(count, lambda epoch: seeded_draws(seed, 3, epoch + 1).permutation(count).tolist(), seed)
    policy = Policy(order, None)
    policy.begin_step(count)  # of the earlier groups: all prompts are new, and each has a place
    policy.learn(log.rewards[earlier[order.rows]])
    order.posterior.clock += count
    places = max(1, round(log.groups_per_generation * count / len(np.unique(log.prompts))))
    epochs = min(EPOCHS, -(-EPOCHS * ENOUGH // count))
    chosen = np.zeros(count)
    while order.drawn < (1 + epochs) * count:
        policy.begin_step(places)
        chosen += np.bincount(order.rows, minlength=count)
    return chosen


# The remedies


class Replays:
    """The remedies of a log with live groups, each a row of the table. Arguments are those of `what_if`."""

    def __init__(self, log: CompletionLog, seed: int, sampling_share: float):
        self.log, self.seed, self.sampling_share = log, seed, sampling_share
        self.prompts = Bootstrap(log.prompts, seed)
        self.live, self.variances = live_groups(log), group_variances(log)

    def remedies(self) -> list[Remedy]:
        """All that have a gain."""
        pilots = [self.pilots(count) for count in PILOTS if count < max(3, self.log.size)]
        of_update = self.lossless(), self.nonzero(), self.top_p()
        return [*of_update, self.dynamic_sampling(), *pilots, self.prompt_selection()]

    def relative_to_trl(
        self, trained: NDArray[Any], sampled: NDArray[Any] | float = 1.0, groups: Numbers | None = None
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Trained groups, sampled completions, reward variance of trained groups, and live groups, (1 + R,) each,
        relative to plain TRL, from how often each group is trained on and sampled, (n,).

        `groups` are their numbers, by default all of the log.
        """
        part = np.arange(len(self.log)) if groups is None else groups
        prompts = self.prompts if groups is None else Bootstrap(self.log.prompts[groups], self.seed)
        live, variances = self.live[part], self.variances[part]
        sums = prompts.sums(trained, sampled, live, trained * variances, variances, 1)
        return sums[0] / sums[5], sums[1] / sums[5], sums[3] / sums[4], sums[2] / sums[5]

    def gain(self, update: Floats, completions: Floats | float = 1.0, variance: Floats | float = 1.0) -> Estimate:
        """Reward variance over cost, from (1 + R,) values relative to plain TRL."""
        return Estimate.of(variance / (self.sampling_share * completions + (1 - self.sampling_share) * update))

    def lossless(self) -> Remedy:
        """TRL's own update for less: rows without advantage, padding and repeated prompts are not computed."""
        name, setting, log = "lossless", "snr_strategy='lossless'", self.log
        rows = kept_rows(log, self.seed, "lossless")
        if log.lengths is None:
            kept, of_trl = self.prompts.sums(rows.sum(axis=1), log.size)
            found = Estimate.of(kept / of_trl)
            said = f"{found:%} of TRL's rows have an advantage; padding and shared prompts need lengths"
            return Remedy(name, setting, said, self.gain(kept / of_trl), {"rows": found})
        positions = update_positions(log, rows)
        of_trl, *fewer = Bootstrap(np.arange(len(positions)), self.seed).sums(*positions.T)
        dead, padding, shared = (Estimate.of(one / of_trl) for one in fewer)
        said = (
            f"computes {shared:%} of TRL's update positions: {dead:.0%} without dead rows, {padding:.0%} without "
            f"their padding, {shared:.0%} with shared prompts. Old log-probs, where TRL computes them, are of "
            f"{dead:.0%} of its rows. Same training"
        )
        numbers = {"dead_rows": dead, "padding": padding, "shared_prompts": shared}
        return Remedy(name, setting, said, self.gain(fewer[-1] / of_trl), numbers)

    def nonzero(self) -> Remedy:
        """Training on live groups alone (DAPO): the mean of the loss is over fewer rows."""
        update, *_ = self.relative_to_trl(self.live)
        kept, factor = self.prompts.share(self.live), Estimate.of(1 / update)
        said = f"keeps {kept:%} of groups and all reward variance; the mean gradient grows by {factor}"
        numbers = {"kept": kept, "gradient": factor}
        return Remedy("nonzero", "snr_strategy='nonzero'", said, self.gain(update), numbers)

    def top_p(self) -> Remedy:
        """The paper's filter at 0.9, generation by generation as the trainer runs it."""
        mask = np.any(kept_rows(self.log, self.seed, "top_p"), axis=1)
        update, completions, variance, _ = self.relative_to_trl(mask)
        kept, held, factor = self.prompts.share(mask), Estimate.of(variance), Estimate.of(1 / update)
        said = f"keeps {kept:%} of groups and {held:%} of the reward variance; the mean gradient grows by {factor}"
        numbers = {"kept": kept, "kept_variance": held, "gradient": factor}
        return Remedy("top_p 0.9", "snr_strategy='top_p'", said, self.gain(update, completions, variance), numbers)

    def dynamic_sampling(self) -> Remedy:
        """Further prompts until every batch is full of live groups."""
        update, *_ = self.relative_to_trl(self.live)
        share, each = self.prompts.share(self.live), Estimate.of(self.log.size / update)
        mean, fewest, most = (
            refill_rounds(one, self.log.groups_per_generation, self.seed) if one > 0 else np.array([math.nan])
            for one in (share.value, share.high, share.low)  # fewer live groups, more rounds
        )
        rounds = Estimate(float(mean.mean()), float(fewest.mean()), float(most.mean()))
        limit = max(1, int(np.quantile(mean, 0.95)))
        said = f"{each} completions for each full group of {self.log.size}, {rounds} further rounds a batch (95% of "
        said += f"batches need at most {limit})"
        setting = f"snr_strategy='nonzero', snr_dynamic_sampling_rounds={limit}, snr_pilot_generations=0"
        return Remedy("dynamic sampling", setting, said, self.gain(update), {"completions": each, "rounds": rounds})

    def pilots(self, count: int) -> Remedy:
        """A few completions of each prompt first, the others where rewards may vary; trained as `nonzero`."""
        size = self.log.size
        if count >= size:
            why = f"the log cannot tell: groups of {size} leave no completion to save"
            return Remedy("pilots", "snr_pilot_generations=2", why, is_known=False)
        in_full = sampled_in_full(self.log, count, self.seed)
        update, completions, variance, live = self.relative_to_trl(
            in_full * self.live, (count + in_full * (size - count)) / size
        )
        each, missed = Estimate.of(size * completions / update), Estimate.of(1 - update / live)
        said = f"{each} completions for each full group of {size}; misses {missed:%} of live groups"
        setting = f"snr_strategy='nonzero', snr_pilot_generations={count}, snr_dynamic_sampling_rounds=1"
        gain = self.gain(update, completions, variance)
        return Remedy(f"pilots, G0 = {count}", setting, said, gain, {"completions": each, "missed": missed})

    def prompt_selection(self) -> Remedy:
        """Prompts chosen by their earlier groups, from the second epoch on: replayed on prompts logged again."""
        name, setting = "prompt selection", "snr_strategy='nonzero', snr_prompt_selection=True"
        earlier, later = repeated(self.log.prompts)
        number, why = len(np.unique(self.log.prompts[later])), ""
        if not self.log.knows_prompts:
            why = "the log does not say which groups have the same prompt"
        elif number < TWICE:
            why = f"the log cannot tell: it holds {counted(number, 'prompt')} more than once, of at least {TWICE}"
        elif not self.live[later].any():
            why = "no prompt that came again had rewards that vary"
        if why:
            return Remedy(name, setting, why, is_known=False)
        places = chosen_again(self.log, earlier, self.seed)
        update, completions, variance, live = self.relative_to_trl(places * self.live[later], places, later)
        then, before, more = (Estimate.of(one) for one in (update / completions, live, variance / completions))
        said = f"{then:%} of groups live in place of {before:.0%}, with {more} times the reward variance, from the "
        said += f"second epoch on; estimated from {number} prompts"
        numbers = {"live": then, "live_before": before, "variance": more}
        return Remedy(name, setting, said, self.gain(update, completions, variance), numbers)

    def score_by_one(self) -> Remedy:
        """Groups with varying reward sums in which one of the rewards does not vary."""
        name, log = "score by one reward", self.log
        if len(log.by_function) < 2:
            return Remedy(name, "snr_score_reward=…", "the log has one reward", is_known=False)
        said, numbers = [], {}
        for function, rewards in log.by_function.items():
            flat = self.live & zero_variance(torch.from_numpy(rewards)).numpy()
            alike, live = self.prompts.sums(flat, self.live)
            numbers[function] = Estimate.of(alike / live)
            said.append(f"{numbers[function]:%} of live groups are equal in {function}")
            if flat.any():
                text = log.beginnings[log.prompts[flat.argmax()]] if log.knows_prompts else ""
                said[-1] += f", as for {' '.join(text.split())[-40:]!r}"  # prompts mostly begin alike
        first = max(numbers, key=lambda function: numbers[function].value)
        return Remedy(name, f"snr_score_reward={first!r}", "; ".join(said), None, numbers)

    def other_sizes(self) -> dict[int, Remedy]:
        """Other groups for as many completions, by size: `size` completions of G / `size` times as many prompts."""
        larger = [self.log.size * 2**power for power in (1, 2, 3)]
        sizes = [larger[0], *(size for size in larger[1:] if size <= LARGEST), self.log.size // 2]
        found = {size: self.groups_of(size) for size in sizes if size >= 2}
        return {size: one for size, one in found.items() if one.is_known or size == larger[0]}

    def groups_of(self, size: int) -> Remedy:
        """Groups of another size: of subsets, of all completions of a prompt, or by the Beta distribution."""
        name, setting, how, log = f"groups of {size}", f"num_generations={size}", "", self.log
        if size < log.size:
            then, now, groups = self.prompts.sums(live_with(log.rewards, size), self.live, 1)
        elif (pooled := self.pooled(size)) is not None:
            then, now, groups = pooled
            how = "; from all completions of a prompt, as if the policy had stayed the same between its groups"
        elif log.size > 2 and self.sameness is not None:
            then, now, groups = self.sameness.live(size), self.sameness.live(log.size), np.ones(1)
        else:
            why = f"groups of {log.size} do not show how prompts differ, or equal rewards have more than {MOST_VALUES}"
            why += " values"
            return Remedy(name, setting, f"the log cannot tell: {why}", is_known=False)
        share, before, ratio = map(Estimate.of, (then / groups, now / groups, then / now * log.size / size))
        said = f"{share:%} of groups live in place of {before:.0%}; for equal completions {ratio} of today's live "
        said += f"groups, and the same reward variance{how}"
        return Remedy(name, setting, said, None, {"live": share, "live_groups": ratio})

    @functools.cached_property
    def sameness(self) -> Sameness | None:
        return Sameness.fit(self.log.rewards, self.prompts)

    def pooled(self, size: int) -> Floats | None:
        """(3, 1 + R) sums over the groups of prompts with at least `size` completions in all of their groups: the
        probability that `size` of these differ in reward, live groups, and groups.

        `None` if these are fewer than half of all groups, or if the groups of a prompt differ by more than chance, as
        when the policy learned between them.
        """
        log, units = self.log, self.prompts.units
        enough = (np.bincount(units, (~np.isnan(log.rewards)).sum(axis=1)) >= size)[units]
        if not log.knows_prompts or enough.mean() < 0.5 or len(np.unique(units[enough])) < TWICE:
            return None
        same, larger = (live_with(log.rewards, number, units)[units] * enough for number in (log.size, size))
        alike, differ, live, groups = self.prompts.sums(same, larger, self.live & enough, enough)
        drift = Estimate.of((alike - live) / groups)
        return None if drift.low > 0 or not live[0] else np.stack([differ, live, groups])


# What is wrong, and what to do


def find_faults(log: CompletionLog, sizes: Mapping[int, Remedy] | None = None) -> list[Finding]:
    """Problems that no remedy here solves, or that make the numbers doubtful.

    `sizes` is what is known of groups of another size, see `other_sizes`.
    """

    def add(name: str, said: str, *advice: str) -> None:
        faults.append(Finding("data", name, "warning", said, advice=advice))

    faults: list[Finding] = []
    rewards, missing = log.rewards, np.isnan(log.rewards)
    if missing.all():
        add("no_reward", "No completion has a reward.")
        return faults
    low, high = float(np.nanmin(rewards)), float(np.nanmax(rewards))
    if high - low <= SAME:
        add("one_reward", f"Every reward is {high:g}: the reward function tells nothing apart.")
    else:
        for end, word, what in ((high, "solved", "harder"), (low, "failed", "easier")):
            at_end = (missing | (np.abs(rewards - end) <= SAME)).all(axis=1) & ~missing.all(axis=1)
            if (share := float(at_end.mean())) >= MANY:
                cure = _cure(log, share, end, f"{what} prompts", sizes or {})
                add(f"all_{word}", f"{share:.0%} of groups are all {word} (every reward is {end:g}).", cure)
    if (clipped := _mean_logged(log, "completions/clipped_ratio")) >= CUT:
        add("cut", f"{clipped:.0%} of completions are cut at the length limit.", *ADVICE["cut"])
    spans = {name: np.nanmax(one) - np.nanmin(one) for name, one in log.by_function.items() if not np.isnan(one).all()}
    flat, vary = ([name for name, span in spans.items() if (span <= SAME) == is_flat] for is_flat in (True, False))
    if flat and vary:
        add("constant_reward", f"Only {', '.join(vary)} varies; {', '.join(flat)} is the same in every completion.")
    equal = equal_rewards(torch.from_numpy(rewards)).numpy()
    if rounded := int((~live_groups(log) & ~equal).sum()):
        only = f"Rewards differ by rounding alone in {counted(rounded, 'group')}"
        add("rounding", f"{only}: TRL trains on it, the filter does not.")
    noise = np.abs(np.nan_to_num(log.advantages if log.advantages is not None else np.zeros(rewards.shape))[equal])
    if noise.any():
        parts = [~zero_variance(torch.from_numpy(one)).numpy() for one in log.by_function.values()]
        mixed = len(parts) > 1 and np.any(parts, axis=0)[equal].any()  # sums that only these weights make equal
        why = "perhaps because of other weights: see --reward_weights" if mixed else "by TRL's rounding"
        noisy = counted(int(noise.any(axis=1).sum()), "group")
        add("noisy_advantages", f"Advantages are up to {noise.max():.1g} in {noisy} of equal rewards, {why}.")
    if missing.any():
        add("missing_rewards", f"No reward in {missing.sum()} of {rewards.size} completions.")
    return faults


def _cure(log: CompletionLog, share: float, end: float, prompts: str, sizes: Mapping[int, Remedy]) -> str:
    """What helps where a share of groups earns `end` throughout: larger groups, unless hardly any would be live."""
    known = {size: one.numbers["live"].value for size, one in sizes.items() if one.is_known and size > log.size}
    largest, most = max(known, default=0), max(LARGEST, 2 * log.size)
    if known and known[largest] >= MANY:
        return f"Larger groups (num_generations): groups of {largest} would be live in {known[largest]:.0%}."
    # Moments of a prompt's chance are log-convex: at least so many of the largest groups earn `end` throughout.
    single = float((np.abs(log.rewards - end) <= SAME).sum() / (~np.isnan(log.rewards)).sum())
    least = (share ** (most - 1) / single ** (most - log.size)) ** (1 / (log.size - 1))
    if largest == most or least >= MANY:
        return f"Take {prompts}."
    return f"Larger groups (num_generations) or {prompts}, the log cannot tell which."


def _advice(remedies: Sequence[Remedy]) -> str:
    if not remedies:
        return "No group's rewards vary, so that no remedy has anything to work with: see what is wrong."
    for one in remedies:
        if one.gain is not None and one.gain.low >= PAYS:
            return f"Begin with {one.name}: {one.gain} times the reward variance for the same cost. {one.setting}"
    return "No remedy here clearly buys more than it costs: stay with TRL, or take lossless, which only saves."


def _mean_logged(log: CompletionLog, key: str) -> float:
    """The mean of a number over the rows of the trainer's log, NaN where none has it."""
    values = [row[key] for row in log.history if is_number(row.get(key))]
    return float(np.mean(values)) if values else math.nan


def _notes(log: CompletionLog, live: Estimate, sampling_share: float) -> list[str]:
    mask, steps = live_groups(log), np.unique(log.steps)
    notes = []
    if 0 < mask.sum() < FEW:
        notes.append(f"Every gain here rests on {counted(int(mask.sum()), 'live group')}: log more steps.")
    of_prompts = f" from {counted(len(np.unique(log.prompts)), 'prompt')}" if log.knows_prompts else ""
    of_steps = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    groups = f"{counted(len(log), 'group')} of {log.size}{of_prompts}"
    notes += [f"Read {log.rewards.size} completions: {groups}, {of_steps}.", *log.notes]
    early = log.steps <= np.median(steps)
    drift = "one step shows no drift"
    if len(steps) > 1:
        drift = f"by halves of the steps {mask[early].mean():.0%} and {mask[~early].mean():.0%}"
    notes.append(f"Live groups: {live:%}; {drift}.")
    if log.unit and log.unit != "tokens":
        notes.append(f"Lengths are {log.unit}; --tokenizer counts tokens.")
    if log.lengths is not None and log.micro_batch is None:
        notes.append("The size of a micro-batch is not logged: a generation is taken as one; --micro_batch says it.")
    taken = f"Sampling is taken as {sampling_share:.0%} of a step's cost (--sampling_share), which TRL does not log."
    seconds = _mean_logged(log, "step_time")
    return [*notes, taken if math.isnan(seconds) else f"{taken} A step took {seconds:.3g} s."]
