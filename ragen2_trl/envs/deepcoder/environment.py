"""DeepCoder: write a Python program that passes the tests of a problem.

Programs run in a sandbox, each test in a process of its own that never holds what the test expects. A problem's public
tests are those that its statement shows anyway, input and expected output side by side; feedback quotes no others.
Without data, problems are generated: two steps over a list, whose functions also make up the solution.
"""

import json
import math
import os
import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset

from ragen2_trl.envs.checks import check_choice, check_count, check_range
from ragen2_trl.envs.deepcoder.problems import make_problem
from ragen2_trl.envs.deepcoder.program_tests import (
    WALL_PER_CPU,
    Case,
    CaseResult,
    Test,
    choose_tests,
    read_tests,
    run_tests,
    task_row,
)
from ragen2_trl.envs.deepcoder.sandbox import Sandbox, SandboxLimits, SandboxUnavailableError
from ragen2_trl.envs.environment import Environment
from ragen2_trl.envs.episode import Episode, Limits
from ragen2_trl.envs.responses import MAX_RESPONSE_CHARS, plain_text
from ragen2_trl.envs.tasks import Row, held_out, load_tasks, shuffled
from ragen2_trl.envs.tools import ToolEnvironment

CONFIGS = {"primeintellect": ("train",), "taco": ("train",), "lcbv5": ("train", "test"), "codeforces": ("test",)}
COLUMNS = ("problem", "tests")

MAX_QUOTED_CHARS = 200  # of an input, of what was expected, and of what came instead
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


# Rules


@dataclass(frozen=True)
class Judge:
    """Where programs run, and how many CPU seconds all tests of one may take."""

    sandbox: Sandbox
    seconds: float


class DeepCoderEpisode(Episode):
    """Programs for one problem.

    Args:
        row: The task's.
        judge: What tests the programs.
    """

    def __init__(self, row: Row, judge: Judge):
        self.problem: str = plain_text(row["problem"], keep_lines=True)
        self.starter: str = plain_text(row["starter"], keep_lines=True)
        self.function: str = row["function"]
        self.best = 0.0
        self._solution: str = row["solution"]
        self._judge = judge
        self._public: int = row["public"]
        self._cases = [Case(given, expected, self.function) for given, expected in json.loads(row["tests"])]
        self._feedback = ""

    def observation(self) -> str:
        """The problem, and once a program has been tested what came of it instead."""
        return self._feedback or self.task()

    def task(self) -> str:
        """The problem, and what a program starts from or has to define."""
        if self.starter:
            return f"{self.problem}\nStart from:\n```python\n{self.starter}\n```"
        if self.function:
            count = len(self._cases[0].given)
            return f"{self.problem}\nDefine the function {plain_text(self.function)} with {count} argument(s)."
        return self.problem

    def _describe(self, results: Sequence[CaseResult], num_passed: int) -> str:
        passed = f"Your program passes {num_passed} of {len(results) - self._public} hidden tests."
        failed = [index for index in range(self._public) if results[index].verdict != "passed"]
        if not failed:
            return passed
        case, result = self._cases[failed[0]], results[failed[0]]
        given = ", ".join(map(json.dumps, case.given)) if case.function else case.given
        expected = json.dumps(case.expected) if case.function else case.expected
        wanted = f"input {quoted(given)}, expected {quoted(expected)}"
        return f"{passed} An example it fails: {wanted}, got {_got(result)}."

    def is_action(self, action: str) -> bool:
        return len(action) <= MAX_RESPONSE_CHARS and bool(program_of(action))

    def step(self, action: str) -> float:
        """Tests a program: the fraction of hidden tests it passes, less the best fraction so far, not below 0.0.

        What the statement shows earns nothing, since it could be copied.
        """
        program = program_of(action)
        program = _PREAMBLE + program if self.function and "__future__" not in program else program
        results = run_tests(self._judge.sandbox, program, self._cases, self._judge.seconds)
        hidden = results[self._public :]
        num_passed = sum(result.verdict == "passed" for result in hidden)
        self._feedback = self._describe(results, num_passed)
        fraction = num_passed / len(hidden)
        self.done = self.success = fraction == 1.0
        gained = max(0.0, fraction - self.best)
        self.best = max(self.best, fraction)
        return gained

    def plan(self, rng: random.Random) -> tuple[str, list[str]]:
        """The solution of a generated problem, with the steps it takes as the reasoning."""
        if not self._solution:
            raise NotImplementedError("deepcoder has solutions for the problems it generates only")
        return self.problem.partition("\n")[0], [self._solution]

    def random_action(self, rng: random.Random) -> str:
        """A program that looks at nothing: it gives back its input, or 0, 1 or an empty list."""
        answer = rng.choice(("given", "0", "1", "[]"))
        if self.function:
            return f"def {self.function}(given, *others):\n    return {answer}"
        return f"given = input()\nprint({answer})"


