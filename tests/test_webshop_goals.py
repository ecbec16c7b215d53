"""WebShop's goals, from a generated catalogue and from WebShop's own files."""

import itertools
import json
import os
import random
import subprocess
import sys
from statistics import fmean

import pytest
from webshop_visits import answer, solve

from ragen2_trl.envs.webshop.baselines import copying_action
from ragen2_trl.envs.webshop.catalogue import Goal, fits, tokens, type_factor
from ragen2_trl.envs.webshop.environment import WebShop
from ragen2_trl.envs.webshop.files import load_catalogue, load_goals, split_goals
from ragen2_trl.envs.webshop.generator import _ACCESSORIES, _DEPARTMENTS, generate_catalogue

pytestmark = pytest.mark.slow

# Generated goals


@pytest.mark.parametrize(
    "options", [{}, {"results": 3}, {"max_turns": 3, "results": 1}, {"products": 50}, {"max_total_actions": 4}]
)
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


def title_reading_hits(episode):
    """The hits whose title names the wanted thing."""
    wanted = set(tokens(episode.wanted.query))
    return [asin for asin in episode.hits if wanted <= set(tokens(episode._catalogue.products[asin].title))]


@pytest.mark.parametrize("clicks_options", [False, True])
@pytest.mark.parametrize("options", [{}, {"products": 50}, {"products": 2000}])
def test_copying_the_instruction_and_buying_the_first_hit_earns_little(clicks_options, options):
    env, rng, outcomes = WebShop(**options), random.Random(0), []
    for row in env.dataset(300, seed=0, split="test"):
        play = env.play(row, rng)
        while not play.done:
            play.respond(answer(copying_action(play.episode, clicks_options)))
        outcomes.append(play.outcome)
    assert {outcome.turns - outcome.valid_turns for outcome in outcomes} == {0}
    assert fmean(outcome.episode_return for outcome in outcomes) < 0.4
    assert fmean(outcome.success for outcome in outcomes) < 0.4


def test_a_player_who_reads_titles_finds_what_is_wanted():
    """The shop is hard for who copies, not for who reads: the thing is on the first page."""
    env, rng, found = WebShop(), random.Random(0), 0
    for row in env.dataset(200, seed=0):
        episode = env.play(row, rng).episode
        episode.step(f"search[{row['instruction']}]")
        found += any(asin in episode.buttons() for asin in title_reading_hits(episode))
    assert found > 190


def test_types_attributes_and_options_of_the_generated_catalogue_are_distinct():
    names = [*_ACCESSORIES, *(name for department in _DEPARTMENTS for name in department.types)]
    words = [word for name in names for word in name.split()]
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
        ({"max_total_actions": 2}, "max_total_actions must be an integer between 3 and 100, got 2"),
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
