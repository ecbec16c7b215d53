"""SearchQA's tasks: generated worlds, HotpotQA's schema, and corpora."""

import json
import os
import random
import subprocess
import sys
import threading
import time
import zlib
from statistics import fmean

import pytest
from search_qa_rows import ROW, answer, multi, play

from ragen2_trl.envs.responses import format_response
from ragen2_trl.envs.search_qa.answers import parse_action
from ragen2_trl.envs.search_qa.environment import SearchQA, make_world
from ragen2_trl.envs.search_qa.http_retrieval import HTTPRetriever
from ragen2_trl.envs.search_qa.passages import Passage
from ragen2_trl.envs.search_qa.retrieval import BM25Retriever

# Generated worlds


def solve(env, row):
    """The turns of the oracle: what it was shown, what it did, and the play."""
    rng = random.Random(0)
    played, shown, done = env.play(row, rng), [], []
    while not played.done:
        shown.append(played.episode.observation())
        reasoning, actions = played.episode.plan(rng)
        done.append(actions[0])
        played.respond(format_response(reasoning, actions[: env.max_actions]))
    return played, shown, done


@pytest.mark.parametrize("options", [{"multi_turn": True}, {}, {"multi_turn": True, "max_turns": 2}])
def test_the_oracle_answers_every_question(options):
    env = SearchQA(**options)
    for row in env.dataset(200, seed=3):
        played, _, done = solve(env, row)
        assert (played.outcome.success, played.outcome.episode_return) == (True, 1.0)
        assert played.outcome.valid_turns == len(done) == min(3, env.max_turns)


def test_a_reader_finds_each_name_where_the_oracle_found_it():
    """What makes a world solvable: the question names the first title, its passage the second, that one the answer."""
    for row in multi().dataset(200, seed=4):
        _, shown, done = solve(multi(), row)
        assert [action.partition("[")[0] for action in done] == ["search", "search", "finish"]
        for text, action in zip(shown, done, strict=True):
            assert parse_action(action)[1] in text


def test_no_single_passage_links_question_and_answer():
    for row in multi().dataset(200, seed=5):
        (name,) = [p["title"] for p in row["passages"] if p["title"] in row["question"]]
        assert not any(
            name in p["title"] + p["text"] and row["answer"] in p["title"] + p["text"] for p in row["passages"]
        )


def test_demonstrations_reason_with_what_was_read():
    rows = multi().demonstrations(5, seed=0).to_list()
    assert len(rows) == 5
    for row in rows:
        first, found, second, _, last = (message["content"] for message in row["completion"])
        assert "I search for" in first
        assert second.removeprefix("<think>").partition(". ")[0] in found
        assert "So the answer is" in last


@pytest.mark.slow
def test_the_random_player_is_right_about_one_time_in_27():
    """Of 4,000 episodes 3.7% were right: half the answers are titles, and there are 12 of them."""
    env, outcomes = multi(), []
    for row in env.dataset(250, seed=0):
        for member in range(8):
            rng = random.Random(f"{row['seed']}/{member}")
            played = env.play(row, rng)
            while not played.done:
                played.respond(answer(played.episode.random_action(rng)))
            outcomes.append(played.outcome)
    assert fmean(outcome.success for outcome in outcomes) == pytest.approx(0.037, abs=0.013)
    assert all(outcome.valid_turns == outcome.turns for outcome in outcomes)


@pytest.mark.slow
def test_held_out_questions_never_appear_in_training():
    train = set(SearchQA().dataset(3000, seed=0)["question"])
    test = set(SearchQA().dataset(1000, seed=0, split="test")["question"])
    assert not train & test
    assert len(train) > 2900 and len(test) > 950


def test_seeds_decide_the_tasks_and_nothing_else_does():
    first = multi().dataset(50, seed=3)
    random.seed(1)
    assert multi().dataset(50, seed=3).to_list() == first.to_list()
    assert multi().dataset(20, seed=3).to_list() == first.to_list()[:20]
    assert not set(first["question"]) & set(multi().dataset(50, seed=4)["question"])
    random.seed(0)
    expected = random.random()
    random.seed(0)
    multi().demonstrations(5, seed=0)
    assert random.random() == expected


PROGRAM = """
import zlib
from ragen2_trl.envs.search_qa import SearchQA
print(zlib.crc32(repr(SearchQA(multi_turn=True).demonstrations(20, seed=5).to_list()).encode()))
"""


@pytest.mark.slow
def test_tasks_and_searches_are_equal_in_processes_with_different_hash_seeds():
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"  # this process has one of its own
    there = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        check=True,
        text=True,
    )
    here = SearchQA(multi_turn=True).demonstrations(20, seed=5).to_list()
    assert int(there.stdout) == zlib.crc32(repr(here).encode())


# Data


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def hotpot(tmp_path):
    return write(tmp_path / "hotpot.jsonl", [make_world(seed) for seed in range(200)])


def test_a_local_file_in_the_schema_of_the_hub_can_be_solved(hotpot):
    env = multi()
    train, test = (env.dataset(seed=0, split=split, data=hotpot) for split in ("train", "test"))
    assert len(train) + len(test) == 200 and len(test) > 20
    assert not set(train["question"]) & set(test["question"])
    assert sorted([*train["seed"], *test["seed"]]) == list(range(200))
    for row in list(train)[:50]:
        assert solve(env, row)[0].outcome.success
    assert env.dataset(seed=1, data=hotpot)["seed"][:] != train["seed"][:]
    assert env.dataset(seed=0, data=hotpot).to_list() == train.to_list()


