"""Imports go downwards, and in no circles: read from the source, those for type checkers and in functions included."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Rooms from the lowest to the highest; "ragen2_trl" are the public names, the package's own `__init__`.
LAYERS = (
    ("filtering", "columns"),
    ("envs", "instrument", "rollouts", "tiny"),
    ("openenv",),
    ("trainers", "callbacks", "reporting", "experiments"),
    ("ragen2_trl",),
    ("cli",),
    ("scripts",),
)
# Who may know whom of the same layer.
NEIGHBOURS = {
    "rollouts": {"envs"},
    "tiny": {"envs"},
    "trainers": {"callbacks", "reporting"},
    "callbacks": {"trainers", "reporting"},
    "reporting": {"trainers", "callbacks"},
    "experiments": {"trainers", "callbacks", "reporting"},
}
# What rooms must not know of the world outside; transformers brings torch.
STRANGERS = {
    "filtering": {"trl", "transformers", "datasets"},
    "instrument": {"trl", "datasets"},
    "rollouts": {"trl"},
    "tiny": {"trl"},
    "openenv": {"trl"},
    "envs": {"trl", "torch", "transformers"},
}
# An encoder for those who ask for one; no environment imports it.
MAY_KNOW_MORE = {"ragen2_trl.envs.search_qa.dense_retrieval": {"torch", "transformers"}}
ENTRY_POINTS = {"ragen2_trl.openenv.__main__"}  # `python -m`, which stand as high as scripts


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("ragen2_trl", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def imports(name: str, tree: ast.AST) -> Iterator[str]:
    """Files of ours, by their modules, and packages of others that a file imports.

    A file counts for what it names: `from ragen2_trl.envs import play` is `envs/play.py`, `from ragen2_trl.envs import
    Play` is `envs/__init__.py`, and neither is `ragen2_trl/__init__.py`, which Python runs on the way.
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
    if package != "ragen2_trl":
        return package
    assert module in SOURCES, f"{module} is imported and does not exist"
    return module


IMPORTS = {name: sorted(set(imports(name, tree))) for name, tree in SOURCES.items()}


def room(module: str) -> str:
    if module in ENTRY_POINTS:
        return "scripts"
    first, *rest = module.split(".")
    return rest[0] if first == "ragen2_trl" and rest else first


def layer(module: str) -> int:
    (found,) = (number for number, rooms in enumerate(LAYERS) if room(module) in rooms)
    return found


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


def is_downwards(name: str, target: str) -> bool:
    own, other = room(name), room(target)
    return own == other or layer(target) < layer(name) or other in NEIGHBOURS.get(own, ())


def test_imports_go_downwards():
    pairs = [(name, target) for name, targets in IMPORTS.items() for target in targets if target in SOURCES]
    assert [f"{name} imports {target}" for name, target in pairs if not is_downwards(name, target)] == []


def test_lower_rooms_know_nothing_of_trl_and_environments_nothing_of_torch():
    known = {
        name: STRANGERS.get(room(name), set()) & set(targets) - MAY_KNOW_MORE.get(name, set())
        for name, targets in IMPORTS.items()
    }
    assert {name: packages for name, packages in known.items() if packages} == {}


def test_no_environment_imports_what_knows_torch():
    environments = {name: targets for name, targets in IMPORTS.items() if room(name) == "envs"}
    assert not [name for name, targets in environments.items() if set(MAY_KNOW_MORE) & set(targets)]


def test_imports_go_in_no_circles():
    assert " -> ".join(circle(IMPORTS)) == ""


def test_circles_are_found():
    assert circle({"a": ["b", "torch"], "b": ["c"], "c": ["d", "b"]}) == ["b", "c", "b"]
    assert circle({"a": ["b", "c"], "b": ["d"], "c": ["d"]}) == []


def test_the_instrument_is_imported_without_trl_and_tasks():
    code = "import sys, ragen2_trl.instrument; print({'trl', 'datasets', 'ragen2_trl.envs'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_no_search_is_imported_before_one_is_made():
    code = "import sys, ragen2_trl.envs; print('bm25s' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
