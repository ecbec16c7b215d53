"""TRL's trainers with the filter."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragen2_trl.trainers.async_grpo import SNRFilteredAsyncGRPOConfig as SNRFilteredAsyncGRPOConfig
    from ragen2_trl.trainers.async_grpo import SNRFilteredAsyncGRPOTrainer as SNRFilteredAsyncGRPOTrainer
    from ragen2_trl.trainers.grpo import SNRFilteredGRPOConfig as SNRFilteredGRPOConfig
    from ragen2_trl.trainers.grpo import SNRFilteredGRPOTrainer as SNRFilteredGRPOTrainer
    from ragen2_trl.trainers.ppo import SNRFilteredPPOConfig as SNRFilteredPPOConfig
    from ragen2_trl.trainers.ppo import SNRFilteredPPOTrainer as SNRFilteredPPOTrainer
    from ragen2_trl.trainers.rloo import SNRFilteredRLOOConfig as SNRFilteredRLOOConfig
    from ragen2_trl.trainers.rloo import SNRFilteredRLOOTrainer as SNRFilteredRLOOTrainer

# GRPO does without PPO's critic.
_HOMES = {
    "SNRFilteredAsyncGRPOConfig": "async_grpo",
    "SNRFilteredAsyncGRPOTrainer": "async_grpo",
    "SNRFilteredGRPOConfig": "grpo",
    "SNRFilteredGRPOTrainer": "grpo",
    "SNRFilteredPPOConfig": "ppo",
    "SNRFilteredPPOTrainer": "ppo",
    "SNRFilteredRLOOConfig": "rloo",
    "SNRFilteredRLOOTrainer": "rloo",
}


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


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names are imported when they are asked for.

    Args:
        package: Its name.
        homes: By name, the module of the package that has it.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return imported(f"{package}.{homes[name]}", name)

    return __getattr__


__all__ = list(_HOMES)
__getattr__ = lazily(__name__, _HOMES)
