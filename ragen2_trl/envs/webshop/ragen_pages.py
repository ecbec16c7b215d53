"""The pages of RAGEN-2's WebShop: a page's texts in a row, advice, and the names of what can be done."""

from collections.abc import Sequence

from ragen2_trl.envs.webshop.catalogue import Catalogue, Goal, Product
from ragen2_trl.envs.webshop.visit import BACK, Rules, WebShopEpisode

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


class RagenVisit(WebShopEpisode):
    """A visit whose pages are RAGEN-2's: chosen options are not shown, and every page that has results has a next one.

    Args:
        catalogue: What is on sale.
        goal: What is wanted.
        rules: How the visit goes and what a purchase is worth.
        advice: What stands between a page and the names of actions.
    """

    sub_pages = ("description", "features", "reviews")

    def __init__(self, catalogue: Catalogue, goal: Goal, rules: Rules, advice: str):
        self._advice = advice
        self._began = False  # the page that a visit begins with is not the one that its search page has later
        super().__init__(catalogue, goal, rules)

    def _has_next(self, hits: list[str]) -> bool:
        return bool(self._shown_hits())

    def _sub_page_texts(self, product: Product) -> Sequence[str]:
        return [] if self.sub_page == "reviews" else super()._sub_page_texts(product)  # nobody reviews anything

    def step(self, action: str) -> float:
        reward = super().step(action)
        self._began = self._began or self.hits is not None or self.product is not None
        return reward

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
