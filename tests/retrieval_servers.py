"""A retrieval server that misbehaves as told, for the tests of its clients."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from passages import PASSAGES

from ragen2_trl.envs.search_qa.retrieval import BM25Retriever


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
    """The answer to a request in the JSON of RAGEN's servers, or of Search-R1's."""
    if "query" in body:
        (found,) = retriever.search([body["query"]], body["top_k"])
        return {"results": [{"id": hit.id, "content": hit.content, "score": hit.score} for hit in found]}
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


@pytest.fixture(name="server")
def server_fixture():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
