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


def imported(module: str, name: str) -> Any:
    """A name of one of our modules that import names of TRL.

    Raises:
        IncompatibleTRLError: if TRL has one of these no more; the message names it, and the releases that have it.
    """
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        from ragen2_trl.trainers.trl_contract import is_of_trl, refusal

        if not is_of_trl(error):
            raise
        raise refusal(str(error), "AsyncGRPOTrainer" if "AsyncGRPO" in name else name) from error


def __getattr__(name: str) -> Any:
    """Each when it is asked for: GRPO does without PPO's critic."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    algorithm = name.removeprefix("SNRFiltered").removesuffix("Config").removesuffix("Trainer").lower()
    return imported(f"{__name__}.{algorithm.replace('async', 'async_')}", name)
