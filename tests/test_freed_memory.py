"""The command line keeps what a process frees, as sampling frees and takes a cache with every token."""

import os
import platform
import subprocess
import sys

import pytest

GROWS = """
import resource
import numpy as np
from ragen2_trl.cli import keep_freed_memory
if {keeps}:
    keep_freed_memory()
cache = np.zeros(2_000_000)
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
for _ in range(20):
    cache = np.concatenate([cache, np.zeros(1000)])
print(faults() - before)
"""


def faults_of(keeps, **environment):
    """Pages that growing a cache twenty times faults in."""
    env = {**{name: value for name, value in os.environ.items() if "MALLOC_" not in name}, **environment}
    made = subprocess.run([sys.executable, "-c", GROWS.format(keeps=keeps)], env=env, capture_output=True, text=True)
    return int(made.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_a_growing_cache_is_not_faulted_in_again_with_every_token():
    without = faults_of(False)
    assert faults_of(True) < without / 3
    assert faults_of(True, MALLOC_MMAP_THRESHOLD_="131072", MALLOC_TRIM_THRESHOLD_="131072") > without / 2
