"""What servers for this machine take: how much, for how long, and from whom."""

from ipaddress import ip_address
from urllib.parse import urlsplit

# A turn has at most MAX_RESPONSE_CHARS characters, each at most 12 bytes of JSON.
MAX_MESSAGE_BYTES = 2 * 2**20
BODY_SECONDS = 30.0  # for a client to send a body


def is_own(origin: str | None, host: str, is_local: bool) -> bool:
    """Whether a request comes from no browser, or from one that shows a page of this server itself.

    Args:
        origin: The request's header of that name.
        host: Likewise, empty where there is none.
        is_local: Whether only this machine can connect, so that only its own names are hosts.

    >>> is_own(None, "x", True), is_own("http://evil.example", "localhost:8000", True)
    (True, False)
    """
    if origin is None:
        return True
    try:
        named = urlsplit(f"//{host}").hostname or ""
        same = urlsplit(origin).netloc.lower() == host.lower() != ""
    except ValueError:  # brackets that hold no address
        return False
    # A name of somebody else's may lead to this machine: to its pages this server is their own.
    return same and (not is_local or is_loopback(named))


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own for itself.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("evil.example")
    (True, True, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
