"""DeepCoder: Python programs that pass the tests of a problem, and the sandbox where they run."""

from ragen2_trl.envs.deepcoder.environment import DeepCoder

__all__ = ["DeepCoder"]
