"""The retrieval server: both kinds of JSON, from the client's side and by hand, and requests that are none."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from passages import PASSAGES, write_jsonl

from ragen2_trl.cli.arguments import retrieval_parser
from ragen2_trl.cli.serve_retrieval import main, make_server, passages_of_worlds
from ragen2_trl.cli.typed import InputError
from ragen2_trl.envs import make_env
from ragen2_trl.envs.search_qa.http_retrieval import HTTPRetriever, RetrievalError
from ragen2_trl.envs.search_qa.passages import MAX_QUERY_CHARS
from ragen2_trl.envs.search_qa.ragen2 import RagenRetriever
from ragen2_trl.envs.search_qa.retrieval import BM25Retriever
from ragen2_trl.envs.search_qa.server import MAX_CONNECTIONS, RetrievalServer

LOCAL = BM25Retriever.build(PASSAGES)


def run(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    return thread


@pytest.fixture
def server():
    with RetrievalServer(LOCAL, len(PASSAGES), port=0, body_seconds=0.5) as server:
        thread = run(server)
        yield server
        server.shutdown()
        thread.join()


def post(server, body, path="/retrieve", **headers):
    """Status and answer of a request; `body` is bytes, or what becomes JSON."""
    connection = http.client.HTTPConnection(*server.server_address, timeout=10)
    try:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.mark.parametrize("client", [HTTPRetriever, RagenRetriever])
def test_our_own_client_finds_what_a_search_here_finds(server, client):
    queries = ["tavok", "osk", "speech", "nothing of that"]
    found = client(server.url, retries=0).search(queries, 3)
    assert found == LOCAL.search(queries, 3)
    for hits, own in zip(found, LOCAL.search(queries, 3), strict=True):
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in own])
        assert [hit.id for hit in hits] == [hit.id for hit in own]


def test_the_reference_s_request_gets_the_reference_s_answer(server):
    status, answer = post(server, {"query": "tavok", "top_k": 1})
    assert status == 200
    (hit,) = answer.pop("results")
    assert answer == {"query": "tavok", "method": "bm25", "num_results": 1}
    assert hit.pop("score") > 0
    assert hit == {"id": "doc_3", "content": "Mira Tavok\nMira Tavok, a potter, was born in Belmin."}


def test_search_r1_s_request_gets_search_r1_s_answer(server):
    status, answer = post(server, {"queries": ["tavok", "?"], "topk": 1, "return_scores": True})
    (((hit,), none), empty) = answer["result"], []
    assert (status, none) == (200, empty)
    document = {"id": "doc_3", "contents": '"Mira Tavok"\nMira Tavok, a potter, was born in Belmin.'}
    assert hit["document"] == document and hit["score"] > 0
    assert post(server, {"queries": ["tavok"], "topk": 1})[1] == {"result": [[document]]}


def test_health_tells_of_the_corpus(server):
    connection = http.client.HTTPConnection(*server.server_address, timeout=10)
    connection.request("GET", "/health")
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert answer == {"status": "healthy", "corpus_size": 5, "index_type": "bm25", "index_loaded": True}


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({}, 400, "query must be a text"),
        ({"query": ""}, 400, "query must be a text"),
        ({"query": None}, 400, "query must be a text"),
        ({"query": ["tavok"]}, 400, "query must be a text"),
        ({"query": "tavok", "top_k": 0}, 400, "top_k must be an integer"),
        ({"query": "tavok", "top_k": "many"}, 400, "top_k must be an integer"),
        ({"query": "tavok", "top_k": True}, 400, "top_k must be an integer"),
        ({"query": "tavok", "top_k": 1e9}, 400, "top_k must be an integer"),
        ({"queries": "tavok"}, 400, "queries must be a list of texts"),
        ({"queries": [1]}, 400, "queries must be a list of texts"),
        ({"queries": []}, 400, "queries must be 1 to 512, got 0"),
        ({"queries": ["a"] * 513}, 400, "queries must be 1 to 512, got 513"),
        ([], 400, "a request must be a JSON object"),
        (b"", 400, "a body must be JSON"),
        (b"\xff\xfe", 400, "a body must be JSON"),
        (b"[" * 100_000, 400, "a body must be JSON"),
        (b'{"query": ' + b"1" * 10_000 + b"}", 400, "a body must be JSON"),
        (b"x" * (2 * 2**20 + 1), 413, "a body has at most 2097152 bytes"),
    ],
)
def test_bad_requests_are_refused_with_the_reason_and_the_server_lives(server, body, status, error):
    try:
        answered, answer = post(server, body)
    except ConnectionError:  # a body that is too long is not read
        assert status == 413
    else:
        assert answered == status and answer["error"].startswith(error)
    assert post(server, {"query": "tavok"})[0] == 200


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/elsewhere", {}, 404),
        ("/retrieve", {"Origin": "http://evil.example"}, 403),
        ("/retrieve", {"Transfer-Encoding": "chunked"}, 411),
        ("/retrieve", {"Content-Length": "-1"}, 411),
        ("/retrieve", {"Content-Length": "9" * 5000}, 413),
    ],
)
def test_other_requests_are_refused(server, path, headers, status):
    assert post(server, {"query": "tavok"}, path, **headers)[0] == status
    assert post(server, {"query": "tavok"}, Origin=server.url)[0] == 200


def test_a_huge_top_k_is_what_there_is(server):
    assert post(server, {"query": "in a town of belmin", "top_k": 10**30})[1]["num_results"] <= len(PASSAGES)
    assert post(server, {"query": "\ud800 tavok " + "x" * 100_000})[0] == 200


def test_long_queries_are_cut(server):
    assert post(server, {"query": "x" * MAX_QUERY_CHARS + " tavok"})[1]["num_results"] == 0


def test_failures_are_answered_with_500_and_no_detail():
    class Broken:
        def search(self, queries, k):
            raise KeyError("secret")

    with RetrievalServer(Broken(), 0, port=0) as server:
        thread = run(server)
        assert post(server, {"query": "x"}) == (500, {"error": "the search failed: KeyError"})
        with pytest.raises(RetrievalError, match="did not answer in 1 tries, the last: status 500"):
            RagenRetriever(server.url, retries=0).search(["x"], 1)
        server.shutdown()
        thread.join()


def test_a_request_that_drips_in_is_ended(server):
    with socket.create_connection(server.server_address, timeout=10) as slow:
        slow.sendall(b"POST /retrieve HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")
        ended = False
        for _ in range(1000):
            try:
                slow.sendall(b" ")
            except OSError:
                ended = True
                break
            time.sleep(0.01)
        assert ended
    assert post(server, {"query": "tavok"})[0] == 200


def test_connections_are_counted():
    with RetrievalServer(LOCAL, len(PASSAGES), port=0, body_seconds=600) as server:
        thread = run(server)
        idle = [socket.create_connection(server.server_address, timeout=60) for _ in range(MAX_CONNECTIONS)]
        with socket.create_connection(server.server_address, timeout=60) as further:
            assert further.recv(100).startswith(b"HTTP/1.0 503")
        for connection in idle:
            connection.close()
        with pytest.raises(RetrievalError, match="refused: status 404"):  # once there is room again
            HTTPRetriever(f"{server.url}/elsewhere", retries=10, backoff=0.1).search(["tavok"], 1)
        server.shutdown()
        thread.join()


# The command


def arguments(*given):
    return retrieval_parser().parse_args(["--port", "0", *map(str, given)])


def test_the_worlds_of_the_task_are_served():
    passages = passages_of_worlds(3, seed=4)
    env = make_env("search_qa", preset="ragen2")
    for split in ("train", "test"):
        for row in env.dataset(3, 4, split):
            assert {passage["title"] for passage in row["passages"]} <= {passage.title for passage in passages}
    with make_server(arguments("--num_worlds", 3, "--seed", 4)) as server:
        assert server.corpus_size == len(passages) == 72
        assert server.server_address[0] == "127.0.0.1"


def test_a_corpus_file_is_served_until_ctrl_c(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ragen2_trl.envs.search_qa.retrieval.cached_assets_path", lambda *names: tmp_path / "cache")
    corpus = write_jsonl(tmp_path / "wiki.jsonl", [{"id": "7", "contents": '"Osk"\nThe Osk is a river.'}])

    def interrupted(server):
        (found,) = server.retriever.search(["river"], 1)
        assert [(hit.id, hit.title) for hit in found] == [("7", "Osk")]
        raise KeyboardInterrupt

    monkeypatch.setattr(RetrievalServer, "serve_forever", interrupted)
    main(["--corpus", corpus, "--port", "0"])
    shown = capsys.readouterr().out
    assert "1 passages at http://127.0.0.1:" in shown and shown.endswith("Stopped.\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--corpus", "http://host"], "corpus must be a file or a folder, got an address"),
        (["--corpus", "/nowhere"], "corpus must be a URL, an index folder or a file of passages, got '/nowhere'"),
        (["--num_worlds", "0"], "num_worlds must be an integer between 1 and 100000, got 0"),
        (["--port", "70000"], "port must be an integer between 0 and 65535, got 70000"),
        (["--index", "x"], "index must be None without an encoder, got 'x'"),
    ],
)
def test_bad_arguments_are_one_line(given, message):
    with pytest.raises(InputError, match=message):
        main(given)


def test_a_taken_port_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InputError, match="Address already in use"):
        main(["--num_worlds", "1", "--port", str(taken.getsockname()[1])])


@pytest.mark.slow
def test_the_command_ends_cleanly_on_ctrl_c():
    command = [sys.executable, "-c", "from ragen2_trl.cli import main; main()", "serve-retrieval", "--port", "0"]
    with subprocess.Popen([*command, "--num_worlds", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        line = process.stdout.readline().decode()
        assert line.startswith("48 passages at http://127.0.0.1:")
        url = line.split(" at ")[1].split(" until")[0]
        assert len(HTTPRetriever(url, retries=0).search(["river"], 3)[0]) == 3
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, b"Traceback" in err) == (0, b"Stopped.\n", False)
