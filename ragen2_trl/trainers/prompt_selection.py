"""Prompt selection: sample the prompts whose rewards can be expected to vary, before anything is paid for.

GRESO (arXiv 2506.02177) skips prompts by the number of times in a row that their rewards did not vary; here, places go
to the largest reward variances drawn from each prompt's posterior (Thompson sampling).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch import Tensor

from ragen2_trl.sampling.posterior import Floats, RewardPosterior, Rows, evidence_of
from ragen2_trl.trainers.prompt_source import DatasetOrder, OrderState, Row

CANDIDATES = 4
"""Prompts sampled before that compete for each place: enough that the best of them are mostly worth it where few are,
and few enough that an epoch of the sampler still passes in a few epochs of training."""

EXPLORE = 0.1
"""Share of these places that goes to the candidates that were not sampled for longest, whatever their prediction."""

HALF_LIFE = 1.0
"""The evidence of a prompt counts half after this many times the dataset's number of prompts have been sampled."""

COMPARED = 256  # groups whose predictions are compared with their rewards
_DRAW = 0xD4A3  # tells our draws from others of the same seed


class PromptSelection(DatasetOrder):
    """Draws rows of a dataset by the reward variance predicted for them.

    Candidates are read in the order of TRL's sampler. A candidate that was never sampled takes a place at once; for
    each of the other places there are `CANDIDATES` candidates. A share `EXPLORE` of these places goes to candidates
    that were not sampled for longest, and the rest to the largest draws of reward variance. Candidates without a
    place come up again in the next epoch.

    Args:
        accelerator, args, rows, shuffle: As for `DatasetOrder`.
    """

    def __init__(self, accelerator: Accelerator, args: Any, rows: Sequence[Row], shuffle: bool):
        super().__init__(accelerator, args, rows, shuffle)
        self.posterior = RewardPosterior(len(rows), HALF_LIFE * len(rows))
        self.of_step: set[int] = set()  # row numbers drawn for the step
        self.explored = 0.0  # fraction of a place for exploration that is left to the next step
        self.compared: list[list[float]] = []  # predicted and realised variance of the latest groups

    def draw_first(self, count: int) -> list[int]:
        """`count` row numbers to begin a step with, in the order of the stream."""
        self.of_step.clear()
        return self.draw(count)

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
        others = np.flatnonzero(~sure)
        room = count - int(sure.sum())
        rng = np.random.default_rng([_DRAW, self.args.seed, self.stream.drawn])
        chosen = sure.copy()
        drawn = self.posterior.sample(candidates[others], rng)
        chosen[others[np.argsort(-drawn, kind="stable")[:room]]] = True
        self.drawn = candidates[chosen]
        self.typical = sure[chosen]  # drawn for another reason than their own rewards
        self.predicted = self.posterior.mean(self.drawn)
        self.skipped = len(candidates) - count
        self.of_step.update(self.drawn.tolist())
        return [int(row) for row in self.drawn]

    def _candidates(self, places: int) -> Rows:
        """New row numbers, each once: enough for all places, or the rest of the epoch where that fills them, too."""
        rows: dict[int, None] = {}
        spare: list[int] = []
        room, others = places * CANDIDATES, len(self.rows) - len(self.of_step)
        while len(rows) + len(spare) < places or (
            room > 0 and len(rows) < others and not self.stream.at_start_of_epoch
        ):
            (row,) = self.stream.draw(1)
            if row not in rows and row not in self.of_step:
                rows[row] = None
                room -= CANDIDATES if self.posterior.seen[row] < 0 else 1
            elif len(rows) == others:  # more places than prompts
                spare.append(row)
        return np.array([*rows, *spare], dtype=np.int64)

    def learn(self, rewards: Tensor, first: int | None = None) -> list[float]:
        """Take in the rewards of the prompts that were drawn last.

        Args:
            rewards: (P, G) over all processes, NaN where there is no finite one.
            first: number of completions of each group that were sampled regardless of its rewards; default: all.

        Returns:
            (P,) the reward variance that was predicted for each.
        """
        earned = rewards.cpu().double().numpy()
        self.posterior.observe(self.drawn, earned, self.typical, first)
        self.realised = evidence_of(earned)[1]
        self.compared += [list(pair) for pair in zip(self.predicted.tolist(), self.realised.tolist(), strict=True)]
        self.compared = self.compared[-COMPARED:]
        expected: list[float] = self.predicted.tolist()
        return expected

    def metrics(self) -> dict[str, float]:
        """Metrics of the prompts that were drawn last, and of the latest predictions."""
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
        known: Any = {"explored": self.explored, "compared": self.compared, "posterior": self.posterior.state()}
        return {**super().state(), **known}

    def load(self, state: OrderState | None) -> None:
        """Continue from a checkpoint; after a run without prompt selection, with nothing known.

        Raises:
            ValueError: if the checkpoint's dataset had another length: row numbers then mean other prompts.
        """
        super().load(state)
        if state is None or "posterior" not in state:
            return
        if state["num_rows"] != len(self.rows):
            raise ValueError(
                f"train_dataset has {len(self.rows)} rows; the checkpoint's snr_prompt_selection knows "
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
