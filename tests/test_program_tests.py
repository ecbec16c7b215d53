"""Tests of programs: their verdicts, what they quote, and what no program finds out or gets away with."""

import json
import uuid

import pytest

from ragen2_trl.envs.deepcoder.program_tests import (
    MAX_KEPT_CHARS,
    Case,
    CaseResult,
    run_tests,
    same_output,
    same_value,
)
from ragen2_trl.envs.deepcoder.sandbox import Sandbox, SandboxLimits

pytestmark = [pytest.mark.slow, pytest.mark.needs("bubblewrap")]


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(SandboxLimits(wall_seconds=10.0))


def verdicts(*args, **kwargs):
    return [result.verdict for result in run_tests(*args, **kwargs)]


def test_scripts_are_judged_by_what_they_print(sandbox):
    cases = [Case("1 2", "3\n"), Case("2 2", "4"), Case("2 2", "5"), Case("x", "1")]
    program = "print(sum(map(int, input().split())), ' ')"
    assert verdicts(sandbox, program, cases) == ["passed", "passed", "wrong", "error"]


def test_a_result_quotes_what_came_instead(sandbox):
    program = "n = int(input())\nprint(n * 'ab')\nassert n < 3, 'too large'\nprint(1 // n)"
    cases = [Case(given, "ab\n1") for given in ("1", "2", "0", "3", "x")]
    assert run_tests(sandbox, program, cases) == [
        CaseResult("passed", "ab\n1\n"),
        CaseResult("wrong", "abab\n0\n"),
        CaseResult("error", "\n", "ZeroDivisionError: integer division or modulo by zero"),
        CaseResult("error", "ababab\n", "AssertionError: too large"),
        CaseResult("error", "", "ValueError: invalid literal for int() with base 10: 'x'"),
    ]
    assert run_tests(sandbox, "def f(x):\n    print('debug')\n    return [x]", [Case([1], 1, "f")]) == [
        CaseResult("wrong", "[1]")
    ]


def test_a_result_keeps_little_of_what_a_program_floods_with(sandbox):
    program = "import sys\nprint('x' * 100_000)\nsys.exit('y' * 100_000)"
    (result,) = run_tests(sandbox, program, [Case("", "")])
    assert (result.got, result.error) == ("x" * MAX_KEPT_CHARS, "y" * MAX_KEPT_CHARS)


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b): return a + b",
        "class Solution:\n    def add(self, a, b):\n        print('debug', 7)\n        return a + b",
        "def add(a, b): return a + b\nif __name__ == '__main__': add(*map(int, input().split()))",
    ],
)
def test_functions_and_methods_are_judged_by_what_they_return(sandbox, program):
    assert verdicts(sandbox, program, [Case([1, 2], 3, "add"), Case([1, 2], 4, "add")]) == ["passed", "wrong"]


CHEATS = {
    "leaves early": "import sys\nsys.exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "leaves when called": "import os\ndef f(x): os._exit(0)",
    "prints": "def f(x): print(True, 4)",
    "equals everything": "class Any(int):\n    __eq__ = lambda *_: True\ndef f(x): return Any()",
    "replaces builtins": "import builtins\nbuiltins.all = builtins.bool = lambda *_: True\ndef f(x): return 0",
    "replaces json": "import json\njson.loads = json.dumps = lambda *_, **__: 'true'\n"
    "json.dump = lambda _, stream: stream.write('true')\ndef f(x): return 0",
    "replaces stdout": "import io, sys\nsys.stdout = sys.stderr = io.StringIO()\ndef f(x): return 0",
    "writes twice": "import os\ndef f(x):\n    os.write(3, b'5 ')\n    return 4",
    "tries them all": "import os\ndef f(x):\n    os.write(3, b'1 2 3 4 5')\n    os._exit(0)",
    "closes the channel": "import os\ndef f(x):\n    os.closerange(0, 64)\n    return 4",
    "fails afterwards": "import atexit, os\natexit.register(lambda: os._exit(1))\ndef f(x): return 4",
    "defines nothing": "x = 4",
    "does not parse": "def f(x) return 4",
    "nul": "\0",
    "lone surrogate": "'\ud800'",
}


@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_no_cheat_passes(sandbox, program):
    assert verdicts(sandbox, "def f(x): return 2 * x", [Case([2], 4, "f")]) == ["passed"]
    assert verdicts(sandbox, program, [Case([2], 4, "f")])[0] in ("wrong", "error")


