"""Players who copy the instruction and read nothing of the shop: what a policy has to do better than."""

import random
from statistics import fmean

from ragen2_trl.envs.responses import format_response
from ragen2_trl.envs.webshop.environment import WebShop
from ragen2_trl.envs.webshop.visit import BUY, WebShopEpisode


def copying_return(env: WebShop, num_prompts: int, clicks_options: bool) -> float:
    """Mean return of `copying_action` on held-out tasks."""
    returns = []
    for row in env.dataset(num_prompts, split="test"):
        play = env.play(row, random.Random(0))
        while not play.done:
            assert isinstance(play.episode, WebShopEpisode)
            play.respond(format_response("", [copying_action(play.episode, clicks_options)]))
        returns.append(play.outcome.episode_return)
    return fmean(returns)


def copying_action(episode: WebShopEpisode, clicks_options: bool) -> str:
    """The next action of a player who searches for the instruction, opens the first hit and buys it.

    Args:
        episode: The visit.
        clicks_options: Whether it first clicks the wanted option values that the page has, which it is told.
    """
    if episode.product is not None:
        offered = episode.buttons()
        wanted = [option for option in episode.goal.options if option in offered]
        missing = [option for option in wanted if option not in episode.chosen.values()]
        return f"click[{missing[0] if clicks_options and missing else BUY}]"
    if episode.hits:
        return f"click[{episode.hits[0]}]"
    return f"search[{episode.goal.instruction}]"
