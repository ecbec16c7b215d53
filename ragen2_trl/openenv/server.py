"""The server: OpenEnv's `reset`, `step` and `state` over the rules of a task.

Each session, a websocket, plays one episode at a time. The server makes the tasks and `reset` names one by its number,
so that answers and tests never leave it.
"""

import base64
import io
import random
import threading
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import uvicorn
from datasets import Dataset
from openenv.core.env_server import Action, Observation, State, create_fastapi_app
from openenv.core.env_server import Environment as OpenEnvEnvironment
from openenv.core.env_server.types import EnvironmentMetadata
from PIL import Image
from pydantic import Field

from ragen2_trl.envs.checks import check_count
from ragen2_trl.envs.environment import Environment
from ragen2_trl.envs.outcomes import COUNTS
from ragen2_trl.envs.play import Play
from ragen2_trl.envs.responses import MAX_PARSED_ACTIONS
from ragen2_trl.envs.tasks import SPLITS

DEFAULT_NUM_TASKS = 1000
MAX_EPISODE_ID_CHARS = 255  # OpenEnv's own bound
# A turn has at most MAX_RESPONSE_CHARS characters, each at most 12 bytes of JSON.
MAX_MESSAGE_BYTES = 2 * 2**20


class TurnAction(Action):  # type: ignore[misc]
    """One turn: its actions, in order. An unknown action makes it an invalid turn, not an error."""

    actions: list[str] = Field(max_length=MAX_PARSED_ACTIONS)


class TurnObservation(Observation):  # type: ignore[misc]
    """What came of a turn, what the player sees then, and the outcome so far; `reward` is that of the turn."""

    status: str = ""
    text: str = ""  # empty when the episode is over
    png: str | None = None  # the state as a picture, in base64, where the task shows pictures
    episode_return: float = 0.0
    turn_rewards: list[float] = Field(default_factory=list)
    success: bool = False
    turns: int = 0
    valid_turns: int = 0
    num_actions: int = 0
    acting_turns: int = 0
    effective_turns: int = 0
    measures: dict[str, float] = Field(default_factory=dict)  # further numbers of the task's own


# Options that change what a client has to write or read.
NOT_SERVED = ("enable_think", "force_think", "max_total_actions", "preset")


class TaskState(State):  # type: ignore[misc]
    """The task that is served: what a client needs to make prompts of it."""

    name: str
    instructions: str
    protocol: str
    example: str
    splits_answers: bool
    shows_images: bool
    max_turns: int
    max_actions: int
    max_turn_tokens: int | None
    returns: tuple[float, float] | None
    workers: int
    tasks: dict[str, int]  # how many there are in each split