def test_a_folder_is_split_as_its_files_are(tmp_path):
    write(tmp_path / "train.jsonl", [make_world(seed) for seed in range(30)])
    write(tmp_path / "validation.jsonl", [make_world(seed) for seed in range(100, 110)])
    train, test = (multi().dataset(seed=0, split=split, data=str(tmp_path)) for split in ("train", "test"))
    assert set(train["question"]) == {make_world(seed)["question"] for seed in range(30)}
    assert set(test["question"]) == {make_world(seed)["question"] for seed in range(100, 110)}


def test_rewards_of_a_dataset_are_those_of_its_plays(hotpot):
    rows = SearchQA().dataset(10, data=hotpot).to_dict()
    completions = [answer(f"finish[{right}]") for right in rows["answer"][:5]] + [answer("finish[no idea]")] * 5
    columns = {name: rows[name] for name in ("seed", "question", "answer", "evidence")}
    (rewards,) = SearchQA().reward_funcs
    assert rewards(prompts=rows["prompt"], completions=completions, **columns) == [1.0] * 5 + [0.0] * 5


def test_supporting_facts_of_hotpotqa_with_their_faults_are_read(tmp_path):
    row = {
        **make_world(0),
        "question": "Where was the director of Film B born?",
        "context": {
            "title": ["Ann", "Film B", "C"],
            "sentences": [["Ann was born.", " In Ruk."], ["Film B is a film.", " Ann directed it."], ["C."]],
        },
        # A number that is too large, a title that is not there, two sentences of one title, the second hop first.
        "supporting_facts": {"title": ["Ann", "Ann", "Film B", "C", "Gone"], "sent_id": [0, 1, 1, 9, 0]},
    }
    (task,) = (
        multi()
        .dataset(
            seed=0, split="train", data=write(tmp_path / "a.jsonl", [row, {**row, "question": row["question"] + "?"}])
        )
        .to_list()[:1]
    )
    assert task["evidence"] == [
        {"title": "Film B", "text": "Ann directed it."},
        {"title": "Ann", "text": "Ann was born. In Ruk."},
    ]
    assert task["passages"][0] == {"title": "Ann", "text": "Ann was born. In Ruk."}
    assert solve(multi(), task)[2][:2] == ["search[Film B]", "search[Ann]"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": ""}, r"column 'question' must be a text that is not empty, got ''"),
        ({"answer": None}, r"column 'answer' must be a text that is not empty, got None"),
        ({"context": [["title", ["a"]]]}, r"column 'context' must hold lists \['title', 'sentences'\] of one length"),
        ({"context": {"title": ["a"], "sentences": []}}, r"column 'context' must hold lists"),
        ({"context": {"title": [], "sentences": []}}, r"column 'context' must hold passages, got none"),
        (
            {"supporting_facts": None},
            r"column 'supporting_facts' must hold lists \['title', 'sent_id'\] of one length",
        ),
    ],
)
def test_rows_of_another_schema_are_named(tmp_path, change, message):
    data = write(tmp_path / "hotpot.jsonl", [{**make_world(0), **change}])
    with pytest.raises(ValueError, match=message):
        multi().dataset(1, data=data)


def test_a_row_without_passages_needs_a_corpus():
    row = {name: value for name, value in ROW.items() if name != "passages"}
    with pytest.raises(ValueError, match="column 'passages' must hold passages where there is no corpus"):
        multi().episode(row, random.Random(0))
    multi(corpus=BM25Retriever.build([Passage("a", "b")])).episode(row, random.Random(0))


# Corpora


def test_a_corpus_is_searched_in_place_of_the_passages(tmp_path):
    BM25Retriever.build([Passage("Mira", "Another Mira."), Passage("Zoo", "A zoo.")]).save(tmp_path / "index")
    env = multi(corpus=str(tmp_path / "index"))
    _, (message,) = play(env, "search[mira]")
    assert "[1] Mira: Another Mira." in message and "Belmin" not in message
    assert "passages" not in env.dataset(2).column_names
    assert env.workers == 1


def test_a_server_is_waited_for_by_many_episodes_at_once():
    env = multi(corpus="http://127.0.0.1:1")
    assert isinstance(env.retriever, HTTPRetriever) and env.workers > 1


def test_one_retriever_serves_plays_in_threads():
    class Slow:
        def __init__(self):
            self.inside = self.most = 0
            self.lock = threading.Lock()

        def search(self, queries, k):
            with self.lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
            time.sleep(0.02)
            with self.lock:
                self.inside -= 1
            return [[Passage(query, f"All of {query}.")] for query in queries]

    from ragen2_trl.envs.play import respond_all

    slow = Slow()
    plays = [multi(corpus=slow).play(ROW, random.Random(0)) for _ in range(16)]
    messages = respond_all(plays, [answer(f"search[word{i}]") for i in range(16)], workers=8)
    assert all(f"All of word{i}." in message for i, message in enumerate(messages))
    assert slow.most > 1
