"""The search by embeddings."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import need
from passages import PASSAGES, write_jsonl


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A tiny random BERT, saved."""
    need("dense")
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("encoder")
    words = sorted({word.lower().strip(".,") for p in PASSAGES for word in f"{p.title} {p.text}".split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "query", "passage", ":", ".", ",", *words]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
    return str(folder)


def test_a_dense_index_finds_the_nearest_and_can_be_saved(encoder, tmp_path):
    from transformers import AutoModel, AutoTokenizer

    from ragen2_trl.envs.search_qa.dense_retrieval import DenseRetriever, encode

    model, tokenizer = AutoModel.from_pretrained(encoder), AutoTokenizer.from_pretrained(encoder)
    built = DenseRetriever.build(model, tokenizer, PASSAGES)
    vectors = encode(model, tokenizer, [f"passage: {p.title} {p.text}" for p in PASSAGES])
    (query,) = encode(model, tokenizer, ["query: a potter"])
    nearest = [PASSAGES[i] for i in np.argsort(-(vectors @ query), kind="stable")]
    assert built.search(["a potter"], 3) == [nearest[:3]]
    assert built.search(["a potter"], 99) == [nearest]
    # Padding must not change a vector.
    assert np.allclose(vectors[1], encode(model, tokenizer, ["passage: Osk The Osk is a river."])[0], atol=1e-6)

    built.save(tmp_path / "e5.index")
    corpus = write_jsonl(tmp_path / "wiki.jsonl", [{"title": p.title, "text": p.text} for p in PASSAGES])
    loaded = DenseRetriever.load(encoder, tmp_path / "e5.index", corpus)
    queries = ["a potter", "river", "mira", "speech"] * 20
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda query: loaded.search([query], 5)[0], queries))
    assert found[:4] == built.search(queries[:4], 5)
    assert found == found[:4] * 20


def test_a_dense_index_must_fit_passages_and_model(encoder):
    import faiss
    from transformers import AutoModel, AutoTokenizer

    from ragen2_trl.envs.search_qa.dense_retrieval import DenseRetriever

    model, tokenizer = AutoModel.from_pretrained(encoder), AutoTokenizer.from_pretrained(encoder)
    with pytest.raises(ValueError, match="index must hold one vector for each of 5 passages, got 0"):
        DenseRetriever(model, tokenizer, faiss.IndexFlatIP(32), PASSAGES)
    with pytest.raises(ValueError, match="index must hold vectors of 32 numbers, got 8"):
        DenseRetriever(model, tokenizer, faiss.IndexFlatIP(8), ())


def test_a_dense_index_is_served(encoder, tmp_path):
    from ragen2_trl.cli.arguments import retrieval_parser
    from ragen2_trl.cli.serve_retrieval import make_server

    corpus = write_jsonl(tmp_path / "wiki.jsonl", [{"title": p.title, "text": p.text} for p in PASSAGES])
    given = ["--port", "0", "--encoder", encoder, "--corpus", corpus]
    with make_server(retrieval_parser().parse_args(given)) as built:
        assert built.health() == {
            "status": "healthy",
            "corpus_size": 5,
            "index_type": "dense_only",
            "index_loaded": True,
        }
        answer = built.answer({"query": "a potter", "top_k": 2})
        built.retriever.save(tmp_path / "e5.index")
    assert answer["method"] == "dense"
    assert [hit["score"] for hit in answer["results"]] == sorted(hit["score"] for hit in answer["results"])[::-1]
    given += ["--index", str(tmp_path / "e5.index")]
    with make_server(retrieval_parser().parse_args(given)) as loaded:
        assert loaded.answer({"query": "a potter", "top_k": 2}) == answer
    with pytest.raises(ValueError, match="corpus must be the file of the passages of an index, got None"):
        make_server(retrieval_parser().parse_args([*given[:4], *given[-2:]]))
