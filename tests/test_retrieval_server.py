"""A search server that misbehaves, and its client."""

import json
import socket
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from passages import PASSAGES, titles
from retrieval_servers import (
    cut_off,
    drip,
    garbage,
    reset,
    server_fixture,  # noqa: F401
    slow,
    status,
)

from ragen2_trl.envs.ragen2.search_qa import RagenRetriever
from ragen2_trl.envs.search_qa.http_retrieval import HTTPRetriever, RetrievalError
from ragen2_trl.envs.search_qa.passages import MAX_QUERY_CHARS
from ragen2_trl.envs.search_qa.retrieval import BM25Retriever, open_corpus


def drips(*before: bytes, piece: bytes):
    """Sends `before` and then a piece now and then, for two seconds, and then a right answer would follow."""

    def fault(handler):
        for part in (*before, *[piece] * 40):
            handler.wfile.write(part)
            time.sleep(0.05)

    return fault


HEADERS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
DRIPS = {
    "status": drips(piece=b"H"),
    "headers": drips(HEADERS, piece=b"X: y\r\n"),
    "continue": drips(piece=b"HTTP/1.1 100 Continue\r\n\r\n"),
    "chunk size": drips(HEADERS + b"\r\n", piece=b"0"),
    "body": drips(HEADERS + b"\r\n", piece=b"1\r\n \r\n"),
}


def client(server, **options):
    return HTTPRetriever(server.url, **{"timeout": 10, "retries": 2, "backoff": 0.01, **options})


def test_a_server_is_asked_in_the_words_of_search_r1(server):
    found = client(server).search(["tavok", "osk"], 2)
    assert found == BM25Retriever.build(PASSAGES).search(["tavok", "osk"], 2)
    ((path, headers, body),) = server.requests
    assert path == "/retrieve"
    assert headers["Content-Type"] == "application/json"
    assert body == {"queries": ["tavok", "osk"], "topk": 2, "return_scores": True}


def test_a_server_is_asked_in_the_words_of_ragen(server):
    found = RagenRetriever(server.url, retries=0).search(["tavok", "osk"], 2)
    assert found == BM25Retriever.build(PASSAGES).search(["tavok", "osk"], 2)
    assert [body for _, _, body in server.requests] == [{"query": "tavok", "top_k": 2}, {"query": "osk", "top_k": 2}]


def test_a_url_means_a_server(server):
    assert titles(open_corpus(server.url).search(["tavok"], 5)) == [["Mira Tavok"]]


@pytest.mark.parametrize("fault", [status(500), status(503), reset, slow, cut_off, drip])
def test_passing_faults_are_survived(server, fault):
    server.faults = [fault, fault]
    patience = {"timeout": 0.5} if fault in (slow, drip) else {}
    assert titles(client(server, **patience).search(["tavok"], 5)) == [["Mira Tavok"]]
    assert len(server.requests) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (status(500), "status 500"),
        (reset, "ConnectionResetError|RemoteDisconnected"),
        (slow, "TimeoutError"),
        (drip, "TimeoutError"),
        (cut_off, "IncompleteRead"),
    ],
)
def test_lasting_faults_end_in_an_error_with_address_and_cause(server, fault, cause):
    server.faults = [fault] * 3
    with pytest.raises(RetrievalError, match=rf"{server.url}/retrieve did not answer in 3 tries, the last: ({cause})"):
        client(server, **({"timeout": 0.5} if fault in (slow, drip) else {})).search(["tavok"], 5)
    assert len(server.requests) == 3


@pytest.mark.parametrize("code", [400, 401, 404, 429, 301])
def test_a_refusal_is_not_tried_again(server, code):
    server.faults = [status(code)]
    with pytest.raises(RetrievalError, match=f"refused: status {code}"):
        client(server).search(["tavok"], 5)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"<html>",
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"result": ' + b"1" * 10_000 + b"}",
        b"null",
        b'{"result": null}',
        b'{"result": [null]}',
        b'{"result": [[{"score": 1}]]}',
        b'{"result": [[{"document": {"contents": 3}}]]}',
        b'{"result": [[{"document": {"contents": "a"}, "score": 1' + b"0" * 400 + b"}]]}",
        b'{"result": [{"document": "a"}]}',
    ],
)
def test_an_answer_of_another_form_is_an_error_at_once(server, data):
    server.faults = [garbage(data)]
    with pytest.raises(RetrievalError, match="answered in another form"):
        client(server).search(["tavok"], 5)
    assert len(server.requests) == 1


