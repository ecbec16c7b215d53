"""Further prompts for a generation batch that kept too few groups: dynamic sampling (DAPO, arXiv 2503.14476)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device

from ragen2_trl.trainers.batches import Batch, join, take

_STREAM = 0x5EED  # tells our permutations from TRL's, which come from the same seed


class PromptStream:
    """Row numbers of a dataset in an endless series of permutations, the same on every process.

    Args:
        num_rows: of the dataset.
        seed: of the run; the stream differs from that of TRL's sampler.
        drawn: rows drawn so far, all the state there is.
    """

    def __init__(self, num_rows: int, seed: int, drawn: int = 0):
        self.num_rows = num_rows
        self.seed = seed
        self.drawn = drawn
        self._epoch = -1  # whose permutation is at hand

    def draw(self, count: int) -> list[int]:
        """The next `count` row numbers."""
        rows = []
        for number in range(self.drawn, self.drawn + count):
            epoch, position = divmod(number, self.num_rows)
            rows.append(self._permutation(epoch)[position])
        self.drawn += count
        return rows

    def _permutation(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            seed = np.random.SeedSequence([_STREAM, self.seed, epoch]).generate_state(1)[0]
            generator = torch.Generator().manual_seed(int(seed))
            self._epoch, self._order = epoch, torch.randperm(self.num_rows, generator=generator).tolist()
        return self._order


@dataclass
class Pool:
    """Kept groups of several rounds, over all processes and in the same order on each of them.

    Args:
        group_size: G.
        pad_token_id: of the tokenizer.
        pad_to_multiple_of: TRL's setting for padded widths.
        batches: kept rows of each round on the CPU, group by group.
    """

    group_size: int
    pad_token_id: int
    pad_to_multiple_of: int | None
    batches: list[Batch]

    @property
    def num_groups(self) -> int:
        return sum(len(batch["prompt_ids"]) for batch in self.batches) // self.group_size

    def add(self, batch: Batch, rows: list[int]) -> None:
        """The given rows of this process's batch, and those of all others. A call for all processes together."""
        own = [send_to_device(take(batch, rows, self.pad_to_multiple_of), "cpu")] if rows else []
        if everyones := gather_object(own):
            self.batches.append(join(everyones, self.pad_token_id))

    def split(self, num_groups: int) -> tuple[Batch | None, Batch | None]:
        """The first `num_groups` groups, and up to as many of those that are left; `None` for nothing."""
        if not self.batches:
            return None, None
        pooled, multiple = join(self.batches, self.pad_token_id), self.pad_to_multiple_of
        size, rows = num_groups * self.group_size, list(range(len(pooled["prompt_ids"])))
        used, left = rows[:size], rows[size : 2 * size]
        return take(pooled, used, multiple) if used else None, take(pooled, left, multiple) if left else None


def round_size(need: int, kept: int, sampled: int, limit: int, group_size: int, num_processes: int) -> int:
    """How many groups to sample so that `need` of them may be expected to be kept.

    Args:
        need: groups that are missing.
        kept, sampled: groups of this step so far.
        limit: most groups of a round, N.
        group_size: G.
        num_processes: each gets as many completions as every other.

    >>> round_size(need=3, kept=4, sampled=8, limit=8, group_size=4, num_processes=1)
    6
    >>> round_size(need=3, kept=0, sampled=8, limit=8, group_size=4, num_processes=1)
    8
    """
    groups = min(limit, -(-need * sampled // kept)) if kept else limit
    while groups * group_size % num_processes:
        groups += 1
    return groups


def own_share(rows: Any, accelerator: Accelerator) -> Any:
    """This process's part of a list or tensor of rows that are laid out over all of them."""
    size = len(rows) // accelerator.num_processes
    return rows[accelerator.process_index * size :][:size]
