"""Rewards of every task, of single turns, of episodes that were played, and of tools."""

import random

import pytest
from every_task import (
    NONSENSE,
    columns_of,
    environment,
    every_mode,
    every_mode_with_tools,
    every_multi_turn,
    every_single_turn,
    first_texts,
    rewards_of,
    rows_of,
    turns,
)
from transformers.utils import get_json_schema

from ragen2_trl.columns import EPISODE
from ragen2_trl.envs import EpisodeOutcome, format_response, respond_all

# Reward functions


@every_single_turn
def test_reward_functions_play_single_turns(name):
    env = environment(name)
    rows = [row for row in rows_of(env, 8) for _ in range(3)]
    texts = first_texts(env, rows)
    (returns,) = env.reward_funcs
    assert (returns.__name__, env.success_func.__name__) == (f"{name}_return", f"{name}_success")
    plays = env.plays([row["seed"] for row in rows], columns_of(rows))
    respond_all(plays, texts)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    arguments = {"prompts": [row["prompt"] for row in rows], "completions": completions, **columns_of(rows)}
    assert returns(**arguments) == [play.outcome.episode_return for play in plays]
    assert env.success_func(**arguments) == [float(play.outcome.success) for play in plays]


@every_single_turn
def test_reward_functions_log_what_came_of_the_episodes(name):
    env = environment(name)
    rows = [row for row in rows_of(env, 8) for _ in range(2)]
    texts = first_texts(env, rows)
    plays = env.plays([row["seed"] for row in rows], columns_of(rows))
    respond_all(plays, texts)
    outcomes = [play.outcome for play in plays]
    logged, columns = {}, {}
    env.reward_funcs[0](
        prompts=[None] * len(rows),
        completions=texts,
        **columns_of(rows),
        log_metric=logged.__setitem__,
        log_extra=columns.__setitem__,
        trainer_state=None,
    )
    assert columns == {"success": [float(outcome.success) for outcome in outcomes]}  # what groups may be scored by
    pairs = list(zip(outcomes[::2], outcomes[1::2], strict=True))
    assert logged == {
        f"env/{name}/failed": 0.0,
        f"env/{name}/success": pytest.approx(sum(outcome.success for outcome in outcomes) / len(rows)),
        f"env/{name}/return": pytest.approx(sum(outcome.episode_return for outcome in outcomes) / len(rows)),
        f"env/{name}/turns": 1.0,
        f"env/{name}/valid_rate": pytest.approx(sum(outcome.valid_turns for outcome in outcomes) / len(rows)),
        f"env/{name}/num_actions": pytest.approx(sum(outcome.num_actions for outcome in outcomes) / len(rows)),
        f"env/{name}/action_is_valid": pytest.approx(sum(outcome.acting_turns for outcome in outcomes) / len(rows)),
        f"env/{name}/action_is_effective": pytest.approx(
            sum(outcome.effective_turns for outcome in outcomes) / len(rows)
        ),
        f"env/{name}/pass@2": pytest.approx(sum(a.success or b.success for a, b in pairs) / len(pairs)),
        **{
            f"env/{name}/{measure}": pytest.approx(sum(outcome.measures[measure] for outcome in outcomes) / len(rows))
            for measure in outcomes[0].measures
        },
    }


def acted(num_actions, acting_turns, effective_turns):
    return {"num_actions": num_actions, "acting_turns": acting_turns, "effective_turns": effective_turns}


@every_mode
def test_episodes_that_were_played_are_not_played_again(name, multi_turn):
    env = environment(name, multi_turn)
    row = rows_of(env, 1)[0]
    episodes = [
        {"episode_return": 0.25, "success": False, "turns": 4, "valid_turns": 3, **acted(5, 3, 1)},
        {"episode_return": 7.5, "success": True, "turns": 2, "valid_turns": 2, **acted(4, 2, 2)},
    ]
    rewards, logged = rewards_of(env, [row, row], **{EPISODE: episodes})
    assert rewards == [0.25, 7.5]
    assert rewards_of(env, [row, row], env.success_func, **{EPISODE: episodes})[0] == [0.0, 1.0]
    assert logged == {
        f"env/{name}/failed": 0.0,
        f"env/{name}/success": 0.5,
        f"env/{name}/return": pytest.approx(3.875),
        f"env/{name}/turns": 3.0,
        f"env/{name}/valid_rate": pytest.approx(5 / 6),
        f"env/{name}/num_actions": 4.5,
        f"env/{name}/action_is_valid": pytest.approx((3 / 4 + 1) / 2),  # every episode counts as much
        f"env/{name}/action_is_effective": pytest.approx((1 / 4 + 1) / 2),
        f"env/{name}/pass@2": 1.0,
    }


