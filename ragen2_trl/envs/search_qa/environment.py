"""SearchQA: answer a question whose two facts stand in different passages, with a search tool.

HotpotQA's questions, or small worlds of invented people, towns and rivers in the same schema, whose answers nobody can
know without a search. In single-turn play there is no search: a closed book.
"""

import random
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from datasets import Dataset

from ragen2_trl.envs.checks import check_count, check_installed
from ragen2_trl.envs.environment import Environment
from ragen2_trl.envs.episode import Episode, Limits
from ragen2_trl.envs.responses import bracketed, plain_text
from ragen2_trl.envs.search_qa.http_retrieval import HTTPRetriever
from ragen2_trl.envs.search_qa.passages import Passage, passage_of
from ragen2_trl.envs.search_qa.retrieval import BM25Retriever, Retriever, open_corpus
from ragen2_trl.envs.tasks import Row, held_out, load_tasks, shuffled
from ragen2_trl.envs.tools import ToolEnvironment

COLUMNS = ("question", "answer", "context", "supporting_facts")
SERVER_WORKERS = 16  # searches that wait for a server at the same time

VERBS = ("search", "finish")
MIN_F1 = 0.3  # answers that share less with the right one earn nothing
MAX_PARTIAL = 0.9  # the right words in another order are not the right answer

