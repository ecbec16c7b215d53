"""What an OpenEnv server and its client make of wrong input, and of servers that are not there."""

import random
import time

import pytest
from conftest import need

need("openenv")

from servers import LAKE, NUM_TASKS, Running, free_port
from servers import run_server_fixture as run_server_fixture
from servers import session_fixture as session_fixture
from servers import tools_server_fixture as tools_server_fixture

from ragen2_trl.envs import make_env
from ragen2_trl.openenv import Served

pytestmark = pytest.mark.slow

# Wrong input


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


def test_a_dead_server_leaves_an_episode_without_a_reward_and_a_new_one_is_found():
    server = Running(make_env("frozen_lake", **LAKE))
    served = Served(server.url, timeout=5)
    tools, row = served.environment_factory(), served.dataset(1)[0]
    tools.reset(**row)
    server.stop()
    message = rf"no answer from an OpenEnv server at {server.url}: "
    with pytest.raises(ConnectionError, match=message):
        tools.move(["Up"])
    assert tools.get_reward() is None  # TRL makes text of what a tool raises, so that the reward has to tell
    assert tools.reset(**row) == "" and tools.move(["Up"]) == "The episode is over."
    assert tools.get_reward() is None
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
