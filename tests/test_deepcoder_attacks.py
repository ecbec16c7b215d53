"""Attacks on DeepCoder's rewards. Without bubblewrap they fail."""

import json
import random

import pytest
from deepcoder_programs import CALLS, FUNCTION, HIDDEN, SCRIPT, answer, play, score, several, single
from growth import growth
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen2_trl.envs.deepcoder.environment import program_of

pytestmark = pytest.mark.needs("bubblewrap")

ATTACKS = {
    "leave with success": "import sys\nsys.exit(0)",
    "leave at once": "import os\nos._exit(0)",
    "patch the checker": """
import builtins, json, sys
class Equal(str):
    def __eq__(self, other): return True
    def __hash__(self): return 0
json.dumps = json.dump = lambda *given, **named: None
builtins.str = Equal
for name in list(sys.modules):
    if "ragen" in name or "sandbox" in name:
        sys.modules[name].same_output = lambda *given: True
print(Equal("?"))
""",
    "print the numbers of all verdicts": "print('passed')\nprint('True')\nprint('1.0')",
    "write many answers": "print('\\n'.join(map(str, range(-10, 70_000))))",
}
CALL_ATTACKS = {
    "equal to anything": """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def double(x): return Equal(7)
""",
    "write to the answer": """
import os, sys
for number in range(3, 20):
    try: os.write(number, b"62674")
    except OSError: pass
def double(x): sys.exit(0)
""",
    "patch json": """
import json
json.dump = lambda value, stream: stream.write("true")
def double(x): return None
""",
}
HIDDEN_CALL = {**FUNCTION, "tests": json.dumps([([1000], 2000), *CALLS[3:]]), "public": 0}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_of_a_script_earns_anything(attack):
    assert score(HIDDEN, ATTACKS[attack]) == 0.0


@pytest.mark.parametrize("attack", CALL_ATTACKS)
def test_no_attack_of_a_function_earns_more_than_a_guess(attack):
    guess = 0.5 if attack == "write to the answer" else 0.0  # whoever guesses one result has that one
    assert score(HIDDEN_CALL, CALL_ATTACKS[attack]) <= guess


def test_the_public_examples_by_heart_earn_nothing():
    begun, (message,) = play(several(), SCRIPT, answer("print({'21': '42'}.get(input(), ''))"))
    assert message.splitlines()[:2] == ["Reward 0. Turn 2 of 3.", "Your program passes 0 of 3 hidden tests."]
    assert begun.outcome.episode_return == 0.0 and not begun.outcome.success
    assert score(FUNCTION, "def double(x):\n    return {21: 42}.get(x)") == 0.0


def test_a_program_leaves_nothing_for_the_next_one():
    keep = "open('/tmp/kept', 'w').write(input())\nprint('?')"
    assert score(SCRIPT, keep) == 0.0
    assert score(SCRIPT, "import os\nprint(42 if os.path.exists('/tmp/kept') else '?')") == 0.0


@settings(max_examples=8)
@given(program=st.text(min_size=1) | st.sampled_from(["\0", "\ud800", "(" * 5000, "input(" * 300, "#" * 50_000]))
def test_no_text_raises_or_earns_a_reward_without_a_right_answer(program):
    begun, _ = play(single(), HIDDEN, answer(program))
    assert begun.outcome.episode_return in (0.0, -0.1) and not begun.outcome.success


@settings(max_examples=200)
@given(st.text() | st.text(alphabet="`\npy thon|<>answer/", max_size=300))
def test_any_text_is_read_or_refused_without_an_exception(text):
    assert single().play(SCRIPT, random.Random(0)).episode.is_action(text) == bool(program_of(text))


@pytest.mark.parametrize("piece", ["`", "```", "```python\n", "\n", "x", " ```\n", "<", "\ud800"])
def test_hostile_text_is_read_in_linear_time(piece):
    episode = single().play(SCRIPT, random.Random(0)).episode
    assert growth(episode.is_action, lambda size: piece * (size // len(piece)), 100_000) < 24  # 64 were its square
