"""Which prompts come next: in the order of the dataset's sampler, or by the reward variance expected of them.

GRESO (arXiv 2506.02177) skips prompts by the number of times in a row that their rewards did not vary; prompt
selection gives places to the largest reward variances drawn from each prompt's posterior (Thompson sampling).
"""

import math
from collections.abc import Callable, Sequence
from typing import NotRequired, TypedDict

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
_DRAW = 0xD4A3  # tells our draws from others of the same seed


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
        rng = np.random.default_rng([_DRAW, self.seed, self.drawn])
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
