"""What clients of the Hub's double ask, and what it answers, errors included."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

QUOTA = "Private repository storage limit reached, please upgrade your plan to increase your private storage limit."
MESSAGES = {
    400: "Bad request",
    401: "Invalid credentials in Authorization header",
    403: "Forbidden: you must use a write token to upload to a repository.",
    413: "Payload too large",
    429: "Too many requests",
    500: "Internal Error - We're working hard to fix this as soon as possible!",
    502: "Bad gateway",
    503: "Service unavailable",
    504: "Gateway timeout",
}


class HubError(Exception):
    """An answer with an error status. `code` goes into `X-Error-Code`, by which the client picks its exception."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        self.answer = error_answer(status, message, code, headers)


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})


def error_answer(status: int, message: str, code: str | None, headers: Mapping[str, str]) -> Answer:
    named = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
    return as_json({"error": message}, status, {**named, **headers})


@dataclass
class Request:
    """What a client asked. `path` is still percent-encoded and has no query. `status` is 0 where none was answered."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: Message
    body: bytes
    status: int = 0

    @property
    def authorized(self) -> bool:
        """Whether the request carries an Authorization header, valid or not."""
        return "Authorization" in self.headers

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def is_true(values: Mapping[str, list[str]], key: str) -> bool:
    return values.get(key, ["false"])[0].lower() in ("true", "1")


def ranged(answer: Answer, request: Request) -> Answer:
    """The part of the body that `Range` asks for: clients resume interrupted downloads."""
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
    if not wanted:
        return answer
    size, start = len(answer.body), int(wanted[1])
    if start >= size:
        raise HubError(416, "Range not satisfiable", **{"Content-Range": f"bytes */{size}"})
    part = answer.body[start : int(wanted[2]) + 1 if wanted[2] else size]
    span = f"bytes {start}-{start + len(part) - 1}/{size}"
    return Answer(206, part, {**answer.headers, "Content-Range": span})
