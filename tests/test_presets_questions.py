"""RAGEN-2's MetaMathQA, Countdown and SearchQA: what is said, how it is laid out, what is paid, what is a success."""

import json
import random
import re
import socket

import pytest
from every_task import tasks
from passages import write_jsonl
from ragen_prompts import Rows, limits, prompt_of, say
from retrieval_servers import (
    server_fixture,  # noqa: F401
    status,
)
from search_qa_rows import ROW

from ragen2_trl.envs import make_env
from ragen2_trl.envs.ragen2 import protocol
from ragen2_trl.envs.ragen2.search_qa import RagenRetriever, final_answer
from ragen2_trl.envs.search_qa.passages import Passage


def preset(name, **options):
    return make_env(name, preset="ragen2", **options)


def play(env, row, *texts):
    begun = env.play(row, random.Random(0))
    return begun, [begun.respond(text) for text in texts]


@pytest.mark.parametrize("name", tasks(["countdown", "metamath_qa", "search_qa", "webshop", "deepcoder"]))
def test_numbered_tasks_are_rows_of_data(name):
    with pytest.raises(ValueError, match=f"data must name rows, .* for {name} with split='ragen2', got None"):
        preset(name, split="ragen2").dataset(2)
    with pytest.raises(ValueError, match="num_prompts must be given where split='ragen2' has no end, got None"):
        preset(name, split="ragen2").dataset(data="anything")


# MetaMathQA

SUM = {"seed": 5, "question": "What is 2 + 3?", "answer": "5", "solution": ""}


def test_metamath_qa_says_what_ragen2_says():
    env = preset("metamath_qa")
    assert limits(env) == (5, 2, 1, 400)
    instruction, state, last = prompt_of(env, SUM)
    assert instruction == "You are solving Math problems. "
    assert state == "What is 2 + 3?"
    assert "Actions left: 1. " in last and "100 words" in last


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


def test_metamath_qa_charges_unreadable_turns_and_warns():
    begun, replies = play(preset("metamath_qa"), SUM, "5", "no tags", say("5"))
    assert replies[1].startswith("Reward:\n0\n\nTurn 3:\nState:\nWhat is 2 + 3?\n")
    assert begun.outcome.success
    assert begun.outcome.episode_return == pytest.approx(0.8)


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


def test_countdown_says_what_ragen2_says():
    env = preset("countdown")
    assert limits(env) == (1, 1, 1, 400)
    instruction, state, last = prompt_of(env, NUMBERS)
    order = ["numbers", "equation", "target", "<think>", "</think><answer>"]
    assert [*map(instruction.index, order)] == sorted(map(instruction.index, order))
    assert state == "Target: 98, nums: [44, 19, 35]"
    assert "Actions left: 1. " in last and "100 words" in last


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


def test_an_equation_of_the_numbers_themselves_is_no_expression():
    begun, _ = play(preset("countdown"), {"seed": 1, "nums": [3, 4, 7], "target": 7}, say("3 + 4 = 7"))
    assert begun.outcome.episode_return == 0.1


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


def test_search_qa_says_what_ragen2_says():
    env = preset("search_qa")
    assert limits(env) == (5, 1, 10, 400)
    instruction, state, last = prompt_of(env, ROW)
    order = ["search agent", "search[query]", "finish[answer]", "step by step", "<think>", "<answer>", "Examples:"]
    assert [*map(instruction.index, order)] == sorted(map(instruction.index, order))
    examples = instruction.split("Examples:\n")[1]
    assert re.fullmatch(r"  <think>.*search\[.*\n  <think>.*finish\[.*\n", examples)
    assert state == f"Question: {ROW['question']}\n{ACTIONS}"
    assert "Actions left: 10. " in last and "300 words" in last


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


def test_both_kinds_of_success_are_logged():
    env, logged = make_env("search_qa", multi_turn=True), {}
    outcomes = [
        play(env, ROW, f"<think></think><answer>finish[{text}]</answer>")[0].outcome for text in ("Ruk", "Osk")
    ]
    env.reward_funcs[0](
        prompts=["", ""],
        completions=["", ""],
        seed=[7, 7],
        episode=[vars(outcome) for outcome in outcomes],
        log_metric=logged.__setitem__,
    )
    assert logged["env/search_qa/success"] == 0.0
    assert logged["env/search_qa/exact_match"] == 0.0
    assert logged["env/search_qa/f1_success"] == 0.5


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
