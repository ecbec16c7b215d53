"""Where TRL has its asynchronous trainer: stable since 1.18, experimental before."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
else:
    try:
        from trl import AsyncGRPOConfig, AsyncGRPOTrainer
    except ImportError:
        from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

_own: Any = sys.modules[AsyncGRPOTrainer.__module__]
AsyncRolloutWorker: Any = _own.AsyncRolloutWorker
Collator: Any = _own.DataCollatorForRollout

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "AsyncRolloutWorker", "Collator"]
