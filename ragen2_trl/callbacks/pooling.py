"""Generations that are measured together, where each has too few prompts to be measured by itself."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ragen2_trl.rollout_events import Rollout, extend
from ragen2_trl.saved_state import load_tensors, replace_whole
from ragen2_trl.trainers.stock import StockTrainer

POOL_FILE = "_mutual_information_pool.pt"


@dataclass
class Generation:
    """What one generation sampled over all processes.

    Args:
        rollout: Its completions.
        step: Optimizer steps before it.
        selection: (N,) scores and (N,) kept groups of a filter, once it has chosen.
        beside: From `logged_beside`.
    """

    rollout: Rollout
    step: int
    selection: tuple[Tensor, Tensor] | None = None
    beside: dict[str, float] = field(default_factory=dict)


class Pool:
    """The latest generations, as few as hold `min_prompts` groups.

    A checkpoint takes it along in a file of its own: it holds what a model wrote, and the trainer's state, which is
    uploaded, must not.

    Args:
        trainer: Whose generations they are.
        min_prompts: Groups that a measurement needs.
    """

    def __init__(self, trainer: StockTrainer, min_prompts: int):
        self.trainer = trainer
        self.min_prompts = min_prompts
        self.generations: list[Generation] = []
        self._checkpoint: str | None = None  # that training is about to resume from
        extend(trainer, "_load_optimizer_and_scheduler", self._note_checkpoint)

    def _note_checkpoint(self, load: Callable[[str | None], None], checkpoint: str | None) -> None:
        self._checkpoint = checkpoint
        load(checkpoint)

    @property
    def num_prompts(self) -> int:
        """Groups, those with the same prompt included."""
        return sum(len(generation.rollout.rewards) for generation in self.generations)

    @property
    def is_full(self) -> bool:
        return self.num_prompts >= self.min_prompts

    def add(self, generation: Generation) -> None:
        self.generations.append(generation)
        while self.num_prompts - len(self.generations[0].rollout.rewards) >= self.min_prompts:
            del self.generations[0]

    def take(self) -> list[Generation]:
        """All of them; no completion is measured twice."""
        taken, self.generations = self.generations, []
        return taken

    def save(self) -> None:
        """Into the checkpoint that the trainer has just written."""
        if self.generations and self.trainer.is_world_process_zero():
            folder = Path(self.trainer._get_output_dir(trial=None))
            values = [{**vars(one), "rollout": vars(one.rollout)} for one in self.generations]
            checkpoint = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.trainer.state.global_step}"
            replace_whole(checkpoint / POOL_FILE, partial(torch.save, values))

    def begin_run(self) -> None:
        """With what `save` has written, where training resumes. A call for all processes together."""
        path = self._checkpoint and Path(self._checkpoint) / POOL_FILE
        self._checkpoint = None
        values = load_tensors(path, list[Generation]) if path and path.exists() else []
        (values,) = broadcast_object_list([values])  # from the first process: others may be on another machine
        generations = [Generation(**{**one, "rollout": Rollout(**one["rollout"])}) for one in values]
        size = self.trainer.num_generations
        self.generations = [one for one in generations if one.rollout.group_size == size]


def joined(generations: list[Generation]) -> Rollout:
    """Their groups, one generation after the other."""
    rollouts = [generation.rollout for generation in generations]
    return Rollout(
        prompt_ids=[ids for rollout in rollouts for ids in rollout.prompt_ids],
        completion_ids=[ids for rollout in rollouts for ids in rollout.completion_ids],
        tool_masks=[mask for rollout in rollouts for mask in rollout.tool_masks],
        rewards=torch.cat([rollout.rewards for rollout in rollouts]),
        turn_samples=[samples for rollout in rollouts for samples in rollout.turn_samples],
    )


def joined_selection(generations: list[Generation]) -> tuple[Tensor, Tensor] | None:
    """(n,) scores and (n,) kept groups of all; `None` without a filter."""
    selections = [generation.selection for generation in generations]
    if any(selection is None for selection in selections):
        return None
    scores, kept = zip(*selections, strict=True)
    return torch.cat(scores), torch.cat(kept)


def what_layout_means(trainer: StockTrainer, min_prompts: int) -> str | None:
    """What a layout makes of measurements, and the setting that would change it; `None` if a generation suffices."""
    args = trainer.args
    groups = args.generation_batch_size // args.num_generations
    columns = getattr(trainer.train_dataset, "column_names", None) or ()
    if groups >= min_prompts or {"image", "images"} & set(columns):  # whose completions are not measured
        return None
    steps = args.steps_per_generation * trainer.num_iterations / args.gradient_accumulation_steps  # a generation
    whole = f"generation_batch_size={-(-min_prompts // groups) * args.generation_batch_size}"
    sized = hasattr(trainer.train_dataset, "__len__")
    in_all = len(trainer.train_dataset) * args.num_train_epochs if sized else torch.inf
    in_all = groups * ceil(args.max_steps / steps) if args.max_steps > 0 else in_all
    if in_all < min_prompts:
        return (
            f"Mutual information will not be measured: the run samples {in_all:g} prompts, and a measurement takes "
            f"min_prompts={min_prompts}. What would change that: {whole}, a longer run, or fewer min_prompts."
        )
    apart = ceil((ceil(min_prompts / groups) - 1) * steps)
    return (
        f"Mutual information is measured on {min_prompts} prompts (min_prompts), and a generation has {groups}: the "
        f"latest generations are pooled, the first of them sampled up to {apart} optimizer steps before the weights "
        f"that score it (mi/pooled_steps). What would change that: {whole}."
    )
