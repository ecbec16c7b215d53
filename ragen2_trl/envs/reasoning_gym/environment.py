"""reasoning-gym: a hundred generators of puzzles, each with a scorer of its own (arXiv 2505.24760)."""

import ast
import inspect
import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, ClassVar

from ragen2_trl.envs.checks import check_choice
from ragen2_trl.envs.environment import Environment
from ragen2_trl.envs.episode import Episode, Limits
from ragen2_trl.envs.reasoning_gym import scorer
from ragen2_trl.envs.responses import plain_text
from ragen2_trl.envs.tasks import Row, held_out

logger = logging.getLogger(__name__)

MAX_ANSWER_CHARS = 10_000
# Of wall time, and generous: a machine with much to do must take no reward from a right answer. What takes for ever is
# mostly ended before, by the scorer's own limit of processor time.
SECONDS_TO_START, SECONDS_TO_SCORE = 300.0, 60.0
# Functions that run text as a program; SymPy's parser is Python's `eval`.
EVALUATING = {"eval", "exec", "compile", "parse_expr", "parse_latex", "sympify", "S", "lambdify"}


class Scorer:
    """The program `scorer.py`, started when first needed, and again after an answer that it did not survive.

    Each process has its own: one that is forked leaves it to its parent. It ends with the process that asks, at the
    end of its input, or in the middle of an answer at its limit of processor time.
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()  # tasks of which that has been told
        self._leave()
        os.register_at_fork(after_in_child=self._leave)

    def __call__(self, task: str, config: str, number: int, answer: str) -> float:
        """The score of an answer, 0.0 to 1.0; 0.0 where it cost too much to find out, or the scorer failed over it.

        Raises:
            RuntimeError: If the program does not start, or cannot make the task.
        """
        question = {"task": task, "config": config, "number": number, "answer": answer}
        with self._lock:
            try:
                # One that ended since the last answer, as where memory ran out, takes nothing from this one.
                if not self._makes(question):
                    self._end()
                    if not self._makes(question):
                        raise RuntimeError(
                            f"reasoning_gym's scorer died or hung twice: task={task!r}; reduce config={config}"
                        )
                worth = self._reply(SECONDS_TO_SCORE)
            except BaseException:  # Ctrl-C, too: nothing is left that could answer later
                self._end()
                raise
            if worth is None:
                self._end()
                return 0.0
            return self._worth(task, worth.decode())

    def _worth(self, task: str, said: str) -> float:
        try:
            return float(said)
        except ValueError:  # not a number, but an error's name
            if task not in self._failed:
                self._failed.add(task)
                logger.warning("The scorer of task=%r failed on an answer, which counts as 0: %s", task, said)
            return 0.0

    def _leave(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)

    def _makes(self, question: dict[str, Any]) -> bool:
        """Whether the program, started if need be, has the task of a question and now scores the answer."""
        if self._process is None:
            self._process = _started()
        assert self._process.stdin is not None
        self._asked += 1
        line = json.dumps({"asked": self._asked, **question}).encode() + b"\n"
        try:
            while line:
                line = line[self._process.stdin.write(line) :]
        except BrokenPipeError:
            return False
        return self._reply(SECONDS_TO_START) == b"made"

    def _reply(self, seconds: float) -> bytes | None:
        """What the program says next of the question asked last; `None` where it ends or takes longer."""
        assert self._process is not None
        until = time.monotonic() + seconds
        while line := _line(self._process, until - time.monotonic()):
            asked, said = line.split()
            if int(asked) == self._asked:
                return said
        return None


def _started() -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-I", str(scorer.__file__)]
    # Unbuffered, as `poll` sees no buffers of ours. In a session of its own, as Ctrl-C is for training, which may go
    # on to save and to evaluate. Without Linux's signal at a parent's death, which comes when the thread that started
    # the program ends, and episodes may be stepped in threads.
    with tempfile.TemporaryFile() as complaints:  # until it is ready, when it writes no more of them
        process = subprocess.Popen(
            command,
            bufsize=0,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
        )
        try:
            is_ready = _line(process, SECONDS_TO_START) == b"ready"
        except BaseException:  # Ctrl-C, which does not reach it
            _kill(process)
            raise
        if not is_ready:
            _kill(process)
            complaints.seek(0)
            last = complaints.read()[-2000:].decode(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"the scorer of reasoning_gym did not start ({' '.join(command)}): {''.join(last)}")
    return process


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _line(process: "subprocess.Popen[bytes]", seconds: float) -> bytes:
    """The next line that a program writes, empty if it ends or writes none in time. Its lines are short, and whole."""
    assert process.stdout is not None
    written = select.poll()  # unlike `select.select`, for any number of open files
    written.register(process.stdout, select.POLLIN)
    return process.stdout.readline().strip() if written.poll(max(0.0, seconds) * 1000) else b""


score_answer = Scorer()


def evaluating_functions(method: MethodType) -> set[str]:
    """Functions by which a generator's scorer, or what it calls of its own package, runs text as a program."""
    found: set[str] = set()
    seen: set[Any] = set()
    waiting = [method.__func__]
    while waiting:
        function = waiting.pop()
        seen.add(function)
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            found |= EVALUATING & {name}
            called = getattr(type(method.__self__), name, None) or function.__globals__.get(name)
            if inspect.isfunction(called) and called.__module__.startswith("reasoning_gym") and called not in seen:
                waiting.append(called)
    return found


