"""What a small generation batch is ranked against: the groups of recent ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

FEW_GROUPS = 8
"""From so many groups a generation batch is ranked by itself: the paper's batch."""

_LOTS = 0x107  # tells our permutations from others of the same seed


class RunningReference:
    """The latest groups of a run, this generation's included, of which a selection is made as if of one large batch.

    Scores alone decide, so that a group's fate does not depend on when in the run it came, but for two things. Of
    equal scores, those that a selection has no room for are drawn by lot: in order of age, they would always be the
    new ones. And a batch of eight never drops all that has signal, so where eight groups with signal were dropped in
    a row, the rewards have changed their scale, and all groups before these are forgotten.

    Args:
        size: most groups, W.
        seed: of the run.
        patience: groups with signal that are dropped in a row before those before them are forgotten: more than eight
            where a selection keeps few.
    """

    def __init__(self, size: int, seed: int, patience: float = FEW_GROUPS):
        self.size = size
        self.seed = seed
        self.patience = patience
        self.scores = torch.zeros(0, dtype=torch.float64)  # (n,) of the latest n <= W groups
        self.signal = torch.zeros(0, dtype=torch.bool)  # (n,) whether their rewards vary
        self.seen = 0  # groups in all
        self.since_kept = 0  # groups since the last generation of which one was kept

    def select(self, scores: Tensor, signal: Tensor, select: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Which groups of a generation are kept; they join the reference.

        Args:
            scores: (N,) float64.
            signal: (N,) bool.
            select: from scores and signal of groups to those kept, the earlier one of equal scores first.

        Returns:
            (N,) bool.
        """
        new = len(scores)
        self.scores = torch.cat([self.scores, scores])[-self.size :]
        self.signal = torch.cat([self.signal, signal])[-self.size :]
        self.seen += new
        state = np.random.SeedSequence([_LOTS, self.seed, self.seen]).generate_state(1)[0]
        order = torch.randperm(len(self.scores), generator=torch.Generator().manual_seed(int(state)))
        kept = torch.zeros(len(self.scores), dtype=torch.bool)
        kept[order] = select(self.scores[order], self.signal[order])
        self._forget(kept[-new:])
        return kept[-new:]

    def _forget(self, kept: Tensor) -> None:
        self.since_kept = 0 if kept.any() else self.since_kept + len(kept)
        if self.since_kept and self.signal[-self.since_kept :].sum() >= self.patience:
            self.scores, self.signal = self.scores[-self.since_kept :], self.signal[-self.since_kept :]

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs."""
        return {
            "scores": self.scores.tolist(),
            "signal": self.signal.tolist(),
            "seen": self.seen,
            "since_kept": self.since_kept,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.scores = torch.tensor(state["scores"], dtype=torch.float64)[-self.size :]
        self.signal = torch.tensor(state["signal"], dtype=torch.bool)[-self.size :]
        self.seen, self.since_kept = state["seen"], state["since_kept"]
