"""Callbacks for TRL's trainers, each imported when it is asked for."""

from typing import TYPE_CHECKING

from ragen2_trl.trainers import lazily

if TYPE_CHECKING:
    from ragen2_trl.callbacks.cost import CostCallback as CostCallback
    from ragen2_trl.callbacks.environment_eval import EnvironmentEvalCallback as EnvironmentEvalCallback
    from ragen2_trl.callbacks.episodes import EpisodeCallback as EpisodeCallback
    from ragen2_trl.callbacks.mutual_information import MutualInformationCallback as MutualInformationCallback
    from ragen2_trl.callbacks.training_health import TrainingHealthCallback as TrainingHealthCallback
    from ragen2_trl.callbacks.training_progress import TrainingProgressCallback as TrainingProgressCallback

_HOMES = {
    "CostCallback": "cost",
    "EnvironmentEvalCallback": "environment_eval",
    "EpisodeCallback": "episodes",
    "MutualInformationCallback": "mutual_information",
    "TrainingHealthCallback": "training_health",
    "TrainingProgressCallback": "training_progress",
}

__all__ = list(_HOMES)
__getattr__ = lazily(__name__, _HOMES)
