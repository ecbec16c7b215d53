"""One visit to WebShop: what can be clicked, what comes of it and what is seen."""

import random
from collections.abc import Hashable, Sequence
from typing import ClassVar

from ragen2_trl.envs.episode import Episode
from ragen2_trl.envs.responses import bracketed
from ragen2_trl.envs.webshop.catalogue import Catalogue, Goal, Product, fits, score

BACK, NEXT, PREVIOUS, BUY = "back to search", "next >", "< prev", "buy now"
SUB_PAGES = ("description", "features")

_MAX_INSTRUCTION, _MAX_TITLE, _MAX_OPTIONS, _MAX_TEXT = 600, 100, 1200, 1500  # characters that a page shows


class WebShopEpisode(Episode):
    """One visit to the shop.

    Args:
        catalogue: What is on sale.
        goal: What is wanted.
        results: Products on a page of results.
    """

    sub_pages: ClassVar[tuple[str, ...]] = SUB_PAGES

    def __init__(self, catalogue: Catalogue, goal: Goal, results: int = 10):
        self._catalogue = catalogue
        self._results = results
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
        return self.can(action)

    def can(self, action: str) -> bool:
        """Whether the page allows an action."""
        verb, what = _parse(action)
        if verb == "search":
            return bool(what)
        return verb == "click" and self._button(what) is not None

    def _button(self, what: str) -> str | None:
        return next((button for button in self.buttons() if button.lower() == what), None)

    def step(self, action: str) -> float:
        """Searches or clicks. The score, 0.0 to 1.0, at "buy now", else 0.0."""
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
            reward = score(self.product, self.chosen, self.goal, self.wanted, self.fits)
            self.done, self.success = True, reward >= 1
            return reward
        else:
            self._click_product(self.product, button)
        return 0.0

    def fits(self, kind: str, value: str, option: str) -> bool:
        """Whether a choice is a wanted option."""
        return fits(kind, value, option)

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

    def snapshot(self) -> Hashable:
        asin = self.product.asin if self.product else None
        hits = None if self.hits is None else tuple(self.hits)
        return hits, self.page, asin, self.sub_page, tuple(self.chosen.items())

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


def wish_words(goal: Goal, wanted: Product) -> str:
    """The wanted attributes and the type of product, for a search."""
    return " ".join([*goal.attributes, wanted.query])


def _parse(action: str) -> tuple[str, str]:
    """The verb and what stands in its brackets, in lower case; two empty strings for another form."""
    verb, what = bracketed(action)
    return verb, " ".join(what.lower().split())


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
