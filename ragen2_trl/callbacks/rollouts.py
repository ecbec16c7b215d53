"""What a TRL trainer has just sampled, handed to callbacks before the update begins."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import Trainer

Batch = dict[str, Any]


@dataclass(frozen=True)
class Rollout:
    """Completions of one generation over all processes: groups of G rows, one after the other.

    Args:
        prompt_ids: Ids of each of the B prompts, without padding.
        completion_ids: Ids of each of the B completions as they were sampled, without padding.
        tool_masks: Where there are turns, 1 for each id that the model wrote and 0 for the others.
        rewards: (N, G) weighted reward sums; NaN where no reward function gave a number.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_masks: list[list[int] | None]
    rewards: Tensor

    @property
    def group_size(self) -> int:
        return self.rewards.shape[1]


def watch_rollouts(trainer: Trainer, handle: Callable[[Batch, Tensor], None]) -> None:
    """Calls `handle(batch, rewards)` after each generation for training.

    `batch` is what TRL's `_generate_and_score_completions` returned on this process, `rewards` the (N, G) weighted
    sums over all of them. The weights are still those that sampled, and no row has been dropped. GRPO, RLOO and the
    trainers derived from them have this seam; ours calls it from `_sample_and_score`, once for each round of a refill.

    Raises:
        TypeError: If the trainer has no such method.
    """
    seam = "_sample_and_score" if hasattr(trainer, "_sample_and_score") else "_generate_and_score_completions"
    for name in (seam, "_calculate_rewards", "_metrics"):
        if not hasattr(trainer, name):
            raise TypeError(f"{type(trainer).__name__} has no {name}; allowed: GRPOTrainer, RLOOTrainer and kin.")
    generate, calculate = getattr(trainer, seam), trainer._calculate_rewards
    latest: list[Tensor] = []

    def calculate_rewards(*args: Any, **kwargs: Any) -> Tensor:
        latest[:] = [calculate(*args, **kwargs)]
        return latest[0]

    def generate_and_score(inputs: Any) -> Batch:
        batch = generate(inputs)
        if trainer.model.training:
            handle(batch, _group_rewards(trainer, latest[0]))
        return batch

    trainer._calculate_rewards = calculate_rewards
    setattr(trainer, seam, generate_and_score)


def gather_rollout(trainer: Trainer, batch: Batch, rewards: Tensor) -> Rollout:
    """The completions of a batch from all processes, on each of them."""
    pad = trainer._tokenizer.pad_token_id
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    completions = [_without_padding(ids.tolist(), pad) for ids in batch["completion_ids"]]
    masks: list[list[int] | None] = [None] * len(completions)
    if "tool_mask" in batch:
        masks = [mask[: len(ids)].tolist() for mask, ids in zip(batch["tool_mask"], completions, strict=True)]
    return Rollout(gather_object(prompts), gather_object(completions), gather_object(masks), rewards)


def _group_rewards(trainer: Trainer, per_func: Tensor) -> Tensor:
    rewards = (per_func * trainer.reward_weights.to(per_func.device)).nansum(dim=1)
    rewards = rewards.masked_fill(per_func.isnan().all(dim=1), torch.nan)
    return rewards.view(-1, trainer.num_generations).cpu()


def _without_padding(ids: list[int], pad: int) -> list[int]:
    # Not by `completion_mask`: `mask_truncated_completions` clears it for completions that were sampled all the same.
    end = len(ids)
    while end > 0 and ids[end - 1] == pad:
        end -= 1
    return ids[:end]
