"""The tasks as RAGEN-2 plays them, a file each; `protocol` is what all of them share.

What differs from a task is a subclass of it, made with `make_env(name, preset="ragen2")`.
"""

from ragen2_trl.envs.ragen2.bandit import RagenBandit
from ragen2_trl.envs.ragen2.countdown import RagenCountdown
from ragen2_trl.envs.ragen2.deepcoder import RagenDeepCoder
from ragen2_trl.envs.ragen2.frozen_lake import RagenFrozenLake
from ragen2_trl.envs.ragen2.metamath_qa import RagenMetaMathQA
from ragen2_trl.envs.ragen2.protocol import RagenProtocol
from ragen2_trl.envs.ragen2.search_qa import RagenSearchQA
from ragen2_trl.envs.ragen2.sokoban import RagenSokoban
from ragen2_trl.envs.ragen2.webshop import RagenWebShop

_TASKS = (
    RagenFrozenLake,
    RagenSokoban,
    RagenCountdown,
    RagenMetaMathQA,
    RagenSearchQA,
    RagenWebShop,
    RagenDeepCoder,
    RagenBandit,
)
RAGEN2: dict[str, type[RagenProtocol]] = {task.name: task for task in _TASKS}

__all__ = ["RAGEN2", "RagenProtocol"]
