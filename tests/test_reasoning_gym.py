"""Puzzles of reasoning-gym: rows, and scorers that read hostile text."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launching import launch
from torch.utils.data import DataLoader

from ragen2_trl.envs import make_env
from ragen2_trl.envs.reasoning_gym import environment, scorer
from ragen2_trl.envs.reasoning_gym.environment import Scorer, evaluating_functions, score_answer

pytestmark = pytest.mark.needs("reasoning-gym")
RUNS_ANSWERS = {
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}


def played(env, row, answer):
    play = env.play(row, None)
    play.respond(f"<think>So.</think><answer>{answer}</answer>")
    return play.outcome


def test_a_right_answer_is_solved_a_partly_right_one_is_not_and_another_is_nothing():
    env = make_env("reasoning_gym", task="basic_arithmetic", config={"min_terms": 2, "max_terms": 2})
    for row in env.dataset(5, seed=1):
        assert played(env, row, row["answer"]).success
        wrong = played(env, row, "no number")
        assert not wrong.success and wrong.episode_return < 1
    partly = make_env("reasoning_gym", task="letter_counting")
    assert not played(partly, partly.dataset(1)[0], "many").success


@pytest.mark.parametrize("task", [*sorted(RUNS_ANSWERS), "composite", "flying"])
def test_a_task_whose_scorer_runs_answers_as_programs_is_refused_by_name(task):
    """As is one that is made of others, and one that nobody knows."""
    with pytest.raises(ValueError, match=task):
        make_env("reasoning_gym", task=task)


@pytest.mark.parametrize("config", [{"wind": 1}, {"seed": 1}, {"min_animals": -3}])
def test_a_setting_that_a_generator_does_not_take_is_named(config):
    with pytest.raises(ValueError, match=next(iter(config))):
        make_env("reasoning_gym", config=config)


@pytest.mark.full
def test_every_other_task_gives_and_scores_rows():
    """What is offered has rows, and a score for any answer."""
    from reasoning_gym.factory import DATASETS

    offered = 0
    for task in sorted(set(DATASETS) - RUNS_ANSWERS - {"composite"}):
        try:
            env = make_env("reasoning_gym", task=task)
        except ValueError as refused:
            assert "runs them by" in str(refused), task
            continue
        row = env.dataset(1)[0]
        assert 0 <= played(env, row, "3").episode_return <= 1
        offered += 1
    assert offered > 90


def test_the_scorers_of_an_allowed_task_are_read_to_their_end():
    """What a scorer calls of its own package counts as the scorer's."""

    class Items:
        def score_answer(self, answer, entry):
            return self.helper(answer)

        def helper(self, answer):
            return eval(answer)

    Items.helper.__module__ = Items.score_answer.__module__ = "reasoning_gym.mine"
    assert evaluating_functions(Items().score_answer) == {"eval"}


@pytest.mark.parametrize(
    ("task", "answer"), [("coin_flip", "1e999999999"), ("rubiks_cube", "R999999999999"), ("coin_flip", "\0" * 50)]
)
def test_an_answer_without_end_costs_its_reward_and_not_the_training(task, answer):
    score_answer(task, "{}", 3, "warm")  # the program is running
    assert score_answer(task, "{}", 3, answer) < 0.1
    assert score_answer("leg_counting", "{}", 3, "nothing") == 0.0  # and the next is scored


@pytest.fixture
def ask(monkeypatch):
    """Scores an answer by a scorer that the test alone has, to which an answer may do anything."""
    monkeypatch.setattr(scorer, "__file__", str(Path(__file__).with_name("hostile_scorer.py")))
    score = Scorer()

    def ask(answer, number=0):
        return score("hostile", "{}", number, answer)

    ask.scorer = score
    yield ask
    score._end()


