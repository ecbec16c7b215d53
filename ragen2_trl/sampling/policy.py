"""All decisions on what a run samples, in the order of a step. The same on every process, without torch or TRL."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ragen2_trl.sampling.pilots import Choice, Pilots
from ragen2_trl.sampling.posterior import Floats, Mask
from ragen2_trl.sampling.prompts import PromptOrder, PromptSelection


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

    def begin_step(self, count: int) -> list[int] | None:
        """Row numbers of a step's first prompts; `None` where they come from outside."""
        if self.pilots is not None:
            self.pilots.begin_step()
        if self.order is None:
            return None
        self.order.begin_step()
        return self.order.draw(count)

    def next_prompts(self, count: int) -> list[int]:
        """Row numbers of further prompts for the same step."""
        if self.order is None:
            raise NotImplementedError("further prompts need the rows of a dataset")
        return self.order.draw(count)

    def choose(self, rewards: Floats, *key: int, fewest: int = 1) -> Choice:
        """The prompts of a round that are worth their remaining completions, see `Pilots.choose`."""
        assert self.pilots is not None  # who scores pilots has them
        known = rows = None
        if isinstance(self.order, PromptSelection):
            known, rows = self.order.posterior, self.order.rows
        self.choice = self.pilots.choose(rewards, key, known, rows, fewest)
        return self.choice

    def learn(self, rewards: Floats) -> None:
        """Take in the rewards of the latest round: (P, G) over all processes, NaN for completions without one."""
        if self.order is not None:
            self.order.learn(rewards, 0 if self.pilots is None else self.pilots.count)
        if self.pilots is not None and self.choice is not None:
            self.pilots.learn(rewards, self.choice)

    @property
    def in_full(self) -> Mask | slice:
        """The prompts of the latest round whose completions were all sampled."""
        return slice(None) if self.choice is None else self.choice.in_full

    @property
    def predicted(self) -> list[float] | None:
        """The reward variances that prompt selection expected of these prompts."""
        of_all = None if self.order is None else self.order.predicted
        return None if of_all is None else np.asarray(of_all[self.in_full]).tolist()

    def fill(self, missing: int, kept: int, sampled: int, sample: Callable[[int], int]) -> tuple[int, int]:
        """Sample further prompts until a batch has its groups, or no round is left (DAPO, arXiv 2503.14476).

        Args:
            missing: groups of the batch.
            kept, sampled: groups and prompts of the step so far.
            sample: from a number of prompts to the number of their groups that are kept.

        Returns:
            The number of rounds, and of prompts sampled in the step.
        """
        rounds = 0
        while missing > 0 and rounds < self.rounds:
            rounds += 1
            size = round_size(missing, kept, sampled, self.most_prompts, self.unit, self.processes)
            found = sample(size)
            missing, kept, sampled = missing - found, kept + found, sampled + size
        return rounds, sampled

    def metrics_of_prompts(self) -> dict[str, float]:
        """Of the latest round."""
        return {} if self.order is None else self.order.metrics()

    def metrics_of_pilots(self) -> dict[str, float]:
        """Of all rounds of the step."""
        return {} if self.pilots is None else self.pilots.metrics()

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
