"""Gradients of the parts of a trainer's loss, for chosen rows of a generation batch, with the trainer left as it is.

Each gradient goes through the trainer's own `_compute_loss`, on a shallow copy of the trainer: whatever is set on the
copy, and whatever the loss logs or counts, stays there. `torch.autograd.grad` neither fills `.grad` nor runs the hooks
by which DDP and DeepSpeed take gradients up.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from trl.distributed import DistributedBackend

from ragen2_trl.callbacks.whole_model import whole_model
from ragen2_trl.rollout_events import Batch, LocalRollout
from ragen2_trl.trainers.batches import loss_mask, take
from ragen2_trl.trainers.ppo.critic import NAME as CRITIC
from ragen2_trl.trainers.processes import exchange_rows
from ragen2_trl.trainers.stock import StockTrainer

Gradient = list[Tensor]  # for each parameter, flat, the part of it that this process keeps


@dataclass(frozen=True)
class LossTerm:
    """One term of the loss.

    Args:
        settings: Attributes of the trainer under which the loss is that term alone.
        keeps_advantages: Whether advantages stay, which make the task's term.
        of_run: The run's own coefficient, of the one that it is measured with: 0 where the run does not have it.
    """

    settings: dict[str, Any]
    keeps_advantages: bool = False
    of_run: float = 1.0


@dataclass(frozen=True)
class ForwardStep:
    """Rows of one forward pass: this process's, and how many all processes have."""

    rows: list[int]
    total: int


def check_can_probe(trainer: StockTrainer) -> None:
    """Raise a `ValueError` where gradients cannot be taken aside from training."""
    name, args = "GradientSNRCallback", trainer.args
    if trainer.is_fsdp_enabled:
        raise ValueError(f"{name} cannot take gradients of FSDP's shards; allowed: one process, DDP, ZeRO-1, 2 and 3.")
    if DistributedBackend(trainer.accelerator).is_zero3 and not args.ds3_gather_for_generation:
        raise ValueError(
            f"{name} gathers the parameters of ZeRO-3; allowed: ds3_gather_for_generation=True, or another stage."
        )


@contextmanager
def probe_of(trainer: StockTrainer, local: LocalRollout, entropy_coef: float | None) -> Iterator["Probe"]:
    """A copy of the trainer at whole parameters; no random state moves."""
    device = trainer.accelerator.device
    devices = [device] if device.type == "cuda" else []
    with (
        whole_model(trainer) as model,
        _checkpointed(model, trainer.args),
        torch.random.fork_rng(devices),
        torch.enable_grad(),
    ):
        yield Probe(trainer, model, local, entropy_coef)


