"""Numbers that the reference code logs: actions, best and mean of groups."""

import random

import pytest
import torch

from ragen2_trl.envs import make_env
from ragen2_trl.filtering import group_score, selection_metrics

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
