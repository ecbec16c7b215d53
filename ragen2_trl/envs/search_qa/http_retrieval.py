"""Retrieval servers over HTTP, from the client's side."""

import asyncio
import json
import ssl
import time
import urllib.parse
from base64 import b64encode
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from ragen2_trl.envs.checks import check_count, check_installed, check_range
from ragen2_trl.envs.responses import plain_text
from ragen2_trl.envs.search_qa.passages import MAX_QUERY_CHARS, Passage, passage_of

T = TypeVar("T")

MAX_TOP_K = 50  # of RAGEN-2's servers

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
        timeout: Seconds that a try may take, from the connection to the last byte of the answer, 0.01 to 600. A
            look-up of the host's name ends within the system's own limits.
        retries: Tries after the first, 0 to 10.
        backoff: Seconds before the second try, 0 to 60.
        max_bytes: Bytes of an answer, 1 to a billion.

    Raises:
        ImportError: If httpx is missing.
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
        check_installed("search_qa", "httpx")
        import httpx

        check_range("timeout", timeout, 0.01, 600)
        check_count("retries", retries, 0, 10)
        check_range("backoff", backoff, 0, 60)
        check_count("max_bytes", max_bytes, 1, 1_000_000_000)
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be http://host or https://host, got {parts.scheme}://{parts.hostname or ''}")
        self.timeout, self.retries, self.backoff, self.max_bytes = timeout, retries, backoff, max_bytes
        self._tls = ssl.create_default_context() if parts.scheme == "https" else False
        path = parts.path if parts.path.strip("/") else "/retrieve"
        self._server = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self.shown_url = f"{self._server}{path}"
        try:
            self._address = httpx.URL(f"{self.shown_url}?{parts.query}" if parts.query else self.shown_url)
        except httpx.InvalidURL as error:
            raise ValueError(f"url is not a valid http(s) address: {error}") from None
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
        import httpx

        body = json.dumps(request).encode()
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.backoff * 2 ** (attempt - 1))
            try:
                status, answer = run_in_own_loop(self._try(body))
            except (TimeoutError, httpx.TransportError) as error:  # refused, reset, too slow, cut off
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
        import httpx

        if isinstance(error, TimeoutError):
            return f"Search request timed out after {float(self.timeout)} seconds."
        if isinstance(error, httpx.NetworkError):
            return f"Could not connect to retrieval server at {self._server}. Is it running?"
        return f"Search error: {type(error).__name__}"

    async def _try(self, body: bytes) -> tuple[int, bytes]:
        """Status and answer, of which a status other than 200 has the beginning alone."""
        import httpx

        status, answer = 0, bytearray()
        try:
            # The transport alone: a client would follow proxies of the environment, unpack compressed answers, and log
            # the address with its query string. One deadline for everything, however slowly a server drips.
            async with asyncio.timeout(self.timeout), httpx.AsyncHTTPTransport(verify=self._tls) as transport:
                request = httpx.Request("POST", self._address, headers=self._headers, content=body)
                response = await transport.handle_async_request(request)
                status = response.status_code
                async for piece in response.aiter_raw():
                    answer += piece
                    if status != 200:
                        break
                    if len(answer) > self.max_bytes:
                        raise RetrievalError(f"{self.shown_url} answered with more than {self.max_bytes} bytes")
        except (TimeoutError, httpx.TransportError):
            if status in (0, 200):  # of an error the status counts, whatever becomes of its reason
                raise
        return status, bytes(answer if status == 200 else answer[:_MAX_REASON_BYTES])


def run_in_own_loop(waiting: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns, also where this thread runs an event loop already, as a notebook's does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # which leaves the thread's own loop alone
            return runner.run(waiting)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: run_in_own_loop(waiting)).result()


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
