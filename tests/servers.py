"""Servers in threads, and what is played on them."""

import random
import socket
import threading
import time

import pytest
from conftest import need

need("openenv")

from openenv.core import GenericEnvClient

from ragen2_trl.envs import make_env
from ragen2_trl.openenv import make_server

NUM_TASKS = 20
LAKE = {"multi_turn": True, "slip": 0.3, "protocol": "tools"}


class Running:
    """A server in a thread."""

    def __init__(self, env, port=0, **kwargs):
        self.env = env
        self.server = make_server(env, port=port or free_port(), num_tasks=NUM_TASKS, **kwargs)
        self.url = f"http://127.0.0.1:{self.server.config.port}"
        self.rows = {split: env.dataset(NUM_TASKS, 0, split) for split in kwargs.get("splits", ("train", "test"))}
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)

    def stop(self):
        self.server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module", name="run_server")
def run_server_fixture():
    """`run_server(env, **kwargs)`: a running server, stopped at the end of the module."""
    servers = []

    def run(*args, **kwargs):
        servers.append(Running(*args, **kwargs))
        return servers[-1]

    yield run
    for server in servers:
        server.stop()


@pytest.fixture(scope="module", name="tools_server")
def tools_server_fixture(run_server):
    return run_server(make_env("frozen_lake", **LAKE))


@pytest.fixture(scope="module", name="text_server")
def text_server_fixture(run_server):
    return run_server(make_env("frozen_lake", multi_turn=True))


@pytest.fixture(name="session")
def session_fixture(tools_server):
    """A session of any OpenEnv client, as it comes with OpenEnv."""
    with GenericEnvClient(tools_server.url).sync() as client:
        yield client


def local_play(server, row, rng):
    """The play that the server makes of a row: its chance events come from the id that the client draws."""
    noise = random.Random(f"{row['split']}/{row['seed']}/{rng.getrandbits(128):032x}")
    return server.env.play(server.rows[row["split"]][row["seed"]], noise)


def turns(plays, player, rng):
    """Actions of the oracle, or random ones of which some are no actions."""
    if player == "oracle":
        return plays[1].episode.plan(rng)[1][:2]
    return rng.choices([*["Left", "Down", "Right", "Up"] * 3, "Fly"], k=rng.randint(0, 3))
