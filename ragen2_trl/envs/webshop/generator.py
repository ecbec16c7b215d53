"""A generated stand-in for WebShop's files: a catalogue, and wishes for its products.

Some products are accessories whose text is full of what other products are searched for, as in real shops: they come
first where an instruction is copied into the search, and only their titles tell that they are another thing.
"""

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

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
# What nobody wishes for. Their words are in no other title.
_ACCESSORIES = ("gift card", "repair kit", "care guide", "sticker set", "spare pouch")
_MAX_ACCESSORIES = 80  # four for each type, so that less than half of the first page is something else
_SYLLABLES = tuple(consonant + vowel for consonant in "bdkln" for vowel in "aeiou")


@lru_cache(maxsize=2)
def generate_catalogue(size: int) -> Catalogue:
    """`size` products, always the same: of 20 types in five departments, each with attributes, options and a price.

    A third, at most 80, are accessories.
    """
    rng = random.Random(f"webshop/{size}")
    numbers = rng.sample(range(100_000), size)
    # A brand is one product's, see `type_factor`.
    brands = rng.sample(list(itertools.product(_SYLLABLES, repeat=3)), size)
    names = ("".join(brand).capitalize() for brand in brands)
    accessories = min(size // 3, _MAX_ACCESSORIES)
    makers: list[Callable[[str, str, random.Random], Product]] = [
        *(partial(_generate_accessory, place) for place in range(accessories)),
        *[_generate] * (size - accessories),
    ]
    made = zip(makers, numbers, names, strict=True)
    return Catalogue([make(f"B{number:05d}", brand, rng) for make, number, brand in made])


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


def _generate_accessory(place: int, asin: str, brand: str, rng: random.Random) -> Product:
    """Something for products of one type after the other; its text names whatever is looked for in them."""
    department = _DEPARTMENTS[place % len(_DEPARTMENTS)]
    name = department.types[place // len(_DEPARTMENTS) % len(department.types)]
    kind = rng.choice(_ACCESSORIES)
    return Product(
        asin=asin,
        title=f"{brand} {kind.title()}",
        query=kind,
        category=f"Accessories {LEVEL} {kind.title()}",
        price=round(rng.uniform(3, 12), 2),
        attributes=department.attributes,
        features=tuple(f"For {attribute} {name}." for attribute in department.attributes),
        description=f"{kind.capitalize()} by {brand} for {name}.",
        options=department.options,
    )


def draw_goal(catalogue: Catalogue, most_options: int, rng: random.Random) -> Goal:
    """A wish for a product of a generated catalogue: one or two attributes, up to `most_options` options, a price."""
    product = catalogue.products[rng.choice([asin for asin, one in catalogue.products.items() if _is_wanted(one)])]
    attributes = sorted(rng.sample(product.attributes, rng.randint(1, 2)))
    kinds = sorted(rng.sample(sorted(product.options), rng.randint(0, min(most_options, len(product.options)))))
    options = {kind: rng.choice(product.options[kind]) for kind in kinds}
    upper = price_limit(product.price, rng)
    text = instruct(f"find me {' and '.join(attributes)} {product.query}", options, upper)
    return Goal(product.asin, text, tuple(attributes), tuple(options.values()), upper)


def _is_wanted(product: Product) -> bool:
    return product.query not in _ACCESSORIES
