"""Puzzles of reasoning-gym: rows, and scorers that read hostile text."""

import json

import pytest

from ragen2_trl.envs import make_env
from ragen2_trl.envs.reasoning_gym.environment import evaluating_functions, score_answer

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


@pytest.mark.parametrize("task", sorted(RUNS_ANSWERS))
def test_a_task_whose_scorer_runs_answers_as_programs_is_refused_by_name(task):
    with pytest.raises(ValueError, match=task):
        make_env("reasoning_gym", task=task)


@pytest.mark.slow
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


def test_settings_of_a_generator_are_checked():
    for config, named in (({"wind": 1}, "wind"), ({"seed": 1}, "seed"), ({"min_animals": -3}, "min_animals")):
        with pytest.raises(ValueError, match=named):
            make_env("reasoning_gym", config=config)
    with pytest.raises(ValueError, match="leg_counting"):
        make_env("reasoning_gym", task="flying")
    assert json.loads(make_env("reasoning_gym", config={"max_animals": 4}).config) == {"max_animals": 4}


def test_splits_never_meet_and_equal_seeds_give_equal_rows():
    env = make_env("reasoning_gym", task="leg_counting", config={"max_animals": 3})
    train, test = (set(env.dataset(200, split=split)["question"]) for split in ("train", "test"))
    assert not train & test
    assert env.dataset(20, seed=3).to_list() == env.dataset(20, seed=3).to_list() != env.dataset(20, seed=4).to_list()
    assert all(row["answer"] not in row["prompt"][0]["content"] for row in env.dataset(20))


def test_the_solver_solves_and_no_text_raises():
    env = make_env("reasoning_gym")
    assert len(env.demonstrations(10, seed=0)) == 10
    row = env.dataset(1)[0]
    for text in ("", "3", "<think></think><answer></answer>", "<think></think><answer>" + "9" * 99_999 + "</answer>"):
        play = env.play(row, None)
        play.respond(text)
        assert play.done and play.outcome.episode_return == -0.1
