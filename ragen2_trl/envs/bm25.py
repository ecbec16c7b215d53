"""bm25s, imported by the first search: where JAX is installed, importing bm25s starts it, on a GPU too."""

import functools
import logging
from typing import Any

from ragen2_trl.envs.checks import check_installed


def load_bm25s(task: str) -> Any:
    """The module, for a task whose extra has it.

    Raises:
        ImportError: If it is not installed.
    """
    check_installed(task, "bm25s")
    import bm25s

    # It sets its own level to DEBUG, and would tell of every small index to whoever has a handler at all.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


@functools.cache
def stop_words(task: str) -> frozenset[str]:
    """English words that searches leave out."""
    load_bm25s(task)
    from bm25s.stopwords import STOPWORDS_EN

    return frozenset(STOPWORDS_EN)
