"""Any task as an OpenEnv server, and such a server as a task.

    python -m ragen2_trl.openenv --env_name sokoban --port 8000

serves a task on this machine; `Served("http://127.0.0.1:8000")` is the same task on the side of the trainer. There is
no authentication in OpenEnv: whoever reaches the port can play.

Raises:
    ImportError: If OpenEnv is not installed; the message says how to.
"""

try:
    import fastapi  # noqa: F401
    import uvicorn  # noqa: F401
    import websockets  # noqa: F401
    from openenv.core import env_server  # noqa: F401
except ImportError as error:
    raise ImportError(f'ragen2_trl.openenv needs OpenEnv ({error}): pip install "ragen2-trl[openenv]"') from error

from ragen2_trl.openenv.client import Served
from ragen2_trl.openenv.server import make_server

__all__ = ["Served", "make_server"]
