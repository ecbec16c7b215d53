"""WebShop: find a product in a shop by its description, choose its options and buy it.

A compact engine after Yao et al. 2022 (arXiv 2207.01206): its pages, its dense score and its goals, over its own files
or a generated catalogue. Unlike there, the price that is shown is the one that counts, and nobody reviews anything.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ragen2_trl.envs.base import Environment
from ragen2_trl.envs.checks import check_choice, check_count
from ragen2_trl.envs.episode import Episode, Limits
from ragen2_trl.envs.tasks import Row, held_out
from ragen2_trl.envs.tools import ToolEnvironment
from ragen2_trl.envs.webshop.catalogue import OPTION_MATCHES, Catalogue, Goal, Product, fits, identity, score
from ragen2_trl.envs.webshop.files import GOALS, load_catalogue, load_goals, split_goals
from ragen2_trl.envs.webshop.generator import draw_goal, generate_catalogue

BACK, NEXT, PREVIOUS, BUY = "back to search", "next >", "< prev", "buy now"
SUB_PAGES = ("description", "features")
FEWEST_TURNS = 3  # to search, to open a product, to buy it

_MAX_INSTRUCTION, _MAX_TITLE, _MAX_OPTIONS, _MAX_TEXT = 600, 100, 1200, 1500  # characters that a page shows


@dataclass(frozen=True)
class Rules:
    """How a visit goes and what a purchase is worth; the fields are the options of `WebShop`."""

    results: int = 10
    reward: str = "score"
    option_match: str = "exact"
    bad_clicks: str = "invalid"


class WebShopEpisode(Episode):
    """One visit to the shop.

    Args:
        catalogue: What is on sale.
        goal: What is wanted.
        rules: How the visit goes and what a purchase is worth.
    """

    sub_pages: ClassVar[tuple[str, ...]] = SUB_PAGES

    def __init__(self, catalogue: Catalogue, goal: Goal, rules: Rules):
        self._catalogue = catalogue
        self._rules = rules
        self._results = rules.results
        self.goal = goal
        self.wanted = catalogue.products[goal.asin]
        self._leave()

    def _leave(self) -> None:
        """Goes to the search page."""
        self.hits: list[str] | None = None  # what the last search found; None on the search page
        self.page = 0  # of the results
        self.product: Product | None = None  # whose page is open
        self.sub_page: str | None = None  # of the product's page
        self.chosen: dict[str, str] = {}  # kind of option to value

    # What there is to do

    def buttons(self) -> list[str]:
        """What can be clicked, as it is shown."""
        if self.product is not None and self.sub_page is not None:
            return [BACK, PREVIOUS]
        if self.product is not None:
            values = [value for values in self.product.options.values() for value in values if value]
            return [*dict.fromkeys(values), BACK, PREVIOUS, *self.sub_pages, BUY]
        if self.hits is not None:
            earlier, later = self.page > 0, self._has_next(self.hits)
            return [*self._shown_hits(), BACK, *([PREVIOUS] if earlier else []), *([NEXT] if later else [])]
        return []

    def _has_next(self, hits: list[str]) -> bool:
        return len(hits) > (self.page + 1) * self._results

    def is_action(self, action: str) -> bool:
        if self._rules.bad_clicks == "ignored":
            return bool(action.strip())
        return self._can(action)

    def _can(self, action: str) -> bool:
        verb, what = _parse(action)
        if verb == "search":
            return bool(what)
        return verb == "click" and self._button(what) is not None

    def _button(self, what: str) -> str | None:
        return next((button for button in self.buttons() if button.lower() == what), None)

    def step(self, action: str) -> float:
        """Searches or clicks. The score, 0.0 to 1.0, at "buy now", else 0.0. What cannot be done changes nothing."""
        if not self._can(action):
            return 0.0
        verb, what = _parse(action)
        button = self._button(what) if verb == "click" else None
        if button is None:
            self._leave()
            self.hits = self._catalogue.search(what)
        elif button == BACK:
            self._leave()
        elif self.product is None:
            self._click_results(button)
        elif button == BUY:
            reward = score(self.product, self.chosen, self.goal, self.wanted, self._rules.option_match)
            self.done, self.success = True, reward >= 1
            return float(self.success) if self._rules.reward == "success" else reward
        else:
            self._click_product(self.product, button)
        return 0.0

    def _click_results(self, button: str) -> None:
        if button in (NEXT, PREVIOUS):
            self.page += 1 if button == NEXT else -1
        else:
            self.product = self._catalogue.products[button]

    def _click_product(self, product: Product, button: str) -> None:
        if button == PREVIOUS and self.sub_page is None:
            self.product, self.chosen = None, {}
        elif button == PREVIOUS:
            self.sub_page = None
        elif button in self.sub_pages:
            self.sub_page = button
        else:
            kinds = [kind for kind, values in product.options.items() if button in values]
            # Where several kinds have a value, a click is for the first that is open, so that each can be chosen.
            kind = next((kind for kind in kinds if kind not in self.chosen), kinds[0])
            self.chosen[kind] = button

    def _shown_hits(self) -> list[str]:
        return (self.hits or [])[self.page * self._results : (self.page + 1) * self._results]

    # What is seen

    def observation(self) -> str:
        wanted = f"Wanted: {_cut(self.goal.instruction, _MAX_INSTRUCTION)}"
        if self.product is not None and self.sub_page is not None:
            return "\n".join([wanted, *self._sub_page_lines(self.product), _brackets([BACK, PREVIOUS])])
        if self.product is not None:
            buttons = _brackets([BACK, PREVIOUS, *self.sub_pages, BUY])
            return "\n".join([wanted, *self._product_lines(self.product), buttons])
        if self.hits is not None:
            return "\n".join([wanted, *self._result_lines(self.hits)])
        return f"{wanted}\nSearch page."

    def _result_lines(self, hits: list[str]) -> list[str]:
        shown = [self._catalogue.products[asin] for asin in self._shown_hits()]
        pages = max(1, -(-len(hits) // self._results))
        lines = [f"[{item.asin}] ${item.price:.2f} {_cut(item.title, _MAX_TITLE)}" for item in shown]
        title = f"Results, page {self.page + 1} of {pages}:" if hits else "Nothing found."
        return [title, *lines, _brackets(self.buttons()[len(shown) :])]

    def _product_lines(self, product: Product) -> list[str]:
        lines = [f"{_cut(product.title, 2 * _MAX_TITLE)}", f"Price: ${product.price:.2f}"]
        for kind, values in product.options.items():
            chosen = f" (chosen: {self.chosen[kind]})" if kind in self.chosen else ""
            buttons = list(dict.fromkeys(value for value in values if value))
            lines.append(f"{kind}: {_brackets(buttons, _MAX_OPTIONS // len(product.options))}{chosen}")
        return lines

    def _sub_page_lines(self, product: Product) -> list[str]:
        return [_cut("\n".join(self._sub_page_texts(product)), _MAX_TEXT) or f"No {self.sub_page}."]

    def _sub_page_texts(self, product: Product) -> Sequence[str]:
        return product.features if self.sub_page == "features" else [product.description]

    # Players

    def plan(self, rng: random.Random) -> tuple[str, list[str]]:
        """The way to the product that the goal was made from, which it knows, to its options and to the purchase."""
        if self.product is self.wanted:
            choices = self._choices()
            reasoning = (
                f"Still to choose: {', '.join(_parse(click)[1] for click in choices)}."
                if choices
                else "All is as wanted: buy it."
            )
            return reasoning, [*([f"click[{PREVIOUS}]"] if self.sub_page else []), *choices, f"click[{BUY}]"]
        last = [f"click[{self.wanted.asin}]", *self._choices(), f"click[{BUY}]"]
        page = self._page_of(self.hits) if self.hits is not None and self.product is None else None
        if page is None:
            query = self._query()
            page = self._page_of(self._catalogue.search(query)) or 0
            return f"Look for {query}.", [f"search[{query}]", *[f"click[{NEXT}]"] * page, *last]
        turns = [f"click[{NEXT if page > self.page else PREVIOUS}]"] * abs(page - self.page)
        reasoning = "None of these, see the other results." if turns else f"{self.wanted.asin} looks right, open it."
        return reasoning, [*turns, *last]

    def _page_of(self, hits: list[str]) -> int | None:
        return hits.index(self.goal.asin) // self._results if self.goal.asin in hits else None

    def _query(self) -> str:
        """The goal's own words, or the title where that is found sooner."""

        def page(query: str) -> float:
            found = self._page_of(self._catalogue.search(query))
            return float("inf") if found is None else found

        return min(wish_words(self.goal, self.wanted), self.wanted.title, key=page)

    def _choices(self) -> list[str]:
        """Clicks on the wanted product's page that are missing."""
        chosen, clicks = dict(self.chosen) if self.product is self.wanted else {}, []
        for option in self.goal.options:
            offers = [
                (kind, value)
                for kind, values in self.wanted.options.items()
                for value in values
                if fits(kind, value, option)
            ]
            if offers and not any(offer in offers for offer in chosen.items()):
                kind, value = min(offers, key=lambda offer: (offer[0] in chosen, offer[1] != option))
                chosen[kind] = value
                clicks.append(f"click[{value}]")
        return clicks

    def random_action(self, rng: random.Random) -> str:
        """Any button, or with the chance of one a search for a word of the instruction."""
        buttons = self.buttons()
        place = rng.randrange(len(buttons) + 1)
        if place < len(buttons):
            return f"click[{buttons[place]}]"
        return f"search[{rng.choice(self.goal.instruction.split())}]"


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
        reward: What a purchase earns: `"score"`, or `"success"`, 1.0 where the score is 1 and else 0.0, as in RAGEN-2.
        option_match: When a choice fits: `"exact"`, or `"words"`, WebShop's own: `large` will do for `x-large` (see
            `score`).
        bad_clicks: What is done with text that the page does not allow: `"invalid"`, or `"ignored"`, where it uses up
            an action and costs nothing, as in RAGEN-2.
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
    tools = WebShopTools

    def __init__(
        self,
        products: int = 500,
        results: int = 10,
        goals: str = "human",
        reward: str = "score",
        option_match: str = "exact",
        bad_clicks: str = "invalid",
        **limits: Any,
    ):
        super().__init__(**limits)
        check_count("max_turns", self.max_turns, FEWEST_TURNS, 100)
        check_choice("max_actions", self.max_actions, (1,))
        check_count("products", products, 50, 10_000)
        check_count("results", results, 1, 20)
        check_choice("goals", goals, GOALS)
        check_choice("reward", reward, ("score", "success"))
        check_choice("option_match", option_match, OPTION_MATCHES)
        check_choice("bad_clicks", bad_clicks, ("invalid", "ignored"))
        self.products = products
        self.results = results
        self.rules = Rules(results, reward, option_match, bad_clicks)
        self.goals = goals

    def tasks(self, seed: int, split: str, data: str | None) -> Iterator[dict[str, Any]]:
        stream = random.Random(f"{self.name}/{split}/{seed}")
        if data is not None:
            numbered = split_goals(load_goals(data, self.goals), split)
            stream.shuffle(numbered)
            yield from (_row(number, data, goal) for number, goal in numbered)
            return
        while True:
            goal_seed = stream.getrandbits(31)
            goal = self.make_goal(goal_seed)
            if held_out(identity(goal)) == (split == "test"):
                yield _row(goal_seed, "", goal)

    def make_goal(self, seed: int) -> Goal:
        """The goal of a seed: one whose product a search for the goal's own words finds within the turns."""
        rng = random.Random(seed)
        catalogue = generate_catalogue(self.products)
        while True:
            goal = draw_goal(catalogue, self.max_turns - FEWEST_TURNS, rng)
            hits = catalogue.search(wish_words(goal, catalogue.products[goal.asin]))
            pages = self.max_turns - FEWEST_TURNS - len(goal.options) + 1
            if goal.asin in hits[: pages * self.results]:
                return goal

    def episode(self, row: Row, rng: random.Random) -> WebShopEpisode:
        """A new visit.

        Raises:
            ValueError: If the shop of the row does not sell what is wanted, or its files are missing.
        """
        catalogue = load_catalogue(row["catalogue"]) if row["catalogue"] else generate_catalogue(self.products)
        if row["asin"] not in catalogue.products:
            shop = row["catalogue"] or f"the generated catalogue of {self.products} products"
            raise ValueError(f"asin must be a product of {shop}, got {row['asin']!r}")
        goal = Goal(
            row["asin"], row["instruction"], tuple(row["attributes"]), tuple(row["options"]), row["price_upper"]
        )
        return WebShopEpisode(catalogue, goal, self.rules)

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


def _row(seed: int, catalogue: str, goal: Goal) -> dict[str, Any]:
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


def wish_words(goal: Goal, wanted: Product) -> str:
    """The wanted attributes and the type of product, for a search."""
    return " ".join([*goal.attributes, wanted.query])


def _parse(action: str) -> tuple[str, str]:
    """The verb and what stands in its brackets, in lower case; two empty strings for another form."""
    verb, _, rest = action.strip().partition("[")
    if not rest.endswith("]"):
        return "", ""
    return verb.strip().lower(), " ".join(rest[:-1].lower().split())


def _brackets(buttons: Sequence[str], limit: int = _MAX_TEXT) -> str:
    """Buttons in brackets up to `limit` characters; the rest are counted, and can be clicked all the same."""
    shown, length = 0, 0
    for button in buttons:
        length += len(button) + 3
        if length > limit:
            break
        shown += 1
    more = f" and {len(buttons) - shown} more" if shown < len(buttons) else ""
    return " ".join(f"[{button}]" for button in buttons[:shown]) + more


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
