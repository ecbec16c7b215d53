"""What a test needs and is not installed: skipped with the way to get it, and a failure in CI unless it is meant."""

from types import SimpleNamespace

import conftest
import pytest
from conftest import MODULES, PROGRAMS, need


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """A machine without programs and extras, outside CI."""
    monkeypatch.setattr(conftest.shutil, "which", lambda name: None)
    monkeypatch.setattr(conftest, "find_spec", lambda name: None)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("MISSING_ON_PURPOSE", raising=False)


@pytest.mark.parametrize("name", [*PROGRAMS, *MODULES])
def test_what_is_missing_skips_and_names_what_to_install(name):
    with pytest.raises(pytest.skip.Exception) as skipped:
        need(name)
    how = f"apt-get install {name}" if name in PROGRAMS else f"pip install -e '.[{name}]'"
    assert how in str(skipped.value)


def test_in_ci_it_fails_unless_it_is_missing_on_purpose(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        need("chromium")
    monkeypatch.setenv("MISSING_ON_PURPOSE", "bubblewrap chromium")
    with pytest.raises(pytest.skip.Exception):
        need("chromium")
    with pytest.raises(pytest.fail.Exception, match="smollm2"):
        need("smollm2")


def test_what_is_there_is_used(monkeypatch):
    monkeypatch.setattr(conftest.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "google-chrome" else None)
    need("chromium")


def test_the_end_of_a_run_counts_what_was_skipped_and_says_how_to_get_it():
    def report(reason):
        return SimpleNamespace(longrepr=("conftest.py", 1, f"Skipped: {reason}"))

    def told(*reasons):
        lines = []
        stats = {"skipped": [report(reason) for reason in reasons]}
        conftest.pytest_terminal_summary(SimpleNamespace(stats=stats, section=lines.append, line=lines.append))
        return lines

    def missing(name):
        with pytest.raises(pytest.skip.Exception) as skipped:
            need(name)
        return str(skipped.value)

    _, first, second = told(missing("bubblewrap"), "not on this machine", missing("smollm2"), missing("bubblewrap"))
    assert first.startswith("2 ") and "apt-get install bubblewrap" in first
    assert second.startswith("1 ") and "smollm2" in second
    assert told("not on this machine") == []
