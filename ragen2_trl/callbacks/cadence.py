"""Which optimizer steps ask for a measurement of mutual information."""

from dataclasses import dataclass
from math import ceil

from transformers import Trainer

from ragen2_trl.instrument.verdict import MIN_STEPS_BETWEEN


@dataclass(frozen=True)
class Cadence:
    """Multiples of `every`, or logging steps that lie at least `MIN_STEPS_BETWEEN` apart.

    Args:
        trainer: In whose run they are.
        every: See `MutualInformationCallback`.
    """

    trainer: Trainer
    every: int | None

    def asks(self, step: int, last: int | None) -> bool:
        """Whether an optimizer step asks for a measurement, after the step `last` that asked for the latest."""
        if last is not None and step <= last:
            return False
        if self.every is not None:
            return step % self.every == 0
        if last is not None and step < last + MIN_STEPS_BETWEEN:
            return False
        args = self.trainer.args
        first = step == 1 and args.logging_first_step
        at_logging_step = args.logging_strategy == "steps" and step % max(1, self.trainer.state.logging_steps) == 0
        return first or at_logging_step or args.logging_strategy == "epoch"

    def due_step(self, last: int | None) -> int | None:
        """The optimizer step that asks for a measurement of the completions that come next, if one does."""
        args, done = self.trainer.args, self.trainer.state.global_step
        per_generation = args.steps_per_generation * self.trainer.num_iterations / args.gradient_accumulation_steps
        steps = range(done + 1, done + ceil(per_generation) + 1)
        return next((step for step in steps if self.asks(step, last)), None)

    def why_never(self, last: int | None) -> str | None:
        """Why none of the steps that are left asks for the first measurement; `None` if one does, or has done so."""
        state = self.trainer.state
        to_come = range(state.global_step + 1, state.max_steps + 1)
        if last is not None or any(self.asks(step, last) for step in to_come):
            return None
        return f"none of the {state.max_steps} optimizer steps asks for it ({self._settings})"

    @property
    def _settings(self) -> str:
        if self.every is not None:
            return f"every={self.every}"
        strategy = self.trainer.args.logging_strategy
        steps = f", logging_steps={self.trainer.state.logging_steps}" if strategy == "steps" else ""
        return f"logging_strategy={strategy.value!r}{steps}"

    @property
    def why_not_yet(self) -> str:
        return f"no optimizer step so far has asked for it ({self._settings})"
