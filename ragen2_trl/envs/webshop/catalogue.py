"""WebShop's products and goals, the search, and the score of a purchase.

After Yao et al. 2022 (arXiv 2207.01206). Prices and price limits are functions of the data alone, so that every member
of a group sees the same shop.
"""

import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ragen2_trl.envs.bm25 import best, load_bm25s, stop_words

MAX_RESULTS = 50  # what a search returns, over all its pages
NO_LIMIT = 1_000_000.0  # dollars; where a goal has no price limit

_STEPS = tuple(10.0 * step for step in range(1, 100))  # dollars; price limits are among these
_MAX_QUERY_CHARS, _MAX_QUERY_TOKENS = 1000, 40
_SAME = 85  # percent; above, two names of an attribute or an option are the same
_PRICE_WORDS = ", and price lower than "
Fits: TypeAlias = Callable[[str, str, str], bool]  # (kind, chosen value, wanted option) -> whether it will do
LEVEL = "\u203a"  # an angle, between the levels of a category


@dataclass(frozen=True)
class Product:
    """What is on sale.

    Args:
        asin: The id.
        title: Its name.
        query: The search that it was collected under, a type of product.
        category: From the general to the special, separated by an angle, U+203A.
        price: Dollars.
        attributes: What it is known to be; never shown as such.
        features: Lines of the page "features".
        description: Text of the page "description".
        options: Kind of option (such as color) to the values there are, all in lower case.
    """

    asin: str
    title: str
    query: str
    category: str
    price: float
    attributes: tuple[str, ...]
    features: tuple[str, ...]
    description: str
    options: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Goal:
    """What is wanted: a product in words, its attributes, option values and the highest price in dollars."""

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_upper: float


class Catalogue:
    """Products and the search over them.

    Args:
        products: At least one, each with an id of its own.
        only_shown: Whether words are searched where WebShop does, and not in all that is known of a product.
    """

    def __init__(self, products: Sequence[Product], only_shown: bool = False):
        self.products = {product.asin: product for product in products}
        self._asins = list(self.products)
        self._index = load_bm25s("webshop").BM25(method="lucene", k1=0.9, b=0.4)  # the settings of WebShop's Lucene
        searched = webshop_text if only_shown else whole_text
        self._index.index([tokens(searched(product)) for product in products], show_progress=False)

    def search(self, query: str) -> list[str]:
        """Ids of up to `MAX_RESULTS` products that share a word with `query`, best first, ties in catalogue order."""
        words = tokens(query[:_MAX_QUERY_CHARS])[:_MAX_QUERY_TOKENS]
        if not words:
            return []
        return [self._asins[index] for index in best(self._index.get_scores(words), MAX_RESULTS)]


def tokens(text: str) -> list[str]:
    """Words for search and comparison: lower case, no stop words, no plural s.

    >>> tokens("Shoes for the Rain, 2 Pairs")
    ['shoe', 'rain', '2', 'pair']
    """
    words = (word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in stop_words("webshop"))
    return [word[:-1] if len(word) > 3 and word.endswith("s") and word[-2] != "s" else word for word in words]


def whole_text(product: Product) -> str:
    return " ".join([webshop_text(product), *product.attributes, *product.features[1:]])


def webshop_text(product: Product) -> str:
    """What WebShop searches in: not the attributes, from which wishes are made, and of the features the first."""
    values = itertools.chain.from_iterable(product.options.values())
    return " ".join([product.title, product.description, *product.features[:1], *values])


# The score


def alike(first: str, second: str) -> bool:
    """Whether two names of an attribute or an option are the same, give or take spelling."""
    from rapidfuzz import fuzz, utils

    return fuzz.token_set_ratio(first, second, processor=utils.default_process) > _SAME


def fits(kind: str, value: str, option: str) -> bool:
    """Whether a chosen value is the wanted option: sizes to the letter, others give or take spelling."""
    value, option = value.lower(), option.lower()
    return value == option or (kind != "size" and alike(value, option))


def score(product: Product, chosen: Mapping[str, str], goal: Goal, wanted: Product, fits_option: Fits = fits) -> float:
    """The paper's dense reward of a purchase, 0.0 to 1.0; 1.0 is success.

    `type_factor` times the share of met wishes, where each attribute, each option and the price is a wish. Unlike in
    the original, an option counts only where its choice fits: there, any chosen value that stands in the product's
    text counts as met, too, even several for one wish.

    Args:
        product: What is bought.
        chosen: Kind of option to the chosen value.
        goal: What is wanted.
        wanted: The product that the goal was made from.
        fits_option: Whether a choice, its kind and value, is a wanted option.
    """
    attributes = sum(has_attribute(product, attribute) for attribute in goal.attributes)
    options = sum(any(fits_option(kind, value, option) for kind, value in chosen.items()) for option in goal.options)
    cheap_enough = product.price <= goal.price_upper
    wishes = len(goal.attributes) + len(goal.options) + 1
    return type_factor(product, wanted) * (attributes + options + cheap_enough) / wishes


def type_factor(product: Product, wanted: Product) -> float:
    """1.0 for a product of the wanted type, 0.5, 0.1 or 0.0 for one further and further from it.

    The overlap is the share of the wanted title's words, those of its attributes left out, that the title has, too.
    The original compares the words that spaCy tags as nouns; both mean the words that say what the thing is.
    """
    apart = set(tokens(" ".join(wanted.attributes)))
    words = {word for word in tokens(wanted.title) if word not in apart and not word.isdigit()}
    overlap = len(words & set(tokens(product.title))) / len(words) if words else 0.2
    if overlap < 0.1:
        return 0.1 if overlap > 0 else 0.0
    same_category = len(_levels(product) & _levels(wanted)) >= 2
    return 1.0 if product.query == wanted.query or same_category or overlap > 0.2 else 0.5


def _levels(product: Product) -> set[str]:
    return {level.strip() for level in product.category.split(LEVEL)}


def has_attribute(product: Product, attribute: str) -> bool:
    """Whether the product is known for an attribute, give or take spelling, or its text names it."""
    if any(alike(known, attribute) for known in product.attributes):
        return True
    return any(attribute.lower() in text.lower() for text in (product.title, *product.features, product.description))


# Wishes in words


def identity(goal: Goal) -> str:
    """The wish in words except for its price: goals that read alike belong to one split, whatever their product."""
    return goal.instruction.partition(_PRICE_WORDS)[0].lower()


def price_limit(price: float, rng: random.Random) -> float:
    """A multiple of ten dollars above `price`: the larger of two among the next four, or `NO_LIMIT` near 1000."""
    above = [step for step in _STEPS if step > price][:4]
    return max(rng.sample(above, 2)) if len(above) >= 2 else NO_LIMIT


def instruct(what: str, options: Mapping[str, str], price_upper: float) -> str:
    """An instruction in WebShop's words.

    >>> instruct("find me shoes", {"color": "red"}, 40.0)
    'find me shoes with color: red, and price lower than 40.00 dollars'
    """
    wishes = ", and ".join(f"{kind}: {value}" for kind, value in options.items())
    return f"{what}{' with ' if wishes else ''}{wishes}{_price_words(price_upper)}"


def _price_words(price_upper: float) -> str:
    return f"{_PRICE_WORDS}{price_upper:.2f} dollars" if price_upper < NO_LIMIT else ""
