"""Report: one HTML file that compares runs and opens offline.

ragen2-trl report runs/my_run runs/another_run --output report.html
"""

from rich.text import Text

from ragen2_trl.cli.arguments import parse_plain
from ragen2_trl.cli.console import make_console
from ragen2_trl.messages import InputError
from ragen2_trl.record.files import write_text
from ragen2_trl.record.run import read_run
from ragen2_trl.report.page import render_report


def main(args: list[str] | None = None) -> None:
    """Read runs from their folders and write the report.

    Raises:
        InputError: If a folder holds no run, or the file cannot be written.
    """
    console = make_console()
    arguments = parse_plain("report", args)
    try:
        runs = [read_run(folder) for folder in arguments.runs]
    except ValueError as error:
        raise InputError(str(error)) from error
    page = render_report(runs)
    try:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(arguments.output, page)
    except OSError as error:
        raise InputError(f"output={str(arguments.output)!r} cannot be written: {error.strerror}") from error
    console.print(Text(f"{arguments.output} ({len(page) / 1e3:,.0f} kB) opens in a browser, also offline."))
