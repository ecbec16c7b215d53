"""Trainers: TRL's, with the filter."""

from ragen2_trl.trainers.snr_grpo_config import SNRFilteredGRPOConfig
from ragen2_trl.trainers.snr_grpo_trainer import SNRFilteredGRPOTrainer

__all__ = ["SNRFilteredGRPOConfig", "SNRFilteredGRPOTrainer"]
