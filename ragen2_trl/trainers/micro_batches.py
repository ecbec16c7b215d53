"""The kept rows of a generation batch in as few micro-batches as they need, and what each of those weighs.

TRL makes the mean over equal micro-batches. Once rows are dropped, micro-batches are no longer equal: each gets the
weight that makes TRL's mean one over the kept rows. The weight stays here, beside the batch and not in it, and is
applied to the loss when everything a trainer or its subclasses do to it is done.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ragen2_trl.trainers.batches import Batch, join, loss_mask, padded_size, row_lengths, take, without_loss
from ragen2_trl.trainers.dealing import accumulation_segments, deal_rows
from ragen2_trl.trainers.processes import exchange_rows, gathering_uneven_rows

KEPT = "snr_kept"  # (rows,) bool in TRL's batch, which rows are kept: shuffled and split together with the rows
SHARED_TOKENS = "snr_shared_tokens"  # (rows,) tokens that TRL's mean over a micro-batch would divide each row by


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


def keep_rows(batch: Batch, kept: Tensor, accelerator: Accelerator) -> Batch:
    """The batch with `KEPT`, and normalised over the kept rows where TRL's loss divides by all tokens of a batch.

    TRL counts these before rewards are known. A call for all processes together.

    Args:
        batch: of this process.
        kept: (rows,) bool.
        accelerator: of the trainer.
    """
    batch = {**batch, KEPT: kept}
    if "num_items_in_batch" in batch:
        tokens = (loss_mask(batch).sum(dim=1) * kept).sum()
        batch["num_items_in_batch"] = accelerator.reduce(tokens, reduction="sum")
    return batch


class MicroBatches:
    """Cuts the kept rows of the current generation batch into micro-batches, and weighs these.

    Args:
        accelerator: Of the trainer.
        args: Its settings.
        num_iterations: How often TRL goes over a generation batch.
        loss_mean: What its loss is a mean over, asked when a batch is cut: `loss_type` may be set after `__init__`.
        pad_token_id: Of its tokenizer.
        pad_to_multiple_of: TRL's setting for padded widths.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args: Any,
        num_iterations: int,
        loss_mean: Callable[[], LossMean],
        pad_token_id: int,
        pad_to_multiple_of: int | None,
    ):
        self.accelerator = accelerator
        self.args = args
        self.num_iterations = num_iterations
        self.loss_mean = loss_mean
        self.pad_token_id = pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of
        self._forget()

    def _forget(self) -> None:
        self.steps: list[MicroStep] | None = None  # of each micro-batch; `None`: TRL's stand as they are
        self.segments: list[int] = []  # that the last pass was cut at
        self.dealt: list[MicroStep] = []  # how it was dealt
        self.generated: list[Batch] | None = None  # TRL's own micro-batches, as long as a pass over them is to come

    def begin_generation(self, micro_batches: list[Batch]) -> list[Batch]:
        """TRL's own micro-batches of a new generation batch, without what the filter has added to them.

        Raises:
            RuntimeError: where `KEPT` is missing.
        """
        self._forget()
        if any(KEPT not in batch for batch in micro_batches):
            raise RuntimeError(
                f"The generation batch has the keys {sorted(micro_batches[0])}; {KEPT!r}, which says what the filter "
                "drops, must be left in it: _generate_and_score_completions must call "
                "super()._generate_and_score_completions, which adds it."
            )
        rows = [
            sum(len(batch[KEPT]) for batch in micro_batches),
            sum(int(self._computed(batch).sum()) for batch in micro_batches),
        ]
        counts = self.accelerator.gather(torch.tensor(rows, device=self.accelerator.device)).tolist()
        # Rows of several rounds may be some with images and some without, which TRL's micro-batches do not tell apart.
        if len(set(counts)) > 1 or self.args.snr_dynamic_sampling_rounds > 0:
            self.generated = micro_batches
            return micro_batches
        # Every row of every process is computed, as many on each: TRL's own mean over TRL's own micro-batches.
        return [{key: value for key, value in batch.items() if key != KEPT} for batch in micro_batches]

    def begin_pass(
        self, micro_batches: list[Batch], left_to_step: int, has_rows: bool
    ) -> tuple[list[Batch], int, int]:
        """The micro-batches of one pass over the generation batch.

        Args:
            micro_batches: `steps_per_generation` of them, from `begin_generation` at first and then those of the last
                pass.
            left_to_step: micro-steps until the next optimizer step, the first of this pass included.
            has_rows: whether earlier micro-steps of that optimizer step had kept rows.

        Returns:
            As many micro-batches, the padded positions that will be computed, and those of TRL's own micro-batches,
            over all processes.
        """
        if self.generated is None:  # nothing was dropped
            self.steps = None
            plain = self._over_processes(sum(map(padded_size, micro_batches)))[0]
            return micro_batches, plain, plain
        generated = self.generated
        segments = accumulation_segments(len(generated), left_to_step, self.args.gradient_accumulation_steps)
        ends_step = segments[0] == left_to_step
        # A further pass mostly cuts as the last one did: its rows are where they belong.
        if segments != self.segments or self.args.is_lossless:
            self.segments = segments
            spare = self._spare_row(generated)
            if self.args.snr_mode == "mask":
                micro_batches, self.dealt = self._mask(generated, spare)
            else:
                micro_batches, self.dealt = self._deal(generated, segments, ends_step, spare)
        steps = list(self.dealt)
        if ends_step and has_rows and not any(step.runs for step in steps[:left_to_step]):
            # Earlier generation batches of this optimizer step had rows: let its last micro-step run, where gradients
            # synchronise and TRL closes the step's books.
            steps[left_to_step - 1] = MicroStep(weight=0.0, kept=0)
        self.steps = steps
        own = sum(padded_size(batch) for batch, step in zip(micro_batches, steps, strict=True) if step.runs)
        computed, plain = self._over_processes(own, sum(map(padded_size, generated)))
        return micro_batches, computed, plain

    def _over_processes(self, *counts: int) -> list[int]:
        """Sums of each. A call for all processes together."""
        own = torch.tensor(counts, device=self.accelerator.device)
        sums: list[int] = self.accelerator.reduce(own, reduction="sum").tolist()
        return sums

    def step(self, number: int) -> MicroStep:
        """What becomes of the micro-batch of this number."""
        return MicroStep() if self.steps is None else self.steps[number]

    def gathering(self) -> AbstractContextManager[None]:
        """Around the loss of a micro-batch, of which processes may have unequal numbers of rows."""
        several = self.steps is not None and self.accelerator.num_processes > 1
        return gathering_uneven_rows(self.accelerator) if several else nullcontext()

    def _deal(
        self, micro_batches: list[Batch], segments: list[int], ends_step: bool, spare: Batch
    ) -> tuple[list[Batch], list[MicroStep]]:
        """`drop`: the kept rows in as few micro-batches as they need; the others stay empty."""
        accelerator, process = self.accelerator, self.accelerator.process_index
        if self.args.is_lossless and self.loss_mean() is LossMean.TOKENS:
            micro_batches = [_with_shared_tokens(batch) for batch in micro_batches]
        of_segments = [micro_batches[start:stop] for start, stop in pairwise(accumulate(segments, initial=0))]
        computed = self._computed_of_segments(of_segments, ends_step)
        rows = join(micro_batches, self.pad_token_id)
        counted = int(rows.pop(KEPT).sum())
        kept = torch.cat(computed).nonzero().squeeze(1).tolist()
        all_lengths = row_lengths(rows).tolist()
        own_part = [all_lengths[row] for row in kept], [int(part.sum()) for part in computed], counted
        everyones = gather_object([own_part]) if accelerator.num_processes > 1 else [own_part]
        lengths, of_each_segment, counts = zip(*everyones, strict=True)
        deal = deal_rows(
            lengths,
            segments,
            self.args.per_device_train_batch_size,
            of_each_segment if self.args.is_lossless else None,  # the rows of TRL's optimizer steps stay theirs
        )
        # (process, number of its kept rows) -> row of `held`
        held, place = exchange_rows(rows, kept, deal, accelerator, self.pad_token_id, self.pad_to_multiple_of)

        cut, steps = [], []
        for shares in deal:
            own = [place[row] for row in shares[process]]
            num_kept = sum(map(len, shares))
            if own:
                # Positions as TRL has them: rotary embeddings round by them, in whatever precision a model is.
                batch = take(held, own, self.pad_to_multiple_of, keep_positions=self.args.is_lossless)
                if SHARED_TOKENS in batch:
                    weight, batch = 1.0, _divided_by_shared_tokens(batch)
                else:
                    weight = len(micro_batches) * accelerator.num_processes * len(own) / sum(counts)
                cut.append(self._with_weight(batch, weight))
                steps.append(MicroStep(weight, num_kept))
            else:  # where another process has rows, all must run the same number of forward passes
                cut.append(dict(spare))
                steps.append(MicroStep(0.0, num_kept) if num_kept else SKIPPED)
        return cut, steps

    def _computed(self, batch: Batch) -> Tensor:
        """Which rows go through the model: (rows,) bool. Without loss, of those kept the ones with an advantage."""
        kept: Tensor = batch[KEPT]
        if not self.args.is_lossless:
            return kept
        has_advantage: Tensor = (batch["advantages"].reshape(len(kept), -1) != 0).any(dim=1)
        return kept & has_advantage

    def _computed_of_segments(self, segments: list[list[Batch]], ends_step: bool) -> list[Tensor]:
        """`_computed` for each segment, (rows,) bool.

        Without loss, an optimizer step without any such row computes one of each process, whose gradient is zero: TRL
        takes that step, too, in which momentum and weight decay move the weights.

        Args:
            segments: micro-batches of this process.
            ends_step: whether an optimizer step ends with the first of them.
        """
        computed = [torch.cat([self._computed(batch) for batch in segment]) for segment in segments]
        if self.args.is_lossless:
            counts = self.accelerator.reduce(torch.stack([part.sum() for part in computed]), reduction="sum").tolist()
            for number, (segment, part, count) in enumerate(zip(segments, computed, counts, strict=True)):
                if count == 0 and (ends_step or number > 0):
                    part[torch.cat([batch[KEPT] for batch in segment]).nonzero()[:1]] = True
        return computed

    def _mask(self, micro_batches: list[Batch], spare: Batch) -> tuple[list[Batch], list[MicroStep]]:
        """`mask`: compute every row, count the kept ones only."""
        num_kept = torch.stack([batch[KEPT].sum() for batch in micro_batches])  # (steps_per_generation,)
        num_kept = self.accelerator.reduce(num_kept, reduction="sum").tolist()
        if not any(num_kept):
            return [dict(spare) for _ in micro_batches], [SKIPPED for _ in micro_batches]
        cut, steps = [], []
        for batch, num_rows in zip(micro_batches, num_kept, strict=True):
            kept = batch[KEPT]
            # A mean over the micro-batch's tokens is one over its kept rows; a mean over rows counts zeros, too.
            own = len(kept) if self.loss_mean() is LossMean.ROWS else int(kept.sum())
            weight = len(micro_batches) * self.accelerator.num_processes * own / sum(num_kept)
            cut.append(self._with_weight(_silenced(batch, ~kept), weight))
            steps.append(MicroStep(weight, num_rows))
        return cut, steps

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

    # What a checkpoint in the middle of a generation batch needs

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


