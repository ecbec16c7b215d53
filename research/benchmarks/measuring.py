"""What the benchmarks share: clock, peak memory, elements in caches and a description of the machine."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ragen2_trl.instrument.scoring import cache_of


def now() -> float:
    """Seconds, once the GPU has finished what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory() -> float:
    """Peak of this process so far in MiB: allocated on the GPU, or resident where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    # Not getrusage: its maximum is inherited from the process that started this one.
    return _status("VmHWM")


def reset_peak_memory() -> float:
    """Starts the peak again and returns what is in use now, in MiB."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def machine() -> dict[str, str]:
    """Device, cores, threads and versions."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    packages = ("torch", "trl", "transformers", "accelerate")
    return {
        "device": device,
        "cores": str(os.cpu_count()),
        "torch threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


@contextmanager
def count_cache_elements(model: nn.Module) -> Iterator[list[int]]:
    """Yields a list of how many elements caches hold in memory, once for each forward pass within.

    Counted are the cache that a pass was given, as it is after the pass, and the latest that was made without one: the
    prompt's. Memory that both refer to counts once, and that of a view is what it keeps alive.
    """
    counts: list[int] = []
    of_prompt: list[Tensor] = []

    def count(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        given, made = kwargs.get("cache", kwargs.get("past_key_values")), cache_of(output)
        if given is None and made is not None:
            of_prompt[:] = _tensors(made)
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in [*of_prompt, *_tensors(given or made)]}
        counts.append(sum(t.untyped_storage().nbytes() // t.element_size() for t in storages.values()))

    handle = model.register_forward_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        handle.remove()


def _tensors(cache: Cache | None) -> list[Tensor]:
    values = [value for layer in (cache.layers if cache else []) for value in vars(layer).values()]
    values += [value for states in values if isinstance(states, dict) for value in states.values()]
    return [value for value in values if isinstance(value, Tensor)]
