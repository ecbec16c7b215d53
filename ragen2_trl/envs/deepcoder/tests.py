"""The tests of DeepCoder's problems: read from the four forms of the data, chosen, and put in a row."""

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from ragen2_trl.envs.deepcoder.statements import Statement
from ragen2_trl.envs.tasks import Row

# What a program is given, and what it should answer. A script: two texts; a function: its arguments and its result.
Test: TypeAlias = tuple[Any, Any]

MAX_TEST_CHARS = 100_000  # larger tests are left out: a few of the data's have megabytes, and each row carries its own


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
            "column 'tests' must hold JSON, a list of objects with 'input' and 'output' (and 'func_name' in the "
            f"metadata of functional ones) or an object with 'inputs' and 'outputs', got {str(tests)[:200]!r}"
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
