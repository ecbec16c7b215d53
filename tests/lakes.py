"""Two maps, and how tests play on them."""

import random

from ragen2_trl.envs import format_response

LAKE = ("SFF", "FHF", "FFG")
CROSSING = ("FFF", "FSG", "FFF")  # one move, which may slip


def row(grid=LAKE, seed=0):
    return {"seed": seed, "grid": "\n".join(grid)}


def answer(*actions):
    return format_response("A plan.", actions)


def score(env, text, *, grid=LAKE, seed=0, count=1, **columns):
    """Success of `count` equal completions of one task."""
    messages = [[{"role": "assistant", "content": text}]] * count
    columns = {"seed": [seed] * count, "grid": ["\n".join(grid)] * count, **columns}
    return env.success_func(prompts=[None] * count, completions=messages, **columns)


def play(env, *texts, grid=LAKE):
    """A play that has been given these responses, and the user messages that answered them."""
    begun = env.play(row(grid), random.Random(0))
    return begun, [begun.respond(text) for text in texts]


def grids_of(rows):
    return [tuple(grid.split("\n")) for grid in rows["grid"]]
