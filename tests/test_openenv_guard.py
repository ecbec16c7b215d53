"""Who may talk to an OpenEnv server, how much and for how long, and what it answers to what is no request."""

import gc
import http.client
import json
import logging
import random
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import need

need("openenv")

from servers import LAKE, NUM_TASKS
from servers import run_server_fixture as run_server_fixture
from servers import tools_server_fixture as tools_server_fixture
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from ragen2_trl.envs import make_env
from ragen2_trl.envs.local_requests import MAX_MESSAGE_BYTES
from ragen2_trl.openenv import Served, make_server

JSON = {"Content-Type": "application/json"}


def ws_url(server):
    return f"{server.url.replace('http', 'ws')}/ws"


def port_of(server):
    return server.server.config.port


def ask(connection, path, body=b"", headers=JSON, method="POST"):
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


@pytest.fixture(name="http_client")
def http_client_fixture(tools_server):
    connection = http.client.HTTPConnection("127.0.0.1", port_of(tools_server), timeout=20)
    yield connection
    connection.close()


def raw(server, *pieces):
    """The first line of the answer to bytes as they are; further pieces are sent until it comes."""
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=20) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
        except ConnectionError:  # it has answered already
            pass
        answer = b""
        while b"\r\n" not in answer and (piece := client.recv(4096)):
            answer += piece
    return answer.partition(b"\r\n")[0].decode()


# How much


def test_a_chunked_body_has_the_limit_of_any_body(tools_server):
    head = b"POST /reset HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%s\r\n" % (2**16, b" " * 2**16)
    few, many = 4, MAX_MESSAGE_BYTES // 2**16 + 8
    assert raw(tools_server, head, *[chunk] * few, b"2\r\n{}\r\n0\r\n\r\n").startswith("HTTP/1.1 200")
    assert raw(tools_server, head, *[chunk] * many).startswith("HTTP/1.1 413")  # before the last chunk


@pytest.mark.parametrize("lengths", [b"Content-Length: 2", b"content-length: 0", b"Content-Length: 99999999"])
def test_a_body_of_two_lengths_is_refused(lengths, tools_server):
    head = b"POST /reset HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n%s\r\n\r\n" % lengths
    assert raw(tools_server, head, b"2\r\n{}\r\n0\r\n\r\n").startswith("HTTP/1.1 400")


# Who


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        (None, "127.0.0.1:{port}", True),
        ("http://127.0.0.1:{port}", "127.0.0.1:{port}", True),
        ("http://localhost:{port}", "localhost:{port}", True),
        ("http://evil.example", "127.0.0.1:{port}", False),
        ("http://127.0.0.1:1", "127.0.0.1:{port}", False),
        ("http://127.0.0.1:{port}.evil.example", "127.0.0.1:{port}", False),
        ("http://evil.example:{port}", "evil.example:{port}", False),  # a name that leads here: DNS rebinding
        ("null", "127.0.0.1:{port}", False),
        ("", "", False),
        ("http://[", "[", False),
    ],
)
def test_pages_of_other_sites_can_neither_post_nor_open_a_session(origin, host, allowed, tools_server, http_client):
    origin, host = (text and text.format(port=port_of(tools_server)) for text in (origin, host))
    headers = {**JSON, "Host": host, **({} if origin is None else {"Origin": origin})}
    for path in ("/reset", "/step", "/nothing"):
        assert (ask(http_client, path, b"{}", headers)[0] != 403) == allowed
    key = "GET /ws HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    answer = raw(tools_server, f"{key}Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n{lines}\r\n".encode())
    assert answer.startswith("HTTP/1.1 101" if allowed else "HTTP/1.1 403"), answer


def test_a_client_has_a_limited_number_of_sessions_and_gets_them_back(run_server):
    server = run_server(make_env("frozen_lake", **LAKE), max_sessions=4)
    held = [connect(ws_url(server)) for _ in range(3)]  # three quarters
    for _ in range(20):
        with pytest.raises(InvalidStatus) as refused:
            connect(ws_url(server))
        assert (refused.value.response.status_code, refused.value.response.body) == (
            429,
            b"A client has at most 3 sessions",
        )
    held.pop().close()
    for _ in range(50):
        try:
            held.append(connect(ws_url(server)))
            break
        except InvalidStatus:  # the server has not seen the end of the other one yet
            time.sleep(0.05)
    assert len(held) == 3
    for session in held:
        session.close()
    with pytest.raises(ValueError, match="max_sessions_per_client must be an integer between 1 and 4, got 5"):
        make_server(server.env, max_sessions=4, max_sessions_per_client=5)


@pytest.mark.slow
def test_a_silent_session_ends_and_a_trainer_goes_on_with_a_new_one(run_server):
    server = run_server(make_env("frozen_lake", **LAKE), max_sessions=1, idle_seconds=0.3)
    with connect(ws_url(server)) as silent:
        silent.send(json.dumps({"type": "reset", "data": {}}))
        assert json.loads(silent.recv(timeout=20))["type"] == "observation"
        with pytest.raises(ConnectionClosed, match=r"silent for 0\.3 seconds"):
            silent.recv(timeout=20)
    served = Served(server.url)
    row = served.dataset(1)[0]
    for _ in range(2):
        assert served.play(row, random.Random(0)).take(["Fly"]).startswith("Invalid")
        gc.collect()  # hands the session back
        time.sleep(0.6)
    with pytest.raises(ValueError, match=r"idle_seconds must be between 0\.01 and 1000000, got 0"):
        make_server(server.env, idle_seconds=0)


