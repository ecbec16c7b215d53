"""A problem as a script and as a function, and how tests let programs answer it."""

import functools
import json
import random

from ragen2_trl.envs.deepcoder.environment import DeepCoder
from ragen2_trl.envs.deepcoder.program_tests import task_row
from ragen2_trl.envs.responses import format_response

DOUBLE = "print(2 * int(input()))"

# Doubling, of which the statement shows the first test.
TESTS = [("21\n", "42\n"), ("-4\n", "-8\n"), ("0\n", "0\n"), ("31337\n", "62674\n")]
SCRIPT = {"seed": 1, **task_row("Double a number. Input: 21 Output: 42", "", "", TESTS, 1, "")}
CALLS = [([21], 42), ([-4], -8), ([0], 0), ([31337], 62674)]
HIDDEN = {**SCRIPT, "tests": json.dumps(TESTS[3:]), "public": 0}  # one test, of which the statement says nothing
FUNCTION = {"seed": 2, **task_row("Double a number. double(21) = 42", "", "double", CALLS, 1, "")}


@functools.cache
def single():
    return DeepCoder(workers=2)


@functools.cache
def several():
    return DeepCoder(workers=2, multi_turn=True)


def answer(program):
    return format_response("A plan.", [program])


def play(env, row, *texts):
    begun = env.play(row, random.Random(0))
    return begun, [begun.respond(text) for text in texts]


def score(row, program):
    return play(single(), row, answer(program))[0].outcome.episode_return
