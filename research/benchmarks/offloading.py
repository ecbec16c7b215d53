"""What a step takes of main memory where ZeRO-3 keeps optimizer and weights there: random models of real shapes.

    python -m research.benchmarks.offloading 0.5B    # two processes; some minutes, and the memory that it finds

Trains one step of FrozenLake by the command line, with the filter on, and prints each process's largest
resident memory. Random weights answer nothing right: what is measured is memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from ragen2_trl.cli.shipped import ACCELERATE_CONFIGS
from ragen2_trl.tiny import TINY_MODEL_PATH

SHAPES: dict[str, dict[str, Any]] = {  # those of Qwen2.5
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
GIB = 2**20  # of /proc's kilobytes


def make_model(shape: str, folder: str) -> int:
    """A model of this shape in bfloat16 with the tiny model's tokenizer; how many parameters it has."""
    config = Qwen2Config(**SHAPES[shape], vocab_size=151936, num_key_value_heads=2, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_MODEL_PATH).save_pretrained(folder)
    return int(model.num_parameters())


def peaks(launcher: int) -> dict[int, float]:
    """GiB of the launcher's processes that train, at their largest so far."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:  # has ended meanwhile
            continue
        if int(lines["PPid"]) == launcher and "VmHWM" in lines:
            found[int(lines["Pid"])] = int(lines["VmHWM"].split()[0]) / GIB
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        make = "import sys; from research.benchmarks.offloading import make_model; print(make_model(*sys.argv[1:]))"
        # In a process of its own, whose memory is given back.
        made = subprocess.run(
            [sys.executable, "-c", make, arguments.shape, name], check=True, capture_output=True, text=True
        )
        parameters = int(made.stdout.split()[-1])
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", str(ACCELERATE_CONFIGS["cpu_zero3"]), "--mixed_precision", "bf16"),
            *("--offload_optimizer_device", "cpu", "--offload_param_device", "cpu"),
            *("-m", "ragen2_trl.cli", "train", "--model", name, "--env_name", "frozen_lake"),
            *("--dtype", "bfloat16", "--bf16", "true", "--use_cpu", "true", "--ddp_backend", "gloo"),
            *("--per_device_train_batch_size", "4", "--num_generations", "4", "--max_completion_length", "8"),
            *("--gradient_checkpointing", "true", "--ds3_gather_for_generation", "false"),
            *("--max_steps", "1", "--num_prompts", "8", "--eval_prompts", "0", "--save_strategy", "no"),
            *("--output_dir", str(folder / "run")),
        ]
        begun, found = time.monotonic(), {}
        with open(folder / "log", "w") as log:
            launched = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
            while launched.poll() is None:
                found.update(peaks(launched.pid))
                time.sleep(0.2)
        if launched.returncode != 0:
            sys.exit((folder / "log").read_text()[-8000:])
        rows = json.loads((folder / "run" / "log_history.json").read_text())
        told = ", ".join(f"{gib:.1f}" for gib in sorted(found.values()))
        seconds = f"{time.monotonic() - begun:.0f} s in all, of which the step {rows[0]['step_time']:.0f} s"
        print(f"{arguments.shape}: {parameters:,} parameters; GiB of a process at most: {told}; {seconds}")


if __name__ == "__main__":
    main()
