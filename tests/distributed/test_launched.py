"""What `accelerate launch` starts: on one machine, on two, and with optimizer and weights in main memory."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backends import deepspeed_config
from killed import KILLS, kill_and_resume, whole_run
from safetensors.torch import load_file

from ragen2_trl.cli.shipped import ACCELERATE_CONFIGS
from ragen2_trl.tiny import TINY_MODEL_PATH

pytestmark = pytest.mark.slow

TRAIN = [
    *("-m", "ragen2_trl.cli", "train", "--recipe", "frozen_lake_tiny", "--ddp_backend", "gloo"),
    *("--per_device_train_batch_size", "8", "--num_prompts", "64", "--eval_prompts", "0", "--eval_every", "0"),
    *("--max_steps", "4", "--logging_steps", "1", "--log_completions", "false", "--figures", "false"),
]


def start(config: str, folder: Path, *machine: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ACCELERATE_CONFIGS[config])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
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


def parameters_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "config", ["cpu_ddp", pytest.param("cpu_zero3", marks=[pytest.mark.needs("deepspeed"), pytest.mark.full])]
)
def test_two_launch_commands_train_as_one_with_two_processes(config, tmp_path):
    finish(start(config, tmp_path / "one"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ("--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1")
    where = (*where, "--main_process_port", str(port))
    finish(*[start(config, tmp_path / "two", *where, "--machine_rank", rank) for rank in ("0", "1")])
    one, two, begun = map(parameters_of, (tmp_path / "one", tmp_path / "two", TINY_MODEL_PATH))
    assert any(not torch.equal(value, begun[name]) for name, value in one.items())
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


@pytest.mark.full  # DeepSpeed compiles for minutes
@pytest.mark.needs("deepspeed", "g++")
@pytest.mark.parametrize("stage", [2, 3])
def test_offloading_to_main_memory_trains_as_without(stage, tmp_path):
    """DeepSpeed's own Adam, which it compiles, in place of PyTorch's; the recipe filters and measures."""
    config = deepspeed_config(stage)  # whose threshold lets the tiny model be sharded
    config["zero_optimization"] |= {
        f"offload_{what}": {"device": "cpu"} for what in ("optimizer", "param")[: stage - 1]
    }
    (file := tmp_path / "offload.json").write_text(json.dumps(config))
    finish(start(f"cpu_zero{stage}", tmp_path / "without"))
    finish(start(f"cpu_zero{stage}", tmp_path / "with", "--deepspeed_config_file", str(file)))
    without, offloaded, begun = map(parameters_of, (tmp_path / "without", tmp_path / "with", TINY_MODEL_PATH))
    moved = max((without[name] - value).abs().max().item() for name, value in begun.items())
    assert offloaded.keys() >= begun.keys()  # ZeRO-2 also writes the head that is the embedding
    apart = max((without[name] - value).abs().max().item() for name, value in offloaded.items())
    assert apart < moved / 100
    rows = json.loads((tmp_path / "with" / "log_history.json").read_text())
    assert any("mi/first_turn/retrieval_accuracy" in row for row in rows)
    assert all(0 < row["snr/kept_fraction"] < 1 for row in rows if "loss" in row)


# One of two processes is killed: all end, what killed it is told, and the resumed run is the undisturbed one. A run
# whose other process stayed would reach the limit of `launch`.


@pytest.mark.parametrize(
    ("layout", "kill"), [("ddp", KILLS[2]), pytest.param("zero3", KILLS[9], marks=pytest.mark.needs("deepspeed"))]
)
def test_a_run_that_loses_a_process_ends_soon_and_goes_on_as_if_it_had_not(layout, kill, policy_path, tmp_path):
    """`python tests/distributed/killed.py` does so at all moments."""
    whole = whole_run(layout, policy_path, tmp_path / "whole")
    outcome = kill_and_resume(layout, policy_path, tmp_path / "killed", kill)
    assert outcome.names(kill[0]), outcome.told
    assert outcome.resumed_from in ("checkpoint-2", "checkpoint-4")
    assert outcome.equals(whole)
