"""A page in headless Chromium, as a visitor has it: what it asks for, what it complains of, and how it looks."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conftest import PROGRAMS

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-pipe",
)
LOADED = "Page.loadEventFired"


@dataclass
class Browser:
    """Speaks the DevTools protocol over a pair of pipes: JSON, one null byte after each message.

    Args:
        commands: Where commands are written.
        messages: Where answers and events are read.
        events: What happened since the last `open`.
    """

    commands: Any
    messages: Any
    events: list[dict[str, Any]] = field(default_factory=list)
    session: str | None = None
    _count: int = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while (answer := self._read()).get("id") != self._count:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, path: Path, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        """Load a file, as wide as a phone if need be, and wait for it and all that it loads."""
        self.events.clear()
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._seen(LOADED):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; the page's own policy does not hold for it."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    @property
    def requests(self) -> list[str]:
        """Addresses of everything that the page has asked for, itself included."""
        return [event["request"]["url"] for event in self._seen("Network.requestWillBeSent")]

    @property
    def complaints(self) -> list[str]:
        """What the console shows: messages, broken policies, exceptions."""
        logged = [event["entry"]["text"] for event in self._seen("Log.entryAdded")]
        said = [json.dumps(event["args"]) for event in self._seen("Runtime.consoleAPICalled")]
        thrown = [json.dumps(event["exceptionDetails"]) for event in self._seen("Runtime.exceptionThrown")]
        return logged + said + thrown

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write a PNG of the window or of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def _seen(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event.get("method") == method]

    def _read(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self.messages.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("Chromium has ended")
            message += byte
        return json.loads(message)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Chromium with an empty profile; tests that open it are marked with `needs("chromium")`."""
    program = next(filter(None, map(shutil.which, PROGRAMS["chromium"])))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        ours, theirs = os.pipe(), os.pipe()  # (read, write) of commands and of messages
        # Chromium reads file descriptor 3 and writes 4. Above 9 ours cannot be in the way.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (ours[0], theirs[1])]
        lend = f'exec "$@" 3<&{high[0]} 4>&{high[1]}'
        process = subprocess.Popen(
            ["bash", "-c", lend, "bash", program, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=high,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (ours[0], theirs[1], *high):
            os.close(end)
        with os.fdopen(ours[1], "wb") as commands, os.fdopen(theirs[0], "rb") as messages:
            try:
                browser = Browser(commands, messages)
                target = browser.call("Target.createTarget", url="about:blank")["targetId"]
                browser.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
                for domain in ("Page", "Network", "Log", "Runtime"):
                    browser.call(f"{domain}.enable")
                yield browser
            finally:
                process.terminate()
                process.wait(timeout=10)
