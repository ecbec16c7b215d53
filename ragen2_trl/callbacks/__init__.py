"""Callbacks for TRL's trainers."""

from ragen2_trl.callbacks.live_line import LiveLineCallback

__all__ = ["LiveLineCallback"]
