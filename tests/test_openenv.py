"""A task on an OpenEnv server over loopback: the same game as here, for one player or many, and for TRL."""

import json
import random
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("openenv", reason='OpenEnv is not installed: pip install "ragen2-trl[openenv]"')

import uvicorn
from openenv.core import GenericEnvClient
from test_trl_fidelity import TEMPLATE
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_template
from websockets.sync.client import connect

from ragen2_trl import SNRFilteredGRPOTrainer
from ragen2_trl.cli.evaluate import evaluate_scripted
from ragen2_trl.envs import format_response, make_env
from ragen2_trl.openenv import Served, make_server
from ragen2_trl.openenv.__main__ import main
from ragen2_trl.openenv.server import MAX_MESSAGE_BYTES
from ragen2_trl.rollouts import TextRollout

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


@pytest.fixture(scope="module")
def run_server():
    """`run_server(env, **kwargs)`: a running server, stopped at the end of the module."""
    servers = []

    def run(*args, **kwargs):
        servers.append(Running(*args, **kwargs))
        return servers[-1]

    yield run
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def tools_server(run_server):
    return run_server(make_env("frozen_lake", **LAKE))


@pytest.fixture(scope="module")
def text_server(run_server):
    return run_server(make_env("frozen_lake", multi_turn=True))


@pytest.fixture
def session(tools_server):
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


# The same game


@pytest.mark.parametrize("player", ["oracle", "random"])
def test_turns_on_the_server_are_those_of_a_play_here(player, tools_server):
    rng, served, successes = random.Random(player), Served(tools_server.url), 0
    for split in ("train", "test"):
        for row in served.dataset(NUM_TASKS, split=split):
            remote, local = served.play(row, random.Random(5)), local_play(tools_server, row, random.Random(5))
            while not local.done:
                assert remote.episode.observation() == local.episode.observation()
                actions = turns((remote, local), player, rng)
                assert remote.take(actions) == local.take(actions)
                assert (remote.outcome, remote.done) == (local.outcome, local.done)
            assert remote.done
            successes += local.outcome.success
    assert successes > (20 if player == "oracle" else 0)


def test_the_tool_environment_is_the_one_of_the_task(tools_server, run_server):
    here = make_env("frozen_lake", multi_turn=True, protocol="tools")  # without slips, whose noise is drawn elsewhere
    served = Served(run_server(here).url)
    remote, local = served.environment_factory(), here.environment_factory()
    rows, rng = here.dataset(NUM_TASKS), random.Random(3)
    for row in served.dataset(NUM_TASKS):
        assert row["prompt"] == rows[row["seed"]]["prompt"]
        assert remote.reset(**row) == local.reset(**rows[row["seed"]])
        for _ in range(7):  # beyond the end
            steps = rng.choices(["Left", "Down", "right", "Up", "Fly"], k=2)
            assert remote.move(steps) == local.move(steps)
            assert remote.get_reward() == local.get_reward()
    assert remote.move.__doc__ == local.move.__doc__
    assert type(remote) is type(local)


def test_the_text_protocol_is_the_one_of_the_task(text_server):
    here, served, rng = text_server.env, Served(text_server.url), random.Random(4)
    for row in served.dataset(NUM_TASKS):
        task = text_server.rows["train"][row["seed"]]
        assert row["prompt"] == task["prompt"]
        remote, local = served.play(row, random.Random(0)), here.play(task, random.Random(0))
        while not local.done:
            text = format_response("So.", rng.choices(["Left", "Down", "Right", "Up", "Fly"], [5, 5, 5, 5, 1], k=2))
            text = rng.choice([text] * 9 + ["Right"])
            assert remote.respond(text) == local.respond(text)
        assert remote.outcome == local.outcome


def test_rewards_of_turns_add_up_to_the_return(session):
    rng = random.Random(2)
    for seed in range(NUM_TASKS):
        result, rewards = session.reset(seed=seed), []
        assert (result.reward, result.done) == (None, False)
        while not result.done:
            result = session.step({"actions": rng.choices(["Down", "Right", "Fly"], k=2)})
            rewards.append(result.reward)
        assert sum(rewards) == pytest.approx(result.observation["episode_return"])
        assert session.step({"actions": ["Down"]}).reward == 0  # after the end


