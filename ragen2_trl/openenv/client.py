"""The client: a task that runs on a server, behind the same faces as a task that runs here.

Turns go to the server; prompts, tools, the text protocol and the metrics are those of `ragen2_trl.envs`.
"""

import asyncio
import base64
import io
import random
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache, partial
from typing import Any

from openenv.core import GenericEnvClient
from openenv.core.client_types import StepResult
from PIL import Image
from websockets.exceptions import ConnectionClosedOK, WebSocketException

from ragen2_trl.envs import ENVIRONMENTS, Environment, Episode, EpisodeOutcome, Limits, Play, ToolEnvironment
from ragen2_trl.envs.checks import check_choice
from ragen2_trl.envs.outcomes import COUNTS
from ragen2_trl.envs.responses import MAX_RESPONSE_CHARS
from ragen2_trl.envs.tasks import Row
from ragen2_trl.openenv.server import TaskState

# What a task of our own has as class attributes, and a served one learns from the server.
_LEARNT = ("name", "example", "splits_answers", "shows_images", "workers")


class ActTools(ToolEnvironment):
    """The one tool of served tasks that this machine does not know, such as a class of the server's own."""

    def act(self, actions: list[str]) -> str:
        """
        Takes a turn.

        Args:
            actions: Actions to carry out one after the other.

        Returns:
            What came of them, and what is seen then.
        """
        return self._take(actions)


class Served(Environment):
    """A task that runs on an OpenEnv server. Prompts, tools and protocol are those of the task that is served.

        env = Served("http://127.0.0.1:8000")
        GRPOTrainer(model, args=args, train_dataset=env.dataset(1024), environment_factory=env.environment_factory)

    Rows hold nothing but the task's number on the server (`seed`) and its `split`. Each episode that is being played
    has a session; sessions are used again, and need no reset of the server between runs.

    Args:
        url: Where the server listens, for instance `"http://127.0.0.1:8000"`.
        timeout: Longest time in seconds that the server may take for one turn.

    Raises:
        ConnectionError: If there is no OpenEnv server at the URL, here or at a later turn, whose episode is left out.
        ValueError: If the server there is not one of this package's.
    """

    name = "openenv"  # until the server has told
    single_turn_limits = None
    multi_turn_limits = Limits(turns=1, actions=1)
    example = ""

    def __init__(self, url: str, timeout: float = 60.0):
        self.url = url
        self._timeout = timeout
        self._free: list[Session] = []
        self._free.append(Session(url, timeout))
        state = self._free[0].state()
        missing = sorted(set(TaskState.model_fields) - set(state))
        if missing:
            raise ValueError(f"url must be that of a server of ragen2-trl, the one at {url} does not tell {missing}")
        self._state = state
        own = ENVIRONMENTS[state["name"]].tools if state["name"] in ENVIRONMENTS else None
        returns = None if state["returns"] is None else tuple(state["returns"])
        vars(self).update({name: state[name] for name in _LEARNT}, tools=own or ActTools, returns=returns)
        limits = {name: state[name] for name in ("max_turns", "max_actions", "max_turn_tokens")}
        super().__init__(protocol=state["protocol"], **limits)

    def instructions(self) -> str:
        return str(self._state["instructions"])

    def tasks(self, seed: int, split: str, data: str | None) -> Iterator[dict[str, Any]]:
        """Numbers of the server's tasks, in an order of their own for each `seed`."""
        if data is not None:
            raise ValueError(f"data must be None, the server at {self.url} has the tasks, got {data!r}")
        check_choice("split", split, list(self._state["tasks"]))
        numbers = list(range(self._state["tasks"][split]))
        random.Random(f"{self.name}/{split}/{seed}").shuffle(numbers)
        yield from ({"seed": number, "split": split} for number in numbers)

    def episode(self, row: Row, rng: random.Random) -> Episode:
        """The beginning of a row's task; only `play` carries it on."""
        return self.play(row, rng).episode

    def play(self, row: Row, rng: random.Random) -> "RemotePlay":
        """A new episode of a row's task in a session of its own."""
        session = self._free.pop() if self._free else Session(self.url, self._timeout)
        return RemotePlay(self, session, row, rng)


