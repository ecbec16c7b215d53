"""A checkpoint resumes only under the backend that saved it; any other is refused, and the error names both."""

from types import SimpleNamespace

import pytest
import torch
from conftest import RUN
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, cli
from ragen2_trl.trainers.backends import check_backend

PLAIN = ("model.safetensors", "optimizer.pt", "scheduler.pt")


def zero(processes, weights="mp_rank_00_model_states.pt", prefix=""):
    shards = [f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(processes)]
    return ("model.safetensors", "latest", *(f"global_step2/{name}" for name in (*shards, weights)))


def run(processes=1, stage=None, fsdp=None, universal=False):
    """The accelerator of a run."""
    config = SimpleNamespace(get_value=lambda name, default: universal if "universal" in name else default)
    deepspeed = None if stage is None else SimpleNamespace(zero_stage=stage, hf_ds_config=config)
    state = SimpleNamespace(deepspeed_plugin=deepspeed)
    if fsdp is not None:
        state.fsdp_plugin = SimpleNamespace(state_dict_type=SimpleNamespace(name=fsdp))
    return SimpleNamespace(state=state, num_processes=processes)


SAVED = {
    "plain": PLAIN,
    "ZeRO-0": zero(0),
    "ZeRO-1 or 2 on 2": zero(2),
    "ZeRO-1 or 2 on 4, in bfloat16": zero(4, prefix="bf16_"),
    "ZeRO-3 on 2": zero(2, "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    "FSDP, whole": ("pytorch_model_fsdp.bin", "optimizer.bin"),
    "FSDP, in shards": ("pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/__0_0.distcp"),
}
RUNS = {
    "plain": (run(), run(2), run(8)),
    "ZeRO-0": (run(2, 0), run(4, 0)),
    "ZeRO-1 or 2 on 2": (run(2, 1), run(2, 2)),
    "ZeRO-1 or 2 on 4, in bfloat16": (run(4, 2),),
    "ZeRO-3 on 2": (run(2, 3),),
    "FSDP, whole": (run(2, fsdp="FULL_STATE_DICT"), run(4, fsdp="FULL_STATE_DICT")),
    "FSDP, in shards": (run(2, fsdp="SHARDED_STATE_DICT"), run(4, fsdp="SHARDED_STATE_DICT")),
}


def checkpoint_of(files, folder):
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not (folder / name).exists():
            torch.save({}, folder / name)
    return folder


@pytest.mark.parametrize("saved", SAVED)
def test_a_checkpoint_resumes_under_its_own_backend_alone(saved, tmp_path):
    checkpoint = checkpoint_of(SAVED[saved], tmp_path)
    for backend, runs in RUNS.items():
        for accelerator in runs:
            if backend == saved:
                check_backend(checkpoint, accelerator)
            else:
                with pytest.raises(ValueError, match=r"was saved with .*\. This run has .*allowed: a run with "):
                    check_backend(checkpoint, accelerator)


def test_a_converted_checkpoint_resumes_under_any_stage_and_number_of_processes(tmp_path):
    check_backend(checkpoint_of(zero(2), tmp_path), run(4, 3, universal=True))


def test_a_checkpoint_of_trl_with_zero_is_refused_in_a_plain_run(policy_path, tmp_path, capsys):
    prompts = Dataset.from_dict({"prompt": [f"Go {number}" for number in range(8)]})
    saving = {**RUN, "max_steps": 1, "save_steps": 1, "save_strategy": "steps", "output_dir": str(tmp_path)}

    def reward(completions, **columns):
        return [float(len(text)) for text in completions]

    GRPOTrainer(policy_path, reward, GRPOConfig(**saving), prompts).train()
    checkpoint = tmp_path / "checkpoint-1"
    for name in ("optimizer.pt", "scheduler.pt"):
        (checkpoint / name).unlink()
    checkpoint_of(zero(2), checkpoint)
    again = SNRFilteredGRPOTrainer(policy_path, reward, SNRFilteredGRPOConfig(**{**saving, "max_steps": 2}), prompts)
    for asked in (True, str(checkpoint)):
        with pytest.raises(ValueError, match=r"was saved with DeepSpeed ZeRO.* on 2 processes\. This run has .*DDP"):
            again.train(resume_from_checkpoint=asked)
    command = ["--algo", "trl_grpo", "--model", "tiny", "--env_name", "bandit", "--eval_prompts", "0"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *command, "--output_dir", str(tmp_path), "--resume_from_checkpoint", str(checkpoint)])
    assert ended.value.code == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "was saved with DeepSpeed ZeRO-1 or ZeRO-2 on 2 processes. This run has no sharding" in told
