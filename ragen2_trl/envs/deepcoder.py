"""DeepCoder: write a Python program that passes the tests of a problem.

Programs run in a sandbox, each test in a process of its own that never holds what the test expects. A problem's public
tests are those that its statement shows anyway, input and expected output side by side; feedback quotes no others.
Without data, problems are generated: two steps over a list, whose functions also make up the reference program.
"""

import inspect
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from ragen2_trl.envs.base import Environment, Episode, Limits, Row, check_choice, check_range, held_out, load_tasks
from ragen2_trl.envs.responses import MAX_RESPONSE_CHARS
from ragen2_trl.envs.tools import ToolEnvironment
from ragen2_trl.sandbox import CallCase, Sandbox, SandboxUnavailableError, StdinCase, Verdict, run_tests
from ragen2_trl.sandbox import Limits as RunLimits

# What a program is given, and what it should answer. A script: two texts; a function: its arguments and its result.
Test: TypeAlias = tuple[Any, Any]

CONFIGS = {"primeintellect": ("train",), "taco": ("train",), "lcbv5": ("train", "test"), "codeforces": ("test",)}
COLUMNS = ("problem", "tests")

MAX_TEST_CHARS = 100_000  # larger tests are left out: a few of the data's have megabytes, and each row carries its own
MAX_QUOTED_CHARS = 200  # of an input, of what was expected, and of what came instead
MAX_GAP = 40  # characters between the parts of an example, such as "Sample Output 1"
GENERATED_TESTS = 8

# The data's starter code annotates with `List` and `Optional`, as LeetCode does, where they need no import.
_PREAMBLE = "from typing import *\n"
_FENCE_TAGS = ("python", "py", "python3")
_MARK = re.compile(r"<|\[(?=[A-Za-z/])")  # where a tokenizer's or a chat template's own marks begin


# Programs


def program_of(answer: str) -> str:
    """The program in an answer: its last block fenced as Python, else its last fenced block, else all of it.

    The last one, since a model that writes two has corrected the first.

    >>> program_of("Either ```python\\nprint(1)``` or better\\n```py\\nprint(2)\\n```, which gives ```\\n2```.")
    'print(2)'
    """
    blocks = [block.partition("\n") for block in answer.split("```")[1::2]]
    tagged = [body for tag, _, body in blocks if tag.strip().lower() in _FENCE_TAGS]
    programs = tagged or [body for tag, _, body in blocks if not tag.strip()]
    return (programs[-1] if programs else answer).strip()


def quoted(text: str) -> str:
    """At most `MAX_QUOTED_CHARS` characters of a text as a JSON string, without marks that a tokenizer could take.

    >>> quoted("3\\n<|im_end|>")
    '"3\\\\n\\\\u003c|im_end|>"'
    """
    cut = text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}..."
    return _MARK.sub(lambda mark: f"\\u{ord(mark[0]):04x}", json.dumps(cut))


