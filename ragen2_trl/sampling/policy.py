"""All decisions on what a run samples: which prompts come next, which are worth their remaining completions once a few
of each are scored (*pilots*), and how many further ones a step takes. The same on every process, without torch or TRL.

GRESO (arXiv 2506.02177) skips prompts by the number of times in a row that their rewards did not vary; prompt
selection gives places to the largest reward variances drawn from each prompt's posterior (Thompson sampling).

Pilot-Commit (arXiv 2605.26606) and AERO (arXiv 2602.14338) continue where a pilot's rewards vary. Here a prompt is
worth its remaining completions if they buy at least as much expected reward variance as completions do on average,
pilots included.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np

from ragen2_trl.sampling.posterior import Floats, Mask, PosteriorState, RewardPosterior, Rows, evidence_of

Permutation = Callable[[int], Sequence[int]]
"""From the number of an epoch to the order of all rows in it."""

CANDIDATES = 4
"""Prompts sampled before that compete for each place: enough that the best of them are mostly worth it where few are,
and few enough that an epoch of the sampler still passes in a few epochs of training."""

EXPLORE = 0.1
"""Share of these places that goes to the candidates that were not sampled for longest, whatever their prediction."""

HALF_LIFE = 1.0
"""The evidence of a prompt counts half after this many times the dataset's number of prompts have been sampled."""

COMPARED = 256  # groups whose predictions are compared with their rewards
_OF_PROMPTS, _OF_PILOTS = 0xD4A3, 0xA0D1  # tell our draws from others of the same seed

AUDIT = 0.02
"""Fraction of rejected prompts sampled in full anyway, to estimate the variance that rejection misses. At 70 % dead
prompts these are 4 % of all completions."""

MEMORY = 256  # rounds after which the findings of an audit count 1/e
RECENT = 256  # prompts whose expected variances set the threshold


class OrderState(TypedDict):
    """State of a `PromptOrder` in a checkpoint."""

    num_rows: int
    drawn: int
    explored: NotRequired[float]  # this and what follows by prompt selection
    compared: NotRequired[list[list[float]]]
    posterior: NotRequired[PosteriorState]


