"""Test programs that a model wrote.

They run in the sandbox, all else happens outside: what a program should have answered never enters, so that it passes
a test only by producing the right value.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ragen2_trl.envs.deepcoder.sandbox import ProgramResult, Sandbox

Verdict = Literal["passed", "wrong", "error", "timeout"]

WALL_PER_CPU = 10.0  # for programs that wait, and where others have the processor
MAX_KEPT_CHARS = 1000  # of what a case printed, and of its error


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