# Tests, from the four forms of the data


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

    At most half are public. The hidden ones are spread evenly over all sizes, the largest included: the largest alone
    would make a reward of all or nothing of the fraction.
    """
    texts = {json.dumps(test): test for test in tests}
    small = [texts[text] for text in sorted(texts, key=lambda text: (len(text), text)) if len(text) <= MAX_TEST_CHARS]
    shown = [is_shown(problem, function, test) for test in small]
    public = [test for test, is_public in zip(small, shown, strict=True) if is_public][: max_tests // 2]
    hidden = [test for test, is_public in zip(small, shown, strict=True) if not is_public]
    room = min(max_tests - len(public), len(hidden))
    spread = [hidden[(index + 1) * len(hidden) // room - 1] for index in range(room)]
    return public + spread, len(public)


def is_shown(problem: str, function: str, test: Test) -> bool:
    """Whether the statement itself gives a test away: its input and, close behind it, what it expects.

    >>> is_shown("Double a number. Input: 21 Output: 42.", "", ("21\\n", "42\\n"))
    True
    """
    given, expected = test
    if not function:
        return _in_order(" ".join(problem.split()), [" ".join(given.split()), " ".join(expected.split())])
    text = re.sub(r",\s+", ",", " ".join(problem.split()))
    return any(
        _in_order(text, [re.sub(r",\s+", ",", write(value)) for value in [*given, expected]])
        for write in (json.dumps, repr)
    )


def _in_order(text: str, pieces: Sequence[str]) -> bool:
    if not all(pieces) or sum(map(len, pieces)) > len(text):
        return False
    first, *others = [re.compile(rf"(?<![\w.-]){re.escape(piece)}(?!\w|\.\d)") for piece in pieces]
    for match in first.finditer(text):
        end = match.end()
        for pattern, piece in zip(others, pieces[1:], strict=True):
            found = pattern.search(text, end, end + MAX_GAP + len(piece))
            if found is None:
                break
            end = found.end()
        else:
            return True
    return False


# Rules


@dataclass(frozen=True)
class Judge:
    """Where programs run, and how many seconds all tests of one may take."""

    sandbox: Sandbox
    seconds: float


class DeepCoderEpisode(Episode):
    """Programs for one problem.

    Args:
        row: The task's.
        judge: What tests the programs.
    """

    def __init__(self, row: Row, judge: Judge):
        self.problem: str = row["problem"]
        self.starter: str = row["starter"]
        self.function: str = row["function"]
        self.best = 0.0
        self._solution: str = row["solution"]
        self._judge = judge
        self._public: int = row["public"]
        self._cases: list[StdinCase | CallCase] = [
            CallCase(self.function, given, expected) if self.function else StdinCase(given, expected)
            for given, expected in json.loads(row["tests"])
        ]
        self._program = ""
        self._verdicts: list[Verdict] = []
        self._feedback = ""  # made when it is asked for, since it takes another run

    def observation(self) -> str:
        """The problem, and once a program has been tested what came of it instead."""
        if self._verdicts:
            self._feedback = self._feedback or self._describe()
            return self._feedback
        if self.starter:
            return f"{self.problem}\nStart from:\n```python\n{self.starter}\n```"
        case = self._cases[0]
        if isinstance(case, CallCase):
            return f"{self.problem}\nDefine the function {case.function_name} with {len(case.arguments)} argument(s)."
        return self.problem

    def _describe(self) -> str:
        passed = f"Your program passes {self._verdicts.count('passed')} of {len(self._verdicts)} tests."
        failed = [index for index in range(self._public) if self._verdicts[index] != "passed"]
        if not failed:
            return passed
        case, verdict = self._cases[failed[0]], self._verdicts[failed[0]]
        given = case.stdin if isinstance(case, StdinCase) else ", ".join(map(json.dumps, case.arguments))
        expected = case.expected if isinstance(case, StdinCase) else json.dumps(case.expected)
        wanted = f"input {quoted(given)}, expected {quoted(expected)}"
        return f"{passed} An example it fails: {wanted}, got {self._got(case, verdict)}."

    def _got(self, case: StdinCase | CallCase, verdict: Verdict) -> str:
        if verdict == "timeout":
            return "nothing in time"
        call = None if isinstance(case, StdinCase) else (case.function_name, case.arguments)
        outcome = self._judge.sandbox.run(self._program, case.stdin if isinstance(case, StdinCase) else "", call=call)
        if verdict == "error" and outcome.stderr.strip():
            return f"the error {quoted(outcome.stderr.strip().splitlines()[-1])}"
        return quoted(outcome.stdout)

    def is_action(self, action: str) -> bool:
        return len(action) <= MAX_RESPONSE_CHARS and bool(program_of(action))

    def step(self, action: str) -> float:
        """Tests a program: the fraction of the tests it passes, less the best fraction so far, not below 0.0."""
        program = program_of(action)
        self._program = _PREAMBLE + program if self.function and "__future__" not in program else program
        self._verdicts = run_tests(self._judge.sandbox, self._program, self._cases, self._judge.seconds)
        self._feedback = ""
        fraction = self._verdicts.count("passed") / len(self._verdicts)
        self.done = self.success = fraction == 1.0
        gained = max(0.0, fraction - self.best)
        self.best = max(self.best, fraction)
        return gained

    def plan(self, rng: random.Random) -> tuple[str, list[str]]:
        """The reference program of a generated problem, with the steps it takes as the reasoning."""
        if not self._solution:
            raise NotImplementedError("deepcoder has reference programs for the problems it generates only")
        return self.problem.partition("\n")[0], [self._solution]

    def random_action(self, rng: random.Random) -> str:
        """A program that looks at nothing: it gives back its input, or 0, 1 or an empty list."""
        answer = rng.choice(("given", "0", "1", "[]"))
        if self.function:
            return f"def {self.function}(given, *others):\n    return {answer}"
        return f"given = input()\nprint({answer})"


class DeepCoderTools(ToolEnvironment):
    """DeepCoder's tools."""

    def submit(self, code: str) -> str:
        """
        Tests a Python program.

        Args:
            code: The whole program.

        Returns:
            The reward of the program, how many tests it passes, and an example that it fails.
        """
        return self._take([str(code)])


