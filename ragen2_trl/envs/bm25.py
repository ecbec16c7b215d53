"""bm25s, imported by the first search: where JAX is installed, importing bm25s starts it, on a GPU too."""

import functools
import logging
from typing import Any


def load_bm25s() -> Any:
    """The module."""
    import bm25s

    # It sets its own level to DEBUG, and would tell of every small index to whoever has a handler at all.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


@functools.cache
def stop_words() -> frozenset[str]:
    """English words that searches leave out."""
    load_bm25s()
    from bm25s.stopwords import STOPWORDS_EN

    return frozenset(STOPWORDS_EN)
