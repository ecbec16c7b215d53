"""A task on an OpenEnv server over loopback: the same game as here, for one player or many."""

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import need

need("openenv")

import uvicorn
from servers import LAKE, NUM_TASKS, free_port, local_play, turns
from servers import run_server_fixture as run_server_fixture
from servers import session_fixture as session_fixture
from servers import text_server_fixture as text_server_fixture
from servers import tools_server_fixture as tools_server_fixture

from ragen2_trl.cli.evaluate import evaluate_scripted
from ragen2_trl.envs import format_response, make_env
from ragen2_trl.openenv import Served, make_server
from ragen2_trl.openenv.__main__ import main

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


def test_measures_bounds_and_limits_of_a_task_travel(run_server):
    env = make_env("search_qa", multi_turn=True, max_turn_tokens=50)
    server = run_server(env)
    served = Served(server.url)
    assert (served.max_turn_tokens, served.returns) == (50, env.returns)
    assert served.reward_funcs[0].bounds == env.reward_funcs[0].bounds == (0.0, 1.0)
    play = served.play(served.dataset(1)[0], random.Random(0))
    play.respond(format_response("So.", ["finish[No idea]"]))
    assert play.outcome.measures == {"exact_match": 0.0, "f1_success": 0.0}


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


@pytest.mark.slow
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


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_is_a_limit_over_all_sessions(workers, run_server):
    env = make_env("frozen_lake", **LAKE)
    env.workers = workers
    usual, lock, at_work, most = env.episode, threading.Lock(), [0], [0]

    def slow(row, rng):
        with lock:
            at_work[0] += 1
            most[0] = max(most[0], at_work[0])
        time.sleep(0.05)
        with lock:
            at_work[0] -= 1
        return usual(row, rng)

    served = Served(run_server(env).url)
    (row,) = served.dataset(1)
    env.episode = slow
    with ThreadPoolExecutor(8) as pool:
        plays = list(pool.map(lambda _: served.play(row, random.Random(0)), range(8)))
    assert len(plays) == 8 and most[0] == workers


# The command line


def test_the_command_serves_a_task_on_this_machine(monkeypatch):
    servers, run, port = [], uvicorn.Server.run, free_port()
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: (servers.append(server), run(server)))
    flags = f"--env_name frozen_lake --env_args size=5 --multi_turn true --port {port} --num_tasks 5 --splits train"
    thread = threading.Thread(target=main, args=(flags.split(),), daemon=True)
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


def test_the_command_names_what_it_cannot_serve(capsys):
    for flags, said in (
        (["--env_name", "frozen_lake,sokoban"], "env_name must be one task, got 'frozen_lake,sokoban'"),
        (["--max_sessions", "0"], "max_sessions must be an integer between 1 and 10000, got 0"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(flags)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


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
