"""Training runs that every backend must end with the same parameters, and what starts them on two processes.

python -m torch.distributed.run --standalone --nproc_per_node=2 backends.py BACKEND POLICY FOLDER CASE...
"""

import importlib
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from ending import end
from torch.distributed.tensor import DTensor

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]  # tests, and research

from conftest import PROMPTS
from peft import LoraConfig
from replay import GROUP_SIZE
from replayed import make_trainer
from trl.rewards import think_format_reward  # noqa: F401 -- imports TRL before deepspeed looks at it

from ragen2_trl import MutualInformationCallback
from ragen2_trl.rollout_events import listen, log_row
from research.gradients import gradient_norms

COMMON = {
    "num_generations": GROUP_SIZE,
    "max_completion_length": 10,
    "max_steps": 2,
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "beta": 0.1,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "shuffle_dataset": False,
    "seed": 3,
}
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.1}
REPLAYED = ("algorithm", "turns", "equal_lengths", "flat_steps")  # what of a case is not for the configuration
LOSSES = ("grpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")
# Rows of all processes together in a micro-step, and micro-steps. Half of the groups are kept: there are micro-steps
# that are skipped.
LAYOUT = {"rows": 8, "gradient_accumulation_steps": 4}
CASES = {
    **{f"filtered {loss}": {**LAYOUT, "loss_type": loss} for loss in LOSSES},
    "filtered bnpo": {**LAYOUT, "loss_type": "bnpo", "equal_lengths": True},
    "filtered without kl": {**LAYOUT, "beta": 0.0},
    "filtered with adam": {**LAYOUT, **ADAM, "max_steps": 3},
    # In two passes, so that there are old log-probs, which waiting groups bring along.
    "refilled": {
        **{**LAYOUT, "snr_dynamic_sampling_rounds": 4, "snr_strategy": "nonzero"},
        **{"num_iterations": 2, "max_steps": 5},
    },
    "with gradient checkpointing": {**LAYOUT, "gradient_checkpointing": True},
    # Only under ZeRO-3 does it make a difference: the model is scored without being gathered.
    "scored while sharded": {**LAYOUT, "ds3_gather_for_generation": False},
    # The second of three steps has no reward variance at all.
    "an empty step between": {**LAYOUT, **ADAM, "max_steps": 3, "flat_steps": [1]},
}
RLOO = {**LAYOUT, "algorithm": "rloo"}
RLOO_CASES = {
    "rloo": RLOO,
    "rloo normalised": {**RLOO, "normalize_advantages": True, "num_iterations": 2},
    "rloo refilled": {**RLOO, "snr_dynamic_sampling_rounds": 4, "snr_strategy": "nonzero", "max_steps": 3},
    "rloo, an empty step between": {**RLOO, **ADAM, "max_steps": 3, "flat_steps": [1]},
}
# Three steps: the critic's head begins at 0, and what lies below it learns from the second one on.
PPO = {**LAYOUT, "algorithm": "ppo", "critic_lr": 0.1, "max_steps": 3}
SEPARATE = {**PPO, "value_head": "separate"}
TURNS = {"turns": True, "gamma": 0.9, "gae_lambda": 0.8}
PPO_CASES = {
    "ppo": {**PPO, "gae_lambda": 0.9},
    "ppo with a critic of its own": {**SEPARATE, **TURNS},
    "ppo in two passes": {**SEPARATE, "num_iterations": 2, "value_clip": 0.0},
    "ppo refilled": {**PPO, **TURNS, "snr_dynamic_sampling_rounds": 4, "snr_strategy": "nonzero"},
    "ppo with a critic of its own refilled": {**SEPARATE, "snr_dynamic_sampling_rounds": 4, "snr_strategy": "nonzero"},
    "ppo with gradient checkpointing": {**SEPARATE, "gradient_checkpointing": True},
    "ppo, the critic first": {**PPO, "critic_warmup_steps": 2, "max_steps": 4},
    "ppo, an empty step between": {
        **SEPARATE,
        **ADAM,
        "critic_lr": 1e-3,
        "critic_warmup_steps": 1,
        "flat_steps": [1],
        "max_steps": 4,
    },
}
# Not for FSDP and ZeRO-3, whose shards are refused.
GRADIENTS = {"gradients": True, "max_steps": 2}
GRADIENT_CASES = {
    "gradients by reward variance": {**LAYOUT, **GRADIENTS, "loss_type": "dapo", "gradient_checkpointing": True},
    "gradients of ppo": {**SEPARATE, **GRADIENTS},
}
CASES |= {**RLOO_CASES, **PPO_CASES, **GRADIENT_CASES}
# Two optimizer steps a generation, of which the second has no reward variance; clipped. Which rows a step has depends
# on the number of processes in TRL, too, so these are compared with TRL on as many: a filter that keeps everything.
LOSSLESS = {
    **{"rows": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "flat_steps": [2]},
    **{**ADAM, "adam_epsilon": 1e-6, "beta": 0.0, "max_grad_norm": 0.5, "max_steps": 5, "snr_strategy": "lossless"},
}
TWO_PASSES = {"num_iterations": 2, "gradient_checkpointing": True}
LOSSLESS_CASES = {
    **{f"lossless {loss}": {**LOSSLESS, "loss_type": loss} for loss in (*LOSSES, "bnpo")},
    "lossless rloo, checkpointing, in two passes": {**LOSSLESS, **TWO_PASSES, "algorithm": "rloo"},
    "lossless dapo, checkpointing, in two passes": {**LOSSLESS, **TWO_PASSES, "loss_type": "dapo"},
}
AS_TRL = {f"{name} as TRL": {**case, "snr_strategy": "all"} for name, case in LOSSLESS_CASES.items()}
CASES |= {**LOSSLESS_CASES, **AS_TRL}
LORA_CASES = (
    *("lossless grpo", "lossless grpo as TRL"),
    *("gradients by reward variance", "filtered dapo", "with gradient checkpointing", "an empty step between", "rloo"),
    *("ppo", "ppo with a critic of its own", "ppo with gradient checkpointing", "ppo, an empty step between"),
)
# Six groups of four over three processes of four rows each.
THREE = {"rows": 12, "gradient_accumulation_steps": 2, "prompts": 6}
# Eight rows are kept of three groups.
UNEVEN = {"rows": 12, "gradient_accumulation_steps": 1, "prompts": 3}
CASES_OF_THREE = {
    "gradients by three": {**THREE, "gradients": True},
    "filtered by three": THREE,
    "refilled by three": {**THREE, "snr_dynamic_sampling_rounds": 2},
    "rloo by three": {**THREE, "algorithm": "rloo"},
    "ppo by three": {**PPO, **THREE},
    "ppo refilled by three": {**SEPARATE, **TURNS, **THREE, "snr_dynamic_sampling_rounds": 2},
    "unevenly by three": UNEVEN,
    "rloo unevenly by three": {**UNEVEN, "algorithm": "rloo"},
    "ppo unevenly by three": {**PPO, **UNEVEN},
    "refilled unevenly by three": {**UNEVEN, "prompts": 6, "snr_dynamic_sampling_rounds": 2},
}


