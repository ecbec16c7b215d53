"""Runs the Python of pages as after the README's install: what only extras bring cannot be imported.

    python tests/core_only.py ../README.md quickstart.md

Ends with the tracebacks of the pages that fail.
"""

import sys
import tomllib
import traceback
from collections.abc import Iterable
from contextlib import chdir
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def distributions() -> set[str]:
    """Names of the packages that an install without extras brings, by what those here require."""
    waiting, seen = [Requirement(line) for line in PROJECT["dependencies"]], set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if (name, *sorted(wanted.extras)) in seen:
            continue
        seen.add((name, *sorted(wanted.extras)))
        try:
            further = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:  # of another platform
            continue
        asked = ("", *wanted.extras)
        waiting += [one for one in further if not one.marker or any(one.marker.evaluate({"extra": x}) for x in asked)]
    return {name for name, *_ in seen}


def block_others(there: set[str]) -> None:
    """From here on, modules of other packages than these look as if they were not installed."""
    there = there | {PROJECT["name"]}
    for module, owners in packages_distributions().items():
        if there.isdisjoint(map(canonicalize_name, owners)):
            sys.modules[module] = None  # type: ignore[assignment]


def run(names: Iterable[str]) -> list[str]:
    """Run the code of pages, each in a folder of its own; gives the tracebacks of those that fail."""
    from pages import make_tool_model, run_page

    told = []
    for page in names:
        with TemporaryDirectory() as folder, chdir(folder):
            make_tool_model()
            try:
                trainer = run_page(page).get("trainer")
                assert trainer is None or trainer.state.global_step > 0
            except Exception:  # noqa: BLE001 - of whatever the page does; all of them are told
                told.append(f"{page}\n{traceback.format_exc()}")
    return told


def main(names: list[str]) -> None:
    block_others(distributions())
    from pages import AS_PRINTED, make_small

    told = run(name for name in names if name == AS_PRINTED)
    make_small(setattr)
    told += run(name for name in names if name != AS_PRINTED)
    if told:
        sys.exit("\n".join(told))


if __name__ == "__main__":
    main(sys.argv[1:])
