"""What the filter has saved of a run's updates: positions that were not computed, and the seconds these stand for."""

import time
from typing import Any

import torch
from transformers import TrainerCallback

from ragen2_trl.columns import SAVINGS_STATE


class Savings(TrainerCallback):
    """Sums over the run, a resumed one's included, of passes over a generation in which anything was trained on.

    Of `seconds` of forward and backward passes, a share of (`plain` - `computed`) / `computed` has been saved: as if
    the positions that were left out had taken as long as the others.
    """

    def __init__(self) -> None:
        self.begin_run({})

    def begin_run(self, state: dict[str, float]) -> None:
        """Count from nothing, or go on from what a checkpoint has."""
        self.computed = state.get("computed", 0)  # positions, padding included, of all processes
        self.plain = state.get("plain", 0)  # that TRL would have computed for the same completions
        self.seconds = state.get("seconds", 0.0)  # of forward and backward passes, on this process
        self._began: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin_run(state.stateful_callbacks.get(SAVINGS_STATE, {}) if state.global_step > 0 else {})

    def add_pass(self, computed: int, plain: int) -> None:
        """A pass over a generation begins; one that trains on nothing saves nothing."""
        if computed > 0:
            self.computed, self.plain = self.computed + computed, self.plain + plain

    def begin_update(self) -> None:
        """A micro-batch is sampled, and about to be computed."""
        self._began = time.perf_counter()

    def end_update(self, device: torch.device, ends_step: bool) -> None:
        """It has been computed; at the end of an optimizer step, what a GPU has still to do is waited for."""
        if self._began is None:
            return
        if ends_step and device.type != "cpu":
            torch.accelerator.synchronize()
        self.seconds += time.perf_counter() - self._began
        self._began = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.stateful_callbacks[SAVINGS_STATE] = {
            "computed": self.computed,
            "plain": self.plain,
            "seconds": self.seconds,
        }
