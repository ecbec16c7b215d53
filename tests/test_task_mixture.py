"""Several tasks in one run: each row is played, rewarded and logged by its own task's rules."""

import json

import pytest
from conftest import needs_ends
from every_task import TASKS
from players import policy_fixture as policy_fixture
from players import tokenizer_fixture as tokenizer_fixture

from ragen2_trl import SNRFilteredGRPOTrainer
from ragen2_trl.cli import main
from ragen2_trl.cli.arguments import EnvironmentArguments
from ragen2_trl.cli.evaluate import evaluate_scripted
from ragen2_trl.envs import TaskMixture, format_response, make_env
from ragen2_trl.rollouts import TextRollout


def bandit_and_countdown(**options):
    return TaskMixture([make_env("bandit", **options), make_env("countdown", **options)], [1, 3])


@pytest.mark.needs("bubblewrap")
def test_every_row_is_its_tasks_own_row():
    mixture = TaskMixture([make_env(name) for name in TASKS])
    rows = mixture.dataset(3 * len(TASKS), seed=5)
    for name, env in mixture.environments.items():
        own = [{k: v for k, v in row.items() if v is not None} for row in rows if row["environment"] == name]
        expected = [{**row, "environment": name} for row in env.dataset(3, seed=5)]
        assert sorted(own, key=str) == sorted(expected, key=str)


def test_shares_follow_the_weights_and_rows_are_mixed_the_same_way_every_time():
    mixture = bandit_and_countdown()
    assert mixture.shares(10) == [3, 7] or mixture.shares(10) == [2, 8]
    assert sum(mixture.shares(11)) == 11
    first, again = mixture.dataset(40, seed=1), mixture.dataset(40, seed=1)
    assert first[:] == again[:]
    assert first["environment"][:].count("countdown") == 30
    assert len(set(first["environment"][:10])) == 2
    assert mixture.dataset(40, seed=1, split="test")["prompt"][:] != first["prompt"][:]


@pytest.mark.parametrize("turns", [1, 3])
def test_rewards_and_metrics_are_those_of_each_task(turns):
    """In one turn as TRL calls them; in several with the outcomes that a rollout hands on."""
    mixture = bandit_and_countdown(**({"multi_turn": True, "max_turns": turns} if turns > 1 else {}))
    rows = mixture.dataset(8, seed=0)
    columns = {name: rows[name][:] for name in rows.column_names if name not in ("prompt", "seed")}
    plays = mixture.plays(rows["seed"][:], columns)
    answers = [format_response("", [name[0] if name else "1 + 1"]) for name in rows["names"][:]]
    if turns > 1:
        for play, answer in zip(plays, answers, strict=True):
            play.respond(answer)
        columns["episode"] = [vars(play.outcome) for play in plays]
    else:
        for play, answer in zip(plays, answers, strict=True):
            play.respond(answer)
    logged = {}
    (func,) = mixture.reward_funcs
    rewards = func(
        prompts=rows["prompt"][:], completions=answers, seed=rows["seed"][:], log_metric=logged.__setitem__, **columns
    )
    assert rewards == [play.outcome.episode_return for play in plays]
    for name in (*mixture.environments, "all"):
        own = [play for play, task in zip(plays, rows["environment"][:], strict=True) if name in (task, "all")]
        assert logged[f"env/{name}/return"] == pytest.approx(
            sum(play.outcome.episode_return for play in own) / len(own)
        )
        assert logged[f"env/{name}/success"] == sum(play.outcome.success for play in own) / len(own)
    assert set(mixture.success_func(rows["prompt"][:], answers, rows["seed"][:], **columns)) <= {0.0, 1.0}


