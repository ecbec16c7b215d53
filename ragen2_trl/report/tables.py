"""Facts and findings on a console."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragen2_trl.instrument.findings import Finding
from ragen2_trl.messages import printable
from ragen2_trl.record.facts import Fact

STYLES = {"failure": "bold red", "warning": "bold"}


def facts_table(facts: Sequence[Fact], title: str, caption: str = "") -> Table:
    """A row for each fact; columns that would be empty are left out. Names in it are escaped."""
    rows = []
    for fact in facts:
        ends = (fact.text(value).replace(" (", "\n(", 1) for value in (fact.first, fact.last))
        best = f"best {fact.text(fact.best, with_step=True)}; " if fact.best not in (None, fact.last) else ""
        rows.append((fact.title, *ends, f"{best}{fact.note}".removesuffix("; ")))
    table = Table(title=Text(printable(title)), caption=Text(caption), box=SIMPLE_HEAD)
    columns = ("", "first", "last", "")
    shown = [n for n in range(len(columns)) if n == 0 or any(row[n] for row in rows)]
    for name in (columns[n] for n in shown):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(*(Text(printable(row[n])) for n in shown))
    return table


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """A finding a line, those in bold that call for action."""
    for finding in findings:
        console.print(Text(printable(finding.text), style=STYLES.get(finding.severity, "")))
