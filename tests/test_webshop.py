"""WebShop: its score term by term, its pages, its goals from a generated catalogue and from WebShop's own files."""

import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen2_trl.envs.play import INVALID_TURN
from ragen2_trl.envs.responses import format_response
from ragen2_trl.envs.webshop.catalogue import (
    MAX_RESULTS,
    NO_LIMIT,
    Catalogue,
    Goal,
    Product,
    fits,
    price_limit,
    score,
    type_factor,
)
from ragen2_trl.envs.webshop.environment import WebShop, WebShopEpisode
from ragen2_trl.envs.webshop.files import clean, load_catalogue, load_goals, split_goals
from ragen2_trl.envs.webshop.generator import _DEPARTMENTS, generate_catalogue

JACKET = Product(
    asin="B00001",
    title="Alora Rain Jacket, waterproof",
    query="rain jacket",
    category="Clothing \u203a Coats \u203a Rain",
    price=45.0,
    attributes=("waterproof", "machine washable"),
    features=("Packs into its own pocket.",),
    description="For long walks in autumn.",
    options={"color": ("red", "navy blue"), "size": ("small", "x-large")},
)
LAMP = replace(JACKET, asin="B00002", title="Table Lamp", query="table lamp", category="Home \u203a Light", options={})
GOAL = Goal("B00001", "find me a waterproof rain jacket", ("waterproof", "machine washable"), ("red", "small"), 50.0)
RIGHT = {"color": "red", "size": "small"}


def answer(*actions):
    return format_response("Shopping.", actions)


def shop(*products, goal=GOAL, results=10):
    return WebShopEpisode(Catalogue(products or (JACKET, LAMP)), goal, results)


def do(episode, *actions):
    """The rewards of actions, all of which must be possible."""
    rewards = []
    for action in actions:
        assert episode.is_action(action), (action, episode.observation())
        rewards.append(episode.step(action))
    return rewards


def solve(env, row):
    play = env.play(row, random.Random(0))
    while not play.done:
        play.respond(answer(play.episode.plan(random.Random(0))[1][0]))
    return play.outcome


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
    ("title", "query", "category", "expected"),
    [
        ("Alora Rain Jacket", "x", "Y", 1.0),  # 3 of 3 words
        ("Jacket", "x", "Y", 1.0),  # 1 of 3
        ("Waterproof Lamp", "rain jacket", JACKET.category, 0.0),  # attributes say nothing of the type
        ("Table Lamp", "rain jacket", JACKET.category, 0.0),  # as in the original, not even for the same query
    ],
)
def test_type_is_told_by_title_query_and_category(title, query, category, expected):
    assert type_factor(replace(JACKET, title=title, query=query, category=category), JACKET) == expected


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


def test_a_wrong_choice_earns_nothing_even_where_the_text_names_it():
    red_in_text = replace(JACKET, description="Comes in navy blue.")
    assert score(red_in_text, {"color": "navy blue", "size": "small"}, GOAL, JACKET) == pytest.approx(4 / 5)


def test_no_number_of_choices_counts_for_one_wish():
    goal = replace(GOAL, options=("red",))
    assert score(JACKET, {"color": "red", "trim": "red", "lining": "red"}, goal, JACKET) == 1.0


def test_price_limit_is_the_larger_of_two_steps_above_the_price():
    rng = random.Random(0)
    assert {price_limit(45.0, rng) for _ in range(200)} == {60.0, 70.0, 80.0}
    assert {price_limit(50.0, rng) for _ in range(200)} == {70.0, 80.0, 90.0}
    assert price_limit(985.0, rng) == NO_LIMIT


# Pages


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


def test_a_second_choice_of_a_kind_replaces_the_first():
    episode = shop()
    do(episode, "search[rain]", "click[b00001]", "click[navy blue]", "click[red]", "click[small]")
    assert do(episode, "click[buy now]") == [1.0]


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


def test_a_search_without_a_word_of_the_shop_finds_nothing():
    episode = shop()
    for query in ("zzz", "the", "?!", "\ud800"):
        do(episode, f"search[{query}]")
        assert "Nothing found." in episode.observation()
    assert episode.buttons() == ["back to search"]


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
    assert play.outcome.episode_return == INVALID_TURN
    assert play.episode.observation() == before


