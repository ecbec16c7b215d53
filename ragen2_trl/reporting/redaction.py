"""Credentials out of whatever is written down: settings, logs, cards, reports.

Where it is doubtful what belongs to a credential, more is hidden and not less. All work is linear in the text.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# What ends a line of HTML or of Markdown, besides the line: there, texts of others are escaped or in code.
MARKUP_ENDS = '\n"<>`'

_SECRET_NAME = r"(?:hub_token|hf_token|access_token|auth_token|api_?-?key|password|passwd|authorization|client_secret)"
_NAME = re.compile(rf"(?:{_SECRET_NAME}|token|secret)", re.IGNORECASE)
_TOKEN = re.compile(r"(?<![A-Za-z0-9])(hf_|sk-|gh[oprsu]_|github_pat_|glpat-|xox[abprs]-|AKIA|AIza)[\w-]{6,}")
# `password: x`, `api_key=x`; `token` and `secret` with `=` alone, since prose says "nats per token: 0.5".
_NAMED = re.compile(
    rf"(?<![A-Za-z0-9_-])((?:{_SECRET_NAME}[\"']?\s{{0,3}}[=:]|(?:token|secret)=)\s{{0,3}}[\"']?(?:(?:bearer|basic)\s)?)"
    r"[^\s&;,\"'<>`]+",
    re.IGNORECASE,
)
# A parameter of an address, by a part of its name.
_PARAMETER = re.compile(
    r"([?&](?=[\w.-]{0,40}(?:key|token|secret|passw|pwd|sig|auth|cred|session))[\w.-]{1,80}=)[^\s&#\"'<>`]+",
    re.IGNORECASE,
)


def hide_credentials(text: str, ends: str = "\n") -> str:
    """A text without credentials: users and passwords of addresses, tokens by their form, values by their names.

    In a line, all from the first `://` to the last `@` behind it goes: a password may hold a slash, a user a space.

    Args:
        text: Of any length.
        ends: Characters that end a line, so that no address goes on behind them.

    >>> hide_credentials("corpus=http://a user:pa/ss@host/retrieve?api_key=abc&k=5 and hf_abcdefgh")
    'corpus=http://***@host/retrieve?api_key=***&k=5 and hf_***'
    """
    if "://" in text and "@" in text:
        text = "".join(map(_without_user, re.split(f"([{re.escape(ends)}])", text)))
    text = _NAMED.sub(rf"\g<1>{HIDDEN}", _PARAMETER.sub(rf"\g<1>{HIDDEN}", text))
    return _TOKEN.sub(rf"\g<1>{HIDDEN}", text)


def _without_user(line: str) -> str:
    start, end = line.find("://") + 3, line.rfind("@")
    return f"{line[:start]}{HIDDEN}{line[end:]}" if 3 <= start <= end else line


@functools.lru_cache(maxsize=4096)  # each row of a log has the names of the row before
def _hide_in_name(name: str) -> str:
    return hide_credentials(name)


def without_credentials(value: Any) -> Any:
    """A value of JSON with `hide_credentials` for all of its texts, and nothing of what is named like a secret."""
    if isinstance(value, str):
        return hide_credentials(value)
    if isinstance(value, Mapping):
        return {
            _hide_in_name(name) if isinstance(name, str) else name: _without_secret(name, item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_credentials(item) for item in value]
    return value


def _without_secret(name: Any, item: Any) -> Any:
    if isinstance(item, int | float):  # nearly all of a log
        return item
    if isinstance(item, str) and item and isinstance(name, str) and _NAME.fullmatch(name):
        return HIDDEN
    return without_credentials(item)
