"""Players without a model: the solver of a task, a player who guesses, and how often guessing is enough."""

import random
from collections.abc import Iterable
from statistics import fmean

from datasets import Dataset

from ragen2_trl.envs.base import Environment
from ragen2_trl.envs.play import Play
from ragen2_trl.envs.responses import format_response
from ragen2_trl.envs.tasks import Row


def oracle_response(env: Environment, play: Play, rng: random.Random) -> str:
    """What the task's solver writes in the next turn.

    Raises:
        NotImplementedError: If the task has none.
    """
    reasoning, actions = play.episode.plan(rng)
    return format_response(reasoning, actions[: env.max_actions], think=env.enable_think)


def random_response(env: Environment, play: Play, rng: random.Random) -> str:
    """What a player writes who knows nothing but which actions there are: as many of them as a turn takes.

    Raises:
        NotImplementedError: If there is no set of actions to draw from.
    """
    count = env.max_actions if env.splits_answers else 1
    actions = [play.episode.random_action(rng) for _ in range(count)]
    return format_response("", actions, think=env.enable_think)


def random_floor(env: Environment, rows: Iterable[Row], samples: int = 8, seed: int = 0) -> float | None:
    """Success of a player who guesses: what a success has to be compared with.

    Args:
        env: The task.
        rows: Tasks, as `env.dataset` gives them.
        samples: Episodes of each.
        seed: Of the player and of the tasks' chance events.

    Returns:
        Mean over all episodes; `None` where nobody can guess, or where a guess is not cheap to judge, such as a
        program or a search on a server: `ragen2-trl evaluate --model random` measures it there.
    """
    if not env.quick or env.workers > 1:
        return None
    outcomes: list[bool] = []
    for number, row in enumerate(rows):
        for sample in range(samples):
            rng = random.Random(f"floor/{seed}/{number}/{sample}")
            play = env.play(row, random.Random(rng.random()))
            while not play.done:
                try:
                    play.respond(random_response(env, play, rng))
                except NotImplementedError:
                    return None
            outcomes.append(play.episode.success)
    return fmean(outcomes) if outcomes else None


def random_success(env: Environment, rows: Dataset, num_samples: int) -> dict[str, float]:
    """What success has to be compared with, as a metric; `rows` hold each task `num_samples` times in a row."""
    floor = random_floor(env, rows.select(range(0, len(rows), num_samples)))
    return {} if floor is None else {"random_success": floor}
