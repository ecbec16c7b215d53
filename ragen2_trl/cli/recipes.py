"""List the recipes and the configurations of `accelerate launch` that ship with the package, or print one of them.

ragen2-trl recipes
ragen2-trl recipes frozen_lake_tiny > mine.yaml
"""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragen2_trl.cli.arguments import parse_plain
from ragen2_trl.cli.shipped import ACCELERATE_CONFIGS, RECIPES
from ragen2_trl.cli.typed import InputError


def main(args: list[str] | None = None) -> None:
    """Print two tables of files, or the text of one file, as it is.

    Raises:
        InputError: If there is no file of that name.
    """
    name = parse_plain("recipes", args).name
    console, files = Console(), RECIPES | ACCELERATE_CONFIGS
    if name is None:
        console.print(files_table("Recipes: ragen2-trl train --recipe NAME, or warm-start for warm_start_*", RECIPES))
        console.print(files_table("For accelerate launch --config_file NAME.yaml", ACCELERATE_CONFIGS))
        console.print("To have a file: ragen2-trl recipes NAME > NAME.yaml", highlight=False)
        return
    if name not in files:
        raise InputError(f"name must be one of {', '.join(files)}, got {name!r}")
    console.out(files[name].read_text(encoding="utf-8"), highlight=False, end="")


def files_table(title: str, files: Mapping[str, Path]) -> Table:
    """Names of files, and the first sentence of each."""
    table = Table("name", "what it is", title=title)
    for name, path in files.items():
        table.add_row(Text(name), Text(first_sentence(path.read_text(encoding="utf-8"))))
    return table


def first_sentence(text: str) -> str:
    """That of the comment which a YAML file begins with.

    >>> first_sentence("# Several turns, on\\n# Sokoban. Slow.\\nmodel: tiny")
    'Several turns, on Sokoban.'
    """
    comment = []
    for line in text.splitlines():
        if not line.startswith("# ") or line.startswith("#   "):
            break
        comment.append(line.removeprefix("# "))
    return " ".join(comment).partition(". ")[0].rstrip(".:") + "."