@contextmanager
def _checkpointed(model: Any, args: Any) -> Iterator[None]:
    """As in training, which generation ends, but in the way that `torch.autograd.grad` can go back through."""
    if not args.gradient_checkpointing:
        yield
        return
    usual = args.gradient_checkpointing_kwargs
    model.gradient_checkpointing_enable({**(usual or {}), "use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_enable(usual)


class _Alone:
    """An accelerator that waits for nobody: processes have different numbers of losses to compute here.

    What a loss gathers are metrics, which are thrown away, and the entropies that `top_entropy_quantile` takes its
    threshold from, which is of this process's rows then.
    """

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce(self, tensor: Tensor, reduction: str = "sum", scale: float = 1.0) -> Tensor:
        return tensor

    def pad_across_processes(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor

    gather_for_metrics = gather


class Probe:
    """Takes gradients of rows that may lie on any process.

    Args:
        trainer: whose loss it is.
        model: the policy with whole parameters.
        local: rows and what they are trained with.
        entropy_coef: see `measure_gradients`.
    """

    def __init__(self, trainer: StockTrainer, model: nn.Module, local: LocalRollout, entropy_coef: float | None):
        self.model, self.accelerator = model, trainer.accelerator
        self.trainer = cast(Any, copy.copy(trainer))  # with what is set on it
        self.trainer._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
        # What TRL divides by for micro-batches and windows, whichever way a release of it does, is 1.
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.args = copy.copy(trainer.args)
        self.trainer.args.steps_per_generation = 1
        self.trainer.aux_loss_enabled = False
        self.batch: Batch = dict(local.batch)
        if hasattr(trainer, "_with_all_groups"):  # of our PPO, whose advantages are not TRL's
            with trainer.compute_loss_context_manager():
                self.batch = self.trainer._with_all_groups(local.inputs, self.batch)
        # From here on for losses alone, of which processes have different numbers, over different numbers of rows.
        self.trainer.accelerator = _Alone(self.accelerator)
        lengths = loss_mask(self.batch).sum(dim=1).float().mean()
        self.mean_length = self.accelerator.reduce(lengths, reduction="mean").clamp(min=1.0)  # tokens a row
        named = model.named_parameters()
        self.parameters = [p for n, p in named if p.requires_grad and not n.startswith(f"{CRITIC}.")]
        self.coefficients = _coefficients(trainer, self.batch, entropy_coef)
        self.parts = _parts(self.coefficients, _coefficients(trainer, self.batch, None))

    def deal(self, lists: Sequence[Sequence[int]]) -> list[list[ForwardStep]]:
        """Forward passes for lists of rows, numbered over all processes, which get equal shares of each."""
        own, processes = len(self.batch["prompt_ids"]), self.accelerator.num_processes
        size = self.trainer.args.per_device_train_batch_size * processes
        chunks = [[rows[start : start + size] for start in range(0, len(rows), size)] for rows in lists]
        deal = [
            [[divmod(row, own) for row in chunk[process::processes]] for process in range(processes)]
            for parts in chunks
            for chunk in parts
        ]
        tokenizer, multiple = self.trainer._tokenizer, self.trainer.pad_to_multiple_of
        arguments = (self.batch, list(range(own)), deal, self.accelerator, tokenizer.pad_token_id, multiple)
        self.batch, place = exchange_rows(*arguments)
        me = iter([shares[self.accelerator.process_index] for shares in deal])
        return [[ForwardStep([place[row] for row in next(me)], len(chunk)) for chunk in parts] for parts in chunks]

    def gradients(self, halves: Sequence[Sequence[ForwardStep]]) -> dict[str, tuple[Gradient, Gradient]]:
        """Of each part of the loss, the mean gradients of the samples of two halves."""
        return {
            name: (self._gradient(halves[0], part), self._gradient(halves[1], part))
            for name, part in self.parts.items()
        }

    def task_gradient(self, steps: Sequence[ForwardStep]) -> Gradient:
        """The mean gradient of some samples, of the task alone."""
        return self._gradient(steps, self.parts["task"])

    def summed(self, values: Tensor) -> Tensor:
        """Over all processes."""
        return self.accelerator.reduce(values, reduction="sum")

    def _gradient(self, steps: Sequence[ForwardStep], part: LossTerm) -> Gradient:
        total = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in self.parameters]
        count = sum(step.total for step in steps)
        for step in steps:
            if not step.rows:
                continue
            loss = self._loss(step.rows, part)
            gradients = torch.autograd.grad(loss * (len(step.rows) / count), self.parameters, allow_unused=True)
            for sum_, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    sum_ += gradient
        # Every process keeps its part: nothing but inner products is made of them.
        processes, me = self.accelerator.num_processes, self.accelerator.process_index
        return [self.summed(value).flatten().tensor_split(processes)[me].clone() for value in total]

    def _loss(self, rows: list[int], part: LossTerm) -> Tensor:
        """A mean over rows in which every token of the batch counts as it does in the whole batch.

        Losses over the tokens of a generation batch divide by `num_items_in_batch`, which is set to what these rows
        would have at the batch's mean length; means over the tokens of a micro-batch are scaled to the same.
        """
        trainer, inputs = self.trainer, take(self.batch, rows, self.trainer.pad_to_multiple_of)
        expected = len(rows) * self.mean_length
        if "num_items_in_batch" in inputs:
            inputs["num_items_in_batch"] = expected * self.accelerator.num_processes
        if not part.keeps_advantages:
            inputs["advantages"] = torch.zeros_like(inputs["advantages"])
        vars(trainer).update(part.settings)
        with trainer.compute_loss_context_manager():
            # Of the class: on the instance it is weighted for a micro-batch of training.
            loss: Tensor = type(trainer)._compute_loss(trainer, self.model, inputs)
        if part.settings.get("_entropy_bonus_enabled") or vars(trainer).get("loss_type") == "bnpo":
            loss = loss * (loss_mask(inputs).sum() / expected)
        return loss


def _coefficients(trainer: StockTrainer, batch: Batch, entropy_coef: float | None) -> dict[str, float]:
    """Of the regularisers of a loss. RLOO has no entropy bonus, and KL in the reward, where it belongs to the task."""
    known = vars(trainer)
    coefficients = {"kl": trainer.beta if "ref_per_token_logps" in batch else 0.0, "entropy": 0.0}
    if "_entropy_bonus_enabled" not in known:
        if entropy_coef:
            raise ValueError(
                f"entropy_coef={entropy_coef!r}, but the loss of {type(trainer).__name__} in this release of TRL has "
                "no entropy bonus; allowed: None."
            )
        return coefficients
    if entropy_coef is not None:
        coefficients["entropy"] = entropy_coef
    elif known["_entropy_bonus_enabled"]:
        rests = known["use_adaptive_entropy"] and known["_last_world_entropy"] > trainer.args.entropy_target
        coefficients["entropy"] = 0.0 if rests else known["entropy_coef"]
    return coefficients


def _parts(coefficients: dict[str, float], own: dict[str, float]) -> dict[str, LossTerm]:
    off = {"beta": 0.0, "_entropy_bonus_enabled": False}
    parts = {"task": LossTerm(off, keeps_advantages=True)}
    if coefficients["kl"] != 0.0:
        parts["kl"] = LossTerm(off | {"beta": coefficients["kl"]})
    if (coefficient := coefficients["entropy"]) != 0.0:
        bonus = {"_entropy_bonus_enabled": True, "use_adaptive_entropy": False, "entropy_coef": coefficient}
        parts["entropy"] = LossTerm(off | bonus, of_run=own["entropy"] / coefficient)
    return parts
