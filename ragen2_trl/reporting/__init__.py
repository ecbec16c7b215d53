"""From a run's log history to pictures."""

from ragen2_trl.reporting.plots import plot_training

__all__ = ["plot_training"]
