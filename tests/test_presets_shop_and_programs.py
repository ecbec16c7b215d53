"""RAGEN-2's WebShop and DeepCoder: what is said, how it is laid out, what is paid, what is a success."""

import json
import random
from dataclasses import replace

import pytest
from passages import write_jsonl
from ragen_prompts import limits, prompt_of, say
from webshop_visits import GOAL, JACKET, LAMP

from ragen2_trl.envs import make_env
from ragen2_trl.envs.deepcoder import DeepCoder
from ragen2_trl.envs.ragen2.webshop import ADVICE, RagenWebShopEpisode, fits_words, numbered_goal
from ragen2_trl.envs.webshop import WebShop
from ragen2_trl.envs.webshop.catalogue import Catalogue, fits, score
from ragen2_trl.envs.webshop.visit import WebShopEpisode

# WebShop


@pytest.fixture(scope="module")
def shop():
    return make_env("webshop", preset="ragen2")


WISH = f"Instruction: [SEP] {GOAL.instruction} [SEP] "
BACK = "Back to Search [SEP] "


def visit(*products):
    return RagenWebShopEpisode(Catalogue(products or (JACKET, LAMP)), GOAL, "Advice.")


def page(episode, *actions):
    """The page after actions, and the names of what can be done there."""
    for action in actions:
        assert episode.is_action(action)
        episode.step(action)
    text, _, names = episode.observation().partition(".Advice.\n")
    return text, names.split(", ")


def test_choosing_an_option_that_the_page_does_not_show_has_an_effect():
    episode = visit()
    page(episode, "search[jacket]", f"click[{JACKET.asin}]")
    value = next(iter(JACKET.options.values()))[0]
    before, shown = episode.snapshot(), page(episode)
    assert page(episode, f"click[{value}]") == shown
    assert episode.snapshot() != before
    before = episode.snapshot()
    page(episode, f"click[{value}]")
    assert episode.snapshot() == before


def test_webshop_says_what_ragen2_says(shop):
    assert limits(shop) == (9, 1, 9, 400)
    row = shop.dataset(1)[0]
    instruction, state, last = prompt_of(shop, row)
    order = ["online shop", "close to an instruction", "Search", "results", "pick", "size and color", "buy it"]
    order += ["listed.  Example", "search[wool", "search[<keywords>]", "click[<clickable>]"]
    assert [*map(instruction.index, order)] == sorted(map(instruction.index, order))
    assert state == f"Instruction: {row['instruction']}.{ADVICE}\nsearch[<content>]"
    assert "Actions left: 9. " in last and "200 words" in last
    points = ["10 actions", "size and color", "twice", "close enough", "next page", "next more than twice", "back"]
    points += ["fewer than three actions", "description"]
    lines = ADVICE.split("\n")
    assert len(lines) == 9
    assert all(point in line for point, line in zip(points, lines, strict=True))


def test_advice_comes_from_a_file_of_prompts_too(tmp_path):
    path = tmp_path / "texts.yaml"
    path.write_text("advice: Just buy.\ninstruction: Shop.")
    env = make_env("webshop", preset="ragen2", prompts=str(path))
    row = env.dataset(1)[0]
    assert prompt_of(env, row)[:2] == ("Shop.", f"Instruction: {row['instruction']}.Just buy.\nsearch[<content>]")


def test_webshops_pages_are_laid_out_as_in_ragen2():
    episode = visit()
    assert page(episode) == (f"Instruction: {GOAL.instruction}", ["search[<content>]"])
    assert page(episode, "search[rain jacket]") == (
        f"{WISH}{BACK}Page 1 (Total results: 1) [SEP] Next > [SEP] B00001 [SEP] Alora Rain Jacket, waterproof [SEP] "
        "$45.0",
        ["click[back to search]", "click[next >]", "click[b00001]"],
    )
    product = (
        f"{WISH}{BACK}< Prev [SEP] color [SEP] red [SEP] navy blue [SEP] size [SEP] small [SEP] x-large [SEP] "
        "Alora Rain Jacket, waterproof [SEP] Price: $45.0 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] "
        "Reviews [SEP] Buy Now"
    )
    buttons = [f"click[{name}]" for name in ("back to search", "< prev", "description", "features", "reviews")]
    values = [f"click[{name}]" for name in ("red", "navy blue", "small", "x-large")]
    assert page(episode, "click[b00001]") == (product, [*buttons, "click[buy now]", *values])
    assert page(episode, "click[red]")[0] == product  # what is chosen is not shown
    description = page(episode, "click[description]")
    assert description == (f"{WISH}{BACK}< Prev [SEP] For long walks in autumn.", buttons[:2])
    assert page(episode, "click[< prev]", "click[reviews]")[0] == f"{WISH}{BACK}< Prev"
    search = f"WebShop [SEP] Instruction: [SEP] {GOAL.instruction} [SEP] Search"
    assert page(episode, "click[back to search]") == (search, ["search[<content>]"])


