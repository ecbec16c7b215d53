"""Countdown: an expression of given numbers that makes a target."""

from ragen2_trl.envs.countdown.environment import Countdown

__all__ = ["Countdown"]
