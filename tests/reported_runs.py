"""Runs as they lie on disk, healthy and collapsed, and the page that the report makes of them."""

import fcntl
import json
import math
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import PROGRAMS

from ragen2_trl import cli, information_metrics
from ragen2_trl.instrument.information import FORMS
from ragen2_trl.instrument.verdict import Evidence
from ragen2_trl.record.run import read_run
from ragen2_trl.record.saved_measurement import SavedMeasurement
from ragen2_trl.report import page
from ragen2_trl.report.page import render_report

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


STEPS, EVERY, PROMPTS, GROUP = 100, 10, 8, 4
COLLAPSED_AT = 60
HOSTILE = (
    "</pre></script><script>document.title='owned'</script><img src=https://evil.example/x.png onerror=alert(1)>"
    "<style>@import url(https://evil.example/a.css)</style>{{ 7 * 7 }}&lt;b&gt;\u202egnp.exe\u0000\u001b[31mred $x$"
)


class Page(HTMLParser):
    """The elements, attributes and words of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.attributes, self.words = set(), set(), []
        self.headline = ""
        self._open = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self._open.append(tag)

    def handle_endtag(self, tag):
        if tag in self._open:
            del self._open[len(self._open) - 1 - self._open[::-1].index(tag) :]

    def handle_data(self, data):
        if "style" not in self._open and "svg" not in self._open:
            self.words.append(data)
        if self._open[-1:] == ["h1"]:
            self.headline += data

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def prompts_of(suffix=""):
    grids = [f"{'_ ' * i}P{' _' * (PROMPTS - i)} G" for i in range(PROMPTS)]
    return [[{"role": "user", "content": f"Walk from P to G.\n{grid}{suffix}\nThink first."}] for grid in grids]


def make_measurement(step, depends, reasoning="Go right.", suffix=""):
    """Reasonings that their own prompt explains far better than others, or that all prompts explain alike."""
    generator = torch.Generator().manual_seed(step)
    index = torch.arange(PROMPTS).repeat_interleave(GROUP)
    lengths = torch.full((len(index),), 20)
    cross_logps = -6.0 - 0.01 * torch.rand(len(index), PROMPTS, generator=generator)
    if depends:
        cross_logps -= 15.0
        cross_logps[torch.arange(len(index)), index] += 15.0
    rewards = torch.tensor([[1.0, 0.0, 0.0, math.nan]]).repeat(PROMPTS, 1)
    return SavedMeasurement(
        step=step,
        metrics=information_metrics(cross_logps, lengths, index),
        regime="diverse" if depends else "independent",
        prompts=[messages[0]["content"] for messages in prompts_of(suffix)],
        traces=[f"{reasoning} {number}\ud800" for number in range(len(index))],  # no text, but JSON
        prompt_index=index,
        lengths=lengths,
        cross_logps=cross_logps,
        rewards=rewards,
        scores=torch.linspace(0, 0.3, PROMPTS),
        kept=torch.linspace(0, 0.3, PROMPTS) > 0.1,
    )


def make_run(folder, collapsed_at=None, steps=STEPS, text="<think>Go right.</think>Right", suffix="", **lifecycle):
    """A run's folder as training leaves it behind."""
    rng = random.Random(folder.name)
    rows, measurements = [], []
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "loss": rng.gauss(0, 0.1),
            "reward": 0.5 + rng.gauss(0, 0.05),
            "rewards/success/mean": 0.5,
            "env/frozen_lake/success": 0.5 + 0.3 * step / steps,
            "entropy": 0.5,
            "snr/kept_fraction": 0.6,
            "snr/update_compute_fraction": 0.55,
            "cost/sampled_completions": 64.0 * step,
            "cost/plain_completions": 64.0 * step,
            "cost/update_positions": 55.0 * step,
            "cost/plain_update_positions": 100.0 * step,
        }
        if step == 1 or step % EVERY == 0:
            measurement = make_measurement(step, collapsed_at is None or step < collapsed_at, text, suffix)
            row |= {f"mi/first_turn/{key}": value for key, value in measurement.metrics.items()}
            row |= {f"mi/first_turn/mi_zscore_ema_{form}": row[f"mi/first_turn/mi_zscore_{form}"] for form in FORMS}
            row["mi/valid_thinking_rate"] = 0.9
            evidence = Evidence.of(measurement.metrics, step=step, updates=step - 1)
            measurements.append(asdict(evidence))
            if step in (1, steps):
                measurement.save(folder / "_measurements")
        rows.append(row)
    state = {
        "log_history": rows,
        "global_step": steps,
        "max_steps": STEPS,
        "stateful_callbacks": {
            "ragen2_mutual_information": {"watch": {"measurements": measurements}},
            "ragen2_run": {"ended": True, "resumed_at": []} | lifecycle,
        },
    }
    (folder / "diagnostics").mkdir(parents=True)
    (folder / "diagnostics" / "trainer_state.json").write_text(json.dumps(state))
    about = {"settings": {"beta": 0.0, "seed": collapsed_at or 0}, "versions": {"trl": "1.16.0"}}
    (folder / "diagnostics" / "run.json").write_text(json.dumps(about))
    save_completions(folder, steps, text, suffix)
    return folder


def save_completions(folder, step, text, suffix=""):
    """As TRL's `log` writes them: the success of each is told by its text."""
    rows = [
        {
            "step": step,
            "prompt": prompt,
            "completion": [{"role": "assistant", "content": f"{text} {folder.name} {number}"}],
            "success": float(number == 2),
            "advantage": 0.0,
        }
        for prompt in prompts_of(suffix)
        for number in range(GROUP)
    ]
    (folder / "completions").mkdir(exist_ok=True)
    pd.DataFrame(rows).to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")


def report_of(*folders):
    return Page(render_report([read_run(folder) for folder in folders]))


@pytest.fixture(scope="module", name="runs")
def runs_fixture(tmp_path_factory):
    """A healthy run and a collapsed one."""
    folder = tmp_path_factory.mktemp("runs")
    return make_run(folder / "healthy"), make_run(folder / "drifted", COLLAPSED_AT)


@pytest.fixture(scope="module", name="compared")
def compared_fixture(runs, tmp_path_factory):
    """The file with the report of both."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    cli.main(["report", *map(str, runs), "--output", str(path)])
    return path


@pytest.fixture(name="words_only")
def words_only_fixture(monkeypatch):
    """Leaves out the figures, which take nearly all of a report's time."""
    monkeypatch.setattr(page, "_figures", lambda *_: [])
    monkeypatch.setattr(page, "_comparison", lambda _: None)


@pytest.fixture(scope="module", name="browser")
def browser_fixture():
    with open_browser() as opened:
        yield opened


def edit_state(folder, change):
    path = folder / "diagnostics" / "trainer_state.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))


def without_information(folder):
    def change(state):
        state["stateful_callbacks"].pop("ragen2_mutual_information")
        state["log_history"] = [
            {key: value for key, value in row.items() if not key.startswith("mi/")} for row in state["log_history"]
        ]

    edit_state(folder, change)
