"""The text of messages: the one place that knows where chat templates and response parsers put it."""

from collections.abc import Container, Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
Messages: TypeAlias = str | Sequence[Message]
"""A prompt or a completion: a text, or messages as in TRL."""

THINK, END_THINK = "<think>", "</think>"


def flatten(messages: Messages, roles: Container[str] | None = None, joint: str = "") -> str:
    """One text of a prompt or a completion.

    Reasoning that a response parser moved into `reasoning_content` or `thinking` is put back between think tags, so
    that text and messages read the same. Tool calls and pictures are no text.

    Args:
        messages: A text, which stays as it is, or messages.
        roles: Whose messages count; by default everybody's.
        joint: Stands between two messages.

    >>> flatten([{"role": "user", "content": "Where?"}, {"role": "assistant", "thinking": "Go.", "content": "Up"}])
    'Where?<think>Go.</think>Up'
    """
    if isinstance(messages, str):
        return messages
    return joint.join(message_text(one) for one in messages if roles is None or one["role"] in roles)


def message_text(message: Message, picture: str = "") -> str:
    """The text of a message, its reasoning between think tags; `picture` stands for each part that is none."""
    content = content_text(message, picture)
    reasoning = message.get("reasoning_content") or message.get("thinking")
    return f"{THINK}{reasoning}{END_THINK}{content}" if reasoning else content


def content_text(message: Message, picture: str = "") -> str:
    """The content of a message, its parts joined, without reasoning."""
    content = message.get("content") or ""  # None where a message holds nothing but tool calls
    if isinstance(content, str):
        return content
    return "".join(str(part["text"]) if part["type"] == "text" else picture for part in content)


def with_text(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages whose content is text where it was a list of parts, which templates of language models do not take.

    >>> with_text([{"role": "user", "content": [{"type": "text", "text": "Go "}, {"type": "text", "text": "up."}]}])
    [{'role': 'user', 'content': 'Go up.'}]
    """
    return [{**message, "content": content_text(message)} for message in messages]


def check_text_or_messages(field: str, value: object, where: str, pictures: bool = False) -> None:
    """Raises a `ValueError` that names the place unless it is text, or a list of messages as in TRL.

    Args:
        field: Name of the column.
        value: What it holds.
        where: File and row.
        pictures: Whether messages may have parts that are no text.
    """
    if isinstance(value, str):
        return
    got = type(value).__name__
    if isinstance(value, list):
        wrong = [one for one in value if not (isinstance(one, Mapping) and isinstance(one.get("role"), str))]
        wrong += [one for one in value if not wrong and not _is_content(one.get("content", 0), pictures)]
        if not wrong:
            return
        got = f"{wrong[0]!r:.60}"
    raise ValueError(
        f"{field} must be a string or a list of messages, got {got} in {where}; a message has role and content, "
        "which is text or parts {'type': 'text', 'text': …}"
    )


def _is_content(content: object, pictures: bool) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, Mapping) and _is_part(part, pictures) for part in content)
    return content is None or isinstance(content, str)


def _is_part(part: Mapping[str, object], pictures: bool) -> bool:
    kind = part.get("type")
    return isinstance(part.get("text"), str) if kind == "text" else pictures and isinstance(kind, str)
