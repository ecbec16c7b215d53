"""A task of this package on an OpenEnv server; examples/openenv/client.py trains against it.

pip install -e ".[openenv]"
python examples/openenv/server.py --env_name sokoban --port 8000

Each session, a websocket, plays one episode at a time. The server makes the tasks and `reset` names one by its number:
answers never leave it. There is no authentication: whoever reaches the port can play.
"""

import argparse
import random
import threading
import uuid
from functools import partial
from typing import Any

import uvicorn
from datasets import Dataset
from openenv.core.env_server import Action, Observation, State, create_fastapi_app
from openenv.core.env_server import Environment as OpenEnvEnvironment
from pydantic import Field

from ragen2_trl.envs import Environment, Play, make_env


class Turn(Action):
    """The actions of one turn, in order. An unknown one makes it an invalid turn, not an error."""

    actions: list[str] = Field(max_length=100)


class Seen(Observation):
    """What came of a turn and what the player sees then; `reward` is that of the turn."""

    text: str = ""
    success: bool = False


class Task(State):
    """What a client needs to make prompts: the rules, and how many tasks there are."""

    instructions: str
    num_tasks: int


class Session(OpenEnvEnvironment[Turn, Seen, Task]):
    """One player of a task, behind OpenEnv's `reset`, `step` and `state`.

    Args:
        env: The task, with `protocol="tools"`; shared by all sessions and only read.
        rows: Its tasks.
        slots: Held while the rules work; shared by all sessions.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, env: Environment, rows: Dataset, slots: threading.Semaphore):
        super().__init__()
        self._env, self._rows, self._slots = env, rows, slots
        self._play: Play | None = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        """Begin task number `seed`, or one at random; equal episode ids have equal chance events."""
        if seed is None:
            seed = random.SystemRandom().randrange(len(self._rows))
        if not 0 <= seed < len(self._rows):
            raise ValueError(f"seed must be between 0 and {len(self._rows) - 1}, got {seed}")
        with self._slots:
            noise = random.Random(f"{seed}/{episode_id or uuid.uuid4()}")
            self._play = self._env.play(self._rows[seed], noise)
            return Seen(text=self._play.episode.observation())

    def step(self, action: Turn, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        """Take a turn. After the end nothing happens and nothing is paid."""
        play = self._play
        if play is None:
            raise RuntimeError("reset must come before step, and in the same session: use the websocket")
        if play.done:
            return Seen(text="The episode is over.", reward=0.0, done=True, success=play.episode.success)
        with self._slots:
            told = play.take(action.actions)
            told += " The episode is over." if play.done else f"\n{play.episode.observation()}"
        told = told.encode("utf-8", "replace").decode()  # half of a surrogate pair, repeated by rules, cannot be sent
        return Seen(text=told, reward=play.turn_rewards[-1], done=play.done, success=play.episode.success)

    @property
    def state(self) -> Task:
        return Task(instructions=self._env.system_text(), num_tasks=len(self._rows))


def make_server(env_name: str, num_tasks: int = 1000, host: str = "127.0.0.1", port: int = 8000) -> uvicorn.Server:
    """A server of training tasks; its `run()` serves until it is interrupted."""
    env = make_env(env_name, multi_turn=True, protocol="tools")
    rows = env.dataset(num_tasks).remove_columns("prompt")
    make_session = partial(Session, env, rows, threading.BoundedSemaphore(env.workers))
    app = create_fastapi_app(make_session, Turn, Seen, max_concurrent_envs=256, state_cls=Task)
    return uvicorn.Server(uvicorn.Config(app, host, port, ws_max_size=2**21, access_log=False))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serves a task until it is interrupted.")
    parser.add_argument("--env_name", default="frozen_lake", help="A task with tools (default: frozen_lake).")
    parser.add_argument("--num_tasks", type=int, default=1000, help="Tasks to serve (default: 1000).")
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on (default: this machine's own).")
    parser.add_argument("--port", type=int, default=8000, help="Port to listen on (default: 8000).")
    make_server(**vars(parser.parse_args())).run()