def test_equal_seeds_and_episode_ids_give_equal_episodes_and_other_ids_other_chances(session):
    def walk(seed, episode_id):
        seen = [session.reset(seed=seed, episode_id=episode_id).observation["text"]]
        return seen + [session.step({"actions": ["Left", "Up"]}).observation for _ in range(3)]

    first, again, other = ([walk(seed, name) for seed in range(NUM_TASKS)] for name in "aab")
    assert first == again != other
    assert [seen[0] for seen in first] == [seen[0] for seen in other]


def test_answers_stay_on_the_server(tools_server, session):
    grid = tools_server.rows["train"][3]["grid"]
    seen = [session.reset(seed=3), session.step({"actions": ["Up"]}), session.state()]
    assert "grid" not in Served(tools_server.url).dataset(5).column_names
    assert json.dumps(grid) not in json.dumps([str(part) for part in seen])


def test_pictures_travel(run_server):
    here = make_env("frozen_lake", multi_turn=True, protocol="tools", observation="image")
    served = Served(run_server(here, splits=("train",)).url)
    remote, local, rows = served.environment_factory(), here.environment_factory(), here.dataset(NUM_TASKS)
    for row in served.dataset(3):
        seen = [remote.reset(**row), remote.move(["Up"])], [local.reset(**rows[row["seed"]]), local.move(["Up"])]
        for mine, theirs in zip(*seen, strict=True):
            parts = [[part.get("text") or part["image"].tobytes() for part in answer] for answer in (mine, theirs)]
            assert parts[0] == parts[1]


def test_a_task_that_only_the_server_knows_has_one_tool(run_server):
    class Foreign(type(make_env("frozen_lake"))):
        name = "foreign"

    served = Served(run_server(Foreign(multi_turn=True, protocol="tools")).url)
    tools = served.environment_factory()
    tools.reset(**served.dataset(1)[0])
    assert tools.act(["Fly"]).startswith("Invalid answer.")
    assert tools.get_reward() == -0.1


# Sessions


def test_sessions_do_not_disturb_each_other(tools_server):
    """Many episodes in turns, from several threads, each as if it were alone."""
    served = Served(tools_server.url)
    rows, differences = list(served.dataset(NUM_TASKS)), []

    def play_some(thread):
        rng = random.Random(thread)
        pairs = [
            (served.play(row, random.Random(f"{thread}")), local_play(tools_server, row, random.Random(f"{thread}")))
            for row in rows[:6]
        ]
        for _ in range(5):
            for remote, local in pairs:
                actions = rng.choices(["Left", "Down", "Right", "Up"], k=2)
                if not local.done and (remote.take(actions), remote.outcome) != (local.take(actions), local.outcome):
                    differences.append((thread, actions))
        del pairs

    threads = [threading.Thread(target=play_some, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert differences == []


def test_sessions_are_used_again_and_closed_with_the_task(run_server):
    server = run_server(make_env("frozen_lake", **LAKE), max_sessions=3)
    for _ in range(4):  # more than the server would hold
        served = Served(server.url)
        rows = list(served.dataset(NUM_TASKS))
        for row in rows:
            plays = [served.play(row, random.Random(0)) for _ in range(3)]
            assert not any(play.done for play in plays)
            del plays
        del served
        time.sleep(0.3)


def test_a_full_server_says_so_and_goes_on(run_server):
    server = run_server(make_env("frozen_lake", **LAKE), max_sessions=2)
    served = Served(server.url)
    row = served.dataset(1)[0]
    held = [served.play(row, random.Random(0)) for _ in range(2)]
    with pytest.raises((RuntimeError, ConnectionError), match=rf"server at {server.url}.*(CAPACITY|max_sessions)"):
        served.play(row, random.Random(0))
    assert held[0].take(["Up"]).startswith("Reward")
    del held[1]
    assert served.play(row, random.Random(0)).take(["Up"]).startswith("Reward")


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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


# Trainers


def walking(trainer, tokenizer):
    """Half of the completions walk by a tool call, each in another direction; the others write words."""
    generator, ways = random.Random(3), ["Left", "Down", "Right", "Up", "Fly"]

    def generate(prompt_ids, images, fields, num_generations, has_tool_images=False):
        completions = []
        for number in range(len(prompt_ids)):
            call = {"name": "move", "arguments": {"directions": generator.choices(ways, k=2)}}
            text = f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"
            words = [*(generator.randrange(40, 140) for _ in range(5)), tokenizer.eos_token_id]
            completions.append(tokenizer(text)["input_ids"] if number % 2 else words)
        return completions, None

    trainer._generate_single_turn = generate


def train(policy_path, args, env, rows):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=1024),
        args=args,
        reward_funcs=env.success_func,
        train_dataset=rows,
        processing_class=tokenizer,
        environment_factory=env.environment_factory,
    )
    walking(trainer, tokenizer)
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


