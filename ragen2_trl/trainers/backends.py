"""What shards a run or a checkpoint: nothing, DeepSpeed's ZeRO, or FSDP. A checkpoint resumes under its own alone.

transformers resumes a checkpoint of ZeRO without ZeRO, and leaves out optimizer and scheduler without a word. The
other pairs end in errors that name neither side.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

PLAIN = "no sharding (DDP, or one process)"
# Stages 1 and 2 write the same files, and read each other's.
DEEPSPEED = {0: "DeepSpeed without ZeRO", 1: "DeepSpeed ZeRO-1 or ZeRO-2", 3: "DeepSpeed ZeRO-3"}
_OPTIMIZER_SHARD = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")
_WEIGHTS_SHARD = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt$")


@dataclass(frozen=True)
class Backend:
    """What shards.

    Args:
        name: In words.
        processes: Number that the files of a checkpoint are tied to; `None` where any number reads them.
    """

    name: str
    processes: int | None = None

    def __str__(self) -> str:
        return self.name if self.processes is None else f"{self.name} on {self.processes} processes"


def backend_of(accelerator: Accelerator) -> Backend:
    """That of a run."""
    deepspeed = accelerator.state.deepspeed_plugin
    if deepspeed is not None:
        stage = deepspeed.zero_stage
        return Backend(DEEPSPEED[1 if stage == 2 else stage], accelerator.num_processes if stage else None)
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)  # only there with FSDP
    return Backend(PLAIN) if fsdp is None else _fsdp(fsdp.state_dict_type.name)


def backend_that_saved(checkpoint: Path) -> Backend:
    """That of a checkpoint, of any trainer's, by its files."""
    if any(checkpoint.glob("global_step*/")):
        names = [path.name for path in checkpoint.glob("global_step*/*")]
        shards = {found[1] for name in names if (found := _OPTIMIZER_SHARD.search(name))}
        stage = 3 if any(map(_WEIGHTS_SHARD.search, names)) else min(1, len(shards))
        return Backend(DEEPSPEED[stage], len(shards) or None)
    whole, parts = checkpoint / "pytorch_model_fsdp.bin", checkpoint / "pytorch_model_fsdp_0"
    if whole.exists() or parts.exists():
        return _fsdp("FULL_STATE_DICT" if whole.exists() else "SHARDED_STATE_DICT")
    return Backend(PLAIN)


def _fsdp(state_dict_type: str) -> Backend:
    return Backend(f"FSDP with {state_dict_type}")


def check_backend(checkpoint: Path, accelerator: Accelerator) -> None:
    """Raise a `ValueError` for a checkpoint that another backend, or another number of processes, has saved."""
    saved, runs = backend_that_saved(checkpoint), backend_of(accelerator)
    deepspeed = accelerator.state.deepspeed_plugin
    if deepspeed is not None and deepspeed.hf_ds_config.get_value("checkpoint.load_universal", False):
        return  # the user has converted it for any stage and number of processes
    if saved != runs:
        raise ValueError(
            f"resume_from_checkpoint={str(checkpoint)!r} was saved with {saved}. This run has {runs}, which cannot "
            f"load that optimizer and scheduler; allowed: a run with {saved}, or a new run that begins with the "
            "checkpoint's weights."
        )
