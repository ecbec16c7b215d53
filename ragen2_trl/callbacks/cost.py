"""What a training has cost so far: time, tokens it sampled, and what its updates computed."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import PeftModel
from torch import nn
from transformers import Trainer, TrainerCallback

from ragen2_trl.record.run import COST_STATE
from ragen2_trl.rollout_events import LocalRollout, listen, log_row
from ragen2_trl.saved_state import kept_by_callback
from ragen2_trl.trainers.stock import StockTrainer

# Each process counts its own part of these.
OF_PROCESS = ("cpu_seconds", "sampled_tokens", "sampled_completions", "update_tokens", "update_flops")
# Known on every process for all of them.
OF_ALL = ("seconds", "plain_completions", "update_rows", "update_positions", "plain_update_positions")
COSTS = (*OF_PROCESS, *OF_ALL)
OF_OURS = ("update_rows", "update_positions")  # ends of what only our trainers announce


def count_cost(trainer: Trainer) -> None:
    """Let a trainer count what its training costs, unless it does so already."""
    if not any(isinstance(callback, CostCallback) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(CostCallback(trainer))


class CostCallback(TrainerCallback):
    """
    Logs what training has cost up to each logged step, under `cost/`, so that runs can be compared at equal cost and
    not only at equal steps. The trainers with the filter bring it along; trackers get its keys with
    `snr_verbose=True`. Every number is a sum since the run began; a resumed run goes on with the sums of its
    checkpoint, and what was lost after that is not in them.

    - `cost/seconds`: wall clock of optimizer steps, sampling and rewards included. Held-out evaluations, checkpoints,
      logging, and what callbacks measure of completions (mutual information, gradients) are left out.
    - `cost/cpu_seconds`: CPU time of the training processes for the same, over all their threads. Where others use the
      machine, too, it is the fairer clock; time of GPUs and of programs in the sandbox is not in it.
    - `cost/sampled_tokens`: tokens that the model wrote in training, on all processes, those of further rounds of
      dynamic sampling and of groups that were dropped included.
    - `cost/sampled_completions`, `cost/plain_completions`: completions sampled, with or without a reward, and those
      that plain TRL would have sampled for as many generations.
    - `cost/update_rows`: rows that updates trained on, once for each generation. Only our trainers log these three.
    - `cost/update_positions`, `cost/plain_update_positions`: positions, padding included, that all passes over a
      generation compute, those for old and reference log-probs included, and that plain TRL would compute.
    - `cost/update_tokens`: positions, padding included, of every forward pass that the update ran backward through.
    - `cost/update_flops`: floating-point operations of the update in the usual estimate, 6 x parameters x positions:
      2 a parameter and position forward, 2 backward to the activations, 2 for the gradient of the parameter itself,
      which frozen parameters do without. All parameters count, embeddings too; attention's own part, quadratic in
      the length, and the second forward pass of gradient checkpointing are left out. A critic counts with its own.

    Args:
        trainer ([`~trl.GRPOTrainer`] or [`~trl.RLOOTrainer`], or a subclass):
            The trainer that the callback is then added to.

    Example:

    ```python
    >>> from ragen2_trl import CostCallback

    >>> trainer.add_callback(CostCallback(trainer))  # doctest: +SKIP
    ```
    """

    def __init__(self, trainer: Trainer):
        self.trainer = cast(StockTrainer, trainer)
        self._own = self._nothing()  # of this process since training began here
        self._before = self._nothing()  # of all processes, from the checkpoint
        self._started: tuple[float, float] | None = None  # wall and CPU clock when the present stretch began
        listen(
            trainer,
            on_generated=self._count_sampled,
            on_rollout=self._count_generation,
            on_pass=self._count_pass,
            aside=self.paused,
        )
        policy = trainer.accelerator.unwrap_model(trainer.model)
        body: Any = policy.get_base_model() if isinstance(policy, PeftModel) else policy
        critic = getattr(trainer, "critic", None)
        own = set() if critic is None else set(map(id, critic.parameters()))
        self._count_passes(body.base_model, [one for one in policy.parameters() if id(one) not in own])
        if critic is not None and critic.backbone is not None:
            self._count_passes(critic, list(critic.parameters()))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._own, self._before, self._started = self._nothing(), self._nothing(), None
        if state.global_step > 0:
            saved = kept_by_callback(state, COST_STATE, dict[str, float]) or {}
            self._before |= {name: float(saved[name]) for name in COSTS if name in saved}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._resume()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pause()  # before any callback has ended the step, and evaluates or saves

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        accelerator = self.trainer.accelerator
        own = dict(self._own)
        if accelerator.num_processes > 1:
            values = torch.tensor([own[name] for name in OF_PROCESS], dtype=torch.float64, device=accelerator.device)
            own |= dict(zip(OF_PROCESS, accelerator.reduce(values, reduction="sum").tolist(), strict=True))
        total = {name: self._before[name] + own[name] for name in COSTS}
        state.stateful_callbacks[COST_STATE] = total
        logged = {name: value for name, value in total.items() if value > 0 or not name.endswith(OF_OURS)}
        log_row(self.trainer, {f"cost/{name}": float(value) for name, value in logged.items()}, replace=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Neither time nor forward passes in here are the training's own."""
        running = self._started is not None
        if running:
            self._pause()
        try:
            yield
        finally:
            if running:
                self._resume()

    @staticmethod
    def _nothing() -> dict[str, float]:
        return dict.fromkeys(COSTS, 0.0)

    def _resume(self) -> None:
        self._started = time.perf_counter(), time.process_time()

    def _pause(self) -> None:
        if self._started is not None:
            wall, cpu = self._started
            self._own["seconds"] += time.perf_counter() - wall
            self._own["cpu_seconds"] += time.process_time() - cpu
            self._started = None

    def _count_sampled(self, tokens: int, completions: int) -> None:
        self._own["sampled_tokens"] += tokens
        self._own["sampled_completions"] += completions

    def _count_generation(self, local: LocalRollout) -> None:
        self._own["plain_completions"] += self.trainer.args.generation_batch_size

    def _count_pass(self, computed: int, plain: int, rows: int) -> None:
        self._own["update_rows"] += rows / self.trainer.num_iterations
        self._own["update_positions"] += computed
        self._own["plain_update_positions"] += plain

    def _count_passes(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Count the forward passes of a module that gradients will come back through."""
        size = sum(map(_size, parameters))
        trained = sum(_size(one) for one in parameters if one.requires_grad)
        per_position = 4.0 * size + 2.0 * trained

        def count(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            if self._started is None or not torch.is_grad_enabled():
                return
            inputs = args[0] if args else kwargs.get("input_ids")
            inputs = kwargs["inputs_embeds"][..., 0] if inputs is None else inputs
            self._own["update_tokens"] += inputs.numel()
            self._own["update_flops"] += per_position * inputs.numel()

        module.register_forward_pre_hook(count, with_kwargs=True)


def _size(parameter: nn.Parameter) -> int:
    # DeepSpeed's ZeRO-3 leaves an empty tensor where its part of a parameter was.
    return parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()
