"""What happens on an optimizer step for which no group was kept."""

from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from transformers import TrainerCallback

if TYPE_CHECKING:
    from ragen2_trl.trainers.snr_grpo_trainer import SNRFilteredGRPOTrainer

logger = get_logger(__name__)


class EmptyStepCallback(TrainerCallback):
    """An optimizer step without a kept row moves nothing, is counted, and a long row of them ends the run.

    Every step's log row carries the filter's metrics, also those of steps that reuse completions.
    """

    def __init__(self, trainer: "SNRFilteredGRPOTrainer"):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.trainer._empty_steps = self.trainer._empty_streak = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._window_position = 0
        self.trainer._window_has_rows = False

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.trainer._window_has_rows:
            # Optimizers pass over parameters without a gradient: neither they nor their momentum move.
            for parameter in model.parameters():
                parameter.grad = None
            if (scaler := self.trainer.accelerator.scaler) is not None:
                # fp16 loss scaling insists on gradients to check: pass over the optimizer and forget the check.
                self.trainer.accelerator.gradient_state._set_sync_gradients(False)
                scaler.update(scaler.get_scale())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        # With fewer kept rows than optimizer steps per generation, some steps go without although a group was kept.
        empty = not trainer._window_has_rows and trainer._latest_metrics["snr/kept_groups"] == 0
        trainer._empty_steps += empty
        trainer._empty_streak = trainer._empty_streak + 1 if empty else 0
        metrics = trainer._metrics["train"]
        metrics["snr/empty_steps"] = [float(trainer._empty_steps)]
        for name, value in trainer._latest_metrics.items():
            if not metrics[name]:  # this step reused completions of an earlier generation
                metrics[name].append(value)
        if 0 < args.snr_max_empty_steps <= trainer._empty_streak:
            logger.warning(
                f"Stopping at step {state.global_step}: {trainer._empty_streak} optimizer steps in a row had no kept "
                f"group (snr_max_empty_steps={args.snr_max_empty_steps}). Rewards seen in this run lie in "
                f"{trainer._reward_range}. Either no prompt's completions differ in reward (see frac_reward_zero_std, "
                f"snr/dropped_all_best and snr/dropped_all_worst: too easy, or too hard), or their differences are "
                f"below the slack: snr_selection_eps={args.snr_selection_eps} is in the unit of "
                f"snr_score={args.snr_score!r}."
            )
            control.should_training_stop = True
