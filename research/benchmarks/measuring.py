"""What the benchmarks share: clock, peak memory and a description of the machine."""

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import torch


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
