"""Search engines: a BM25 index in this process, or a retrieval server over HTTP.

A corpus is a file of passages, `{"title", "text"}` or, as in wiki-18, `{"id", "contents"}` whose first line is the
title. Its index is built once and opened memory-mapped, so that the processes of one machine share it.
"""

import hashlib
import http.client
import json
import logging
import tempfile
import time
import urllib.parse
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from datasets import Dataset, load_from_disk
from filelock import FileLock
from huggingface_hub import cached_assets_path

from ragen2_trl.envs.checks import check_count, check_range
from ragen2_trl.envs.tasks import load_tasks

if TYPE_CHECKING:
    import bm25s

MAX_QUERY_CHARS = 500  # a query is model text; no question is that long

_WORD = r"(?u)\w+"  # bm25s' own pattern drops words of one letter: Malcolm X
_READ_BYTES = 65_536


@dataclass(frozen=True)
class Passage:
    """A paragraph and what it is about."""

    title: str
    text: str


class Retriever(Protocol):
    """A search engine. One serves many threads."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Up to `k` passages for each query, the best first; equal scores and equal corpora, equal order."""


class Passages(Protocol):
    """Passages by number, in memory or on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Passage: ...

    def __iter__(self) -> Iterator[Passage]: ...


class RetrievalError(RuntimeError):
    """A search engine that should answer does not."""


def passage_of(row: object) -> Passage:
    """A passage from either form of a corpus' rows.

    Raises:
        ValueError: If it has neither.
    """
    if isinstance(row, Mapping):
        if isinstance(row.get("contents"), str):
            title, _, text = row["contents"].partition("\n")
            return Passage(title.strip().strip('"'), text.strip())
        if isinstance(row.get("title"), str) and isinstance(row.get("text"), str):
            return Passage(row["title"], row["text"])
    raise ValueError(f"a passage must have texts 'title' and 'text', or 'contents', got {str(row)[:200]}")


class PassageTable:
    """The passages of a memory-mapped table.

    Args:
        rows: Its rows, in either form of a corpus.
    """

    def __init__(self, rows: Dataset):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Passage:
        return passage_of(self.rows[index])

    def __iter__(self) -> Iterator[Passage]:
        return map(passage_of, self.rows)


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
        index = _bm25s().BM25()
        words = _words(f"{passage.title} {passage.text}" for passage in passages)
        index.index(words, create_empty_token=False, show_progress=False)
        return cls(index, passages)

    def save(self, folder: str | Path) -> None:
        """Writes the index and its passages to a folder, for `load`."""
        self.index.save(folder, show_progress=False)
        rows = (
            self.passages.rows
            if isinstance(self.passages, PassageTable)
            else Dataset.from_list([{"title": passage.title, "text": passage.text} for passage in self.passages])
        )
        rows.save_to_disk(Path(folder) / "passages")

    @classmethod
    def load(cls, folder: str | Path) -> "BM25Retriever":
        """Opens what `save` wrote, memory-mapped but for the vocabulary.

        Raises:
            ValueError: If the folder holds no index.
        """
        if not (Path(folder) / "params.index.json").is_file():
            raise ValueError(f"corpus must be a folder that BM25Retriever.save wrote, got {str(folder)!r}")
        return cls(_bm25s().BM25.load(folder, mmap=True), PassageTable(load_from_disk(str(Path(folder) / "passages"))))

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """As `Retriever.search`. Passages without a word of the query are left out, ties go in the corpus' order."""
        return [[self.passages[int(number)] for number in self._best(query, k)] for query in queries]

    def _best(self, query: str, k: int) -> Sequence[int]:
        (words,) = _words([query[:MAX_QUERY_CHARS]], return_ids=False)
        known = self.index.get_tokens_ids(words)
        if not known:
            return []
        scores = self.index.get_scores_from_ids(known)
        last = np.partition(scores, -k)[-k] if k < len(scores) else 0.0
        (candidates,) = np.nonzero((scores >= last) & (scores > 0))  # sorting 21 million passages takes seconds
        best: Sequence[int] = candidates[np.argsort(-scores[candidates], kind="stable")][:k].tolist()
        return best


def _bm25s() -> Any:
    # Where JAX is installed, importing bm25s starts it, on a GPU too: not for those who search elsewhere.
    import bm25s

    # It sets its own level to DEBUG, and would tell of every small index to whoever has a handler at all.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def _words(texts: Any, return_ids: bool = True) -> Any:
    return _bm25s().tokenize(texts, token_pattern=_WORD, return_ids=return_ids, show_progress=False)


