"""DeepCoder: Python programs that pass the tests of a problem, and the sandbox where they run."""

from ragen2_trl.envs.deepcoder.environment import DeepCoder
from ragen2_trl.envs.deepcoder.ragen2 import RagenDeepCoder

__all__ = ["DeepCoder", "RagenDeepCoder"]