class DeepCoder(Environment):
    """Write a program: the reward is the fraction of the tests it passes, and success is to pass them all.

    Problems are generated, or come from data in the schema of `agentica-org/DeepCoder-Preview-Dataset`. Its `lcbv5`
    has two splits, `codeforces` is for tests only, and the others, like a single file, are divided by problem.
    Problems without a test of at most `MAX_TEST_CHARS` characters are left out.

    Args:
        config: Which part of the data on the Hub: `"primeintellect"`, `"taco"`, `"lcbv5"` or `"codeforces"`.
        max_tests: Tests a problem has at most, 2 to 100; `choose_tests` says which. Each costs a process, some 50 ms.
        test_seconds: CPU seconds a program has for a test, 1 to 60, rounded up; the wall clock allows three times as
            many.
        program_seconds: Wall clock for all tests of a program, 1 to 600 seconds; what it leaves undone has failed.
        workers: Programs tested at a time, 1 to 64; the tests of one run one after the other. Default: the number of
            CPUs, but at most 8.
        allow_unsafe_sandbox: Where bubblewrap cannot work, run programs with the rights of this process.
        **limits: `multi_turn`, `max_turns`, `max_actions` and `protocol` of `Environment`. In several turns a program
            earns what it passes beyond the best one before.

    Raises:
        RuntimeError: If programs cannot be isolated here and `allow_unsafe_sandbox` is not set.
        ValueError: If an option is outside its range.
    """

    name = "deepcoder"
    single_turn_limits = Limits(turns=1, actions=1)
    multi_turn_limits = Limits(turns=3, actions=1)
    example = "print(input())"
    splits_answers = False
    tools = DeepCoderTools

    def __init__(
        self,
        config: str = "primeintellect",
        max_tests: int = 15,
        test_seconds: float = 4.0,
        program_seconds: float = 20.0,
        workers: int | None = None,
        allow_unsafe_sandbox: bool = False,
        **limits: Any,
    ):
        super().__init__(**limits)
        check_choice("config", config, CONFIGS)
        check_range("max_tests", max_tests, 2, 100)
        check_range("test_seconds", test_seconds, 1, 60)
        check_range("program_seconds", program_seconds, 1, 600)
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        check_range("workers", self.workers, 1, 64)
        self.config = config
        self.max_tests = max_tests
        self.test_seconds = test_seconds
        run_limits = RunLimits(cpu_seconds=math.ceil(test_seconds), wall_seconds=3.0 * test_seconds)
        try:
            self.judge = Judge(Sandbox(run_limits, allow_unsafe=allow_unsafe_sandbox), program_seconds)
        except SandboxUnavailableError as error:
            raise RuntimeError(f"{error} In {self.name} this option is `allow_unsafe_sandbox=True`.") from error

    def tasks(self, seed: int, split: str, data: str | None) -> Iterator[dict[str, Any]]:
        stream = random.Random(f"{self.name}/{split}/{seed}")
        return self._generated(stream, split) if data is None else self._loaded(stream, split, data)

    def _generated(self, stream: random.Random, split: str) -> Iterator[dict[str, Any]]:
        while True:
            task_seed = stream.getrandbits(31)
            steps, row = make_problem(random.Random(task_seed), min(self.max_tests, GENERATED_TESTS))
            if held_out(steps) == (split == "test"):  # not by the statement, whose examples differ
                yield {"seed": task_seed, **row}

    def _loaded(self, stream: random.Random, split: str, data: str) -> Iterator[dict[str, Any]]:
        splits = CONFIGS[self.config]
        if split == "train" and split not in splits:
            raise ValueError(f"split must be one of {list(splits)} for config={self.config!r}, got {split!r}")
        hashed = "test" not in splits or ("train" in splits and Path(data).is_file())
        rows = load_tasks(data, split if split in splits else "train", config=self.config)
        if not set(COLUMNS) <= set(rows.column_names):
            raise ValueError(f"columns of data must include {list(COLUMNS)}, got {rows.column_names}")
        order = list(range(len(rows)))
        stream.shuffle(order)
        for index in order:
            source = rows[index]
            problem = source["problem"]
            if not isinstance(problem, str) or not problem.strip():
                raise ValueError(f"column 'problem' must be a text that is not empty, got {problem!r}")
            if hashed and held_out(" ".join(problem.split())) != (split == "test"):
                continue
            function, tests = read_tests(source)
            tests, public = choose_tests(problem, function, tests, self.max_tests)
            if tests:
                starter = (source.get("starter_code") or "").rstrip()
                yield {"seed": index, **task_row(problem.strip(), starter, function, tests, public, "")}

    def episode(self, row: Row, rng: random.Random) -> DeepCoderEpisode:
        return DeepCoderEpisode(row, self.judge)

    def instructions(self) -> str:
        later = " A later program earns what it passes beyond your best." if self.max_turns > 1 else ""
        return (
            "Write a Python 3 program, standard library only, that solves the problem. It reads standard input and "
            "prints the answer, unless a function is asked for: then define that, with its imports, and read nothing. "
            f"Each test gives it {self.test_seconds:g} seconds. Reward: the fraction of tests it passes, most of them "
            f"hidden.{later}"
        )


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


