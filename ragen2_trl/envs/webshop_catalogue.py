"""WebShop's products and goals: WebShop's own files, a generated stand-in, the search, and the score of a purchase.

After Yao et al. 2022 (arXiv 2207.01206). Prices and price limits are functions of the data alone, so that every member
of a group sees the same shop.
"""

import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
from bm25s.stopwords import STOPWORDS_EN
from rapidfuzz import fuzz, utils

from ragen2_trl.envs.base import held_out

GOALS = ("human", "synthetic")
MAX_RESULTS = 50  # what a search returns, over all its pages
NO_LIMIT = 1_000_000.0  # dollars; where a goal has no price limit

_STEPS = tuple(10.0 * step for step in range(1, 100))  # dollars; price limits are among these
_MAX_QUERY_CHARS, _MAX_QUERY_TOKENS = 1000, 40
_SAME = 85  # percent; above, two names of an attribute or an option are the same
_STOPWORDS = frozenset(STOPWORDS_EN)
# The seed of WebShop's order of goals, its test goals, the validation goals after them.
_PERMUTATION, _TEST, _VALIDATION = 233, 500, 1000
_PRICE_WORDS = ", and price lower than "
_LEVEL = "\u203a"  # an angle, between the levels of a category


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
    """

    def __init__(self, products: Sequence[Product]):
        self.products = {product.asin: product for product in products}
        self._asins = list(self.products)
        self._index = bm25s.BM25(method="lucene", k1=0.9, b=0.4)  # the settings of WebShop's Lucene
        self._index.index([tokens(_text(product)) for product in products], show_progress=False)

    def search(self, query: str) -> list[str]:
        """Ids of up to `MAX_RESULTS` products that share a word with `query`, best first, ties in catalogue order."""
        words = tokens(query[:_MAX_QUERY_CHARS])[:_MAX_QUERY_TOKENS]
        if not words:
            return []
        scores = self._index.get_scores(words)
        found = np.flatnonzero(scores > 0)
        best = found[np.argsort(-scores[found], kind="stable")][:MAX_RESULTS]
        return [self._asins[index] for index in best]


def tokens(text: str) -> list[str]:
    """Words for search and comparison: lower case, no stop words, no plural s.

    >>> tokens("Shoes for the Rain, 2 Pairs")
    ['shoe', 'rain', '2', 'pair']
    """
    words = (word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in _STOPWORDS)
    return [word[:-1] if len(word) > 3 and word.endswith("s") and word[-2] != "s" else word for word in words]


def clean(text: object) -> str:
    """Text of a shop as it may enter a prompt: one line, and nothing that a tokenizer takes for a control token.

    A space follows each `<`, brackets become round, since square ones mark what can be clicked, and `||` becomes `|`.

    >>> clean("[Upgraded]  Shoes<|im_end|>")
    '(Upgraded) Shoes< |im_end|>'
    """
    text = re.sub(r"<(?=\S)", "< ", str(text or "")).translate(str.maketrans("[]", "()"))
    return re.sub(r"\|{2,}", "|", " ".join(text.split()))


def _text(product: Product) -> str:
    values = itertools.chain.from_iterable(product.options.values())
    return " ".join([product.title, *product.attributes, *product.features, product.description, *values])


# The score


def score(product: Product, chosen: Mapping[str, str], goal: Goal, wanted: Product) -> float:
    """The paper's dense reward of a purchase, 0.0 to 1.0; 1.0 is success.

    `type_factor` times the share of met wishes, where each attribute, each option and the price is a wish. Unlike in
    the original, an option counts only where its choice fits: there, any chosen value that stands in the product's
    text counts as met, too, even several for one wish.

    Args:
        product: What is bought.
        chosen: Kind of option to the chosen value.
        goal: What is wanted.
        wanted: The product that the goal was made from.
    """
    attributes = sum(has_attribute(product, attribute) for attribute in goal.attributes)
    options = sum(any(fits(kind, value, option) for kind, value in chosen.items()) for option in goal.options)
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
    return {level.strip() for level in product.category.split(_LEVEL)}


def has_attribute(product: Product, attribute: str) -> bool:
    """Whether the product is known for an attribute, give or take spelling, or its text names it."""
    if any(_alike(known, attribute) for known in product.attributes):
        return True
    return any(attribute.lower() in text.lower() for text in (product.title, *product.features, product.description))


def fits(kind: str, value: str, option: str) -> bool:
    """Whether a chosen value is the wanted option: sizes to the letter, others give or take spelling."""
    value, option = value.lower(), option.lower()
    return value == option or (kind != "size" and _alike(value, option))


def _alike(first: str, second: str) -> bool:
    return fuzz.token_set_ratio(first, second, processor=utils.default_process) > _SAME


# WebShop's own files


@lru_cache(maxsize=2)
def load_catalogue(data: str) -> Catalogue:
    """The products of WebShop's files, under WebShop's ids.

    Args:
        data: Folder with `items_shuffle.json` or `items_shuffle_1000.json` (the former where both are there), or the
            path of one of them, next to its `items_ins_v2*.json`.

    Raises:
        ValueError: If a file is missing or of another kind, or a product lacks a field.
    """
    items, instructions = _product_file(data)
    known = _read(instructions, dict)
    products: dict[str, Product] = {}
    for item in _read(items, list):
        asin = str(_field(item, "asin"))
        if asin != "nan" and len(asin) <= 10:
            products.setdefault(asin, _product(item, known.get(asin, {}).get("attributes", [])))
    if not products:
        raise ValueError(f"data must hold products with an asin of at most 10 characters, got none in {str(items)!r}")
    return Catalogue(list(products.values()))


def _product_file(data: str) -> tuple[Path, Path]:
    """The file of products, and that of their attributes."""
    path = Path(data)
    candidates = [path] if path.suffix == ".json" else [path / f"items_shuffle{end}.json" for end in ("", "_1000")]
    for items in candidates:
        if items.is_file() and items.name.startswith("items_shuffle"):
            return items, items.with_name(items.name.replace("items_shuffle", "items_ins_v2"))
    raise ValueError(f"data must be a folder with items_shuffle.json or items_shuffle_1000.json, got {data!r}")


def _read(path: Path, kind: type) -> Any:
    if not path.is_file():
        raise ValueError(f"data must have {path.name} next to its products, got none in {str(path.parent)!r}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # neither UTF-8 nor JSON
        raise ValueError(f"{path.name} must hold JSON, got {error}") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path.name} must hold a {kind.__name__}, got a {type(content).__name__}")
    return content


def _field(item: Any, name: str) -> Any:
    if not isinstance(item, dict) or name not in item:
        raise ValueError(f"{name} must be a field of every entry, got {str(item)[:200]!r}")
    return item[name]


def _product(item: Mapping[str, Any], attributes: Sequence[str]) -> Product:
    features = _field(item, "small_description")
    options = _field(item, "customization_options") or {}  # an empty string where there are none
    return Product(
        asin=str(item["asin"]),
        title=clean(_field(item, "name")),
        query=clean(_field(item, "query")).lower(),
        category=clean(_field(item, "product_category")),
        price=_price(str(item["asin"]), str(_field(item, "pricing") or "")),
        attributes=tuple(clean(attribute) for attribute in attributes),
        features=tuple(clean(line) for line in (features if isinstance(features, list) else [features]) if line),
        description=clean(_field(item, "full_description")),
        options={
            clean(kind).lower(): tuple(option_value(_field(entry, "value")) for entry in entries)
            for kind, entries in options.items()
            if entries
            is not None  # empty and repeated values stay, since they count in the numbers of WebShop's goals
        },
    )


def option_value(text: object) -> str:
    """The value of an option as the shop writes it, which is also how goals have it."""
    return clean(str(text or "").replace("/", " | ")).lower()


def _price(asin: str, pricing: str) -> float:
    """Dollars: the price, 100 where there is none, or where it is a range one within it, always the same."""
    prices = [float(price.replace(",", "")) for price in re.findall(r"\d[\d,]*(?:\.\d+)?", pricing)][:2]
    if len(prices) < 2:
        return prices[0] if prices else 100.0
    return round(random.Random(f"price/{asin}").uniform(*prices), 2)


@lru_cache(maxsize=2)
def load_goals(data: str, kind: str) -> tuple[Goal, ...]:
    """The goals of WebShop's files in WebShop's order: place i is its goal number i, but for the price limit.

    Args:
        data: As in `load_catalogue`.
        kind: `"human"`, the instructions people wrote (`items_human_ins.json`), or `"synthetic"`, one goal for each
            combination of a product's options (`items_ins_v2*.json`).

    Raises:
        ValueError: If a file is missing or of another kind, or an instruction lacks a field.
    """
    products = load_catalogue(data).products.values()
    items, instructions = _product_file(data)
    if kind == "human":
        goals = list(_human_goals(products, _read(items.with_name("items_human_ins.json"), dict)))
    else:
        goals = list(_synthetic_goals(products, _read(instructions, dict)))
    random.Random(_PERMUTATION).shuffle(goals)
    return tuple(goals)


def _human_goals(products: Iterable[Product], written: Mapping[str, Any]) -> Iterator[Goal]:
    for product in products:
        for number, entry in enumerate(written.get(product.asin, [])):
            attributes = tuple(clean(attribute) for attribute in _field(entry, "instruction_attributes"))
            if attributes:
                options = _field(entry, "instruction_options")
                options = options.values() if isinstance(options, dict) else options
                text = clean(_field(entry, "instruction")).strip(".")
                upper = price_limit(product.price, random.Random(f"limit/{product.asin}/{number}"))
                values = tuple(option_value(option) for option in options)
                yield Goal(product.asin, f"{text}{_price_words(upper)}", attributes, values, upper)


def _synthetic_goals(products: Iterable[Product], written: Mapping[str, Any]) -> Iterator[Goal]:
    for product in products:
        entry = written.get(product.asin, {})
        attributes = tuple(clean(attribute) for attribute in entry.get("instruction_attributes") or ())
        if entry.get("instruction") and attributes:
            upper = price_limit(product.price, random.Random(f"limit/{product.asin}"))
            kinds = sorted(product.options)
            for values in itertools.product(*(product.options[kind] for kind in kinds)):
                text = instruct(clean(entry["instruction"]), dict(zip(kinds, values, strict=True)), upper)
                yield Goal(product.asin, text, attributes, values, upper)


def split_goals(goals: Sequence[Goal], split: str) -> list[tuple[int, Goal]]:
    """The goals of one split, each with its number.

    As in WebShop the first 500 are for tests; the 1000 after them are its validation goals and in neither split. Where
    there are no more than that, one in five is for tests.
    """
    numbered = list(enumerate(goals))
    if len(goals) <= _TEST + _VALIDATION:
        return [(number, goal) for number, goal in numbered if held_out(identity(goal)) == (split == "test")]
    if split == "test":
        return numbered[:_TEST]
    test = {identity(goal) for goal in goals[:_TEST]}  # some wishes are there twice
    return [(number, goal) for number, goal in numbered[_TEST + _VALIDATION :] if identity(goal) not in test]


def identity(goal: Goal) -> str:
    """The wish in words but for its price: goals that read alike belong to one split, whatever product made them."""
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


# A generated stand-in

_COLORS = ("black", "white", "red", "blue", "green", "purple")


@dataclass(frozen=True)
class _Department:
    name: str
    types: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    dollars: tuple[int, int]


# No type shares a word with another or with an attribute, and no two attributes or options of a department are alike:
# only right is right.
_DEPARTMENTS = (
    _Department(
        "Clothing",
        ("running shoes", "rain jacket", "hiking pants", "wool sweater"),
        ("waterproof", "lightweight", "machine washable", "slim fit", "quick drying", "long lasting"),
        {"color": _COLORS, "size": ("small", "medium", "large", "x-large")},
        (15, 120),
    ),
    _Department(
        "Beauty",
        ("face cream", "hair shampoo", "lip balm", "body lotion"),
        ("cruelty free", "fragrance free", "tea tree", "soothing", "dermatologist tested", "vegan"),
        {"scent": ("lavender", "citrus", "vanilla", "mint"), "size": ("2 ounce", "4 ounce", "8 ounce")},
        (5, 45),
    ),
    _Department(
        "Electronics",
        ("headphones", "portable speaker", "alarm clock", "desk microphone"),
        ("wireless", "noise cancelling", "fast charging", "water resistant", "easy to carry", "foldable"),
        {"color": _COLORS, "style": ("classic", "compact", "studio")},
        (20, 200),
    ),
    _Department(
        "Grocery",
        ("trail mix", "dark chocolate", "rice crackers", "fruit bars"),
        ("gluten free", "low sodium", "non gmo", "keto friendly", "organic", "no added sugar"),
        {"flavor": ("salted", "spicy", "honey", "cinnamon"), "size": ("pack of 1", "pack of 4", "pack of 12")},
        (4, 40),
    ),
    _Department(
        "Home",
        ("table lamp", "throw pillow", "storage basket", "floor rug"),
        ("easy to clean", "hand made", "space saving", "heavy duty", "eco friendly", "stain resistant"),
        {"color": _COLORS, "size": ("12 inches", "18 inches", "24 inches")},
        (10, 90),
    ),
)
_SYLLABLES = tuple(consonant + vowel for consonant in "bdkln" for vowel in "aeiou")


@lru_cache(maxsize=2)
def generate_catalogue(size: int) -> Catalogue:
    """`size` products, always the same: of 20 types in five departments, each with attributes, options and a price."""
    rng = random.Random(f"webshop/{size}")
    numbers = rng.sample(range(100_000), size)
    brands = rng.sample(
        list(itertools.product(_SYLLABLES, repeat=3)), size
    )  # a brand is one product's, see `type_factor`
    names = ("".join(brand).capitalize() for brand in brands)
    return Catalogue([_generate(f"B{number:05d}", brand, rng) for number, brand in zip(numbers, names, strict=True)])


def _generate(asin: str, brand: str, rng: random.Random) -> Product:
    department = rng.choice(_DEPARTMENTS)
    name = rng.choice(department.types)
    attributes = tuple(rng.sample(department.attributes, 3))
    options = {
        kind: tuple(sorted(rng.sample(values, 3), key=values.index)) for kind, values in department.options.items()
    }
    return Product(
        asin=asin,
        title=f"{brand} {name.title()}, {attributes[0]}, {attributes[1]}",
        query=name,
        category=f"{department.name} {_LEVEL} {name.title()}",
        price=round(rng.uniform(*department.dollars), 2),
        attributes=attributes,
        features=tuple(f"{attribute.capitalize()}." for attribute in attributes),
        description=f"{name.capitalize()} by {brand}, made to be used every day.",
        options=options,
    )


def draw_goal(catalogue: Catalogue, most_options: int, rng: random.Random) -> Goal:
    """A wish for a product of a generated catalogue: one or two attributes, up to `most_options` options, a price."""
    product = catalogue.products[rng.choice(list(catalogue.products))]
    attributes = sorted(rng.sample(product.attributes, rng.randint(1, 2)))
    kinds = sorted(rng.sample(sorted(product.options), rng.randint(0, min(most_options, len(product.options)))))
    options = {kind: rng.choice(product.options[kind]) for kind in kinds}
    upper = price_limit(product.price, rng)
    text = instruct(f"find me {' and '.join(attributes)} {product.query}", options, upper)
    return Goal(product.asin, text, tuple(attributes), tuple(options.values()), upper)
