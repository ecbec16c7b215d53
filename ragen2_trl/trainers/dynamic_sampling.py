"""Further prompts for a generation batch that kept too few groups: dynamic sampling (DAPO, arXiv 2503.14476)."""

from typing import Any, TypedDict

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor

from ragen2_trl.trainers.batches import Batch, join, take
from ragen2_trl.trainers.processes import forward_in_step
from ragen2_trl.trainers.selection import Selection

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

    def fill(self, batch: Batch, rounds: list[Selection]) -> tuple[Batch, Tensor, dict[str, float]]:
        """A batch of up to N kept groups, with spare rows where there are fewer.

        Args:
            batch: the first rows that this process sampled.
            rounds: the selection of these, with pilots perhaps of fewer than N groups; further rounds are added.

        Returns:
            The batch, (rows,) bool for its rows that are trained on, and metrics.
        """
        trainer, limit, pool, stale = self.trainer, self.groups, self.waiting, 0
        sampler, step = trainer._sampler, trainer.state.global_step
        if step - self.waiting_since > MAX_STALENESS:
            pool, stale = KeptGroups(self.padding), pool.count
        carried = pool.count
        first = with_logps_to_come(batch)
        found = pool.add(first, rounds[0].kept, self.accelerator)

        def add_round(count: int) -> int:
            batch, _ = trainer._take_round(sampler.further(count))
            return pool.add(with_logps_to_come(batch), rounds[-1].kept, self.accelerator)

        number, sampled = sampler.policy.fill(limit - pool.count, found, limit, add_round)
        used, self.waiting, self.waiting_since = pool.part(0, limit), pool.part(limit, 2 * limit), step
        surplus = max(0, pool.count - limit)
        micro_steps = self.args.steps_per_generation * trainer.num_iterations
        if micro_steps // self.args.gradient_accumulation_steps > MAX_STALENESS:  # updates: too old by the next time
            self.waiting, stale, surplus = KeptGroups(self.padding), stale + surplus, 0
        self.waiting.rows = self._filled_in(self.waiting.rows, first)  # now: their policy is about to change
        metrics = {
            "sampling_rounds": float(number),
            "trained_groups": float(used.count),
            "carried_groups": float(carried),
            "waiting_groups": float(surplus),
            "stale_groups": float(stale),
            "prompts_used": float(sampled),
        }
        return *self._laid_out(used, first, carried > 0), metrics

    def _laid_out(self, used: KeptGroups, batch: Batch, carried: bool) -> tuple[Batch, Tensor]:
        """This process's rows of the groups, filled up with rows of `batch` that are not trained on."""
        spare, steps = len(batch["prompt_ids"]), self.args.steps_per_generation
        own = len(used.numbers)
        # TRL cuts it into equal micro-batches.
        size = steps * max(self.args.per_device_train_batch_size, -(-own // steps))
        parts = [] if used.rows is None else [send_to_device(used.rows, self.accelerator.device)]
        if size > own:
            parts.append(take(batch, [row % spare for row in range(size - own)], self.padding[1]))
        laid_out = take(join(parts, self.padding[0]), list(range(size)), self.padding[1])
        if carried:  # rows of an older policy need ratios, so that all rows need the log-probs of their policies
            filled = self._filled_in(laid_out, batch)
            assert filled is not None  # as a batch was given
            laid_out = filled
        elif has_logps_to_come(batch):
            del laid_out["old_per_token_logps"]
        return laid_out, torch.arange(size, device=self.accelerator.device) < own

    def _filled_in(self, batch: Batch | None, spare: Batch) -> Batch | None:
        """The batch with log-probs under the present policy for rows without any. A call for all processes."""
        if not has_logps_to_come(spare):
            return batch
        rows = [] if batch is None else batch["old_per_token_logps"].isnan().any(dim=1).nonzero().squeeze(1).tolist()
        size, logps = self.args.per_device_train_batch_size, self.trainer._log_probs.now
        computed = forward_in_step(logps, batch, rows, take(spare, [0]), size, self.accelerator)
        if batch is None or not rows:
            return batch
        assert computed is not None  # of a batch
        filled = batch["old_per_token_logps"].clone()
        filled[rows] = computed[rows].to(filled)
        return {**batch, "old_per_token_logps": filled}

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
