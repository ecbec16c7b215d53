"""What shards a run or a checkpoint: nothing, DeepSpeed's ZeRO, or FSDP. A checkpoint resumes under its own alone.

transformers resumes a checkpoint of ZeRO without ZeRO, and leaves out optimizer and scheduler without a word. The
other pairs end in errors that name neither side.
"""

import re
from pathlib import Path

from accelerate import Accelerator

PLAIN = "no sharding (DDP, or one process)"
FSDP = "FSDP with {}"
# Stages 1 and 2 write the same files, and read each other's.
DEEPSPEED = {0: "DeepSpeed without ZeRO", 1: "DeepSpeed ZeRO-1 or ZeRO-2", 3: "DeepSpeed ZeRO-3"}
_OPTIMIZER_SHARD = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")
_WEIGHTS_SHARD = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt$")


def backend_of(accelerator: Accelerator) -> str:
    """That of a run, in words; of ZeRO's shards with the number of processes that its files are tied to."""
    deepspeed = accelerator.state.deepspeed_plugin
    if deepspeed is not None:
        stage = deepspeed.zero_stage
        return _deepspeed(1 if stage == 2 else stage, accelerator.num_processes if stage else 0)
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)  # only there with FSDP
    return PLAIN if fsdp is None else FSDP.format(fsdp.state_dict_type.name)


def backend_that_saved(checkpoint: Path) -> str:
    """That of a checkpoint, of any trainer's, by its files."""
    if any(checkpoint.glob("global_step*/")):
        names = [path.name for path in checkpoint.glob("global_step*/*")]
        shards = {found[1] for name in names if (found := _OPTIMIZER_SHARD.search(name))}
        return _deepspeed(3 if any(map(_WEIGHTS_SHARD.search, names)) else min(1, len(shards)), len(shards))
    if (checkpoint / "pytorch_model_fsdp.bin").exists():
        return FSDP.format("FULL_STATE_DICT")
    return FSDP.format("SHARDED_STATE_DICT") if (checkpoint / "pytorch_model_fsdp_0").exists() else PLAIN


def _deepspeed(stage: int, processes: int) -> str:
    return DEEPSPEED[stage] + (f" on {processes} processes" if processes else "")


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
