"""The pages of the site are all of those on GitHub, and what is generated into them is there."""

import json
import re
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from pages import DOCS, ROOT

from ragen2_trl.cli import COMMANDS
from ragen2_trl.envs import ENVIRONMENTS, options_of


@pytest.fixture(scope="module")
def site():
    spec = spec_from_file_location("make_site", ROOT / "scripts" / "make_site.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(site, path, address=None):
    return site.as_page(path.read_text(encoding="utf-8"), path, site.pages(), address)


def test_every_page_of_the_documentation_is_in_the_navigation(site):
    navigation = set(re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    there = {path.as_posix() for path in site.pages().values()}
    assert navigation <= there
    assert {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} <= navigation


def test_every_task_has_a_section_with_its_options(site):
    _, *sections = re.split(r"^## ", page(site, DOCS / "tasks.md"), flags=re.MULTILINE)
    texts = {re.sub(r"\W", "", one.splitlines()[0]).lower(): one for one in sections}
    for name in ENVIRONMENTS:
        text = texts["optionsofeverytask"] + texts[name.replace("_", "")]
        assert all(f"| `{option}` |" in text for option in options_of(ENVIRONMENTS[name]))


def test_the_tutorial_has_the_cells_of_the_notebook_and_what_they_showed(site):
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "[a page](metrics.md)"]},
        {
            "cell_type": "code",
            "source": ["print(1)"],
            "outputs": [
                {"output_type": "stream", "name": "stderr", "text": "a warning"},
                {"output_type": "stream", "name": "stdout", "text": ["\x1b[1;36m1\x1b[0m\n"]},
                {"output_type": "display_data", "data": {"text/html": "<iframe>", "text/plain": "<HTML object>"}},
                {"output_type": "display_data", "data": {"image/png": "AAAA\n", "text/plain": "<Figure>"}},
            ],
        },
    ]
    text = site.notebook(json.dumps({"cells": cells}))
    assert "# Title\n[a page](metrics.md)" in text and "```python\nprint(1)\n```" in text
    assert "```text\n1\n```" in text and 'src="data:image/png;base64,AAAA"' in text
    assert "warning" not in text and "HTML" not in text and "Figure" not in text


def test_a_page_takes_the_tables_of_another_with_its_links(site):
    text = page(site, DOCS / "reproduce.md")
    assert "| Table 6 |" in text and "](results/tab6.md)" in text and "<!-- table" not in text


def test_the_command_line_page_has_every_command_with_its_arguments(site):
    text = page(site, DOCS / "cli.md")
    assert all(f"## `ragen2-trl {command}`" in text for command in COMMANDS)
    assert "| `--eval_every` | `0` |" in text and "| `RUN` |" in text


def test_the_names_of_the_api_page_exist(site):
    names = re.findall(r"^::: ([\w.]+)$", page(site, DOCS / "api.md"), re.MULTILINE)
    assert len(names) > 20
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name


def test_links_lead_to_pages_of_the_site_or_to_the_repository(site, tmp_path):
    text = page(site, DOCS / "README.md")
    assert "](results/README.md)" in text and "](contributing.md)" in text and "../" not in text
    architecture = DOCS / "architecture.md"
    assert "](https://example.org/it/blob/main/ragen2_trl/filtering.py)" in page(
        site, architecture, "https://example.org/it"
    )
    assert "ragen2_trl/filtering.py" not in page(site, architecture)


def test_a_link_to_a_file_that_is_not_there_ends_the_build(site):
    with pytest.raises(SystemExit, match=r"docs/README\.md links to no_such\.md"):
        site.as_page("[gone](no_such.md)", DOCS / "README.md", site.pages() | {DOCS / "README.md": DOCS}, None)


def test_formulas_need_no_script(site):
    pytest.importorskip("latex2mathml", reason="comes with the extra docs; `make docs` runs this test")
    text = page(site, DOCS / "mathematics.md")
    assert text.count("<math") > 100 and "```math" not in text
    outside = re.sub(r"```.*?```|`[^`]*`|<math.*?</math>", "", text, flags=re.DOTALL)
    assert "$" not in outside and "\\" not in outside
