"""The pages of the site are all of those on GitHub, and what is generated into them is there."""

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


def test_every_task_has_a_page_with_its_options(site):
    for name in ENVIRONMENTS:
        text = page(site, DOCS / "environments" / f"{name}.md")
        assert all(f"| `{option}` |" in text for option in options_of(ENVIRONMENTS[name]))


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
