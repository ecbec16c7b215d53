"""The scripts of examples/, which a reader copies, run as they stand: with the tiny model and local rows."""

import os
import subprocess
import sys
from pathlib import Path

import launching
import pytest

from ragen2_trl.cli.shipped import ACCELERATE_CONFIGS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def test_every_example_is_tried_here():
    elsewhere = "async_grpo"  # tests/test_async_example.py, with a server
    assert ["agent", elsewhere, "dynamic_sampling", "maths", "own_task", "zero3"] == EXAMPLES


def run(name, folder):
    return launching.run(ROOT / "examples" / f"{name}.py", "tiny", folder=folder)


@pytest.mark.parametrize("name", ["maths", "dynamic_sampling", "own_task"])
def test_an_example_trains_and_ends_with_its_table(name, tmp_path):
    told = run(name, tmp_path)
    assert "completions sampled" in told and f"ragen2-trl report runs/{name}" in told
    assert (tmp_path / "runs" / name / "diagnostics" / "trainer_state.json").exists()


def test_the_agent_plays_through_trls_own_environment_factory(tmp_path):
    told = run("agent", tmp_path)
    assert "ragen2-trl report runs/agent" in told and "held-out success" in told


@pytest.mark.needs("deepspeed", "g++")
def test_the_sharded_example_trains_on_two_processes(tmp_path):
    config = str(ACCELERATE_CONFIGS["cpu_zero3"])
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", config)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = (*launch, str(ROOT / "examples" / "zero3.py"), "tiny")
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("ragen2-trl report runs/zero3") == 1
    assert (tmp_path / "runs" / "zero3" / "model.safetensors").exists()
