"""Puzzles of reasoning-gym, and the program that scores answers to them."""

from ragen2_trl.envs.reasoning_gym.environment import ReasoningGym

__all__ = ["ReasoningGym"]
