"""The search in this process: text from outside, BM25, and corpora."""

import logging
import random
import re
import string
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from growth import growth
from hypothesis import given
from hypothesis import strategies as st
from passages import PASSAGES, titles, write_jsonl

from ragen2_trl.envs.responses import plain_text
from ragen2_trl.envs.search_qa.passages import Passage, PassageTable, passage_of
from ragen2_trl.envs.search_qa.retrieval import BM25Retriever, open_corpus

# Text from outside


@pytest.mark.parametrize(
    "mark",
    ["<|im_end|>", "<s>", "</s>", "<start_of_turn>", "[INST]", "[/INST]", "<\uff5cUser\uff5c>", "<think>", "[gMASK]"],
)
def test_no_mark_of_a_chat_template_survives(mark):
    assert mark not in plain_text(f"before{mark}after {mark}\n{mark * 3}")
    assert mark not in plain_text(plain_text(mark))


def test_marks_that_a_removal_would_join_do_not_appear():
    for cut in ("\x00", "\x1b", "\ud800", "\x7f"):
        assert plain_text(f"<|im{cut}_end|>") == "< |im_end|>"
        assert plain_text(f"<{cut}|im_end|>") == "< |im_end|>"
        assert plain_text(f"[{cut}INST]") == "[ INST]"


def test_ordinary_text_is_left_as_it_is():
    text = "Ángström (b. 1814) wrote: 2 < 3, [citation needed], 5 > 4; नमस्ते, می‌خواهم"
    assert plain_text(text) == text


@pytest.mark.parametrize(
    "piece", ["A", "[A", "[AA", "[", "<", "<a", "[/", "a ", "\x00", "\ud800", "[a]", "<a>", "\u0661", "[A_"]
)
def test_cleaning_is_linear_in_the_text(piece):
    def hostile(size):
        return "[" + piece * size

    assert growth(plain_text, hostile, 4000) < 24  # 8 times as much text; the square would be 64


@given(st.text("[]/AaB<>|_ \x00", max_size=200))
def test_what_is_in_brackets_is_a_mark_if_two_capitals_are(text):
    slow = re.compile(r"\[(?=/?\w*[A-Z]{2}\w*\])")  # quadratic, which does no harm here
    words = [word for word in re.findall(r"\w+", text) if len(word) > 60]
    assert words or not slow.search(plain_text(text))


@given(st.text(st.characters()) | st.text("<|>a\x00"))
def test_plain_text_can_always_be_encoded_stands_on_one_line_and_has_no_mark(text):
    plain = plain_text(text)
    plain.encode()
    assert len(plain.splitlines()) <= 1 or "\u2028" in plain
    assert not re.search(r"<\|[^\s<>]{0,50}>", plain)


def test_both_forms_of_a_corpus_are_read():
    assert passage_of({"id": "0", "contents": '"Belmin"\nA town.\nIn Ruk.'}) == Passage("Belmin", "A town.\nIn Ruk.")
    assert passage_of({"title": "Belmin", "text": "A town."}) == Passage("Belmin", "A town.")


@pytest.mark.parametrize("row", [{}, {"title": "a"}, {"title": "a", "text": None}, "a", None, {"contents": 3}])
def test_other_rows_are_named(row):
    with pytest.raises(ValueError, match="a passage must have texts 'title' and 'text', or 'contents', got"):
        passage_of(row)


# BM25


def test_the_best_passage_comes_first_and_those_without_a_word_are_left_out():
    retriever = BM25Retriever.build(PASSAGES)
    assert titles(retriever.search(["mira TAVOK", "Osk", "X", "zebra", "", "the", "?!"], 5)) == [
        ["Mira Tavok"],
        ["Osk", "Belmin"],
        ["Malcolm X"],
        [],
        [],
        [],
        [],
    ]
    assert titles(retriever.search(["river belmin"], 1)) == [["Belmin"]]


def test_scores_agree_with_the_formula_of_bm25():
    rng = random.Random(0)
    words = [f"w{number}" for number in range(30)]
    documents = [[rng.choice(words) for _ in range(rng.randint(1, 40))] for _ in range(200)]
    retriever = BM25Retriever.build([Passage(str(i), " ".join(words)) for i, words in enumerate(documents)])
    documents = [[str(i), *words] for i, words in enumerate(documents)]  # titles are searched, too
    mean = np.mean([len(words) for words in documents])
    query = ["w3", "w7", "w7", "w20"]

    def score(document):
        total = 0.0
        for word in query:
            frequency = sum(word in other for other in documents)
            idf = np.log(1 + (200 - frequency + 0.5) / (frequency + 0.5))
            count = document.count(word)
            total += idf * count / (count + 1.5 * (0.25 + 0.75 * len(document) / mean))
        return total

    expected = sorted((-score(document), number) for number, document in enumerate(documents))
    (found,) = retriever.search([" ".join(query)], 20)
    assert [int(passage.title) for passage in found] == [number for _, number in expected[:20]]


@pytest.mark.parametrize("k", [1, 3, 7, 10, 50])
def test_ties_go_in_the_order_of_the_corpus(k):
    retriever = BM25Retriever.build([Passage("same", "word") for _ in range(5)] + [Passage("same", "word")] * 5)
    assert [place for place, _ in retriever._best("word", k)] == list(range(min(k, 10)))


