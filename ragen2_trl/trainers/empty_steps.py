"""What becomes of each optimizer step: whether it had rows to train on, and what its log row says of the filter."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback

from ragen2_trl.filtering import ZERO_STD
from ragen2_trl.rollout_events import log_row
from ragen2_trl.trainers.micro_batches import MicroStep
from ragen2_trl.trainers.selection import SELECTION_EPS, GroupFilter, ScoreSelector

logger = get_logger(__name__)

COLD_START = 3  # steps without a kept group at the beginning of a run, after which it is said why


class EmptySteps(TrainerCallback):
    """An optimizer step without a kept row moves nothing, is counted, and a long series of them ends the run.

    Every step's log row has the filter's metrics, also those of steps that reuse completions.

    Args:
        trainer: Whose steps they are.
        check_update: Called before each optimizer step and after each micro-step.
    """

    def __init__(self, trainer: Any, check_update: Callable[[], None]):
        self.trainer = trainer
        self.accelerator = trainer.accelerator
        self.check_update = check_update

    def begin_run(self, group_filter: GroupFilter) -> None:
        """Count from 0; `group_filter` knows the rewards of the run, which say why it may have to stop."""
        self.group_filter = group_filter
        self.latest: dict[str, float] = {}  # the filter's metrics, for steps that reuse completions
        self.grad_norm: Any = None  # of the latest step with rows since the last log row
        self.entropy = math.nan  # of the policy in nats per token, when last seen
        self.empty_steps = 0
        self.empty_streak = 0
        self.begin_step()

    def begin_step(self) -> None:
        self.position = 0  # micro-steps since the last optimizer step
        self.has_rows = False  # whether one of them had a kept row

    @property
    def metrics(self) -> dict[str, list[float]]:
        """Of the next log row: values that TRL averages."""
        row: dict[str, list[float]] = self.trainer._metrics["train"]
        return row

    def begin_generation(self, metrics: dict[str, float]) -> None:
        """Metrics of an earlier generation are none of this one, which begins with these."""
        self.latest = {}
        for name, value in metrics.items():
            self.log(name, value)

    def log(self, name: str, value: float) -> None:
        """A metric of the filter, under `snr/`."""
        log_row(self.trainer, {f"snr/{name}": value})
        self.latest[f"snr/{name}"] = value

    @contextmanager
    def without_rows(self) -> Iterator[None]:
        """What TRL logs of a micro-batch without a kept row, zeros for means over nothing, is left out."""
        metrics = self.metrics
        before = {name: len(values) for name, values in metrics.items()}
        yield
        for name in set(metrics) - {"entropy_coef"}:
            del metrics[name][before.get(name, 0) :]
            if not metrics[name]:
                del metrics[name]  # TRL divides by how many there are

    def count(self, step: MicroStep) -> None:
        """A micro-step begins."""
        self.position += 1
        self.has_rows |= step.kept > 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.grad_norm = None

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.check_update()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.check_update()
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
        kept = self.latest.get("snr/trained_groups", self.latest.get("snr/kept_groups", 0.0))
        empty = not self.has_rows and kept == 0
        self.empty_steps += empty
        self.empty_streak = self.empty_streak + 1 if empty else 0
        log_row(self.trainer, {"snr/empty_steps": float(self.empty_steps)}, replace=True)
        # This step may have reused completions of an earlier generation.
        log_row(self.trainer, {name: value for name, value in self.latest.items() if not self.metrics[name]})
        if self.empty_streak == state.global_step == COLD_START:
            logger.warning(f"None of the first {COLD_START} steps had anything to train on: {self._why_cold(args)}")
        if 0 < args.snr_max_empty_steps <= self.empty_streak:
            logger.warning(
                f"Stopping at step {state.global_step}: {self.empty_streak} optimizer steps in a row had no kept "
                f"group (snr_max_empty_steps={args.snr_max_empty_steps}). Rewards seen in this run lie in "
                f"{self.group_filter.reward_range}. Either no prompt's completions differ in reward (see "
                f"frac_reward_zero_std, snr/dropped_all_best and snr/dropped_all_worst: too easy, or too hard), or "
                f"what selects keeps none of those that do ({self._settings(args)})."
            )
            control.should_training_stop = True

    def _complete_row(self) -> None:
        """TRL logs these while it computes a loss: a step without any has them, too."""
        if self.has_rows:
            self.entropy = (self.metrics["entropy"] or [self.entropy])[-1]
        else:
            log_row(self.trainer, {"entropy": self.entropy, **dict.fromkeys(self.trainer._of_no_update, 0.0)})

    def _settings(self, args: Any) -> str:
        if args.snr_selector is not None:
            return f"snr_selector={args.snr_selector!r}"
        if not isinstance(self.group_filter.selector, ScoreSelector):
            return f"selector={self.group_filter.selector!r}"
        return f"snr_strategy={args.snr_strategy!r}, snr_value={args.snr_value}, snr_score={args.snr_score!r}"

    def _why_cold(self, args: Any) -> str:
        """What every completion of the run so far has in common, and what to do about it."""
        if self.group_filter.reward_range is None:
            return "no reward function returned a finite number for any completion."
        lowest, highest = self.group_filter.reward_range
        valid, success = (self._logged_of_tasks(name) for name in ("valid_rate", "success"))
        env = next((vars(func)["environment"] for func in self.trainer.reward_funcs if _has_task(func)), None)
        command = env and env.warm_start
        warm_start = f"a warm start{f' (`{command}`)' if command else ''}"
        if valid and max(valid) == 0:
            return (
                "no completion held a valid answer (env/*/valid_rate is 0). The model has to know the format before "
                f"rewards can differ: {warm_start} or an instruct model. If completions/clipped_ratio is high, "
                "answers are cut off: raise max_completion_length."
            )
        if success and max(success) == 0:
            return f"every answer was wrong (env/*/success is 0). What helps: {warm_start}, or easier tasks."
        if success and min(success) == 1:
            return "every answer was right (env/*/success is 1). Take harder tasks: these have nothing to teach."
        if self.latest["snr/zero_variance_fraction"] < 1:
            return (
                f"rewards differ, but what selects keeps no group: {self._settings(args)}, with a slack of "
                f"{SELECTION_EPS} in the unit of the score."
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

    def _tasks(self) -> list[str]:
        """Names of the tasks that this row has metrics of, `ALL_TASKS` first where there are several."""
        found = (re.fullmatch("env/(.+)/success", name) for name in self.metrics)
        return sorted(match[1] for match in found if match)

    def _logged_of_tasks(self, name: str) -> list[float]:
        return next((self.metrics[f"env/{task}/{name}"] for task in self._tasks()), [])

    # What a checkpoint needs, the same on every process

    def state(self) -> dict[str, Any]:
        counts = {"empty_steps": self.empty_steps, "empty_streak": self.empty_streak}
        return {"latest": self.latest, "entropy": self.entropy, **counts}

    def load(self, state: dict[str, Any]) -> None:
        self.latest, self.entropy = state["latest"], state["entropy"]
        self.empty_steps, self.empty_streak = state["empty_steps"], state["empty_streak"]


def _has_task(func: Any) -> bool:
    """Whether a reward function is that of an environment, which says so."""
    return "environment" in getattr(func, "__dict__", {})
