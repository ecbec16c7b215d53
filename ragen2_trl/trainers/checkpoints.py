"""What a checkpoint of a filtered run holds beside TRL's, and a sampler that a resumed run reads on from."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object, send_to_device
from torch.utils.data import Sampler
from transformers import Trainer
from trl.trainer.utils import RepeatSampler

logger = get_logger(__name__)

STATE_FILE = "snr_state_{rank}.pt"
# Settings by which a generation batch is laid out: under others, one in progress cannot go on.
LAYOUT_FIELDS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_generations",
    "num_iterations",
)


class ResumableSampler(Sampler[int]):
    """TRL's sampler, with the permutation of the current epoch also in a process that starts at a later one."""

    def __init__(self, sampler: RepeatSampler, trainer: Trainer):
        self.sampler = sampler
        self.trainer = trainer
        self.begun = False

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle and not self.begun:
            for _ in range(int(self.trainer.state.epoch or 0)):
                torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)
        self.begun = True
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def save_state(folder: str, rank: int, layout: dict[str, Any], shared: dict[str, Any], own: dict[str, Any]) -> None:
    """Write one process's part into a checkpoint.

    Args:
        folder: of the checkpoint.
        rank: of the process.
        layout: what `own` cannot be read under another value of.
        shared: the same on every process.
        own: of this process alone.
    """
    os.makedirs(folder, exist_ok=True)
    torch.save({"layout": layout, "shared": shared, "own": own}, os.path.join(folder, STATE_FILE.format(rank=rank)))


def load_state(
    folder: str | None, accelerator: Accelerator, layout: dict[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """What `save_state` wrote: the shared part, and this process's own. A call for all processes together.

    Returns:
        `None` for both where the checkpoint is of TRL's own trainer; `None` for the second where the layout differs.
    """
    path = folder and os.path.join(folder, STATE_FILE.format(rank=accelerator.process_index))
    state = None
    if path and os.path.exists(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
    # What all processes share comes from the first of them: others may be new, or on another machine.
    (shared,) = broadcast_object_list([state and state["shared"]])
    if shared is None:
        return None, None
    layouts = gather_object([state and state["layout"]])
    if any(other != layout for other in layouts):
        logger.warning(
            f"The checkpoint was written with {layouts[0]} and is resumed with {layout}: the generation batch in "
            "progress and groups that wait for the next, if any, are sampled again."
        )
        return shared, None
    assert state is not None  # as its layout is this one
    return shared, send_to_device(state["own"], accelerator.device)