def test_there_is_no_mcp_whose_sessions_never_end(tools_server, http_client):
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}})
    assert ask(http_client, "/mcp", body)[0] == 404
    with pytest.raises(InvalidStatus):
        connect(ws_url(tools_server).replace("/ws", "/mcp"))


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

    server = run_server(env)
    env.episode = slow
    sessions = [connect(ws_url(server)) for _ in range(8)]
    for session in sessions:
        session.send(json.dumps({"type": "reset", "data": {}}))
    for session in sessions:
        assert json.loads(session.recv(timeout=20))["type"] == "observation"
        session.close()
    assert most[0] == workers


# What is no request


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/reset", {"seed": NUM_TASKS}, 422, f"seed must be an int between 0 and {NUM_TASKS - 1}, got {NUM_TASKS}"),
        ("/reset", {"seed": -1}, 422, "seed"),
        ("/reset", {"seed": "x"}, 422, "seed"),
        ("/reset", {"split": "dev"}, 422, "split must be one of ['train', 'test'], got 'dev'"),
        ("/reset", {"split": ["train"]}, 422, "split must be one of"),
        ("/reset", {"episode_id": "x" * 256}, 422, "episode_id"),
        ("/reset", {"episode_id": "\ud800"}, 422, "episode_id"),
        ("/reset", [], 422, "body"),
        ("/step", {"action": {"actions": ["Up"]}}, 409, "reset must come before step"),
        ("/step", {"action": {"actions": "Up"}}, 422, "actions"),
        ("/step", {"action": {"actions": [float("nan")]}}, 422, "actions"),
        ("/step", {}, 422, "action"),
        ("/nothing", {}, 404, "Not Found"),
    ],
)
def test_a_bad_request_is_answered_with_its_reason(path, body, status, reason, http_client):
    got, text = ask(http_client, path, json.dumps(body))
    assert (got, reason in json.loads(text)["detail"]) == (status, True), text


def malformed(rng):
    """A request that no server should take: path, body, and the headers besides."""
    junk = rng.choice(
        [
            bytes(rng.randrange(256) for _ in range(rng.randrange(60))),
            b"[" * rng.randrange(1, 5000),
            b"{" * rng.randrange(1, 500),
            b'{"seed": ' + b"9" * rng.randrange(1, 6000) + b"}",
            json.dumps({"seed": rng.choice([-1, 10**9, 1.5, "x", [], {}, float("nan"), float("inf")])}).encode(),
            json.dumps({"split": rng.choice(["dev", "", 3, [], {}, "\ud800", "x" * 1000])}).encode(),
            json.dumps({"episode_id": rng.choice([3, [], {}, "\ud800", "x" * 300])}).encode(),
            json.dumps(
                {"action": rng.choice([3, [], {}, None, {"actions": 1}, {"actions": [[]]}, {"a": "\udfff"}])}
            ).encode(),
            b'"' + b"\\ud800" * rng.randrange(1, 100),
        ]
    )
    path = rng.choice(
        ["/reset", "/step", "/nothing", "/mcp", "/state", "/reset?x=%00", "/" + "a" * rng.randrange(200)]
    )
    if path.startswith("/reset") and b'"action"' in junk:  # a field that it has no use for, and nothing wrong
        path = "/step"
    content = rng.choice(["application/json", "text/plain", "application/x-www-form-urlencoded", "\xff"])
    return path, junk, {"Content-Type": content, **rng.choice([{}, {"Origin": "http://evil.example"}])}


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_malformed_requests_are_the_clients_fault_and_leave_nothing_behind(count, tools_server, http_client, request):
    logging.disable(logging.CRITICAL)  # pytest keeps whatever is logged
    request.addfinalizer(lambda: logging.disable(logging.NOTSET))
    rng, statuses, sizes = random.Random(0), {}, []
    for number in range(count):
        path, body, headers = malformed(rng)
        status, text = ask(http_client, path, body, headers)
        assert 400 <= status < 500 or body in (b"", b"{}"), (status, path, headers, body[:200], text)
        statuses[status] = statuses.get(status, 0) + 1
        if number + 1 in (count // 2, count):
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            sizes.append((pages * 4096, Counter(type(thing).__qualname__ for thing in gc.get_objects())))
    assert {403, 404, 405, 409, 422} <= statuses.keys() | {405, 409}
    (size, objects), (size_after, objects_after) = sizes
    grown = objects_after - objects
    assert objects_after.total() - objects.total() < 2000, grown.most_common(5)
    assert size_after - size < 4 * 2**20
    assert json.loads(ask(http_client, "/reset", b"{}")[1])["done"] is False
