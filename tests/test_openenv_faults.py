"""What an OpenEnv server and its client make of hostile input, and of servers that are not there."""

import json
import random
import time
import urllib.error
import urllib.request

import pytest
from conftest import need
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

need("openenv")

from servers import LAKE, NUM_TASKS, Running, free_port
from servers import run_server_fixture as run_server_fixture
from servers import session_fixture as session_fixture
from servers import tools_server_fixture as tools_server_fixture
from websockets.sync.client import connect

from ragen2_trl.envs import make_env
from ragen2_trl.envs.local_requests import MAX_MESSAGE_BYTES
from ragen2_trl.openenv import Served

pytestmark = pytest.mark.slow

# Hostile input


@pytest.mark.parametrize(
    "actions",
    [["Fly"], [], [""], ["Right", 3], "Right", None, {"a": 1}, [["Right"]], ["\ud800"], ["x" * 10**7], [float("nan")]],
    ids=lambda actions: repr(actions)[:20],
)
def test_a_bad_action_is_an_invalid_turn(actions, tools_server):
    served = Served(tools_server.url)
    tools = served.environment_factory()
    tools.reset(**served.dataset(1)[0])
    assert tools.move(actions).startswith("Invalid answer. Reward -0.1.")
    assert tools.get_reward() == -0.1
    assert tools.move(["Fly"]).startswith("Invalid answer. Reward -0.1.")  # the session is alive
    assert tools.get_reward() == -0.2


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(st.text(st.characters(exclude_categories=())), max_size=300))
def test_no_text_is_an_error(actions, session):
    session.reset(seed=0)
    for part in (actions, actions[:256]):
        if len(part) <= 256:
            assert session.step({"actions": part}).reward <= 0


HOSTILE = [
    "", "{", "[]", "null", "1", '"x"', "[" * 100_000, '{"type": "fly"}', '{"type": []}', '{"type": "step"}',
    '{"type": "step", "data": {"actions": ["Up"]}}', '{"type": "step", "data": {"actions": "Up"}}',
    '{"type": "step", "data": {"actions": ["Up"], "more": 1}}', '{"type": "reset", "data": {"seed": -1}}',
    '{"type": "reset", "data": {"seed": 1e999}}', '{"type": "reset", "data": {"seed": true}}',
    '{"type": "reset", "data": {"seed": "0"}}', '{"type": "reset", "data": {"split": ["x"]}}',
    '{"type": "reset", "data": {"episode_id": {}}}', '{"type": "reset", "data": {"episode_id": "\\ud800"}}',
    '{"type": "reset", "data": {"self": 1, "row": {"grid": "x"}}}', '{"type": "mcp", "data": {"method": "x"}}',
    '{"type": "step", "data": {"actions": ' + json.dumps(["Up"] * 1000) + "}}", "x" * (MAX_MESSAGE_BYTES + 1),
]  # fmt: skip


def test_hostile_messages_end_a_session_at_most(tools_server):
    for message in HOSTILE:
        with connect(f"{tools_server.url.replace('http', 'ws')}/ws", max_size=None) as websocket:
            websocket.send(message)
            try:
                answer = json.loads(websocket.recv(timeout=10))
                assert answer["type"] in ("error", "observation", "mcp"), message[:80]
            except OSError:
                raise
            except Exception as closed:  # noqa: BLE001
                assert type(closed).__name__.startswith("ConnectionClosed"), message[:80]
    assert Served(tools_server.url).play({"seed": 0, "split": "train"}, random.Random(0)).take(["Up"])


def test_large_http_bodies_are_refused(tools_server):
    request = urllib.request.Request(f"{tools_server.url}/reset", b"x" * (MAX_MESSAGE_BYTES + 1), method="POST")
    with pytest.raises((urllib.error.HTTPError, ConnectionError, urllib.error.URLError)) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert getattr(refused.value, "code", 413) == 413
    assert json.load(urllib.request.urlopen(f"{tools_server.url}/health", timeout=10)) == {"status": "healthy"}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"seed": NUM_TASKS}, rf"seed must be an int between 0 and {NUM_TASKS - 1}, got {NUM_TASKS}"),
        ({"seed": "0"}, r"seed must be an int between 0 and 19, got '0'"),
        ({"split": "dev"}, r"split must be one of \['train', 'test'\], got 'dev'"),
        ({"episode_id": "x" * 256}, r"episode_id must be a string of at most 255 characters"),
    ],
)
def test_a_wrong_reset_is_named_and_the_session_goes_on(task, message, session):
    with pytest.raises(RuntimeError, match=message):
        session.reset(**task)
    with pytest.raises(RuntimeError, match="reset must come before step"):
        session.step({"actions": ["Up"]})
    assert not session.reset().done


# Servers that are not there


def test_a_url_without_a_server_is_named():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=rf"no answer from an OpenEnv server at {url}: "):
        Served(url)


def test_a_dead_server_fails_the_tool_and_the_reward_and_a_new_one_is_found(policy_path, make_args):
    server = Running(make_env("frozen_lake", **LAKE))
    served = Served(server.url, timeout=5)
    tools, row = served.environment_factory(), served.dataset(1)[0]
    tools.reset(**row)
    server.stop()
    message = rf"no answer from an OpenEnv server at {server.url}: "
    with pytest.raises(ConnectionError, match=message):
        tools.move(["Up"])
    for _ in range(2):  # TRL makes text of what a tool raises, so that the reward has to tell
        with pytest.raises(ConnectionError, match=message):
            tools.get_reward()
    with pytest.raises(ConnectionError, match=message):
        tools.reset(**row)
    server = Running(server.env, port=server.server.config.port)
    assert tools.reset(**row)
    assert tools.move(["Fly"]).startswith("Invalid")
    assert tools.get_reward() == -0.1
    server.stop()


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next(run_server):
    env = make_env("frozen_lake", **LAKE)
    server, usual = run_server(env), env.episode
    served = Served(server.url, timeout=0.5)
    rows = served.dataset(2)
    first = served.play(rows[0], random.Random(0)).episode.observation()

    def slow(row, rng):
        time.sleep(1)
        return usual(row, rng)

    env.episode = slow
    with pytest.raises(ConnectionError, match=server.url):
        served.play(rows[1], random.Random(0))
    env.episode = usual
    time.sleep(1)
    assert served.play(rows[0], random.Random(0)).episode.observation() == first
