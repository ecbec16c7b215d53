"""PPO with the filter: its trainer, its settings, its critic and its mathematics."""

from ragen2_trl.trainers.ppo.config import SNRFilteredPPOConfig
from ragen2_trl.trainers.ppo.trainer import SNRFilteredPPOTrainer

__all__ = ["SNRFilteredPPOConfig", "SNRFilteredPPOTrainer"]
