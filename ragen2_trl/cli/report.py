"""Report: one HTML file that compares runs and opens offline.

ragen2-trl report runs/my_run runs/another_run --output report.html
"""

import argparse
from pathlib import Path

from rich.text import Text

from ragen2_trl.cli.console import make_console
from ragen2_trl.reporting.files import write_text
from ragen2_trl.reporting.report import render_report
from ragen2_trl.reporting.run import read_run


def main(args: list[str] | None = None) -> None:
    """Read runs from their folders and write the report.

    Raises:
        SystemExit: With code 2 and a message if a folder holds no run, or if the file cannot be written.
    """
    console = make_console()
    parser = argparse.ArgumentParser(
        "ragen2-trl report", description="Compare runs in one HTML file that opens offline.", allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="Folder of a run: its output_dir.")
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), help="HTML file to write (default: report.html here)."
    )
    arguments = parser.parse_args(args)
    try:
        runs = [read_run(folder) for folder in arguments.runs]
    except ValueError as error:
        parser.error(str(error))
    page = render_report(runs)
    try:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(arguments.output, page)
    except OSError as error:
        parser.error(f"--output cannot be written: {error}")
    console.print(Text(f"{arguments.output} ({len(page) / 1e3:,.0f} kB) opens in a browser, also offline."))
