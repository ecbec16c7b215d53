"""The source of a run's prompts: TRL's order, further prompts of dynamic sampling, prompt selection.

A source answers the same two questions for all of them: which prompts a step begins with (`begin_step`), and which
come next in the same step (`further`). Order, seeds, shares of processes and checkpoint state live here once.
"""

import copy
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

import torch
from accelerate import Accelerator
from torch import Tensor

from ragen2_trl.sampling.posterior import PosteriorState
from ragen2_trl.trainers.processes import own_share

Row = dict[str, Any]


class OrderState(TypedDict):
    """State of a `DatasetOrder` in a checkpoint."""

    num_rows: int
    drawn: int
    explored: NotRequired[float]  # this and what follows by prompt selection
    compared: NotRequired[list[list[float]]]
    posterior: NotRequired[PosteriorState]


class TRLOrder:
    """Prompts as TRL's data loader brings them, also from datasets without rows. There are no further ones."""

    def begin_step(self, inputs: list[Row]) -> None:
        """Leave this process's rows as they are."""

    def further(self, count: int) -> list[Row]:
        raise NotImplementedError("further prompts need the rows of a dataset")

    def learn(self, rewards: Tensor, first: int | None = None) -> list[float] | None:
        return None

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> Any:
        return None

    def load(self, state: Any) -> None:
        """Nothing to load."""


class DatasetOrder(TRLOrder):
    """Prompts by their row in the dataset, in the order of TRL's sampler. Further prompts are the next ones in it.

    TRL's data loader reads ahead and cannot know how many prompts a step needs, so its rows are replaced once they
    have arrived. Everything here is the same on every process.

    Args:
        accelerator: Of the trainer.
        args: Its settings.
        rows: The training dataset, M rows.
        shuffle: Whether TRL's sampler shuffles.
    """

    def __init__(self, accelerator: Accelerator, args: Any, rows: Sequence[Row], shuffle: bool):
        self.accelerator = accelerator
        self.args = args
        self.rows = rows
        self.stream = SamplerStream(len(rows), args.seed, shuffle)

    def begin_step(self, inputs: list[Row]) -> None:
        """Replace this process's rows by the rows of the step's first prompts, in place."""
        prompts = len(inputs) * self.accelerator.num_processes // self.args.num_generations
        inputs[:] = self._own_rows(self.draw_first(prompts))

    def further(self, count: int) -> list[Row]:
        """This process's rows of `count` more prompts for the same step, in number over all processes."""
        return self._own_rows(self.draw(count))

    def draw_first(self, count: int) -> list[int]:
        """`count` row numbers to begin a step with."""
        return self.draw(count)

    def draw(self, count: int) -> list[int]:
        """`count` more row numbers for the same step."""
        return self.stream.draw(count)

    def _own_rows(self, numbers: list[int]) -> list[Row]:
        """This process's rows, G for each prompt: the same object until they are sampled (`separate`)."""
        own = own_share([row for row in numbers for _ in range(self.args.num_generations)], self.accelerator)
        prompts = {row: self.rows[row] for row in dict.fromkeys(own)}
        return [prompts[row] for row in own]

    def state(self) -> OrderState:
        """State for a checkpoint, the same on every process."""
        return {"num_rows": len(self.rows), "drawn": self.stream.drawn}

    def load(self, state: OrderState | None) -> None:
        """Continue from a checkpoint; after a run in TRL's own order, from the beginning."""
        if state is not None:
            self.stream.drawn = state["drawn"]


class SamplerStream:
    """Row numbers in the order of TRL's sampler, epoch after epoch.

    Args:
        num_rows: of the dataset.
        seed: of the run.
        shuffle: whether each epoch has a permutation of its own.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool):
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self.drawn = 0  # rows so far: all the state there is
        self._epoch = -1  # of the current permutation
        self._order: list[int] = []

    @property
    def at_start_of_epoch(self) -> bool:
        return self.drawn % self.num_rows == 0

    def draw(self, count: int) -> list[int]:
        """The next `count` row numbers."""
        numbers = range(self.drawn, self.drawn + count)
        self.drawn += count
        return [self._permutation(number // self.num_rows)[number % self.num_rows] for number in numbers]

    def _permutation(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed)
            order = torch.arange(self.num_rows)
            for _ in range(epoch + 1 if self.shuffle else 0):
                order = torch.randperm(self.num_rows, generator=generator)
            self._epoch, self._order = epoch, order.tolist()
        return self._order


def separate(rows: list[Row]) -> list[Row]:
    """The rows with an object of its own for each completion: an episode may write into its row.

    >>> row = {"prompt": "a", "state": [1]}
    >>> first, second = separate([row, row])
    >>> first is row, second is row, second == row
    (True, False, True)
    """
    seen: set[int] = set()
    separated = []
    for row in rows:
        separated.append(copy.deepcopy(row) if id(row) in seen else row)
        seen.add(id(row))
    return separated