def test_a_purchase_ends_the_visit_and_so_does_the_last_turn():
    env = WebShop()
    row = env.dataset(1)[0]
    play = env.play(row, random.Random(0))
    for action in ("search[shoes lamp jacket]", None, "click[buy now]"):
        assert not play.done
        play.respond(answer(action or f"click[{play.episode.hits[0]}]"))
    assert play.done
    assert play.outcome.turns == 3
    idle = env.play(row, random.Random(0))
    for _ in range(env.max_turns):
        assert not idle.done
        idle.respond(answer("search[shoes]"))
    assert idle.done
    assert idle.outcome.episode_return == 0.0
    assert not idle.outcome.success


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


@pytest.mark.parametrize("options", [{}, {"results": 3}, {"max_turns": 3, "results": 1}, {"products": 50}])
def test_the_solver_buys_what_is_wanted_within_the_turns(options):
    env = WebShop(**options)
    outcomes = [solve(env, row) for split in ("train", "test") for row in env.dataset(100, seed=0, split=split)]
    assert {outcome.success for outcome in outcomes} == {True}
    assert {outcome.episode_return for outcome in outcomes} == {1.0}


def test_the_solver_finds_the_way_from_any_page():
    env = WebShop(max_turns=100)
    rng = random.Random(0)
    for row in WebShop().dataset(100, seed=1):
        play = env.play(row, rng)
        for _ in range(rng.randrange(12)):
            action = play.episode.random_action(rng)
            if action != "click[buy now]":
                play.respond(answer(action))
        while not play.done:
            play.respond(answer(play.episode.plan(rng)[1][0]))
        assert play.outcome.success
        assert play.outcome.turns == play.outcome.valid_turns


def test_demonstrations_end_with_a_purchase():
    rows = WebShop().demonstrations(20, seed=0)
    assert ["click[buy now]" in row["completion"][-1]["content"] for row in rows] == [True] * 20


def test_random_clicks_seldom_buy_what_is_wanted():
    """The floor, of 10,000 visits: return 0.046, success 0.013."""
    env, rng = WebShop(), random.Random(0)
    outcomes = []
    for row in env.dataset(1000, seed=0):
        play = env.play(row, rng)
        while not play.done:
            play.respond(answer(play.episode.random_action(rng)))
        outcomes.append(play.outcome)
    assert {outcome.turns - outcome.valid_turns for outcome in outcomes} == {0}
    assert fmean(outcome.episode_return for outcome in outcomes) == pytest.approx(0.046, abs=0.015)
    assert fmean(outcome.success for outcome in outcomes) == pytest.approx(0.013, abs=0.01)


def test_types_attributes_and_options_of_the_generated_catalogue_are_distinct():
    words = [word for department in _DEPARTMENTS for name in department.types for word in name.split()]
    assert len(words) == len(set(words))
    assert not set(words) & {
        word for department in _DEPARTMENTS for name in department.attributes for word in name.split()
    }
    for department in _DEPARTMENTS:
        for kind, values in {"attribute": department.attributes, **department.options}.items():
            assert not [pair for pair in itertools.permutations(values, 2) if fits(kind, *pair)]
    brands = [product.title.split()[0] for product in generate_catalogue(10_000).products.values()]
    assert len(brands) == len(set(brands))


def test_another_type_of_product_never_pays():
    products = list(generate_catalogue(500).products.values())
    for first, second in itertools.product(products[::25], products):
        assert (type_factor(second, first) == 1.0) == (first.query == second.query)


@pytest.mark.parametrize("products", [50, 500])
def test_splits_never_meet(products):
    env = WebShop(products=products)

    def goals(split):
        return {text.split(", and price")[0] for text in env.dataset(3000, split=split)["instruction"]}

    train, test = goals("train"), goals("test")
    assert not train & test
    assert len(test) > 300


def test_equal_seeds_give_equal_rows_and_nothing_else_matters():
    env = WebShop()
    first = env.dataset(100, seed=3)
    random.seed(1)
    before = random.getstate()
    assert env.dataset(100, seed=3).to_list() == first.to_list()
    assert random.getstate() == before
    assert env.dataset(20, seed=3).to_list() == first.to_list()[:20]
    assert len(set(first["instruction"]) & set(env.dataset(100, seed=4)["instruction"])) < 5


ROWS = "from ragen2_trl.envs.webshop import WebShop; env = WebShop(); text = repr(env.dataset(20, seed=5).to_list())"


