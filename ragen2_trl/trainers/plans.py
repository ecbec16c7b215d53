"""A plan turns the kept rows of a generation batch into micro-batches with weights, pass by pass over it.

TRL makes the mean over equal micro-batches. A plan deals rows of similar length to as few micro-batches as they need,
trims their padding, and gives each the weight that makes TRL's mean come out right. `DropPlan` makes it the mean over
the kept rows, `LosslessPlan` TRL's own mean over all rows, of which it computes those with an advantage. Weights stay
here, beside the batch and not in it: they are applied to the loss after everything a trainer or its subclasses do to
it.
"""

from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple, TypedDict

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ragen2_trl.rotary import length_dependent
from ragen2_trl.trainers.batches import (
    Batch,
    join,
    loss_mask,
    padded_size,
    prompts_of,
    row_lengths,
    take,
    without_loss,
)
from ragen2_trl.trainers.dealing import Sharing, deal_rows
from ragen2_trl.trainers.processes import exchange_rows, gathering_uneven_rows
from ragen2_trl.trainers.trl_contract import overridden

KEPT = "snr_kept"  # (rows,) bool in TRL's batch, rows in the mean: shuffled and split together with the rows
SHARED_TOKENS = "snr_shared_tokens"  # (rows,) tokens by which TRL's mean over a micro-batch would divide each row


class LossMean(Enum):
    """The mean that a trainer's loss is, before micro-batches are averaged."""

    TOKENS_OF_GENERATION = "over tokens of the generation batch"
    TOKENS = "over tokens of the micro-batch"
    ROWS = "over rows of the micro-batch"


class MicroStep(NamedTuple):
    """The plan for one micro-batch.

    Args:
        weight: Factor of its loss: its share of the rows in the mean, times plain TRL's factor for that share. 1 where
            every micro-batch of every process is equally full, 0 where this process has no row of its own and runs a
            spare one to keep step with the others.
        kept: Kept rows in it, over all processes.
        runs: Whether there is a forward and a backward pass at all.
    """

    weight: float = 1.0
    kept: int = 1
    runs: bool = True


SKIPPED = MicroStep(weight=0.0, kept=0, runs=False)


class PlanState(TypedDict):
    """State of a plan in a checkpoint, micro-steps by the fields of `MicroStep`."""

    steps: list[tuple[float, int, bool]] | None
    dealt: list[tuple[float, int, bool]]
    segments: list[int]
    generated: list[Batch] | None