def ends(pid):
    """Whether a process ends; it is given a minute."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("answer", ["compute without end", "exit", "end", "crash", "print"])
def test_what_an_answer_does_to_its_scorer_is_worth_nothing_and_the_next_is_scored_right(answer, ask):
    for number in range(2):
        assert ask(answer, number) == 0.0
        assert ask("right", number) == 1.0
        assert ask("wrong", number) == 0.0


def test_a_scorer_that_fails_over_answers_says_so_once(ask, caplog):
    assert [ask("raise"), ask("raise"), ask("right")] == [0.0, 0.0, 1.0]
    (told,) = [record.getMessage() for record in caplog.records]
    assert "'hostile'" in told and "KeyError" in told and "raise" not in told


def test_a_scorer_that_neither_answers_nor_computes_is_ended(ask, monkeypatch):
    assert ask("right") == 1.0
    waiting = ask.scorer._process.pid
    with monkeypatch.context() as short:
        short.setattr(environment, "SECONDS_TO_SCORE", 0.5)
        assert ask("wait without end") == 0.0
    assert ends(waiting)
    assert ask("right") == 1.0


def test_a_scorer_that_ended_between_two_answers_takes_nothing_from_the_second(ask):
    assert ask("right") == 1.0
    ask.scorer._process.kill()
    assert ask("right") == 1.0


def test_a_task_that_no_scorer_can_make_is_an_error_and_no_score(ask):
    with pytest.raises(RuntimeError, match="hostile"):
        ask("right", number=666)
    assert ask("right") == 1.0


def test_a_scorer_that_does_not_start_says_why(monkeypatch, tmp_path):
    program = tmp_path / "broken.py"
    program.write_text("raise OSError('no memory here')")
    monkeypatch.setattr(scorer, "__file__", str(program))
    with pytest.raises(RuntimeError, match="no memory here"):
        environment.Scorer()("leg_counting", "{}", 0, "1")


@pytest.mark.parametrize("scorer_is_left", [False, True])
def test_an_interrupted_question_is_never_answered_in_place_of_the_next(scorer_is_left, ask, monkeypatch):
    """Ctrl-C before the scorer has the task, and once more while that scorer is ended."""
    assert ask("right") == 1.0
    with monkeypatch.context() as interrupted:
        if scorer_is_left:
            interrupted.setattr(ask.scorer, "_end", lambda: None)
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            ask("right", number=555)
            time.sleep(60)
    assert ask("wrong") == 0.0
    assert ask("right") == 1.0


class Scored:
    """Rows of a data loader, each scored where it is loaded."""

    def __init__(self, ask):
        self.ask = ask

    def __len__(self):
        return 8

    def __getitem__(self, number):
        right, wrong = (self.ask(answer, number) for answer in ("right", "wrong"))
        return right, wrong, self.ask.scorer._process.pid


def test_forked_workers_have_scorers_of_their_own(ask):
    assert ask("right") == 1.0
    own = ask.scorer._process.pid
    fork = multiprocessing.get_context("fork")
    rows = list(DataLoader(Scored(ask), batch_size=None, num_workers=2, multiprocessing_context=fork, timeout=120))
    assert [row[:2] for row in rows] == [[1.0, 0.0]] * 8
    theirs = {pid for _, _, pid in rows}
    assert len(theirs) == 2 and own not in theirs
    assert all(map(ends, theirs))
    assert ask("right") == 1.0 and ask.scorer._process.pid == own


ASKS_WITHOUT_END = """
from ragen2_trl.envs.reasoning_gym.environment import score_answer
score_answer("leg_counting", "{}", 3, "warm")
print(score_answer._process.pid, flush=True)
score_answer("coin_flip", "{}", 3, "1e999999999")
"""


def test_no_scorer_is_left_of_a_process_that_is_killed_in_the_middle_of_an_answer():
    with subprocess.Popen([sys.executable, "-c", ASKS_WITHOUT_END], stdout=subprocess.PIPE) as asking:
        pid = int(asking.stdout.readline())
        time.sleep(0.5)  # it is at the answer that takes for ever
        asking.kill()
    assert ends(pid)


@pytest.mark.slow
def test_puzzles_train_on_two_processes_each_with_a_scorer_of_its_own(tmp_path):
    launch("puzzles.py", 2, tmp_path)
    told = [json.loads((tmp_path / f"{process}.json").read_text()) for process in (0, 1)]
    for process in told:
        assert process["scores"] == process["expected"] and len(set(process["scores"])) == 2
        assert process["kept"] == [0.5, 0.5]
        assert process["moved"]
    assert told[0]["rewards"] == told[1]["rewards"] == [0.25, 0.25]
    pids = {process["scorer"] for process in told}
    assert len(pids) == 2
    assert all(map(ends, pids))


def test_the_solver_solves_and_no_text_raises():
    env = make_env("reasoning_gym")
    assert len(env.demonstrations(10, seed=0)) == 10
    row = env.dataset(1)[0]
    for text in ("", "3", "<think></think><answer></answer>", "<think></think><answer>" + "9" * 99_999 + "</answer>"):
        play = env.play(row, None)
        play.respond(text)
        assert play.done and play.outcome.episode_return == -0.1
