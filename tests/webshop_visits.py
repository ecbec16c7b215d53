"""A shop of two products, and how tests visit it."""

import random
from dataclasses import replace

from ragen2_trl.envs.responses import format_response
from ragen2_trl.envs.webshop.catalogue import Catalogue, Goal, Product
from ragen2_trl.envs.webshop.visit import WebShopEpisode

JACKET = Product(
    asin="B00001",
    title="Alora Rain Jacket, waterproof",
    query="rain jacket",
    category="Clothing \u203a Coats \u203a Rain",
    price=45.0,
    attributes=("waterproof", "machine washable"),
    features=("Packs into its own pocket.",),
    description="For long walks in autumn.",
    options={"color": ("red", "navy blue"), "size": ("small", "x-large")},
)
LAMP = replace(JACKET, asin="B00002", title="Table Lamp", query="table lamp", category="Home \u203a Light", options={})
GOAL = Goal("B00001", "find me a waterproof rain jacket", ("waterproof", "machine washable"), ("red", "small"), 50.0)
RIGHT = {"color": "red", "size": "small"}


def answer(*actions):
    return format_response("Shopping.", actions)


def shop(*products, goal=GOAL, results=10):
    return WebShopEpisode(Catalogue(products or (JACKET, LAMP)), goal, results)


def do(episode, *actions):
    """The rewards of actions, all of which must be possible."""
    rewards = []
    for action in actions:
        assert episode.is_action(action), (action, episode.observation())
        rewards.append(episode.step(action))
    return rewards


def solve(env, row):
    play = env.play(row, random.Random(0))
    while not play.done:
        play.respond(answer(play.episode.plan(random.Random(0))[1][0]))
    return play.outcome
