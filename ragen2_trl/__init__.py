"""RAGEN-2 (arXiv 2604.06268) for Hugging Face TRL."""

from typing import TYPE_CHECKING

from ragen2_trl.trainers import lazily

if TYPE_CHECKING:
    from ragen2_trl.callbacks import (
        CostCallback as CostCallback,
        EnvironmentEvalCallback as EnvironmentEvalCallback,
        EpisodeCallback as EpisodeCallback,
        MutualInformationCallback as MutualInformationCallback,
        TrainingHealthCallback as TrainingHealthCallback,
    )
    from ragen2_trl.filtering import group_score as group_score, select_groups as select_groups
    from ragen2_trl.instrument import (
        Evidence as Evidence,
        cross_score as cross_score,
        health as health,
        information_metrics as information_metrics,
        judge as judge,
    )
    from ragen2_trl.remedies import what_if as what_if
    from ragen2_trl.rollouts import TextRollout as TextRollout
    from ragen2_trl.trainers import (
        SNRFilteredAsyncGRPOConfig as SNRFilteredAsyncGRPOConfig,
        SNRFilteredAsyncGRPOTrainer as SNRFilteredAsyncGRPOTrainer,
        SNRFilteredGRPOConfig as SNRFilteredGRPOConfig,
        SNRFilteredGRPOTrainer as SNRFilteredGRPOTrainer,
        SNRFilteredPPOConfig as SNRFilteredPPOConfig,
        SNRFilteredPPOTrainer as SNRFilteredPPOTrainer,
        SNRFilteredRLOOConfig as SNRFilteredRLOOConfig,
        SNRFilteredRLOOTrainer as SNRFilteredRLOOTrainer,
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

__all__ = list(_HOMES)
__getattr__ = lazily(__name__, _HOMES)