class HTTPRetriever:
    """A retrieval server that speaks the JSON of Search-R1's.

    `POST {"queries": [...], "topk": k, "return_scores": true}` is answered by
    `{"result": [[{"document": {"contents": "title\\ntext"}, "score": s}, ...], ...]}`. Every search has a connection
    of its own. Lost connections, time-outs and 5xx are tried again after 1, 2, 4… times `backoff`; nothing else is.

    Args:
        url: The server's, http or https; the path is `/retrieve` unless given. `user:password@` is sent as basic
            authentication, and neither that nor a query string is ever shown.
        timeout: Seconds without a byte, and about those that a try may take, 0.01 to 600.
        retries: Tries after the first, 0 to 10.
        backoff: Seconds before the second try, 0 to 60.
        max_bytes: Bytes of an answer, 1 to a billion.

    Raises:
        ValueError: If an argument is outside its range.
    """

    def __init__(
        self, url: str, timeout: float = 30.0, retries: int = 3, backoff: float = 0.5, max_bytes: int = 8_000_000
    ):
        check_range("timeout", timeout, 0.01, 600)
        check_count("retries", retries, 0, 10)
        check_range("backoff", backoff, 0, 60)
        check_count("max_bytes", max_bytes, 1, 1_000_000_000)
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be http://host or https://host, got the scheme {parts.scheme!r}")
        self.timeout, self.retries, self.backoff, self.max_bytes = timeout, retries, backoff, max_bytes
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        path = parts.path if parts.path.strip("/") else "/retrieve"
        self.shown_url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"
        # A space would end the address; http.client would refuse it and show it.
        self._target = urllib.parse.quote(f"{path}?{parts.query}" if parts.query else path, safe="%/?&=:@!$'()*+,;~")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if parts.username is not None:
            user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {b64encode(user.encode()).decode()}"

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """As `Retriever.search`.

        Raises:
            RetrievalError: If the server cannot be reached, refuses, or answers in another form.
        """
        cut = [query[:MAX_QUERY_CHARS] for query in queries]
        answer = self._post(json.dumps({"queries": cut, "topk": k, "return_scores": True}).encode())
        try:
            found = [[passage_of(hit["document"]) for hit in hits[:k]] for hits in json.loads(answer)["result"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:  # a nest of brackets is a RecursionError
            raise RetrievalError(
                f"{self.shown_url} answered in another form than {{'result': [[{{'document': ...}}]]}}: "
                f"{type(error).__name__}"
            ) from error
        if len(found) != len(queries):
            raise RetrievalError(f"{self.shown_url} answered {len(found)} queries, {len(queries)} were asked")
        return found

    def _post(self, body: bytes) -> bytes:
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.backoff * 2 ** (attempt - 1))
            try:
                status, answer = self._try(body)
            except (OSError, http.client.HTTPException) as error:  # refused, reset, too slow, cut off
                cause: Exception | None = error
                reason = type(error).__name__
                continue
            if status == 200:
                return answer
            cause, reason = None, f"status {status}"
            if status < 500:
                raise RetrievalError(f"{self.shown_url} refused: {reason}")
        tries = f"{self.retries + 1} tries, the last: {reason}"
        raise RetrievalError(f"{self.shown_url} did not answer in {tries}") from cause

    def _try(self, body: bytes) -> tuple[int, bytes]:
        deadline = time.monotonic() + self.timeout
        connection = self._connect(self._host, self._port, timeout=self.timeout)
        try:
            connection.request("POST", self._target, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                return response.status, b""
            answer = bytearray()
            while piece := response.read1(_READ_BYTES):  # `read` would wait for all of it, however slow
                answer += piece
                if len(answer) > self.max_bytes:
                    raise RetrievalError(f"{self.shown_url} answered with more than {self.max_bytes} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no whole answer in {self.timeout} s")
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            return response.status, bytes(answer)
        finally:
            connection.close()


def open_corpus(corpus: str, cache: Path | None = None) -> Retriever:
    """The search engine of a corpus.

    Args:
        corpus: URL of a retrieval server, folder that `BM25Retriever.save` wrote, or file of passages (json, jsonl,
            parquet, csv), whose index is built when it is first needed and kept.
        cache: Where to keep indices; default: among Hugging Face's cached assets.

    Raises:
        ValueError: If there is no such file or folder, or it holds something else.
    """
    if corpus.startswith(("http://", "https://")):
        return HTTPRetriever(corpus)
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
