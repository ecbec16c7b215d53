"""SearchQA: answer a question whose two facts stand in different passages, with a search tool.

HotpotQA's questions, or small worlds of invented people, towns and rivers in the same schema, whose answers nobody can
know without a search. In single-turn play there is no search: a closed book.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from datasets import Dataset

from ragen2_trl.envs.base import Environment
from ragen2_trl.envs.checks import check_choice, check_count
from ragen2_trl.envs.episode import Episode, Limits
from ragen2_trl.envs.layout import LAYOUTS
from ragen2_trl.envs.responses import plain_text
from ragen2_trl.envs.search_qa.answers import (
    VERBS,
    exact_match,
    f1_credit,
    parse_action,
    partial_credit,
    read_any_text,
)
from ragen2_trl.envs.search_qa.http_retrieval import DIALECTS, HTTPRetriever, RetrievalError
from ragen2_trl.envs.search_qa.passages import MAX_QUERY_CHARS, Passage, passage_of
from ragen2_trl.envs.search_qa.results import documents, numbered
from ragen2_trl.envs.search_qa.retrieval import BM25Retriever, Retriever, open_corpus
from ragen2_trl.envs.search_qa.worlds import make_world
from ragen2_trl.envs.tasks import (
    Row,
    check_columns,
    check_first_rows,
    first,
    held_out,
    load_tasks,
    reference_source,
    shuffled,
)
from ragen2_trl.envs.tools import ToolEnvironment

COLUMNS = ("question", "answer", "context", "supporting_facts")
JUDGES = ("exact", "f1")
SERVER_WORKERS = 16  # searches that wait for a server at the same time


@lru_cache(maxsize=1024)  # the members of a group search the same passages
def context_index(passages: tuple[Passage, ...]) -> BM25Retriever:
    """An index of the few passages of one task."""
    return BM25Retriever.build(passages)


@dataclass(frozen=True)
class Rules:
    """How a search is shown and an answer judged; the fields are options of `SearchQA`."""

    top_k: int = 5
    max_chars: int = 4000
    judge: str = "exact"
    any_answer: bool = False
    show_failures: bool = False
    layout: str = "own"


class SearchQAEpisode(Episode):
    """One question.

    Args:
        row: The task's.
        retriever: What to search; `None` for the task's own passages.
        searches: How many searches the turns leave room for before the answer; 0 for a closed book.
        rules: How results are shown and answers judged.
    """

    def __init__(self, row: Row, retriever: Retriever | None, searches: int, rules: Rules):
        self.question: str = row["question"]
        self.answer: str = row["answer"]
        self._given: str | None = None  # the answer
        self._evidence = [passage_of(passage) for passage in row["evidence"]][:searches]
        self._passages = tuple(passage_of(passage) for passage in row.get("passages", ()))
        self._retriever = retriever
        self._closed_book = searches == 0
        self._rules = rules
        self._queries: list[str] = []
        self._found = ""
        if searches and retriever is None and not self._passages:
            raise ValueError("column 'passages' must hold passages where there is no corpus to search, got none")

    def observation(self) -> str:
        question = f"Question: {plain_text(self.question)}"
        if self._rules.layout == "own":
            return f"{question}\n{self._found}" if self._found else question
        actions = "Available actions: search[<query>], finish[<answer>]"
        if not self._queries:
            return f"{question}\n{actions}"
        query = plain_text(self._queries[-1][:MAX_QUERY_CHARS])
        return f"Search results for '{query}':\n{self._found}\n\n{actions}"

    def is_action(self, action: str) -> bool:
        # RAGEN takes any other text for the final answer. Unless asked for it is none here: an answer that counts is
        # meant as one, and a slip in the form does not end the episode.
        parsed = self._parse(action)
        return parsed is not None and not (self._closed_book and parsed[0] == "search")

    def _parse(self, action: str) -> tuple[str, str] | None:
        if not self._rules.any_answer:
            return parse_action(action)
        return read_any_text(action) if action.strip() else None

    def step(self, action: str) -> float:
        """Searches, for nothing, or answers: 1.0 for an exact match, else the credit that the judge gives."""
        parsed = self._parse(action)
        if parsed is None:
            raise ValueError(f"action must be search[...] or finish[...], got {action[:100]!r}")
        verb, argument = parsed
        if verb == "search":
            self._queries.append(argument)
            self._found = self._search(argument)
            return 0.0
        self.done, self._given = True, argument
        if self._rules.judge == "f1":
            credit = f1_credit(argument, self.answer)
            self.success = credit > 0
            return credit
        self.success = exact_match(argument, self.answer)
        return 1.0 if self.success else partial_credit(argument, self.answer)

    @property
    def measures(self) -> dict[str, float]:
        """Success by either judge: the right answer, and RAGEN-2's, an F1 of `MIN_F1` or more."""
        given = self._given
        return {
            "exact_match": float(given is not None and exact_match(given, self.answer)),
            "f1_success": float(given is not None and f1_credit(given, self.answer) > 0),
        }

    def _search(self, query: str) -> str:
        retriever = self._retriever or context_index(self._passages)
        show = numbered if self._rules.layout == "own" else documents
        if not query and not self._rules.show_failures:  # which a server refuses: no reason to end a training
            return show([], self._rules.max_chars)
        try:
            (passages,) = retriever.search([query], self._rules.top_k)
        except RetrievalError as error:
            if not self._rules.show_failures:
                raise
            return error.shown
        return show(passages, self._rules.max_chars)

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
        judge: `"exact"`, or `"f1"` for RAGEN-2's (see `f1_credit`): success is then any F1 from 0.3 on.
        any_answer: Whether any text that is no action is the final answer, as in RAGEN-2 (see `read_any_text`), where
            letter case of actions counts, too.
        dialect: The JSON of a retrieval server: `"search_r1"` or `"ragen2"` (see `HTTPRetriever`).
        show_failures: Whether a search that fails is shown to the model, after one try, rather than an error.
        first_rows: How many rows of data there are to draw from, the first ones, 1 to 10,000,000; `None` for all.
        layout: How states are shown: `"own"`, or `"ragen2"`: documents with scores (see `documents`), the actions, the
            question only at first.
        **limits: `multi_turn`, `max_turns`, `max_actions` and `protocol` of `Environment`. With one turn there is no
            search.

    Raises:
        ValueError: If an option is outside its range.
    """

    name = "search_qa"
    returns = (0.0, 1.0)
    single_turn_limits = Limits(turns=1, actions=1)
    multi_turn_limits = Limits(turns=5, actions=1)
    example = "search[words]"
    splits_answers = False
    tools = SearchQATools

    def __init__(
        self,
        corpus: str | Retriever | None = None,
        top_k: int = 5,
        max_chars: int = 4000,
        judge: str = "exact",
        any_answer: bool = False,
        dialect: str = "search_r1",
        show_failures: bool = False,
        first_rows: int | None = None,
        layout: str = "own",
        **limits: Any,
    ):
        super().__init__(**limits)
        check_count("top_k", top_k, 1, 100)
        check_count("max_chars", max_chars, 100, 100_000)
        check_choice("judge", judge, JUDGES)
        check_choice("any_answer", any_answer, (True, False))
        check_choice("dialect", dialect, DIALECTS)
        check_choice("show_failures", show_failures, (True, False))
        check_choice("layout", layout, LAYOUTS)
        check_first_rows(first_rows)
        server: dict[str, Any] = {"dialect": dialect, **({"retries": 0} if show_failures else {})}
        if corpus is not None and not (isinstance(corpus, str) or callable(getattr(corpus, "search", None))):
            raise ValueError(f"corpus must be a path, an address, a Retriever or None, got {corpus!r}")
        self.retriever = open_corpus(corpus, **server) if isinstance(corpus, str) else corpus
        self.rules = Rules(top_k, max_chars, judge, any_answer, show_failures, layout)
        self.first_rows = first_rows
        if isinstance(self.retriever, HTTPRetriever):
            self.workers = SERVER_WORKERS
        if self.max_turns == 1:
            self.example = "finish[answer]"  # a closed book has nothing to search

    def instructions(self) -> str:
        finish = "finish[answer] ends with your answer. The right one earns 1, a part of it less, several 0."
        if self.max_turns == 1:
            return f"Answer the question. Action: {finish}"
        return f"Answer the question. Actions: search[words] shows passages; {finish} No answer earns nothing."

    def tasks(self, seed: int, split: str, data: str | None) -> Iterator[dict[str, Any]]:
        stream = random.Random(f"{self.name}/{split}/{seed}")
        numbered = generated(stream) if data is None else shuffled(self._load(data, split), COLUMNS, stream)
        # The Hub has splits; a single file and the generator have none.
        hashed = data is None or Path(data).is_file()
        for number, source in numbered:
            check_hotpot_row(source)
            if not hashed or held_out(source["question"]) == (split == "test"):
                yield self._row(number, source)

    def _load(self, data: str, split: str) -> Dataset:
        return first(load(data, split), self.first_rows)

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
        return SearchQAEpisode(row, self.retriever, self.max_turns - 1, self.rules)

    def reference_tasks(self, seeds: Iterator[int], split: str, data: str | None) -> Iterator[dict[str, Any]]:
        """RAGEN-2's rows: the first ones of the training file by seed, for both splits."""
        rows = self._load(reference_source(self.name, data, "hotpotqa/hotpot_qa"), "train")
        check_columns(rows, COLUMNS)
        for seed in seeds:
            source = rows[seed % len(rows)]
            check_hotpot_row(source)
            yield self._row(seed, source)

    def reference_texts(self) -> dict[str, str]:
        return {
            "instruction": "You answer questions as a search agent. search[query] looks for documents, and "
            "finish[answer] hands in your answer.\nReason first, step by step, within <think> and </think>, then act "
            "within <answer> and </answer>. Examples:\n"
            "  <think>I have to know who wrote the song first.</think><answer>search[writer of the song]</answer>\n"
            "  <think>The second document names the town.</think><answer>finish[Lisbon]</answer>\n",
            "length": "Use no more than 300 words.",
        }


def load(data: str, split: str) -> Dataset:
    """Rows of HotpotQA's schema. The Hub's test split has no answers, so that its validation split stands for it."""
    return load_tasks(data, "train" if split == "train" else "validation", config="distractor")


def generated(rng: random.Random) -> Iterator[tuple[int, dict[str, Any]]]:
    """Worlds without end, with their seeds."""
    while True:
        seed = rng.getrandbits(31)
        yield seed, make_world(seed)


def check_hotpot_row(row: Row) -> None:
    """Raises a `ValueError` that names the column unless the row has HotpotQA's schema."""
    for column in ("question", "answer"):
        if not isinstance(row.get(column), str) or not row[column].strip():
            raise ValueError(f"column {column!r} must be a text that is not empty, got {row.get(column)!r}")
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