class DropPlan:
    """The mean is over the kept rows, and only these are computed.

    Args:
        trainer: One of ours.
    """

    cuts_every_pass = False  # whether a further pass over the same rows is dealt again
    keeps_positions = False  # whether tokens keep TRL's absolute positions
    keeps_steps = False  # whether each row stays in TRL's optimizer step

    def __init__(self, trainer: Any):
        self.trainer, self.accelerator = trainer, trainer.accelerator
        self.padding = trainer._tokenizer.pad_token_id, trainer.pad_to_multiple_of
        # Whether a micro-batch with shared prompts takes more rows than TRL's: somebody's loss may be over padding.
        self.fills_by_positions = not {"compute_loss", "_compute_loss"} & overridden(type(trainer))
        # The padded width of longer rows decides on their embeddings.
        scaled = length_dependent(trainer.model.config.get_text_config())
        self.longest_trimmed = inf if scaled is None else scaled[0] - 1
        # What `take` is told of the padding of a micro-batch.
        self.trimming: dict[str, Any] = {
            "keep_positions": self.keeps_positions,
            "longest_trimmed": self.longest_trimmed,
        }
        self._ahead = (0, 0)  # positions computed before the next pass, and those of plain TRL
        self._forget()

    def _forget(self) -> None:
        self.steps: list[MicroStep] | None = None  # of each micro-batch; `None`: TRL's stand as they are
        self.segments: list[int] = []  # of the last pass
        self.dealt: list[MicroStep] = []  # of the last pass
        self.generated: list[Batch] | None = None  # TRL's own micro-batches, as long as a pass over them is to come

    def marked(self, batch: Batch, in_mean: Tensor) -> Batch:
        """The batch with `KEPT`, and divided by these rows' tokens where TRL's loss divides by all tokens of a batch.

        TRL counts these before rewards are known. A call for all processes together.
        """
        batch = {**batch, KEPT: in_mean}
        if "num_items_in_batch" in batch:
            tokens = (loss_mask(batch).sum(dim=1) * in_mean).sum()
            batch["num_items_in_batch"] = self.accelerator.reduce(tokens, reduction="sum")
        return batch

    def begin_generation(self, micro_batches: list[Batch], is_neutral: bool) -> None:
        """Take TRL's own micro-batches of a new generation batch.

        Args:
            micro_batches: of this process.
            is_neutral: whether the batch is to stay TRL's.

        Raises:
            RuntimeError: where a subclass has lost `KEPT`.
        """
        self._forget()
        missing = [batch for batch in micro_batches if KEPT not in batch]
        if missing and not is_neutral:
            raise RuntimeError(
                f"_generate_and_score_completions must leave {KEPT!r}, the filter's mark, in the generation batch, "
                f"got the keys {sorted(missing[0])}."
            )
        if not missing:
            self.generated = micro_batches

    def begin_pass(self, micro_batches: list[Batch], left_to_step: int, has_rows: bool) -> list[Batch]:
        """As many micro-batches for one pass over the generation batch. A call for all processes together.

        Args:
            micro_batches: `steps_per_generation` of them: at first TRL's own, then the last pass's.
            left_to_step: micro-steps until the next optimizer step, the first of this pass included.
            has_rows: whether earlier micro-steps of that optimizer step had kept rows.
        """
        args, generated = self.trainer.args, self.generated
        if generated is None:
            self._announce(micro_batches, micro_batches, args.generation_batch_size)
            return micro_batches
        segments = accumulation_segments(len(generated), left_to_step, args.gradient_accumulation_steps)
        ends_step = segments[0] == left_to_step
        # A further pass mostly cuts as the last one did: its rows are where they belong.
        if segments != self.segments or self.cuts_every_pass:
            self.segments = segments
            micro_batches, self.dealt = self.cut(generated, segments, ends_step)
        self.steps = steps = list(self.dealt)
        if ends_step and has_rows and not any(step.runs for step in steps[:left_to_step]):
            # Earlier generation batches of this optimizer step had rows: its last micro-step runs, in which gradients
            # synchronise and TRL closes the step's books.
            steps[left_to_step - 1] = MicroStep(weight=0.0, kept=0)
        computed = [batch for batch, step in zip(micro_batches, steps, strict=True) if step.runs]
        self._announce(computed, generated, sum(step.kept for step in steps))
        return micro_batches

    def positions(self, batches: list[Batch]) -> int:
        """Positions that forward passes over the batches compute."""
        shared = self.trainer._shared_prompts
        return sum(map(padded_size if shared is None else shared.positions, batches))

    def count_ahead(self, computed: int, plain: int) -> None:
        """Count positions of a pass for log-probs with the next pass of the update, on this process."""
        self._ahead = self._ahead[0] + computed, self._ahead[1] + plain

    def _announce(self, computed: list[Batch], of_trl: list[Batch], rows: int) -> None:
        """Say what a pass over these micro-batches computes in place of TRL's, and on how many rows it trains."""
        trainer, device = self.trainer, self.accelerator.device
        own = torch.tensor([self.positions(computed), sum(map(padded_size, of_trl))], device=device)
        own, self._ahead = own + torch.tensor(self._ahead, device=device), (0, 0)
        positions, plain = self.accelerator.reduce(own, reduction="sum").tolist()
        if trainer._shared_prompts is not None:
            trainer._shared_prompts.announce(positions, plain)
        trainer._empty_steps.log({"update_compute_fraction": positions / plain})
        trainer.rollout_events.tell("on_pass", positions, plain, rows)

    def cut(self, generated: list[Batch], segments: list[int], ends_step: bool) -> tuple[list[Batch], list[MicroStep]]:
        """The micro-batches of a pass, as many as TRL's, and the plan for each. A call for all processes together.

        Args:
            generated: TRL's own micro-batches of this process.
            segments: from `accumulation_segments`: numbers of micro-steps between optimizer steps.
            ends_step: whether the first segment ends an optimizer step.
        """
        accelerator, (pad_token_id, multiple) = self.accelerator, self.padding
        spare = self._spare_row(generated)
        budget = max(map(padded_size, generated)) if self.fills_by_positions else 1
        generated = [self._prepared(batch) for batch in generated]
        of_segments = [generated[start:stop] for start, stop in pairwise(accumulate(segments, initial=0))]
        computed = self._computed(of_segments, ends_step)
        rows = join(generated, pad_token_id)
        counted = int(rows.pop(KEPT).sum())
        own = torch.cat(computed).nonzero().squeeze(1).tolist()
        all_lengths = row_lengths(rows).tolist()
        chosen = take(rows, own, keep_positions=True, longest_trimmed=self.longest_trimmed) if own else spare
        widths = rows["prompt_ids"].size(1), rows["completion_ids"].size(1)
        shared = self.trainer._shared_prompts
        shares = shared is not None and shared.serves_rows(chosen)
        of_own = shares, prompts_of(chosen)[: len(own)], budget, widths
        own_part = [all_lengths[row] for row in own], of_own, [int(part.sum()) for part in computed], counted
        everyones = gather_object([own_part]) if accelerator.num_processes > 1 else [own_part]
        lengths, of_rows, of_each_segment, counts = zip(*everyones, strict=True)
        most, fixed = self.trainer.args.per_device_train_batch_size, of_each_segment if self.keeps_steps else None
        serves, prompts, budgets, padded = zip(*of_rows, strict=True)
        # A row that moves to another process is padded to the width of the rows there.
        is_narrow = sum(map(max, zip(*padded, strict=True))) <= self.longest_trimmed
        sharing = Sharing(prompts, min(budgets)) if all(serves) and is_narrow else None
        deal = deal_rows(lengths, segments, most, fixed, sharing)
        held, place = rows, {(0, number): row for number, row in enumerate(own)}  # of a single process
        if accelerator.num_processes > 1:
            held, place = exchange_rows(rows, own, deal, accelerator, pad_token_id, multiple)

        cut, steps = [], []
        for of_processes in deal:
            mine = [place[row] for row in of_processes[accelerator.process_index]]
            num_kept = sum(map(len, of_processes))
            if mine:
                batch = take(held, mine, multiple, **self.trimming)
                share = len(generated) * accelerator.num_processes * len(mine) / sum(counts)
                batch, weight = self._weighted(batch, share)
                cut.append(batch)
                steps.append(MicroStep(weight, num_kept))
            else:  # where another process has rows, all must run the same number of forward passes
                cut.append(dict(spare))
                steps.append(MicroStep(0.0, num_kept) if num_kept else SKIPPED)
        return cut, steps

    def _prepared(self, batch: Batch) -> Batch:
        """One of TRL's micro-batches, before its rows are dealt."""
        return batch

    def _computed(self, segments: list[list[Batch]], ends_step: bool) -> list[Tensor]:
        """For each segment the rows that go through the model, (rows,) bool."""
        return [torch.cat([batch[KEPT] for batch in segment]) for segment in segments]

    def _weighted(self, batch: Batch, weight: float) -> tuple[Batch, float]:
        """A micro-batch and the factor of its loss.

        A loss over the generation batch's tokens, TRL's or a subclass's own, needs no factor, but the entropy bonus
        and the load-balancing loss beside it do: its divisor takes the factor back.
        """
        if "num_items_in_batch" in batch and weight > 0:
            batch = {**batch, "num_items_in_batch": batch["num_items_in_batch"] * weight}
        return batch, weight

    def _spare_row(self, generated: list[Batch]) -> Batch:
        """A micro-batch of one row with nothing in the loss, for a process without rows: no token that counts and, for
        losses that count by row, no advantage."""
        row = take(join(generated[:1], self.padding[0]), [0])
        row = without_loss(row, torch.ones_like(row.pop(KEPT)))
        return {**row, "advantages": torch.zeros_like(row["advantages"])}

    def gathering(self) -> AbstractContextManager[None]:
        """Around the loss of a micro-batch: processes may have unequal numbers of rows."""
        several = self.steps is not None and self.accelerator.num_processes > 1
        return gathering_uneven_rows(self.accelerator) if several else nullcontext()

    def state(self) -> PlanState:
        """State for a checkpoint in the middle of a generation batch, of this process."""
        return {
            "steps": None if self.steps is None else [(*step,) for step in self.steps],
            "dealt": [(*step,) for step in self.dealt],
            "segments": self.segments,
            "generated": self.generated,
        }

    def load(self, state: PlanState) -> None:
        self.steps = None if state["steps"] is None else [MicroStep(*step) for step in state["steps"]]
        self.dealt = [MicroStep(*step) for step in state["dealt"]]
        self.segments, self.generated = state["segments"], state["generated"]


