"""The attacks of `tests/attacks/` and other texts, tried through DeepCoder's reward. Without bubblewrap they fail.

What succeeds prints the right answer and earns the reward, so that none may earn anything.
"""

import json
import logging
import platform
from pathlib import Path

import pytest
import yaml
from deepcoder_programs import FUNCTION, HIDDEN, SCRIPT, TESTS, answer, play, score, several, single
from hypothesis import given, settings
from hypothesis import strategies as st
from sandboxes import leftovers_fixture as leftovers_fixture

from ragen2_trl.envs.deepcoder.environment import DeepCoder

TWICE = {**SCRIPT, "tests": json.dumps(TESTS[2:]), "public": 0}  # what the first run leaves, the second finds


FOLDER = Path(__file__).parent / "attacks"


SEEN_AS_REFUSED = (1, 38, 95)  # EPERM, ENOSYS, EOPNOTSUPP


WHOLE = """
import ctypes, glob, mmap, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result == -1: raise OSError(ctypes.get_errno(), "refused")
def answered(number, *arguments):
    if libc.syscall(number, *map(ctypes.c_long, arguments)) == -1 and ctypes.get_errno() in {refused}:
        raise OSError(ctypes.get_errno(), "refused")
number = int(input())
worked = True
try:
    exec({body!r})
except (Exception, SystemExit):
    worked = False
print(2 * number if worked else "nothing")
"""


# What makes a sample of all kinds of attacks: the fast tests try these.
SAMPLE = (
    "fill a file's attributes on tmpfs",
    "make thousands of empty files",
    "clear its parent's death signal and leave the session",
    "interrupt the first process as a terminal would",
    "end itself as the kernel would, so that it counts as somebody else's fault",
    "leave with the status that a shell gives to what was killed, so that it is tried again and again",
    "leave a time stamp for the next run on a device, which is the machine's own",
    "change the settings of its own network",
    "hold the kernel in the middle of a page fault",
    "make system calls where no filter looks",
    "change the limits of the namespace's first process",
    "report a success of its own",
    "find the expected output among all objects and frames",
    "find the expected output in its descriptors",
    "take twice its memory at once",
)


def body(attack):
    """The statements of an attack; of a system call, by its number on this machine, if it has one."""
    if "call" not in attack:
        return attack["program"]
    number = attack.get(platform.machine())
    return number and f"answered({number}, {', '.join(map(str, attack.get('arguments', [0] * 6)))})"


def whole(statements):
    return WHOLE.format(refused=SEEN_AS_REFUSED, body=statements)


def attacks():
    found = [attack for path in sorted(FOLDER.glob("*.yaml")) for attack in yaml.safe_load(path.read_text())]
    return [attack for attack in found if body(attack)]


def cases():
    for attack in attacks():
        marks = [] if attack["tries"] in SAMPLE else [pytest.mark.slow]
        yield pytest.param(attack, id=f"{attack.get('call', 'program')}: {attack['tries']}", marks=marks)


@pytest.fixture(scope="module", name="env")
def env_fixture():
    return DeepCoder(workers=2, test_seconds=1, program_seconds=1)


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize("attack", cases())
def test_no_attack_earns_a_reward_or_leaves_anybody_behind(env, attack, leftovers, caplog):
    with caplog.at_level(logging.INFO):
        begun, _ = play(env, TWICE, answer(whole(body(attack))))
    assert begun.outcome.episode_return == 0.0 and not begun.outcome.success
    assert leftovers() == 0
    assert [record.message for record in caplog.records if "sandbox" in record.name] == []  # nor looks like a shortage


@pytest.mark.needs("bubblewrap")
def test_an_attack_that_succeeded_would_earn_the_reward(env):
    for statements in ("pass", "check(0)", "answered(39 if os.uname().machine == 'x86_64' else 172)"):  # getpid
        assert play(env, TWICE, answer(whole(statements)))[0].outcome.episode_return == 1.0
    for statements in ("raise OSError", "check(-1)"):
        assert play(env, TWICE, answer(whole(statements)))[0].outcome.episode_return == 0.0


def test_the_list_has_more_than_150_different_attacks():
    found = attacks()
    assert len({json.dumps([attack.get("call"), body(attack)]) for attack in found}) == len(found) > 150
    assert all(attack["tries"] for attack in found)
    assert set(SAMPLE) <= {attack["tries"] for attack in found}


@pytest.mark.needs("bubblewrap")
def test_the_public_examples_by_heart_earn_nothing():
    begun, (message,) = play(several(), SCRIPT, answer("print({'21': '42'}.get(input(), ''))"))
    assert message.splitlines()[:2] == ["Reward 0. Turn 2 of 3.", "Your program passes 0 of 3 hidden tests."]
    assert begun.outcome.episode_return == 0.0 and not begun.outcome.success
    assert score(FUNCTION, "def double(x):\n    return {21: 42}.get(x)") == 0.0


@pytest.mark.needs("bubblewrap")
@settings(max_examples=8)
@given(program=st.text(min_size=1) | st.sampled_from(["\0", "\ud800", "(" * 5000, "input(" * 300, "#" * 50_000]))
def test_no_text_raises_or_earns_a_reward_without_a_right_answer(program):
    begun, _ = play(single(), HIDDEN, answer(program))
    assert begun.outcome.episode_return in (0.0, -0.1) and not begun.outcome.success
