"""Play of every task: turns, limits, solvers and random players, and what no text can do."""

import math
import random
import re
from functools import cache

import pytest
from every_task import (
    NONSENSE,
    environment,
    every_fuzzed_mode,
    every_mode,
    first_episode,
    first_texts,
    has_random_player,
    has_solver,
    rows_of,
    solve,
    turns,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen2_trl.envs import EpisodeOutcome, format_response, make_env, respond_all
from ragen2_trl.envs.tasks import SPLITS

# Play


def test_an_invalid_turn_earns_what_the_environment_is_told():
    for reward in (0.0, -0.5):
        env = make_env("frozen_lake", invalid_reward=reward)
        play = env.play(env.dataset(1)[0], random.Random(0))
        play.respond("I give up.")
        assert play.outcome.episode_return == reward and env.options["invalid_reward"] == reward
    with pytest.raises(ValueError, match=r"invalid_reward must be between -10\.0 and 0\.0, got 0\.5"):
        make_env("frozen_lake", invalid_reward=0.5)


@every_mode
def test_an_invalid_turn_costs_a_tenth_and_changes_nothing_else(name, multi_turn):
    env = environment(name, multi_turn)
    for row in rows_of(env, 10):
        play = env.play(row, random.Random(0))
        shown = play.episode.observation()
        message = play.respond("I give up.")
        assert play.outcome == EpisodeOutcome(-0.1, False, turns=1, valid_turns=0, measures=play.episode.measures)
        assert play.episode.observation() == shown and not play.episode.done
        if env.max_turns == 1:
            assert message is None and play.done
        else:
            told = f"Invalid answer. Reward -0.1. Turn 2 of {env.max_turns}."
            assert message == env.message(play, "Invalid answer. Reward -0.1.") and message.startswith(f"{told}\n")


@every_mode
def test_an_unknown_action_costs_a_tenth_once_and_the_others_are_carried_out(name, multi_turn):
    env = environment(name, multi_turn)
    row, episode = rows_of(env, 1)[0], first_episode(env)
    if episode.is_action(NONSENSE) or not has_random_player(episode):
        pytest.skip(f"{name} has no unknown actions, or no random player")
    for seed in range(20):
        play, beyond = env.play(row, random.Random(0)), env.play(row, random.Random(0))
        action = play.episode.random_action(random.Random(seed))
        known = [action] * (env.max_actions - 1)
        without = env.play(row, random.Random(0))
        play.take([NONSENSE, *known])
        without.take(known or [NONSENSE])
        assert play.outcome.valid_turns == 0
        assert play.outcome.episode_return == pytest.approx(without.outcome.episode_return - 0.1 * bool(known))
        assert play.episode.observation() == without.episode.observation()
        beyond.take([action] * env.max_actions + [NONSENSE])
        assert beyond.outcome.valid_turns == 1


@every_mode
def test_play_ends_with_its_turns(name, multi_turn):
    env = environment(name, multi_turn)
    play = env.play(rows_of(env, 1)[0], random.Random(0))
    messages = [play.respond("") for _ in range(env.max_turns)]
    assert [message is None for message in messages] == [False] * (env.max_turns - 1) + [True]
    assert play.done and not play.episode.done
    assert play.outcome.turns == env.max_turns
    assert play.outcome.episode_return == pytest.approx(-0.1 * env.max_turns)


@every_mode
def test_the_return_is_the_sum_of_the_rewards_that_were_told(name, multi_turn):
    env, rng = environment(name, multi_turn), random.Random(0)
    for row in rows_of(env, 20):
        read, taken = env.play(row, random.Random(1)), env.play(row, random.Random(1))
        told = []
        for actions in turns(read, rng):
            status = taken.take(actions)
            message = read.respond(format_response("", actions))
            assert message is None or message.startswith(status)
            (reward,) = re.findall(r"Reward (-?\d+(?:\.\d+)?(?:e-?\d+)?)\.(?: |$)", status)
            told.append(float(reward))
        assert read.outcome == taken.outcome
        assert (taken.outcome.turns, taken.done) == (len(told), True)
        assert sum(told) == pytest.approx(read.outcome.episode_return, abs=1e-4)


@every_mode
def test_an_episode_that_is_over_stays_as_it_is(name, multi_turn):
    env = environment(name, multi_turn)
    play = env.play(rows_of(env, 1)[0], random.Random(0))
    while not play.done:
        play.respond("")
    before = play.outcome
    assert play.respond("") is None
    assert play.outcome == before


@every_mode
def test_the_solver_solves_every_task(name, multi_turn):
    env = make_env(name, multi_turn=multi_turn)  # as it is by default, without noise
    if not has_solver(first_episode(env)):
        pytest.skip(f"{name} has no solver")
    rows = [row for split in SPLITS for row in rows_of(env, 60, split=split)]
    outcomes = [solve(env.play(row, random.Random(0)), random.Random(0)) for row in rows]
    assert all(outcome.success and outcome.valid_turns == outcome.turns for outcome in outcomes)


@pytest.mark.slow
@every_mode
def test_random_players_name_actions(name, multi_turn):
    env = environment(name, multi_turn)
    if not has_random_player(first_episode(env)):
        pytest.skip(f"{name} has no random player")
    drawn, rng = set(), random.Random(0)
    for row in rows_of(env, 10):
        play = env.play(row, rng)
        while not play.done:
            drawn.add(action := play.episode.random_action(rng))
            assert play.episode.is_action(action)
            play.take([action])
    assert len(drawn) > 1


@pytest.mark.slow
@every_mode
def test_plays_side_by_side_are_plays_one_by_one(name, multi_turn):
    env = environment(name, multi_turn)
    rows = rows_of(env, 12)
    texts = first_texts(env, rows)

    def outcomes(workers):
        plays = [env.play(row, random.Random(0)) for row in rows]
        messages = respond_all(plays, texts, workers)
        return messages, [play.outcome for play in plays]

    assert outcomes(workers=4) == outcomes(workers=1)


# Hostile text


PIECES = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "||", " ", "\n", "<", "\x00", "\ud800", "1"])