def test_webshop_offers_a_next_page_wherever_there_are_products():
    products = [replace(JACKET, asin=f"B{number:05}") for number in range(12)]
    episode = visit(*products)
    page(episode, "search[rain jacket]")
    text, names = page(episode, "click[next >]")
    assert f"{BACK}Page 2 (Total results: 12) [SEP] < Prev [SEP] Next > [SEP] B00010" in text
    assert names[:3] == ["click[back to search]", "click[< prev]", "click[next >]"]
    assert page(episode, "click[next >]") == (
        f"{WISH}{BACK}Page 3 (Total results: 12) [SEP] < Prev",
        ["click[back to search]", "click[< prev]"],
    )


@pytest.mark.parametrize("text", ["click[teapot]", "buy it", "search[]", "click[next >", "<r>", "think[hard]"])
def test_a_bad_click_is_free_and_uses_an_action(shop, text):
    play = shop.play(shop.dataset(1)[0], random.Random(0))
    state = play.episode.observation()
    reply = play.respond(say(text))
    assert reply.startswith(f"Reward:\n0.0\n\nTurn 2:\nState:\n{state}\nActions left: 8. ")
    assert play.turn_rewards == [0.0]


def test_webshop_pays_success_alone():
    way = ["search[rain jacket]", "click[b00001]"]
    for clicks, reward in ((["red", "small"], 1.0), (["red"], 0.0), ([], 0.0)):
        episode, own = visit(), WebShopEpisode(Catalogue((JACKET, LAMP)), GOAL)
        actions = (*way, *(f"click[{click}]" for click in clicks), "click[buy now]")
        *before, paid = [episode.step(action) for action in actions]
        assert set(before) == {0.0} and episode.done and episode.success == (reward == 1.0)
        assert paid == reward <= [own.step(action) for action in actions][-1]


def test_some_words_of_an_option_suffice_as_in_webshop():
    goal = replace(GOAL, options=("navy blue", "x-large"))
    wide = replace(JACKET, options={**JACKET.options, "size": ("large", "x-large")})
    chosen = {"size": "large", "color": "navy blue"}

    def in_words(kind, value, option):
        return fits_words(value, option, JACKET)

    assert score(wide, chosen, goal, JACKET, in_words) == 1.0
    assert score(wide, chosen, goal, JACKET, fits) < 1.0
    assert score(wide, {"size": "large"}, goal, JACKET, in_words) < 1.0


def test_seeds_are_goals_in_the_order_of_ragen2():
    goals = list(range(6910))
    found = {seed: numbered_goal(goals, seed, "test" if seed < 1000 else "train") for seed in (123, 124, 10000, 10001)}
    assert found == {123: 5817, 124: 630, 10000: 329, 10001: 5339}
    held = {numbered_goal(goals, seed, "test") for seed in range(123, 1123)}
    assert len(held) == 1000
    assert not held & {numbered_goal(goals, seed, "train") for seed in range(10_000, 20_000)}
    with pytest.raises(ValueError, match="data must hold more than 1500 goals with split='ragen2', got 1500"):
        numbered_goal(goals[:1500], 123, "test")


def test_webshops_own_goals_are_numbered_for_reference(monkeypatch, tmp_path):
    goals = [replace(GOAL, instruction=f"goal {number}") for number in range(6910)]
    asked = []
    monkeypatch.setattr("ragen2_trl.envs.ragen2.webshop.load_goals", lambda data, kind: asked.append(kind) or goals)
    monkeypatch.setattr("ragen2_trl.envs.webshop.environment.load_catalogue", lambda data: Catalogue([JACKET, LAMP]))
    env = make_env("webshop", preset="ragen2", split="ragen2")
    assert env.dataset(2, split="test", data=str(tmp_path))["instruction"][:] == ["goal 5817", "goal 630"]
    assert env.dataset(1, split="train", data=str(tmp_path))["seed"][:] == [10_000]
    assert set(asked) == {"synthetic"}


def test_without_the_preset_the_shop_stays_as_it_is():
    env = WebShop()
    episode = env.episode(env.dataset(1)[0], random.Random(0))
    assert type(episode) is WebShopEpisode
    assert not episode.is_action("click[teapot]")
    assert env.dataset(1)[0]["prompt"][1]["content"].startswith("Wanted: ")


# DeepCoder