# Generated problems. The functions below compute what is expected, and their source text is the reference program.


def above(items: list[int], k: int) -> list[int]:
    return [item for item in items if item > k]


def other_than_multiples(items: list[int], k: int) -> list[int]:
    return [item for item in items if item % k]


def scaled(items: list[int], k: int) -> list[int]:
    return [item * k for item in items]


def remainders(items: list[int], k: int) -> list[int]:
    return [item % k for item in items]


def running_sums(items: list[int], k: int) -> list[int]:
    return [sum(items[: end + 1]) + k for end in range(len(items))]


def total(items: list[int], k: int) -> int:
    return sum(items) + k


def multiples(items: list[int], k: int) -> int:
    return sum(item % k == 0 for item in items)


def pairs(items: list[int], k: int) -> int:
    return sum(abs(a - b) == k for i, a in enumerate(items) for b in items[:i])


def largest_window(items: list[int], k: int) -> int:
    return max(sum(items[start : start + k]) for start in range(max(1, len(items))))


def rotated(items: list[str], k: int) -> list[str]:
    return [items[(place + k) % len(items)] for place in range(len(items))]


def without_short(items: list[str], k: int) -> list[str]:
    return [word for word in items if len(word) > k]


def reversed_long(items: list[str], k: int) -> list[str]:
    return [word[::-1] if len(word) > k else word for word in items]


def shifted(items: list[str], k: int) -> list[str]:
    return ["".join(chr((ord(letter) - 97 + k) % 26 + 97) for letter in word) for word in items]


def letters(items: list[str], k: int) -> int:
    return sum(map(len, items)) + k


def run_lengths(items: list[str], k: int) -> str:
    text = "".join(items)
    starts = [place for place in range(len(text)) if place == 0 or text[place] != text[place - 1]]
    ends = [*starts[1:], len(text)]
    return "".join(f"{text[start]}{end - start + k}" for start, end in zip(starts, ends, strict=False))


def initials(items: list[str], k: int) -> str:
    return "".join(word[:k] for word in items)