@cache
def _fuzzed(name, multi_turn):
    """A task, actions that its players take there, and the best return that its solver reaches."""
    env = environment(name, multi_turn)
    row = rows_of(env, 1)[0]
    known, best = {NONSENSE, env.example}, math.inf
    if has_random_player(first_episode(env)):
        known |= {env.episode(row, random.Random(0)).random_action(random.Random(seed)) for seed in range(20)}
    if has_solver(first_episode(env)):
        plans = [env.episode(row, random.Random(0)).plan(random.Random(seed))[1] for seed in range(5)]
        known |= {action for plan in plans for action in plan}
        best = max(solve(env.play(row, random.Random(seed)), random.Random(seed)).episode_return for seed in range(20))
    return env, row, sorted(known), best


@pytest.mark.slow
@every_fuzzed_mode
@settings(max_examples=60)
@given(data=st.data())
def test_no_text_raises_and_none_earns_more_than_the_solver(name, multi_turn, data):
    env, row, known, best = _fuzzed(name, multi_turn)
    actions = st.lists(st.one_of(st.text(max_size=30), st.sampled_from(known)), max_size=12)
    texts = st.one_of(
        st.text(max_size=60), st.lists(PIECES, max_size=20).map("".join), actions.map(lambda a: format_response("", a))
    )
    play = env.play(row, random.Random(0))
    while not play.done:
        message = play.respond(data.draw(texts))
        assert play.done == (message is None)
    assert math.isfinite(play.outcome.episode_return)
    assert play.outcome.episode_return <= best + 1e-9
    assert 1 <= play.outcome.turns <= env.max_turns


@every_fuzzed_mode
@settings(max_examples=60)
@given(action=st.text())
def test_no_text_in_an_action_raises(name, multi_turn, action):
    env, row, _, _ = _fuzzed(name, multi_turn)
    episode = env.episode(row, random.Random(0))
    if episode.is_action(action):
        assert math.isfinite(episode.step(action))
        assert isinstance(episode.observation(), str)