class PromptOrder:
    """Rows of a dataset in the order of its sampler, epoch after epoch. Further prompts are the next ones in it.

    Args:
        num_rows: Of the dataset, M.
        permutation: The order of each epoch.
    """

    predicted: Floats | None = None  # (P,) reward variance that was expected of the prompts drawn last

    def __init__(self, num_rows: int, permutation: Permutation):
        self.num_rows, self.permutation = num_rows, permutation
        self.drawn = 0  # rows read from the order so far
        self._epoch = -1  # of the order that is held
        self._order: Sequence[int] = ()

    def begin_step(self) -> None:
        """A step begins: its prompts may be ones that earlier steps have drawn."""

    def draw(self, count: int) -> list[int]:
        """`count` more row numbers for the same step."""
        return self._read(count)

    def learn(self, rewards: Floats, pilots: int) -> None:
        """Take in the rewards of the prompts that were drawn last.

        Args:
            rewards: (P, G) over all processes, NaN where there is no finite one.
            pilots: completions of each group that were sampled regardless of its rewards; 0 for all.
        """

    def metrics(self) -> dict[str, float]:
        """Metrics of the prompts that were drawn last."""
        return {}

    def _read(self, count: int) -> list[int]:
        """The next row numbers of the order."""
        numbers = range(self.drawn, self.drawn + count)
        self.drawn += count
        return [self._of_epoch(number // self.num_rows)[number % self.num_rows] for number in numbers]

    def _of_epoch(self, epoch: int) -> Sequence[int]:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.permutation(epoch)
        return self._order

    def state(self) -> OrderState:
        """State for a checkpoint, the same on every process."""
        return {"num_rows": self.num_rows, "drawn": self.drawn}

    def load(self, state: OrderState | None) -> None:
        """Continue from a checkpoint; after a run in TRL's own order, from the beginning."""
        if state is not None:
            self.drawn = state["drawn"]


class PromptSelection(PromptOrder):
    """Rows of a dataset by the reward variance predicted for them.

    Candidates are read in the order of the sampler. A candidate that was never sampled takes a place at once; for each
    of the other places there are `CANDIDATES` candidates. A share `EXPLORE` of these places goes to candidates that
    were not sampled for longest, and the rest to the largest draws of reward variance. Candidates without a place come
    up again in the next epoch.

    Args:
        num_rows, permutation: As for `PromptOrder`.
        seed: Of the run.
    """

    def __init__(self, num_rows: int, permutation: Permutation, seed: int):
        super().__init__(num_rows, permutation)
        self.seed = seed
        self.posterior = RewardPosterior(num_rows, HALF_LIFE * num_rows)
        self.of_step: set[int] = set()  # row numbers drawn for the step
        self.explored = 0.0  # fraction of a place for exploration that is left to the next step
        self.compared: list[list[float]] = []  # predicted and realised variance of the latest groups

    def begin_step(self) -> None:
        self.of_step.clear()

    def draw(self, count: int) -> list[int]:
        """`count` more row numbers for the same step: new ones, as far as there are any."""
        candidates = self._candidates(count)
        waits = self.posterior.seen[candidates]
        unseen = waits < 0
        places = count - int(unseen.sum())
        self.explored += places * EXPLORE
        due = min(int(self.explored), places)
        self.explored -= int(self.explored)
        longest = np.argsort(np.where(unseen, np.iinfo(np.int64).max, waits), kind="stable")[:due]
        sure = unseen.copy()
        sure[longest] = True
        competing = np.flatnonzero(~sure)
        room = count - int(sure.sum())
        rng = np.random.default_rng([_OF_PROMPTS, self.seed, self.drawn])
        chosen = sure.copy()
        variances = self.posterior.sample(candidates[competing], rng)
        chosen[competing[np.argsort(-variances, kind="stable")[:room]]] = True
        self.rows: Rows = candidates[chosen]
        self.typical: Mask = sure[chosen]  # drawn for another reason than their own rewards
        self.predicted = self.posterior.mean(self.rows)
        self.skipped = len(candidates) - count
        self.of_step.update(self.rows.tolist())
        return [int(row) for row in self.rows]

    def _candidates(self, places: int) -> Rows:
        """New row numbers, each once: enough for all places, or the rest of the epoch where that fills them, too."""
        rows: dict[int, None] = {}
        spare: list[int] = []
        room, available = places * CANDIDATES, self.num_rows - len(self.of_step)
        while len(rows) + len(spare) < places or (
            room > 0 and len(rows) < available and self.drawn % self.num_rows != 0
        ):
            (row,) = self._read(1)
            if row not in rows and row not in self.of_step:
                rows[row] = None
                room -= CANDIDATES if self.posterior.seen[row] < 0 else 1
            elif len(rows) == available:  # more places than prompts
                spare.append(row)
        return np.array([*rows, *spare], dtype=np.int64)

    def learn(self, rewards: Floats, pilots: int) -> None:
        assert self.predicted is not None  # prompts were drawn
        self.posterior.observe(self.rows, rewards, self.typical, pilots or None)
        self.realised = evidence_of(rewards)[1]
        self.compared += np.stack([self.predicted, self.realised], axis=1).tolist()
        self.compared = self.compared[-COMPARED:]

    def metrics(self) -> dict[str, float]:
        """Metrics of the prompts that were drawn last, and of the latest predictions."""
        assert self.predicted is not None  # prompts were drawn
        posterior = self.posterior
        correlation = rank_correlation(*np.array(self.compared).T)
        return {
            "predicted_variance": float(self.predicted.mean()),
            "realised_variance": float(self.realised.mean()),
            **({} if math.isnan(correlation) else {"prediction_rank_correlation": correlation}),
            "skipped_prompts": float(self.skipped),
            "oldest_unseen": float(posterior.clock - max(0, int(posterior.seen.min()))),
        }

    def state(self) -> OrderState:
        return {
            **super().state(),
            "explored": self.explored,
            "compared": self.compared,
            "posterior": self.posterior.state(),
        }

    def load(self, state: OrderState | None) -> None:
        """Continue from a checkpoint; after a run without prompt selection, with nothing known.

        Raises:
            ValueError: if the checkpoint's dataset had another length: row numbers then mean other prompts.
        """
        super().load(state)
        if state is None or "posterior" not in state:
            return
        if state["num_rows"] != self.num_rows:
            raise ValueError(
                f"train_dataset has {self.num_rows} rows; the checkpoint's snr_prompt_selection knows "
                f"{state['num_rows']} by their number; allowed: the dataset of the checkpoint, or a new run."
            )
        self.explored, self.compared = state["explored"], list(state["compared"])
        self.posterior.load(state["posterior"])


def least_worth(expected: Floats, pilots: int, size: int) -> float:
    """Minimum expected variance for which sampling a prompt's remaining completions pays off: with this threshold,
    prompts like these yield most reward variance per completion.

    Args:
        expected: (n,) expected reward variances of prompts, given their pilots.
        pilots: completions of each, G0.
        size: of a group, G.

    >>> least_worth(np.array([0.2, 0.01, 0.01, 0.2]), pilots=3, size=16)
    0.2
    >>> least_worth(np.array([0.2, 0.16, 0.2, 0.2]), pilots=3, size=16)
    0.16
    """
    falling = np.sort(expected)[::-1]
    costs = len(falling) * pilots + np.arange(1, len(falling) + 1) * (size - pilots)
    return float(falling[(np.cumsum(falling) / costs).argmax()])


@dataclass(frozen=True)
class Choice:
    """The prompts of a round that are sampled in full.

    Args:
        in_full: (P,) bool.
        audited: (P,) bool, those of them that were not worth it, sampled to estimate what rejection misses.
    """

    in_full: Mask
    audited: Mask

    @property
    def committed(self) -> Mask:
        """(P,) bool, those that were worth it."""
        return self.in_full & ~self.audited


class PilotState(TypedDict):
    """State of `Pilots` in a checkpoint."""

    recent: list[float]
    held: list[float]
    posterior: PosteriorState


class Pilots:
    """Chooses prompts by the rewards of their pilots.

    Args:
        count: Completions of a pilot, G0.
        size: Of a group, G.
        groups: Most prompts sampled in full in a round, N: memory is that of TRL's batches.
        seed: Of the run.
        processes: Each of which samples as many prompts in full as every other.
    """

    def __init__(self, count: int, size: int, groups: int, seed: int, processes: int = 1):
        self.count, self.size, self.groups, self.seed, self.processes = count, size, groups, seed, processes
        self.posterior = RewardPosterior(0, 1.0)  # of all prompts together, where single ones are not known
        self.recent: list[float] = []  # expected variances
        self.held = np.zeros(3)  # audited groups, the variance that they stand for, and the variance of committed ones
        self.begin_step()

    def begin_step(self) -> None:
        self.sums = np.zeros(4)  # of the step: completions, places for them, committed prompts, prompts
        self.earned: list[float] = []  # rewards of pilots of the step

    def choose(
        self,
        rewards: Floats,
        key: tuple[int, ...],
        known: tuple[RewardPosterior, Rows] | None = None,
        fewest: int = 1,
    ) -> Choice:
        """The prompts that are worth their remaining completions, and audited ones, equally many on each process.

        Args:
            rewards: (P, G0) of pilots, process by process, NaN where there is none.
            key: tells this round's draws from others of the run.
            known: posterior of single prompts and (P,) their rows in it; `None` where prompts are not told apart.
            fewest: prompts of each process that are chosen in any case.
        """
        expected = self._expected(rewards, known)
        self.recent = [*self.recent, *expected.tolist()][-RECENT:]
        worth = expected >= least_worth(np.array(self.recent), self.count, self.size)
        rng = np.random.default_rng([_OF_PILOTS, self.seed, *key])
        audited = ~worth & (rng.random(len(expected)) < AUDIT)
        of_process = len(expected) // self.processes
        wanted = -(-int((worth | audited).sum()) // self.processes)
        number = min(max(fewest, wanted), self.groups // self.processes, of_process)
        # All processes generate equally often, so each continues with its own best prompts, after the audited ones.
        order = np.lexsort((-expected, ~audited))  # stable
        in_full = np.zeros(len(expected), dtype=bool)
        for process in range(self.processes):
            in_full[order[order // of_process == process][:number]] = True
        return Choice(in_full, audited & in_full)

    def _expected(self, rewards: Floats, known: tuple[RewardPosterior, Rows] | None) -> Floats:
        """(P,) expected reward variances of groups sampled in full."""
        further = self.size - self.count
        if known is not None:
            posterior, rows = known
            posterior.see(rewards)
            return posterior.group_variance(rewards, further, posterior.known(rows))
        self.posterior.see(rewards)
        self.posterior.learn_prior(rewards)
        return self.posterior.group_variance(rewards, further)

    def learn(self, rewards: Floats, choice: Choice) -> None:
        """Take in (P, G) rewards of a round, NaN for completions that were not sampled."""
        variances = evidence_of(rewards)[1]
        committed, in_full = choice.committed, int(choice.in_full.sum())
        found = [choice.audited.sum(), variances[choice.audited].sum() / AUDIT, variances[committed].sum()]
        self.held = self.held * (1 - 1 / MEMORY) + found
        completions = len(rewards) * self.count + in_full * (self.size - self.count)
        self.sums += [completions, rewards.size, committed.sum(), len(rewards)]
        of_pilots = rewards[:, : self.count]
        self.earned += of_pilots[~np.isnan(of_pilots)].tolist()

    def metrics(self) -> dict[str, float]:
        """Metrics of all rounds of a step; the missed variance is an estimate from the latest rounds."""
        completions, places, committed, prompts = self.sums.tolist()
        audited, missed, held = self.held.tolist()
        return {
            "sampled_completions": completions,
            "sampled_fraction": completions / places,
            "committed_fraction": committed / prompts,
            **({"pilot_reward": float(np.mean(self.earned))} if self.earned else {}),
            **({"missed_variance": missed / (missed + held)} if audited and missed + held else {}),
        }

    def state(self) -> PilotState:
        """State for a checkpoint, the same on every process."""
        return {"recent": self.recent, "held": self.held.tolist(), "posterior": self.posterior.state()}

    def load(self, state: PilotState) -> None:
        self.recent, self.held = list(state["recent"]), np.array(state["held"])
        self.posterior.load(state["posterior"])


class Policy:
    """Which prompts come next, which are sampled in full, and how many further ones a step takes.

    Args:
        order: Of the prompts; `None` where they come from outside.
        pilots: Of each prompt; `None` where all completions are sampled at once.
        rounds: Most further rounds of a step.
        most_prompts: Of a further round.
        processes: Each of which samples as many completions as every other.
        unit: Completions of a prompt that one process must sample together: 1 for whole prompts on each process.
    """

    def __init__(
        self,
        order: PromptOrder | None,
        pilots: Pilots | None,
        rounds: int = 0,
        most_prompts: int = 1,
        processes: int = 1,
        unit: int = 1,
    ):
        self.order, self.pilots = order, pilots
        self.rounds, self.most_prompts, self.processes, self.unit = rounds, most_prompts, processes, unit
        self.choice: Choice | None = None  # among the prompts of the latest round
        self.further = self.sampled = 0  # further rounds and prompts of the step
        # The reward variances that prompt selection expected of the prompts of the latest round, sampled in full.
        self.predicted: list[float] | None = None
        self._of_prompts: dict[str, float] = {}  # metrics of the step's first ones

    def begin_step(self, count: int) -> list[int] | None:
        """Row numbers of a step's first prompts; `None` where they come from outside."""
        self._of_prompts, self.further, self.sampled = {}, 0, count
        if self.pilots is not None:
            self.pilots.begin_step()
        if self.order is None:
            return None
        self.order.begin_step()
        return self._draw(self.order, count)

    def next_round(self, missing: int, kept: int) -> int:
        """Begin a further round (dynamic sampling: DAPO, arXiv 2503.14476).

        Args:
            missing: groups of the batch.
            kept: groups of all prompts of the step so far.

        Returns:
            Its number of prompts, 0 where the batch is full or no round is left.
        """
        if missing <= 0 or self.further >= self.rounds:
            return 0
        size = round_size(missing, kept, self.sampled, self.most_prompts, self.unit, self.processes)
        self.further, self.sampled = self.further + 1, self.sampled + size
        return size

    def next_prompts(self, rewards: Floats, count: int) -> list[int]:
        """Row numbers of further prompts for the same step, once the latest round is learned, see `learn`."""
        assert self.order is not None  # further prompts need the rows of a dataset
        self.learn(rewards)
        return self._draw(self.order, count)

    def _draw(self, order: PromptOrder, count: int) -> list[int]:
        numbers = order.draw(count)
        self.predicted = None if order.predicted is None else order.predicted.tolist()
        return numbers

    def choose(self, rewards: Floats, *key: int, fewest: int = 1) -> Choice:
        """The prompts of a round that are worth their remaining completions, see `Pilots.choose`."""
        assert self.pilots is not None  # who scores pilots has them
        known = (self.order.posterior, self.order.rows) if isinstance(self.order, PromptSelection) else None
        self.choice = choice = self.pilots.choose(rewards, key, known, fewest)
        if self.order is not None and self.order.predicted is not None:
            self.predicted = self.order.predicted[choice.in_full].tolist()
        return choice

    def learn(self, rewards: Floats) -> None:
        """Take in the rewards of the latest round: (P, G) over all processes, NaN for completions without one."""
        if self.order is not None:
            self.order.learn(rewards, 0 if self.pilots is None else self.pilots.count)
            self._of_prompts = self._of_prompts or self.order.metrics()
        if self.pilots is not None and self.choice is not None:
            self.pilots.learn(rewards, self.choice)

    def metrics(self) -> dict[str, float]:
        """Of the step: of its first prompts, and of the pilots of all rounds."""
        return self._of_prompts if self.pilots is None else self._of_prompts | self.pilots.metrics()

    @property
    def parts(self) -> dict[str, Any]:
        """By name what has a state for a checkpoint, the same on every process."""
        parts = {"prompts": self.order, "pilots": self.pilots}
        return {name: part for name, part in parts.items() if part is not None}


def round_size(missing: int, kept: int, sampled: int, most: int, unit: int, processes: int) -> int:
    """Number of prompts to sample so that the missing groups can be expected to be kept.

    Args:
        missing: groups.
        kept, sampled: groups and prompts of this step so far.
        most: prompts of a round.
        unit: completions of a prompt that one process must sample together: 1 for whole prompts on each process.
        processes: each gets as many as every other.

    >>> round_size(missing=3, kept=4, sampled=8, most=8, unit=4, processes=1)
    6
    >>> round_size(missing=3, kept=0, sampled=8, most=8, unit=4, processes=1)
    8
    """
    prompts = min(most, -(-missing * sampled // kept)) if kept else most
    while prompts * unit % processes:
        prompts += 1
    return prompts


def rank_correlation(first: Floats, second: Floats) -> float:
    """Spearman's, NaN where either has one value only. (n,) each.

    >>> round(rank_correlation(np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 2.0, 9.0])), 3)
    0.8
    """
    ranks = _ranks(first), _ranks(second)
    if any(len(np.unique(values)) < 2 for values in ranks):
        return math.nan
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: Floats) -> Floats:
    """(n,) ranks, equal values sharing the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]
