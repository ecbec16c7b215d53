"""What OpenEnv's app leaves open: who may talk to it, how much and how long, and answers to what is no request."""

import asyncio
import json
from collections import Counter
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from ragen2_trl.envs.local_requests import BODY_SECONDS, MAX_MESSAGE_BYTES, is_own

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class InvalidResetError(ValueError):
    """A reset to a task that there is not: 422 over HTTP, an error that leaves the session alive elsewhere."""


class WrongOrderError(RuntimeError):
    """A request that another one has to precede: 409 over HTTP."""


class Guard:
    """ASGI middleware in front of OpenEnv's app.

    HTTP bodies and messages have at most `MAX_MESSAGE_BYTES`, whatever their encoding. A page of another site that a
    browser on this machine has open can neither post nor open a websocket. A client has a limited number of
    websockets, and one that is silent for long is closed. There is no MCP: its sessions would have no end.

    Args:
        app: OpenEnv's.
        max_per_client: Websockets of one address at the same time.
        idle_seconds: Longest silence of a websocket.
        is_local: Whether only this machine can connect, so that only its own names are hosts.
    """

    def __init__(self, app: ASGIApp, *, max_per_client: int, idle_seconds: float, is_local: bool):
        self._app = app
        self._max_per_client = max_per_client
        self._idle_seconds = idle_seconds
        self._is_local = is_local
        self._open: Counter[str] = Counter()  # websockets by address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        elif scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
        else:
            await self._post(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        is_socket = scope["type"] == "websocket"
        if scope["path"].rstrip("/") == "/mcp":
            return PlainTextResponse("Tasks have no MCP tools; play at /ws", 404)
        if (is_socket or scope["method"] not in SAFE_METHODS) and not is_own(
            headers.get("origin"), headers.get("host", ""), self._is_local
        ):
            return PlainTextResponse("Origin must be this server", 403)
        if is_socket and self._open[_address(scope)] >= self._max_per_client:
            return PlainTextResponse(f"A client has at most {self._max_per_client} sessions", 429)
        return None

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        address, is_open = _address(scope), True

        async def receive_in_time() -> Message:
            nonlocal is_open
            try:
                return await asyncio.wait_for(receive(), self._idle_seconds)
            except asyncio.TimeoutError:
                reason = f"silent for {self._idle_seconds:g} seconds"
                await send_while_open({"type": "websocket.close", "code": 1001, "reason": reason})
                is_open = False
                return {"type": "websocket.disconnect", "code": 1001, "reason": reason}

        async def send_while_open(message: Message) -> None:
            if is_open:
                await send(message)

        self._open[address] += 1
        try:
            with suppress(WebSocketDisconnect):  # OpenEnv closes a websocket even where the other end has gone
                await self._app(scope, receive_in_time, send_while_open)
        finally:
            self._open[address] -= 1
            self._open += Counter()  # forgets those who have none

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        length = headers.get("content-length")
        if length is not None and "transfer-encoding" in headers:
            # Two lengths: what stands in front of this server may believe the other one.
            await PlainTextResponse("Content-Length and Transfer-Encoding exclude each other", 400)(
                scope, receive, send
            )
            return
        too_long = PlainTextResponse(f"A body has at most {MAX_MESSAGE_BYTES} bytes", 413)
        if length is not None and (not length.isdecimal() or int(length[:20]) > MAX_MESSAGE_BYTES):
            await too_long(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(_read(receive), BODY_SECONDS)
        except asyncio.TimeoutError:
            await PlainTextResponse(f"A body must come within {BODY_SECONDS:g} seconds", 408)(scope, receive, send)
            return
        if body is None:  # the client has gone
            return
        if len(body) > MAX_MESSAGE_BYTES:
            await too_long(scope, receive, send)
            return
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return unread.pop() if unread else await receive()

        await self._app(scope, receive_again, send)


async def _read(receive: Receive) -> bytes | None:
    """A body, or of one that is too long a part that is; `None` where the client has gone."""
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if len(body) > MAX_MESSAGE_BYTES or not message.get("more_body", False):
            return bytes(body)
    return None


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""


def answer_errors(app: FastAPI) -> None:
    """Let an app answer a bad request with its reason. FastAPI repeats the request, which may be no text at all."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(InvalidResetError, lambda request, error: _json(422, str(error)))
    app.add_exception_handler(WrongOrderError, lambda request, error: _json(409, str(error)))


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # for the type checker
    return _json(422, _reasons(error.errors()))


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # for the type checker
    detail: Any = error.detail
    return _json(error.status_code, _reasons(detail) if isinstance(detail, list) else str(detail), error.headers)


def _reasons(errors: Any) -> str:
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in errors[:10])[:1000]


def _json(status: int, reason: str, headers: Any = None) -> Response:
    # In ASCII, since half of a surrogate pair cannot be sent.
    return Response(json.dumps({"detail": reason}), status, headers, "application/json")
