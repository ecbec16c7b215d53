"""Demonstrations of every task that has a solver."""

import random

import pytest
from every_task import demonstrations_of, every_mode, every_task, first_episode, has_solver, rows_of
from PIL import Image

from ragen2_trl.envs import Episode, FrozenLake, make_env, parse_response


@every_mode
def test_demonstrations_are_whole_episodes_that_solve_their_tasks(name, multi_turn):
    env = make_env(name, multi_turn=multi_turn)
    if not has_solver(first_episode(env)):
        pytest.skip(f"{name} has no solver")
    rows, told = rows_of(env, 30, seed=7), demonstrations_of(env, 30, seed=7)
    for row, conversation in zip(rows, told, strict=True):
        play = env.play(row, random.Random(0))
        assert conversation["prompt"] == row["prompt"]
        *earlier, last = conversation["completion"]
        answers = [answer["content"] for answer in earlier[::2]]
        for number, (answer, reply) in enumerate(zip(earlier[::2], earlier[1::2], strict=True)):
            check_answer(env, answer)
            told_now = {"role": "user", "content": play.respond(answer["content"])}
            assert reply == told_now or reply["content"] in replies(env, row, answers[: number + 1])
        check_answer(env, last)
        assert play.respond(last["content"]) is None
        assert play.outcome.success


def replies(env, row, answers):
    """What the last of some answers may be told: chance is drawn anew."""
    for seed in range(60):
        play = env.play(row, random.Random(seed))
        yield [play.respond(answer) for answer in answers][-1]


def check_answer(env, answer):
    assert answer["role"] == "assistant"
    response = parse_response(answer["content"], split=env.splits_answers)
    assert response.reasoning and 1 <= len(response.actions) <= env.max_actions


def test_demonstrations_that_chance_has_spoiled_are_left_out():
    env = FrozenLake(slip=0.5)
    rows = env.demonstrations(100, seed=0)
    assert 0 < len(rows) < 100
    clean = FrozenLake(slip=0.0).demonstrations(100, seed=0)
    assert len(clean) == 100


def test_demonstrations_of_pictures_show_them_and_those_of_tools_are_refused():
    rows = FrozenLake(observation="image").demonstrations(3, seed=0)
    assert all(isinstance(row["image"], Image.Image) for row in rows)
    with pytest.raises(ValueError, match=r"protocol must be 'text' for demonstrations, .* got 'tools'"):
        FrozenLake(protocol="tools").demonstrations(1, seed=0)


@pytest.mark.slow
@every_task
def test_demonstrations_are_of_training_tasks(name):
    env = make_env(name)
    if not has_solver(first_episode(env)):
        pytest.skip(f"{name} has no solver")
    shown = {turn["prompt"][1]["content"] for turn in demonstrations_of(env, 50)}
    assert shown == {row["prompt"][-1]["content"] for row in rows_of(env, 50)}


def test_tasks_without_a_solver_say_so():
    class Unsolvable(Episode):
        def observation(self):
            return ""

        def is_action(self, action):
            return True

        def step(self, action):
            return 0.0

    class NoSolver(FrozenLake):
        def episode(self, row, rng):
            return Unsolvable()

    with pytest.raises(NotImplementedError, match="Unsolvable has no solver"):
        NoSolver().demonstrations(1, seed=0)
    with pytest.raises(NotImplementedError, match="Unsolvable has no random baseline"):
        Unsolvable().random_action(random.Random(0))
    with pytest.raises(NotImplementedError, match="Unsolvable has no pictures"):
        Unsolvable().image()
