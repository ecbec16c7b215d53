"""A double of the Hugging Face Hub for tests: an HTTP server that the real clients talk to through `HF_ENDPOINT`.

It speaks what huggingface_hub, transformers, trl and datasets need to create repositories, to push and to load back,
keeps everything in memory, and answers wrongly when a test asks for it (`Hub.fail`, `slow`, `reset`, `hang_up`). Left
out: Xet, multipart uploads, pull requests, tags, discussions, `.gitignore`; a path nobody wrote here answers 501.

    def test_it(hub):
        hub.fail("POST .*/commit/", status=500, times=1)
        done = hub.run("from huggingface_hub import create_repo; create_repo('tester/model')")
        assert done.returncode == 0 and hub.repo("tester/model").messages == ["initial commit"]

huggingface_hub reads its environment when it is imported, therefore clients run in processes of their own.
"""

import os
import re
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hub_messages import MESSAGES, Answer, Request, error_answer
from hub_repos import Repo
from hub_service import TOKEN, Service


@dataclass
class Fault:
    """What to do to requests whose `METHOD /path` matches. `times` counts down; None never ends."""

    pattern: re.Pattern[str]
    times: int | None
    answer: Answer | None = None
    seconds: float = 0.0
    cut: str = (
        ""  # how the connection ends: "before" the work is done, "reset" or "hang up" in the middle of the answer
    )


class Hub(Service):
    """The double. Use it as a context manager or by the fixture `hub`; `home` is the clients' `HF_HOME`."""

    def __init__(self, home: Path):
        self.home = home
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.hub = self
        port = self._server.server_address[1]
        # Like the real storage it is another origin: the client must not send its token there.
        super().__init__(f"http://127.0.0.1:{port}", f"http://localhost:{port}")

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        if self.bugs:
            raise self.bugs[0]

    def close(self) -> None:
        """Stop: from now on connections are refused."""
        if not self._closed.is_set():
            self._closed.set()
            self._server.shutdown()
            self._server.server_close()

    # --- For tests ---

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a client process. No other Hub setting, token or proxy of this machine is passed on."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING")) and not name.lower().endswith(("_proxy", "_offline"))
        }
        return kept | {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # load_dataset counts at an address of its own
        }

    def run(
        self, source: str | Path, *args: str, timeout: float = 300, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run Python code (str) or a script (Path) as a client of this Hub; output is captured."""
        command = [str(source)] if isinstance(source, Path) else ["-c", textwrap.dedent(source)]
        return subprocess.run(
            [sys.executable, *command, *args],
            env=self.environment | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def repo(self, repo_id: str, repo_type: str = "model") -> Repo:
        return self.repos[repo_type, repo_id]

    def seen(self, pattern: str) -> list[Request]:
        """Requests so far whose `METHOD /path` matches."""
        return [request for request in self.requests if re.search(pattern, f"{request.method} {request.path}")]

    def fail(
        self,
        pattern: str,
        status: int = 500,
        *,
        times: int | None = None,
        error: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        html: bool = False,
    ) -> None:
        """Answer with `status` and the Hub's JSON error, or as a gateway in front of it does (`html`).

        Args:
            pattern: regular expression, searched in `METHOD /path`.
            times: how many requests it hits; None is all of them, until `heal`.
            error: the message; by default one that goes with the status.
            code: value of `X-Error-Code`, for instance `RepoNotFound`, `GatedRepo`.
            headers: for instance `{"Retry-After": "0"}` or `{"RateLimit": '"api";r=0;t=0'}` with 429.
        """
        error = MESSAGES.get(status, "Error") if error is None else error
        answer = error_answer(status, error, code, headers or {})
        if html:
            page = f"<html><body><h1>{status} {error}</h1></body></html>".encode()
            answer = Answer(status, page, {"Content-Type": "text/html", **(headers or {})})
        self.faults.append(Fault(re.compile(pattern), times, answer=answer))

    def slow(self, pattern: str, seconds: float, *, times: int | None = None) -> None:
        """Answer rightly, but only after `seconds`."""
        self.faults.append(Fault(re.compile(pattern), times, seconds=seconds))

    def reset(self, pattern: str, *, times: int | None = None, before: bool = False) -> None:
        """Reset the connection after half of the answer's body: the work is done, but the client does not learn it.

        With `before` nothing is done and nothing is answered.
        """
        self.faults.append(Fault(re.compile(pattern), times, cut="before" if before else "reset"))

    def hang_up(self, pattern: str, *, times: int | None = None) -> None:
        """Like `reset`, but the connection ends in good order, only too early. Downloads go on after that."""
        self.faults.append(Fault(re.compile(pattern), times, cut="hang up"))

    def heal(self) -> None:
        """Forget all faults."""
        self.faults.clear()

    # --- Serving ---

    def receive(self, request: Request) -> tuple[Answer, str]:
        """The answer to a request and how to cut the connection (`Fault.cut`), if at all."""
        with self._lock:
            self.requests.append(request)
            hit = self._take_faults(f"{request.method} {request.path}")
        self._closed.wait(sum(fault.seconds for fault in hit))
        cut = next((fault.cut for fault in hit if fault.cut), "")
        answer = next((fault.answer for fault in hit if fault.answer), None)
        if answer is None and cut != "before":
            with self._lock:
                answer = self.answer(request)
        request.status = answer.status if answer and not cut else 0
        return answer or Answer(), cut

    def _take_faults(self, line: str) -> list[Fault]:
        hit = [fault for fault in self.faults if fault.times != 0 and fault.pattern.search(line)]
        for fault in hit:
            if fault.times is not None:
                fault.times -= 1
        return hit


class Server(ThreadingHTTPServer):
    hub: Hub
    daemon_threads = True
    block_on_close = False  # a slow answer must not keep the test waiting

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, ConnectionError):  # clients may hang up
            self.hub.bugs.append(error)


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        url = urlsplit(self.path)
        request = Request(self.command, url.path, parse_qs(url.query), self.headers, self._read_body())
        answer, cut = self.server.hub.receive(request)
        body = b"" if self.command == "HEAD" else answer.body
        if body or not cut:
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True
        if cut in ("before", "reset"):
            self._reset()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _reset(self) -> None:
        """Close without lingering, which the other side sees as a reset rather than as an end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: requests are in `Hub.requests`."""


@pytest.fixture(name="hub")
def hub_double(tmp_path: Path) -> Iterator[Hub]:
    """A Hub of this test alone: user `tester`, organization `team`, token `TOKEN`."""
    with Hub(tmp_path / "hf_home") as double:
        yield double
