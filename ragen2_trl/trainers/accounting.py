"""What of each optimizer step: whether it had rows to train on, what its log row says of the filter."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback

from ragen2_trl.columns import ALL_TASKS
from ragen2_trl.envs import Environment, TaskMixture
from ragen2_trl.filtering import ZERO_STD
from ragen2_trl.trainers.packing import MicroStep
from ragen2_trl.trainers.selecting import Selector

logger = get_logger(__name__)

COLD_START = 3  # steps without a kept group at the beginning of a run, after which it is said why


class Accounting(TrainerCallback):
    """An optimizer step without a kept row moves nothing, is counted, and a long row of them ends the run.

    Every step's log row carries the filter's metrics, also those of steps that reuse completions.

    Args:
        trainer: Whose steps they are.
    """

    def __init__(self, trainer: Any):
        self.accelerator = trainer.accelerator
        self.metrics: dict[str, list[float]] = trainer._metrics["train"]  # of its log row: values that TRL averages
        self.of_no_update = trainer._of_no_update
        tasks = (getattr(func, "environment", None) for func in trainer.reward_funcs)
        self.task: str | None = next((env.name for env in tasks if isinstance(env, (Environment, TaskMixture))), None)

    def begin_run(self, selector: Selector) -> None:
        """Count anew; `selector` knows the rewards of the run, which say why it may have to stop."""
        self.selector = selector
        self.latest: dict[str, float] = {}  # for steps that reuse completions
        self.entropy = math.nan  # of the policy in nats per token, when last seen
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

    @contextmanager
    def without_rows(self) -> Iterator[None]:
        """What TRL logs of a micro-batch without a kept row, zeros for means over nothing, is left out."""
        before = {name: len(values) for name, values in self.metrics.items()}
        yield
        for name in set(self.metrics) - {"entropy_coef"}:
            del self.metrics[name][before.get(name, 0) :]
            if not self.metrics[name]:
                del self.metrics[name]  # TRL divides by how many there are

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
        self._complete_row()
        # Neither is there in a further run of a trainer that begins with what an earlier one has sampled.
        kept = self.latest.get("snr/refilled_groups", self.latest.get("snr/kept_groups", 0.0))
        empty = not self.has_rows and kept == 0
        self.empty_steps += empty
        self.empty_streak = self.empty_streak + 1 if empty else 0
        self.metrics["snr/empty_steps"] = [float(self.empty_steps)]
        for name, value in self.latest.items():
            if not self.metrics[name]:  # this step reused completions of an earlier generation
                self.metrics[name].append(value)
        if self.empty_streak == state.global_step == COLD_START:
            logger.warning(f"None of the first {COLD_START} steps had anything to train on: {self._why_cold(args)}")
        if 0 < args.snr_max_empty_steps <= self.empty_streak:
            logger.warning(
                f"Stopping at step {state.global_step}: {self.empty_streak} optimizer steps in a row had no kept "
                f"group (snr_max_empty_steps={args.snr_max_empty_steps}). Rewards seen in this run lie in "
                f"{self.selector.reward_range}. Either no prompt's completions differ in reward (see "
                f"frac_reward_zero_std, snr/dropped_all_best and snr/dropped_all_worst: too easy, or too hard), or "
                f"their differences are below the slack: snr_selection_eps={args.snr_selection_eps} with "
                f"snr_selection_eps_scale={args.snr_selection_eps_scale!r}{self._of_quarter(args)}."
            )
            control.should_training_stop = True

    def _complete_row(self) -> None:
        """TRL logs these while it computes a loss: a step without any has them, too."""
        if self.has_rows:
            self.entropy = (self.metrics["entropy"] or [self.entropy])[-1]
        else:
            self.metrics["entropy"].append(self.entropy)
            for name in self.of_no_update:
                self.metrics[name].append(0.0)

    def _of_quarter(self, args: Any) -> str:
        if args.snr_quartile is None:
            return ""
        return (
            f". Or there is no variance in the quarter that snr_quartile={args.snr_quartile} keeps: "
            "snr_include_zero=True trains on it all the same"
        )

    def _why_cold(self, args: Any) -> str:
        """What every completion of the run so far has in common, and what to do about it."""
        if self.selector.reward_range is None:
            return "no reward function returned a finite number for any completion."
        lowest, highest = self.selector.reward_range
        logged = ALL_TASKS if self.task is None or "," in self.task else self.task
        valid, success = (self.metrics.get(f"env/{logged}/{name}") for name in ("valid_rate", "success"))
        warm_start = f"`ragen2-trl warm-start --env_name {self.task} --model_name_or_path <your model>`"
        if valid and max(valid) == 0:
            return (
                "no completion held a valid answer (env/*/valid_rate is 0). The model has to know the format before "
                f"rewards can differ: {warm_start}, or an instruct model. If completions/clipped_ratio is high, "
                "answers are cut off: raise max_completion_length."
            )
        if success and max(success) == 0:
            return (
                f"every answer was wrong (env/*/success is 0). Warm start ({warm_start}), or begin with easier tasks "
                "(`--env_args`)."
            )
        if success and min(success) == 1:
            return "every answer was right (env/*/success is 1). Take harder tasks: these have nothing to teach."
        if self.latest["snr/zero_variance_fraction"] < 1:
            return (
                f"rewards differ, but the settings keep no group: snr_strategy={args.snr_strategy!r}, "
                f"snr_value={args.snr_value}, snr_selection_eps={args.snr_selection_eps} in the unit of "
                f"snr_score={args.snr_score!r}{self._of_quarter(args)}."
            )
        if highest - lowest <= ZERO_STD:
            return (
                f"every completion had the same reward, {lowest:g}. If that is the lowest there is, the tasks are too "
                "hard, or no answer has the form that the reward looks for: read some completions "
                "(log_completions=True), fine-tune on solved tasks first (a warm start), or begin with easier ones. "
                "If it is the highest, take harder ones."
            )
        return (
            f"rewards lie between {lowest:g} and {highest:g}, but completions of one prompt all have the same. "
            "Prompts are solved always or never: take those in between, raise num_generations, or sample at "
            "temperature=1.0."
        )

    def state(self) -> dict[str, Any]:
        counts = {"empty_steps": self.empty_steps, "empty_streak": self.empty_streak}
        return {"latest": self.latest, "entropy": self.entropy, **counts}

    def load(self, state: dict[str, Any]) -> None:
        self.latest, self.entropy = state["latest"], state["entropy"]
        self.empty_steps, self.empty_streak = state["empty_steps"], state["empty_streak"]