def _got(result: CaseResult) -> str:
    if result.verdict == "timeout":
        return "nothing in time"
    return f"the error {quoted(result.error)}" if result.error else quoted(result.got)


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
    """Write a program: the reward is the fraction of the hidden tests it passes, and success is to pass them all.

    Problems are generated, or come from data in the schema of `agentica-org/DeepCoder-Preview-Dataset`. Its `lcbv5`
    has two splits, `codeforces` is for tests only, and the others, like a single file, are divided by problem. What is
    also among the problems for tests is left out of training.
    Problems without a hidden test of at most `MAX_TEST_CHARS` characters are left out.

    Args:
        config: Which part of the data on the Hub: `"primeintellect"`, `"taco"`, `"lcbv5"` or `"codeforces"`.
        max_tests: Tests a problem has at most, 2 to 100; `choose_tests` says which. Each costs a process, some 50 ms.
        test_seconds: CPU seconds a program has for a test, 1 to 60, rounded up. The wall clock allows ten times as
            many, for programs that wait; a program that it ends fails the tests it has left.
        program_seconds: CPU seconds for all tests of a program, 1 to 600, and a tenth of what the wall clock allows
            them; what they leave undone has failed.
        workers: Programs tested at a time, 1 to 64; the tests of one run one after the other. Default: the number of
            CPUs, but at most 8. All processes of a user on a machine together never run more than it has CPUs.
        allow_unsafe_sandbox: Where bubblewrap cannot work, run programs with the rights of this process.
        **limits: `multi_turn`, `max_turns`, `max_actions` and `protocol` of `Environment`. In several turns a program
            earns what it passes beyond the best one before.

    Raises:
        SandboxUnavailableError: If programs cannot be isolated here and `allow_unsafe_sandbox` is not set.
        SandboxFailedError: In a step, if the machine can no longer run any program.
        ValueError: If an option is outside its range.
    """

    name = "deepcoder"
    returns = (0.0, 1.0)
    single_turn_limits = Limits(turns=1, actions=1)
    multi_turn_limits = Limits(turns=3, actions=1)
    example = "print(input())"
    splits_answers = False
    quick = False
    configs: ClassVar[tuple[str, ...]] = tuple(CONFIGS)
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
        check_choice("config", config, self.configs)
        check_choice("allow_unsafe_sandbox", allow_unsafe_sandbox, (True, False))
        check_count("max_tests", max_tests, 2, 100)
        check_range("test_seconds", test_seconds, 1, 60)
        check_range("program_seconds", program_seconds, 1, 600)
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        check_count("workers", self.workers, 1, 64)
        self.config = config
        self.max_tests = max_tests
        self.test_seconds = test_seconds
        run_limits = SandboxLimits(cpu_seconds=math.ceil(test_seconds), wall_seconds=WALL_PER_CPU * test_seconds)
        try:
            self.judge = Judge(Sandbox(run_limits, allow_unsafe=allow_unsafe_sandbox), program_seconds)
        except SandboxUnavailableError as error:
            raise SandboxUnavailableError(error.reason, option="allow_unsafe_sandbox") from None

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
        rows, hashed = self.load(data, split)
        for_tests = self.statements_for_tests(data) if split == "train" and not hashed else set()
        for index, source in shuffled(rows, COLUMNS, stream):
            problem = statement(source)
            if problem in for_tests or (hashed and held_out(problem) != (split == "test")):
                continue
            task = self._task(index, source)
            if task is not None:
                yield task

    def _task(self, seed: int, source: Row) -> dict[str, Any] | None:
        """The task of a row, `None` where no test would be judged."""
        problem = problem_of(source)
        function, tests = read_tests(source)
        tests, public = self.choose(problem, function, tests)
        if len(tests) == public:
            return None
        starter = (source.get("starter_code") or "").rstrip()
        return {"seed": seed, **task_row(problem.strip(), starter, function, tests, public, "")}

    def choose(self, problem: str, function: str, tests: list[Test]) -> tuple[list[Test], int]:
        """The tests that count, the public ones first, and how many those are."""
        return choose_tests(problem, function, tests, self.max_tests)

    def load(self, data: str, split: str) -> tuple[Dataset, bool]:
        """Problems, and whether they still have to be divided by problem.

        Args:
            data: A Hub id, a local file, which is read whole, or a local folder.
            split: `"train"` or `"test"`.

        Raises:
            ValueError: If the data have no such split.
        """
        splits = self.splits
        if split == "train" and split not in splits:
            raise ValueError(f"split must be one of {list(splits)} for config={self.config!r}, got {split!r}")
        hashed = "test" not in splits or ("train" in splits and Path(data).is_file())
        return load_tasks(data, split if split in splits else "train", config=self.config), hashed

    @property
    def splits(self) -> Collection[str]:
        """Those that the part of the data has."""
        return CONFIGS[self.config]

    def statements_for_tests(self, data: str) -> set[str]:
        """As `statement` gives them: parts hold problems of the same contests, and some of them both."""
        rows, _ = self.load(data, "test")
        return set(map(statement, rows.select_columns("problem")))  # tests may have megabytes

    def episode(self, row: Row, rng: random.Random) -> DeepCoderEpisode:
        return DeepCoderEpisode(row, self.judge)

    def instructions(self) -> str:
        later = " A later program earns what it passes beyond your best." if self.max_turns > 1 else ""
        return (
            "Write a Python 3 program, standard library only, that solves the problem. It reads standard input and "
            "prints the answer, unless a function is asked for: then define that, with its imports, and read nothing. "
            f"Each test gives it {self.test_seconds:g} seconds. Reward: the fraction of hidden tests it passes.{later}"
        )


def statement(source: Row) -> str:
    """The problem of a row, whatever its white space."""
    return " ".join(problem_of(source).split())


def problem_of(source: Row) -> str:
    """The statement of a row.

    Raises:
        ValueError: If it is no text, or empty.
    """
    problem = source["problem"]
    if not isinstance(problem, str) or not problem.strip():
        raise ValueError(f"column 'problem' must be a non-empty text, got {problem!r}")
    return problem
