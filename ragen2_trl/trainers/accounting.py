"""What of each optimizer step: whether it had rows to train on, what its log row says of the filter."""

from typing import Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from transformers import TrainerCallback

from ragen2_trl.trainers.packing import MicroStep
from ragen2_trl.trainers.selecting import Selector

logger = get_logger(__name__)


class Accounting(TrainerCallback):
    """An optimizer step without a kept row moves nothing, is counted, and a long row of them ends the run.

    Every step's log row carries the filter's metrics, also those of steps that reuse completions.

    Args:
        accelerator: Of the trainer.
        metrics: Of the trainer's training log row, by name: values that TRL averages.
    """

    def __init__(self, accelerator: Accelerator, metrics: dict[str, list[float]]):
        self.accelerator = accelerator
        self.metrics = metrics

    def begin_run(self, selector: Selector) -> None:
        """Count anew; `selector` knows the rewards of the run, which say why it may have to stop."""
        self.selector = selector
        self.latest: dict[str, float] = {}  # for steps that reuse completions
        self.empty_steps = 0
        self.empty_streak = 0
        self.begin_window()

    def begin_window(self) -> None:
        self.position = 0  # micro-steps since the last optimizer step
        self.has_rows = False  # whether one of them had a kept row

    def log(self, name: str, value: float) -> None:
        """A metric of the filter, under `snr/`."""
        self.metrics[f"snr/{name}"].append(value)
        self.latest[f"snr/{name}"] = value

    def count(self, step: MicroStep) -> None:
        """A micro-step begins."""
        self.position += 1
        self.has_rows |= step.kept > 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin_window()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.has_rows:
            # Optimizers pass over parameters without a gradient: neither they nor their momentum move.
            for parameter in model.parameters():
                parameter.grad = None
            if (scaler := self.accelerator.scaler) is not None:
                # fp16 loss scaling insists on gradients to check: pass over the optimizer and forget the check.
                self.accelerator.gradient_state._set_sync_gradients(False)
                scaler.update(scaler.get_scale())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # With fewer kept rows than optimizer steps per generation, some steps go without although a group was kept.
        empty = not self.has_rows and self.latest["snr/kept_groups"] == 0
        self.empty_steps += empty
        self.empty_streak = self.empty_streak + 1 if empty else 0
        self.metrics["snr/empty_steps"] = [float(self.empty_steps)]
        for name, value in self.latest.items():
            if not self.metrics[name]:  # this step reused completions of an earlier generation
                self.metrics[name].append(value)
        if 0 < args.snr_max_empty_steps <= self.empty_streak:
            logger.warning(
                f"Stopping at step {state.global_step}: {self.empty_streak} optimizer steps in a row had no kept "
                f"group (snr_max_empty_steps={args.snr_max_empty_steps}). Rewards seen in this run lie in "
                f"{self.selector.reward_range}. Either no prompt's completions differ in reward (see "
                f"frac_reward_zero_std, snr/dropped_all_best and snr/dropped_all_worst: too easy, or too hard), or "
                f"their differences are below the slack: snr_selection_eps={args.snr_selection_eps} with "
                f"snr_selection_eps_scale={args.snr_selection_eps_scale!r}."
            )
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        return {"latest": self.latest, "empty_steps": self.empty_steps, "empty_streak": self.empty_streak}

    def load(self, state: dict[str, Any]) -> None:
        self.latest = state["latest"]
        self.empty_steps, self.empty_streak = state["empty_steps"], state["empty_streak"]
