"""Which changes of the core do its tests notice? Runs a random sample of single changes, each in a copy of the tree.

Operators of the classical kind are swapped, numbers moved, conditions negated and calls left out. A changed module
runs against the test files named for it in `TESTS`; a failure or a time limit kills the mutant. Mutants in
`tests/mutants_equivalent.toml` behave like the original, for the reason given there, and are not counted. Exits with 1
if fewer than 95 % of the others die.
"""

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
EQUIVALENT = ROOT / "tests" / "mutants_equivalent.toml"
# Files under tests/ without `test_` and `.py`, by module of ragen2_trl/: the quick ones first, after its own doctests.
TESTS = {
    "filtering": "filtering selector",
    "sampling/policy": "sampling_policy dynamic_sampling promises_composed",
    "sampling/posterior": "sampling_policy",
    "sampling/sampler": "dynamic_sampling promises_composed",
    "sampling/row_means": "row_means promises_composed",
    "trainers/selection": "reference selector promises_groups lossless",
    "trainers/plans": "promises_computed promises_update promises_empty lossless",
    "trainers/dealing": "dealing promises_computed",
    "trainers/shared_prompts": "shared_prompts lossless",
    "trainers/prompt_tree": "shared_prompts lossless",
    "trainers/async_groups": "async_filter",
    "trainers/async_grpo": "async_filter async_callbacks",
    "trainers/async_rollouts": "async_filter",
    "trainers/checkpoints": "checkpoints promises_resume",
    "instrument/information": "information",
    "instrument/scoring": "scoring_models scoring",
    "instrument/health": "health training_health",
    "record/completions": "what_if",
    "record/rows": "rows what_if",
    "estimates": "remedies",
    "remedies": "remedies what_if",
    "envs/sokoban/environment": "sokoban",
    "envs/sokoban/rooms": "sokoban",
    "envs/sokoban/reverse_play": "presets",
    "envs/countdown": "countdown presets_tasks",
}
OPTIONS = ("-m", "not slow and not full", "--hypothesis-profile", "unshrunk")
COPIED = ("ragen2_trl", "tests", "research", "docs", "examples", "README.md", "pyproject.toml")
AT_ONCE = 2  # mutants
SHARE = 0.95  # of the mutants that are not equivalent, to die

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "any": "all", "all": "any"}


@dataclass(frozen=True, order=True)
class Mutant:
    """A single change of a module.

    Args:
        module: Under ragen2_trl/, without `.py`.
        start, stop: Bytes of the module that are replaced.
        new: What replaces them.
        number: The line that changes, from 1.
        line, becomes: This line before and after, stripped: what tells mutants apart when lines move.
    """

    module: str
    start: int
    stop: int
    new: str
    number: int
    line: str
    becomes: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.module, self.line, self.becomes


def mutants_of(module: str, source: str) -> list[Mutant]:
    """Every single change of a module, in the order of its text."""
    text = source.encode()
    starts = [0]
    for row in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    found = set()
    for start, stop, new in _changes(ast.parse(source), _Places(text, starts)):
        number = next(number for number, first in enumerate(starts) if first > start)
        changed = text[:start] + new.encode() + text[stop:]
        line, becomes = (after[starts[number - 1] :].partition(b"\n")[0].strip().decode() for after in (text, changed))
        found.add(Mutant(module, start, stop, new, number, line, becomes))
    return sorted(found)


@dataclass
class _Places:
    """Where the nodes of a module stand in its bytes."""

    text: bytes
    starts: list[int]

    def of(self, node: ast.AST) -> tuple[int, int]:
        at: ast.expr = node  # type: ignore[assignment]
        assert at.end_lineno is not None and at.end_col_offset is not None
        return self.starts[at.lineno - 1] + at.col_offset, self.starts[at.end_lineno - 1] + at.end_col_offset

    def between(self, left: ast.AST, right: ast.AST, operator: type[ast.AST]) -> tuple[int, int, str]:
        """The operator between two operands, and what it is swapped for."""
        old, new = OPERATORS[operator]
        first, last = self.of(left)[1], self.of(right)[0]
        (match,) = re.finditer(rb"\s+".join(re.escape(part.encode()) for part in old.split()), self.text[first:last])
        return first + match.start(), first + match.end(), new