TESTS = [("21\n", "42\n"), ("1\n", "2\n"), ("5\n", "10\n"), ("0\n", "0\n")]


def stdin_row(problem, tests=TESTS, **fields):
    return {"problem": problem, "tests": json.dumps([{"input": a, "output": b} for a, b in tests]), **fields}


@pytest.fixture(scope="module")
def coder():
    return make_env("deepcoder", preset="ragen2", workers=1)


def task(env, source):
    return env._task(1, source)


@pytest.mark.needs("bubblewrap")
def test_deepcoder_says_what_ragen2_says(coder):
    assert limits(coder) == (1, 1, 1, 4000)
    instruction, state, last = prompt_of(coder, task(coder, stdin_row("Double a number. Input: 21 Output: 42")))
    assert "coding" in instruction and "complete Python function" in instruction and "answer" in instruction
    assert state == "Double a number. Input: 21 Output: 42"
    assert "Actions left: 1. " in last and "8000 words" in last
    starter = "class Solution:\n    def double(self, n: int) -> int:"
    _, state, _ = prompt_of(coder, task(coder, stdin_row("Double it.", starter_code=f"{starter}\n        ")))
    assert state == f"Double it.\n\nStarter code:\n{starter}"


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("print(2 * int(input()))", 1.0),
        ("print(42)", 0.25),  # the public test counts like the others
        ("```python\nprint(2 * int(input()))\n```", 1.0),  # ours: fences are read
        ("print(0 || 1)", 0.0),  # cut where actions part
        ("exit()", 0.0),
    ],
)
def test_deepcoder_pays_the_fraction_of_all_tests(coder, program, reward):
    row = task(coder, stdin_row("Double a number. Input: 21 Output: 42"))
    assert (len(json.loads(row["tests"])), row["public"]) == (4, 0)
    play = coder.play(row, random.Random(0))
    assert play.respond(say(program)) is None
    assert (play.outcome.episode_return, play.outcome.success) == (reward, reward == 1.0)


@pytest.mark.needs("bubblewrap")
def test_without_the_preset_public_tests_earn_nothing():
    row = task(DeepCoder(workers=1), stdin_row("Double a number. Input: 21 Output: 42"))
    assert row["public"] == 1


@pytest.mark.needs("bubblewrap")
def test_all_tests_are_those_of_the_data():
    tests = [(f"{number}\n", f"{2 * number}\n") for number in range(150)]
    env = make_env("deepcoder", preset="ragen2")
    assert len(json.loads(task(env, stdin_row("Double.", tests))["tests"])) == 150
    assert env.dataset(1)[0]["public"] == 0


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The parts of the mixture as a folder, a problem or two each, in the splits that they have."""
    folder = tmp_path_factory.mktemp("deepcoder")
    files = {
        ("primeintellect", "train"): [stdin_row("p0"), stdin_row("p1"), stdin_row(" c0\n")],  # also for tests
        ("taco", "train"): [{"problem": "t0", "tests": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})}],
        ("lcbv5", "train"): [stdin_row("l0", starter_code="", metadata={})],
        ("lcbv5", "test"): [stdin_row("l1", starter_code="", metadata={})],
        ("codeforces", "test"): [stdin_row("c0"), stdin_row("c1")],
    }
    for (config, split), rows in files.items():
        (folder / config).mkdir(exist_ok=True)
        write_jsonl(folder / config / f"{split}.jsonl", rows)
    return str(folder)


@pytest.mark.needs("bubblewrap")
def test_the_mixture_trains_on_three_parts_and_tests_on_two(parts):
    env = make_env("deepcoder", preset="ragen2")
    assert sorted(env.dataset(split="train", data=parts)["problem"]) == ["l0", "p0", "p1", "t0"]
    assert sorted(env.dataset(split="test", data=parts)["problem"]) == ["c0", "c1", "l1"]


@pytest.mark.needs("bubblewrap")
def test_deepcoder_draws_reference_rows_from_the_tests_alone(parts):
    env = make_env("deepcoder", preset="ragen2", split="ragen2")
    order = ["c0", "c1", "l1"]
    for split, begin in (("train", 10_000), ("test", 123)):
        expected = [order[random.Random(seed).randint(0, 2)] for seed in range(begin, begin + 8)]
        rows = env.dataset(8, split=split, data=parts)
        assert rows["problem"][:] == expected
        assert rows["seed"][:] == [*range(begin, begin + 8)]


@pytest.mark.needs("bubblewrap")
def test_a_folder_without_a_part_of_the_mixture_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"data must be a folder with .*'taco'.* for config='mixture', got .* without"
    ):
        make_env("deepcoder", preset="ragen2").dataset(1, data=str(tmp_path))
