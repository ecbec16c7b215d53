"""Episodes that were played in a moment: by solvers and by players who guess."""

import random

from ragen2_trl.envs import format_response, make_env
from ragen2_trl.record.saved_episodes import episodes_of


def play(env, share, seed, members=4, tasks=6, step=0, text=""):
    """Episodes of some tasks, of which the solver plays a share and a guessing player the rest."""
    stream, rng = env.tasks(seed, "train", None), random.Random(seed)
    rows = [row for row in (next(stream) for _ in range(tasks)) for _ in range(members)]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "seed"}
    plays = env.plays([row["seed"] for row in rows], columns, step)
    for number, one in enumerate(plays):
        solves = number < share * len(plays)
        while not one.done:
            actions = one.episode.plan(rng)[1] if solves else [one.episode.random_action(rng)]
            one.respond(format_response(f"So. {text}", actions[: env.max_actions]))
    return episodes_of([env.prompt(row) for row in rows], [row["seed"] for row in rows], plays, step)


def lake(share, seed=0, **options):
    return play(make_env("frozen_lake", multi_turn=True, size=3), share, seed, **options)
