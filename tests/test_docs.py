"""The code in README and docs/ runs, and links lead somewhere.

Every block of Python runs, those of a page one after the other with the same names, and a trainer that a block only
makes is trained. What is replaced is in `pages.py`; nothing is in the guide to an environment of one's own, which is
small as it stands. What only an extra brings cannot be imported (`core_only.py`).
The page on reporting runs against a fake of the Hub.
"""

import json
import re
import subprocess
import sys
from html import unescape
from itertools import pairwise
from pathlib import Path

import core_only
import pytest
from fake_hub import hub_fixture as hub_fixture
from markdown_it import MarkdownIt
from pages import DOCS, ON_THE_HUB, PAGES, make_small, run_page, scripts

from ragen2_trl import cli
from ragen2_trl.instrument.findings import PAGES as PAGES_OF_FINDINGS
from ragen2_trl.instrument.findings import SECTIONS

pytestmark = pytest.mark.slow

# Python


@pytest.fixture
def small(monkeypatch, tmp_path):
    make_small(monkeypatch.setattr)
    monkeypatch.chdir(tmp_path)


ALONE = [page for page in PAGES if scripts(page) and page != ON_THE_HUB]


def test_the_code_of_every_page_runs_with_the_core_dependencies_alone():
    done = subprocess.run([sys.executable, core_only.__file__, *ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_no_core_dependency_brings_cannot_be_imported_there():
    code = "from core_only import *; block_others(distributions()); import math_verify, trl; import hypothesis"
    folder = Path(core_only.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert "import of hypothesis halted" in done.stderr


def test_the_page_on_reporting_runs_and_its_run_goes_up(small, hub, tmp_path):
    (tmp_path / "evaluation.json").write_text(json.dumps({"success": 0.5, "return": 0.5, "pass@8": 0.75}))
    run_page(ON_THE_HUB)
    assert {"README.md", "model.safetensors", "diagnostics/trainer_state.json"} <= hub.files("me/my_run").keys()
    cli.main(["report", "runs/my_run", "--output", "report.html"])
    assert "<h1>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    tokens = MarkdownIt().parse(path.read_text(encoding="utf-8"))
    titles = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    return {
        re.sub(r"[^\w\- ]", "", unescape(re.sub(r"[`*]", "", title)).lower()).replace(" ", "-") for title in titles
    }


def links(path: Path) -> list[tuple[str, Path, str]]:
    """The links of a page to files, or to its own headings: as written, the file, and the heading's anchor."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("https://", "http://")):
            file, _, anchor = target.partition("#")
            found.append((target, (path.parent / file).resolve() if file else path, anchor))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    dead = [
        target
        for target, linked, anchor in links(PAGES[page])
        if not linked.exists() or (anchor and anchor not in anchors(linked))
    ]
    assert dead == []


def test_every_page_can_be_reached_from_the_first():
    reached, waiting = set(), [DOCS / "README.md"]
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            waiting += [linked for _, linked, _ in links(path) if linked.suffix == ".md"]
    assert {path.resolve() for path in DOCS.rglob("*.md")} <= {path.resolve() for path in reached}


def test_tables_have_rows_of_one_length():
    """A bar inside a cell would cut it in two."""
    uneven = []
    for page, path in PAGES.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        for above, line in pairwise(lines):
            if above.startswith("|") and line.startswith("|"):
                width = [len(re.findall(r"(?<!\\)\|", one)) for one in (above, line)]
                uneven += [(page, line)] if width[0] != width[1] else []
    assert uneven == []


def test_what_findings_tell_to_do_leads_to_a_section():
    targets = [*PAGES_OF_FINDINGS.values(), *(f"does_not_learn.md#{section}" for section in SECTIONS.values())]
    for target in targets:
        page, _, anchor = target.partition("#")
        assert not anchor or anchor in anchors(DOCS / page), target
        assert (DOCS / page).is_file()
