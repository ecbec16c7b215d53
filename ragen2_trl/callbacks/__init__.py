"""Callbacks for TRL's trainers."""

from ragen2_trl.callbacks.cost import CostCallback
from ragen2_trl.callbacks.environment_eval import EnvironmentEvalCallback
from ragen2_trl.callbacks.episodes import EpisodeCallback
from ragen2_trl.callbacks.gradient_snr import GradientSNRCallback
from ragen2_trl.callbacks.live_line import LiveLineCallback
from ragen2_trl.callbacks.mutual_information import MutualInformationCallback
from ragen2_trl.callbacks.reward_variance_stop import RewardVarianceStopCallback

__all__ = [
    "CostCallback",
    "EnvironmentEvalCallback",
    "EpisodeCallback",
    "GradientSNRCallback",
    "LiveLineCallback",
    "MutualInformationCallback",
    "RewardVarianceStopCallback",
]