Part: TypeAlias = tuple[Callable[[list[Any], int], Any], str]  # what is done, and in words

NUMBER_STEPS: tuple[Part, ...] = (
    (above, "Keep the numbers greater than {k}."),
    (other_than_multiples, "Drop the multiples of {k}."),
    (scaled, "Multiply each number by {k}."),
    (remainders, "Replace each number by its remainder modulo {k}."),
    (running_sums, "Replace each number by the sum of all up to and including it, plus {k}."),
)
NUMBER_ENDS: tuple[Part, ...] = (
    (total, "The answer is their sum plus {k}."),
    (multiples, "The answer is how many of them are multiples of {k}."),
    (pairs, "The answer is how many pairs of them differ by exactly {k}."),
    (largest_window, "The answer is the largest sum of up to {k} neighbours, 0 if there are none."),
)
WORD_STEPS: tuple[Part, ...] = (
    (rotated, "Move the first word to the end, {k} times."),
    (without_short, "Drop the words of up to {k} letters."),
    (reversed_long, "Reverse each word of more than {k} letters."),
    (shifted, "Move each letter on by {k} in the alphabet, from z back to a."),
)
WORD_ENDS: tuple[Part, ...] = (
    (letters, "The answer is the number of their letters plus {k}."),
    (run_lengths, "Join them. The answer is each run of equal letters as the letter and its length plus {k}."),
    (initials, "The answer is the first {k} letters of each, joined."),
)


def make_problem(rng: random.Random, num_tests: int) -> tuple[str, dict[str, Any]]:
    """The steps of a random problem in words, and its row without the seed: two public tests and hidden ones."""
    while True:
        words, as_function = rng.random() < 0.5, rng.random() < 0.5
        step, end = rng.choice(WORD_STEPS if words else NUMBER_STEPS), rng.choice(WORD_ENDS if words else NUMBER_ENDS)
        k, last_k = (rng.randint(2, 5 if words else 9) for _ in range(2))
        inputs = [_random_words(rng) if words else _random_numbers(rng) for _ in range(num_tests)]
        answers = [end[0](step[0](items, k), last_k) for items in inputs]
        if "" not in answers and len(set(answers)) > num_tests // 2:  # no constant is right too often
            break
    steps = f"{step[1].format(k=k)} {end[1].format(k=last_k)}"
    parts = "\n\n".join(_source(part[0]) for part in (step, end))
    compute = f"{end[0].__name__}({step[0].__name__}(items, {k}), {last_k})"
    kind, of = ("words", "str") if words else ("numbers", "int")
    if as_function:
        about, starter = (
            f"The function gets a list of {kind} and returns the answer.",
            f"def solve(items: list[{of}]):",
        )
        solution = f"{parts}\n\n{starter}\n    return {compute}"
        shown = [(json.dumps(items), json.dumps(answer)) for items, answer in zip(inputs, answers, strict=True)]
        tests: list[Test] = [([items], answer) for items, answer in zip(inputs, answers, strict=True)]
    else:
        about, starter = f"The input is one line of {kind}.", ""
        solution = f"{parts}\n\nitems = [{of}(word) for word in input().split()]\nprint({compute})"
        shown = [(" ".join(map(str, items)), str(answer)) for items, answer in zip(inputs, answers, strict=True)]
        tests = [(f"{given}\n", f"{expected}\n") for given, expected in shown]
    public = max(1, min(2, num_tests // 2))
    examples = "\n".join(f"Input: {given} Output: {expected}" for given, expected in shown[:public])
    function = "solve" if as_function else ""
    return steps, task_row(f"{steps}\n{about}\n{examples}", starter, function, tests, public, solution)


@cache
def _source(function: Callable[..., Any]) -> str:
    return inspect.getsource(function).strip()


def _random_words(rng: random.Random) -> list[str]:
    return ["".join(rng.choice("abz") for _ in range(rng.randint(1, 8))) for _ in range(rng.randint(3, 7))]


def _random_numbers(rng: random.Random) -> list[int]:
    return [rng.randint(0, 30) for _ in range(rng.randint(4, 9))]
