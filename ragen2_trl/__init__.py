"""RAGEN-2 (arXiv 2604.06268) for Hugging Face TRL."""

from ragen2_trl.callbacks import MutualInformationCallback, RewardVarianceStopCallback
from ragen2_trl.filtering import group_score, select_groups
from ragen2_trl.information import classify_regime, information_metrics
from ragen2_trl.scoring import cross_score
from ragen2_trl.trainers import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer

__version__ = "0.1.0"

__all__ = [
    "MutualInformationCallback",
    "RewardVarianceStopCallback",
    "SNRFilteredGRPOConfig",
    "SNRFilteredGRPOTrainer",
    "classify_regime",
    "cross_score",
    "group_score",
    "information_metrics",
    "select_groups",
]
