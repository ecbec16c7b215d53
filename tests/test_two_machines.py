"""Two launch commands, as on two machines, train as one command with two processes does."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ragen2_trl.cli.shipped import ACCELERATE_CONFIGS
from ragen2_trl.tiny import TINY_MODEL_PATH

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TRAIN = [
    *("-m", "ragen2_trl.cli", "train", "--recipe", "frozen_lake_tiny", "--ddp_backend", "gloo"),
    *("--per_device_train_batch_size", "8", "--num_prompts", "64", "--eval_prompts", "0", "--eval_every", "0"),
    *("--max_steps", "4", "--logging_steps", "1", "--log_completions", "false", "--figures", "false"),
]


def start(config: str, folder: Path, *machine: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ACCELERATE_CONFIGS[config])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(
        [*command, *machine, *TRAIN, "--output_dir", str(folder)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(*launched: subprocess.Popen) -> None:
    try:
        for process in launched:
            told, _ = process.communicate(timeout=400)
            assert process.returncode == 0, told[-4000:]
    finally:
        for process in launched:
            process.terminate()  # to the launcher, which ends its own


@pytest.mark.parametrize("config", ["cpu_ddp", pytest.param("cpu_zero3", marks=pytest.mark.needs("deepspeed"))])
def test_two_launch_commands_train_as_one_with_two_processes(config, tmp_path):
    finish(start(config, tmp_path / "one"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ("--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1")
    where = (*where, "--main_process_port", str(port))
    finish(*[start(config, tmp_path / "two", *where, "--machine_rank", rank) for rank in ("0", "1")])
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    begun = load_file(TINY_MODEL_PATH / "model.safetensors")
    assert any(not torch.equal(value, begun[name]) for name, value in one.items())
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