@pytest.mark.parametrize("called", [False, True])
def test_expected_values_are_nowhere_inside(sandbox, called):
    """The program dumps every byte of its memory and all it can read that carries the needle's prefix."""
    needle = f"needle-{uuid.uuid4().hex}"
    program = """
import gc, os, re, sys
def search(*_):
    print(repr([o for o in gc.get_objects() if isinstance(o, (dict, list, tuple))])[:200_000])
    print(sys.argv, os.environ, os.listdir("/tmp"), os.listdir("/proc/self/fd"))
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
        for line in maps:
            if not line.split()[1].startswith("r") or "[v" in line:
                continue
            start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            memory.seek(start)
            print(re.findall(b"n" b"eedle-[0-9a-f]+|c" b"anary-[0-9a-f]+", memory.read(end - start)))
if __name__ == "__main__":
    search(input())
"""
    canary = "canary-0123"  # the search finds what is inside
    if not called:
        outcome, case = sandbox.run(program, canary), Case(canary, needle)
    else:
        outcome, case = sandbox.run(program, call=("search", [canary])), Case([canary], needle, "search")
    seen = []
    spy = Sandbox(sandbox.limits)
    spy.run = lambda *args, **kwargs: seen.append(sandbox.run(*args, **kwargs)) or seen[-1]
    assert verdicts(spy, program, [case]) == ["wrong"]
    for found in (outcome, seen[0]):
        assert f"b'{canary}'" in found.stdout + found.stderr
        assert needle not in found.stdout + found.stderr


def test_cases_learn_nothing_of_each_other(sandbox):
    program = "import os\ndef f(x):\n    known = os.listdir()\n    open(str(x), 'w').close()\n    return known"
    assert verdicts(sandbox, program, [Case([n], [], "f") for n in range(3)]) == ["passed"] * 3


def test_all_cases_share_their_cpu_time(sandbox):
    program = "n = int(input())\nwhile n: pass\nprint(n)"
    cases = [Case("0", "0"), *(Case("1", "1") for _ in range(20))]
    runs = []
    spy = Sandbox(sandbox.limits)
    spy.run = lambda *args, **kwargs: runs.append(sandbox.run(*args, **kwargs)) or runs[-1]
    assert verdicts(spy, program, cases, cpu_seconds=1.0) == ["passed"] + ["timeout"] * 20
    assert [run.ended for run in runs] == ["exit", "cpu"]


def test_waiting_takes_none_of_the_cpu_time(sandbox):
    program = "import time\ntime.sleep(0.2)\nprint(input())"
    assert verdicts(sandbox, program, [Case("1", "1")] * 3, cpu_seconds=0.3) == ["passed"] * 3


def test_cases_that_wait_share_ten_times_the_cpu_time_of_the_wall_clock(sandbox):
    program = "import time\ntime.sleep(1.5)\nprint(input())"
    assert verdicts(sandbox, program, [Case("1", "1")] * 5, cpu_seconds=0.2) == ["passed"] + ["timeout"] * 4


def test_after_a_case_that_waited_for_ever_no_other_is_run():
    program = "import time\nn = int(input())\ntime.sleep(60 * n)\nprint(n)"
    short = Sandbox(SandboxLimits(wall_seconds=1.5))
    runs = []
    run = short.run
    short.run = lambda *args, **kwargs: runs.append(run(*args, **kwargs)) or runs[-1]
    assert verdicts(short, program, [Case(n, n) for n in "01000"]) == ["passed"] + ["timeout"] * 4
    assert [run.ended for run in runs] == ["exit", "wall"]


@pytest.mark.parametrize(
    ("result", "expected", "verdict"),
    [
        ("(1, (2,))", [1, [2]], "passed"),
        ("[1, 2]", (1, 2), "passed"),
        ("{'a': 0.1 + 0.2}", {"a": 0.3}, "passed"),
        ("None", None, "passed"),
        ("2", 2.0, "passed"),
        ("float('nan')", 1.0, "wrong"),
        ("[float('inf')]", [1.0], "wrong"),
        ("10**400", 1.0, "wrong"),
        ("{1, 2}", [1, 2], "error"),
        ("b'x'", "x", "error"),
        ("10**5000", 1, "error"),
        ("deep(100_000)", [], "error"),
        ("'x' * (4 << 20)", "x", "error"),
    ],
)
def test_results_of_every_kind_get_a_verdict(sandbox, result, expected, verdict):
    program = f"""
def deep(n):
    value = []
    for _ in range(n):
        value = [value]
    return value
def f():
    return {result}
"""
    assert verdicts(sandbox, program, [Case([], expected, "f")]) == [verdict]


@pytest.mark.parametrize(
    "text", ["[" * 200_000 + "]" * 200_000, "9" * 50_000, '{"a":' * 100_000, "nonsense", "1 2", ""]
)
def test_what_is_no_json_value_is_an_error(sandbox, text):
    """Written straight to the channel, which no library inside can keep from happening."""
    program = f"import os\nwith open(3, 'w') as channel: channel.write({text!r})\nos._exit(0)"
    assert verdicts(sandbox, program, [Case([], 1, "f")]) == ["error"]


def test_tolerance_is_for_fractions_alone():
    assert same_output("0.3 7", "0.30000001   7\n\n")
    assert same_output("1e3", "1000.0000001")
    assert same_output("\n3\n", "3")
    for expected, actual in (
        ("1000000", "1000001"),
        ("7", "7.0"),
        ("a b", "a\nb"),
        ("1", ""),
        ("0.5", "nan"),
        ("1", "1 1"),
    ):
        assert not same_output(expected, actual)
    assert same_value([1.0, {"a": [2]}], json.loads('[1.0000000001, {"a": [2]}]'))
    assert not same_value([1], [1, 2])
    assert not same_value({"a": 1}, {"a": 1, "b": 2})
