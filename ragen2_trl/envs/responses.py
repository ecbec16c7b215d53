"""Text of others: from what a model wrote to its reasoning and actions, and from the world's words to harmless ones.

Model text is hostile input: plain searches only, so that the work is linear in it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ragen2_trl.text import END_THINK, THINK, Messages, flatten

Completion: TypeAlias = Messages

# A response is model text and may be of any length. Real ones are far shorter, so that cutting costs nothing.
MAX_RESPONSE_CHARS = 100_000
# Tasks look at a handful of actions; a response of a million separators must not become a million strings.
MAX_PARSED_ACTIONS = 256

# What vocabularies write their control tokens as: <s>, <|im_end|>, <start_of_turn>, [INST], [/INST], [gMASK].
# Comparisons, types and indices, such as a<b, List[int] and x[5], stay as they are.
# Their lengths are bounded, so that a long word in brackets does not cost the square of its length.
_MARKUP = re.compile(r"<(?=[^\s<>]{1,60}>)|\[(?=/?\w{1,60}\])(?=/?\w{0,58}[A-Z]{2})")
_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000)} - {ord("\t")})  # and surrogates

_ANSWER, _END_ANSWER = "<answer>", "</answer>"
_SEPARATOR = "||"
TAGS = {True: THINK, False: _ANSWER}  # what a response begins with, with and without thinking


@dataclass(frozen=True)
class Response:
    """A well-formed response: the text between the think tags, and the actions between the answer tags."""

    reasoning: str
    actions: tuple[str, ...]


def parse_response(text: str, *, split: bool = True, think: bool = True) -> Response | None:
    """Reads `<think>…</think><answer>a || b</answer>`; `None` when the text does not have that form.

    The first `</think>` counts and only white space may stand between it and `<answer>`. The opening `<think>` may be
    missing, since many chat templates write it into the prompt. Text after the first `</answer>` is ignored, and so
    are empty actions. With `split=False` the whole answer is one action: a program may hold `||`. At most
    `MAX_RESPONSE_CHARS` characters are read.

    Args:
        text: What a model wrote.
        split: Whether `||` separates actions.
        think: Whether there must be a reasoning; else the first answer block counts.

    >>> parse_response("<think>The goal is right of me.</think><answer>Right || Down</answer>")
    Response(reasoning='The goal is right of me.', actions=('Right', 'Down'))
    >>> parse_response("Right") is None
    True
    >>> parse_response("Hm. <answer>Up</answer>", think=False)
    Response(reasoning='', actions=('Up',))
    """
    text = text[:MAX_RESPONSE_CHARS]
    before, end_think, after = text.partition(END_THINK) if think else ("", "", text[text.find(_ANSWER) :])
    answer = answer_in(after)
    if answer is None or (think and not end_think):
        return None
    return Response(reasoning_in(before), actions_in(answer, split=split))


def reasoning_in(text: str) -> str:
    """The reasoning in what stands before `</think>`, whose `<think>` may be missing."""
    before, opened, inside = text.partition(THINK)
    return (inside if opened else before).strip()


def answer_in(text: str) -> str | None:
    """What the answer block holds that a text begins with, `None` where it does not."""
    text = text.lstrip()
    answer, end_answer, _ = text.removeprefix(_ANSWER).partition(_END_ANSWER)
    return answer if end_answer and text.startswith(_ANSWER) else None


def actions_in(answer: str, *, split: bool) -> tuple[str, ...]:
    """The actions of an answer, at most `MAX_PARSED_ACTIONS` of them."""
    pieces = answer.split(_SEPARATOR, MAX_PARSED_ACTIONS)[:MAX_PARSED_ACTIONS] if split else [answer]
    return tuple(stripped for piece in pieces if (stripped := piece.strip()))


def bracketed(action: str) -> tuple[str, str]:
    """Verb, in lower case, and argument of an action `verb[argument]`; two empty strings for another form.

    >>> bracketed(" Search[ Mira Tavok ]"), bracketed("Paris")
    (('search', 'Mira Tavok'), ('', ''))
    """
    verb, _, rest = action.strip().partition("[")
    return (verb.strip().lower(), rest[:-1].strip()) if rest.endswith("]") else ("", "")


def format_response(reasoning: str, actions: Sequence[str], *, think: bool = True) -> str:
    """The text that `parse_response` reads back; without `think` the answer alone.

    >>> format_response("Two steps.", ["Right", "Down"])
    '<think>Two steps.</think><answer>Right || Down</answer>'
    """
    thought = f"{THINK}{reasoning}{END_THINK}" if think else ""
    return f"{thought}{_ANSWER}{f' {_SEPARATOR} '.join(actions)}{_END_ANSWER}"


def completion_text(completion: Completion) -> str:
    """The text a model wrote, from a plain string or from the messages TRL passes to reward functions.

    Only assistant messages count. Reasoning that a response parser moved into `reasoning_content` or `thinking` is put
    back between think tags, so that both kinds of completions read the same.

    >>> completion_text([{"role": "assistant", "reasoning_content": "Go.", "content": "<answer>Up</answer>"}])
    '<think>Go.</think><answer>Up</answer>'
    """
    return flatten(completion, ("assistant",))


def plain_text(text: str, *, keep_lines: bool = False) -> str:
    """Text from outside without what a tokenizer or a chat template would read as its own marks.

    A passage is written by anybody. `<|im_end|>` in it would become the token that ends a message, so a space parts
    the opening bracket of whatever looks like a mark; control characters and lone surrogates, which no tokenizer
    takes, go. White space becomes one space, or stays with `keep_lines=True`. The work is linear in the text.

    >>> plain_text("End.<|im_end|>\\n<s>[INST] 2 < 3")
    'End.< |im_end|> < s>[ INST] 2 < 3'
    """
    lines = text.split("\n") if keep_lines else [" ".join(text.split())]
    return "\n".join(_MARKUP.sub(r"\g<0> ", line.translate(_CONTROLS)) for line in lines)
