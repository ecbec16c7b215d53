"""A trainer's policy outside of the update, as TRL takes it to generate."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from trl.distributed import DistributedBackend
from trl.models.utils import unwrap_model_for_generation


def model_for_generation(trainer: Any) -> AbstractContextManager[nn.Module]:
    """The policy without what wraps it and without gradient checkpointing; parameters of ZeRO-3 are gathered once, if
    the trainer gathers them to generate."""
    args = trainer.args
    settings = {"gather_deepspeed3_params": args.ds3_gather_for_generation}
    if "gradient_checkpointing_kwargs" in inspect.signature(unwrap_model_for_generation).parameters:  # not in TRL 1.12
        settings["gradient_checkpointing_kwargs"] = args.gradient_checkpointing_kwargs
    return unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator, **settings)


def whole_model(trainer: Any) -> AbstractContextManager[nn.Module]:
    """The policy as it is, except that parameters of ZeRO-3 are gathered once and not for every forward pass."""
    if DistributedBackend(trainer.accelerator).is_zero3:
        return model_for_generation(trainer)
    return nullcontext(trainer.model)
