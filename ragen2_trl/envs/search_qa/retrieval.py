"""Search engines: a BM25 index in this process, or a retrieval server over HTTP.

The index of a corpus is built once and opened memory-mapped, so that the processes of one machine share it.
"""

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from datasets import Dataset, load_from_disk
from filelock import FileLock
from huggingface_hub import cached_assets_path

from ragen2_trl.envs.bm25 import best, load_bm25s
from ragen2_trl.envs.search_qa.http_retrieval import HTTPRetriever
from ragen2_trl.envs.search_qa.passages import MAX_QUERY_CHARS, Passage, Passages, PassageTable, scored
from ragen2_trl.envs.tasks import load_tasks

if TYPE_CHECKING:
    import bm25s

_WORD = r"(?u)\w+"  # bm25s' own pattern drops words of one letter: Malcolm X


class Retriever(Protocol):
    """A search engine. One serves many threads."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Up to `k` passages for each query, the best first; equal scores and equal corpora, equal order."""


class BM25Retriever:
    """BM25 in this process, with bm25s.

    Args:
        index: The scores of every word in every passage.
        passages: What its numbers stand for.
    """

    def __init__(self, index: "bm25s.BM25", passages: Passages):
        self.index = index
        self.passages = passages

    @classmethod
    def build(cls, passages: Passages) -> "BM25Retriever":
        """Indexes titles and texts, in memory: about 30 bytes for each word of the corpus, beside the passages.

        Raises:
            ValueError: If there are no passages.
        """
        if not len(passages):
            raise ValueError("passages must not be empty, got none")
        index = load_bm25s("search_qa").BM25()
        words = _words(f"{passage.title} {passage.text}" for passage in passages)
        index.index(words, create_empty_token=False, show_progress=False)
        return cls(index, passages)

    def save(self, folder: str | Path) -> None:
        """Writes the index and its passages to a folder, for `load`."""
        self.index.save(folder, show_progress=False)
        rows = (
            self.passages.rows
            if isinstance(self.passages, PassageTable)
            else Dataset.from_list([{"title": one.title, "text": one.text, "id": one.id} for one in self.passages])
        )
        rows.save_to_disk(Path(folder) / "passages")

    @classmethod
    def load(cls, folder: str | Path) -> "BM25Retriever":
        """Opens what `save` wrote, memory-mapped except for the vocabulary.

        Raises:
            ValueError: If the folder holds no index.
        """
        if not (Path(folder) / "params.index.json").is_file():
            raise ValueError(f"corpus must be a folder that BM25Retriever.save wrote, got {str(folder)!r}")
        passages = PassageTable(load_from_disk(str(Path(folder) / "passages")))
        return cls(load_bm25s("search_qa").BM25.load(folder, mmap=True), passages)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """As `Retriever.search`. Passages without a word of the query are left out, ties go in the corpus' order."""
        return [
            [scored(self.passages[number], number, score) for number, score in self._best(query, k)]
            for query in queries
        ]

    def _best(self, query: str, k: int) -> list[tuple[int, float]]:
        (words,) = _words([query[:MAX_QUERY_CHARS]], return_ids=False)
        known = self.index.get_tokens_ids(words)
        if not known:
            return []
        scores = self.index.get_scores_from_ids(known)
        found = best(scores, k)
        return list(zip(found.tolist(), scores[found].tolist(), strict=True))


def _words(texts: Any, return_ids: bool = True) -> Any:
    return load_bm25s("search_qa").tokenize(texts, token_pattern=_WORD, return_ids=return_ids, show_progress=False)


def open_corpus(
    corpus: str, cache: Path | None = None, server: Callable[[str], Retriever] = HTTPRetriever
) -> Retriever:
    """The search engine of a corpus.

    Args:
        corpus: URL of a retrieval server, folder that `BM25Retriever.save` wrote, or file of passages (json, jsonl,
            parquet, csv), whose index is built when it is first needed and kept.
        cache: Where to keep indices; default: among Hugging Face's cached assets.
        server: Makes the search engine of a URL.

    Raises:
        ImportError: If bm25s is missing, which has the index.
        ValueError: If there is no such file or folder, or it holds something else.
    """
    if corpus.startswith(("http://", "https://")):
        return server(corpus)
    path = Path(corpus)
    if path.is_dir():
        return BM25Retriever.load(path)
    if not path.is_file():
        raise ValueError(f"corpus must be a URL, an index folder or a file of passages, got {corpus!r}")
    stat = path.stat()
    version = hashlib.sha256(f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = (cache or cached_assets_path("ragen2_trl", "bm25")) / version
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # the processes of one machine start together, and one of them builds
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                BM25Retriever.build(PassageTable(load_tasks(corpus, "train"))).save(Path(scratch) / "index")
                (Path(scratch) / "index").rename(folder)  # whole or not at all
    return BM25Retriever.load(folder)
