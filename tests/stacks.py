"""Calls from deep within a stack, as a reward function is called from within a trainer."""

import sys


def with_frames_left(frames, call):
    """What `call()` gives where Python allows that many frames more."""
    depth = sum(1 for _ in _callers(sys._getframe()))

    def descend(levels):
        return call() if levels == 0 else descend(levels - 1)

    return descend(sys.getrecursionlimit() - depth - frames)


def _callers(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back