class LosslessPlan(DropPlan):
    """The mean is over all rows, as in TRL, and only rows with an advantage are computed: the others add nothing to
    the gradient. Rows stay in their optimizer steps and tokens at their positions, so that parameters are TRL's."""

    cuts_every_pass = True
    # Rotary embeddings round by absolute position, in whatever precision a model is.
    keeps_positions = True
    keeps_steps = True

    def _prepared(self, batch: Batch) -> Batch:
        """With `SHARED_TOKENS` for a mean over tokens of a micro-batch, so that its rows may go into others."""
        if self.trainer._loss_mean is not LossMean.TOKENS:  # `loss_type` may be set after `__init__`
            return batch
        tokens = (loss_mask(batch).sum(dim=1) * batch[KEPT]).sum().clamp(min=1)
        return {**batch, SHARED_TOKENS: tokens.expand(len(batch[KEPT])).clone()}

    def _computed(self, segments: list[list[Batch]], ends_step: bool) -> list[Tensor]:
        """An optimizer step without any such row computes one row of each process, whose gradient is zero: TRL takes
        that step, too, in which momentum and weight decay move the weights."""
        computed = [torch.cat([_has_advantage(batch) for batch in segment]) for segment in segments]
        counts = self.accelerator.reduce(torch.stack([part.sum() for part in computed]), reduction="sum").tolist()
        for number, (segment, part, count) in enumerate(zip(segments, computed, counts, strict=True)):
            if count == 0 and (ends_step or number > 0):
                part[torch.cat([batch[KEPT] for batch in segment]).nonzero()[:1]] = True
        return computed

    def _weighted(self, batch: Batch, weight: float) -> tuple[Batch, float]:
        if SHARED_TOKENS not in batch:
            return super()._weighted(batch, weight)
        # The mean over tokens shall divide each row by its `SHARED_TOKENS`: losses are linear in advantages.
        batch = dict(batch)
        advantages = batch["advantages"]
        scale = loss_mask(batch).sum().clamp(min=1).to(advantages) / batch.pop(SHARED_TOKENS)  # (rows,)
        batch["advantages"] = advantages * (scale if advantages.ndim == 1 else scale.unsqueeze(1))
        return batch, 1.0


