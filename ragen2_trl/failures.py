"""Episodes that their environment could not play to the end: which are left out of training, and when a run ends."""

LOST = (ConnectionError, TimeoutError)
"""A connection was lost or an answer came too late: the episode is left out. Any other exception ends the run."""

TOLERATED = 20
"""Of this many episodes of a generation one may be left out, and one of fewer: beyond it the server is down."""


def check_failed(failed: int, episodes: int, example: str | None) -> None:
    """Raise a `ConnectionError` if too many episodes of a generation have failed.

    Args:
        failed: Episodes left out so far.
        episodes: Episodes of the generation, over all processes.
        example: Task, row, turn and exception of one of them.
    """
    most = max(1, episodes // TOLERATED)
    if failed > most:
        raise ConnectionError(
            f"{failed} of {episodes} episodes of a generation have failed; allowed: {most}. One of them: {example}"
        )


def left_out(task: str, failure: str) -> str:
    """What is said of the first such episode of a task."""
    return f"An episode has failed and gets no reward: {failure}. Later ones are counted in env/{task}/failed."
