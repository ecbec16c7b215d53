"""MetaMathQA: word problems with one answer, compared as mathematics."""

from ragen2_trl.envs.metamath_qa.environment import MetaMathQA

__all__ = ["MetaMathQA"]
