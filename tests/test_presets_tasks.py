"""RAGEN-2's MetaMathQA, Countdown, SearchQA, WebShop and DeepCoder: what is said and shown, paid, and a success."""

import json
import random
import socket
from dataclasses import replace

import pytest
from every_task import tasks
from passages import write_jsonl
from retrieval_servers import (
    server_fixture,  # noqa: F401
    status,
)
from search_qa_rows import ROW
from webshop_visits import GOAL, JACKET, LAMP

from ragen2_trl.envs import make_env
from ragen2_trl.envs.ragen2 import protocol
from ragen2_trl.envs.ragen2.search_qa import RagenRetriever, final_answer
from ragen2_trl.envs.ragen2.webshop import ADVICE, RagenWebShopEpisode, fits_words, numbered_goal
from ragen2_trl.envs.search_qa.passages import Passage
from ragen2_trl.envs.webshop.catalogue import Catalogue, fits, score
from ragen2_trl.envs.webshop.visit import WebShopEpisode

HELPER = "You're a helpful assistant. "

FORM = "<think> [Your thoughts] </think> <answer> [your answer] </answer>"


class Rows:
    """A table of `size` rows, made when they are asked for, with the number of each in it."""

    def __init__(self, size, row):
        self.size, self.row = size, row
        self.column_names = list(row(0))

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        assert 0 <= index < self.size
        return self.row(index)

    def select(self, indices):
        return Rows(len(indices), self.row)


def say(answer, reasoning="Hm."):
    """A response as a model writes it behind the forced tag."""
    return f"{reasoning}</think> <answer>{answer}</answer>"


def prompt_of(env, row):
    """The system message's instruction and the state, of a prompt whose layout is RAGEN-2's."""
    system, user = (message["content"] for message in env.prompt(row))
    assert system.startswith(HELPER)
    start = "\nTurn 1:\nState:\n"
    assert user.startswith(start)
    state, line_break, last = user.removeprefix(start).rpartition("\n")
    assert line_break and FORM in last
    return system.removeprefix(HELPER), state, last


def limits(env):
    return env.max_turns, env.max_actions, env.max_total_actions, env.max_turn_tokens


def preset(name, **options):
    return make_env(name, preset="ragen2", **options)


def play(env, row, *texts):
    begun = env.play(row, random.Random(0))
    return begun, [begun.respond(text) for text in texts]


@pytest.mark.parametrize("name", tasks(["countdown", "metamath_qa", "search_qa", "webshop", "deepcoder"]))
def test_numbered_tasks_are_rows_of_data(name):
    with pytest.raises(ValueError, match=f"data must name rows, .* for {name} with split='ragen2', got None"):
        preset(name, split="ragen2").dataset(2)
    with pytest.raises(ValueError, match=r"num_prompts must be given for split='ragen2'.*got None"):
        preset(name, split="ragen2").dataset(data="anything")


# MetaMathQA

SUM = {"seed": 5, "question": "What is 2 + 3?", "answer": "5", "solution": ""}


@pytest.mark.parametrize(
    ("answer", "right", "reward"),
    [
        ("5", "5", 1.0),
        (" X + 1 ", "x+1", 1.0),
        ("0.5", "\\frac{1}{2}", 0.0),
        ("$5$", "5", 0.0),
        ("5.", "5", 0.0),
        ("5 || 7", "5", 1.0),  # the second piece is not looked at
        ("7 || 5", "5", 0.0),
        ("5", "", 0.0),  # a row without an answer can never be right
    ],
)
def test_metamath_qa_compares_texts_once(answer, right, reward):
    begun, (reply,) = play(preset("metamath_qa"), {**SUM, "answer": right}, say(answer))
    assert reply is None  # right or wrong, the first answer is the last
    assert (begun.outcome.episode_return, begun.outcome.success) == (reward, reward == 1.0)