def cases_of(backend: str) -> dict[str, dict]:
    """The cases of a backend, which says in its name what is special: `_lora`, `_three` processes."""
    if backend.endswith("_three"):
        return CASES_OF_THREE
    cases = {name: CASES[name] for name in LORA_CASES} if backend.endswith("_lora") else CASES
    if backend.startswith(("fsdp2", "zero3")):
        return {name: case for name, case in cases.items() if name not in GRADIENT_CASES}
    return cases


def processes_of(backend: str) -> int:
    return 3 if backend.endswith("_three") else 2


def run_case(policy_path: str, folder: str, case: dict, processes: int, lora: bool = False, **backend):
    """Final parameters of a case, whole and on the CPU, and its log rows."""
    case = dict(case)
    replayed = {name: case.pop(name) for name in REPLAYED if name in case}
    rows = case.pop("rows") // processes
    prompts = PROMPTS[: case.pop("prompts", len(PROMPTS))]
    gradients = case.pop("gradients", False)
    settings = {**COMMON, **case, "per_device_train_batch_size": rows, "output_dir": folder, **backend}
    adapters = LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear") if lora else None
    trainer = make_trainer(policy_path, settings, prompts, **replayed, peft_config=adapters)
    assert trainer.accelerator.num_processes == processes
    trainer.add_callback(MutualInformationCallback(trainer, every=1, num_completions=12))
    if gradients:
        measure = lambda local: log_row(trainer, {f"grad/{k}": v for k, v in gradient_norms(trainer, local).items()})  # noqa: E731
        listen(trainer, on_rollout=measure, all_rows=lambda: True)
    trainer.train()
    return parameters_of(trainer), [row for row in trainer.state.log_history if "reward" in row], trainer


def parameters_of(trainer) -> dict[str, torch.Tensor]:
    named = dict(trainer.model.named_parameters())
    if hasattr(next(iter(named.values())), "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(named.values())):
            return {name: parameter.detach().clone() for name, parameter in named.items()}
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in named.items()}
    return {name.removeprefix("module."): parameter.detach().clone() for name, parameter in full.items()}


def deepspeed_config(stage: int) -> dict:
    zero = {"stage": stage}
    if stage == 3:  # otherwise a model this small is never split
        names = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
        zero |= {f"stage3_{name}": 0 for name in names}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }


def start(backend: str) -> dict:
    """Sets a backend up and returns its training arguments."""
    if backend.startswith("zero"):
        import deepspeed

        # Its shared-memory operators take minutes to compile, and gloo does without them.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        deepspeed.init_distributed(dist_backend="gloo")
        return {"deepspeed": deepspeed_config(int(backend[4]))}
    PartialState(cpu=True, backend="gloo")
    if backend == "fsdp2":
        initialize = AcceleratorState.__init__

        def with_fsdp_on_cpu(self, *args, fsdp_plugin=None, **kwargs):
            initialize(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
            if fsdp_plugin is not None:
                self.fsdp_plugin = fsdp_plugin
            if getattr(self, "fsdp_plugin", None) is not None:  # accelerate makes it plain DDP on a CPU
                self.distributed_type = DistributedType.FSDP

        AcceleratorState.__init__ = with_fsdp_on_cpu
        return {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}}
    return {}


def is_sharded(trainer) -> bool:
    """Whether no process holds a whole parameter, the critic's included."""
    parameters = list(trainer.model.parameters())
    return all(isinstance(p, DTensor) for p in parameters) or all(
        getattr(p, "ds_status", None) is not None and p.ds_status.name == "NOT_AVAILABLE" for p in parameters
    )


def main() -> None:
    backend, policy_path, folder, *names = sys.argv[1:]
    settings = start(backend.split("_")[0])
    lora = backend.endswith("_lora")
    results = {}
    for name in names:
        parameters, rows, trainer = run_case(
            policy_path, folder, cases_of(backend)[name], processes_of(backend), lora, ddp_backend="gloo", **settings
        )
        if backend.startswith(("zero3", "fsdp2")):
            assert is_sharded(trainer)
        results[name] = {"parameters": parameters, "rows": rows}
        del trainer
    if PartialState().is_main_process:
        torch.save(results, Path(folder) / "results.pt")


if __name__ == "__main__":
    main()
    end()