class RemoteEpisode(Episode):
    """What the server shows of an episode."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}

    def see(self, result: StepResult[dict[str, Any]]) -> None:
        self._seen, self.done, self.success = result.observation, result.done, result.observation["success"]

    def observation(self) -> str:
        return str(self._seen["text"])

    @property
    def measures(self) -> dict[str, float]:
        return dict(self._seen.get("measures", {}))

    def image(self) -> Image.Image:
        if self._seen["png"] is None:
            return super().image()
        return Image.open(io.BytesIO(base64.b64decode(self._seen["png"])))

    def is_action(self, action: str) -> bool:
        raise NotImplementedError("actions are judged on the server")

    def step(self, action: str) -> float:
        raise NotImplementedError("actions are carried out on the server, a turn at a time")


class RemotePlay(Play):
    """A `Play` whose turns are taken on the server.

    Args:
        env: The task.
        session: The session to play in, nobody else's for as long as this object lives.
        row: `seed` and `split`.
        rng: Names the episode, which makes its own chance events on the server.
    """

    episode: RemoteEpisode

    def __init__(self, env: Served, session: "Session", row: Row, rng: random.Random):
        super().__init__(env, RemoteEpisode())
        weakref.finalize(self, env._free.append, session)  # nobody says when a play is abandoned
        self._session = session
        self._counts: dict[str, Any] = {}
        result = session.reset(seed=row["seed"], split=row["split"], episode_id=f"{rng.getrandbits(128):032x}")
        self.episode.see(result)

    @property
    def outcome(self) -> EpisodeOutcome:
        return replace(super().outcome, **self._counts)

    def take(self, actions: Sequence[str]) -> str:
        result = self._session.step({"actions": self._clean(actions)})
        seen = result.observation
        self.turn_rewards = list(seen["turn_rewards"])
        self._counts = {name: seen[name] for name in COUNTS}
        self.episode.see(result)
        return str(seen["status"])

    def _clean(self, actions: Any) -> list[str]:
        """The actions that count; none of them, which is an invalid turn, where a model wrote something else."""
        if not isinstance(actions, list | tuple):
            return []
        counted = list(actions[: self.env.max_actions])
        if not all(isinstance(action, str) for action in counted) or sum(map(len, counted)) > MAX_RESPONSE_CHARS:
            return []
        return counted


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop in one thread for all sessions; OpenEnv's own synchronous client has a thread and a loop for each."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="openenv-sessions", daemon=True).start()
    return loop


def _in_loop(call: Callable[[], Awaitable[Any]]) -> "Future[Any]":
    """Calls OpenEnv's client inside of the loop: outside of one it would make a loop and a thread of its own."""

    async def run() -> Any:
        return await call()

    return asyncio.run_coroutine_threadsafe(run(), _event_loop())


class Session:
    """One OpenEnv session, synchronous, whose errors name the server.

    Args:
        url: Where the server listens.
        timeout: Longest time in seconds to wait for an answer.
    """

    def __init__(self, url: str, timeout: float):
        self._url = url
        self._timeout = timeout
        self._client: GenericEnvClient | None = None

    def state(self) -> dict[str, Any]:
        """What the server tells of itself."""
        client = self._connected()
        return dict(self._wait(client.state))

    def reset(self, **task: Any) -> StepResult[dict[str, Any]]:
        """Begins an episode, over a new connection where the old one was lost since the last episode."""
        if self._client is not None:
            try:
                return self._wait(partial(self._client.reset, **task))
            except ConnectionError:
                pass
        return self._wait(partial(self._connected().reset, **task))

    def step(self, action: dict[str, Any]) -> StepResult[dict[str, Any]]:
        """Takes a turn."""
        return self._wait(partial(self._connected().step, action))

    def _connected(self) -> GenericEnvClient:
        if self._client is None:
            self._client = GenericEnvClient(self._url, message_timeout_s=self._timeout, mode="simulation")
            weakref.finalize(self, _close, self._client)
        return self._client

    def _wait(self, call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return _in_loop(call).result()
        except RuntimeError as error:
            raise RuntimeError(f"the OpenEnv server at {self._url} answered: {error}") from error
        except (TimeoutError, OSError, WebSocketException) as error:
            self._drop()
            reason = str(error) or type(error).__name__
            # Of a closed one the message with the reason is lost where ours came too late.
            if isinstance(error, ConnectionClosedOK) or reason.endswith("HTTP 429"):
                reason += "; a server refuses sessions beyond its max_sessions"
            raise ConnectionError(f"no answer from an OpenEnv server at {self._url}: {reason}") from error
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        """Leaves a connection, so that a late answer is not taken for that to the next message."""
        client, self._client = self._client, None
        if client is not None:
            _close(client)


def _close(client: GenericEnvClient) -> None:
    _in_loop(client.close)
