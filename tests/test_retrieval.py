"""The search engines: BM25 in this process, a server that misbehaves, and a dense index."""

import json
import logging
import random
import socket
import string
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen2_trl.envs.responses import plain_text
from ragen2_trl.envs.search_qa.retrieval import (
    MAX_QUERY_CHARS,
    BM25Retriever,
    HTTPRetriever,
    Passage,
    PassageTable,
    RetrievalError,
    open_corpus,
    passage_of,
)

PASSAGES = (
    Passage("Belmin", "Belmin is a town on the river Osk."),
    Passage("Osk", "The Osk is a river."),
    Passage("Mira Tavok", "Mira Tavok, a potter, was born in Belmin."),
    Passage("Malcolm X", "Malcolm X gave a speech."),
    Passage("Empty", ""),
)


def titles(found):
    return [[passage.title for passage in passages] for passages in found]


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


def test_ordinary_text_is_left_as_it_is():
    text = "Ángström (b. 1814) wrote: 2 < 3, [citation needed], 5 > 4; नमस्ते, می‌خواهم"
    assert plain_text(text) == text


@given(st.text(st.characters()))
def test_plain_text_can_always_be_encoded_and_stands_on_one_line(text):
    plain = plain_text(text)
    plain.encode()
    assert len(plain.splitlines()) <= 1 or "\u2028" in plain
    assert "<|" not in plain


def test_both_forms_of_a_corpus_are_read():
    assert passage_of({"id": "0", "contents": '"Belmin"\nA town.\nIn Ruk.'}) == Passage("Belmin", "A town.\nIn Ruk.")
    assert passage_of({"title": "Belmin", "text": "A town."}) == Passage("Belmin", "A town.")


@pytest.mark.parametrize("row", [{}, {"title": "a"}, {"title": "a", "text": None}, "a", None, {"contents": 3}])
def test_other_rows_are_named(row):
    with pytest.raises(ValueError, match="a passage must have texts 'title' and 'text', or 'contents', got"):
        passage_of(row)


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


def test_scores_agree_with_the_formula_of_bm25():
    rng = random.Random(0)
    words = [f"w{number}" for number in range(30)]
    documents = [[rng.choice(words) for _ in range(rng.randint(1, 40))] for _ in range(200)]
    retriever = BM25Retriever.build([Passage(str(i), " ".join(words)) for i, words in enumerate(documents)])
    documents = [[str(i), *words] for i, words in enumerate(documents)]  # titles are searched, too
    mean = np.mean([len(words) for words in documents])
    query = ["w3", "w7", "w7", "w20"]

    def score(document):
        total = 0.0
        for word in query:
            frequency = sum(word in other for other in documents)
            idf = np.log(1 + (200 - frequency + 0.5) / (frequency + 0.5))
            count = document.count(word)
            total += idf * count / (count + 1.5 * (0.25 + 0.75 * len(document) / mean))
        return total

    expected = sorted((-score(document), number) for number, document in enumerate(documents))
    (found,) = retriever.search([" ".join(query)], 20)
    assert [int(passage.title) for passage in found] == [number for _, number in expected[:20]]


@pytest.mark.parametrize("k", [1, 3, 7, 10, 50])
def test_ties_go_in_the_order_of_the_corpus(k):
    retriever = BM25Retriever.build([Passage("same", "word") for _ in range(5)] + [Passage("same", "word")] * 5)
    assert retriever._best("word", k) == list(range(min(k, 10)))


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


def test_threads_find_what_one_thread_finds(tmp_path):
    rng = random.Random(0)
    words = ["".join(rng.choices(string.ascii_lowercase, k=4)) for _ in range(300)]
    passages = [Passage(f"p{i}", " ".join(rng.choices(words, k=40))) for i in range(500)]
    BM25Retriever.build(passages).save(tmp_path / "index")
    retriever = BM25Retriever.load(tmp_path / "index")
    queries = [" ".join(rng.choices(words, k=3)) for _ in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: retriever.search([query], 5)[0], queries))
    assert found == retriever.search(queries, 5)


def test_a_long_query_is_cut(tmp_path):
    retriever = BM25Retriever.build(PASSAGES)
    start = time.thread_time()
    assert titles(retriever.search(["zebra " * 1_000_000 + "belmin"], 5)) == [[]]
    assert time.thread_time() - start < 0.05


def test_small_indices_say_nothing_to_the_log(caplog):
    with caplog.at_level(logging.INFO):
        BM25Retriever.build(PASSAGES).search(["belmin", ""], 5)
    assert not caplog.records


# Corpora


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


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


def test_an_index_folder_is_opened(tmp_path):
    BM25Retriever.build(PASSAGES).save(tmp_path / "index")
    assert titles(open_corpus(str(tmp_path / "index")).search(["tavok"], 5)) == [["Mira Tavok"]]


def test_what_is_no_corpus_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"corpus must be a URL, an index folder or a file of passages, got '/no"):
        open_corpus("/nowhere/wiki.jsonl")
    with pytest.raises(ValueError, match=r"corpus must be a folder that BM25Retriever.save wrote, got"):
        open_corpus(str(tmp_path))
    wrong = write_jsonl(tmp_path / "wrong.jsonl", [{"name": "a", "body": "b"}])
    with pytest.raises(ValueError, match=r"a passage must have texts 'title' and 'text', or 'contents', got"):
        open_corpus(wrong, tmp_path / "cache")


