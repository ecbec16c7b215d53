"""What an answer of SearchQA is worth, ours and by RAGEN-2, and which texts are actions."""

import re
import string
from collections import Counter

from ragen2_trl.envs.responses import bracketed

VERBS = ("search", "finish")
MIN_F1 = 0.3  # answers that share less with the right one earn nothing
MAX_PARTIAL = 0.9  # the right words in another order are not the right answer

# What parts one candidate from the next.
_PARTING = re.compile(r"[,;/|&\n]|\b(?:and|or)\b", re.IGNORECASE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_VERDICTS = ("yes", "no", "noanswer")


def normalize(answer: str) -> str:
    """SQuAD's and HotpotQA's normal form: lower case, no punctuation, no articles, single spaces.

    Where nothing would be left (the band "The The"), only case and white space change, so that "!" is not right.

    >>> normalize("The  Beatles!"), normalize("A")
    ('beatles', 'a')
    """
    lower = answer.lower()
    return " ".join(_ARTICLES.sub(" ", lower.translate(_PUNCTUATION)).split()) or " ".join(lower.split())


def exact_match(answer: str, right: str) -> bool:
    """Whether two answers have the same normal form."""
    return normalize(answer) == normalize(right)


def token_f1(answer: str, right: str) -> float:
    """HotpotQA's F1 of the words of two answers, 0.0 to 1.0; a yes or no matches nothing but itself."""
    given, wanted = normalize(answer), normalize(right)
    if given != wanted and (given in _VERDICTS or wanted in _VERDICTS):
        return 0.0
    given_words, wanted_words = given.split(), wanted.split()
    common = (Counter(given_words) & Counter(wanted_words)).total()
    return 2 * common / (len(given_words) + len(wanted_words)) if common else 0.0


def partial_credit(answer: str, right: str) -> float:
    """What an answer that is not the right one earns: `token_f1` from `MIN_F1` to `MAX_PARTIAL`, or 0.0 for a hedge.

    A hedge has more words than the right answer, so that two candidates side by side are one, or parts its words by a
    comma, a semicolon, a slash, a bar, a line break, "and", "or" or "&" where the right answer has none of these.
    Naming several candidates never pays, while "New York" is a part of "New York City".

    >>> partial_credit("New York", "New York City"), partial_credit("Paris or Rome", "Paris")
    (0.8, 0.0)
    >>> partial_credit("York New City", "New York City")
    0.9
    """
    has_more_words = len(normalize(answer).split()) > len(normalize(right).split())
    if has_more_words or (_PARTING.search(answer) and not _PARTING.search(right)):
        return 0.0
    f1 = min(token_f1(answer, right), MAX_PARTIAL)
    return f1 if f1 >= MIN_F1 else 0.0


def f1_credit(answer: str, right: str) -> float:
    """What RAGEN-2 pays for an answer: 1.0 for the right one, else `token_f1` from `MIN_F1` on, hedges included.

    >>> f1_credit("the Beatles!", "Beatles"), f1_credit("Paris or Rome", "Paris"), f1_credit("yes, it is", "yes")
    (1.0, 0.5, 0.0)
    """
    f1 = 1.0 if exact_match(answer, right) else token_f1(answer, right)
    return f1 if f1 >= MIN_F1 else 0.0


def parse_action(action: str) -> tuple[str, str] | None:
    """The verb and the argument of `search[…]` or `finish[…]`; `None` for any other text.

    >>> parse_action("Search[ Mira Tavok ]"), parse_action("Paris")
    (('search', 'Mira Tavok'), None)
    """
    verb, argument = bracketed(action)
    return (verb, argument) if verb in VERBS and argument else None
