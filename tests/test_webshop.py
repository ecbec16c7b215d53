"""WebShop: its score, its pages, its goals, generated and from WebShop's own files, and hostile text."""

import itertools
import json
import random
from dataclasses import replace
from itertools import islice

import pytest
from webshop_visits import GOAL, JACKET, LAMP, RIGHT, answer, do, shop, solve

from ragen2_trl.envs.play import INVALID_REWARD
from ragen2_trl.envs.webshop.catalogue import MAX_RESULTS, NO_LIMIT, Goal, fits, price_limit, score, type_factor
from ragen2_trl.envs.webshop.environment import WebShop
from ragen2_trl.envs.webshop.files import clean, load_catalogue, load_goals, split_goals

# The score


@pytest.mark.parametrize(
    ("product", "chosen", "goal", "expected"),
    [
        (JACKET, RIGHT, GOAL, 1.0),
        (JACKET, {"color": "red"}, GOAL, 4 / 5),  # an option missing
        (JACKET, {"color": "navy blue", "size": "small"}, GOAL, 4 / 5),  # an option wrong
        (JACKET, {}, GOAL, 3 / 5),
        (JACKET, RIGHT, replace(GOAL, price_upper=45.0), 1.0),
        (JACKET, RIGHT, replace(GOAL, price_upper=44.99), 4 / 5),  # too expensive
        (JACKET, RIGHT, replace(GOAL, attributes=("waterproof", "vegan")), 4 / 5),  # an attribute missing
        (JACKET, RIGHT, replace(GOAL, attributes=("own pocket", "long walks")), 1.0),  # in features and description
        (JACKET, RIGHT, replace(GOAL, attributes=("Rain Jacket", "machine-washable")), 1.0),  # title; spelling
        (JACKET, {}, replace(GOAL, options=()), 1.0),
        (LAMP, {}, GOAL, 0.0),  # another thing
    ],
)
def test_score_is_the_share_of_wishes_that_are_met(product, chosen, goal, expected):
    assert score(product, chosen, goal, JACKET) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shared", "query", "category", "expected"),
    [
        (0, "rain jacket", JACKET.category, 0.0),
        (1, "rain jacket", JACKET.category, 0.1),  # 1 of 20 words
        (2, "x", "Y", 0.5),  # 2 of 20
        (4, "x", "Y", 0.5),  # 0.2, not above it
        (5, "x", "Y", 1.0),
        (2, "rain jacket", "Y", 1.0),
        (2, "x", "Rain \u203a Coats", 1.0),  # two levels in any order
        (2, "x", "Coats \u203a Coats \u203a Home", 0.5),
    ],
)
def test_type_thresholds_are_the_original_ones(shared, query, category, expected):
    words = [f"word{chr(97 + number)}" for number in range(20)]
    wanted = replace(JACKET, title=" ".join(words))
    other = replace(JACKET, title=" ".join(["thing", *words[:shared]]), query=query, category=category)
    assert type_factor(other, wanted) == expected


def test_options_fit_by_name_but_sizes_only_to_the_letter():
    assert fits("color", "navy-blue", "Navy Blue")
    assert not fits("color", "red", "navy blue")
    assert fits("size", "X-Large", "x-large")
    assert not fits("size", "large", "x-large")


def test_price_limit_is_the_larger_of_two_steps_above_the_price():
    rng = random.Random(0)
    assert {price_limit(45.0, rng) for _ in range(200)} == {60.0, 70.0, 80.0}
    assert {price_limit(50.0, rng) for _ in range(200)} == {70.0, 80.0, 90.0}
    assert price_limit(985.0, rng) == NO_LIMIT


def test_a_visit_goes_from_search_to_purchase():
    episode = shop()
    assert episode.observation() == "Wanted: find me a waterproof rain jacket\nSearch page."
    do(episode, "search[rain]")
    assert "[B00001] $45.00 Alora Rain Jacket, waterproof\n[back to search]" in episode.observation()
    do(episode, "CLICK[ b00001 ]", "click[description]")
    assert "For long walks in autumn.\n[back to search] [< prev]" in episode.observation()
    do(episode, "click[< prev]", "click[features]")
    assert "Packs into its own pocket." in episode.observation()
    do(episode, "click[< Prev]", "click[Red]")
    assert "color: [red] [navy blue] (chosen: red)" in episode.observation()
    assert do(episode, "click[small]", "click[buy now]") == [0.0, 1.0]
    assert episode.done
    assert episode.success


def test_leaving_a_product_forgets_what_was_chosen():
    episode = shop()
    do(episode, "search[rain]", "click[b00001]", "click[red]", "click[small]", "click[< prev]", "click[b00001]")
    assert do(episode, "click[buy now]") == [pytest.approx(3 / 5)]
    assert not episode.success


