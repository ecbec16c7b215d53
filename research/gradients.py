"""Where a policy's gradient comes from, by reward variance (arXiv 2604.06268, Figure 3).

The settings of an experiment name `MeasuresGradients` as their `variant`.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl.distributed import DistributedBackend

from ragen2_trl.filtering import group_score
from ragen2_trl.rollout_events import LocalRollout, listen, log_row
from ragen2_trl.trainers.batches import loss_mask, take
from ragen2_trl.trainers.ppo.critic import NAME as CRITIC

BUCKETS = 6  # the paper's
ENTROPY_COEF = 0.001  # the paper's, of the bonus that is measured where a run has none
PARTS = ("task", "kl", "entropy")


class MeasuresGradients:
    """
    Logs how large the gradients of the task and of the regularisers are for groups of low and of high reward variance.

    At the first optimizer step, midway and at the end, the groups of a generation are sorted into six buckets of
    reward variance, before any is dropped. The log row has, for bucket b from the lowest up,
    `grad/bucket_<b>/reward_std` and `min_reward_std`, the mean and the lowest reward standard deviation of its groups,
    and `grad/bucket_<b>/<part>/norm`, the norm of its mean sample's gradient: of the `task`, the `kl` penalty if the
    run has one, and the `entropy` bonus, with the paper's coefficient if the run has none. Training is left
    bit-identical.

    Raises:
        ValueError: Where a loss has no entropy bonus (RLOO), or parameters are in shards (FSDP, ZeRO-3).
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        check_can_measure(self)
        self._last_measured = 0
        listen(self, on_rollout=self._measure_if_due, all_rows=lambda: self._due_step() is not None)

    def _measure_if_due(self, local: LocalRollout) -> None:
        step = self._due_step()
        if step is not None:
            self._last_measured = step
            log_row(self, {f"grad/{key}": value for key, value in gradient_norms(self, local).items()})

    def _due_step(self) -> int | None:
        """The optimizer step that asks for the gradients of the current completions, if one does."""
        args, state = self.args, self.state  # type: ignore[attr-defined]
        every = max(1, state.max_steps // 2)
        per_generation = math.ceil(
            args.steps_per_generation * self.num_iterations / args.gradient_accumulation_steps  # type: ignore[attr-defined]
        )
        served = range(max(state.global_step, self._last_measured) + 1, state.global_step + per_generation + 1)
        return next((step for step in served if step == 1 or step % every == 0), None)


def check_can_measure(trainer: Any) -> None:
    """Raise a `ValueError` where gradients of the parts of a loss cannot be taken aside from training."""
    if "_entropy_bonus_enabled" not in vars(trainer):
        raise ValueError(f"the loss of {type(trainer).__name__} has no entropy bonus; allowed: GRPO and PPO.")
    if trainer.is_fsdp_enabled or DistributedBackend(trainer.accelerator).is_zero3:
        raise ValueError("gradients need whole parameters; allowed: one process, DDP, ZeRO-1 and 2.")


def gradient_norms(trainer: Any, local: LocalRollout) -> dict[str, float]:
    """The gradients of a generation by reward variance, see `MeasuresGradients`. A call for all processes together.

    Args:
        trainer: In training mode.
        local: What it has just sampled.
    """
    metrics: dict[str, float] = {}
    stds = group_score(local.rewards, "reward_std")
    size = local.rewards.shape[1]
    with losses_of(trainer, local) as (parts, norm):
        for number, groups in enumerate(quantile_buckets(stds, BUCKETS), 1):
            bucket = f"bucket_{number}"
            metrics[f"{bucket}/reward_std"] = stds[groups].mean().item()
            metrics[f"{bucket}/min_reward_std"] = stds[groups].min().item()
            rows = [group * size + member for group in groups for member in range(size)]
            metrics |= {f"{bucket}/{part}/norm": norm(rows, part) for part in parts}
    return metrics


def quantile_buckets(scores: Tensor, num_buckets: int) -> list[list[int]]:
    """Groups of equal score quantiles, from the lowest up, with as many groups each.

    Args:
        scores: (N,) what groups are ranked by; of equal ones the earlier comes first.
        num_buckets: How many; with fewer groups, each is a bucket of its own. A quantile that has one group more than
            others loses its highest.

    >>> quantile_buckets(torch.tensor([0.3, 0.0, 0.2, 0.5, 0.1, 0.4, 0.6]), 3)
    [[1, 4], [0, 5], [3, 6]]
    """
    order = scores.argsort(stable=True)
    quantiles = [part.tolist() for part in order.tensor_split(min(num_buckets, len(order)))]
    return [part[: len(quantiles[-1])] for part in quantiles]


@contextmanager
def losses_of(trainer: Any, local: LocalRollout) -> Iterator[tuple[list[str], Callable[[list[int], str], float]]]:
    """The parts of a trainer's loss, and a function that gives the gradient norm of one of them over some rows.

    Gradients go through the trainer's own `_compute_loss` on a shallow copy of it: whatever is set on the copy, and
    whatever the loss logs or counts, stays there. `torch.autograd.grad` neither fills `.grad` nor runs the hooks by
    which DDP and DeepSpeed take gradients up. No random state moves.
    """
    accelerator, model = trainer.accelerator, trainer.model
    aside = copy.copy(trainer)
    aside._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
    # What TRL divides by for micro-batches and windows, whichever way a release of it does, is 1.
    aside.current_gradient_accumulation_steps = 1
    aside.args = copy.copy(trainer.args)
    aside.args.steps_per_generation = 1
    aside.aux_loss_enabled = aside.use_adaptive_entropy = False
    batch = dict(local.batch)
    if hasattr(trainer, "_with_all_groups"):  # of our PPO, whose advantages are not TRL's
        with trainer.compute_loss_context_manager():
            batch = aside._with_all_groups(local.inputs, batch)
    own = len(batch["prompt_ids"])
    first = accelerator.process_index * own
    lengths = loss_mask(batch).sum(dim=1).float().mean()
    mean_length = accelerator.reduce(lengths, reduction="mean").clamp(min=1.0)  # tokens a row
    aside.accelerator = _Alone(accelerator)  # from here on for losses, of which processes have different numbers
    parameters = [p for n, p in model.named_parameters() if p.requires_grad and not n.startswith(f"{CRITIC}.")]
    beta = trainer.beta if "ref_per_token_logps" in batch else 0.0
    bonus = trainer.entropy_coef if trainer._entropy_bonus_enabled else ENTROPY_COEF

    def loss_of(rows: list[int], part: str) -> Tensor:
        """A mean over rows in which every token of the batch counts as it does in the whole batch: losses over the
        tokens of a generation divide by `num_items_in_batch`, means over those of a micro-batch are scaled."""
        inputs = take(batch, rows, trainer.pad_to_multiple_of)
        expected = len(rows) * mean_length
        if "num_items_in_batch" in inputs:
            inputs["num_items_in_batch"] = expected * accelerator.num_processes
        if part != "task":
            inputs["advantages"] = torch.zeros_like(inputs["advantages"])
        aside.beta = beta if part == "kl" else 0.0
        aside._entropy_bonus_enabled, aside.entropy_coef = part == "entropy", bonus
        with aside.compute_loss_context_manager():
            # Of the class: on the instance it is weighted for a micro-batch of training.
            loss: Tensor = type(aside)._compute_loss(aside, model, inputs)
        if part == "entropy" or trainer.loss_type == "bnpo":
            loss = loss * (loss_mask(inputs).sum() / expected)
        return loss

    def norm(rows: list[int], part: str) -> float:
        mine = [row - first for row in rows if first <= row < first + own]
        total = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
        size = trainer.args.per_device_train_batch_size
        for some in (mine[start : start + size] for start in range(0, len(mine), size)):
            loss = loss_of(some, part) * (len(some) / len(rows))
            for sum_, gradient in zip(total, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
                if gradient is not None:
                    sum_ += gradient
        squares = [accelerator.reduce(value, reduction="sum").square().sum() for value in total]
        return torch.stack(squares).sum().sqrt().item()

    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    with _checkpointed(model, trainer.args), torch.random.fork_rng(devices), torch.enable_grad():
        yield [part for part in PARTS if part != "kl" or beta != 0.0], norm


@contextmanager
def _checkpointed(model: Any, args: Any) -> Iterator[None]:
    """As in training, but in the way that `torch.autograd.grad` can go back through."""
    if args.gradient_checkpointing:
        usual = args.gradient_checkpointing_kwargs
        model.gradient_checkpointing_enable({**(usual or {}), "use_reentrant": False})
    try:
        yield
    finally:
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable(usual)


class _Alone:
    """An accelerator that waits for nobody. What a loss gathers are metrics, which are thrown away."""

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def _own(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor

    gather = reduce = pad_across_processes = gather_for_metrics = _own