def test_metamath_qa_draws_the_rows_of_ragen2(monkeypatch):
    def row(number):
        mark = "The answer is: 7\nThe answer is: 8" if number % 2 else "I do not know."
        return {"query": str(number), "response": mark, "original_question": ""}

    module = "ragen2_trl.envs.ragen2.metamath_qa.load_tasks"
    monkeypatch.setattr(module, lambda data, split: Rows(395_000, row) if split == "train" else None)
    env = preset("metamath_qa", split="ragen2")
    test, train = (env.dataset(2, split=split, data="rows") for split in ("test", "train"))
    assert test["question"][:] == ["27453", "145651"]
    assert train["question"][:] == ["302994", "186798"]
    assert (test["seed"][:], train["seed"][:]) == ([123, 124], [10000, 10001])
    # All that follows the first mark, or nothing.
    assert (test["answer"][0], train["answer"][0]) == ("7\nThe answer is: 8", "")


# Countdown

NUMBERS = {"seed": 1, "nums": [44, 19, 35], "target": 98}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("44+19+35", 1.0),
        ("44 - -19 + 35", 1.0),
        ("(35 + 44) + 19", 1.0),
        ("44+19*35", 0.1),
        ("44 + 19 + 35 = 98", 0.0),  # 98 counts as a number
        ("4.4+19+35", 0.0),
        ("44 + 19", 0.0),
        ("44 + 19 + 35 + 35", 0.0),
        ("98", 0.0),
        ("no numbers", 0.0),
        ("44, then 19, then 35", 0.1),  # no expression, but the numbers are right
        ("44 + 19 + 35 +", 0.1),
        ("44 / (19 - 19) + 35", 0.0),
        ("open('made', 'w') and 44 + 19 + 35", 0.1),
        ("44 ** 19 ** 35", 0.1),
        ("44 + 19 + 35 || 1", 1.0),  # cut where actions part
        ("44 + 19 + " + "9" * 50_000, 0.0),  # more digits than Python reads
    ],
)
def test_countdown_pays_what_ragen2_pays_and_evaluates_nothing(text, reward, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun, _ = play(preset("countdown"), NUMBERS, say(text))
    assert begun.done
    assert (begun.outcome.episode_return, begun.outcome.success) == (reward, reward == 1.0)
    assert list(tmp_path.iterdir()) == []


def test_countdown_numbers_the_rows_that_signs_solve(tmp_path, monkeypatch):
    rows = [
        {"nums": [44, 19, 35], "target": 98},
        {"nums": [2, 3, 7], "target": 42},  # a product
        {"nums": [63, 95, 96], "target": 64},
        {"nums": [5, 6], "target": 1},  # with a sign in front
        {"nums": [1, 1], "target": 2},  # beyond the first rows, below
    ]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    env = preset("countdown", split="ragen2")
    assert protocol.FIRST_ROWS == 20_000
    # Four rows remain: seeds 123 to 126 and 10000 to 10003 modulo 4.
    assert env.dataset(4, split="test", data=data)["target"][:] == [2, 98, 64, 1]
    assert env.dataset(4, split="train", data=data)["target"][:] == [98, 64, 1, 2]
    monkeypatch.setattr(protocol, "FIRST_ROWS", 4)
    assert env.dataset(3, split="train", data=data)["target"][:] == [64, 1, 98]  # 10000 modulo 3 is 1
    held_out = [preset("countdown").tasks(0, split, data) for split in ("train", "test")]
    assert sorted(row["target"] for tasks in held_out for row in tasks) == [1, 64, 98]


# SearchQA


class Found:
    """A search engine that always finds the same."""

    def __init__(self, *passages):
        self.passages = list(passages)

    def search(self, queries, k):
        return [self.passages[:k] for _ in queries]


ACTIONS = "Available actions: search[<query>], finish[<answer>]"


def test_search_qa_shows_documents_with_scores():
    found = Found(Passage("Osk", "A river.", "doc_3", 1.23456), Passage("", "Belmin is a town.", "7", 0.5))
    _, (reply,) = play(preset("search_qa", corpus=found), ROW, say("search[the river]"))
    assert reply.startswith(
        "Reward:\n0.0\n\nTurn 2:\nState:\nSearch results for 'the river':\n"
        "[Document 1] (ID: doc_3, Score: 1.235)\nOsk\nA river.\n\n"
        f"[Document 2] (ID: 7, Score: 0.500)\nBelmin is a town.\n\n{ACTIONS}\nActions left: 9. "
    )


@pytest.mark.parametrize(
    ("passages", "results"),
    [
        ([], "No relevant documents found for the query."),
        ([Passage("", "x" * 801, "a", 1.0)], f"[Document 1] (ID: a, Score: 1.000)\n{'x' * 800}..."),
        ([Passage("", "x" * 800, "a", 1.0)], f"[Document 1] (ID: a, Score: 1.000)\n{'x' * 800}"),
    ],
)
def test_search_qa_cuts_documents(passages, results):
    begun, _ = play(preset("search_qa", corpus=Found(*passages)), ROW, say("search[x]"))
    assert begun.episode.observation() == f"Search results for 'x':\n{results}\n\n{ACTIONS}"


def test_search_qa_cuts_results_at_4000_characters_and_five_documents():
    begun, _ = play(preset("search_qa", corpus=Found(*[Passage("", "x" * 900)] * 9)), ROW, say("search[x]"))
    results = begun.episode.observation().split(":\n", 1)[1].removesuffix(f"\n\n{ACTIONS}")
    assert len(results) == 4003 and results.endswith("...")
    begun, _ = play(preset("search_qa", corpus=Found(*[Passage("", "x")] * 9)), ROW, say("search[x]"))
    assert begun.episode.observation().count("[Document") == 5


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("finish[Kingdom of Ruk]", 1.0),
        ("finish[the kingdom of Ruk!]", 1.0),
        ("finish[Ruk]", 0.5),  # F1 of one word of three: a success
        ("finish[Kingdom of Osk, Kingdom of Ruk]", pytest.approx(2 / 3)),  # a hedge pays
        ("finish[Osk]", 0.0),
        ("finish[]", 0.0),
        ("Kingdom of Ruk", 1.0),  # any text is an answer
        ("Finish[Kingdom of Ruk]", pytest.approx(2 * 2 / (3 + 3))),  # and so is an action in capitals
        ("The answer is Kingdom of Ruk.", 1.0),
        ("finish[Kingdom of Ruk || Osk]", pytest.approx(2 * 2 / (3 + 3))),  # cut where actions part: no bracket closes
    ],
)
def test_search_qa_pays_f1_and_any_of_it_is_success(text, reward):
    begun, _ = play(preset("search_qa"), ROW, say(text))
    assert begun.done
    assert begun.outcome.episode_return == reward
    assert begun.outcome.success == (begun.outcome.episode_return > 0)
    assert begun.outcome.measures["f1_success"] == begun.outcome.success
    assert begun.outcome.measures["exact_match"] == (begun.outcome.episode_return == 1.0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"**Osk** and \boxed{Ruk}", "Ruk"),
        ("the answer is Osk, *Ruk*", "Ruk"),
        ("**It** is; the answer is Ruk.", "Ruk"),
        ("Therefore Osk. The answer is: Ruk\nOsk", "Ruk"),
        ("It rains. Thus, Ruk of old. Osk.", "Ruk of old"),
        ("So no. A sentence. More.", "A sentence"),
        ("Hm. Kingdom of Ruk! Osk.", "Kingdom of Ruk"),
        ("Ruk", "Ruk"),
        ("a." * 60, "a." * 50),
    ],
)
def test_answers_are_taken_out_of_texts_in_the_order_of_ragen2(text, answer):
    assert final_answer(text) == answer


