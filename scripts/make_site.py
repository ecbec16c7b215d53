"""Put the pages of the site together: what `make docs` builds.

    python scripts/make_site.py build/site

The pages are written to be read on GitHub, and are here in other places: links between them are set again, a link to a
file that is no page goes to the repository, or loses its target where pyproject.toml names none. What is generated
takes the place of comments in them: `<!-- commands -->`, `<!-- options: TASK -->` (`common`: of every task),
`<!-- api: NAME ... -->` and `<!-- table: PAGE -->`, the tables of another page. The notebook is a page with what it
showed.
"""

import argparse
import inspect
import json
import re
import shutil
import sys
from os.path import relpath
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # `ragen2_trl` of this checkout

# Where a file of the repository is on the site.
FOLDERS = {"docs": "", "research/results": "results", "research/benchmarks/results": "benchmarks"}
FILES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "docs/notebook.ipynb": "tutorial.md",
    "research/README.md": "experiments.md",
}
SHOWN = {".md", ".png", ".svg", ".css"}
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
MATHS = re.compile(r"(?<![\\$`\w])\$(?=[^\s$])([^$`]+?)(?<=[^\s$])\$(?![\w$])")
COLOURS = re.compile(r"\x1b\[[\d;]*m")
LINK = re.compile(r'(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)|<img src="([^"]+)"')


def pages() -> dict[Path, Path]:
    """Of each file that the site has: where it is here, and where there."""
    found = {ROOT / name: Path(there) for name, there in FILES.items()}
    for folder, there in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SHOWN:
                found[path] = Path(there) / path.relative_to(ROOT / folder)
    return found


def repository() -> str | None:
    """The address of the repository, if pyproject.toml has one."""
    urls = re.search(r'^(?:Repository|Source) = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return urls and urls[1]


def as_page(text: str, path: Path, places: dict[Path, Path], address: str | None) -> str:
    """The text of a page as it is on the site."""

    def placed(target: str) -> str | None:
        if target.startswith(("https://", "http://", "#", "data:")):
            return target
        file, hash_, anchor = target.partition("#")
        linked = (path.parent / file).resolve()
        if not linked.exists():
            raise SystemExit(f"{path.relative_to(ROOT)} links to {target}, which does not exist")
        if linked in places:
            return relpath(places[linked], places[path].parent) + hash_ + anchor
        kind = "tree" if linked.is_dir() else "blob"
        return address and f"{address}/{kind}/main/{linked.relative_to(ROOT)}{hash_}{anchor}"

    def link(found: re.Match[str]) -> str:
        image, words, target, source = found.groups()
        if source:
            return f'<img src="{placed(source)}"'
        there = placed(target)
        return words if there is None else f"{image}[{words}]({there})"

    def tables(found: re.Match[str]) -> str:
        """The tables of another page, whose links are set as if it were this one."""
        other = (path.parent / found[1]).resolve()
        rows = [line for line in other.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        return as_page("\n".join(rows), other, places | {other: places[path]}, address)

    parts = FENCE.split(text)
    for n, part in enumerate(parts):
        if part.startswith("```math"):
            parts[n] = f"<p>{mathml(part[8:-3], 'block')}</p>"
        elif not part.startswith("```"):
            part = re.sub(r"<!-- commands -->", lambda _: commands(), part)
            part = re.sub(r"<!-- options: (\w+) -->", lambda found: options(found[1]), part)
            part = re.sub(r"<!-- api: (.+?) -->", lambda found: api(found[1].split()), part)
            part = MATHS.sub(lambda found: mathml(found[1], "inline"), part)
            part = LINK.sub(link, part).replace("<details>", '<details markdown="1">')
            parts[n] = re.sub(r"<!-- table: (\S+) -->", tables, part)
    return "".join(parts)


def mathml(formula: str, display: str) -> str:
    """Formulas as browsers show them without a script; Markdown reads no emphasis into them."""
    from latex2mathml.converter import convert

    sized = re.sub(r"\\[bB]igg?([lr])(?![a-z])", lambda found: {"l": r"\left", "r": r"\right"}[found[1]], formula)
    text = convert(" ".join(sized.split()), display=display).replace("*", "&#42;").replace("_", "&#95;")
    return f"<span>{text}</span>"  # a line that begins with <math> would be a paragraph of its own


def api(names: list[str]) -> str:
    return "\n\n".join(f"::: {name}" for name in names)


def commands() -> str:
    """Every command with its own arguments."""
    from ragen2_trl.cli.arguments import COMMANDS, FURTHER, command_parser

    lines = []
    for command, purpose in COMMANDS.items():
        lines += [f"## `ragen2-trl {command}`", "", f"{purpose[0].upper()}{purpose[1:]}.", ""]
        rows = [action for action in command_parser(command)._actions if action.dest != "help"]
        if rows:
            lines += ["| argument | default | what it is |", "|---|---|---|"]
        for action in rows:
            name = f"`{action.option_strings[0]}`" if action.option_strings else f"`{action.metavar or action.dest}`"
            default = "" if action.default in (None, [], argparse.SUPPRESS) else f"`{action.default}`"
            lines.append(f"| {name} | {default} | {cell(action.help or '')} |")
        if command in FURTHER:
            lines += ["", f"And those of {FURTHER[command]}."]
        lines.append("")
    return "\n".join(lines)


def options(name: str) -> str:
    """A task's own options and those of its preset, or with `common` the options of every task."""
    from ragen2_trl.cli.envs import described_options
    from ragen2_trl.envs import ENVIRONMENTS

    of = {task: described_options(ENVIRONMENTS[task]) for task in ENVIRONMENTS}
    common = [one for one in next(iter(of.values())) if all(one in options for options in of.values())]
    rows = common if name == "common" else [one for one in of[name] if one not in common]
    if not rows:
        return "It has no options of its own."
    lines = ["| option | default | what it is |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{one}` | `{default}` | {cell(what)} |" for one, default, what in rows)])


def notebook(text: str) -> str:
    """A notebook as Markdown: its text, its code, and what the code showed, without what only a browser draws."""
    parts = []
    for one in json.loads(text)["cells"]:
        source = "".join(one["source"])
        if one["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = ""
        for output in (output for output in one["outputs"] if output.get("name") != "stderr"):
            shown = {kind: "".join(data) for kind, data in output.get("data", {}).items()}
            if "image/png" in shown:
                parts.append(f'<img src="data:image/png;base64,{shown["image/png"].strip()}" alt="">')
            elif "text/markdown" in shown:
                parts.append(shown["text/markdown"])
            elif not shown.get("text/plain", "").startswith("<"):  # an object's name
                printed += "".join(output.get("text", shown.get("text/plain", "")))
        if printed.strip():
            parts.append(f"```text\n{COLOURS.sub('', printed).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def cell(text: str) -> str:
    parts = " ".join(inspect.cleandoc(text).split()).replace("|", "\\|").split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]  # what is not code
    return "`".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Put the pages of the site together.")
    parser.add_argument("folder", type=Path, help="Where to; what is there goes.")
    folder = parser.parse_args().folder
    shutil.rmtree(folder, ignore_errors=True)
    places, address = pages(), repository()
    for path, there in places.items():
        target = folder / there
        target.parent.mkdir(parents=True, exist_ok=True)
        if there.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            text = notebook(text) if path.suffix == ".ipynb" else text
            target.write_text(as_page(text, path, places, address), encoding="utf-8")
        else:
            shutil.copyfile(path, target)


if __name__ == "__main__":
    main()
