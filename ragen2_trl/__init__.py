"""RAGEN-2 (arXiv 2604.06268) for Hugging Face TRL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragen2_trl.callbacks import (
        CostCallback,
        EnvironmentEvalCallback,
        EpisodeCallback,
        MutualInformationCallback,
        TrainingHealthCallback,
    )
    from ragen2_trl.filtering import group_score, select_groups
    from ragen2_trl.instrument import Evidence, cross_score, health, information_metrics, judge
    from ragen2_trl.remedies import what_if
    from ragen2_trl.rollouts import TextRollout
    from ragen2_trl.trainers import (
        SNRFilteredAsyncGRPOConfig,
        SNRFilteredAsyncGRPOTrainer,
        SNRFilteredGRPOConfig,
        SNRFilteredGRPOTrainer,
        SNRFilteredPPOConfig,
        SNRFilteredPPOTrainer,
        SNRFilteredRLOOConfig,
        SNRFilteredRLOOTrainer,
    )

__version__ = "0.1.0"

# Where each name lives. They are imported when they are asked for: environments need neither torch nor TRL, whose
# import takes seconds, and servers and worker processes need nothing but environments.
_HOMES = {
    "CostCallback": "callbacks",
    "EnvironmentEvalCallback": "callbacks",
    "EpisodeCallback": "callbacks",
    "Evidence": "instrument",
    "MutualInformationCallback": "callbacks",
    "SNRFilteredAsyncGRPOConfig": "trainers",
    "SNRFilteredAsyncGRPOTrainer": "trainers",
    "SNRFilteredGRPOConfig": "trainers",
    "SNRFilteredGRPOTrainer": "trainers",
    "SNRFilteredPPOConfig": "trainers",
    "SNRFilteredPPOTrainer": "trainers",
    "SNRFilteredRLOOConfig": "trainers",
    "SNRFilteredRLOOTrainer": "trainers",
    "TextRollout": "rollouts",
    "TrainingHealthCallback": "callbacks",
    "cross_score": "instrument",
    "group_score": "filtering",
    "health": "instrument",
    "information_metrics": "instrument",
    "judge": "instrument",
    "select_groups": "filtering",
    "what_if": "remedies",
}

__all__ = [
    "CostCallback",
    "EnvironmentEvalCallback",
    "EpisodeCallback",
    "Evidence",
    "MutualInformationCallback",
    "SNRFilteredAsyncGRPOConfig",
    "SNRFilteredAsyncGRPOTrainer",
    "SNRFilteredGRPOConfig",
    "SNRFilteredGRPOTrainer",
    "SNRFilteredPPOConfig",
    "SNRFilteredPPOTrainer",
    "SNRFilteredRLOOConfig",
    "SNRFilteredRLOOTrainer",
    "TextRollout",
    "TrainingHealthCallback",
    "cross_score",
    "group_score",
    "health",
    "information_metrics",
    "judge",
    "select_groups",
    "what_if",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
