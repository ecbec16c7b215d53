"""Serve a search engine over HTTP, in the JSON of RAGEN-2's retrieval server and of Search-R1's.

ragen2-trl serve-retrieval --corpus wiki-18.jsonl
"""

from argparse import Namespace
from collections.abc import Sequence

from ragen2_trl.cli.arguments import retrieval_parser
from ragen2_trl.cli.console import make_console
from ragen2_trl.cli.typed import InputError, checked_input
from ragen2_trl.envs.checks import check_count
from ragen2_trl.envs.search_qa import SearchQA
from ragen2_trl.envs.search_qa.passages import Passage, Passages, PassageTable, passage_of
from ragen2_trl.envs.search_qa.retrieval import BM25Retriever, Retriever, open_corpus
from ragen2_trl.envs.search_qa.server import RetrievalServer
from ragen2_trl.envs.tasks import SPLITS, load_tasks


def main(args: list[str] | None = None) -> None:
    """Serve until it is interrupted.

    Raises:
        InputError: If an argument cannot be used, or the address is taken.
    """
    arguments = retrieval_parser().parse_args(args)
    with checked_input():
        server = make_server(arguments)
    with server:
        make_console().print(f"{server.corpus_size} passages at {server.url}/retrieve until Ctrl-C.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            make_console().print("Stopped.")


def make_server(arguments: Namespace) -> RetrievalServer:
    """The server that the arguments ask for, which listens already.

    Raises:
        ValueError: If an argument cannot be used.
        OSError: If the address cannot be listened on.
    """
    if arguments.corpus is not None and arguments.corpus.startswith(("http://", "https://")):
        raise ValueError("corpus must be a file or a folder, got an address")
    check_count("num_worlds", arguments.num_worlds, 1, 100_000)
    check_count("port", arguments.port, 0, 65_535)
    if arguments.encoder is None and arguments.index is not None:
        raise ValueError(f"index must be None without an encoder, got {arguments.index!r}")
    if arguments.encoder is None:
        retriever, size, method = *lexical(arguments), "bm25"
    else:
        retriever, size, method = *dense(arguments), "dense"
    return RetrievalServer(retriever, size, method, arguments.host, arguments.port)


def lexical(arguments: Namespace) -> tuple[Retriever, int]:
    """BM25, and how many passages it searches."""
    if arguments.corpus is None:
        passages = passages_of_worlds(arguments.num_worlds, arguments.seed)
        return BM25Retriever.build(passages), len(passages)
    retriever = open_corpus(arguments.corpus)
    assert isinstance(retriever, BM25Retriever)  # for the type checker: it is no address
    return retriever, len(retriever.passages)


def dense(arguments: Namespace) -> tuple[Retriever, int]:
    """An encoder with its index, and how many passages it searches."""
    try:
        import faiss  # noqa: F401 -- said now, in a line, and not once a model is loaded
    except ImportError:
        raise InputError('encoder needs faiss: pip install "ragen2-trl[dense]"') from None
    from transformers import AutoModel, AutoTokenizer

    from ragen2_trl.envs.search_qa.dense_retrieval import DenseRetriever

    if arguments.index is not None:
        if arguments.corpus is None:
            raise ValueError("corpus must be the file of the passages of an index, got None")
        loaded = DenseRetriever.load(arguments.encoder, arguments.index, arguments.corpus, arguments.device)
        return loaded, len(loaded.passages)
    passages: Passages = (
        passages_of_worlds(arguments.num_worlds, arguments.seed)
        if arguments.corpus is None
        else PassageTable(load_tasks(arguments.corpus, "train"))
    )
    model = AutoModel.from_pretrained(arguments.encoder).to(arguments.device)
    tokenizer = AutoTokenizer.from_pretrained(arguments.encoder)
    return DenseRetriever.build(model, tokenizer, passages), len(passages)


def passages_of_worlds(num_worlds: int, seed: int) -> Sequence[Passage]:
    """The passages of the tasks that `SearchQA` generates with a seed, of both splits."""
    env = SearchQA(multi_turn=True)
    rows = [row for split in SPLITS for row in env.dataset(num_worlds, seed, split)]
    return [passage_of(passage) for row in rows for passage in row["passages"]]
