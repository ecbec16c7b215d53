"""Trains PPO through a checkpoint and again from it, on two processes.

python -m torch.distributed.run --standalone --nproc_per_node=2 ppo_resume.py BACKEND POLICY FOLDER
"""

import sys
from pathlib import Path

import torch
from accelerate import PartialState
from backends import ADAM, COMMON, PPO, REPLAYED, is_sharded, parameters_of, start
from conftest import PROMPTS
from ending import end
from replayed import make_trainer


def train(policy_path: str, folder: str, resume: str | None = None, **backend):
    case = {**PPO, **ADAM, "value_head": "separate", "critic_lr": 1e-3, "critic_warmup_steps": 1, "max_steps": 4}
    replayed = {name: case.pop(name) for name in REPLAYED if name in case}
    rows = case.pop("rows") // 2
    saving = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
    settings = {**COMMON, **case, **saving, "per_device_train_batch_size": rows, "output_dir": folder, **backend}
    trainer = make_trainer(policy_path, settings, PROMPTS, **replayed)
    assert trainer.accelerator.num_processes == 2
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main() -> None:
    backend, policy_path, folder = sys.argv[1:]
    settings = {**start(backend), "ddp_backend": "gloo"}
    if backend == "zero3":
        settings["deepspeed"]["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    trainer = train(policy_path, folder, **settings)
    if backend == "zero3":
        assert is_sharded(trainer)
    whole = parameters_of(trainer)
    trainer.save_model(str(Path(folder) / "final"))
    del trainer
    resumed = parameters_of(train(policy_path, folder, str(Path(folder) / "checkpoint-2"), **settings))
    if PartialState().is_main_process:
        torch.save({"whole": whole, "resumed": resumed}, Path(folder) / "parameters.pt")


if __name__ == "__main__":
    main()
    end()
