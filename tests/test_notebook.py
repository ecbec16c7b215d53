"""The notebook runs from its first cell to its last, and what is kept of it is what it shows."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def shows(notebook) -> list[bool]:
    """Whether each cell shows anything, warnings aside."""
    return [any(one.get("name") != "stderr" for one in cell.get("outputs", ())) for cell in notebook.cells]


def shown(notebook) -> list[dict]:
    """What its cells show, by kind of content."""
    return [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())]


def test_the_notebook_is_kept_with_what_it_shows():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert sum("image/png" in data for data in shown(notebook)) == 2
    assert any("iframe" in data.get("text/html", "") for data in shown(notebook))
    assert not [cell for cell in notebook.cells if any(o.output_type == "error" for o in cell.get("outputs", ()))]
    text = NOTEBOOK.read_text()
    assert len(text) < 1_500_000 and str(ROOT) not in text


def test_links_of_the_notebook_lead_to_pages():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    links = [
        link for cell in cells if cell.cell_type == "markdown" for link in re.findall(r"\]\(([\w./]+)\)", cell.source)
    ]
    assert links and all((NOTEBOOK.parent / link).exists() for link in links)


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("max_steps=30", "max_steps=3").replace("every=10", "every=1")
    kept = shows(notebook)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=400, kernel_name="python3", resources=resources).execute()
    assert shows(notebook) == kept
    assert sum("image/png" in data for data in shown(notebook)) == 2
    (page,) = (data["text/html"] for data in shown(notebook) if "iframe" in data.get("text/html", ""))
    assert "Retrieval accuracy" in page
    assert list(tmp_path.glob("*/notebook/report.html"))
