"""Which tests a problem's statement gives away: what it shows could be copied, and must earn nothing.

Statements come in HTML, LaTeX and Markdown, with input and output in either order, side by side or in sections of
their own. So they are compared without mark-up and punctuation, as words, and the doubtful counts as shown.
"""

import html
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

MAX_GAP = 60  # characters between two lines of an input, such as a label
MAX_DISTANCE = 400  # between an input and its output, such as "Sample Output 1" or an explanation
LONG = 16  # characters of an input that are in no statement by chance: its output may stand anywhere
_GIVEN, _ANSWERED = ("input", "given", "sample"), ("output", "answer", "result", "return")  # and where labels say so

_TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9-]{0,20}(?:\s{1,9}[\w:-]{1,40}\s?=[^<>]{0,500})?\s?/?>")  # not a <b and c> d
_COMMAND = re.compile(r"\\[A-Za-z]{1,30}")
_WORD = re.compile(r"(?:(?<![\w.])-)?[^\W_]+(?:[._][^\W_]+)*")
_PUNCTUATION = re.compile(r"[\s\[\]{}(),;:\"'`]|\.(?=\s|$)")  # of JSON and of sentences


class Statement:
    """The text of a problem, in the forms that tests are looked for in.

    Args:
        problem: The statement.
    """

    def __init__(self, problem: str):
        # "\\n" is a line break to some and the beginning of a command to others.
        readings = [problem, problem.replace("\\n", "\n")]
        self._words = [_words(_without_markup(reading)) for reading in dict.fromkeys(readings)]
        self._symbols = [_squeezed(_without_markup(reading)) for reading in dict.fromkeys(readings)]

    def shows(self, function: str, test: tuple[Any, Any]) -> bool:
        """Whether the statement holds the input of a test and, near it or for a long one anywhere, what it expects.

        >>> Statement("Double a number. It is <b>42</b> for $21$.").shows("", ("21\\n", "42\\n"))
        True
        >>> Statement("Double a number. Input: 21 Output: 42.").shows("", ("2\\n", "4\\n"))
        False
        """
        given, expected = test
        if not function:
            return self._has(given.splitlines(), expected.splitlines())
        return any(self._has([write(value) for value in given], [write(expected)]) for write in (json.dumps, repr))

    def _has(self, given: Sequence[str], expected: Sequence[str]) -> bool:
        if not (_is_words(given) and _is_words(expected)):  # a drawing: its characters as they are
            return all(self._holds(pieces) for pieces in (given, expected))
        pieces, answers = ([words for line in lines if (words := _words(line)).strip()] for lines in (given, expected))
        return any(_near(text, pieces, answers) for text in self._words)

    def _holds(self, lines: Sequence[str]) -> bool:
        if _is_words(lines):
            pieces = [words for line in lines if (words := _words(line)).strip()]
            return any(_spans(text, pieces) for text in self._words)
        return any(_squeezed("\n".join(lines)) in text for text in self._symbols)


def _without_markup(text: str) -> str:
    text = html.unescape(_TAG.sub(" ", text)).replace("\u2212", "-")
    return _COMMAND.sub(" ", text)


def _words(text: str) -> str:
    """Words and numbers in lower case, a space around each; punctuation is gone.

    >>> _words("a = [1, -2.5]")
    ' a 1 -2.5 '
    """
    return f" {' '.join(_WORD.findall(text))} ".lower()


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _is_words(lines: Sequence[str]) -> bool:
    return all(not _PUNCTUATION.sub("", _WORD.sub("", line)) for line in lines)


def _near(text: str, given: Sequence[str], expected: Sequence[str]) -> bool:
    inputs, outputs = _spans(text, given), _spans(text, expected)
    if not inputs or not outputs:  # nor is there an example without an input
        return False
    if sum(map(len, given)) >= LONG:
        return True
    starts, ends = ([span[side] for span in outputs] for side in (0, 1))
    for start, end in inputs:
        after, before = bisect_left(starts, end - 1), bisect_right(ends, start + 1) - 1
        if after < len(starts) and starts[after] <= end + MAX_DISTANCE:
            return True
        if before >= 0 and ends[before] >= start - MAX_DISTANCE:
            return True
    return _labelled(text, inputs, _GIVEN) and _labelled(text, outputs, _ANSWERED)


def _labelled(text: str, spans: Sequence[tuple[int, int]], labels: Sequence[str]) -> bool:
    before = (text[max(0, start - MAX_GAP) : start] for start, _ in spans)
    return any(label in words for words in before for label in labels)


def _spans(text: str, pieces: Sequence[str]) -> list[tuple[int, int]]:
    """Where all of the pieces stand in order, at most `MAX_GAP` apart."""
    found, start = [], -1
    while pieces and (start := text.find(pieces[0], start + 1)) >= 0:
        end = start + len(pieces[0])
        for piece in pieces[1:]:
            at = text.find(piece, end - 1, end + MAX_GAP + len(piece))
            if at < 0:
                break
            end = at + len(piece)
        else:
            found.append((start, end))
    return found