def test_an_answer_to_other_questions_is_an_error(server):
    server.faults = [garbage(b'{"result": []}')]
    with pytest.raises(RetrievalError, match="answered 0 queries, 1 were asked"):
        client(server).search(["tavok"], 5)


def test_a_huge_answer_is_not_read(server):
    server.faults = [garbage(b" " * 3_000_000)]
    with pytest.raises(RetrievalError, match="answered with more than 1000000 bytes"):
        client(server, max_bytes=1_000_000).search(["tavok"], 5)
    assert len(server.requests) == 1


def test_more_passages_than_asked_for_are_cut(server):
    hits = [{"document": {"title": str(i), "text": ""}} for i in range(9)]
    server.faults = [garbage(json.dumps({"result": [hits]}).encode())]
    assert titles(client(server).search(["tavok"], 2)) == [["0", "1"]]


def test_tries_are_spaced_by_a_growing_pause(server, monkeypatch):
    pauses = []
    clock = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)  # for this module only
    monkeypatch.setattr("ragen2_trl.envs.search_qa.http_retrieval.time", clock)
    server.faults = [status(500)] * 4
    with pytest.raises(RetrievalError):
        client(server, retries=3, backoff=0.5).search(["tavok"], 5)
    assert pauses == [0.5, 1.0, 2.0]


def test_credentials_are_sent_and_never_shown(server):
    url = server.url.replace("http://", "http://ann:se%20cret@") + "/find?key=hid den"
    retriever = HTTPRetriever(url, retries=0)
    assert titles(retriever.search(["tavok"], 5)) == [["Mira Tavok"]]
    ((path, headers, _),) = server.requests
    assert path == "/find?key=hid%20den"
    assert headers["Authorization"] == "Basic YW5uOnNlIGNyZXQ="
    for fault in (status(500), status(403), reset, garbage(b"x"), garbage(b" " * 9_000_000)):
        server.faults = [fault]
        with pytest.raises(RetrievalError, match=f"{server.url}/find") as caught:
            retriever.search(["tavok"], 5)
        shown = "".join(traceback.format_exception(caught.value))
        assert not any(secret in shown for secret in ("cret", "hid", "ann:", "YW5u"))


def test_a_server_that_is_not_there_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RetrievalError, match=f"{url}/retrieve did not answer in 2 tries.*ConnectionRefusedError"):
            HTTPRetriever(url, retries=1, backoff=0).search(["tavok"], 5)


def test_one_client_serves_many_threads(server):
    retriever = client(server)
    queries = ["tavok", "osk", "speech", "belmin"] * 25
    server.faults = [status(500), reset] * 5
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: retriever.search([query], 5)[0], queries))
    assert found == BM25Retriever.build(PASSAGES).search(queries, 5)


def test_any_query_can_be_sent(server):
    retriever = client(server)
    for query in ("\ud800", "\x00", '"}', "é" * 10_000, ""):
        assert titles(retriever.search([query], 5)) == [[]]
    assert max(len(body["queries"][0]) for _, _, body in server.requests) == MAX_QUERY_CHARS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "ftp://host"}, "url must be http://host or https://host, got the scheme 'ftp'"),
        ({"url": "http://"}, "url must be http://host"),
        ({"timeout": 0}, "timeout must be between 0.01 and 600, got 0"),
        ({"retries": -1}, "retries must be an integer between 0 and 10, got -1"),
        ({"backoff": 61}, "backoff must be between 0 and 60, got 61"),
        ({"max_bytes": 0}, "max_bytes must be an integer between 1 and 1000000000, got 0"),
    ],
)
def test_bad_options_are_named_with_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        HTTPRetriever(**{"url": "http://127.0.0.1", **options})


@pytest.mark.parametrize("where", DRIPS)
def test_a_try_has_one_deadline_wherever_a_server_drips(server, where):
    server.faults = [DRIPS[where]]
    with pytest.raises(RetrievalError, match="the last: TimeoutError"):
        client(server, timeout=0.5, retries=0).search(["tavok"], 5)
