"""Search engines: text from outside, BM25 in this process, corpora, and a server that misbehaves."""

import re
import socket
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from growth import growth
from hypothesis import given
from hypothesis import strategies as st
from passages import PASSAGES, titles, write_jsonl
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
from ragen2_trl.envs.responses import plain_text
from ragen2_trl.envs.search_qa.http_retrieval import HTTPRetriever, RetrievalError
from ragen2_trl.envs.search_qa.passages import MAX_QUERY_CHARS, Passage, PassageTable, passage_of
from ragen2_trl.envs.search_qa.retrieval import BM25Retriever, open_corpus

# Text from outside


@pytest.mark.parametrize(
    "mark",
    ["<|im_end|>", "<s>", "</s>", "<start_of_turn>", "[INST]", "[/INST]", "<\uff5cUser\uff5c>", "<think>", "[gMASK]"],
)
def test_no_mark_of_a_chat_template_survives(mark):
    assert mark not in plain_text(f"before{mark}after {mark}\n{mark * 3}")
    assert mark not in plain_text(plain_text(mark))


def test_marks_that_a_removal_would_join_do_not_appear():
    for cut in ("\x00", "\x1b", "\ud800", "\x7f"):
        assert plain_text(f"<|im{cut}_end|>") == "< |im_end|>"
        assert plain_text(f"<{cut}|im_end|>") == "< |im_end|>"
        assert plain_text(f"[{cut}INST]") == "[ INST]"


@pytest.mark.parametrize(
    "piece", ["A", "[A", "[AA", "[", "<", "<a", "[/", "a ", "\x00", "\ud800", "[a]", "<a>", "\u0661", "[A_"]
)
def test_cleaning_is_linear_in_the_text(piece):
    def hostile(size):
        return "[" + piece * size

    assert growth(plain_text, hostile, 4000) < 24  # 8 times as much text; the square would be 64


@given(st.text(st.characters()) | st.text("<|>a\x00"))
def test_plain_text_can_always_be_encoded_stands_on_one_line_and_has_no_mark(text):
    plain = plain_text(text)
    plain.encode()
    assert len(plain.splitlines()) <= 1 or "\u2028" in plain
    assert not re.search(r"<\|[^\s<>]{0,50}>", plain)


def test_both_forms_of_a_corpus_are_read():
    assert passage_of({"id": "0", "contents": '"Belmin"\nA town.\nIn Ruk.'}) == Passage("Belmin", "A town.\nIn Ruk.")
    assert passage_of({"title": "Belmin", "text": "A town."}) == Passage("Belmin", "A town.")


# BM25


def test_the_best_passage_comes_first_and_those_without_a_word_are_left_out():
    retriever = BM25Retriever.build(PASSAGES)
    assert titles(retriever.search(["mira TAVOK", "Osk", "X", "zebra", "", "the", "?!"], 5)) == [
        ["Mira Tavok"],
        ["Osk", "Belmin"],
        ["Malcolm X"],
        [],
        [],
        [],
        [],
    ]
    assert titles(retriever.search(["river belmin"], 1)) == [["Belmin"]]


@pytest.mark.parametrize("k", [1, 3, 7, 10, 50])
def test_ties_go_in_the_order_of_the_corpus(k):
    retriever = BM25Retriever.build([Passage("same", "word") for _ in range(5)] + [Passage("same", "word")] * 5)
    assert [place for place, _ in retriever._best("word", k)] == list(range(min(k, 10)))


def test_an_index_without_passages_is_refused_and_one_without_words_finds_nothing():
    with pytest.raises(ValueError, match="passages must not be empty"):
        BM25Retriever.build(())
    with np.errstate(invalid="ignore"):
        assert BM25Retriever.build((Passage("", ""), Passage("?", "!"))).search(["? a word"], 5) == [[]]


def test_a_saved_index_is_memory_mapped_and_finds_the_same(tmp_path):
    built = BM25Retriever.build(PASSAGES)
    built.save(tmp_path / "index")
    loaded = BM25Retriever.load(tmp_path / "index")
    assert all(isinstance(loaded.index.scores[name], np.memmap) for name in ("data", "indices", "indptr"))
    assert loaded.passages.rows.cache_files  # Arrow files, not memory
    queries = ["belmin", "river", "mira tavok potter", "speech"]
    assert loaded.search(queries, 5) == built.search(queries, 5)
    loaded.save(tmp_path / "copy")
    assert BM25Retriever.load(tmp_path / "copy").search(queries, 5) == built.search(queries, 5)