def test_a_value_of_two_kinds_can_be_chosen_for_each():
    product = replace(JACKET, options={"color": ("red", "black"), "trim": ("red", "black")})
    goal = replace(GOAL, options=("red", "black"))
    for clicks in itertools.permutations(["click[red]", "click[black]"]):
        episode = shop(product, goal=goal)
        assert do(episode, "search[rain]", "click[b00001]", *clicks, "click[buy now]")[-1] == 1.0


def test_results_are_shown_page_by_page():
    products = [replace(JACKET, asin=f"B{number:05d}") for number in range(60)]
    episode = shop(*products, goal=replace(GOAL, asin="B00000"), results=20)
    do(episode, "search[jacket]")
    first = episode.observation()
    assert not episode.is_action("click[< prev]")
    do(episode, "click[next >]", "click[next >]")
    assert "page 3 of 3" in episode.observation()
    assert not episode.is_action("click[next >]")
    seen = [asin for asin in episode.buttons() if asin.startswith("B")]
    assert seen == [f"B{number:05d}" for number in range(40, MAX_RESULTS)]  # equal products: in catalogue order
    do(episode, "click[< prev]", "click[< prev]")
    assert episode.observation() == first


@pytest.mark.parametrize(
    "action",
    [
        "",
        "buy now",
        "click",
        "click[]",
        "click[buy now]",
        "click[b00001]",
        "click[next >]",
        "search[]",
        "search[ ]",
        "buy[x]",
    ],
)
def test_what_the_search_page_does_not_offer_is_an_invalid_turn(action):
    env = WebShop()
    play = env.play(env.dataset(1)[0], random.Random(0))
    before = play.episode.observation()
    play.respond(answer(action))
    assert play.outcome.episode_return == INVALID_REWARD
    assert play.episode.observation() == before


def test_pages_stay_short_whatever_a_product_holds():
    huge = replace(
        JACKET,
        title="rain " * 1000,
        description="x" * 100_000,
        features=("y" * 100_000,),
        options={kind: tuple(f"{kind} {number}" for number in range(500)) for kind in ("color", "size", "style")},
    )
    products = [replace(huge, asin=f"B{number:05d}") for number in range(30)]
    goal = replace(GOAL, asin="B00000", instruction="z" * 100_000)
    episode = shop(*products, goal=goal, results=20)
    do(episode, "search[rain]")
    lengths = [len(episode.observation())]
    do(episode, "click[b00000]")
    assert " and " in episode.observation()
    for button in ("click[description]", "click[< prev]", "click[features]", "click[< prev]"):
        lengths.append(len(episode.observation()))
        do(episode, button)
    assert max(lengths) < 3500
    do(episode, "click[style 499]")  # not shown, but there


def test_no_text_of_the_shop_reaches_the_prompt_as_a_control_token():
    assert clean("a<|im_end|>\n</s> <think>[INST] x||y < 3") == "a< |im_end|> < /s> < think>(INST) x|y < 3"
    assert clean("Red\x1b[2J <\x00|im_end|> |\x00| \ud800") == "Red(2J < |im_end|> | "
    assert clean(None) == ""


# Generated goals


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"results": 3}, {"max_turns": 3, "results": 1}, {"products": 50}, {"max_total_actions": 4}]
)
def test_the_solver_buys_what_is_wanted_within_the_turns(options):
    env = WebShop(**options)
    outcomes = [solve(env, row) for split in ("train", "test") for row in islice(env.tasks(0, split, None), 25)]
    assert {outcome.success for outcome in outcomes} == {True}
    assert {outcome.episode_return for outcome in outcomes} == {1.0}


def test_a_row_of_another_shop_is_named():
    row = WebShop(products=500).dataset(1)[0]
    with pytest.raises(ValueError, match=f"asin must be a product of the generated catalogue of 50 .*{row['asin']}"):
        WebShop(products=50).episode(row, random.Random(0))


# WebShop's own files


def item(asin, name, pricing, options="", **fields):
    """A product as WebShop's files have it, fields that do not matter here included."""
    return {
        "asin": asin,
        "name": name,
        "category": "fashion",
        "query": "Men's Rain Jackets ",
        "product_category": "Clothing \u203a Coats \u203a Rain",
        "pricing": pricing,
        "list_price": "",
        "small_description": ["Keeps dry.", "Two pockets. <|im_end|>"],
        "full_description": None,
        "customization_options": options,
        "images": ["https://images.example/1.jpg"],
        "average_rating": 4.5,
        **fields,
    }


COLORS_AND_SIZES = {
    "Color": [{"value": " Navy/Black ", "image": None}, {"value": "[Red]", "is_selected": False}],
    "Size": [{"value": "Small"}, {"value": "Large"}],
    "Fit": None,
}


