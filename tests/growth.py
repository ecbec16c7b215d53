"""How work grows with its input: a ratio, which a slow or a busy machine leaves as it is."""

import time


def growth(work, make_input, small, factor=8, tries=5):
    """By how much CPU time grows where input grows `factor`-fold: about `factor` if linear, its square if quadratic.

    The least of several tries, since what else a machine does only adds to them.
    """
    seconds = {}
    for size in (small, small * factor):
        given = make_input(size)
        seconds[size] = min(_cpu_seconds(work, given) for _ in range(tries))
    return seconds[small * factor] / seconds[small]


def _cpu_seconds(work, given):
    started = time.thread_time()
    work(given)
    return time.thread_time() - started