def test_rows_are_equal_across_processes_with_different_hash_seeds():
    here: dict = {}
    exec(ROWS, here)
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run(
        [sys.executable, "-c", f"{ROWS}\nprint(text)"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        check=True,
        text=True,
    )
    assert there.stdout.strip() == here["text"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"products": 49}, "products must be an integer between 50 and 10000, got 49"),
        ({"results": 21}, "results must be an integer between 1 and 20, got 21"),
        ({"goals": "own"}, r"goals must be one of \['human', 'synthetic'\], got 'own'"),
        ({"max_actions": 2}, r"max_actions must be one of \[1\], got 2"),
        ({"max_turns": 2}, "max_turns must be an integer between 3 and 100, got 2"),
        ({"multi_turn": False}, "multi_turn must be True for webshop, got False"),
    ],
)
def test_bad_options_are_named_with_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        WebShop(**options)


def test_a_row_of_another_shop_is_named():
    row = WebShop(products=500).dataset(1)[0]
    with pytest.raises(ValueError, match=f"asin must be a product of the generated catalogue of 50 .*{row['asin']}"):
        WebShop(products=50).episode(row, random.Random(0))


# Tools


def test_tools_give_the_return_of_the_text_protocol():
    text, tools = WebShop(), WebShop(protocol="tools")
    rng = random.Random(0)
    for row in text.dataset(100, seed=2):
        play, tool = text.play(row, rng), tools.environment_factory()
        assert tool.reset(**row) == play.episode.observation()
        while not play.done:
            action = play.episode.random_action(rng) if rng.random() < 0.3 else play.episode.plan(rng)[1][0]
            action = "click[nothing]" if rng.random() < 0.05 else action
            play.respond(answer(action))
            verb, argument = action[:-1].split("[", 1)
            reply = getattr(tool, verb)(argument)
            assert reply.endswith("The episode is over." if play.done else play.episode.observation())
        assert tool.get_reward() == play.outcome.episode_return
        assert tool.click("buy now") == "The episode is over."


def test_prompts_of_the_tools_say_nothing_of_the_text_protocol():
    system, user = WebShop(protocol="tools").dataset(1)[0]["prompt"]
    assert "search[" not in system["content"]
    assert user["content"] == ""


def test_the_first_prompt_tells_the_rules_and_not_the_answer():
    row = WebShop().dataset(1)[0]
    text = "\n".join(message["content"] for message in row["prompt"])
    assert row["instruction"] in text
    assert row["asin"] not in text
    assert "9 turns with one action each" in text


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


def test_prices_depend_on_the_files_alone(folder):
    first = load_goals(str(folder), "human")
    load_catalogue.cache_clear()
    load_goals.cache_clear()
    random.seed(0)
    assert load_goals(str(folder / "items_shuffle_1000.json"), "human") == first


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
        ("items_human_ins", None, "data must have items_human_ins.json next to its products"),
        ("items_shuffle_1000", {}, "items_shuffle_1000.json must hold a list, got a dict"),
        ("items_shuffle_1000", [], "data must hold products"),
        ("items_shuffle_1000", [{"asin": "B1"}], "small_description must be a field of every entry, got .*B1"),
        ("items_shuffle_1000", ["B1"], "asin must be a field of every entry, got 'B1'"),
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


# Hostile text

SMALL = WebShop(products=50)
ROW = SMALL.dataset(1)[0]
ACTIONS = st.one_of(
    st.text(max_size=60),
    st.text(max_size=60).map("search[{}]".format),
    st.sampled_from(
        [
            "search[shoes lamp jacket]",
            "click[buy now]",
            "click[< prev]",
            "click[next >]",
            "click[description]",
            "click[red]",
        ]
    ),
)


@given(st.lists(st.one_of(ACTIONS, st.integers(0, 30)), max_size=12))
def test_no_text_raises_and_no_page_breaks(actions):
    play = SMALL.play(ROW, random.Random(0))
    for action in actions:
        buttons = play.episode.buttons()
        if isinstance(action, int):  # walks deeper than texts alone would
            action = f"click[{buttons[action % len(buttons)]}]" if buttons else "search[shoes lamp jacket]"
        if not play.done:
            play.respond(answer(action))
            assert play.episode.observation()
    assert 9 * INVALID_TURN <= play.outcome.episode_return <= 1.0


@given(st.lists(st.text(max_size=80), max_size=9))
def test_no_text_earns_a_reward_without_a_purchase(texts):
    play = SMALL.play(ROW, random.Random(0))
    for text in texts:
        if not play.done:
            play.respond(text if len(text) % 2 else answer(text))
    assert play.outcome.episode_return <= 0.0
    assert not play.outcome.success


@pytest.mark.timeout(5)
def test_long_texts_are_read_quickly():
    episode = shop()
    for text in ("search[" + "rain " * 20_000 + "]", "click[" * 20_000, "[" * 100_000, "search[" + "]" * 100_000):
        for _ in range(5):
            if episode.is_action(text):
                episode.step(text)
