"""A generated stand-in for WebShop's files: a catalogue, and wishes for its products."""

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ragen2_trl.envs.webshop.catalogue import LEVEL, Catalogue, Goal, Product, instruct, price_limit

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
    # A brand is one product's, see `type_factor`.
    brands = rng.sample(list(itertools.product(_SYLLABLES, repeat=3)), size)
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
        category=f"{department.name} {LEVEL} {name.title()}",
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
