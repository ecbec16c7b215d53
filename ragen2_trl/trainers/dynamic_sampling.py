"""Further prompts for a generation batch that kept too few groups: dynamic sampling (DAPO, arXiv 2503.14476)."""

from typing import Any, TypedDict

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor

from ragen2_trl.trainers.batches import Batch, join, take

MAX_STALENESS = 1
"""Surplus groups are carried over to the next batch unless the policy has been updated more often than this since they
were sampled: importance ratios hold them to one update, as TRL's own `steps_per_generation` does."""


class KeptGroups:
    """Kept completions by group, numbered over all processes. Each process holds the rows that it sampled itself.

    Args:
        padding: token of padding, and TRL's setting for padded widths.
    """

    def __init__(self, padding: tuple[int, int | None]):
        self.padding = padding
        self.count = 0  # groups over all processes
        self.rows: Batch | None = None  # of this process
        self.numbers: list[int] = []  # the group of each row

    def add(self, batch: Batch, kept: Tensor, accelerator: Accelerator) -> int:
        """Add the kept completions of a generation. Returns the number of groups that have any.

        Args:
            batch: the rows that this process sampled.
            kept: (N, G) bool, over all processes.
            accelerator: of the trainer.
        """
        groups = kept.any(dim=1)
        numbers = (groups.cumsum(0) - 1 + self.count).unsqueeze(1).expand(kept.shape)
        processes, me = accelerator.num_processes, accelerator.process_index
        own_kept, own_numbers = (values.flatten().chunk(processes)[me].tolist() for values in (kept, numbers))
        own = [row for row, is_kept in enumerate(own_kept) if is_kept]
        if own:
            taken = take(batch, own, self.padding[1])
            self.rows = taken if self.rows is None else join([self.rows, taken], self.padding[0])
            self.numbers += [own_numbers[row] for row in own]
        found = int(groups.sum())
        self.count += found
        return found

    def part(self, start: int, stop: int) -> "KeptGroups":
        """The groups from number `start` to before `stop`."""
        part = KeptGroups(self.padding)
        part.count = max(0, min(stop, self.count) - start)
        own = [row for row, number in enumerate(self.numbers) if start <= number < stop]
        if own:
            assert self.rows is not None
            part.rows = take(self.rows, own, self.padding[1])
            part.numbers = [self.numbers[row] - start for row in own]
        return part


class WaitingState(TypedDict):
    """State of `DynamicSampling` in a checkpoint: the groups that wait, with this process's rows of them."""

    since: int
    count: int
    rows: Batch | None
    numbers: list[int]


class DynamicSampling:
    """Samples further prompts until as many groups are kept as the generation batch has; surplus groups are carried
    over to the next batch.

    Args:
        trainer: One of ours.
    """

    def __init__(self, trainer: Any):
        self.trainer, self.accelerator, self.args = trainer, trainer.accelerator, trainer.args
        self.padding, self.groups = trainer._plan.padding, trainer.args.groups_per_generation
        self.waiting = KeptGroups(self.padding)
        self.waiting_since = 0  # optimizer steps when they were sampled

    def begin(self, batch: Batch, kept: Tensor) -> None:
        """A step begins with the groups that wait and with its first ones, with pilots perhaps fewer than N.

        Args:
            batch: the rows that this process sampled.
            kept: (n, G) bool, over all processes.
        """
        self.stale, self.kept = 0, 0
        if self.trainer.state.global_step - self.waiting_since > MAX_STALENESS:
            self.waiting, self.stale = KeptGroups(self.padding), self.waiting.count
        self.carried = self.waiting.count
        self.add(batch, kept)

    def add(self, batch: Batch, kept: Tensor) -> None:
        """A further round is sampled; arguments as for `begin`."""
        self.kept += self.waiting.add(with_logps_to_come(batch), kept, self.accelerator)

    @property
    def missing(self) -> int:
        """Groups that the batch still needs; 0 or less once it is full."""
        missing: int = self.groups - self.waiting.count
        return missing

    def filled(self, first: Batch) -> tuple[Batch, Tensor, dict[str, float]]:
        """A batch of up to N kept groups, with spare rows where there are fewer. A call for all processes together.

        Args:
            first: the batch of `begin`.

        Returns:
            The batch, (rows,) bool for its rows that are trained on, and metrics.
        """
        pool, limit, first, trainer = self.waiting, self.groups, with_logps_to_come(first), self.trainer
        used, self.waiting = pool.part(0, limit), pool.part(limit, 2 * limit)
        self.waiting_since = trainer.state.global_step
        surplus = max(0, pool.count - limit)
        micro_steps = self.args.steps_per_generation * trainer.num_iterations
        if micro_steps // self.args.gradient_accumulation_steps > MAX_STALENESS:  # updates: too old by the next time
            self.waiting, self.stale, surplus = KeptGroups(self.padding), self.stale + surplus, 0
        batch, own = self._laid_out(used, first)
        if has_logps_to_come(first):
            fill = trainer._log_probs.filled_in
            self.waiting.rows = fill(self.waiting.rows, first)  # now: their policy is about to change
            if self.carried:  # rows of an older policy need ratios, so that all rows need the log-probs of theirs
                batch = fill(batch, first)
            else:
                del batch["old_per_token_logps"]
        metrics = {
            "sampling_rounds": float(trainer._sampler.policy.further),
            "trained_groups": float(used.count),
            "carried_groups": float(self.carried),
            "waiting_groups": float(surplus),
            "stale_groups": float(self.stale),
            "prompts_used": float(trainer._sampler.policy.sampled),
        }
        return batch, own, metrics

    def _laid_out(self, used: KeptGroups, batch: Batch) -> tuple[Batch, Tensor]:
        """This process's rows of the groups, filled up with rows of `batch` that are not trained on."""
        spare, steps = len(batch["prompt_ids"]), self.args.steps_per_generation
        own = len(used.numbers)
        # TRL cuts it into equal micro-batches.
        size = steps * max(self.args.per_device_train_batch_size, -(-own // steps))
        parts = [] if used.rows is None else [send_to_device(used.rows, self.accelerator.device)]
        if size > own:
            parts.append(take(batch, [row % spare for row in range(size - own)], self.padding[1]))
        laid_out = take(join(parts, self.padding[0]), list(range(size)), self.padding[1])
        return laid_out, torch.arange(size, device=self.accelerator.device) < own

    def state(self) -> WaitingState:
        """State for a checkpoint, of this process."""
        waiting = self.waiting
        return {"since": self.waiting_since, "count": waiting.count, "rows": waiting.rows, "numbers": waiting.numbers}

    def load(self, state: WaitingState) -> None:
        self.waiting_since, self.waiting.count = state["since"], state["count"]
        self.waiting.rows, self.waiting.numbers = state["rows"], state["numbers"]


def with_logps_to_come(batch: Batch) -> Batch:
    """The batch with NaN for `old_per_token_logps` where TRL leaves them out, since the policy has not changed yet."""
    if "old_logps" in batch:  # RLOO's, which are always there
        return batch
    return {"old_per_token_logps": torch.full_like(batch["completion_ids"], torch.nan, dtype=torch.float), **batch}


def has_logps_to_come(batch: Batch) -> bool:
    """Whether `with_logps_to_come` has added the log-probs."""
    return "old_per_token_logps" in batch and bool(batch["old_per_token_logps"].isnan().all())
