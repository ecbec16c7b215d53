"""Callbacks for TRL's trainers, each imported when it is asked for."""

from typing import TYPE_CHECKING, Any

from ragen2_trl.trainers import imported

if TYPE_CHECKING:
    from ragen2_trl.callbacks.cost import CostCallback
    from ragen2_trl.callbacks.environment_eval import EnvironmentEvalCallback
    from ragen2_trl.callbacks.episodes import EpisodeCallback
    from ragen2_trl.callbacks.mutual_information import MutualInformationCallback
    from ragen2_trl.callbacks.training_health import TrainingHealthCallback
    from ragen2_trl.callbacks.training_progress import TrainingProgressCallback

_HOMES = {
    "CostCallback": "cost",
    "EnvironmentEvalCallback": "environment_eval",
    "EpisodeCallback": "episodes",
    "MutualInformationCallback": "mutual_information",
    "TrainingHealthCallback": "training_health",
    "TrainingProgressCallback": "training_progress",
}

__all__ = [
    "CostCallback",
    "EnvironmentEvalCallback",
    "EpisodeCallback",
    "MutualInformationCallback",
    "TrainingHealthCallback",
    "TrainingProgressCallback",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return imported(f"{__name__}.{_HOMES[name]}", name)
