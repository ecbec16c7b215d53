"""WebShop: its score term by term, its pages, its tools, and hostile text."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from webshop_visits import GOAL, JACKET, LAMP, RIGHT, answer, do, shop

from ragen2_trl.envs.play import INVALID_REWARD
from ragen2_trl.envs.webshop.catalogue import MAX_RESULTS, NO_LIMIT, fits, price_limit, score, type_factor
from ragen2_trl.envs.webshop.environment import WebShop
from ragen2_trl.envs.webshop.files import clean

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
    assert play.outcome.episode_return == INVALID_REWARD
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
    assert 9 * INVALID_REWARD <= play.outcome.episode_return <= 1.0


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
