"""TRL's trainers with the filter."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragen2_trl.trainers.async_grpo import SNRFilteredAsyncGRPOConfig, SNRFilteredAsyncGRPOTrainer
    from ragen2_trl.trainers.grpo import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
    from ragen2_trl.trainers.ppo import SNRFilteredPPOConfig, SNRFilteredPPOTrainer
    from ragen2_trl.trainers.rloo import SNRFilteredRLOOConfig, SNRFilteredRLOOTrainer

__all__ = [
    "SNRFilteredAsyncGRPOConfig",
    "SNRFilteredAsyncGRPOTrainer",
    "SNRFilteredGRPOConfig",
    "SNRFilteredGRPOTrainer",
    "SNRFilteredPPOConfig",
    "SNRFilteredPPOTrainer",
    "SNRFilteredRLOOConfig",
    "SNRFilteredRLOOTrainer",
]


def __getattr__(name: str) -> Any:
    """Each when it is asked for: GRPO does without PPO's critic."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    algorithm = name.removeprefix("SNRFiltered").removesuffix("Config").removesuffix("Trainer").lower()
    return getattr(import_module(f"{__name__}.{algorithm.replace('async', 'async_')}"), name)