def _has_advantage(batch: Batch) -> Tensor:
    """(rows,) bool, rows in the mean with an advantage and a token in the loss."""
    kept: Tensor = batch[KEPT]
    has: Tensor = (batch["advantages"].reshape(len(kept), -1) != 0).any(dim=1)
    return kept & has & loss_mask(batch).any(dim=1)


def accumulation_segments(num_micro_steps: int, left_in_window: int, accumulation: int) -> list[int]:
    """Cut the micro-steps of one pass over a generation batch at the optimizer steps.

    Args:
        num_micro_steps: micro-steps of the pass, TRL's `steps_per_generation`.
        left_in_window: micro-steps until the next optimizer step, this one included.
        accumulation: micro-steps from one optimizer step to the next, `gradient_accumulation_steps`.

    Returns:
        Lengths that sum to `num_micro_steps`; each segment but the last ends with an optimizer step.

    >>> accumulation_segments(8, 4, 4)  # two optimizer steps on one generation batch
    [4, 4]
    >>> accumulation_segments(2, 3, 4)  # the optimizer step comes after the next generation batch
    [2]
    >>> accumulation_segments(4, 1, 3)  # windows and generation batches out of step
    [1, 3]
    """
    cuts = [0, *range(left_in_window, num_micro_steps, accumulation), num_micro_steps]
    return [stop - start for start, stop in pairwise(cuts)]