@needs_ends
@pytest.mark.parametrize(
    "snr", [{}, pytest.param({"snr_prompt_selection": True, "max_steps": 6}, marks=pytest.mark.slow)], ids=str
)
def test_a_mixture_trains_and_its_groups_stay_within_a_task(snr, policy, tokenizer, make_args):
    tasks = [make_env("frozen_lake", multi_turn=True, max_turns=2, size=3), make_env("bandit", max_turns=3)]
    mixture, seen = TaskMixture(tasks), []
    settings = {"per_device_train_batch_size": 16, "max_completion_length": 200, "max_steps": 2}
    args = make_args(**{**settings, **snr})

    def vary(environment, seed, completion_ids, **columns):
        seen.append(list(zip(environment, seed, strict=True)))
        return [len(set(ids)) / 10 for ids in completion_ids]

    trainer = SNRFilteredGRPOTrainer(
        policy,
        [*mixture.reward_funcs, vary],
        args,
        mixture.dataset(16, 0),
        processing_class=tokenizer,
        rollout_func=TextRollout(mixture, max_turn_tokens=8),
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert any("env/bandit/turns" in row and "env/frozen_lake/turns" in row for row in rows)
    assert all(row["env/bandit/turns"] == 3 for row in rows if row.get("env/bandit/turns") is not None)
    assert all(row["env/frozen_lake/turns"] == 2 for row in rows if row.get("env/frozen_lake/turns") is not None)
    assert any(row.get("snr/skipped_prompts") for row in rows) == bool(snr)
    for batch in seen:
        assert all(len(set(batch[i : i + 4])) == 1 for i in range(0, len(batch), 4))
    from ragen2_trl.record.run import run_of

    assert run_of(trainer).success_metric == "env/all/success"
    assert run_of(trainer).settings["environment"]["name"] == "frozen_lake,bandit"


def test_held_out_tasks_are_evaluated_task_by_task():
    metrics = evaluate_scripted("oracle", bandit_and_countdown(), num_prompts=8, num_samples=2)
    assert metrics["countdown/success"] == metrics["success"] == 1.0
    assert metrics["bandit/num_prompts"] == 2.0 and metrics["num_prompts"] == 8.0
    with pytest.raises(ValueError, match="num_prompts must give each task"):
        evaluate_scripted("oracle", bandit_and_countdown(), num_prompts=4, num_samples=2)


def test_the_command_line_names_tasks_their_options_and_weights():
    env = EnvironmentArguments(
        "sokoban, frozen_lake", ["max_turns=4", "sokoban.size=7", "frozen_lake.slip=0.1"], [0.7, 0.3], multi_turn=True
    ).make_env()
    assert env.weights == [0.7, 0.3] and env.name == "sokoban,frozen_lake"
    lake, sokoban = env.environments["frozen_lake"], env.environments["sokoban"]
    assert (lake.options["slip"], sokoban.options["size"], sokoban.max_turns, lake.max_turns) == (0.1, 7, 4, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"env_name": "sokoban,chess"}, "environment must be one of"),
        ({"env_name": "sokoban,sokoban"}, "two different tasks"),
        ({"env_name": "sokoban,bandit", "env_weights": [1.0]}, "weights must be a number above 0 for each"),
        ({"env_name": "sokoban,bandit", "env_weights": [1.0, 0.0]}, "weights must be a number above 0 for each"),
        ({"env_name": "sokoban", "env_weights": [1.0]}, "env_weights must be empty for one task"),
        ({"env_name": "sokoban,bandit", "env_args": ["webshop.size=4"]}, "must name one of the tasks"),
        ({"env_name": "sokoban,bandit", "env_args": ["sokoban.max_turns=2", "max_turns=3"]}, "got both"),
        ({"env_name": "sokoban,bandit", "env_args": ["sokoban.observation=image"]}, "all be shown in words or all"),
        ({"env_name": "sokoban,bandit", "env_args": ["sokoban.protocol=tools"]}, "must have protocol='text'"),
    ],
)
def test_a_mixture_that_cannot_be_is_one_clear_line(arguments, said):
    with pytest.raises(ValueError, match=said) as raised:
        EnvironmentArguments(**arguments).make_env()
    assert "\n" not in str(raised.value)


def test_rows_of_other_tasks_and_data_are_refused():
    mixture = bandit_and_countdown()
    with pytest.raises(ValueError, match=r"one of \['bandit', 'countdown'\], got \['chess'\]"):
        mixture.plays([0], {"environment": ["chess"]})
    with pytest.raises(ValueError, match="data must be None for several tasks"):
        mixture.dataset(8, data="somewhere")
    with pytest.raises(ValueError, match="num_prompts must be larger, got 1: bandit"):
        mixture.dataset(1)


@pytest.mark.slow
def test_a_run_of_two_tasks_has_a_summary_of_each(tmp_path):
    main(
        "train --model tiny-sokoban --env_name sokoban,frozen_lake --env_weights 0.5 0.5 --multi_turn true --env_args "
        "observation=coordinates max_turns=2 max_actions=1 --max_turn_tokens 64 --max_completion_length 256 "
        "--num_prompts 32 --max_steps 2 --per_device_train_batch_size 32 --num_generations 4 --eval_prompts 4 "
        "--eval_samples 2 --use_cpu true --bf16 false --gradient_checkpointing false --report_to none "
        f"--logging_steps 1 --output_dir {tmp_path / 'run'}".split()
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"success", "sokoban/success", "frozen_lake/success"} <= set(summary["after"])
    assert (tmp_path / "run" / "training.png").exists()
