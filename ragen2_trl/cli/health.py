"""Health: what a training is doing, since when and why, from its log, whoever made it.

ragen2-trl health runs/my_run
ragen2-trl health runs/my_run/checkpoint-100/trainer_state.json
ragen2-trl health train.log --completions 128 --key rewards/solved/mean=success --json health.json
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ragen2_trl.cli.arguments import parse_plain
from ragen2_trl.cli.typed import checked_input
from ragen2_trl.instrument.findings import Finding, gap_findings, training_finding
from ragen2_trl.instrument.health import COMPLETIONS, Health, health
from ragen2_trl.messages import counted, printable
from ragen2_trl.record.files import write_json
from ragen2_trl.record.logs import read_folder, read_log
from ragen2_trl.remedies import what_if

BARS, WIDTH, MAX_CHARTS = "▁▂▃▄▅▆▇█", 60, 12
LITTLE = 2**24  # bytes of completions that are read to name a setting
CHARTED = ("valid", "valid_thinking", "success", "held_out_success", "reward")


def main(args: list[str] | None = None) -> None:
    """Print the state of each log, the states before it, what to do, a chart of validity, success and reward, and what
    the log lacks; write states and findings with `--json`.

    Raises:
        InputError: If a log cannot be read, or a key cannot be mapped.
    """
    from rich.console import Console

    console = Console()
    arguments, told = parse_plain("health", args), []
    given = COMPLETIONS if arguments.completions is None else arguments.completions
    for path in arguments.logs:
        with checked_input():
            log = read_folder(path) if path.is_dir() else read_log(path)
            rows, watch = log.rows, health(log.rows, dict(arguments.key), given, log.steps_per_generation)
        name = printable(path.name or str(path.resolve()))
        gaps = gap_findings(watch, rows, arguments.completions is not None)
        state, gaps = training_finding(watch.state), [with_setting(finding, path) for finding in gaps]
        console.print(state_table(name, rows, watch))
        for line in [*state.advice, f"More: docs/{state.page}"] if state.advice else ():
            console.print(Text(line))
        console.print(charts(watch, rows))
        for note in [*log.notes, *(finding.text for finding in gaps)]:
            console.print(Text(printable(note)))
        findings = [finding.to_dict() for finding in (state, *gaps)]
        states = [asdict(one) for one in watch.history]
        told.append({"log": str(path), "states": states, "findings": findings, "notes": log.notes})
    if arguments.json is not None:
        with checked_input():
            write_json(arguments.json, told, indent=2)


def with_setting(finding: Finding, path: Path) -> Finding:
    """Groups of equal rewards with the setting that `what-if` names first, unless there is much to read."""
    read = path.glob("completions/*") if path.is_dir() else [path]
    if finding.name != "dead_groups" or sum(file.stat().st_size for file in read) > LITTLE:
        return finding
    try:
        advice = what_if(path).advice
    except (ValueError, OSError):  # `what-if` says why, if it is asked
        return finding
    return replace(finding, advice=(advice, f"ragen2-trl what-if {shlex.quote(str(path))} compares settings."))


def state_table(name: str, rows: Sequence[dict[str, Any]], watch: Health) -> Table:
    """The states of a run, the present one last."""
    table = Table("since step", "training is", "why", title=Text(f"{name}, {counted(len(rows), 'row')}"))
    for state in watch.history[1:] or watch.history:
        style = "bold red" if state.name == "failing" else ""
        table.add_row(str(state.since), state.title, Text(printable(state.why)), style=style)
    return table


def charts(watch: Health, rows: Sequence[dict[str, Any]]) -> Text:
    """A line of bars for each key of validity, success and reward, and marks where training began to fail."""
    points: dict[str, dict[int, float]] = {}
    for number, row in enumerate(rows):
        step = number if row.get("step") is None else int(row["step"])
        for key, value in row.items():
            if watch.name_of(key) in CHARTED and isinstance(value, int | float) and abs(value) < 1e100:
                points.setdefault(key, {})[step] = value
    if not points:
        return Text("No key here is known to hold success, reward or validity; --key maps others.")
    last = max(max(found) for found in points.values()) or 1
    marks = [" "] * WIDTH
    for state in watch.history:
        if state.name == "failing":
            marks[_column(state.since, last)] = "!"
    lines = []
    for key, found in list(points.items())[:MAX_CHARTS]:
        columns: list[list[float]] = [[] for _ in range(WIDTH)]
        for step, value in found.items():
            columns[_column(step, last)].append(value)
        top, low = max(found.values()), min(0.0, *found.values())
        height = (top - low) or 1.0
        bars, bar = "", " "
        for column in columns:
            if column:  # where there is none, the last one stands
                bar = BARS[round((sum(column) / len(column) - low) / height * (len(BARS) - 1))]
            bars += bar
        lines += [f"{printable(key)}, at most {top:.3g}", bars]
    if "!" in marks:
        lines += ["".join(marks), "! training begins to fail"]
    return Text("\n".join([*lines, f"steps 0 to {last}"]))


def _column(step: int, last: int) -> int:
    return min(WIDTH - 1, max(0, step * (WIDTH - 1) // last))
