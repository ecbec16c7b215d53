"""The script that changes the core and sees whether tests notice."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "mutants.py"
CODE = '''
"""Adds 1 + 1."""
LIMIT: int | None = 20


def clamp(value: "int | None" = 3, *, strict: bool = False) -> int | None:
    if value < 0 and not strict:
        raise ValueError(f"value={value + 1} is below {0}")
    while value > LIMIT:
        value -= 1
    return value
'''
TEST = "from ragen2_trl.clamp import clamp\n\n\ndef test_it():\n    assert clamp(22) == 20 and clamp(4) == 4\n"


@pytest.fixture
def mutants(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("mutants", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants", module)
    spec.loader.exec_module(module)
    (tmp_path / "tree" / "ragen2_trl").mkdir(parents=True)
    (tmp_path / "tree" / "tests").mkdir()
    (tmp_path / "tree" / "ragen2_trl" / "__init__.py").touch()
    (tmp_path / "tree" / "ragen2_trl" / "clamp.py").write_text(CODE)
    (tmp_path / "tree" / "tests" / "test_clamp.py").write_text(TEST)
    monkeypatch.setattr(module, "ROOT", tmp_path / "tree")
    monkeypatch.setattr(module, "COPIED", ("ragen2_trl", "tests"))
    monkeypatch.setattr(module, "OPTIONS", ())
    monkeypatch.setattr(module, "TESTS", {"clamp": "clamp"})
    return module


def test_operators_numbers_and_conditions_are_changed_and_no_annotation_or_message(mutants):
    changes = {(one.number, one.becomes) for one in mutants.mutants_of("clamp", CODE)}
    assert changes == {
        (3, "LIMIT: int | None = 10"),
        (3, "LIMIT: int | None = 40"),
        (6, 'def clamp(value: "int | None" = 4, *, strict: bool = False) -> int | None:'),
        (6, 'def clamp(value: "int | None" = 2, *, strict: bool = False) -> int | None:'),
        (6, 'def clamp(value: "int | None" = 3, *, strict: bool = True) -> int | None:'),
        (7, "if value <= 0 and not strict:"),
        (7, "if value < 1 and not strict:"),
        (7, "if value < -1 and not strict:"),
        (7, "if value < 0 or not strict:"),
        (7, "if value < 0 and strict:"),
        (7, "if not (value < 0 and not strict):"),
        (9, "while value >= LIMIT:"),
        (9, "while not (value > LIMIT):"),
        (10, "value += 1"),
        (10, "value -= 2"),
        (10, "value -= 0"),
    }


@pytest.mark.slow
def test_a_change_that_tests_notice_is_killed_and_the_tree_stays_as_it_was(mutants, tmp_path):
    copy = mutants.Copy(tmp_path / "copy")
    fates = {
        one.becomes: copy.fate_of(one, limit=200)
        for one in mutants.mutants_of("clamp", CODE)
        if one.becomes in ("while value >= LIMIT:", "if value < 1 and not strict:")
    }
    assert fates == {"while value >= LIMIT:": "killed", "if value < 1 and not strict:": "survived"}
    assert (tmp_path / "copy" / "ragen2_trl" / "clamp.py").read_text() == CODE
    (endless,) = (one for one in mutants.mutants_of("clamp", CODE) if one.becomes == "value -= 0")
    assert copy.fate_of(endless, limit=2) == "timed out"
