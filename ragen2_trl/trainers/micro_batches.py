"""The micro-batches of the current generation batch, pass by pass over it.

Weights stay here, beside the batch and not in it. They are applied to the loss after everything a trainer or its
subclasses do to it.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, TypedDict

import torch

from ragen2_trl.trainers.batches import Batch, padded_size
from ragen2_trl.trainers.plans import KEPT, MicroStep
from ragen2_trl.trainers.processes import gathering_uneven_rows


class MicroBatchState(TypedDict):
    """State of `MicroBatches` in a checkpoint, micro-steps by the fields of `MicroStep`."""

    steps: list[tuple[float, int, bool]] | None
    dealt: list[tuple[float, int, bool]]
    segments: list[int]
    generated: list[Batch] | None


class MicroBatches:
    """Cuts the current generation batch into micro-batches by the plan of a trainer, one of ours."""

    def __init__(self, trainer: Any):
        self.trainer, self.accelerator, self.plan = trainer, trainer.accelerator, trainer._plan
        self._ahead = (0, 0)
        self._forget()

    def _forget(self) -> None:
        self.steps: list[MicroStep] | None = None  # of each micro-batch; `None`: TRL's stand as they are
        self.segments: list[int] = []  # of the last pass
        self.dealt: list[MicroStep] = []  # of the last pass
        self.generated: list[Batch] | None = None  # TRL's own micro-batches, as long as a pass over them is to come

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
                f"The generation batch has the keys {sorted(missing[0])}; {KEPT!r}, the filter's mark, must be "
                "left in it by _generate_and_score_completions."
            )
        if not missing:
            self.generated = micro_batches

    def begin_pass(self, micro_batches: list[Batch], left_to_step: int, has_rows: bool) -> list[Batch]:
        """As many micro-batches for one pass over the generation batch.

        Args:
            micro_batches: `steps_per_generation` of them: at first TRL's own, then the last pass's.
            left_to_step: micro-steps until the next optimizer step, the first of this pass included.
            has_rows: whether earlier micro-steps of that optimizer step had kept rows.
        """
        if self.generated is None:
            plain = sum(map(padded_size, micro_batches))
            self._announce(self.trainer.args.generation_batch_size, plain, plain)
            return micro_batches
        generated = self.generated
        accumulation = self.trainer.args.gradient_accumulation_steps
        segments = accumulation_segments(len(generated), left_to_step, accumulation)
        ends_step = segments[0] == left_to_step
        # A further pass mostly cuts as the last one did: its rows are where they belong.
        if segments != self.segments or self.plan.cuts_every_pass:
            self.segments = segments
            micro_batches, self.dealt = self.plan.cut(generated, segments, ends_step)
        steps = list(self.dealt)
        if ends_step and has_rows and not any(step.runs for step in steps[:left_to_step]):
            # Earlier generation batches of this optimizer step had rows: its last micro-step runs, in which gradients
            # synchronise and TRL closes the step's books.
            steps[left_to_step - 1] = MicroStep(weight=0.0, kept=0)
        self.steps = steps
        own = self.positions([batch for batch, step in zip(micro_batches, steps, strict=True) if step.runs])
        self._announce(sum(step.kept for step in steps), own, sum(map(padded_size, generated)))
        return micro_batches

    def positions(self, batches: list[Batch]) -> int:
        """Positions that forward passes over the batches compute."""
        shared = self.trainer._shared_prompts
        return sum(map(padded_size if shared is None else shared.positions, batches))

    def count_ahead(self, computed: int, plain: int) -> None:
        """Count positions of a pass for log-probs with the next pass of the update, on this process."""
        self._ahead = self._ahead[0] + computed, self._ahead[1] + plain

    def _announce(self, rows: int, *positions: int) -> None:
        """A call for all processes together."""
        own = torch.tensor(positions, device=self.accelerator.device)
        own += torch.tensor(self._ahead, device=own.device)
        self._ahead = (0, 0)
        computed, plain = self.accelerator.reduce(own, reduction="sum").tolist()
        if self.trainer._shared_prompts is not None:
            self.trainer._shared_prompts.announce(computed, plain)
        self.trainer._empty_steps.log({"update_compute_fraction": computed / plain})
        self.trainer.rollout_events.tell("on_pass", computed, plain, rows)

    def step(self, number: int) -> MicroStep:
        """The plan for the micro-batch of this number."""
        return MicroStep() if self.steps is None else self.steps[number]

    def gathering(self) -> AbstractContextManager[None]:
        """Around the loss of a micro-batch: processes may have unequal numbers of rows."""
        several = self.steps is not None and self.accelerator.num_processes > 1
        return gathering_uneven_rows(self.accelerator) if several else nullcontext()

    def state(self) -> MicroBatchState:
        """State for a checkpoint in the middle of a generation batch, of this process."""
        return {
            "steps": None if self.steps is None else [(*step,) for step in self.steps],
            "dealt": [(*step,) for step in self.dealt],
            "segments": self.segments,
            "generated": self.generated,
        }

    def load(self, state: MicroBatchState) -> None:
        self.steps = None if state["steps"] is None else [MicroStep(*step) for step in state["steps"]]
        self.dealt = [MicroStep(*step) for step in state["dealt"]]
        self.segments, self.generated = state["segments"], state["generated"]


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
