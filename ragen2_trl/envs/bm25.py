"""bm25s, imported by the first search: where JAX is installed, importing bm25s starts it, on a GPU too."""

import functools
import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


def best(scores: NDArray[np.floating], k: int) -> NDArray[np.integer]:
    """Numbers of the `k` best of (N,) scores, those above 0 alone, ties in their order.

    >>> best(np.array([0.5, 2.0, 0.0, 0.5]), 2)
    array([1, 0])
    """
    last = np.partition(scores, -k)[-k] if k < len(scores) else 0.0
    (candidates,) = np.nonzero((scores >= last) & (scores > 0))  # sorting 21 million passages takes seconds
    return candidates[np.argsort(-scores[candidates], kind="stable")][:k]


@functools.cache
def stop_words(task: str) -> frozenset[str]:
    """English words that searches leave out."""
    load_bm25s(task)
    from bm25s.stopwords import STOPWORDS_EN

    return frozenset(STOPWORDS_EN)
