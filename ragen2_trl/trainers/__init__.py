"""Trainers: TRL's, with the filter."""

from ragen2_trl.trainers.grpo import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.trainers.ppo import SNRFilteredPPOConfig, SNRFilteredPPOTrainer
from ragen2_trl.trainers.rloo import SNRFilteredRLOOConfig, SNRFilteredRLOOTrainer

__all__ = [
    "SNRFilteredGRPOConfig",
    "SNRFilteredGRPOTrainer",
    "SNRFilteredPPOConfig",
    "SNRFilteredPPOTrainer",
    "SNRFilteredRLOOConfig",
    "SNRFilteredRLOOTrainer",
]
