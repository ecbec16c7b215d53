"""What can be typed after `ragen2-trl experiment`."""

import argparse
import os
from pathlib import Path

ACTIONS = {
    "run": "train the cells that are not done",
    "status": "how many are",
    "analyse": "tables, figures and verdicts from what there is",
    "list": "the cells, with the command of each",
}
# Where what came of cells is kept, and where they run.
FOLDERS = {
    "tiny": (Path("results"), Path("runs/experiments")),
    "paper": (Path("results/paper"), Path("runs/paper")),
    "quick": (Path("runs/quick/results"), Path("runs/quick/cells")),
}


def experiment_parser() -> argparse.ArgumentParser:
    """Of all actions."""
    listing = "\n".join(f"  {name:<8} {purpose}" for name, purpose in ACTIONS.items())
    parser = argparse.ArgumentParser(
        "ragen2-trl experiment",
        description=f"Claims as YAML files: their trainings, and what came of them.\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    add("files", nargs="+", type=Path, metavar="FILE", help="Experiments; cells that they share are trained once.")
    add("--jobs", type=int, default=_cores(), help="Cells trained at once, each on a core (default: the cores).")
    add(
        "--quick",
        action="store_true",
        help="The first seed with each experiment's quick settings, in a store of its own.",
    )
    add(
        "--scale",
        default="tiny",
        help="tiny, or paper: its models and sizes, one cell after the other with accelerate.",
    )
    for number, (name, what) in enumerate((("results", "what came of cells"), ("runs", "trainings under way"))):
        tiny, paper, quick = (FOLDERS[kind][number] for kind in ("tiny", "paper", "quick"))
        default = f"default: {tiny}; {paper} at that scale, {quick} with --quick"
        add(f"--{name}", type=Path, help=f"Folder of {what} ({default}).")
    add("--only", nargs="+", default=[], metavar="AXIS=LEVEL", help="Cells at these levels of the grid alone.")
    add("--seeds", nargs="+", type=int, metavar="SEED", help="Cells of these seeds alone.")
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="Settings on top of every cell's, to try an experiment; they make other cells.",
    )
    return parser


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
