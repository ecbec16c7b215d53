"""Write the tables of docs/metrics.md from `ragen2_trl/metrics.py`; the text between them is written by hand.

    python scripts/make_metrics_page.py

A table stands between `<!-- metrics: FAMILY -->` and `<!-- end -->`; `shown` is the metrics that are shown by default,
which the tables of their families leave out.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # `ragen2_trl` of this checkout

from ragen2_trl.metrics import FAMILIES, FIRST_TURN, METRICS  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
TABLE = re.compile(r"(<!-- metrics: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = ("key", "unit", "meaning")


def with_tables(page: str) -> str:
    """The text of the page with every table as the registry has it."""
    return TABLE.sub(lambda found: f"{found[1]}\n{table(found[2])}\n\n{found[3]}", page)


def table(family: str) -> str:
    """The metrics of a family as a Markdown table, or with `shown` those that are shown by default."""
    if family == "shown":
        metrics = [(one.name.replace("mi/{scope}", FIRST_TURN), one) for one in METRICS if one.shown]
    else:
        metrics = [(one.name, one) for one in FAMILIES[family] if not one.shown]
    return markdown([HEAD, *((key(name), one.unit, one.meaning) for name, one in metrics)])


def key(name: str) -> str:
    """A pattern as readers see it: `{k}` as `<k>`."""
    return "`" + re.sub(r"\{(.+?)\}", r"<\1>", name) + "`"


def markdown(rows: list[tuple[str, ...]]) -> str:
    rule = ("---",) * len(rows[0])
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (rows[0], rule, *rows[1:]))


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