# Corpora


def test_a_corpus_is_indexed_once_and_again_when_it_changes(tmp_path, monkeypatch):
    corpus = write_jsonl(
        tmp_path / "wiki.jsonl", [{"id": str(i), "contents": f'"{p.title}"\n{p.text}'} for i, p in enumerate(PASSAGES)]
    )
    builds = []
    build = BM25Retriever.build
    monkeypatch.setattr(BM25Retriever, "build", lambda passages: builds.append(1) or build(passages))
    for _ in range(2):
        assert titles(open_corpus(corpus, tmp_path / "cache").search(["tavok"], 5)) == [["Mira Tavok"]]
    assert len(builds) == 1
    write_jsonl(tmp_path / "wiki.jsonl", [{"title": "Other", "text": "Tavok moved away."}])
    assert titles(open_corpus(corpus, tmp_path / "cache").search(["tavok"], 5)) == [["Other"]]
    assert len(builds) == 2


def test_an_index_that_was_interrupted_is_not_used(tmp_path, monkeypatch):
    corpus = write_jsonl(tmp_path / "wiki.jsonl", [{"title": p.title, "text": p.text} for p in PASSAGES])

    def fail(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PassageTable, "__iter__", fail)
        open_corpus(corpus, tmp_path / "cache")
    assert titles(open_corpus(corpus, tmp_path / "cache").search(["tavok"], 5)) == [["Mira Tavok"]]


def test_processes_that_start_together_build_one_index(tmp_path, monkeypatch):
    corpus = write_jsonl(tmp_path / "wiki.jsonl", [{"title": p.title, "text": p.text} for p in PASSAGES])
    builds = []
    build = BM25Retriever.build
    monkeypatch.setattr(
        BM25Retriever, "build", lambda passages: builds.append(1) or time.sleep(0.1) or build(passages)
    )
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: open_corpus(corpus, tmp_path / "cache").search(["tavok"], 5), range(4)))
    assert len(builds) == 1
    assert all(titles(each) == [["Mira Tavok"]] for each in found)


def test_what_is_no_corpus_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"corpus must be a URL, an index folder or a file of passages, got '/no"):
        open_corpus("/nowhere/wiki.jsonl")
    with pytest.raises(ValueError, match=r"corpus must be a folder that BM25Retriever.save wrote, got"):
        open_corpus(str(tmp_path))
    wrong = write_jsonl(tmp_path / "wrong.jsonl", [{"name": "a", "body": "b"}])
    with pytest.raises(ValueError, match=r"a passage must have texts 'title' and 'text', or 'contents', got"):
        open_corpus(wrong, tmp_path / "cache")


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


@pytest.mark.parametrize("fault", [status(500), status(503), reset, slow, cut_off, drip])
def test_passing_faults_are_survived(server, fault):
    server.faults = [fault, fault]
    patience = {"timeout": 0.5} if fault in (slow, drip) else {}
    assert titles(client(server, **patience).search(["tavok"], 5)) == [["Mira Tavok"]]
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


def test_a_huge_answer_is_not_read(server):
    server.faults = [garbage(b" " * 3_000_000)]
    with pytest.raises(RetrievalError, match="answered with more than 1000000 bytes"):
        client(server, max_bytes=1_000_000).search(["tavok"], 5)
    assert len(server.requests) == 1


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
        with pytest.raises(RetrievalError, match=f"{url}/retrieve did not answer in 2 tries.*ConnectError"):
            HTTPRetriever(url, retries=1, backoff=0).search(["tavok"], 5)


def test_any_query_can_be_sent(server):
    retriever = client(server)
    for query in ("\ud800", "\x00", '"}', "é" * 10_000, ""):
        assert titles(retriever.search([query], 5)) == [[]]
    assert max(len(body["queries"][0]) for _, _, body in server.requests) == MAX_QUERY_CHARS


@pytest.mark.slow
@pytest.mark.parametrize("where", DRIPS)
def test_a_try_has_one_deadline_wherever_a_server_drips(server, where):
    server.faults = [DRIPS[where]]
    with pytest.raises(RetrievalError, match="the last: TimeoutError"):
        client(server, timeout=0.5, retries=0).search(["tavok"], 5)
