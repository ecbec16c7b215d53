"""Sokoban: boxes pushed onto targets."""

from ragen2_trl.envs.sokoban.environment import Sokoban

__all__ = ["Sokoban"]
