"""Numbers in the reference code's own form, beside ours: all turns in one matrix, actions, best and mean of groups."""

import random
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from players import Player, make_trainer, multi_turn_args
from players import policy_fixture as policy_fixture
from players import tokenizer_fixture as tokenizer_fixture
from scored_models import run_in_full

from ragen2_trl import MutualInformationCallback
from ragen2_trl.envs import make_env
from ragen2_trl.filtering import group_score, selection_metrics
from ragen2_trl.instrument.diagnosis import (
    REFERENCE_SCOPE,
    SCOPES,
    NotMeasurableError,
    Sampling,
    measure_trajectory_reference,
)
from ragen2_trl.instrument.information import information_metrics
from ragen2_trl.instrument.reasoning import find_turns


def played(tokenizer, count, turns=3, length=4):
    """Trajectories of different prompts with several turns of random ids."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(40, 120, (count, 2 + turns * (length + 1)), generator=generator).tolist()
    mask = ([1] * length + [0]) * turns
    return [find_turns(row[:2], row[2:], tokenizer, mask) for row in rows]


def measure(policy, trajectories, num=64, seed=0, **settings):
    generator = torch.Generator().manual_seed(seed)
    sampling = Sampling(num, **settings)
    return measure_trajectory_reference(policy, trajectories, [0] * len(trajectories), generator, sampling)


# All turns in one matrix


def test_all_turns_are_in_one_matrix_of_64_by_64_by_default(policy, tokenizer):
    measured = measure(policy, played(tokenizer, 128))
    assert tuple(measured.cross_logps.shape) == (64, 64)
    assert measured.prompt_index.tolist() == list(range(64))  # each draw is a column of its own
    assert len(set(measured.trajectories)) < 64  # with replacement
    assert 1 / 64 <= measured.metrics["retrieval_chance"] < 1.2 / 64  # equal contexts, drawn twice, are a class


def test_the_matrix_is_that_of_full_runs_of_every_pair(policy, tokenizer):
    trajectories = played(tokenizer, 4)
    measured = measure(policy, trajectories, 10)
    # The same draws, by hand.
    generator, turns = torch.Generator().manual_seed(0), []
    for _ in range(10):
        trajectory = trajectories[int(torch.randint(4, (), generator=generator))]
        turns.append(trajectory[sorted(torch.randperm(3, generator=generator)[:1].tolist())[0]])
    expected = run_in_full(policy, [list(turn.context) for turn in turns], [list(turn.reasoning) for turn in turns])
    torch.testing.assert_close(measured.cross_logps, expected, atol=1e-4, rtol=1e-5)
    classes = [[turn.context for turn in turns].index(turn.context) for turn in turns]
    metrics = information_metrics(
        expected,
        measured.lengths,
        torch.arange(10),
        prompt_class=torch.unique(torch.tensor(classes), return_inverse=True)[1],
    )
    assert measured.metrics["mi_token_tempered"] == pytest.approx(metrics["mi_token_tempered"], abs=1e-5)
    assert measured.metrics["retrieval_chance"] == pytest.approx(metrics["retrieval_chance"])
    chance = sum(classes.count(one) for one in classes) / 10 / 10
    assert measured.metrics["retrieval_chance"] == pytest.approx(chance)


def test_reasonings_that_stand_in_another_column_are_counted(policy, tokenizer):
    trajectories = played(tokenizer, 4)
    measured = measure(policy, trajectories, 10)
    contexts = [trajectories[i] for i in measured.trajectories]
    assert 0 < measured.metrics["verbatim_elsewhere"] < 1
    assert len(contexts) == 10
    assert measure(policy, played(tokenizer, 12, turns=1), 10).metrics["verbatim_elsewhere"] == 0
    # Contexts that tell no earlier reasoning, as `context="memory"` makes them, hold none, however long they are.
    told = [
        [replace(turn, context=turn.context_without_own_words, earlier=()) for turn in one] for one in trajectories
    ]
    assert measure(policy, told, 10).metrics["verbatim_elsewhere"] == 0


def test_draws_without_reasoning_are_lost(policy, tokenizer):
    silent = [find_turns([40, 41], [], tokenizer)] * 4
    assert 4 < len(measure(policy, played(tokenizer, 4) + silent, 24).lengths) < 24
    with pytest.raises(NotMeasurableError, match="no completion has reasoning"):
        measure(policy, silent)


def test_a_smaller_limit_of_prompts_is_kept(policy, tokenizer):
    assert tuple(measure(policy, played(tokenizer, 8), 12, max_prompts=6).cross_logps.shape) == (6, 6)


def test_it_is_logged_beside_ours_and_changes_neither_verdict_nor_the_other_scopes(policy, tokenizer, make_args):
    logged = []
    for scopes in (SCOPES, (*SCOPES, REFERENCE_SCOPE), (REFERENCE_SCOPE,)):
        trainer, _ = make_trainer(deepcopy(policy), tokenizer, multi_turn_args(make_args, max_steps=1))
        Player(trainer, tokenizer)
        trainer.add_callback(MutualInformationCallback(trainer, 1, scopes=scopes, min_prompts=2))
        trainer.train()
        row = next(row for row in trainer.state.log_history if "loss" in row)
        logged.append({key: value for key, value in row.items() if key.startswith("mi/") and key != "mi/seconds"})
    ours, both, alone = logged
    tokens = both.pop("mi/tokens"), ours.pop("mi/tokens")
    assert tokens[0] > tokens[1]
    assert {key: both[key] for key in ours} == ours
    added = {key.removeprefix(f"mi/{REFERENCE_SCOPE}/") for key in both.keys() - ours.keys()}
    assert {"retrieval_accuracy", "mi_token_tempered", "mi_zscore_ema_seq", "verbatim_elsewhere"} < added
    assert {f"mi/{REFERENCE_SCOPE}/{name}" for name in added} < alone.keys()
    assert not [key for key in alone if key.startswith("mi/regime")]  # what leaks has no verdict


# Actions


WALLS = {"seed": 0, "grid": "SFF\nFFF\nFFG"}


@pytest.mark.parametrize("observation", ["grid", "image"])
def test_an_action_has_an_effect_where_the_state_changes_or_the_episode_ends(observation):
    limits = {"max_actions": 4} if observation == "image" else {"max_turns": 4, "max_actions": 2}
    env = make_env("frozen_lake", size=3, observation=observation, **limits)
    play = env.play(WALLS, random.Random(0))
    if observation == "image":  # a single turn, whose last action runs into the wall
        play.take(["Right", "Right", "Right"])
        assert (play.outcome.num_actions, play.outcome.acting_turns, play.outcome.effective_turns) == (3, 1, 0)
        return
    for actions, expected in (
        (["Right", "Up"], (2, 1, 0)),  # the last one of a turn counts
        (["Up", "Right"], (4, 2, 1)),
        (["fly"], (4, 2, 1)),
        (["Down", "Down", "Up"], (6, 3, 2)),  # the third one is beyond the limit
    ):
        play.take(actions)
        outcome = play.outcome
        assert (outcome.num_actions, outcome.acting_turns, outcome.effective_turns) == expected
    assert play.outcome.turns == 4


def test_actions_that_follow_the_end_are_not_counted():
    play = make_env("frozen_lake", size=3, max_actions=10).play(WALLS, random.Random(0))
    play.take(["Right", "Right", "Down", "Down", "Up", "Up"])
    assert play.outcome.success
    assert (play.outcome.num_actions, play.outcome.effective_turns) == (4, 1)


# Groups


def test_best_and_mean_reward_of_groups_are_those_of_a_loop():
    rewards = torch.rand(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rewards[0, 1] = torch.nan
    rewards[3] = torch.nan
    metrics = selection_metrics(rewards, group_score(rewards), torch.ones(6, 4, dtype=torch.bool))
    groups = [[value for value in group if value == value] for group in rewards.tolist()]
    groups = [group for group in groups if group]
    assert len(groups) == 5
    assert metrics["in_group_max"] == pytest.approx(sum(map(max, groups)) / 5)
    assert metrics["in_group_mean"] == pytest.approx(sum(sum(group) / len(group) for group in groups) / 5)
    nothing = torch.full((2, 2), torch.nan)
    metrics = selection_metrics(nothing, group_score(nothing), torch.zeros(2, 2, dtype=torch.bool))
    assert (metrics["in_group_max"], metrics["in_group_mean"]) == (0, 0)