# What parts one candidate from the next.
_PARTING = re.compile(r"[,;/|&\n]|\b(?:and|or)\b", re.IGNORECASE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_VERDICTS = ("yes", "no", "noanswer")


# What an answer is worth, ours and by RAGEN-2, and which texts are actions


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


# Rules and tasks


@lru_cache(maxsize=1024)  # the members of a group search the same passages
def context_index(passages: tuple[Passage, ...]) -> BM25Retriever:
    """An index of the few passages of one task."""
    return BM25Retriever.build(passages)


def numbered(passages: Sequence[Passage], max_chars: int) -> str:
    """A line for each passage, the best first, cut at `max_chars` characters.

    >>> numbered([Passage("Osk", "A river.")], 100)
    '[1] Osk: A river.'
    """
    lines = [
        # Cut before it is cleaned: a server's passage may have megabytes.
        f"[{number}] {plain_text(passage.title[:max_chars])}: {plain_text(passage.text[:max_chars])}"
        for number, passage in enumerate(passages, start=1)
    ]
    return "\n".join(lines)[:max_chars] or "No passages found."


class SearchQAEpisode(Episode):
    """One question.

    Args:
        row: The task's.
        retriever: What to search; `None` for the task's own passages.
        searches: How many searches the turns leave room for before the answer; 0 for a closed book.
        top_k: Passages that a search gives.
        max_chars: Characters of these passages in all.
    """

    def __init__(self, row: Row, retriever: Retriever | None, searches: int, top_k: int = 5, max_chars: int = 4000):
        self.question: str = row["question"]
        self.answer: str = row["answer"]
        self._given: str | None = None  # the answer
        self._evidence = [passage_of(passage) for passage in row["evidence"]][:searches]
        self._passages = tuple(passage_of(passage) for passage in row.get("passages", ()))
        self._retriever = retriever
        self._closed_book = searches == 0
        self._top_k = top_k
        self._max_chars = max_chars
        self._queries: list[str] = []
        self._found = ""
        if searches and retriever is None and not self._passages:
            raise ValueError("column 'passages' must hold passages if there is no corpus to search, got none")

    def observation(self) -> str:
        question = f"Question: {plain_text(self.question)}"
        return f"{question}\n{self._found}" if self._found else question

    def is_action(self, action: str) -> bool:
        # RAGEN takes any other text for the final answer. It is none here: an answer that counts is meant as one, and
        # a slip in the form does not end the episode.
        parsed = self.parse(action)
        return parsed is not None and not (self._closed_book and parsed[0] == "search")

    def parse(self, action: str) -> tuple[str, str] | None:
        """The verb and its argument, `None` for a text that is no action."""
        return parse_action(action)

    def step(self, action: str) -> float:
        """Searches, for nothing, or answers, for what `judge` gives."""
        parsed = self.parse(action)
        if parsed is None:
            raise ValueError(f"action must be search[...] or finish[...], got {action[:100]!r}")
        verb, argument = parsed
        if verb == "search":
            self._queries.append(argument)
            self._found = self.search(argument)
            return 0.0
        self.done, self._given = True, argument
        credit, self.success = self.judge(argument)
        return credit

    def judge(self, answer: str) -> tuple[float, bool]:
        """What an answer earns, 1.0 for an exact match, else `partial_credit`; and whether it is a success."""
        right = exact_match(answer, self.answer)
        return (1.0 if right else partial_credit(answer, self.answer)), right

    @property
    def measures(self) -> dict[str, float]:
        """Success by either judge: the right answer, and RAGEN-2's, an F1 of `MIN_F1` or more."""
        given = self._given
        return {
            "exact_match": float(given is not None and exact_match(given, self.answer)),
            "f1_success": float(given is not None and f1_credit(given, self.answer) > 0),
        }

    def search(self, query: str) -> str:
        """What a search shows.

        Raises:
            RetrievalError: If a server that should answer does not.
        """
        return numbered(self._passages_for(query), self._max_chars)

    def _passages_for(self, query: str) -> list[Passage]:
        retriever = self._retriever or context_index(self._passages)
        (passages,) = retriever.search([query], self._top_k)
        return passages

    def plan(self, rng: random.Random) -> tuple[str, list[str]]:
        """Searches for the title of each passage that the question needs, reads what it says of it, then answers."""
        read = [passage for passage in self._evidence if passage.title in self._queries]
        left = [passage for passage in self._evidence if passage.title not in self._queries]
        known = f"{read[-1].text} " if read else ""
        goal = f"I search for {left[0].title}." if left else f"So the answer is {self.answer}."
        return known + goal, [*(f"search[{passage.title}]" for passage in left), f"finish[{self.answer}]"]

    def random_action(self, rng: random.Random) -> str:
        """Searches for, or answers with, the title of a passage; without passages, a word of the question."""
        names = [passage.title for passage in self._passages] or self.question.split()
        verb = "finish" if self._closed_book else rng.choice(VERBS)
        return f"{verb}[{rng.choice(names)}]"


class SearchQATools(ToolEnvironment):
    """SearchQA's tools."""

    def search(self, query: str) -> str:
        """
        Searches for passages.

        Args:
            query: Words to look for, such as a name.

        Returns:
            The passages that match best.
        """
        return self._take([f"search[{query}]"])

    def finish(self, answer: str) -> str:
        """
        Answers the question and ends the episode.

        Args:
            answer: The answer, as short as it can be.

        Returns:
            The reward of the answer.
        """
        return self._take([f"finish[{answer}]"])


class SearchQA(Environment):
    """Answer a question that needs two passages: 1.0 for the right answer, its words' F1 for part of it.

    Part of it is one answer of at most as many words (see `partial_credit`). RAGEN pays the F1 of any text, and so for
    naming every candidate.

    Tasks are generated, or come from `hotpotqa/hotpot_qa` (configuration `distractor`) or a local file in its schema,
    which is split by the questions' hash.

    Args:
        corpus: What to search: `None` for the passages that come with each question, a file of passages, an index
            folder or the URL of a retrieval server (see `open_corpus`), or a `Retriever`.
        top_k: Passages that a search gives, 1 to 100.
        max_chars: Characters of these passages in all, 100 to 100,000.
        **limits: `multi_turn`, `max_turns`, `max_actions` and `protocol` of `Environment`. With one turn there is no
            search.

    Raises:
        ImportError: If the extra is missing that searches a question's passages, or a corpus that is no server.
        ValueError: If an option is outside its range.
    """

    name = "search_qa"
    returns = (0.0, 1.0)
    single_turn_limits = Limits(turns=1, actions=1)
    multi_turn_limits = Limits(turns=5, actions=1)
    example = "search[words]"
    splits_answers = False
    tools = SearchQATools

    def __init__(self, corpus: str | Retriever | None = None, top_k: int = 5, max_chars: int = 4000, **limits: Any):
        super().__init__(**limits)
        check_count("top_k", top_k, 1, 100)
        check_count("max_chars", max_chars, 100, 100_000)
        if corpus is not None and not (isinstance(corpus, str) or callable(getattr(corpus, "search", None))):
            raise ValueError(f"corpus must be a path, an address, a Retriever or None, got {corpus!r}")
        self.retriever = self.open(corpus) if isinstance(corpus, str) else corpus
        self.top_k = top_k
        self.max_chars = max_chars
        if self.retriever is None and self.max_turns > 1:
            check_installed(self.name, "bm25s")
        if isinstance(self.retriever, HTTPRetriever):
            self.workers = SERVER_WORKERS
        if self.max_turns == 1:
            self.example = "finish[answer]"  # a closed book has nothing to search

    def open(self, corpus: str) -> Retriever:
        """The search engine of a corpus; `open_corpus` says which there are."""
        return open_corpus(corpus)

    def instructions(self) -> str:
        finish = "finish[answer] ends with your answer. The right one earns 1, a part of it less, several 0."
        if self.max_turns == 1:
            return f"Answer the question. Action: {finish}"
        return f"Answer the question. Actions: search[words] shows passages; {finish} No answer earns nothing."

    def tasks(self, seed: int, split: str, data: str | None) -> Iterator[dict[str, Any]]:
        stream = random.Random(f"{self.name}/{split}/{seed}")
        numbered = generated(stream) if data is None else shuffled(self.load(data, split), COLUMNS, stream)
        # The Hub has splits; a single file and the generator have none.
        hashed = data is None or Path(data).is_file()
        for number, source in numbered:
            check_hotpot_row(source)
            if not hashed or held_out(source["question"]) == (split == "test"):
                yield self._row(number, source)

    def load(self, data: str, split: str) -> Dataset:
        """Rows of HotpotQA's schema. The Hub's test split has no answers: its validation split stands for it."""
        return load_tasks(data, "train" if split == "train" else "validation", config="distractor")

    def _row(self, seed: int, source: Row) -> dict[str, Any]:
        """A task from a row in HotpotQA's schema."""
        context = source["context"]
        row = {
            "seed": seed,
            "question": source["question"],
            "answer": source["answer"],
            "evidence": evidence(source),
        }
        if self.retriever is None and self.max_turns > 1:
            row["passages"] = [
                {"title": title, "text": " ".join(sentence.strip() for sentence in sentences)}
                for title, sentences in zip(context["title"], context["sentences"], strict=True)
            ]
        return row

    def episode(self, row: Row, rng: random.Random) -> SearchQAEpisode:
        return SearchQAEpisode(row, self.retriever, self.max_turns - 1, self.top_k, self.max_chars)


def generated(rng: random.Random) -> Iterator[tuple[int, dict[str, Any]]]:
    """Worlds without end, with their seeds."""
    while True:
        seed = rng.getrandbits(31)
        yield seed, make_world(seed)


def check_hotpot_row(row: Row) -> None:
    """Raises a `ValueError` that names the column unless the row has HotpotQA's schema."""
    for column in ("question", "answer"):
        if not isinstance(row.get(column), str) or not row[column].strip():
            raise ValueError(f"column {column!r} must be a non-empty text, got {row.get(column)!r}")
    for column, keys in {"context": ("title", "sentences"), "supporting_facts": ("title", "sent_id")}.items():
        value = row.get(column)
        lists = [value.get(key) for key in keys] if isinstance(value, Mapping) else [None]
        if not all(isinstance(items, list) and len(items) == len(lists[0] or ()) for items in lists):
            raise ValueError(f"column {column!r} must hold lists {list(keys)} of one length, got {str(value)[:200]}")
    if not row["context"]["title"]:
        raise ValueError("column 'context' must hold passages, got none")


def evidence(row: Row) -> list[dict[str, str]]:
    """The sentences that the answer rests on, by passage; those first whose title stands in the question."""
    sentences = dict(zip(row["context"]["title"], row["context"]["sentences"], strict=True))
    texts: dict[str, str] = {}
    for title, number in zip(row["supporting_facts"]["title"], row["supporting_facts"]["sent_id"], strict=True):
        if number < len(sentences.get(title, ())):  # a few of HotpotQA's numbers are too large
            texts[title] = f"{texts.get(title, '')} {sentences[title][number].strip()}".strip()
    titles = sorted(texts, key=lambda title: title not in row["question"])
    return [{"title": title.strip(), "text": texts[title]} for title in titles if title.strip()]


# Small worlds: invented people, towns and rivers, and a question about them as a row of HotpotQA

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