def shown_failure(env):
    begun, _ = play(env, ROW, say("search[x]"))
    assert not begun.done
    return begun.episode.observation().split("\n")[1]


def test_failures_of_a_server_are_shown_as_results_after_one_try(server):
    for code in (500, 404):
        server.faults = [status(code)]
        error = f"Retrieval server error (status {code}): no"
        assert shown_failure(preset("search_qa", corpus=server.url)) == error
    assert len(server.requests) == 2


def test_a_server_that_is_not_there_or_slow_is_shown_as_a_result():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        closed = f"Could not connect to retrieval server at http://{address}. Is it running?"
        assert shown_failure(preset("search_qa", corpus=f"http://ann:secret@{address}")) == closed
    with socket.create_server(("127.0.0.1", 0)) as silent:
        slow = RagenRetriever(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.1, retries=0)
        late = "Search request timed out after 0.1 seconds."
        assert shown_failure(preset("search_qa", corpus=slow)) == late


def test_search_qa_takes_row_seed_modulo_20000_of_the_training_file(monkeypatch):
    def row(number):
        return {
            "question": str(number),
            "answer": "Ruk",
            "context": {"title": ["Ruk"], "sentences": [["A land."]]},
            "supporting_facts": {"title": ["Ruk"], "sent_id": [0]},
        }

    def load(data, split, config):
        assert (split, config) == ("train", "distractor")
        return Rows(90_447, row)

    monkeypatch.setattr("ragen2_trl.envs.search_qa.environment.load_tasks", load)
    env = preset("search_qa", split="ragen2")
    assert env.dataset(2, split="test", data="hotpot")["question"][:] == ["123", "124"]
    assert env.dataset(2, split="train", data="hotpot")["question"][:] == ["10000", "10001"]
    (late,) = env.numbered_tasks(iter([20_123]), "train", "hotpot")
    assert (late["seed"], late["question"]) == (20_123, "123")
    assert json.loads(json.dumps(late["passages"])) == [{"title": "Ruk", "text": "A land."}]


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


