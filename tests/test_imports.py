"""Imports go in one direction: read from the source, those for type checkers and in functions included."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Which rooms a room may know, besides itself; "ragen2_trl" are the public names, the package's own `__init__`.
CORE = {
    "filtering",
    "metrics",
    "columns",
    "redaction",
    "saved_state",
    "names",
    "messages",
    "failures",
    "rollout_events",
    "rotary",
    "text",
    "sampling",
    "trainers",
    "instrument",
}
MAY_KNOW = {
    "filtering": {"metrics"},
    "metrics": set(),
    "columns": set(),
    "redaction": set(),
    "saved_state": set(),
    "names": set(),
    "messages": set(),
    "failures": set(),
    "rollout_events": {"columns", "metrics", "failures"},
    "rotary": set(),
    "text": set(),
    "instrument": {"filtering", "columns", "messages", "metrics", "rotary"},
    "sampling": CORE - {"instrument"},
    "trainers": CORE,
    "envs": {"columns", "names", "messages", "failures", "text"},
    "tiny": {"envs"},
    "rollouts": {"envs", "columns", "messages", "rollout_events", "instrument"},
    "record": {*CORE - {"trainers", "sampling"}, "envs", "rollouts"},
    "report": {*CORE - {"trainers", "sampling"}, "envs", "rollouts", "record", "remedies"},
    "estimates": set(),
    "remedies": {*CORE, "record", "estimates"},
    "callbacks": {*CORE, "envs", "rollouts", "record", "report"},
    "ragen2_trl": {*CORE, "rollouts", "callbacks", "remedies"},
}
EVERYTHING = {*MAY_KNOW, "cli"}
MAY_KNOW |= {"cli": EVERYTHING, "scripts": EVERYTHING, "research": EVERYTHING}
# What rooms must not know of the world outside; transformers brings torch.
HEAVY = {"pandas", "scipy", "rich", "jinja2", "matplotlib"}
STRANGERS = {
    "filtering": {"trl", "transformers", "datasets", *HEAVY},
    "instrument": {"trl", "datasets", *HEAVY},
    "rollout_events": HEAVY,
    "trainers": HEAVY,
    "sampling": HEAVY,
    "rollouts": {"trl"},
    "tiny": {"trl"},
    "envs": {"trl", "torch", "transformers"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("ragen2_trl", "scripts", "research")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def imports(name: str, tree: ast.AST) -> Iterator[str]:
    """Files of ours, by their modules, and packages of others that a file imports.

    A file counts for what it names: `from ragen2_trl.envs import play` is `envs/play.py`, `from ragen2_trl.envs import
    Environment` is `envs/__init__.py`, and neither is `ragen2_trl/__init__.py`, which Python runs on the way.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (ours_or_package(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name} imports by dots"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in SOURCES else ours_or_package(node.module)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":  # imported when asked for
            yield from (ours_or_package(f"{name}.{home}") for home in ast.literal_eval(node.value).values())


def ours_or_package(module: str) -> str:
    package = module.partition(".")[0]
    if package not in ("ragen2_trl", "research"):
        return package
    assert module in SOURCES, f"{module} is imported and does not exist"
    return module


IMPORTS = {name: sorted(set(imports(name, tree))) for name, tree in SOURCES.items()}


def room(module: str) -> str:
    first, *rest = module.split(".")
    return rest[0] if first == "ragen2_trl" and rest else first


def circle(graph: Mapping[str, list[str]]) -> list[str]:
    """Files that import one another all the way round, or nothing."""
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for target in graph.get(path[-1], ()):
            if target in path:
                return [*path[path.index(target) :], target]
            if target not in done and (found := search([*path, target])):
                return found
        done.add(path[-1])
        return []

    return next((found for start in graph if start not in done and (found := search([start]))), [])


def test_imports_go_in_one_direction():
    pairs = [(name, target) for name, targets in IMPORTS.items() for target in targets if target in SOURCES]
    wrong = [pair for pair in pairs if room(pair[1]) not in {room(pair[0]), *MAY_KNOW[room(pair[0])]}]
    assert [f"{name} imports {target}" for name, target in wrong] == []


def test_the_core_knows_nothing_of_environments_reports_and_what_these_need():
    known = {name: STRANGERS.get(room(name), set()) & set(targets) for name, targets in IMPORTS.items()}
    assert {name: packages for name, packages in known.items() if packages} == {}


def test_imports_go_in_no_circles():
    assert " -> ".join(circle(IMPORTS)) == ""


def test_circles_are_found():
    assert circle({"a": ["b", "torch"], "b": ["c"], "c": ["d", "b"]}) == ["b", "c", "b"]
    assert circle({"a": ["b", "c"], "b": ["d"], "c": ["d"]}) == []


def loaded(code: str, before: str = "") -> set[str]:
    """Modules that some code loads beside those that other code has loaded."""
    lines = ["import sys", before, "before = set(sys.modules)", code, "print(*(set(sys.modules) - before))"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("name", ["SNRFilteredGRPOTrainer", "MutualInformationCallback"])
def test_the_trainer_and_the_callback_load_neither_environments_nor_what_reports_are_made_with(name):
    modules = loaded(f"from ragen2_trl import {name}", before="from trl import GRPOTrainer")
    ours = {room(module) for module in modules if module.startswith("ragen2_trl.")}
    allowed = MAY_KNOW["trainers"] | {"trainers"}
    assert ours <= allowed if "Trainer" in name else ours <= {*CORE, "callbacks", "record", "report"}
    assert not HEAVY & {module.partition(".")[0] for module in modules}
    assert "Trainer" not in name or sum(module.startswith("ragen2_trl") for module in modules) <= 60


@pytest.mark.slow
def test_the_instrument_is_imported_without_trl_and_tasks():
    assert not {"trl", "datasets", "ragen2_trl.envs"} & loaded("import ragen2_trl.instrument")


def test_the_policy_of_sampling_is_imported_without_torch_and_trl():
    assert not {"torch", "trl", "transformers", "datasets"} & loaded("import ragen2_trl.sampling.policy")


def test_no_search_is_imported_before_one_is_made():
    assert "bm25s" not in loaded("import ragen2_trl.envs")


def test_no_class_name_comes_twice():
    classes: dict[str, list[str]] = {}
    for name, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(name)
    assert {name: where for name, where in classes.items() if len(where) > 1} == {}