class ReasoningGymEpisode(Episode):
    """One answer to one question.

    Args:
        question: What is asked.
        answer: A right answer, where the generator knows one.
        score: What an answer is worth.
    """

    def __init__(self, question: str, answer: str | None, score: Callable[[str], float]):
        self.question = plain_text(question, keep_lines=True)
        self.answer = answer
        self._score = score

    def observation(self) -> str:
        return self.question

    def is_action(self, action: str) -> bool:
        return 0 < len(action.strip()) <= MAX_ANSWER_CHARS

    def step(self, action: str) -> float:
        """The score of the generator, 0.0 to 1.0; solved at 1.0."""
        worth = self._score(action)
        self.done, self.success = True, worth == 1.0
        return worth

    def plan(self, rng: random.Random) -> tuple[str, list[str]]:
        """The answer that the generator gives."""
        if self.answer is None:
            raise NotImplementedError("this generator of reasoning_gym gives no answers")
        return f"It is {self.answer}.", [self.answer]


class ReasoningGym(Environment):
    """Questions of a generator of reasoning-gym, worth what its scorer says of an answer.

    A task of the split `"test"` is one in five, by its question, so that none of them is ever trained.

    Args:
        task: Name of the generator, see `reasoning_gym.factory.DATASETS`.
        config: Settings of the generator, by name.
        **limits: `enable_think`, `force_think` and `max_turn_tokens` of `Environment`.

    Raises:
        ImportError: If reasoning-gym is not installed.
        ValueError: If the generator or a setting is not known, or its scorer runs answers as programs.
    """

    name = "reasoning_gym"
    returns = (0.0, 1.0)
    single_turn_limits = Limits(turns=1, actions=1)
    multi_turn_limits = None
    example = "answer"
    splits_answers = False
    packages: ClassVar[tuple[str, ...]] = ("reasoning-gym",)

    def __init__(self, task: str = "leg_counting", config: Mapping[str, Any] | None = None, **limits: Any):
        super().__init__(**limits)
        from reasoning_gym.factory import DATASETS

        check_choice("task", task, sorted(DATASETS))
        if task == "composite":
            raise ValueError(
                "task must be a single generator of reasoning_gym, got 'composite', which mixes several scorers; "
                "allowed: each part as a task"
            )
        fixed = sorted({"seed", "size"} & set(config or {}))
        if fixed:
            raise ValueError(f"config of reasoning_gym must not set {fixed} (num_prompts and seed do), got {config!r}")
        self.task = task
        self.config = json.dumps(dict(config or {}))
        try:
            items = scorer.generator(task, self.config)
        except (AssertionError, TypeError, ValueError) as error:  # by which its configurations refuse settings
            raise ValueError(f"config={self.config} does not fit task={task!r} of reasoning_gym: {error}") from error
        if unsafe := sorted(evaluating_functions(items.score_answer)):
            raise ValueError(
                f"task must have a scorer that reads answers as text, got {task!r}, which runs them by {unsafe}"
            )

    def tasks(self, seed: int, split: str, data: str | None) -> Iterator[dict[str, Any]]:
        check_choice("data", data, (None,))
        items = scorer.generator(self.task, self.config)
        numbers = list(range(scorer.SIZE))
        random.Random(f"{self.name}/{self.task}/{seed}").shuffle(numbers)
        for number in numbers:
            item = items[number]
            if held_out(item["question"]) == (split == "test"):
                yield {"seed": number, "question": item["question"], "answer": item["answer"]}

    def episode(self, row: Row, rng: random.Random) -> ReasoningGymEpisode:
        return ReasoningGymEpisode(
            row["question"],
            row["answer"],
            lambda answer: score_answer(self.task, self.config, row["seed"], answer),
        )

    def instructions(self) -> str:
        return "Answer the question. Reward: 1 if the answer is right, less or nothing if not."
