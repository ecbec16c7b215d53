"""Further prompts for a generation batch that kept too few groups: dynamic sampling (DAPO, arXiv 2503.14476)."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor

from ragen2_trl.trainers.batches import Batch, join, take
from ragen2_trl.trainers.micro_batches import keep_rows
from ragen2_trl.trainers.processes import forward_in_step, own_share

MAX_STALENESS = 1
"""Kept groups for which a batch had no room wait for the next one, unless the policy has been updated more often than
this since they were sampled: importance ratios hold them to one update, as TRL's own `steps_per_generation` does."""

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
        self._epoch = -1  # whose permutation is the current one

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


class KeptGroups:
    """Kept groups, numbered over all processes. Each process holds those of their rows that it sampled itself.

    Args:
        group_size: G.
        pad_token_id: of the tokenizer.
        pad_to_multiple_of: TRL's setting for padded widths.
    """

    def __init__(self, group_size: int, pad_token_id: int, pad_to_multiple_of: int | None):
        self.group_size = group_size
        self.pad_token_id = pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of
        self.count = 0  # over all processes
        self.rows: Batch | None = None  # this process's
        self.numbers: list[int] = []  # the group of each of them

    def add(self, batch: Batch, kept: Tensor, process: int) -> None:
        """The kept groups of a generation.

        Args:
            batch: what this process sampled.
            kept: (N,) bool, over all processes.
            process: the number of this one.
        """
        size = len(batch["prompt_ids"])
        groups = [(process * size + row) // self.group_size for row in range(size)]
        numbers = (kept.cumsum(0) - 1 + self.count).tolist()
        own = [row for row, group in enumerate(groups) if kept[group]]
        if own:
            taken = take(batch, own, self.pad_to_multiple_of)
            self.rows = taken if self.rows is None else join([self.rows, taken], self.pad_token_id)
            self.numbers += [numbers[groups[row]] for row in own]
        self.count += int(kept.sum())

    def part(self, start: int, stop: int) -> "KeptGroups":
        """The groups from number `start` to before `stop`."""
        part = KeptGroups(self.group_size, self.pad_token_id, self.pad_to_multiple_of)
        part.count = max(0, min(stop, self.count) - start)
        own = [row for row, number in enumerate(self.numbers) if start <= number < stop]
        if own:
            assert self.rows is not None
            part.rows = take(self.rows, own, self.pad_to_multiple_of)
            part.numbers = [self.numbers[row] - start for row in own]
        return part


class DynamicSampling:
    """Samples further prompts until as many groups are kept as the generation batch has; what is too much waits.

    Args:
        accelerator: Of the trainer.
        args: Its settings.
        updates_per_generation: Whole optimizer steps from one generation to the next.
        prompts: Rows of the training dataset.
        pad_token_id: Of its tokenizer.
        pad_to_multiple_of: TRL's setting for padded widths.
        log: Takes a metric's name and value.
        draw: Gives so many row numbers; default: a stream of its own.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args: Any,
        updates_per_generation: int,
        prompts: Sequence[dict[str, Any]],
        pad_token_id: int,
        pad_to_multiple_of: int | None,
        log: Callable[[str, float], None],
        draw: Callable[[int], list[int]] | None = None,
    ):
        self.accelerator = accelerator
        self.args = args
        self.prompts = prompts
        self.updates_per_generation = updates_per_generation
        self.pad_token_id = pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of
        self.log = log
        self.stream = PromptStream(len(prompts), args.seed)
        self.draw = draw or self.stream.draw
        self.waiting = self._no_groups()
        self.waiting_since = 0  # optimizer steps when they were sampled

    def fill(
        self,
        batch: Batch,
        kept: Tensor,
        step: int,
        sample: Callable[[list[dict[str, Any]], int], tuple[Batch, Tensor]],
        logps: Callable[[Batch], Tensor],
    ) -> Batch:
        """A batch of up to N kept groups, filled up with dropped rows where there are fewer.

        Args:
            batch: what this process sampled first.
            kept: (N,) bool, which of its groups are kept, over all processes.
            step: optimizer steps so far.
            sample: from this process's dataset rows and the number of the round, from 1, to its batch and the groups
                kept of all of them.
            logps: (rows, T) under the present policy.
        """
        limit, process = len(kept), self.accelerator.process_index
        pool, stale = self.waiting, 0
        if step - self.waiting_since > MAX_STALENESS:
            pool, stale = self._no_groups(), pool.count
        carried = pool.count
        first = with_logps_to_come(batch)
        pool.add(first, kept, process)
        rounds, sampled, found = 0, limit, int(kept.sum())
        while pool.count < limit and rounds < self.args.snr_dynamic_sampling_rounds:
            size = round_size(
                limit - pool.count, found, sampled, limit, pool.group_size, self.accelerator.num_processes
            )
            prompts = [self.prompts[row] for row in self.draw(size)]
            # One for each completion: TRL writes into them what a rollout function returns, environments what they do.
            rows = [copy.deepcopy(prompt) for prompt in prompts for _ in range(pool.group_size)]
            further, kept = sample(own_share(rows, self.accelerator), rounds + 1)
            pool.add(with_logps_to_come(further), kept, process)
            rounds, sampled, found = rounds + 1, sampled + size, found + int(kept.sum())

        used, self.waiting, self.waiting_since = pool.part(0, limit), pool.part(limit, 2 * limit), step
        surplus = max(0, pool.count - limit)
        if self.updates_per_generation > MAX_STALENESS:  # too old by then: not worth keeping
            self.waiting, stale, surplus = self._no_groups(), stale + surplus, 0
        self.waiting.rows = self._filled_in(self.waiting.rows, first, logps)  # now: their policy is about to change
        for name, value in (
            ("sampling_rounds", rounds),
            ("trained_groups", used.count),
            ("carried_groups", carried),
            ("waiting_groups", surplus),
            ("stale_groups", stale),
            ("prompts_used", sampled),
        ):
            self.log(name, float(value))
        return self._laid_out(used, first, carried > 0, logps)

    def _no_groups(self) -> KeptGroups:
        return KeptGroups(self.args.num_generations, self.pad_token_id, self.pad_to_multiple_of)

    def _laid_out(self, used: KeptGroups, batch: Batch, carried: bool, logps: Callable[[Batch], Tensor]) -> Batch:
        """This process's rows of the groups, filled up with rows of `batch` that count as dropped."""
        rows, steps = len(batch["prompt_ids"]), self.args.steps_per_generation
        own = len(used.numbers)
        size = max(rows, -(-own // steps) * steps)  # TRL cuts it into equal micro-batches
        parts = [] if used.rows is None else [send_to_device(used.rows, self.accelerator.device)]
        parts += [take(batch, list(range(size - own)), self.pad_to_multiple_of)] if size > own else []
        laid_out = take(join(parts, self.pad_token_id), list(range(size)), self.pad_to_multiple_of)
        if carried:  # an older policy's rows need ratios, so that all need the log-probs of their policies
            filled = self._filled_in(laid_out, batch, logps)
            assert filled is not None  # as a batch was given
            laid_out = filled
        elif has_logps_to_come(batch):
            del laid_out["old_per_token_logps"]
        return keep_rows(laid_out, torch.arange(size, device=self.accelerator.device) < own, self.accelerator)

    def _filled_in(self, batch: Batch | None, spare: Batch, logps: Callable[[Batch], Tensor]) -> Batch | None:
        """The batch with log-probs under the present policy for rows that have none. For all processes together."""
        if not has_logps_to_come(spare):
            return batch
        given: Any = None if batch is None else batch["old_per_token_logps"]
        missing = [] if given is None else given.isnan().any(dim=1).nonzero().squeeze(1).tolist()
        size = self.args.per_device_train_batch_size
        computed = forward_in_step(logps, batch, missing, take(spare, [0]), size, self.accelerator)
        if batch is None or not missing:
            return batch
        assert computed is not None  # of a batch
        filled = given.clone()
        filled[missing] = computed.to(given)
        return {**batch, "old_per_token_logps": filled}

    # What a checkpoint needs: the same on every process, and this process's own

    def shared_state(self) -> dict[str, Any]:
        return {"drawn": self.stream.drawn, "waiting_since": self.waiting_since, "waiting": self.waiting.count}

    def own_state(self) -> dict[str, Any]:
        return {"rows": self.waiting.rows, "numbers": self.waiting.numbers}

    def load(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Go on from a checkpoint; without `own`, in another layout, no group waits."""
        self.stream.drawn = shared["drawn"]
        if own is not None:
            self.waiting_since, self.waiting.count = shared["waiting_since"], shared["waiting"]
            self.waiting.rows, self.waiting.numbers = own["rows"], own["numbers"]


def with_logps_to_come(batch: Batch) -> Batch:
    """TRL leaves out `old_per_token_logps` where an update begins with the policy that sampled: NaN for now."""
    if "old_logps" in batch:  # RLOO's, which are always there
        return batch
    return {"old_per_token_logps": torch.full_like(batch["completion_ids"], torch.nan, dtype=torch.float), **batch}


def has_logps_to_come(batch: Batch) -> bool:
    """Whether `with_logps_to_come` has added them."""
    return "old_per_token_logps" in batch and bool(batch["old_per_token_logps"].isnan().all())


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
