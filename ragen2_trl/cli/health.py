"""Health: what a training is doing, since when and why, from its log, whoever made it.

ragen2-trl health runs/my_run
ragen2-trl health runs/my_run/checkpoint-100/trainer_state.json
ragen2-trl health train.log --completions 128 --key rewards/solved/mean=success
"""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ragen2_trl.cli.arguments import parse_plain
from ragen2_trl.cli.typed import checked_input
from ragen2_trl.instrument.findings import training_finding
from ragen2_trl.instrument.health import Health, health
from ragen2_trl.messages import counted, printable
from ragen2_trl.record.logs import Log, read_log
from ragen2_trl.record.run import read_run

BARS, WIDTH, MAX_CHARTS = "▁▂▃▄▅▆▇█", 60, 12
CHARTED = ("valid", "valid_thinking", "success", "held_out_success", "reward")


def main(args: list[str] | None = None) -> None:
    """Print the state of each log, the states before it, and a chart of validity, success and reward.

    Raises:
        InputError: If a log cannot be read, or a key cannot be mapped.
    """
    from rich.console import Console

    console = Console()
    arguments = parse_plain("health", args)
    for path in arguments.logs:
        with checked_input():
            log = Log(read_run(path).log_history) if path.is_dir() else read_log(path)
            rows, watch = log.rows, health(log.rows, dict(arguments.key), arguments.completions)
        name = printable(path.name or str(path.resolve()))
        console.print(state_table(name, rows, watch))
        for line in training_finding(watch.state).advice:
            console.print(Text(line))
        console.print(charts(watch, rows))
        if watch.weight > 1:
            each = f"A row averages {watch.weight:.0f} steps and counts as so many generations, one a step."
            console.print(Text(f"{each} Log each step (logging_steps=1) for an earlier and a surer answer."))
        for note in log.notes:
            console.print(Text(note))


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