def test_pass_at_k_is_left_out_where_groups_are_not_whole():
    env = environment("frozen_lake")
    first, second = rows_of(env, 2)
    assert "env/frozen_lake/pass@2" in rewards_of(env, [first, first, second, second])[1]
    assert not [key for key in rewards_of(env, [first, first, second])[1] if "pass@" in key]


@every_multi_turn
def test_completions_of_several_turns_have_to_be_played_first(name):
    env = environment(name, multi_turn=True)
    message = rf"rollout_func must be TextRollout\(env\) for {name} with max_turns={env.max_turns}: .*max_turns=1"
    with pytest.raises(ValueError, match=message):
        rewards_of(env, rows_of(env, 2))


@pytest.mark.slow
@every_mode_with_tools
def test_rewards_of_tool_environments_are_theirs(name, multi_turn):
    env = environment(name, multi_turn, protocol="tools")
    make, rng = env.environment_factory, random.Random(0)
    rows = rows_of(env, 6)
    players = [make() for _ in rows]
    for player, row in zip(players, rows, strict=True):
        player.reset(**row)
        for actions in turns(player._play, rng):
            player._take(actions)
    rewards, logged = rewards_of(env, rows, environments=players)
    assert rewards == [player.get_reward() for player in players]
    successes = [float(player._play.episode.success) for player in players]
    assert rewards_of(env, rows, env.success_func, environments=players)[0] == successes
    assert logged[f"env/{name}/success"] == pytest.approx(sum(successes) / len(rows))


# Tools


@every_mode_with_tools
def test_text_and_tools_give_the_same_for_the_same_actions(name, multi_turn):
    env, tool_env = environment(name, multi_turn), environment(name, multi_turn, protocol="tools")
    player, rng = tool_env.environment_factory(), random.Random(0)
    for number, row in enumerate(rows_of(env, 30)):
        play = env.play(row, random.Random(number))
        assert player.reset(**row) == play.episode.observation()
        player._play = tool_env.play(row, random.Random(number))  # the same chance events
        for actions in turns(play, rng):
            told, message = player._take(actions), play.respond(format_response("", actions))
            assert player._play.outcome == play.outcome
            if message is None:
                assert told.endswith("The episode is over.")
            else:
                shown = play.episode.observation()
                assert told.endswith(f"\n{shown}") and shown in message
        before = player._play.outcome
        assert player._take([env.example]) == "The episode is over."
        assert player._play.outcome == before


@every_mode_with_tools
def test_tools_can_be_described_to_a_model(name, multi_turn):
    player = environment(name, multi_turn, protocol="tools").environment_factory()
    names = [key for key in dir(player) if not key.startswith("_") and key not in ("reset", "get_reward")]
    assert names  # TRL makes a tool of each of them
    for tool in names:
        schema = get_json_schema(getattr(player, tool))["function"]
        assert schema["name"] == tool and schema["description"]
        assert all(parameter["description"] for parameter in schema["parameters"]["properties"].values())


@every_mode_with_tools
def test_tool_environments_begin_anew_with_every_reset(name, multi_turn):
    env = environment(name, multi_turn, protocol="tools")
    player = env.environment_factory()
    first, second = rows_of(env, 2)
    shown = player.reset(**first)
    player._take([NONSENSE, NONSENSE])
    assert player.reset(**second) == env.episode(second, random.Random(0)).observation()
    assert player.get_reward() == 0.0
    assert player.reset(**first) == shown


@every_mode_with_tools
def test_arguments_of_a_wrong_type_make_a_turn_invalid(name, multi_turn):
    env = environment(name, multi_turn, protocol="tools")
    player, row = env.environment_factory(), rows_of(env, 1)[0]
    for actions in [[1], [None], [["Up"]], [{"a": 1}], [], None, 7, {"a": 1}]:
        player.reset(**row)
        assert player._take(actions).startswith("Invalid answer. Reward -0.1.")
        assert player._play.outcome == EpisodeOutcome(
            -0.1, success=False, turns=1, valid_turns=0, measures=player._play.episode.measures
        )


@every_mode
def test_tools_are_for_the_tool_protocol(name, multi_turn):
    with pytest.raises(ValueError, match="protocol must be 'tools' for an environment_factory, got 'text'"):
        _ = environment(name, multi_turn).environment_factory