class TaskSession(OpenEnvEnvironment[TurnAction, TurnObservation, TaskState]):  # type: ignore[misc]
    """One session: the task behind OpenEnv's `reset`, `step` and `state`.

    Args:
        env: The task; shared by all sessions and only read.
        tasks: Rows of each split.
        slots: Held while the rules work; shared by all sessions.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, env: Environment, tasks: Mapping[str, Dataset], slots: threading.Semaphore):
        super().__init__()
        self._slots = slots
        self._env = env
        self._tasks = tasks
        self._play: Play | None = None
        self._episode_id: str | None = None

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, split: str | None = None
    ) -> TurnObservation:
        """Begins an episode.

        Args:
            seed: Number of the task in its split, from 0; default: one drawn at random.
            episode_id: Where the chance events of the episode come from: equal ids and seeds, equal episodes.
                Default: a new one.
            split: Which tasks; default: the first split that is served.

        Raises:
            ValueError: If an argument is outside its range. The session goes on.
        """
        if split is None:
            split = next(iter(self._tasks))
        if split not in list(self._tasks):
            raise ValueError(f"split must be one of {list(self._tasks)}, got {repr(split)[:100]}")
        rows = self._tasks[split]
        if seed is None:
            seed = random.SystemRandom().randrange(len(rows))
        if type(seed) is not int or not 0 <= seed < len(rows):
            raise ValueError(f"seed must be an int between 0 and {len(rows) - 1}, got {repr(seed)[:100]}")
        if episode_id is None:
            episode_id = str(uuid.uuid4())
        if not isinstance(episode_id, str) or len(episode_id) > MAX_EPISODE_ID_CHARS or not _is_text(episode_id):
            raise ValueError(f"episode_id must be a string of at most {MAX_EPISODE_ID_CHARS} characters")
        self._episode_id = episode_id
        with self._slots:
            self._play = self._env.play(rows[seed], random.Random(f"{split}/{seed}/{episode_id}"))
            return self._observe(self._play)

    def step(self, action: TurnAction, timeout_s: float | None = None, **kwargs: Any) -> TurnObservation:
        """Takes a turn, by the rules of `Play.take`. After the end nothing happens and nothing is paid.

        Raises:
            RuntimeError: If there was no `reset`. The session goes on.
        """
        if self._play is None:
            raise RuntimeError("reset must come before step, and in the same session: use the websocket")
        before = self._play.outcome.episode_return
        with self._slots:
            status = "The episode is over." if self._play.done else self._play.take(action.actions)
            return self._observe(self._play, status, self._play.outcome.episode_return - before)

    @property
    def state(self) -> TaskState:
        env = self._env
        return TaskState(
            episode_id=self._episode_id,
            step_count=0 if self._play is None else self._play.outcome.turns,
            name=env.name,
            instructions=env.instructions(),
            protocol=env.protocol,
            example=env.example,
            splits_answers=env.splits_answers,
            shows_images=env.shows_images,
            max_turns=env.max_turns,
            max_actions=env.max_actions,
            max_turn_tokens=env.max_turn_tokens,
            returns=env.returns,
            workers=env.workers,
            tasks={split: len(rows) for split, rows in self._tasks.items()},
        )

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name=self._env.name, description=self._env.instructions())

    def _observe(self, play: Play, status: str = "", reward: float | None = None) -> TurnObservation:
        outcome = play.outcome
        return TurnObservation(
            done=play.done,
            reward=reward,
            status=status,
            # Rules may repeat what a player wrote, and half of a surrogate pair cannot be sent.
            text="" if play.done else play.episode.observation().encode("utf-8", "replace").decode(),
            png=_to_png(play.episode.image()) if self._env.shows_images and not play.done else None,
            episode_return=outcome.episode_return,
            turn_rewards=list(play.turn_rewards),
            success=outcome.success,
            turns=outcome.turns,
            measures=outcome.measures,
            **{name: getattr(outcome, name) for name in COUNTS},
        )


def _is_text(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _to_png(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def make_server(
    env: Environment,
    host: str = "127.0.0.1",
    port: int = 8000,
    num_tasks: int | None = None,
    seed: int = 0,
    data: str | None = None,
    splits: Sequence[str] = SPLITS,
    max_sessions: int = 256,
) -> uvicorn.Server:
    """A server of a task; its `run()` serves until it is interrupted.

    Args:
        env: The task. With `protocol="tools"` clients make tool environments of it, with `"text"` text prompts.
        host: Address to listen on. Others than this machine's own open it to whoever reaches the port.
        port: Port to listen on; 0 for a free one.
        num_tasks: Tasks of each split; default: 1,000 where they are generated, else all there are.
        seed: Order of the tasks, as in `Environment.dataset`.
        data: A Hub id or a local path of the tasks, as in `Environment.dataset`.
        splits: Splits to serve.
        max_sessions: Sessions at the same time, that is episodes of all trainers together; 1 to 10,000. Their rules
            work up to `env.workers` at a time.

    Raises:
        ValueError: If an argument is outside its range.
    """
    unknown = sorted(set(NOT_SERVED) & set(env.options))
    if unknown:
        raise ValueError(f"env must be made without {unknown}, which clients do not learn of, got {env.name}")
    check_count("max_sessions", max_sessions, 1, 10_000)
    if num_tasks is None and data is None:
        num_tasks = DEFAULT_NUM_TASKS
    tasks = {split: _rows(env.dataset(num_tasks, seed, split, data)) for split in splits}
    app = create_fastapi_app(
        partial(TaskSession, env, tasks, threading.BoundedSemaphore(env.workers)),
        TurnAction,
        TurnObservation,
        max_concurrent_envs=max_sessions,
        state_cls=TaskState,
    )
    return uvicorn.Server(uvicorn.Config(app, host, port, ws_max_size=MAX_MESSAGE_BYTES, access_log=False))


def _rows(dataset: Dataset) -> Dataset:
    """The columns that rules need."""
    return dataset.remove_columns([name for name in ("prompt", "image") if name in dataset.column_names])
