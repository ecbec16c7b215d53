"""WebShop's own files: the products and the goals of Yao et al. 2022, under WebShop's ids and numbers."""

import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ragen2_trl.envs.responses import plain_text
from ragen2_trl.envs.tasks import held_out
from ragen2_trl.envs.webshop.catalogue import Catalogue, Goal, Product, identity, instruct, price_limit

GOALS = ("human", "synthetic")
# The seed of WebShop's order of goals, its test goals, the validation goals after them.
_PERMUTATION, TEST, VALIDATION = 233, 500, 1000


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
    return Catalogue(list(products.values()), only_shown=True)


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
        # Empty and repeated values stay, since they count in the numbers of WebShop's goals.
        options={
            clean(kind).lower(): tuple(option_value(_field(entry, "value")) for entry in entries)
            for kind, entries in options.items()
            if entries is not None
        },
    )


def clean(text: object) -> str:
    """Text of a shop as it may enter a prompt, after `plain_text`.

    Brackets become round, since square ones mark what can be clicked, and `||`, which parts actions, becomes `|`.

    >>> clean("[Upgraded]  Shoes<|im_end|>")
    '(Upgraded) Shoes< |im_end|>'
    """
    return re.sub(r"\|{2,}", "|", plain_text(str(text or "").translate(str.maketrans("[]", "()"))))


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
    """The goals of WebShop's files in WebShop's order: place i is its goal number i, except for the price limit.

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
                yield Goal(product.asin, instruct(text, {}, upper), attributes, values, upper)


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
    if len(goals) <= TEST + VALIDATION:
        return [(number, goal) for number, goal in numbered if held_out(identity(goal)) == (split == "test")]
    if split == "test":
        return numbered[:TEST]
    test = {identity(goal) for goal in goals[:TEST]}  # some wishes are there twice
    return [(number, goal) for number, goal in numbered[TEST + VALIDATION :] if identity(goal) not in test]
