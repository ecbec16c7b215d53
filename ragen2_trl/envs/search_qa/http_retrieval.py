"""Retrieval servers over HTTP, from the client's side."""

import http.client
import json
import socket
import ssl
import time
import urllib.parse
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ragen2_trl.envs.checks import check_count, check_range
from ragen2_trl.envs.responses import plain_text
from ragen2_trl.envs.search_qa.passages import MAX_QUERY_CHARS, Passage, passage_of

T = TypeVar("T")

MAX_TOP_K = 50  # of RAGEN-2's servers

_READ_BYTES = 65_536
_MAX_REASON_BYTES, _MAX_REASON = 4000, 300  # of a server's error, bytes and characters


class RetrievalError(RuntimeError):
    """A search engine that should answer does not.

    Args:
        message: What happened.
        shown: The same in the words that RAGEN-2 shows to a model, without line breaks.
    """

    def __init__(self, message: str, shown: str = ""):
        super().__init__(message)
        self.shown = shown or f"Search error: {message}"


class NoAnswer(RetrievalError, ConnectionError):
    """A search engine cannot be reached, or gives no whole answer in time."""


class HTTPRetriever:
    """A retrieval server that speaks the JSON of Search-R1's.

    `POST {"queries": [...], "topk": k, "return_scores": true}` is answered by
    `{"result": [[{"document": {"contents": "title\\ntext"}, "score": s}, ...], ...]}`. Every search has a connection
    of its own. Lost connections, time-outs and 5xx are tried again after 1, 2, 4… times `backoff`; nothing else is.

    Args:
        url: The server's, http or https; the path is `/retrieve` unless given. `user:password@` is sent as basic
            authentication, and neither that nor a query string is ever shown.
        timeout: Seconds that a try may take, from the connection to the last byte of the answer, 0.01 to 600. Before
            that the system looks up the host's name, within its own limits.
        retries: Tries after the first, 0 to 10.
        backoff: Seconds before the second try, 0 to 60.
        max_bytes: Bytes of an answer, 1 to a billion.

    Raises:
        ValueError: If an argument is outside its range.
    """

    form = "{'result': [[{'document': ...}]]}"  # of an answer

    def __init__(
        self,
        url: str,
        timeout: float = 30.0,
        retries: int = 3,
        backoff: float = 0.5,
        max_bytes: int = 8_000_000,
    ):
        check_range("timeout", timeout, 0.01, 600)
        check_count("retries", retries, 0, 10)
        check_range("backoff", backoff, 0, 60)
        check_count("max_bytes", max_bytes, 1, 1_000_000_000)
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be http://host or https://host, got the scheme {parts.scheme!r}")
        self.timeout, self.retries, self.backoff, self.max_bytes = timeout, retries, backoff, max_bytes
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port
        path = parts.path if parts.path.strip("/") else "/retrieve"
        self._server = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self.shown_url = f"{self._server}{path}"
        # A space would end the address; http.client would refuse it and show it.
        self._target = urllib.parse.quote(f"{path}?{parts.query}" if parts.query else path, safe="%/?&=:@!$'()*+,;~")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if parts.username is not None:
            user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {b64encode(user.encode()).decode()}"

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """As `Retriever.search`.

        Raises:
            RetrievalError: If the server cannot be reached, refuses, or answers in another form.
        """
        cut = [query[:MAX_QUERY_CHARS] for query in queries]
        found = self.ask({"queries": cut, "topk": k, "return_scores": True}, search_r1_results)
        if len(found) != len(queries):
            raise RetrievalError(f"{self.shown_url} answered {len(found)} queries, {len(queries)} were asked")
        return [hits[:k] for hits in found]

    def ask(self, request: Mapping[str, Any], results: Callable[[Any], T]) -> T:
        """What `results` makes of the server's answer to a request.

        Raises:
            RetrievalError: If the server cannot be reached, refuses, or answers in another form.
        """
        answer = self._post(request)
        try:
            return results(json.loads(answer))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:  # a nest of brackets, 1e999
            raise RetrievalError(
                f"{self.shown_url} answered in another form than {self.form}: {type(error).__name__}"
            ) from error

    def _post(self, request: Mapping[str, Any]) -> bytes:
        body = json.dumps(request).encode()
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.backoff * 2 ** (attempt - 1))
            try:
                status, answer = self._try(body)
            except (OSError, http.client.HTTPException) as error:  # refused, reset, too slow, cut off
                cause: Exception | None = error
                reason, shown = type(error).__name__, self._failure(error)
                continue
            if status == 200:
                return answer
            cause, reason = None, f"status {status}"
            shown = f"Retrieval server error (status {status}): {error_text(answer)}"
            if status < 500:
                raise RetrievalError(f"{self.shown_url} refused: {reason}", shown)
        tries = f"{self.retries + 1} tries, the last: {reason}"
        raise NoAnswer(f"{self.shown_url} did not answer in {tries}", shown) from cause

    def _failure(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"Search request timed out after {float(self.timeout)} seconds."
        if isinstance(error, (ConnectionError, socket.gaierror)):
            return f"Could not connect to retrieval server at {self._server}. Is it running?"
        return f"Search error: {type(error).__name__}"

    def _try(self, body: bytes) -> tuple[int, bytes]:
        connection = _Connection(self._host, self._port, time.monotonic() + self.timeout, self._tls)
        try:
            connection.request("POST", self._target, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                return response.status, _reason(response)
            answer = bytearray()
            while piece := response.read1(_READ_BYTES):  # `read` would wait for all of it, however slow
                answer += piece
                if len(answer) > self.max_bytes:
                    raise RetrievalError(f"{self.shown_url} answered with more than {self.max_bytes} bytes")
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            return response.status, bytes(answer)
        finally:
            connection.close()


class _Timed:
    """A socket that waits until a deadline and no longer, however often it is read.

    http.client gives each wait for a byte the whole time-out: a server that sends one now and then, of a header, of
    the size of a chunk or of `100 Continue`, would be waited for without end.
    """

    deadline = 0.0

    def recv_into(self, *args: Any) -> int:
        self._wait()
        found: int = super().recv_into(*args)  # type: ignore[misc]
        return found

    def sendall(self, *args: Any) -> None:
        self._wait()
        super().sendall(*args)  # type: ignore[misc]

    def _wait(self) -> None:
        self.settimeout(_left(self.deadline))  # type: ignore[attr-defined]


class _TimedSocket(_Timed, socket.socket):
    pass


class _TimedTLS(_Timed, ssl.SSLSocket):
    pass


def _left(deadline: float) -> float:
    """Seconds until a deadline.

    Raises:
        TimeoutError: If it has passed.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("no whole answer in time")
    return seconds


class _Connection(http.client.HTTPConnection):
    """A connection of one try, which ends at its deadline."""

    def __init__(self, host: str, port: int | None, deadline: float, tls: ssl.SSLContext | None):
        super().__init__(host, port or (http.client.HTTP_PORT if tls is None else http.client.HTTPS_PORT))
        self._deadline, self._tls = deadline, tls

    def connect(self) -> None:
        plain = _TimedSocket(fileno=_connected(self.host, self.port, self._deadline).detach())
        plain.settimeout(_left(self._deadline))
        timed: Any = plain
        if self._tls is not None:
            self._tls.sslsocket_class = _TimedTLS
            timed = self._tls.wrap_socket(plain, server_hostname=self.host)  # whose handshake has one time-out
        timed.deadline = self._deadline
        self.sock = timed


def _connected(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first of a host's addresses that takes one; `create_connection` would give each the time."""
    failure: OSError = ConnectionError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        found = socket.socket(family, kind, protocol)
        try:
            found.settimeout(_left(deadline))
            found.connect(address)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as http.client does
        except OSError as error:
            found.close()
            failure = error
        else:
            return found
    raise failure


def _reason(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(_MAX_REASON_BYTES)
    except (OSError, http.client.HTTPException):  # the status has come, and it is what counts
        return b""


def error_text(answer: bytes) -> str:
    """The reason in a server's answer, its `error` where it is RAGEN-2's, in one harmless line."""
    text = answer.decode(errors="replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    return plain_text(str(value["error"] if isinstance(value, dict) and "error" in value else value))[:_MAX_REASON]


def search_r1_results(answer: Any) -> list[list[Passage]]:
    """The passages of each query in an answer in Search-R1's words."""
    return [
        [replace(passage_of(hit["document"]), score=score_of(hit.get("score"))) for hit in hits]
        for hits in answer["result"]
    ]


def score_of(value: Any) -> float:
    """The score of a hit, 0.0 where it has none."""
    return float(value) if type(value) in (int, float) else 0.0