def _with_shared_tokens(batch: Batch) -> Batch:
    """A micro-batch of TRL's with `SHARED_TOKENS`, so that its rows may go into others."""
    tokens = (loss_mask(batch).sum(dim=1) * batch[KEPT]).sum().clamp(min=1)
    return {**batch, SHARED_TOKENS: tokens.expand(len(batch[KEPT])).clone()}


def _divided_by_shared_tokens(batch: Batch) -> Batch:
    """A micro-batch whose mean over tokens divides each row by its `SHARED_TOKENS`, as losses follow advantages."""
    batch = dict(batch)
    advantages = batch["advantages"]
    scale = loss_mask(batch).sum().clamp(min=1).to(advantages) / batch.pop(SHARED_TOKENS)  # (rows,)
    batch["advantages"] = advantages * (scale if advantages.ndim == 1 else scale.unsqueeze(1))
    return batch


def _silenced(batch: Batch, rows: Tensor) -> Batch:
    """The batch with nothing of the given rows in its loss: no token that counts and, for losses that count by row,
    no advantage. (rows,) bool."""
    advantages = batch["advantages"]
    silent = rows if advantages.ndim == 1 else rows.unsqueeze(1)
    return {**without_loss(batch, rows), "advantages": advantages.masked_fill(silent, 0.0)}
