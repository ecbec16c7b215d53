"""How often `health` accuses training runs of tiny models that did not fail: all stored runs, none left out by choice.

    python -m research.tiny_runs    # a minute

Reads `results/runs.parquet` and `results/curves.parquet`. A run is *healthy* if its held-out success was above zero
and never fell to half of its best for good. Runs can be judged that have ten log rows or more, as limits hold from
there, and two held-out evaluations. Their rows are means over eight optimizer steps, mostly.

Writes the table into `results/real_runs.md`.
"""

import json
import re
from collections.abc import Iterator

import pandas as pd

from ragen2_trl.instrument.health import MIN_ROWS, health
from research.real_runs import PAGE, RESULTS, fill

HELD_OUT = re.compile(r"eval/env/[^/]+/success")


def stored_runs() -> Iterator[tuple[str, list[dict[str, float]], int]]:
    """Key, log rows and completions of an optimizer step of each run."""
    fields = pd.read_parquet(RESULTS / "runs.parquet").set_index("key").fields.map(json.loads)
    for key, curves in pd.read_parquet(RESULTS / "curves.parquet").groupby("key", observed=True):
        rows: dict[int, dict[str, float]] = {}
        for step, metric, value in zip(curves.step, curves.metric, curves.value.astype(float), strict=True):
            rows.setdefault(int(step), {"step": int(step)})[str(metric)] = value
        settings = fields[key]
        batches = settings.get("gradient_accumulation_steps", 1)
        yield str(key), [rows[step] for step in sorted(rows)], settings["per_device_train_batch_size"] * batches


def kind(rows: list[dict[str, float]]) -> str:
    """`healthy`, `failed`, or `unknown` where there are too few numbers to say so."""
    success = [row[key] for row in rows for key in row if HELD_OUT.fullmatch(key)]
    if len([row for row in rows if "reward" in row]) < MIN_ROWS or len(success) < 2 or max(success) == 0:
        return "unknown"
    return "failed" if success[-1] <= max(success) / 2 else "healthy"


def table() -> str:
    """How many runs of each kind were ever called what, as Markdown."""
    told: dict[str, list[set[str]]] = {"healthy": [], "failed": [], "unknown": []}
    for _, rows, completions in stored_runs():
        told[kind(rows)].append({state.name for state in health(rows, completions=completions).history})
    names = ("failing", "nothing_to_learn", "drifting", "learning")
    head = " | ".join(f"ever {name.replace('_', ' ')}" for name in names)
    lines = [f"| tiny runs | {head} |", "|---" * 5 + "|"]
    for what in ("healthy", "failed"):
        states = told[what]
        counts = [sum(name in one for one in states) for name in names]
        cells = " | ".join(f"{count} ({count / max(1, len(states)):.1%})" for count in counts)
        lines.append(f"| {len(states)} {what} | {cells} |")
    usable = len(told["healthy"]) + len(told["failed"])
    return "\n".join([*lines, "", f"{usable} of {usable + len(told['unknown'])} stored runs could be used."])


if __name__ == "__main__":
    fill(PAGE, {"tiny runs": table()})
