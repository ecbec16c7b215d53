"""SearchQA as RAGEN-2 plays it: its documents, its retrieval servers, its answers and what they earn."""

import random
import re
from collections.abc import Iterator, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from datasets import Dataset

from ragen2_trl.envs.episode import Limits
from ragen2_trl.envs.ragen2.protocol import RagenProtocol, first_rows
from ragen2_trl.envs.responses import plain_text
from ragen2_trl.envs.search_qa.environment import (
    COLUMNS,
    VERBS,
    SearchQA,
    SearchQAEpisode,
    check_hotpot_row,
    f1_credit,
)
from ragen2_trl.envs.search_qa.http_retrieval import MAX_TOP_K, HTTPRetriever, RetrievalError, score_of
from ragen2_trl.envs.search_qa.passages import MAX_QUERY_CHARS, Passage, name_of
from ragen2_trl.envs.search_qa.retrieval import Retriever, open_corpus
from ragen2_trl.envs.tasks import Row, check_columns

MAX_DOCUMENT_CHARS = 800
ACTIONS = "Available actions: search[<query>], finish[<answer>]"

# Where RAGEN looks for the answer in a text without an action, and how short the find may be; the first that holds.
# Each is linear in the text: what repeats cannot match what has to follow.
_PLACES = (
    (re.compile(r"\\boxed\{([^{}]*)\}"), 1),
    (re.compile(r"\*{1,2}([^*\n]+)\*"), 3),  # bold or italic
    (re.compile(r"\banswer is\b[:\s]*([^\n.]+)", re.IGNORECASE), 1),
    (re.compile(r"\b(?:therefore|thus|so|hence)\b[,:\s]*([^\n.]+)", re.IGNORECASE), 4),
    (re.compile(r"([^\n.!?]+)"), 6),  # a sentence
)
_REST = 100  # characters that stand for an answer where there is none of these


class RagenRetriever(HTTPRetriever):
    """A retrieval server that speaks the JSON of RAGEN's, which give at most `MAX_TOP_K` passages.

    For each query `POST {"query": q, "top_k": k}` is answered by `{"results": [{"id", "content", "score"}, ...]}`.
    Everything else is as with `HTTPRetriever`.
    """

    form = "{'results': [...]}"

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        k = min(k, MAX_TOP_K)
        cut = [query[:MAX_QUERY_CHARS] for query in queries]
        return [self.ask({"query": query, "top_k": k}, ragen_results)[:k] for query in cut]


def ragen_results(answer: Any) -> list[Passage]:
    """The passages in an answer in RAGEN's words; the first of several lines is the title."""
    return [_ragen_passage(hit["content"], hit.get("id"), hit.get("score")) for hit in answer["results"]]


def _ragen_passage(content: Any, name: Any, score: Any) -> Passage:
    if not isinstance(content, str):
        raise TypeError(f"content must be text, got {type(content).__name__}")
    title, line_break, text = content.partition("\n")
    return Passage(title if line_break else "", text if line_break else content, name_of(name), score_of(score))


def documents(passages: Sequence[Passage], max_chars: int) -> str:
    """RAGEN's results: each with its number, id and score above its text, which is cut, as is the whole.

    >>> print(documents([Passage("Osk", "A river.", "doc_7", 3.14159)], 100))
    [Document 1] (ID: doc_7, Score: 3.142)
    Osk
    A river.
    """
    blocks = [
        f"[Document {number}] (ID: {plain_text(passage.id[:100])}, Score: {passage.score:.3f})\n"
        f"{_cut(plain_text(passage.content[: 2 * MAX_DOCUMENT_CHARS], keep_lines=True), MAX_DOCUMENT_CHARS)}"
        for number, passage in enumerate(passages, start=1)
    ]
    return _cut("\n\n".join(blocks), max_chars) or "No relevant documents found for the query."


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def read_any_text(text: str) -> tuple[str, str]:
    """RAGEN's reading of an answer block: a search, or else a final answer, for which any text will do.

    >>> read_any_text("search[Mira Tavok]"), read_any_text("I think the answer is Rome.")
    (('search', 'Mira Tavok'), ('finish', 'Rome'))
    """
    text = text.strip()
    for verb in VERBS:
        if text.startswith(f"{verb}[") and text.endswith("]"):
            return verb, text[len(verb) + 1 : -1].strip()
    return "finish", final_answer(text)


