"""What a TRL trainer has just sampled, handed to callbacks before the update begins."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerState
from trl import RLOOTrainer

from ragen2_trl.callbacks.cost import outside_of_costs
from ragen2_trl.columns import TURN_SAMPLES
from ragen2_trl.filtering import zero_variance

logger = get_logger(__name__)

Batch = dict[str, Any]


@dataclass(frozen=True)
class Rollout:
    """Completions of one generation over all processes: groups of G rows, one after the other.

    Args:
        prompt_ids: Ids of each of the B prompts, without padding.
        completion_ids: Ids of each of the B completions as they were sampled, without padding.
        tool_masks: Where there are turns, 1 for each id that the model wrote and 0 for the others.
        rewards: (N, G) weighted reward sums; NaN where no reward function gave a number.
        later: Of each completion, the samples of its episode after this one (see `ContextWindow`).
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_masks: list[list[int] | None]
    rewards: Tensor
    later: list[list[dict[str, Any]]]

    @property
    def group_size(self) -> int:
        return self.rewards.shape[1]


@dataclass(frozen=True)
class Sampled:
    """What one generation sampled on this process, as ids without padding, and the rewards of all processes.

    Args:
        prompt_ids, completion_ids, tool_masks: as in `Rollout`, this process's part.
        has_images: whether prompts came with images.
        rewards: (N, G), see `Rollout`.
        inputs: the rows of the dataset, as the trainer was given them.
        batch: what it made of them, before any row is dropped.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_masks: list[list[int] | None]
    has_images: bool
    rewards: Tensor
    inputs: list[dict[str, Any]]
    batch: Batch

    @property
    def later(self) -> list[list[dict[str, Any]]]:
        """As in `Rollout`, this process's part."""
        return [row.get(TURN_SAMPLES, []) for row in self.inputs]


def watch_rollouts(trainer: Trainer, handle: Callable[[Sampled], None]) -> None:
    """Calls `handle` after each generation for training, with the weights that sampled and before any row is dropped.

    The seam is TRL's `_generate_and_score_completions`, and `_sample_first` of our trainer, which leaves out the
    rounds of a refill. What was sampled is taken from `_generate`, whose lists are whole: later on,
    `mask_truncated_completions` clears the masks of completions that were sampled all the same.

    Raises:
        TypeError: If the trainer has no such method.
    """
    seam = "_sample_first" if hasattr(trainer, "_sample_first") else "_generate_and_score_completions"
    for name in (seam, "_generate", "_calculate_rewards", "_metrics"):
        if not hasattr(trainer, name):
            raise TypeError(f"{type(trainer).__name__} has no {name}; allowed: GRPOTrainer, RLOOTrainer and kin.")
    latest: dict[str, Any] = {}

    def keep(name: str) -> None:
        method = getattr(trainer, name)

        def kept(*args: Any, **kwargs: Any) -> Any:
            latest[name] = method(*args, **kwargs)
            return latest[name]

        setattr(trainer, name, kept)

    keep("_generate")
    keep("_calculate_rewards")
    sample = getattr(trainer, seam)

    def sample_and_handle(inputs: Any) -> Batch:
        batch = sample(inputs)
        if trainer.model.training:
            prompt_ids, completion_ids, masks, *_ = latest["_generate"]
            if masks is None or isinstance(trainer, RLOOTrainer):  # its third value is something else
                masks = [None] * len(completion_ids)
            has_images = batch.get("pixel_values") is not None
            rewards = _group_rewards(trainer, latest["_calculate_rewards"])
            ids = (_lists(prompt_ids), _lists(completion_ids), _lists(masks))
            with outside_of_costs(trainer):
                handle(Sampled(*ids, has_images, rewards, inputs, batch))
        return batch

    setattr(trainer, seam, sample_and_handle)


def gather_rollout(sampled: Sampled) -> Rollout:
    """The completions of all processes, on each of them."""
    parts = (sampled.prompt_ids, sampled.completion_ids, sampled.tool_masks, sampled.later)
    prompt_ids, completion_ids, tool_masks, later = (gather_object(part) for part in parts)
    return Rollout(prompt_ids, completion_ids, tool_masks, sampled.rewards, later)


def group_metrics(rollout: Rollout) -> dict[str, float]:
    """Why groups have no reward variance: shares of all groups, under `mi/groups/`.

    `identical_completions`: all G are the same ids. `equal_rewards`: completions differ and their rewards do not.
    `zero_variance`: rewards do not vary, for either reason.
    """
    size = rollout.group_size
    episodes = zip(rollout.completion_ids, rollout.later, strict=True)
    texts = [(*map(tuple, [ids, *(sample["completion_ids"] for sample in later)]),) for ids, later in episodes]
    identical = torch.tensor([len(set(texts[i : i + size])) == 1 for i in range(0, len(texts), size)])
    constant = zero_variance(rollout.rewards)
    return {
        "mi/groups/identical_completions": identical.float().mean().item(),
        "mi/groups/equal_rewards": (constant & ~identical).float().mean().item(),
        "mi/groups/zero_variance": constant.float().mean().item(),
    }


def _lists(rows: list[Any]) -> list[Any]:
    return [None if row is None else list(map(int, row)) for row in rows]


def check_own_trainer(callback: TrainerCallback, trainer: Trainer, state: TrainerState) -> None:
    """Raise a `ValueError` if a callback that was made for one trainer has been added to another."""
    if state is not trainer.state:
        raise ValueError(
            f"{type(callback).__name__} was made for another {type(trainer).__name__} than it was added to; allowed: "
            f"trainer.add_callback({type(callback).__name__}(trainer))."
        )


def warn_of_unequal_prompts(rollout: Rollout, groups: list[int]) -> None:
    """Once, of groups that are not the answers to one question."""
    prompts: dict[int, set[tuple[int, ...]]] = {}
    for group, prompt in zip(groups, rollout.prompt_ids, strict=True):
        prompts.setdefault(group, set()).add(tuple(prompt))
    group = next((group for group, distinct in prompts.items() if len(distinct) > 1), None)
    if group is not None:
        logger.warning_once(
            f"The completions of group {group} have {len(prompts[group])} different prompts. Each is scored as a "
            "prompt of its own, but advantages within such a group compare answers to different questions."
        )


def is_newest(callback: TrainerCallback, trainer: Trainer) -> bool:
    """Whether no later callback of its class takes its place: a cell of a notebook that is run again adds another."""
    of_class = [other for other in trainer.callback_handler.callbacks if type(other) is type(callback)]
    return bool(of_class) and of_class[-1] is callback


def _group_rewards(trainer: Trainer, per_func: Tensor) -> Tensor:
    rewards = (per_func * trainer.reward_weights.to(per_func.device)).nansum(dim=1)
    rewards = rewards.masked_fill(per_func.isnan().all(dim=1), torch.nan)
    return rewards.view(-1, trainer.num_generations).cpu()
