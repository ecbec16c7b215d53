"""WebShop: find a product in a shop by its description, choose its options and buy it.

A compact engine after Yao et al. 2022 (arXiv 2207.01206): its pages, its dense score and its goals, over its own files
or a generated catalogue. Unlike there, the price that is shown is the one that counts, and nobody reviews anything.
"""

import random
from collections.abc import Iterator
from typing import Any

from ragen2_trl.envs.checks import check_choice, check_count
from ragen2_trl.envs.environment import Environment
from ragen2_trl.envs.episode import Limits
from ragen2_trl.envs.tasks import Row, held_out
from ragen2_trl.envs.tools import ToolEnvironment
from ragen2_trl.envs.webshop.catalogue import Catalogue, Goal, identity
from ragen2_trl.envs.webshop.files import GOALS, load_catalogue, load_goals, split_goals
from ragen2_trl.envs.webshop.generator import draw_goal, generate_catalogue
from ragen2_trl.envs.webshop.visit import WebShopEpisode, wish_words

FEWEST_TURNS = 3  # to search, to open a product, to buy it


class WebShopTools(ToolEnvironment):
    """WebShop's tools."""

    def search(self, query: str) -> str:
        """
        Searches the shop.

        Args:
            query: Words that describe a product.

        Returns:
            The reward and the first page of results.
        """
        return self._take([f"search[{query}]"])

    def click(self, button: str) -> str:
        """
        Clicks something that the page shows in [brackets].

        Args:
            button: What stands in the brackets, such as "next >" or "buy now".

        Returns:
            The reward and the page as it is then.
        """
        return self._take([f"click[{button}]"])


class WebShop(Environment):
    """Buy what an instruction describes: 0.0 to 1.0 for the share of wishes that the purchase meets, success at 1.0.

    The tasks are WebShop's where `data` is the folder of its files or the path of its `items_shuffle*.json`, else they
    are wishes for products of a generated catalogue. With WebShop's files `seed` is the number of the goal in WebShop.

    Args:
        products: Size of the generated catalogue, 50 to 10000.
        results: Products on a page of results, 1 to 20.
        goals: Which goals of WebShop's files: `"human"`, written by people, or `"synthetic"`.
        **limits: `max_turns`, at least 3, and `protocol` of `Environment`; `max_actions` is 1, since what can be
            clicked depends on the page. Every wish of the generated catalogue can be met within the turns.

    Raises:
        ValueError: If an option is outside its range.
    """

    name = "webshop"
    returns = (0.0, 1.0)
    single_turn_limits = None
    multi_turn_limits = Limits(turns=9, actions=1)
    example = "search[words]"
    packages = ("bm25s", "rapidfuzz")
    tools = WebShopTools

    def __init__(self, products: int = 500, results: int = 10, goals: str = "human", **limits: Any):
        super().__init__(**limits)
        limits_named = "max_turns" if self.max_total_actions is None else "max_total_actions"
        check_count(limits_named, self.longest, FEWEST_TURNS, 100)
        check_choice("max_actions", self.max_actions, (1,))
        check_count("products", products, 50, 10_000)
        check_count("results", results, 1, 20)
        check_choice("goals", goals, GOALS)
        self.products = products
        self.results = results
        self.goals = goals

    def tasks(self, seed: int, split: str, data: str | None) -> Iterator[dict[str, Any]]:
        stream = random.Random(f"{self.name}/{split}/{seed}")
        if data is not None:
            numbered = split_goals(load_goals(data, self.goals), split)
            stream.shuffle(numbered)
            yield from (row_of(number, data, goal) for number, goal in numbered)
            return
        while True:
            goal_seed = stream.getrandbits(31)
            goal = self.make_goal(goal_seed)
            if held_out(identity(goal)) == (split == "test"):
                yield row_of(goal_seed, "", goal)

    def make_goal(self, seed: int) -> Goal:
        """The goal of a seed: one whose product a search for the goal's own words finds within the limits."""
        rng = random.Random(seed)
        catalogue = generate_catalogue(self.products)
        spare = self.longest - FEWEST_TURNS
        while True:
            goal = draw_goal(catalogue, spare, rng)
            hits = catalogue.search(wish_words(goal, catalogue.products[goal.asin]))
            pages = spare - len(goal.options) + 1
            if goal.asin in hits[: pages * self.results]:
                return goal

    def episode(self, row: Row, rng: random.Random) -> WebShopEpisode:
        """A new visit.

        Raises:
            ValueError: If the shop of the row does not sell what is wanted, or its files are missing.
        """
        return WebShopEpisode(*self.shop_and_goal(row), self.results)

    def shop_and_goal(self, row: Row) -> tuple[Catalogue, Goal]:
        """What is on sale, and what is wanted."""
        catalogue = load_catalogue(row["catalogue"]) if row["catalogue"] else generate_catalogue(self.products)
        if row["asin"] not in catalogue.products:
            shop = row["catalogue"] or f"the generated catalogue of {self.products} products"
            raise ValueError(f"asin must be a product of {shop}, got {row['asin']!r}")
        return catalogue, Goal(
            row["asin"], row["instruction"], tuple(row["attributes"]), tuple(row["options"]), row["price_upper"]
        )

    def instructions(self) -> str:
        actions = (
            "Search, and click what stands in [brackets]: products, options, buttons."
            if self.protocol == "tools"
            else "Actions: search[words], on any page, and click[x], where x stands in [brackets] on the page."
        )
        return (
            "You are in a web shop. Find the product that is wanted, choose the wanted options and buy it. "
            f"{actions} To click buy now ends the visit and gives 0 to 1: the share of the wishes (attributes, "
            "options, price) that are met, less for another type of product."
        )


def row_of(seed: int, catalogue: str, goal: Goal) -> dict[str, Any]:
    """A goal as plain columns; `catalogue` is where WebShop's files are, empty for the generated catalogue."""
    return {
        "seed": seed,
        "catalogue": catalogue,
        "asin": goal.asin,
        "instruction": goal.instruction,
        "attributes": list(goal.attributes),
        "options": list(goal.options),
        "price_upper": goal.price_upper,
    }
