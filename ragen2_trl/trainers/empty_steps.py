"""Optimizer steps without a kept row, and the filter's part of each log row."""

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import TrainerCallback

from ragen2_trl.filtering import zero_variance
from ragen2_trl.instrument.findings import Finding, flat_finding
from ragen2_trl.instrument.health import CAUSES, why_flat
from ragen2_trl.metrics import GENERATION
from ragen2_trl.rollout_events import log_row
from ragen2_trl.trainers.plans import MicroStep

logger = get_logger(__name__)


COLD_START = 3  # steps without a kept group at the beginning of a run, before that is said
REMEMBERED = 50  # steps


def nothing_kept(trainer: Any, said: str, rewards: Sequence[Tensor]) -> Finding:
    """What groups in a row without a kept one have in common, and what to do about it.

    Args:
        trainer: One of ours.
        said: That nothing was kept, as the beginning of a sentence.
        rewards: (n, G) of these groups each, NaN where there is none.
    """
    known = [groups[groups.isfinite()] for groups in rewards]
    found = torch.cat([torch.empty(0), *known])
    extremes = [found.min().item(), found.max().item()] if found.numel() else []
    same = all(bool(zero_variance(groups).all()) for groups in rewards)
    valid, success = (_logged_of_tasks(trainer, name) for name in ("valid_rate", "success"))
    why = why_flat(same, extremes, success, valid=valid) if extremes else CAUSES["unrewarded"]
    selector = trainer._strategy.describe()
    if getattr(trainer.args, "mask_truncated_completions", False):
        selector += ", mask_truncated_completions=True, which leaves out completions that are cut off"
    return flat_finding(f"{said}: {why[:1].lower()}{why[1:]}.", why, _warm_start(trainer), selector)


def _warm_start(trainer: Any) -> str:
    """A warm start, with the command for it where the task is one of ours."""
    own = (vars(func).get("environment") for func in trainer.reward_funcs if hasattr(func, "__dict__"))
    env = next(filter(None, own), None)
    return f"a warm start (`{env.warm_start}`)" if env is not None and env.warm_start else "a warm start"


def _logged_of_tasks(trainer: Any, name: str) -> list[float]:
    """Values of this log row under `env/<task>/<name>`, of all tasks together where there are several."""
    row = trainer._metrics["train"]
    keys = (key for key in row if re.fullmatch(f"env/[^/]+/{name}", key))
    first = min(keys, default=None)  # `all` sorts before the name of every task
    return [] if first is None else row[first]


class StepsState(TypedDict):
    """State of `EmptySteps` in a checkpoint."""

    latest: dict[str, float]
    trained_groups: int
    empty_steps: int
    empty_streak: int


class EmptySteps(TrainerCallback):
    """An optimizer step without a kept row moves nothing, is counted, and a long series of them ends the run.

    A run that begins with `COLD_START` of them says why.

    Every step's log row has the filter's metrics, also steps that reuse completions.

    Args:
        trainer: One of ours.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.accelerator = trainer.accelerator
        self.latest: dict[str, float] = {}  # the filter's metrics, for steps that reuse completions
        self.trained_groups = 0  # of the present generation
        self.begin_run()

    def begin_run(self) -> None:
        a_generation = self.trainer.args.steps_per_generation * self.trainer.num_iterations
        if self.trainer._step % a_generation:  # as TRL, the run goes on inside the generation of the last one
            self.latest[GENERATION] = 1.0
        else:
            self.latest, self.trained_groups = {}, 0
        self.generation = int(self.latest.get(GENERATION, 0))  # how many of the run have been selected
        self.grad_norm: Any = None  # of the latest step with rows since the last log row
        self.empty_steps = 0
        self.empty_streak = 0
        self.unkept = deque[Tensor](maxlen=REMEMBERED)  # rewards of the latest of these steps, (N, G) each
        self.has_begun = False  # whether a step has
        self.begin_step()

    def begin_step(self) -> None:
        self.position = 0  # micro-steps since the last optimizer step
        self.has_rows = False  # whether one of them had a kept row

    def begin_generation(self, trained_groups: int, metrics: dict[str, float]) -> None:
        """A generation is selected: log its metrics, under `snr/`."""
        self.generation += 1
        self.trained_groups, self.latest = trained_groups, {GENERATION: float(self.generation)}
        log_row(self.trainer, self.latest, replace=True)
        self.log(metrics)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log metrics of the filter, under `snr/`."""
        row = {f"snr/{name}": value for name, value in metrics.items()}
        log_row(self.trainer, row)
        self.latest |= row

    @contextmanager
    def means_of(self, kept: int) -> Iterator[None]:
        """Around the loss of a micro-batch with this many kept rows: its means stand in TRL's lists once for each.

        TRL averages the lists, and its own micro-batches have as many rows each. Means over nothing are left out.
        """
        metrics: dict[str, list[float]] = self.trainer._metrics["train"]
        before = {name: len(values) for name, values in metrics.items()}
        yield
        for name in set(metrics) - {"entropy_coef"}:
            values = metrics[name]
            start = before.get(name, 0)
            values[start:] = values[start:] * kept
            if not values:
                del metrics[name]  # TRL divides by their number

    def count(self, step: MicroStep) -> None:
        """A micro-step begins."""
        self.position += 1
        self.has_rows |= step.kept > 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin_step()  # an epoch of unknown length may have ended within a step
        self.has_begun = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.grad_norm = None

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._check_weighted()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.trainer._check_weighted()
        if not self.has_rows:
            # Optimizers pass over parameters without a gradient: neither they nor their momentum move.
            for parameter in model.parameters():
                parameter.grad = None
            if (scaler := self.accelerator.scaler) is not None:
                # fp16 loss scaling insists on gradients to check: pass over the optimizer and forget the check.
                self.accelerator.gradient_state._set_sync_gradients(False)
                scaler.update(scaler.get_scale())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # With fewer kept rows than optimizer steps per generation, some steps have none although a group was kept.
        empty = not self.has_rows and self.trained_groups == 0
        self.empty_steps += empty
        self.empty_streak = self.empty_streak + 1 if empty else 0
        log_row(self.trainer, {"snr/empty_steps": float(self.empty_steps)}, replace=True)
        # This step may have reused completions of an earlier generation.
        row = self.trainer._metrics["train"]
        log_row(self.trainer, {name: value for name, value in self.latest.items() if not row[name]})
        selection = self.trainer.latest_selection
        if not empty:
            self.unkept.clear()
        elif selection is not None:
            self.unkept.append(selection.rewards.cpu())
        said = None
        if 0 < args.snr_max_empty_steps <= self.empty_streak:
            said = f"Training stops at step {state.global_step}: {self.empty_streak} optimizer steps in a row had no "
            said += f"kept group (snr_max_empty_steps={args.snr_max_empty_steps})"
            control.should_training_stop = True
        elif self.empty_streak == state.global_step == COLD_START:
            said = f"None of the first {COLD_START} steps had anything to train on"
        if said is not None:
            logger.warning(nothing_kept(self.trainer, said, self.unkept).text)
        self.begin_step()

    def state(self) -> StepsState:
        """State for a checkpoint, the same on every process."""
        return {
            "latest": self.latest,
            "trained_groups": self.trained_groups,
            "empty_steps": self.empty_steps,
            "empty_streak": self.empty_streak,
        }

    def load(self, state: StepsState) -> None:
        self.latest, self.trained_groups = state["latest"], state["trained_groups"]
        self.generation = int(self.latest.get(GENERATION, 0))
        self.empty_steps, self.empty_streak = state["empty_steps"], state["empty_streak"]
