"""The random baseline: how often a player succeeds who knows nothing but which actions there are."""

import random
from collections.abc import Iterable
from statistics import fmean

from datasets import Dataset

from ragen2_trl.envs.environment import Environment
from ragen2_trl.envs.tasks import Row


def random_baseline(env: Environment, rows: Iterable[Row], samples: int = 8, seed: int = 0) -> float | None:
    """Success of the random baseline: what a success has to be compared with.

    Args:
        env: The task.
        rows: Tasks, as `env.dataset` gives them.
        samples: Episodes of each.
        seed: Of the player and of the tasks' chance events.

    Returns:
        Mean over all episodes; `None` where there are no actions to draw from, or where an episode is not cheap to
        play, such as a program or a search on a server: `ragen2-trl evaluate --model random` measures it there.
    """
    if not env.quick or env.workers > 1:
        return None
    outcomes: list[bool] = []
    for number, row in enumerate(rows):
        for sample in range(samples):
            rng = random.Random(f"floor/{seed}/{number}/{sample}")
            play = env.begin(row, random.Random(rng.random()))
            while not play.done:
                try:
                    play.respond(play.random_response(rng))
                except NotImplementedError:
                    return None
            if not play.failure:
                outcomes.append(play.episode.success)
    return fmean(outcomes) if outcomes else None


def random_success(env: Environment, rows: Dataset, num_samples: int) -> dict[str, float]:
    """What success has to be compared with, as a metric; `rows` hold each task `num_samples` times in a row."""
    baseline = random_baseline(env, rows.select(range(0, len(rows), num_samples)))
    return {} if baseline is None else {"random_success": baseline}
