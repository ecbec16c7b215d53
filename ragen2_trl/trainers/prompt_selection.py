"""Which prompts are sampled: those whose rewards may be expected to vary, before anything is paid for.

The rows of TRL's sampler are replaced once they have arrived: its data loader reads ahead and could not know of the
latest rewards. GRESO (arXiv 2506.02177) skips prompts by the number of times in a row that their rewards did not vary;
here, places go to the largest of reward variances drawn from what is known of each prompt (Thompson sampling).
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from ragen2_trl.trainers.dynamic_sampling import PromptStream
from ragen2_trl.trainers.posterior import Floats, RewardPosterior, Rows, evidence_of
from ragen2_trl.trainers.processes import own_share

CANDIDATES = 4
"""Prompts sampled before that compete for each place: enough that the best of them are mostly worth it where few are,
and few enough that an epoch of the sampler still passes in a few epochs of training."""

EXPLORE = 0.1
"""Share of these places that goes to the candidates not sampled for longest, whatever is expected of them."""

HALF_LIFE = 1.0
"""What a prompt has shown counts half once so many times the dataset's number of prompts have been sampled."""

COMPARED = 256  # groups that predictions are compared with
_DRAW = 0xD4A3  # tells our draws from others of the same seed


class SamplerStream(PromptStream):
    """Row numbers in the order of TRL's sampler, epoch after epoch.

    Args:
        num_rows: of the dataset.
        seed: of the run.
        shuffle: whether each epoch has a permutation of its own.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool):
        super().__init__(num_rows, seed)
        self.shuffle = shuffle

    @property
    def at_start_of_epoch(self) -> bool:
        return self.drawn % self.num_rows == 0

    def _permutation(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed)
            order = torch.arange(self.num_rows)
            for _ in range(epoch + 1 if self.shuffle else 0):
                order = torch.randperm(self.num_rows, generator=generator)
            self._epoch, self._order = epoch, order.tolist()
        return self._order


class SamplerOrder:
    """Prompts as TRL's sampler brings them: nothing is chosen, nothing learnt."""

    draw_further = None

    def replace(self, inputs: list[dict[str, Any]]) -> None:
        pass

    def learn(self, rewards: Tensor) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> None:
        pass

    def load(self, state: Any) -> None:
        pass


class PromptSelection:
    """Draws rows of a dataset by the reward variance to be expected of them.

    Candidates are read from the order of TRL's sampler. One that was never sampled takes a place at once; for each of
    the other places there are `CANDIDATES` of them. Of these, a share of `EXPLORE` goes to those not sampled
    for longest, and the rest to the largest draws of their reward variance. What has no place comes up again in the
    next epoch.

    Everything here is the same on every process.

    Args:
        accelerator: Of the trainer.
        args: Its settings.
        prompts: Rows of the training dataset, M.
        shuffle: Whether TRL's sampler does.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args: Any,
        prompts: Sequence[dict[str, Any]],
        shuffle: bool,
    ):
        self.accelerator = accelerator
        self.args = args
        self.prompts = prompts
        self.stream = SamplerStream(len(prompts), args.seed, shuffle)
        self.posterior = RewardPosterior(len(prompts), HALF_LIFE * len(prompts))
        self.of_step: set[int] = set()  # rows that have been drawn for the step
        self.explored = 0.0  # of a place for prompts not sampled for longest, what is left to the next step
        self.compared: list[list[float]] = []  # predicted and realised variance of the latest groups

    def replace(self, inputs: list[dict[str, Any]]) -> None:
        """Put this process's rows of the prompts that are drawn in place of those that TRL's sampler has brought."""
        size = self.args.num_generations
        rows = self.draw(len(inputs) * self.accelerator.num_processes // size)
        own = own_share([row for row in rows for _ in range(size)], self.accelerator)
        prompts = {row: self.prompts[row] for row in dict.fromkeys(own)}
        # In place, for a subclass that looks at them again; copies, as what plays an episode writes into its row.
        inputs[:] = [copy.deepcopy(prompts[row]) for row in own]

    def draw(self, count: int) -> list[int]:
        """`count` row numbers to begin a step with, in the order in which the stream had them."""
        self.of_step.clear()
        return self.draw_further(count)

    def draw_further(self, count: int) -> list[int]:
        """`count` more for the same step: others, as far as there are."""
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
        self.rows = candidates[chosen]
        self.typical = sure[chosen]  # not sampled for what their own rewards were
        self.predicted = self.posterior.mean(self.rows)
        self.skipped = len(candidates) - count
        self.of_step.update(self.rows.tolist())
        return [int(row) for row in self.rows]

    def _candidates(self, places: int) -> Rows:
        """Row numbers, each once and none that the step has drawn: enough for all places, or what is left of the epoch
        where that fills them, too."""
        rows: dict[int, None] = {}
        spare: list[int] = []
        room, others = places * CANDIDATES, len(self.prompts) - len(self.of_step)
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

    def learn(self, rewards: Tensor) -> list[float]:
        """Take in what the prompts that were drawn last have earned.

        Args:
            rewards: (N, G) over all processes, NaN where there is no finite one.

        Returns:
            (N,) the reward variance that was expected of each.
        """
        earned = rewards.cpu().double().numpy()
        self.posterior.observe(self.rows, earned, self.typical)
        self.realised = evidence_of(earned)[1]
        self.compared += [list(pair) for pair in zip(self.predicted.tolist(), self.realised.tolist(), strict=True)]
        self.compared = self.compared[-COMPARED:]
        expected: list[float] = self.predicted.tolist()
        return expected

    def metrics(self) -> dict[str, float]:
        """Of the prompts that were drawn last, and how well predictions have done of late."""
        posterior = self.posterior
        correlation = rank_correlation(*np.array(self.compared).T)
        return {
            "predicted_variance": float(self.predicted.mean()),
            "realised_variance": float(self.realised.mean()),
            **({} if math.isnan(correlation) else {"prediction_rank_correlation": correlation}),
            "skipped_prompts": float(self.skipped),
            "oldest_unseen": float(posterior.clock - max(0, int(posterior.seen.min()))),
        }

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, the same on every process."""
        known = {"explored": self.explored, "compared": self.compared, "posterior": self.posterior.state()}
        return {"num_rows": len(self.prompts), "drawn": self.stream.drawn, **known}

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint; from that of a run which did not choose, with nothing known.

        Raises:
            ValueError: if it is of a dataset of another length, whose rows have other numbers.
        """
        if state is None:
            return
        if state["num_rows"] != len(self.prompts):
            raise ValueError(
                f"train_dataset has {len(self.prompts)} rows; the checkpoint's snr_prompt_selection knows "
                f"{state['num_rows']} by their number; allowed: the dataset of the checkpoint, or a run of its own."
            )
        self.stream.drawn, self.explored, self.compared = state["drawn"], state["explored"], list(state["compared"])
        self.posterior.load(state["posterior"])


def selection_of(trainer: Any) -> PromptSelection | SamplerOrder:
    """What chooses a trainer's prompts."""
    if not trainer.args.snr_prompt_selection:
        return SamplerOrder()
    rows = trainer._remove_unused_columns(trainer.train_dataset, description="training")
    return PromptSelection(trainer.accelerator, trainer.args, rows, trainer.shuffle_dataset)


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
