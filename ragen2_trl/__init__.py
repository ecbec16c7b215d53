"""RAGEN-2 (arXiv 2604.06268) for Hugging Face TRL."""

from ragen2_trl.filtering import group_score, select_groups
from ragen2_trl.trainers import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer

__version__ = "0.1.0"

__all__ = ["SNRFilteredGRPOConfig", "SNRFilteredGRPOTrainer", "group_score", "select_groups"]
