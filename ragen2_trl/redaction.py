"""Credentials out of whatever is shown: logs, cards, reports, uploads, a trainer's arguments where they are saved.

What is read back, such as the settings of a run, is written as it is, for its owner alone. Of what is shown, more is
hidden and not less where it is doubtful what belongs to a credential; but a form alone makes a token only where its
length and its alphabet are those of one. All work is linear in the text.
"""

import copy
import functools
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# What ends a line of HTML or of Markdown, besides the line: there, texts of others are escaped or in code.
MARKUP_ENDS = '\n"<>`'

_SECRET_NAME = (
    r"(?:(?:hub|hf|access|auth|api|session|refresh)_?token|api_?-?key|(?:access|secret|private)_?-?key|password|passwd"
    r"|authorization|client_secret)"
)
_NAME = re.compile(rf".*{_SECRET_NAME}|(?:.*[_.-])?(?:token|secret)", re.IGNORECASE | re.DOTALL)
_TEXT_TOKEN = re.compile(r".*(?:bos|eos|pad|unk|sep|cls|mask|image|video|audio)_token", re.DOTALL)  # of a tokenizer
# Of each kind the beginning, and what else there is of one at the least.
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:(hf_)[A-Za-z0-9]{30,}|(gh[oprsu]_)[A-Za-z0-9]{30,}|(github_pat_)\w{50,}|(glpat-)[\w-]{20,}"
    r"|(sk-)(?=[\w-]{0,200}[0-9])[\w-]{32,}|(xox[abeprs]-)(?=[\w-]{0,200}[0-9])[\w-]{20,}|(AKIA)[A-Z0-9]{16,}"
    r"|(AIza)[\w-]{35,})",
    re.ASCII,
)
# `password: x`, `api_key=x`; `token` and `secret` with `=` alone, since prose says "nats per token: 0.5".
_NAMED = re.compile(
    rf"((?:{_SECRET_NAME}[\"']?\s{{0,3}}[=:]|(?<![A-Za-z0-9_-])(?:token|secret)=)\s{{0,3}}[\"']?(?:(?:bearer|basic)\s)?)"
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

    >>> hide_credentials("corpus=http://a user:pa/ss@host/retrieve?api_key=abc&k=5 in hf_home")
    'corpus=http://***@host/retrieve?api_key=***&k=5 in hf_home'
    """
    if "://" in text and "@" in text:
        text = "".join(map(_without_user, re.split(f"([{re.escape(ends)}])", text)))
    text = _NAMED.sub(rf"\g<1>{HIDDEN}", _PARAMETER.sub(rf"\g<1>{HIDDEN}", text))
    return _TOKEN.sub(lambda found: f"{found[found.lastindex or 0]}{HIDDEN}", text)


def _without_user(line: str) -> str:
    start, end = line.find("://") + 3, line.rfind("@")
    return f"{line[:start]}{HIDDEN}{line[end:]}" if 3 <= start <= end else line


@functools.lru_cache(maxsize=4096)  # each row of a log has the names of the row before
def _hide_in_name(name: str) -> str:
    return hide_credentials(name)


@functools.lru_cache(maxsize=4096)
def _is_secret(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and not _TEXT_TOKEN.fullmatch(name)


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
        items = [without_credentials(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _without_secret(name: Any, item: Any) -> Any:
    if isinstance(item, int | float):  # nearly all of a log
        return item
    if isinstance(item, str) and item and isinstance(name, str) and _is_secret(name):
        return HIDDEN
    return without_credentials(item)


def with_hidden_credentials(args: Any) -> Any:
    """A trainer's arguments without credentials where they are saved, sent to trackers or shown.

    transformers writes all arguments to `training_args.bin` and to trackers, some of which save them by a trainer of
    their own, and masks only `hub_token`, for trackers. So the arguments hide what they hold: whoever reads a field in
    this process, such as a client of vLLM, gets it as it is. They share their fields with the given ones, which are
    given back if they have no credentials.

    Args:
        args: transformers' `TrainingArguments`, or a subclass such as `GRPOConfig`.
    """
    seen = _seen(args)
    if isinstance(args, _Hiding) or all(seen[name] is value for name, value in vars(args).items()):
        return args
    kind = type(args)
    shared: Any = object.__new__(type(kind.__name__, (_Hiding, kind), {"__module__": kind.__module__}))
    shared.__dict__ = args.__dict__
    return shared


def _seen(args: Any) -> dict[str, Any]:
    """The attributes of arguments: those that hide nothing as they are, the others without what they hide."""
    return {
        name: value if (clean := _without_secret(name, value)) is value or clean == value else clean
        for name, value in vars(args).items()
    }


class _Hiding:
    """Arguments that are without credentials in a pickle and in words; a copy within the process has them."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        seen = {**_seen(self), "hub_token": None}  # who reads the file logs in as they do elsewhere
        return _made(type(self).__mro__[2], seen).__reduce_ex__(0)  # later protocols take no object of another class

    def __copy__(self) -> Any:
        return _made(type(self), vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _made(type(self), copy.deepcopy(vars(self), memo))

    def to_dict(self) -> dict[str, Any]:
        seen: dict[str, Any] = without_credentials(super().to_dict())  # type: ignore[misc]
        return seen

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()})"

    __repr__ = __str__


def _made(kind: type, values: dict[str, Any]) -> Any:
    new: Any = object.__new__(kind)
    vars(new).update(values)
    return new
