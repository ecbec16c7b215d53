"""Sokoban: boxes pushed onto targets."""

from ragen2_trl.envs.sokoban.environment import Sokoban
from ragen2_trl.envs.sokoban.ragen2 import RagenSokoban

__all__ = ["RagenSokoban", "Sokoban"]