@pytest.fixture
def tool_args(make_args):
    return make_args(snr=False, max_completion_length=300, reward_weights=[0.0])


def test_training_on_a_server_is_training_here(policy_path, tool_args, run_server):
    here = make_env("frozen_lake", multi_turn=True, protocol="tools")
    served = Served(run_server(here).url)
    rows = served.dataset(NUM_TASKS)
    logs = train(policy_path, tool_args, served, rows)
    same = train(policy_path, tool_args, here, here.dataset(NUM_TASKS).select(rows["seed"]))
    measured = [name for name in logs[0] if name.split("/")[0] in ("loss", "reward", "rewards", "env", "tools")]
    assert {"loss", "env/frozen_lake/return", "rewards/FrozenLakeTools/mean"} <= set(measured)
    assert [[row[name] for name in measured] for row in logs] == [[row[name] for name in measured] for row in same]
    assert len(logs) == 3
    for row in logs:
        assert row["tools/failure_frequency"] == 0
        assert row["tools/call_frequency"] > 0
        assert row["rewards/FrozenLakeTools/mean"] == pytest.approx(row["env/frozen_lake/return"])
    assert any(row["rewards/FrozenLakeTools/std"] > 0 for row in logs)


def test_training_stops_when_the_server_dies(policy_path, tool_args, monkeypatch):
    server = Running(make_env("frozen_lake", multi_turn=True, protocol="tools"))
    served = Served(server.url, timeout=5)
    take = served.tools._take

    def last_turn(tools, actions):
        if not server.server.should_exit:
            server.stop()
        return take(tools, actions)

    monkeypatch.setattr(served.tools, "_take", last_turn)
    with pytest.raises(ConnectionError, match=server.url):
        train(policy_path, tool_args, served, served.dataset(NUM_TASKS))


def test_a_text_rollout_plays_on_a_server(policy_path, make_args, text_server):
    served = Served(text_server.url)
    model = AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=1024)
    trainer = SNRFilteredGRPOTrainer(
        model,
        served.reward_funcs,
        make_args(max_completion_length=60, max_steps=2),
        served.dataset(NUM_TASKS),
        processing_class=AutoTokenizer.from_pretrained(policy_path),
        rollout_func=TextRollout(served, max_turn_tokens=8),
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert all(row["rewards/frozen_lake_return/mean"] < 0 for row in rows)


# The command line


def test_the_command_serves_a_task_on_this_machine(monkeypatch):
    servers, run, port = [], uvicorn.Server.run, free_port()
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: (servers.append(server), run(server)))
    flags = f"--env frozen_lake --env_args size=5 --multi_turn true --port {port} --num_tasks 5 --splits train".split()
    thread = threading.Thread(target=main, args=(flags,), daemon=True)
    thread.start()
    while not servers or not servers[0].started:
        assert thread.is_alive()
        time.sleep(0.01)
    served = Served(f"http://127.0.0.1:{port}")
    tools = served.environment_factory()
    for row in served.dataset(5):
        assert len(tools.reset(**row).split()) == 25
    with pytest.raises(ValueError, match=r"split must be one of \['train'\], got 'test'"):
        served.dataset(1, split="test")
    servers[0].should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match=r"max_sessions must be an integer between 1 and 10000, got 0"):
        make_server(make_env("frozen_lake"), max_sessions=0)
    with pytest.raises(ValueError, match=r"split must be one of"):
        make_server(make_env("frozen_lake"), splits=["dev"])


def test_data_and_splits_are_the_servers(tools_server):
    served = Served(tools_server.url)
    with pytest.raises(ValueError, match=rf"data must be None, the server at {tools_server.url} has the tasks"):
        served.dataset(5, data="somewhere")
    with pytest.raises(ValueError, match=rf"num_prompts must be at most {NUM_TASKS}, the tasks there are, got 21"):
        served.dataset(21)
    assert served.dataset(5)[:] == served.dataset(5)[:] != served.dataset(5, seed=1)[:]


def test_scripted_players_need_the_rules(text_server):
    with pytest.raises(NotImplementedError, match="RemoteEpisode has no solver"):
        evaluate_scripted("oracle", Served(text_server.url), num_prompts=2, num_samples=1)
