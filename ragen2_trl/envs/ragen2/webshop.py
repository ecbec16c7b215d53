"""WebShop as RAGEN-2 plays it: a page's texts in a row, advice, names of what can be done; success alone pays."""

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from ragen2_trl.envs.episode import Limits
from ragen2_trl.envs.ragen2.protocol import RagenProtocol
from ragen2_trl.envs.tasks import Row
from ragen2_trl.envs.webshop.catalogue import Catalogue, Goal, Product, alike
from ragen2_trl.envs.webshop.environment import WebShop, row_of
from ragen2_trl.envs.webshop.files import TEST, VALIDATION, load_goals
from ragen2_trl.envs.webshop.visit import BACK, WebShopEpisode

_SEPARATOR = " [SEP] "

# The query of the example is not for what its instruction asks, as in RAGEN-2.
INSTRUCTION = (
    "You are in an online shop and are to buy a product that comes close to an instruction. Search for it, read the "
    "results, pick one, choose its size and color, and buy it. Take only actions that are listed.  Example, for an "
    "instruction that asks for a green rain jacket: <answer>search[wool sweater blue]</answer>. An action has one of "
    "two forms: search[<keywords>] or click[<clickable>]."
)
ADVICE = "\n".join(
    (
        "Buy something within 10 actions; it need not be perfect.",
        "Leave size and color out of what you search for.",
        "Search twice at most.",
        "A product that is close enough is good enough.",
        "Rather take a product of this page than go on to the next page.",
        "Hardly ever click next more than twice.",
        "Hardly ever go back.",
        "With fewer than three actions left, buy the first product you see.",
        "Click a size, then a color, then buy now, unless one action is left; never click the description.",
    )
)


class RagenWebShopEpisode(WebShopEpisode):
    """A visit whose pages are RAGEN's: chosen options are not shown, and every page that has results has a next one.

    Text that the page does not allow uses up an action and costs nothing, and some words of an option suffice.

    Args:
        catalogue: What is on sale.
        goal: What is wanted.
        advice: What stands between a page and the names of actions.
    """

    sub_pages = ("description", "features", "reviews")

    def __init__(self, catalogue: Catalogue, goal: Goal, advice: str):
        self._advice = advice
        self._began = False  # the page that a visit begins with is not the one that its search page has later
        super().__init__(catalogue, goal)

    def _has_next(self, hits: list[str]) -> bool:
        return bool(self._shown_hits())

    def _sub_page_texts(self, product: Product) -> Sequence[str]:
        return [] if self.sub_page == "reviews" else super()._sub_page_texts(product)  # nobody reviews anything

    def is_action(self, action: str) -> bool:
        return bool(action.strip())

    def step(self, action: str) -> float:
        """Searches or clicks: 1.0 for a purchase without fault, else 0.0. What cannot be done changes nothing."""
        if self.can(action):
            super().step(action)
        self._began = self._began or self.hits is not None or self.product is not None
        return float(self.success)

    def fits(self, kind: str, value: str, option: str) -> bool:
        return fits_words(value, option, self.wanted)

    def observation(self) -> str:
        page = _SEPARATOR.join(self._texts()) if self._began else f"Instruction: {self.goal.instruction}"
        return f"{page}.{self._advice}\n{', '.join(self.names())}"

    def names(self) -> list[str]:
        """The actions of the page: buttons first, then products or values of options."""
        buttons = self.buttons()
        if not buttons:
            return ["search[<content>]"]
        fixed = len(buttons) - 1 - buttons[::-1].index(BACK)  # a value may have that name, too
        return [f"click[{name.lower()}]" for name in (*buttons[fixed:], *buttons[:fixed])]

    def _texts(self) -> list[str]:
        wish = ["Instruction:", self.goal.instruction]
        if self.hits is None:
            return ["WebShop", *wish, "Search"]
        if self.product is None:
            return [*wish, "Back to Search", *self._result_texts(self.hits)]
        if self.sub_page is not None:
            return [*wish, "Back to Search", "< Prev", *self._sub_page_texts(self.product)]
        return [*wish, "Back to Search", "< Prev", *_product_texts(self.product)]

    def _result_texts(self, hits: list[str]) -> list[str]:
        texts = [f"Page {self.page + 1} (Total results: {len(hits)})"]
        texts += [text for text in ("< Prev", "Next >") if text.lower() in self.buttons()]
        for asin in self._shown_hits():
            product = self._catalogue.products[asin]
            texts += [asin, product.title, f"${product.price}"]
        return texts


def _product_texts(product: Product) -> list[str]:
    options = [text for kind, values in product.options.items() for text in (kind, *filter(None, values))]
    last = ["Rating: N.A.", "Description", "Features", "Reviews", "Buy Now"]
    return [*options, product.title, f"Price: ${product.price}", *last]


def fits_words(value: str, option: str, wanted: Product) -> bool:
    """WebShop's comparison: whether a chosen value is like the wanted option with its kind, or some of its words."""
    kinds = [kind for kind, values in wanted.options.items() if option in values] or [""]
    return any(alike(value, f"{kind} {option}") for kind in kinds)


def numbered_goal(goals: Sequence[Goal], seed: int, split: str) -> Goal:
    """RAGEN's goal of a seed: its test goals are the thousand that WebShop validates on, in an order of its own.

    Raises:
        ValueError: If there are no goals beyond those of test and validation.
    """
    held = TEST + VALIDATION
    if len(goals) <= held:
        raise ValueError(f"data must hold more than {held} goals with split='ragen2', got {len(goals)}")
    place = seed % VALIDATION + TEST if split == "test" else seed % (len(goals) - held) + held
    return goals[_order(len(goals))[place]]


@lru_cache(maxsize=2)
def _order(num_goals: int) -> list[int]:
    order = list(range(num_goals))
    random.Random(42).shuffle(order)
    return order


class RagenWebShop(RagenProtocol, WebShop):
    """WebShop as RAGEN-2 plays it: 1.0 for a purchase that meets all wishes, else 0.0.

    Args:
        **options: Those of `RagenProtocol`, and `products` of `WebShop`.
    """

    limits = Limits(turns=9, actions=1)
    max_total, turn_tokens = 9, 400
    fixed = MappingProxyType({"results": 10, "goals": "synthetic"})

    def texts(self) -> dict[str, str]:
        return {"instruction": INSTRUCTION, "advice": ADVICE, "length": "Use no more than 200 words."}

    def numbered_tasks(self, seeds: Iterator[int], split: str, data: str | None) -> Iterator[dict[str, Any]]:
        """RAGEN-2's goals by seed; its test goals are those that WebShop validates on."""
        data = self.source(data, "WebShop's own folder")
        goals = load_goals(data, self.goals)
        return (row_of(seed, data, numbered_goal(goals, seed, split)) for seed in seeds)

    def episode(self, row: Row, rng: random.Random) -> RagenWebShopEpisode:
        return RagenWebShopEpisode(*self.shop_and_goal(row), self.text("advice"))
