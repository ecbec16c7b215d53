"""The kept rows of a generation batch in as few micro-batches as they need, and what each of those weighs.

TRL makes the mean over equal micro-batches. Once rows are dropped, micro-batches are no longer equal: each gets the
weight that makes TRL's mean one over the kept rows. The weight stays here, beside the batch and not in it, and is
applied to the loss when everything a trainer or its subclasses do to it is done.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from enum import Enum
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ragen2_trl.trainers.batches import Batch, join, padded_size, row_lengths, take, without_loss
from ragen2_trl.trainers.dealing import accumulation_segments, deal_rows
from ragen2_trl.trainers.processes import exchange_rows, gathering_uneven_rows

KEPT = "snr_kept"  # (rows,) bool in TRL's batch, where rows were dropped: shuffled and split together with the rows


class LossMean(Enum):
    """What a trainer's loss is a mean over, before micro-batches are averaged."""

    TOKENS_OF_GENERATION = "tokens of the generation batch"
    TOKENS = "tokens of the micro-batch"
    ROWS = "rows of the micro-batch"


@dataclass(frozen=True)
class MicroStep:
    """What becomes of one micro-batch.

    Args:
        weight: What its loss is multiplied by: its share of the kept rows, times what plain TRL would make of that
            share. 1 where every micro-batch of every process is equally full, 0 where this process has no row of its
            own and runs a spare one to keep step with the others.
        kept: Kept rows in it, over all processes.
        runs: Whether there is a forward and a backward pass at all.
    """

    weight: float = 1.0
    kept: int = 1
    runs: bool = True


SKIPPED = MicroStep(weight=0.0, kept=0, runs=False)