# A server


class Server(ThreadingHTTPServer):
    """A retrieval server that misbehaves as told: `faults` are used up one a request, then it answers."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.retriever = BM25Retriever.build(PASSAGES)
        self.faults = []
        self.requests = []
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """Clients that hang up are what the tests are about."""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_args):
        """Nothing."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers), body))
            fault = self.server.faults.pop(0) if self.server.faults else None
        if fault is not None:
            fault(self)
        else:
            self.answer(answer_of(self.server.retriever, body))

    def answer(self, value, status=200):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def answer_of(retriever, body):
    found = retriever.search(body["queries"], body["topk"])
    return {
        "result": [
            [{"document": {"contents": f'"{hit.title}"\n{hit.text}'}, "score": 1.0} for hit in hits] for hits in found
        ]
    }


def status(code):
    return lambda handler: handler.answer({"error": "no"}, code)


def garbage(data):
    return lambda handler: handler.answer(data)


def reset(handler):
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    handler.connection.close()


def slow(handler):
    time.sleep(1.0)


def cut_off(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"result": [[]]}')


def drip(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        time.sleep(0.05)


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def client(server, **options):
    return HTTPRetriever(server.url, **{"timeout": 10, "retries": 2, "backoff": 0.01, **options})


def test_a_server_is_asked_in_the_words_of_search_r1(server):
    found = client(server).search(["tavok", "osk"], 2)
    assert found == BM25Retriever.build(PASSAGES).search(["tavok", "osk"], 2)
    ((path, headers, body),) = server.requests
    assert path == "/retrieve"
    assert headers["Content-Type"] == "application/json"
    assert body == {"queries": ["tavok", "osk"], "topk": 2, "return_scores": True}


def test_a_url_means_a_server(server):
    assert titles(open_corpus(server.url).search(["tavok"], 5)) == [["Mira Tavok"]]


@pytest.mark.parametrize("fault", [status(500), status(503), reset, slow, cut_off, drip])
def test_passing_faults_are_survived(server, fault):
    server.faults = [fault, fault]
    patience = {"timeout": 0.5} if fault in (slow, drip) else {}
    assert titles(client(server, **patience).search(["tavok"], 5)) == [["Mira Tavok"]]
    assert len(server.requests) == 3


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
    monkeypatch.setattr("ragen2_trl.envs.search_qa.retrieval.time", clock)
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


# A dense index


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A tiny random BERT, saved."""
    pytest.importorskip("faiss")
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("encoder")
    words = sorted({word.lower().strip(".,") for p in PASSAGES for word in f"{p.title} {p.text}".split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "query", "passage", ":", ".", ",", *words]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
    return str(folder)


def test_a_dense_index_finds_the_nearest_and_can_be_saved(encoder, tmp_path):
    from transformers import AutoModel, AutoTokenizer

    from ragen2_trl.envs.search_qa.dense_retrieval import DenseRetriever, encode

    model, tokenizer = AutoModel.from_pretrained(encoder), AutoTokenizer.from_pretrained(encoder)
    built = DenseRetriever.build(model, tokenizer, PASSAGES)
    vectors = encode(model, tokenizer, [f"passage: {p.title} {p.text}" for p in PASSAGES])
    (query,) = encode(model, tokenizer, ["query: a potter"])
    nearest = [PASSAGES[i] for i in np.argsort(-(vectors @ query), kind="stable")]
    assert built.search(["a potter"], 3) == [nearest[:3]]
    assert built.search(["a potter"], 99) == [nearest]
    # Padding must not change a vector.
    assert np.allclose(vectors[1], encode(model, tokenizer, ["passage: Osk The Osk is a river."])[0], atol=1e-6)

    built.save(tmp_path / "e5.index")
    corpus = write_jsonl(tmp_path / "wiki.jsonl", [{"title": p.title, "text": p.text} for p in PASSAGES])
    loaded = DenseRetriever.load(encoder, tmp_path / "e5.index", corpus)
    queries = ["a potter", "river", "mira", "speech"] * 20
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda query: loaded.search([query], 5)[0], queries))
    assert found[:4] == built.search(queries[:4], 5)
    assert found == found[:4] * 20


def test_a_dense_index_must_fit_passages_and_model(encoder):
    import faiss
    from transformers import AutoModel, AutoTokenizer

    from ragen2_trl.envs.search_qa.dense_retrieval import DenseRetriever

    model, tokenizer = AutoModel.from_pretrained(encoder), AutoTokenizer.from_pretrained(encoder)
    with pytest.raises(ValueError, match="index must hold one vector for each of 5 passages, got 0"):
        DenseRetriever(model, tokenizer, faiss.IndexFlatIP(32), PASSAGES)
    with pytest.raises(ValueError, match="index must hold vectors of 32 numbers, got 8"):
        DenseRetriever(model, tokenizer, faiss.IndexFlatIP(8), ())