def test_an_index_without_passages_is_refused_and_one_without_words_finds_nothing():
    with pytest.raises(ValueError, match="passages must not be empty"):
        BM25Retriever.build(())
    with np.errstate(invalid="ignore"):
        assert BM25Retriever.build((Passage("", ""), Passage("?", "!"))).search(["? a word"], 5) == [[]]


def test_a_saved_index_is_memory_mapped_and_finds_the_same(tmp_path):
    built = BM25Retriever.build(PASSAGES)
    built.save(tmp_path / "index")
    loaded = BM25Retriever.load(tmp_path / "index")
    assert all(isinstance(loaded.index.scores[name], np.memmap) for name in ("data", "indices", "indptr"))
    assert loaded.passages.rows.cache_files  # Arrow files, not memory
    queries = ["belmin", "river", "mira tavok potter", "speech"]
    assert loaded.search(queries, 5) == built.search(queries, 5)
    loaded.save(tmp_path / "copy")
    assert BM25Retriever.load(tmp_path / "copy").search(queries, 5) == built.search(queries, 5)


def test_threads_find_what_one_thread_finds(tmp_path):
    rng = random.Random(0)
    words = ["".join(rng.choices(string.ascii_lowercase, k=4)) for _ in range(300)]
    passages = [Passage(f"p{i}", " ".join(rng.choices(words, k=40))) for i in range(500)]
    BM25Retriever.build(passages).save(tmp_path / "index")
    retriever = BM25Retriever.load(tmp_path / "index")
    queries = [" ".join(rng.choices(words, k=3)) for _ in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: retriever.search([query], 5)[0], queries))
    assert found == retriever.search(queries, 5)


def test_a_long_query_is_cut(tmp_path):
    retriever = BM25Retriever.build(PASSAGES)
    start = time.thread_time()
    assert titles(retriever.search(["zebra " * 1_000_000 + "belmin"], 5)) == [[]]
    assert time.thread_time() - start < 0.05


def test_small_indices_say_nothing_to_the_log(caplog):
    with caplog.at_level(logging.INFO):
        BM25Retriever.build(PASSAGES).search(["belmin", ""], 5)
    assert not caplog.records


# Corpora


def test_a_corpus_is_indexed_once_and_again_when_it_changes(tmp_path, monkeypatch):
    corpus = write_jsonl(
        tmp_path / "wiki.jsonl", [{"id": str(i), "contents": f'"{p.title}"\n{p.text}'} for i, p in enumerate(PASSAGES)]
    )
    builds = []
    build = BM25Retriever.build
    monkeypatch.setattr(BM25Retriever, "build", lambda passages: builds.append(1) or build(passages))
    for _ in range(2):
        assert titles(open_corpus(corpus, tmp_path / "cache").search(["tavok"], 5)) == [["Mira Tavok"]]
    assert len(builds) == 1
    write_jsonl(tmp_path / "wiki.jsonl", [{"title": "Other", "text": "Tavok moved away."}])
    assert titles(open_corpus(corpus, tmp_path / "cache").search(["tavok"], 5)) == [["Other"]]
    assert len(builds) == 2


def test_an_index_that_was_interrupted_is_not_used(tmp_path, monkeypatch):
    corpus = write_jsonl(tmp_path / "wiki.jsonl", [{"title": p.title, "text": p.text} for p in PASSAGES])

    def fail(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PassageTable, "__iter__", fail)
        open_corpus(corpus, tmp_path / "cache")
    assert titles(open_corpus(corpus, tmp_path / "cache").search(["tavok"], 5)) == [["Mira Tavok"]]


def test_processes_that_start_together_build_one_index(tmp_path, monkeypatch):
    corpus = write_jsonl(tmp_path / "wiki.jsonl", [{"title": p.title, "text": p.text} for p in PASSAGES])
    builds = []
    build = BM25Retriever.build
    monkeypatch.setattr(
        BM25Retriever, "build", lambda passages: builds.append(1) or time.sleep(0.1) or build(passages)
    )
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: open_corpus(corpus, tmp_path / "cache").search(["tavok"], 5), range(4)))
    assert len(builds) == 1
    assert all(titles(each) == [["Mira Tavok"]] for each in found)


def test_an_index_folder_is_opened(tmp_path):
    BM25Retriever.build(PASSAGES).save(tmp_path / "index")
    assert titles(open_corpus(str(tmp_path / "index")).search(["tavok"], 5)) == [["Mira Tavok"]]


def test_what_is_no_corpus_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"corpus must be a URL, an index folder or a file of passages, got '/no"):
        open_corpus("/nowhere/wiki.jsonl")
    with pytest.raises(ValueError, match=r"corpus must be a folder that BM25Retriever.save wrote, got"):
        open_corpus(str(tmp_path))
    wrong = write_jsonl(tmp_path / "wrong.jsonl", [{"name": "a", "body": "b"}])
    with pytest.raises(ValueError, match=r"a passage must have texts 'title' and 'text', or 'contents', got"):
        open_corpus(wrong, tmp_path / "cache")