TESTS = [("21\n", "42\n"), ("1\n", "2\n"), ("5\n", "10\n"), ("0\n", "0\n")]


def stdin_row(problem, tests=TESTS, **fields):
    return {"problem": problem, "tests": json.dumps([{"input": a, "output": b} for a, b in tests]), **fields}


@pytest.fixture(scope="module")
def coder():
    return make_env("deepcoder", preset="ragen2", workers=1)


def task(env, source):
    return env._task(1, source)


@pytest.mark.needs("bubblewrap")
def test_starter_code_stands_below_the_problem(coder):
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


# All of them

LIMITS = {  # turns, actions of a turn, actions in all, tokens of a turn
    "bandit": (1, 1, 1, 500),
    "countdown": (1, 1, 1, 400),
    "deepcoder": (1, 1, 1, 4000),
    "frozen_lake": (5, 2, 10, 400),
    "metamath_qa": (5, 2, 1, 400),
    "search_qa": (5, 1, 10, 400),
    "sokoban": (5, 2, 10, 400),
    "webshop": (9, 1, 9, 400),
}
SAID = {  # a row, its state, and the words that an answer may have
    "countdown": (lambda env: NUMBERS, "Target: 98, nums: [44, 19, 35]", 100),
    "deepcoder": (lambda env: task(env, stdin_row("Double a number.")), "Double a number.", 8000),
    "metamath_qa": (lambda env: SUM, SUM["question"], 100),
    "search_qa": (lambda env: ROW, f"Question: {ROW['question']}\n{ACTIONS}", 300),
    "webshop": (lambda env: env.dataset(1)[0], f"Instruction: [wish].{ADVICE}\nsearch[<content>]", 200),
}


@pytest.mark.parametrize("name", tasks(LIMITS))
def test_limits_are_those_of_the_reference_s_scripts(name):
    assert limits(preset(name)) == LIMITS[name]


@pytest.mark.parametrize("name", tasks(SAID))
def test_a_prompt_shows_the_state_and_what_is_left(name):
    env, (row_of, state, words) = preset(name), SAID[name]
    row = row_of(env)
    _, shown, last = prompt_of(env, row)
    assert shown == state.replace("[wish]", row.get("instruction", ""))
    assert f"Actions left: {LIMITS[name][2]}. " in last and f"{words} words" in last
