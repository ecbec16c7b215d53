"""A stand-in for an OpenAI-compatible endpoint: it plays, and misbehaves as told."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ragen2_trl.envs import format_response

KEY = "sk-VerySecretKey0123456789abcdefghijklm"  # as long as those that there are
SECRET_PATH = "tenant-4711"  # of the address, which nobody needs to see either


class EndpointDouble(ThreadingHTTPServer):
    """Chat completions: `faults` are used up one a request, the rest are answered with `answer`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults, self.requests, self.lock = [], [], threading.Lock()
        self.at_once = self.most_at_once = 0
        self.answer = lambda messages: format_response("Somewhere.", ["Right", "Down"])

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/{SECRET_PATH}/v1"

    def handle_error(self, request, client_address):
        """Clients that hang up are what the tests are about."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args):
        """Nothing."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.requests.append((self.path, self.headers, body))
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            fault = server.faults.pop(0) if server.faults else None
        try:
            if fault is None:
                self.send(completion(server.answer(body["messages"])))
            else:
                fault(self)
        finally:
            with server.lock:
                server.at_once -= 1

    def send(self, value, status=200, **headers):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(data)


def completion(content, **message):
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": content, **message}}]}


def status(code, **headers):
    """Refuses, and says what it was sent, the key too."""

    def refuse(handler):
        said = f"no\n{handler.headers['Authorization']} at {handler.server.url} is wrong"
        handler.send({"error": {"message": said}}, code, **{"retry_after_ms": "1", **headers})

    return refuse


def says(value):
    return lambda handler: handler.send(value)


def html(handler):
    handler.send(b"<html><body><h1>Sign in</h1></body></html>", Content_Type="text/html")


def slow(handler):
    time.sleep(1.5)
    handler.close_connection = True


def cut_off(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


def endless(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000000")
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(b" " * 100_000)


@pytest.fixture(name="endpoint")
def endpoint_fixture(monkeypatch):
    """A stand-in that the environment's variables name."""
    with EndpointDouble() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        yield server
        server.shutdown()
        thread.join()
