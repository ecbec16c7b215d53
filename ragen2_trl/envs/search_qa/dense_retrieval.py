"""Dense retrieval with an E5 encoder and FAISS: the search of Search-R1 and RAGEN in this process.

`SearchQA(corpus=DenseRetriever.load(...))` searches with it. Needs `faiss-cpu` or `faiss-gpu`. No environment imports
this module, since they know no torch.
"""

import threading
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: TID251 -- the one module in here that does
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ragen2_trl.envs.search_qa.passages import MAX_QUERY_CHARS, Passage, Passages, PassageTable, scored
from ragen2_trl.envs.tasks import load_tasks

MAX_TOKENS = 256  # of a query or a passage, as in Search-R1
BATCH = 64


class DenseRetriever:
    """A `Retriever` that compares the means of an encoder's last hidden states.

    Args:
        model: The encoder, such as `intfloat/e5-base-v2`.
        tokenizer: Its tokenizer.
        index: A FAISS index by inner product of normalised vectors, one for each passage.
        passages: What its numbers stand for.

    Raises:
        ValueError: If model, index and passages do not fit together.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, index: Any, passages: Passages):
        if index.ntotal != len(passages):
            raise ValueError(f"index must hold one vector for each of {len(passages)} passages, got {index.ntotal}")
        if index.d != model.config.hidden_size:
            raise ValueError(f"index must hold vectors of {model.config.hidden_size} numbers, got {index.d}")
        self.model = model
        self.tokenizer = tokenizer
        self.index = index
        self.passages = passages
        self._lock = threading.Lock()

    @classmethod
    def build(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, passages: Passages) -> "DenseRetriever":
        """Encodes all passages into an exact index, in memory: 4 bytes for each number of each vector."""
        import faiss

        index = faiss.IndexFlatIP(model.config.hidden_size)
        texts = (f"passage: {passage.title} {passage.text}" for passage in passages)
        while batch := list(islice(texts, BATCH)):
            index.add(encode(model, tokenizer, batch))
        return cls(model, tokenizer, index, passages)

    @classmethod
    def load(
        cls, model: str, index: str | Path, corpus: str | Path, device: str | torch.device = "cpu"
    ) -> "DenseRetriever":
        """Opens an index that FAISS wrote, memory-mapped, and the file of its passages.

        Args:
            model: Hub id or folder of the encoder.
            index: The index, such as the joined parts of `PeterJinGo/wiki-18-e5-index`.
            corpus: Its passages in the same order, such as `wiki-18.jsonl`.
            device: Where to encode queries.
        """
        import faiss

        return cls(
            AutoModel.from_pretrained(model).to(device),
            AutoTokenizer.from_pretrained(model),
            faiss.read_index(str(index), faiss.IO_FLAG_MMAP),
            PassageTable(load_tasks(str(corpus), "train")),
        )

    def save(self, index: str | Path) -> None:
        """Writes the index for `load`."""
        import faiss

        faiss.write_index(self.index, str(index))

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """As `Retriever.search`."""
        with self._lock:  # a fast tokenizer cannot pad for two threads at once
            vectors = encode(self.model, self.tokenizer, [f"query: {query[:MAX_QUERY_CHARS]}" for query in queries])
        scores, numbers = self.index.search(vectors, min(k, self.index.ntotal))
        return [
            [
                scored(self.passages[int(row[place])], int(row[place]), float(of_row[place]))
                for place in np.lexsort((row, -of_row))
                if row[place] >= 0
            ]
            for row, of_row in zip(numbers, scores, strict=True)
        ]


@torch.inference_mode()
def encode(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> np.ndarray:
    """Normalised means of the last hidden states of texts that carry E5's prefixes: (texts, hidden), float32."""
    model.train(False)
    batch = tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt").to(
        model.device
    )
    states = model(**batch).last_hidden_state  # (texts, tokens, hidden)
    mask = batch["attention_mask"][..., None]  # (texts, tokens, 1)
    means = (states * mask).sum(1) / mask.sum(1)  # (texts, hidden)
    vectors: np.ndarray = torch.nn.functional.normalize(means.float(), dim=-1).cpu().numpy()
    return vectors
