"""SearchQA's small worlds: invented people, towns and rivers, and a question about them as a row of HotpotQA."""

import random
from typing import Any

_ONSETS = ("b", "br", "d", "dr", "f", "g", "k", "kr", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u")
_ENDS = ("k", "l", "m", "n", "r", "s", "sk", "th")
_TRADES = ("baker", "dentist", "farmer", "judge", "miller", "painter", "pilot", "singer")

# What the passages of a made-up world say of one name, and the name that leads on.
_FACTS: dict[str, str] = {
    "firm": "{firm} is a firm that was founded by {person}.",
    "person": "{person} is a {trade} who was born in {town}.",
    "town": "{town} is a town in {country} on the river {river}.",
    "river": "{river} is a river that flows into the sea {sea}.",
}
# A question, the two names whose passages answer it, and the answer.
_QUESTIONS = (
    ("In which town was the founder of {firm} born?", ("firm", "person"), "town"),
    ("In which country is the town where {person} was born?", ("person", "town"), "country"),
    ("On which river is the town where {person} was born?", ("person", "town"), "river"),
    ("Into which sea flows the river of {town}?", ("town", "river"), "sea"),
)
_KINDS = ("firm", "person", "town", "country", "river", "sea")
_CHAINS = 3  # of one name of each kind; all but one mislead


def make_world(seed: int) -> dict[str, Any]:
    """A question about a world of invented names, as a row of HotpotQA: four passages for each of three chains."""
    rng = random.Random(seed)
    names = _names(len(_KINDS) * _CHAINS, rng)
    chains = [{"trade": rng.choice(_TRADES), **{kind: names.pop() for kind in _KINDS}} for _ in range(_CHAINS)]
    passages = [(chain[kind], fact.format(**chain)) for chain in chains for kind, fact in _FACTS.items()]
    rng.shuffle(passages)
    question, hops, answer = rng.choice(_QUESTIONS)
    asked = rng.choice(chains)
    return {
        "id": str(seed),
        "question": question.format(**asked),
        "answer": asked[answer],
        "type": "bridge",
        "level": "easy",
        "supporting_facts": {"title": [asked[kind] for kind in hops], "sent_id": [0, 0]},
        "context": {"title": [title for title, _ in passages], "sentences": [[text] for _, text in passages]},
    }


def _names(count: int, rng: random.Random) -> list[str]:
    """Names that can be spoken, no two alike."""
    names: dict[str, None] = {}
    while len(names) < count:
        syllables = (_ONSETS, _VOWELS, _ONSETS, _VOWELS, _ENDS)
        names["".join(rng.choice(syllable) for syllable in syllables).capitalize()] = None
    return list(names)
