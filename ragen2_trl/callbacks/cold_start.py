"""Why a run that begins without anything to train on does so, told once."""

import re
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import TrainerCallback

from ragen2_trl.filtering import ZERO_STD, zero_variance

logger = get_logger(__name__)

COLD_START = 3  # steps without a kept group at the beginning of a run, before the warning


def keep_cold_start(trainer: Any) -> None:
    """Let a trainer say why its run begins without a kept group, unless it has a callback that does."""
    if not any(isinstance(callback, ColdStartCallback) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(ColdStartCallback(trainer))


class ColdStartCallback(TrainerCallback):
    """Warns when none of the first `COLD_START` steps of a run kept a group, with the reason and what helps.

    Args:
        trainer: One of the trainers with the filter, whose `latest_selection` has the rewards of each step.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self._rewards: list[Tensor] = []  # (N, G) of each step so far, as long as none kept a group

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._rewards = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != len(self._rewards) + 1 or state.global_step > COLD_START:
            return  # resumed later, or a step before kept a group
        selection = self.trainer.latest_selection
        if selection is None or selection.kept.any():
            return
        self._rewards.append(selection.rewards.cpu())
        if state.global_step == COLD_START:
            reason = self._reason(args, torch.cat(self._rewards))
            logger.warning(f"None of the first {COLD_START} steps had anything to train on: {reason}")

    def _reason(self, args: Any, rewards: Tensor) -> str:
        """What all completions have in common, and what to do about it.

        Args:
            args: The trainer's.
            rewards: (n, G) of all groups so far, NaN where there is none.
        """
        known = rewards[rewards.isfinite()]
        if not known.numel():
            return "no reward function returned a finite number for any completion."
        valid, success = (self._logged_of_tasks(name) for name in ("valid_rate", "success"))
        if valid and max(valid) == 0:
            return (
                "no completion held a valid answer (env/*/valid_rate is 0). The model has to know the format before "
                f"rewards can differ: {self._warm_start} or an instruct model. If completions/clipped_ratio is high, "
                "answers are cut off: raise max_completion_length."
            )
        if success and max(success) == 0:
            return f"every answer was wrong (env/*/success is 0). What helps: {self._warm_start}, or easier tasks."
        if success and min(success) == 1:
            return "every answer was right (env/*/success is 1). Take harder tasks: these have nothing to teach."
        if not zero_variance(rewards).all():
            selector = "selector=" if args.snr_selector is None else f"snr_selector={args.snr_selector!r}"
            cut_off = (
                ", or all of their completions are cut off and left out (mask_truncated_completions=True)"
                if getattr(args, "mask_truncated_completions", False)
                else ""
            )
            return f"rewards vary, but the selector keeps no group ({selector}){cut_off}."
        lowest, highest = known.min().item(), known.max().item()
        if highest - lowest <= ZERO_STD:
            return (
                f"every completion had the same reward, {lowest:g}. If that is the lowest possible, the tasks are too "
                "hard, or no answer has the form that the reward looks for: read some completions "
                "(log_completions=True), fine-tune on solved tasks first (a warm start), or begin with easier ones. "
                "If it is the highest, take harder ones."
            )
        return (
            f"rewards lie between {lowest:g} and {highest:g}, but completions of one prompt all have the same. "
            "Prompts are solved always or never: take harder and easier ones in between, raise num_generations, or "
            "sample at temperature=1.0."
        )

    @property
    def _warm_start(self) -> str:
        """A warm start, with the command for it where the task is one of ours."""
        own = (vars(func).get("environment") for func in self.trainer.reward_funcs if hasattr(func, "__dict__"))
        env = next(filter(None, own), None)
        return f"a warm start (`{env.warm_start}`)" if env is not None and env.warm_start else "a warm start"

    def _logged_of_tasks(self, name: str) -> list[float]:
        """Values of this log row under `env/<task>/<name>`, of all tasks together where there are several."""
        row = self.trainer._metrics["train"]
        keys = (key for key in row if re.fullmatch(f"env/[^/]+/{name}", key))
        first = min(keys, default=None)  # `all` sorts before the name of every task
        return [] if first is None else row[first]
