"""An update keeps no more for its backward pass than TRL's, however many completions share a micro-batch."""

import weakref
from collections import Counter

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from research.benchmarks import bench
from research.benchmarks.bench import METHODS, Shape, train

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


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_eight_groups_in_full_micro_batches_keep_less_than_trl_does(shape, monkeypatch):
    monkeypatch.setattr(bench, "prompts_for", lambda dead: 8)
    (plain, padded), (ours, computed) = (most_kept(method, shape) for method in ("TRL", "all"))
    assert computed < padded / 2
    assert ours < plain
