"""A small retrieval server: any `Retriever` behind the JSON of RAGEN-2's servers and of Search-R1's.

`POST /retrieve` with `{"query": text, "top_k": n}` is answered by `{"query", "method", "results": [{"id", "content",
"score"}, ...], "num_results"}`, and with `{"queries": [text, ...], "topk": n, "return_scores": true}` by `{"result":
[[{"document": {"id", "contents"}, "score"}, ...], ...]}`. `GET /health` tells of the corpus. Bad requests are answered
with 400 and failures with 500, both with `{"error"}`.
"""

import json
import logging
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ragen2_trl.envs.local_requests import BODY_SECONDS, MAX_MESSAGE_BYTES, is_loopback, is_own
from ragen2_trl.envs.search_qa.http_retrieval import MAX_TOP_K
from ragen2_trl.envs.search_qa.passages import Passage
from ragen2_trl.envs.search_qa.retrieval import Retriever

DEFAULT_TOP_K = 5
MAX_QUERIES = 512  # of a request in Search-R1's words
MAX_CONNECTIONS = 64  # a thread each

# By the search engine: what an answer says of its method, and health of the index.
METHODS = {"bm25": "bm25", "dense": "dense_only"}

logger = logging.getLogger(__name__)


_PATHS = "there are POST /retrieve and GET /health"


class BadRequestError(ValueError):
    """A request that cannot be answered; its message says why, as does the HTTP status."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class RetrievalServer(ThreadingHTTPServer):
    """Serves a search engine until it is shut down. A connection brings one request.

    Bodies have at most `MAX_MESSAGE_BYTES` and come within `body_seconds`; there are at most `MAX_CONNECTIONS` at a
    time. A page of another site that a browser on this machine has open cannot search.

    Args:
        retriever: The search engine.
        corpus_size: Passages it has.
        method: One of `METHODS`.
        host: Address to listen on; there is no authentication.
        port: Port to listen on; 0 takes a free one.
        body_seconds: Seconds for a client to send a request.

    Raises:
        OSError: If the address cannot be listened on.
    """

    request_queue_size = 128

    def __init__(
        self,
        retriever: Retriever,
        corpus_size: int,
        method: str = "bm25",
        host: str = "127.0.0.1",
        port: int = 8000,
        body_seconds: float = BODY_SECONDS,
    ):
        self.retriever = retriever
        self.corpus_size = corpus_size
        self.method = method
        self.is_local = is_loopback(host)
        self._body_seconds = body_seconds
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._reading: dict[socket.socket, float] = {}  # until when a request may still come
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            with suppress(OSError):
                request.sendall(b"HTTP/1.0 503 Service Unavailable\r\n\r\n")
            self.shutdown_request(request)
            return
        self._reading[request] = time.monotonic() + self._body_seconds
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has_read(request)
            self._free.release()

    def has_read(self, request: socket.socket) -> None:
        """The request of a connection is there; what follows takes as long as it takes."""
        self._reading.pop(request, None)

    def service_actions(self) -> None:
        """Ends connections whose request is late, however steadily it drips in."""
        for request, deadline in list(self._reading.items()):
            if time.monotonic() > deadline:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("A client has gone", exc_info=True)  # what goes wrong in here is answered with 500

    def health(self) -> dict[str, Any]:
        """What `GET /health` answers."""
        return {
            "status": "healthy",
            "corpus_size": self.corpus_size,
            "index_type": METHODS[self.method],
            "index_loaded": True,
        }

    def answer(self, request: Any) -> dict[str, Any]:
        """What `POST /retrieve` answers.

        Raises:
            BadRequestError: If the request has neither form.
        """
        if not isinstance(request, dict):
            raise BadRequestError("a request must be a JSON object")
        if "query" in request or "queries" not in request:
            return self._answer_ragen2(request)
        return self._answer_search_r1(request)

    def _answer_ragen2(self, request: Mapping[str, Any]) -> dict[str, Any]:
        query = request.get("query")
        if not isinstance(query, str) or not query.strip():
            raise BadRequestError("query must be a text that is not empty")
        (found,) = self.retriever.search([query], _count(request, "top_k"))
        results = [{"id": passage.id, "content": passage.content, "score": passage.score} for passage in found]
        return {"query": query, "method": self.method, "results": results, "num_results": len(results)}

    def _answer_search_r1(self, request: Mapping[str, Any]) -> dict[str, Any]:
        queries, scores = request["queries"], request.get("return_scores", False)
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise BadRequestError("queries must be a list of texts")
        if not 1 <= len(queries) <= MAX_QUERIES:
            raise BadRequestError(f"queries must be 1 to {MAX_QUERIES}, got {len(queries)}")
        found = self.retriever.search(queries, _count(request, "topk"))
        return {"result": [[_document(passage, scores is True) for passage in passages] for passages in found]}


def _count(request: Mapping[str, Any], field: str) -> int:
    value = request.get(field, DEFAULT_TOP_K)
    if type(value) is not int or value < 1:
        raise BadRequestError(f"{field} must be an integer of at least 1; more than {MAX_TOP_K} count as that many")
    return min(value, MAX_TOP_K)


def _document(passage: Passage, score: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": f'"{passage.title}"\n{passage.text}'}
    return {"document": document, "score": passage.score} if score else document


class _Handler(BaseHTTPRequestHandler):
    server: RetrievalServer
    server_version, sys_version = "ragen2-trl", ""
    timeout = BODY_SECONDS  # of a client that neither reads nor writes

    def do_GET(self) -> None:
        self.server.has_read(self.connection)
        if self.path.partition("?")[0].rstrip("/") == "/health":
            self._send(200, self.server.health())
        else:
            self._send(404, {"error": _PATHS})

    def do_POST(self) -> None:
        try:
            request = self._request()
            self.server.has_read(self.connection)
            self._send(200, self.server.answer(request))
        except BadRequestError as error:
            self._send(error.status, {"error": str(error)})
        except OSError:  # the client has gone
            raise
        except Exception as error:
            logger.exception("A search has failed")
            self._send(500, {"error": f"the search failed: {type(error).__name__}"})

    def _request(self) -> Any:
        length = self.headers.get("content-length", "")
        if self.path.partition("?")[0].rstrip("/") != "/retrieve":
            raise BadRequestError(_PATHS, 404)
        if not is_own(self.headers.get("origin"), self.headers.get("host", ""), self.server.is_local):
            raise BadRequestError("Origin must be this server", 403)
        if "transfer-encoding" in self.headers or not (length.isascii() and length.isdecimal()):
            raise BadRequestError("a request must have a Content-Length and no Transfer-Encoding", 411)
        if len(length) > 20 or int(length) > MAX_MESSAGE_BYTES:
            raise BadRequestError(f"a body has at most {MAX_MESSAGE_BYTES} bytes", 413)
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):  # no JSON, no UTF-8, a nest of brackets, a number of too many digits
            raise BadRequestError("a body must be JSON") from None

    def _send(self, status: int, value: Mapping[str, Any]) -> None:
        data = json.dumps(value).encode()  # in ASCII, since half of a surrogate pair cannot be sent
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s %r", self.client_address[0], format % args)  # with what a client sent, so not as it is