class Packing:
    """The micro-batches of the generation batch at hand.

    Args:
        accelerator: Of the trainer.
        args: Its settings.
        num_iterations: How often TRL goes over a generation batch.
        loss_mean: What its loss is a mean over.
        pad_token_id: Of its tokenizer.
        pad_to_multiple_of: TRL's setting for padded widths.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args: Any,
        num_iterations: int,
        loss_mean: LossMean,
        pad_token_id: int,
        pad_to_multiple_of: int | None,
    ):
        self.accelerator = accelerator
        self.args = args
        self.num_iterations = num_iterations
        self.loss_mean = loss_mean
        self.pad_token_id = pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of
        self.at_hand: MicroStep | None = None  # of the micro-batch that is about to be computed
        self.forget()

    def forget(self) -> None:
        """A new generation batch begins."""
        self.drops = False  # whether some of its rows are not kept
        self.steps: list[MicroStep] | None = None  # of each micro-batch; `None`: TRL's stand as they are
        self.segments: list[int] = []  # that the last pass was cut at
        self.dealt: list[MicroStep] = []  # how it was dealt
        self.generated: list[Batch] | None = None  # TRL's own micro-batches, if a further pass will need them

    def begin_pass(
        self, micro_batches: list[Batch], left_in_window: int, window_has_rows: bool
    ) -> tuple[list[Batch], float]:
        """The micro-batches of one pass over a generation batch.

        Args:
            micro_batches: `steps_per_generation` of them, TRL's at first and then those of the last pass.
            left_in_window: micro-steps until the next optimizer step, the first of this pass included.
            window_has_rows: whether earlier micro-steps of that optimizer step had kept rows.

        Returns:
            As many micro-batches, and the share of TRL's padded positions that will be computed.
        """
        if KEPT in micro_batches[0]:  # fresh from TRL; packed micro-batches no longer carry it
            self.generated = micro_batches
        elif self.drops and self.generated is None:
            raise RuntimeError(
                f"The generation batch has the keys {sorted(micro_batches[0])}; {KEPT!r}, which says what the filter "
                "drops, must be left in it."
            )
        if self.generated is None:  # nothing was dropped
            self.steps = None
            return micro_batches, 1.0
        generated = self.generated
        segments = accumulation_segments(len(generated), left_in_window, self.args.gradient_accumulation_steps)
        if segments != self.segments:  # a further pass mostly cuts as the last one did: its rows are where they belong
            self.segments = segments
            spare = self._spare_row(generated)
            pack = self._mask if self.args.snr_mode == "mask" else self._deal
            micro_batches, self.dealt = pack(generated, segments, spare)
        if self.num_iterations == 1:
            self.generated = None
        steps = list(self.dealt)
        ends_window = segments[0] == left_in_window
        if ends_window and window_has_rows and not any(step.runs for step in steps[:left_in_window]):
            # Earlier generation batches of this optimizer step had rows: let its last micro-step run, where gradients
            # synchronise and TRL closes the step's books.
            steps[left_in_window - 1] = MicroStep(weight=0.0, kept=0)
        self.steps = steps
        own = sum(padded_size(batch) for batch, step in zip(micro_batches, steps, strict=True) if step.runs)
        sizes = torch.tensor([own, sum(map(padded_size, generated))], device=self.accelerator.device)
        computed, sampled = self.accelerator.reduce(sizes, reduction="sum").tolist()
        return micro_batches, computed / sampled

    def take_up(self, number: int) -> MicroStep:
        """The micro-step of this number is next."""
        self.at_hand = MicroStep() if self.steps is None else self.steps[number]
        return self.at_hand

    def gathering(self) -> AbstractContextManager[None]:
        """Around the loss of the micro-step at hand, of which processes may have unequal numbers of rows."""
        several = self.steps is not None and self.accelerator.num_processes > 1
        return gathering_uneven_rows(self.accelerator) if several else nullcontext()

    def weighted(self, loss: Tensor) -> Tensor:
        """The loss of the micro-step at hand, as its share of the kept rows and the settings make it."""
        assert self.at_hand is not None
        weight = self.at_hand.weight * self.args.loss_factor
        return loss if weight == 1.0 else loss * weight

    def _deal(
        self, micro_batches: list[Batch], segments: list[int], spare: Batch
    ) -> tuple[list[Batch], list[MicroStep]]:
        """`drop`: the kept rows in as few micro-batches as they need; the others stay empty."""
        accelerator, process = self.accelerator, self.accelerator.process_index
        rows = join(micro_batches, self.pad_token_id)
        kept = rows.pop(KEPT).nonzero().squeeze(1).tolist()
        all_lengths = row_lengths(rows).tolist()
        lengths = [all_lengths[row] for row in kept]
        everyones = gather_object([lengths]) if accelerator.num_processes > 1 else [lengths]
        deal = deal_rows(everyones, segments, self.args.per_device_train_batch_size)
        total = sum(map(len, everyones))
        # (process, number of its kept rows) -> row of `held`
        held, place = exchange_rows(rows, kept, deal, accelerator, self.pad_token_id, self.pad_to_multiple_of)

        packed, steps = [], []
        for shares in deal:
            own = [place[row] for row in shares[process]]
            num_kept = sum(map(len, shares))
            if own:
                weight = len(micro_batches) * accelerator.num_processes * len(own) / total
                packed.append(self._with_weight(take(held, own, self.pad_to_multiple_of), weight))
                steps.append(MicroStep(weight, num_kept))
            else:  # where another process has rows, all must run the same number of forward passes
                packed.append(dict(spare))
                steps.append(MicroStep(0.0, num_kept) if num_kept else SKIPPED)
        return packed, steps

    def _mask(
        self, micro_batches: list[Batch], segments: list[int], spare: Batch
    ) -> tuple[list[Batch], list[MicroStep]]:
        """`mask`: compute every row, count the kept ones only."""
        num_kept = torch.stack([batch[KEPT].sum() for batch in micro_batches])  # (steps_per_generation,)
        num_kept = self.accelerator.reduce(num_kept, reduction="sum").tolist()
        if not any(num_kept):
            return [dict(spare) for _ in micro_batches], [SKIPPED for _ in micro_batches]
        packed, steps = [], []
        for batch, num_rows in zip(micro_batches, num_kept, strict=True):
            kept = batch[KEPT]
            # A mean over the micro-batch's tokens is one over its kept rows; a mean over rows counts zeros, too.
            own = len(kept) if self.loss_mean is LossMean.ROWS else int(kept.sum())
            weight = len(micro_batches) * self.accelerator.num_processes * own / sum(num_kept)
            packed.append(self._with_weight(_silenced(batch, ~kept), weight))
            steps.append(MicroStep(weight, num_rows))
        return packed, steps

    def _spare_row(self, micro_batches: list[Batch]) -> Batch:
        """A micro-batch of one row without any token in the loss, where no rows are left."""
        row = take(join(micro_batches[:1], self.pad_token_id), [0])
        return self._with_weight(_silenced(row, torch.ones_like(row[KEPT])), 0.0)

    def _with_weight(self, batch: Batch, weight: float) -> Batch:
        """Undo in the divisor of a loss over the generation batch's tokens what the weight will do to it.

        Such losses, TRL's or a subclass's own whatever the `loss_type`, need no weight, but the entropy bonus and the
        load-balancing loss beside them do.
        """
        batch = {key: value for key, value in batch.items() if key != KEPT}
        if "num_items_in_batch" in batch and weight > 0:
            batch["num_items_in_batch"] = batch["num_items_in_batch"] * weight
        return batch

    # State for a checkpoint amid a generation batch

    def state(self) -> dict[str, Any]:
        def plain(steps: list[MicroStep]) -> list[tuple[Any, ...]]:
            return [astuple(step) for step in steps]

        return {
            "steps": None if self.steps is None else plain(self.steps),
            "dealt": plain(self.dealt),
            "segments": self.segments,
            "generated": self.generated,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.steps = None if state["steps"] is None else [MicroStep(*step) for step in state["steps"]]
        self.dealt = [MicroStep(*step) for step in state["dealt"]]
        self.segments, self.generated = state["segments"], state["generated"]


def _silenced(batch: Batch, rows: Tensor) -> Batch:
    """The batch with nothing of the given rows in its loss: no token that counts and, for losses that count by row,
    no advantage. (rows,) bool."""
    advantages = batch["advantages"]
    silent = rows if advantages.ndim == 1 else rows.unsqueeze(1)
    return {**without_loss(batch, rows), "advantages": advantages.masked_fill(silent, 0.0)}
