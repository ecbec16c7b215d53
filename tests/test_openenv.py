"""The two scripts of examples/openenv: a remote episode is the one here, and training runs against the server."""

import os
import random
import socket
import subprocess
import sys
import threading
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from conftest import need

need("openenv")

from ragen2_trl.envs import make_env

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "openenv"
NUM_TASKS = 20


def script(name):
    spec = spec_from_file_location(f"openenv_{name}", FOLDER / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def client():
    return script("client")


@pytest.fixture(scope="module")
def serve():
    """`serve(task)`: the URL of a server in a thread, and what stops it."""
    make_server, started = script("server").make_server, []

    def run(env_name):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = make_server(env_name, NUM_TASKS, port=port)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        started.append((server, thread))
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        return f"http://127.0.0.1:{port}", lambda: stop(server, thread)

    def stop(server, thread):
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()

    yield run
    for server, thread in started:
        stop(server, thread)


@pytest.fixture(scope="module")
def url(serve):
    return serve("frozen_lake")[0]


def test_a_remote_episode_shows_and_earns_what_one_here_does(client, url):
    here = make_env("frozen_lake", multi_turn=True, protocol="tools")
    rows, remote_rows, rng = here.dataset(NUM_TASKS), client.dataset(url), random.Random(3)
    remote, local, returns = client.Remote(url), here.environment_factory(), set()
    for row, remote_row in zip(rows, remote_rows, strict=True):
        assert remote_row["prompt"] == row["prompt"] and "grid" not in remote_row  # answers stay on the server
        assert remote.reset(**remote_row) == local.reset(**row)
        for _ in range(7):  # beyond the end
            actions = rng.choices(["Left", "Down", "right", "Up", "Fly"], [3, 3, 3, 3, 1], k=2)
            assert remote.act(actions) == local.move(actions)
            assert remote.get_reward() == pytest.approx(local.get_reward())
        returns.add(round(local.get_reward(), 1))
    assert len(returns) > 1


@pytest.mark.parametrize("actions", [["Fly"], [], "Right", None, [["Right"]], ["Right", 3], ["\ud800"]], ids=repr)
def test_a_bad_action_is_an_invalid_turn_as_it_is_here(actions, client, url):
    remote = client.Remote(url)
    remote.reset(seed=0)
    assert remote.act(actions).startswith("Invalid answer. Reward -0.1.") and remote.get_reward() == -0.1


def test_a_wrong_task_is_named_and_the_session_goes_on(client, url):
    remote = client.Remote(url)
    with pytest.raises(RuntimeError, match=rf"seed must be between 0 and {NUM_TASKS - 1}, got {NUM_TASKS}"):
        remote.reset(seed=NUM_TASKS)
    assert remote.reset(seed=0)


def test_a_lost_connection_names_the_server_and_is_one_whose_episode_is_left_out(client, serve):
    url, stop = serve("frozen_lake")
    remote = client.Remote(url)
    remote.reset(seed=0)
    stop()
    for lost in (lambda: remote.act(["Up"]), lambda: remote.reset(seed=0)):
        with pytest.raises(ConnectionError, match=url):
            lost()


def test_the_example_trains_against_its_server(url, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(FOLDER / "client.py"), url, "tiny"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "completions sampled" in done.stdout and "ragen2-trl report runs/openenv" in done.stdout
