"""Tests of programs that a model wrote: read from the four forms of the data, chosen, put in a row, and run.

They run in the sandbox, all else happens outside: what a program should have answered never enters, so that it passes
a test only by producing the right value.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ragen2_trl.envs.deepcoder.sandbox import ProgramResult, Sandbox
from ragen2_trl.envs.deepcoder.statements import Statement
from ragen2_trl.envs.tasks import Row

Verdict = Literal["passed", "wrong", "error", "timeout"]

WALL_PER_CPU = 10.0  # for programs that wait, and where others have the processor
MAX_KEPT_CHARS = 1000  # of what a case printed, and of its error

# What a program is given, and what it should answer. A script: two texts; a function: its arguments and its result.
Test: TypeAlias = tuple[Any, Any]

MAX_TEST_CHARS = 100_000  # larger tests are left out: a few of the data's have megabytes, and each row carries its own


@dataclass(frozen=True)
class Case:
    """A test of a program.

    Args:
        given: What a script reads, or the JSON arguments of a function.
        expected: What the script should print (see `same_output`), or the JSON that the function should return (see
            `same_value`).
        function: Name of the function, or of the method of a class `Solution`; empty for a script.
    """

    given: Any
    expected: Any
    function: str = ""


@dataclass(frozen=True)
class CaseResult:
    """What became of a case.

    `got` is what the program printed, or the JSON of what its function returned, and `error`, where the verdict is
    `error`, the last line on standard error; of each the first `MAX_KEPT_CHARS` characters.
    """

    verdict: Verdict
    got: str = ""
    error: str = ""


def run_tests(sandbox: Sandbox, program: str, cases: Iterable[Case], cpu_seconds: float = 60.0) -> list[CaseResult]:
    """Test a program, each case in a process of its own that learns nothing of the other cases.

    All cases share `cpu_seconds`, and ten times as many of the wall clock, each within the sandbox's own limits; those
    that find nothing left are `timeout`, and so are those after one that waited until the wall clock ended it. A
    program that ends with an exit status, floods its output or returns no JSON is `error`; so is one that cannot be
    run though others can, whose further cases are `timeout`. Within a `Sandbox.map`, programs are tested side by side.

    Raises:
        SandboxFailedError: If the machine can no longer run programs.
    """
    results: list[CaseResult] = []
    wall_seconds = WALL_PER_CPU * cpu_seconds
    for case in cases:
        if min(cpu_seconds, wall_seconds) <= 0:
            results.append(CaseResult("timeout"))
            continue
        call = (case.function, case.given) if case.function else None
        stdin = "" if call else case.given
        whole = math.ceil(cpu_seconds)
        outcome = sandbox.run(program, stdin, call=call, cpu_seconds=whole, wall_seconds=wall_seconds)
        is_last = outcome.ended in ("wall", "infrastructure")  # either took half a minute or more
        cpu_seconds = 0.0 if is_last else cpu_seconds - outcome.cpu_seconds
        wall_seconds -= outcome.wall_seconds
        results.append(_result(case, outcome))
    return results


def _result(case: Case, outcome: ProgramResult) -> CaseResult:
    verdict = _verdict(case, outcome)
    complaint = outcome.stderr.strip().splitlines() if verdict == "error" else []
    return CaseResult(verdict, outcome.stdout[:MAX_KEPT_CHARS], complaint[-1][:MAX_KEPT_CHARS] if complaint else "")


def _verdict(case: Case, outcome: ProgramResult) -> Verdict:
    if outcome.ended in ("wall", "cpu"):
        return "timeout"
    if outcome.ended != "exit" or outcome.exit_status != 0:
        return "error"
    if not case.function:
        return "passed" if same_output(case.expected, outcome.stdout) else "wrong"
    try:
        value = json.loads(outcome.stdout)
    except (ValueError, RecursionError):  # not one JSON value, an integer of too many digits, or nested too deeply
        return "error"
    return "passed" if same_value(case.expected, value) else "wrong"


def same_output(expected: str, actual: str) -> bool:
    """Equal line by line and token by token, whatever the blanks between tokens and at both ends.

    Where the expected token is a number but no whole one, 1e-6 of it is tolerated.

    >>> same_output("1 2\\n0.5\\n", " 1  2 \\n0.5000001")
    True
    >>> same_output("1000000000", "1000000001")
    False
    """
    rows, actual_rows = ([line.split() for line in text.strip().split("\n")] for text in (expected, actual))
    return [len(row) for row in rows] == [len(row) for row in actual_rows] and all(
        _same_token(token, actual_token)
        for row, actual_row in zip(rows, actual_rows, strict=True)
        for token, actual_token in zip(row, actual_row, strict=True)
    )


def _same_token(expected: str, actual: str) -> bool:
    if expected == actual or expected.lstrip("+-").isdigit():
        return expected == actual
    try:
        return _close(float(expected), float(actual))
    except ValueError:  # not numbers
        return False


def same_value(expected: Any, actual: Any) -> bool:
    """Equal JSON values, tuples being lists; 1e-6 of an expected float is tolerated.

    >>> same_value([(1, 0.3)], [[1, 0.1 + 0.2]])
    True
    """
    if isinstance(expected, float) and isinstance(actual, (int, float)):
        return _close(expected, actual)
    if isinstance(expected, (list, tuple)) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(same_value, expected, actual))
    if isinstance(expected, dict) and isinstance(actual, dict):
        return expected.keys() == actual.keys() and all(same_value(expected[key], actual[key]) for key in expected)
    return bool(expected == actual)


def _close(expected: float, actual: float) -> bool:
    try:
        return math.isclose(expected, actual, rel_tol=1e-6, abs_tol=1e-9)
    except OverflowError:  # an integer beyond every float
        return False


# Tests of the data


def read_tests(source: Row) -> tuple[str, list[Test]]:
    """The function that a problem's tests call, empty for a script, and the tests, from any configuration's form.

    Raises:
        ValueError: If column `tests` has none of the forms.
    """
    tests = source["tests"]
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
        if isinstance(tests, dict):  # taco. Some lists differ in length: what has no partner is no test
            function = tests.get("fn_name") or ""
            calls = [(function, *pair) for pair in zip(tests["inputs"], tests["outputs"], strict=False)]
        else:
            calls = [_call(test, source.get("metadata")) for test in tests]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            "column 'tests' must be a JSON list of objects with 'input' and 'output' (where testtype='functional', "
            f"also 'func_name' in metadata) or a JSON object with 'inputs' and 'outputs', got {str(tests)[:200]!r}"
        ) from error
    function = calls[0][0] if calls else ""
    kept = [(given, expected) for name, given, expected in calls if name == function]
    if not function:
        return "", [(_lines(given), _lines(expected)) for given, expected in kept]
    if all(isinstance(expected, list) and len(expected) == 1 for _, expected in kept):
        # The convention of APPS, which primeintellect and taco follow, and `_call` above: a list around the result.
        kept = [(given, expected[0]) for given, expected in kept]
    return function, [(given if isinstance(given, list) else [given], expected) for given, expected in kept]


def _call(test: Row, metadata: Any) -> tuple[str, Any, Any]:
    given, expected = test["input"], test["output"]
    if test.get("testtype") != "functional":
        return test.get("fn_name") or "", given, expected
    # lcbv5: an argument a line, in JSON; the name stands in the metadata of the test or of the problem.
    function = _function_name(test.get("metadata")) or _function_name(metadata)
    if not function:
        raise KeyError("func_name")
    return function, [json.loads(line) for line in given.splitlines() if line.strip()], [json.loads(expected)]


def _function_name(metadata: Any) -> str:
    values = json.loads(metadata) if isinstance(metadata, str) else metadata
    return (values or {}).get("func_name") or ""


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def choose_tests(problem: str, function: str, tests: Sequence[Test], max_tests: int) -> tuple[list[Test], int]:
    """At most `max_tests` different tests, the public ones first, and how many those are.

    Tests that expect nothing are left out, since a program that does nothing would pass them. At most half are public,
    if any are hidden. The hidden ones are spread evenly over all sizes, the largest included: the largest alone would
    make a reward of all or nothing of the fraction.
    """
    asking = [test for test in tests if (test[1] is not None if function else test[1].strip())]
    texts = {json.dumps(test): test for test in asking}
    small = [texts[text] for text in sorted(texts, key=lambda text: (len(text), text)) if len(text) <= MAX_TEST_CHARS]
    statement = Statement(problem)
    shown = [statement.shows(function, test) for test in small]
    public = [test for test, is_public in zip(small, shown, strict=True) if is_public][: max_tests // 2]
    hidden = [test for test, is_public in zip(small, shown, strict=True) if not is_public]
    room = min(max_tests - len(public), len(hidden))
    spread = [hidden[(index + 1) * len(hidden) // room - 1] for index in range(room)]
    return public + spread, len(public)


def task_row(
    problem: str, starter: str, function: str, tests: Sequence[Test], public: int, solution: str
) -> dict[str, Any]:
    """The columns of a task; `tests` are JSON, since arguments have types of all kinds."""
    return {
        "problem": problem,
        "starter": starter,
        "function": function,
        "tests": json.dumps(tests),
        "public": public,
        "solution": solution,
    }
