"""research/benchmarks/gpu.sh: all of it runs with sizes cut, and what is not measured is told."""

import json
import os
import subprocess
import sys
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from research.benchmarks import bench, gpu
from research.benchmarks.bench import METHODS, Shape, train

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_dry_run_measures_every_case_on_a_cpu(tmp_path):
    command = [str(ROOT / "research" / "benchmarks" / "gpu.sh"), "--dry", "--results", str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""})
    results = json.loads((tmp_path / "gpu_dry.json").read_text())
    assert results["missing"] == [] and results["machine"]["torch"] == torch.__version__
    rows: dict = {}
    parts = gpu.make_parts(gpu.DRY, rows)
    assert {name: len(of_part) for name, of_part in results["rows"].items()} == {
        name: len(part.cases) for name, part in parts.items()
    }
    for row in results["rows"]["updates"]:
        assert row["seconds"] > 0 and row["cold"] > 0 and row["memory_mib"] > 0
    positions = {(row["shape"], row["dead"], row["method"]): row["positions"] for row in results["rows"]["updates"]}
    assert positions["agent", 0.0, "all"] < positions["agent", 0.0, "dead rows and padding"]
    for row in results["rows"]["scoring"]:  # reuse is as far from float32 as rounding is
        errors = row["root_mean_square_nats"]
        assert errors["whole"] < 5 * errors["one by one"] < 0.1 * -row["mean_nats"]
    plain, filtered, not_shared = results["rows"]["steps"]
    assert plain["generation"] > 0 and plain["update"] > 0 and plain["measuring"] == 0
    assert not_shared["measuring"] == 0 < filtered["measuring"] and 0 < filtered["generation_share"] < 1
    report = (tmp_path / "gpu_dry.md").read_text()
    assert "numbers say nothing" in report and results["left_out"]
    assert all(f"- {line}" in report for line in results["left_out"])


def test_a_case_that_memory_does_not_hold_is_told_and_the_next_is_measured():
    def measure(size):
        if size == "large":
            raise torch.OutOfMemoryError("out of memory")
        return {"size": size}

    saved = []
    rows: list = []
    missing: list = []
    part = gpu.CaseList("Models", 1.0, [("large",), ("small",)], measure)
    gpu.run_part(part, time.perf_counter() + 60, rows, missing, lambda: saved.append(len(rows)))
    assert missing == ["Models: large: out of memory"] and rows == [{"size": "small"}]
    assert saved == [0, 1]  # results are written after every case


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_in_a_line(capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "no GPU was found; allowed: --dry" in capsys.readouterr().err


# What an update keeps for its backward pass


SHAPES = {"maths": Shape(16, 64, 0.5), "an agent": Shape(128, 32, 0.3), "long prompts": Shape(256, 16, 0.3)}


def policy():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "head_dim": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}  # the most keys that there can be
        return Qwen3ForCausalLM(Qwen3Config(vocab_size=512, **sizes, **heads))


class Held:
    def __init__(self, tensor):
        self.tensor = tensor


def most_kept(method, shape):
    """Bytes of tensors that are kept for a backward pass at once, parameters among them, and positions in all."""
    held, sizes, most = Counter(), {}, 0

    def release(storage):
        held[storage] -= 1
        if not held[storage]:
            del sizes[storage]

    def pack(tensor):
        nonlocal most
        storage, box = tensor.untyped_storage(), Held(tensor)
        sizes[storage.data_ptr()] = storage.nbytes()
        held[storage.data_ptr()] += 1
        most = max(most, sum(sizes.values()))
        weakref.finalize(box, release, storage.data_ptr())
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        positions = train(METHODS[method], shape, 0.0, policy=policy())["positions"]
    return most, positions


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_eight_groups_in_full_micro_batches_keep_less_than_trl_does(shape, monkeypatch):
    monkeypatch.setattr(bench, "prompts_for", lambda dead: 8)
    (plain, padded), (ours, computed) = (most_kept(method, shape) for method in ("TRL", "all"))
    assert computed < padded / 2
    assert ours < plain