def _changes(tree: ast.AST, places: _Places) -> Iterator[tuple[int, int, str]]:
    """First byte, byte after the last, and what replaces them.

    Nothing of annotations, messages, assertions and decorators, of which the core has those that cache.
    """
    skipped: set[ast.AST | None] = set()
    for node in ast.walk(tree):  # parents come before their children
        if node in skipped:
            skipped.update(ast.iter_child_nodes(node))
            continue
        match node:
            case ast.JoinedStr() | ast.Assert() | ast.Raise() | ast.ImportFrom() | ast.Import():
                skipped.update(ast.iter_child_nodes(node))
            case ast.ClassDef():
                skipped.update(node.decorator_list)
            case ast.FunctionDef():
                skipped.update((*node.decorator_list, node.returns))
            case ast.arg():
                skipped.add(node.annotation)
            case ast.keyword(arg="strict"):  # of `zip`: an assertion
                skipped.add(node.value)
            case ast.AnnAssign():
                skipped.add(node.annotation)
                if ast.unparse(node.annotation) == "TypeAlias":
                    skipped.add(node.value)
            case ast.Call(func=ast.Name("isinstance")):
                skipped.update(node.args)
            case ast.Expr(value=ast.Call()):
                yield *places.of(node), "pass"
            case ast.Compare():
                for left, operator, right in zip(
                    [node.left, *node.comparators], node.ops, node.comparators, strict=False
                ):
                    yield places.between(left, right, type(operator))
            case ast.BoolOp():
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield places.between(left, right, type(node.op))
            case ast.BinOp() if type(node.op) in OPERATORS:  # `@` has nothing to be swapped for
                yield places.between(node.left, node.right, type(node.op))
            case ast.AugAssign():
                yield places.between(node.target, node.value, type(node.op))
            case ast.UnaryOp():
                start, stop = places.of(node)
                unary = re.match(rb"not\s+|[-~+]", places.text[start:stop])
                assert unary is not None
                yield start, start + unary.end(), ""
            case ast.Constant(value=bool()):
                yield *places.of(node), str(not node.value)
            case ast.Constant(value=int() | float() as value):
                is_small = isinstance(value, int) and value < 10
                for other in (value + 1, value - 1) if is_small else (value / 2 or -1.0, value * 2 or 1.0):
                    yield *places.of(node), repr(type(value)(other))
            case ast.Slice():
                for bound in (node.lower, node.upper):
                    if bound is not None:
                        yield *places.of(bound), ""
        for test in _conditions(node):
            start, stop = places.of(test)
            yield start, stop, f"not ({places.text[start:stop].decode()})"
        name = node.func if isinstance(node, ast.Call) else None
        if isinstance(name, ast.Name | ast.Attribute):
            old = name.id if isinstance(name, ast.Name) else name.attr
            if old in NAMES:
                stop = places.of(name)[1]
                yield stop - len(old), stop, NAMES[old]


def _conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


class Copy:
    """A copy of the tree, to change and to run tests in."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder / name)

    def fate_of(self, mutant: Mutant, limit: float) -> str:
        path = self.folder / "ragen2_trl" / f"{mutant.module}.py"
        original = path.read_bytes()
        self._write(path, original[: mutant.start] + mutant.new.encode() + original[mutant.stop :])
        try:
            return "survived" if self.passes(mutant.module, limit) else "killed"
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            self._write(path, original)

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        path.write_bytes(content)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()  # which may look as new as the text: equal sizes, within a second

    def passes(self, module: str, limit: float | None = None) -> bool:
        """Whether the tests of a module pass.

        Raises:
            subprocess.TimeoutExpired: Where they take more than `limit` seconds.
        """
        files = [f"ragen2_trl/{module}.py", *(f"tests/test_{name}.py" for name in TESTS[module].split())]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-x", "-q", *OPTIONS, "--basetemp", "temporary", *files],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(limit) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that tests have begun
                process.wait()


def equivalents() -> dict[tuple[str, str, str], str]:
    """Why each of the listed mutants is equivalent, by `Mutant.key`."""
    listed = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["equivalent"]
    return {(one["module"], one["line"], one["becomes"]): one["reason"] for one in listed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--count", type=int, default=60, help="mutants in the sample (default: 60)")
    args = parser.parse_args()

    texts = {module: (ROOT / f"ragen2_trl/{module}.py").read_text(encoding="utf-8") for module in TESTS}
    every = [mutant for module, text in texts.items() for mutant in mutants_of(module, text)]
    # By a draw for each mutant, so that a change of the code leaves the others in the sample.
    every.sort(key=lambda mutant: random.Random(f"{args.seed} {mutant.key}").random())
    sample = sorted(every[: args.count])
    known = equivalents()
    print(f"{args.count} of {len(every)} mutants, seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        copies: Queue[Copy] = Queue()
        for number in range(AT_ONCE):
            copies.put(Copy(Path(folder) / str(number)))

        @contextmanager
        def copy() -> Iterator[Copy]:
            taken = copies.get()
            yield taken
            copies.put(taken)

        def seconds_of(module: str) -> float:
            """Of the tests of the module as it is."""
            start = time.monotonic()
            with copy() as tree:
                if not tree.passes(module):
                    sys.exit(f"The tests of {module} fail without a change, so that mutants of it say nothing.")
            return time.monotonic() - start

        def fate_of(mutant: Mutant) -> str:
            if mutant.key in known:
                return "equivalent"
            with copy() as tree:
                return tree.fate_of(mutant, limit=30 + 3 * seconds[mutant.module])

        modules = list(dict.fromkeys(mutant.module for mutant in sample))
        seconds = dict(zip(modules, pool.map(seconds_of, modules), strict=True))
        fates = []
        for mutant, fate in zip(sample, pool.map(fate_of, sample), strict=True):
            fates.append(fate)
            print(
                f"{fate:<10} {mutant.module}:{mutant.number}: {mutant.line}\n{'->':>10} {mutant.becomes}", flush=True
            )
            if fate == "equivalent":
                print(f"{'':<10} {known[mutant.key]}")
    counted = len(fates) - fates.count("equivalent")
    dead = counted - fates.count("survived")
    print(f"{dead} of {counted} mutants that are not equivalent died: {dead / max(1, counted):.1%}")
    return 0 if dead >= SHARE * counted else 1


if __name__ == "__main__":
    sys.exit(main())