def final_answer(text: str) -> str:
    r"""The answer that RAGEN takes out of a text without an action.

    In this order: what `\boxed{}` holds, bold or italic text, what follows "answer is", what follows therefore, thus,
    so or hence, the first sentence, the first characters.

    >>> final_answer(r"So **Rome** or \boxed{Paris}"), final_answer("Rome fell, thus Paris. It is known.")
    ('Paris', 'Paris')
    """
    for place, shortest in _PLACES:
        for match in place.finditer(text):
            if len(found := match.group(1).strip()) >= shortest:
                return found
    return text[:_REST].strip()


class RagenSearchQAEpisode(SearchQAEpisode):
    """One question; a search that fails is shown, and any text that is no search is an answer, paid by `f1_credit`."""

    def observation(self) -> str:
        if not self._queries:
            return f"Question: {plain_text(self.question)}\n{ACTIONS}"
        query = plain_text(self._queries[-1][:MAX_QUERY_CHARS])
        return f"Search results for '{query}':\n{self._found}\n\n{ACTIONS}"

    def parse(self, action: str) -> tuple[str, str] | None:
        return read_any_text(action) if action.strip() else None

    def judge(self, answer: str) -> tuple[float, bool]:
        credit = f1_credit(answer, self.answer)
        return credit, credit > 0

    def search(self, query: str) -> str:
        try:
            return documents(self._passages_for(query), self._max_chars)
        except RetrievalError as error:
            return error.shown


class RagenSearchQA(RagenProtocol, SearchQA):
    """SearchQA as RAGEN-2 plays it: success is an F1 of 0.3 or more, for whatever text the answer block holds.

    Args:
        **options: Those of `RagenProtocol`, and `corpus` of `SearchQA`; a URL is that of a server as `RagenRetriever`
            has it, tried once.
    """

    limits = Limits(turns=5, actions=1)
    max_total, turn_tokens = 10, 400
    fixed = MappingProxyType({"top_k": 5, "max_chars": 4000})

    def open(self, corpus: str) -> Retriever:
        return open_corpus(corpus, server=partial(RagenRetriever, retries=0))

    def load(self, data: str, split: str) -> Dataset:
        return first_rows(super().load(data, split))

    def numbered_tasks(self, seeds: Iterator[int], split: str, data: str | None) -> Iterator[dict[str, Any]]:
        """RAGEN-2's rows: the first ones of the training file by seed, for both splits."""
        rows = self.load(self.source(data, "hotpotqa/hotpot_qa"), "train")
        check_columns(rows, COLUMNS)
        for seed in seeds:
            source = rows[seed % len(rows)]
            check_hotpot_row(source)
            yield self._row(seed, source)

    def episode(self, row: Row, rng: random.Random) -> RagenSearchQAEpisode:
        return RagenSearchQAEpisode(row, self.retriever, self.max_turns - 1, self.top_k, self.max_chars)

    def texts(self) -> dict[str, str]:
        return {
            "instruction": "You answer questions as a search agent. search[query] looks for documents, and "
            "finish[answer] hands in your answer.\nReason first, step by step, within <think> and </think>, then act "
            "within <answer> and </answer>. Examples:\n"
            "  <think>I have to know who wrote the song first.</think><answer>search[writer of the song]</answer>\n"
            "  <think>The second document names the town.</think><answer>finish[Lisbon]</answer>\n",
            "length": "Use no more than 300 words.",
        }