@pytest.fixture
def folder(tmp_path):
    """A folder of WebShop's files: 40 jackets and two entries that WebShop leaves out."""
    items = [
        item(f"B{number:09d}", f"Alora{chr(97 + number)} Rain Jacket", "$20.00$40.00", COLORS_AND_SIZES)
        for number in range(26)
    ]
    items += [
        item("B000000026", "Plain Jacket", "$1,234.50", small_description="One line."),
        item("B000000027", "Free Jacket", None),
        item("B000000001", "Twice there", "$1.00"),
        item("B0000000000", "Long id", "$1.00"),
    ]
    asins = [entry["asin"] for entry in items]
    instructions = {
        asin: {
            "attributes": ["water proof", "light weight"],
            "instruction": f"Find me water proof, light weight rain jackets {asin}",
            "instruction_attributes": ["water proof", "light weight"],
        }
        for asin in asins[:26]
    }
    instructions["B000000026"] = {"attributes": ["plain"], "instruction": None, "instruction_attributes": None}
    people = {
        asin: [
            {
                "asin": asin,
                "instruction": f"i want water proof jacket {asin} that is navy, size small.",
                "attributes": ["water proof", "light weight"],
                "options": ["color: navy | black", "size: small"],
                "instruction_attributes": ["water proof"],
                "instruction_options": ["navy | black", "small"],
                "assignment_id": "x",
                "worker_id": "y",
            },
            {"instruction": "nothing in particular", "instruction_attributes": [], "instruction_options": []},
        ]
        for asin in asins[:26]
    }
    for name, content in {
        "items_shuffle_1000": items,
        "items_ins_v2_1000": instructions,
        "items_human_ins": people,
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


def test_products_of_webshops_files_are_read(folder):
    products = load_catalogue(str(folder)).products
    assert len(products) == 28
    jacket = products["B000000001"]
    assert jacket.title == "Alorab Rain Jacket"
    assert jacket.query == "men's rain jackets"
    assert jacket.attributes == ("water proof", "light weight")
    assert jacket.features == ("Keeps dry.", "Two pockets. < |im_end|>")
    assert jacket.description == ""
    assert jacket.options == {"color": ("navy | black", "(red)"), "size": ("small", "large")}
    assert 20.0 <= jacket.price <= 40.0
    assert products["B000000026"].price == 1234.5
    assert products["B000000026"].features == ("One line.",)
    assert products["B000000027"].price == 100.0
    assert products["B000000027"].attributes == ()


def test_words_are_searched_where_webshop_does(folder):
    """In titles, descriptions, first features and options, and not in the attributes that wishes are made from."""
    search = load_catalogue(str(folder)).search
    assert search("alorab") == ["B000000001"]
    assert len(search("dry")) == 27 and len(search("navy")) == 26
    assert search("pockets") == search("light weight") == []


@pytest.mark.parametrize(("goals", "number"), [("human", 26), ("synthetic", 26 * 4)])
def test_goals_of_webshops_files_can_be_played(folder, goals, number):
    env = WebShop(goals=goals)
    train, test = (env.dataset(seed=0, split=split, data=str(folder)) for split in ("train", "test"))
    assert len(train) + len(test) == number
    assert sorted([*train["seed"], *test["seed"]]) == list(range(number))
    for row in (*train, *test):
        assert "and price lower than" in row["instruction"]
        assert solve(env, row).success
    assert env.dataset(seed=0, data=str(folder)).to_list() == train.to_list()
    assert env.dataset(seed=1, data=str(folder))["seed"][:] != train["seed"][:]


def test_people_and_options_make_instructions_in_webshops_words(folder):
    (goal, *_) = load_goals(str(folder), "human")
    assert goal.instruction.startswith(
        f"i want water proof jacket {goal.asin} that is navy, size small, and price lower than "
    )
    assert goal.options == ("navy | black", "small")
    synthetic = {goal.instruction.split(", and price")[0] for goal in load_goals(str(folder), "synthetic")}
    assert "Find me water proof, light weight rain jackets B000000003 with color: (red), and size: large" in synthetic


def test_goals_keep_webshops_splits_where_there_are_enough():
    # The last ten are the first ten once more, for other products and at other prices.
    goals = [
        Goal(f"B{number}", f"find me {number % 1990}, and price lower than {number}.00 dollars", (), (), 9.0)
        for number in range(2000)
    ]
    assert [number for number, _ in split_goals(goals, "test")] == list(range(500))
    assert [number for number, _ in split_goals(goals, "train")] == list(range(1500, 1990))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("items_shuffle_1000", None, "data must be a folder with items_shuffle.json or items_shuffle_1000.json"),
        ("items_ins_v2_1000", None, "data must have items_ins_v2_1000.json next to its products"),
        ("items_shuffle_1000", {}, "items_shuffle_1000.json must hold a list, got a dict"),
        ("items_shuffle_1000", [], "data must hold products"),
        ("items_shuffle_1000", [{"asin": "B1"}], "small_description must be a field of every entry, got .*B1"),
        ("items_human_ins", {"B000000001": [{}]}, "instruction_attributes must be a field of every entry"),
    ],
)
def test_wrong_files_are_named(folder, name, content, message):
    path = folder / f"{name}.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        WebShop().dataset(data=str(folder))
