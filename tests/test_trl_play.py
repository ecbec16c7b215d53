"""TRL's `environment_factory`, `tools`, `rollout_func` and reward functions, as callbacks take them: held-out rows,
episodes and mutual information of agents."""

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PROMPTS, assert_same_parameters, parameters_of
from datasets import Dataset
from measured_runs import length_reward
from test_tool_environments import TEMPLATE
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_template

from ragen2_trl import EnvironmentEvalCallback, EpisodeCallback, MutualInformationCallback, SNRFilteredGRPOTrainer
from ragen2_trl.envs import DatasetEnvironment, make_env
from ragen2_trl.record.run import run_of
from ragen2_trl.record.saved_episodes import read_episodes
from ragen2_trl.report.card import diagnostics_section
from ragen2_trl.report.page import render_report
from ragen2_trl.rollout_events import listen

CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": 3}}\n</tool_call><|im_end|>'
CURVE = {"every": 1, "num_samples": 2, "max_new_tokens": 120}


class Guess:
    """Finds 3. The reward depends on how often an instance was played, so that training would feel an evaluation."""

    plays = 0

    def reset(self, secret: int, **row) -> str:
        self.plays += 1
        self._secret, self._found = secret, False
        return f" It ends in {secret}."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: From 0 to 9.
        """
        self._found = number == self._secret
        return "found" if self._found else f"not {number}, but {self._secret}"

    def get_reward(self) -> float:
        return self._found * (1.0 + 0.01 * (self.plays % 7))


class Silent(Guess):
    """Shows nothing before the first call."""

    def reset(self, secret: int, **row) -> None:
        super().reset(secret)

    def get_reward(self) -> float:
        return float(self._found)


class Sure(Silent):
    def reset(self, secret: int, **row) -> str:
        return Guess.reset(self, secret)


def guess(number: int) -> str:
    """
    Guess the number.

    Args:
        number: From 0 to 9.
    """
    return "no"


def rows_with(*secrets, **columns):
    ask = [{"role": "user", "content": "Find the number."}]
    return Dataset.from_list([{"prompt": ask, "secret": secret, **columns} for secret in secrets])


HELD_OUT = rows_with(3, 5, 3, 7)


def make(policy_path, args, reward=None, kind=SNRFilteredGRPOTrainer, rows=None, calls=True, **play):
    """A trainer whose every other completion begins with a tool call; the policy samples the rest."""
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    model = AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=1024, attention_dropout=0.1)
    rows = rows_with(*(number % 10 for number in range(16))) if rows is None else rows
    trainer = kind(model, reward or [], args, rows, processing_class=tokenizer, **play)
    sample, call = trainer._generate_single_turn, tokenizer(CALL)["input_ids"]

    def generate(contexts, images, fields, num_generations=None, has_tool_images=None):  # asked for after tools only
        answers, logprobs = sample(contexts, images, fields, num_generations)
        first = has_tool_images is None
        trainer.temperatures.add((trainer.model.training, trainer.generation_config.temperature))
        return [call if calls and first and n % 2 else ids for n, ids in enumerate(answers)], logprobs

    trainer._generate_single_turn, trainer.temperatures = generate, set()
    return trainer


@pytest.fixture
def agent_args(make_args):
    def make(**settings):
        return make_args(
            **{"per_device_train_batch_size": 16, "max_completion_length": 120, "max_steps": 2, **settings}
        )

    return make


def evaluations(trainer, task) -> dict[int, dict[str, float]]:
    """Step -> metrics of a task."""
    rows = [row for row in trainer.state.log_history if f"eval/env/{task}/success" in row]
    beginning = f"eval/env/{task}/"
    return {row["step"]: {k.removeprefix(beginning): row[k] for k in row if k.startswith(beginning)} for row in rows}


def files(trainer, name):
    folder = Path(trainer.args.output_dir) / "_episodes"
    return [read_episodes(path) for path in sorted(folder.glob(f"{name}_*.jsonl"))]


# Held-out rows


@pytest.mark.parametrize("kind", [SNRFilteredGRPOTrainer, GRPOTrainer])
def test_held_out_rows_are_played_by_the_tool_loop_and_are_on_card_and_report(kind, policy_path, agent_args):
    snr = kind is SNRFilteredGRPOTrainer
    trainer = make(policy_path, agent_args(snr=snr), kind=kind, environment_factory=Sure)
    trainer.add_callback(EnvironmentEvalCallback(Sure, trainer, **CURVE, dataset=HELD_OUT, num_prompts=4))
    trainer.train()
    found = evaluations(trainer, "Sure")
    assert list(found) == [0, 1, 2]
    for metrics in found.values():  # one of two completions calls guess(3), which is right for two rows of four
        assert (metrics["success"], metrics["return"], metrics["pass@1"], metrics["pass@2"]) == (0.25, 0.25, 0.25, 0.5)
        assert (metrics["num_prompts"], metrics["num_samples"]) == (4, 2)
        assert 1 < metrics["turns"] <= 1.5 and metrics["success_ci_low"] < 0.25 < metrics["success_ci_high"]
        assert 0 < metrics["completion_length"] < 120
    assert trainer.temperatures == {(True, 1.0), (False, 0.5)}
    first, *_ = played = files(trainer, "evaluation")
    assert len(played) == 3 and [(one.group, one.sample) for one in first] == [divmod(n, 2) for n in range(8)]
    assert [one.seed for one in first] == [0, 0, 1, 1, 2, 2, 3, 3]
    right = first[1]
    assert right.success and right.episode_return == 1 and right.turns[0].actions == ["guess(number=3)"]
    assert [message["role"] for message in right.messages][:3] == ["user", "assistant", "tool"]
    assert right.messages[0]["content"] == "Find the number. It ends in 3." and right.messages[2]["content"] == "found"
    run = run_of(trainer)
    assert run.evaluations["before"]["success"] == run.evaluations["after"]["success"] == 0.25
    assert "held-out success" in diagnostics_section(run)
    page = render_report([run])
    assert "guess" in page and "Success on held-out tasks over the steps" in page


def states(trainer):
    """Everything that chance comes from, and modes, settings and logs."""
    modes = [module.training for module in trainer.model.modules()]
    name, keys, *rest = np.random.get_state()
    settings = trainer.num_generations_eval, trainer.max_completion_length, trainer.generation_config.to_dict()
    logs = [list(trainer._logs[name]) for name in ("prompt", "advantages")], dict(trainer._metrics["eval"])
    return torch.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), rest, modes, settings, logs


DYNAMIC = {"snr_strategy": "nonzero", "snr_dynamic_sampling_rounds": 1}


@pytest.mark.parametrize("way", ["trl", "dynamic_sampling", "pilots"])
def test_training_is_bit_identical_with_and_without_held_out_rows_and_episodes(way, policy_path, agent_args):
    settings = {"trl": {"snr": False}, "dynamic_sampling": DYNAMIC, "pilots": {"snr_pilot_generations": 2}}[way]
    kind = GRPOTrainer if way == "trl" else SNRFilteredGRPOTrainer
    rows = rows_with(*[3, 5] * 8)  # every other group has a reward
    found = []
    for evaluates in (False, True):
        trainer = make(policy_path, agent_args(**settings), kind=kind, rows=rows, environment_factory=Guess)
        if evaluates:
            curve = {**CURVE, "dataset": HELD_OUT, "num_samples": 3, "batch_size": 4}
            trainer.add_callback(EnvironmentEvalCallback(Guess, trainer, **curve))
            trainer.add_callback(EpisodeCallback(trainer, every=1))
        trainer.train()
        found.append((parameters_of(trainer), states(trainer)))
    assert_same_parameters(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert list(evaluations(trainer, "Guess")) == [0, 1, 2]
    if way == "dynamic_sampling":
        assert any(row.get("snr/sampling_rounds") for row in trainer.state.log_history)
    for episodes in files(trainer, "train"):  # whole groups, also where pilots have chosen them
        groups = [one.group for one in episodes]
        assert groups == [number // 4 for number in range(len(groups))] and len(groups) % 4 == 0


@pytest.mark.parametrize("way", ["tools", "rollout_func", "single_turn"])
def test_a_reward_function_judges_rows_that_are_played_without_environments(way, policy_path, agent_args):
    def rollout(prompts, trainer):
        groups.append((len(prompts), trainer.num_generations_eval, trainer.args.temperature))
        return {"prompt_ids": [[9, 9]] * len(prompts), "completion_ids": [[5, 6]] * len(prompts), "logprobs": None}

    def reward(secret, **columns):
        return [float(one == 3) for one in secret]

    def other(secret, log_extra, **columns):
        if logs:
            log_extra("success", [1.0] * len(secret))
        return [0.5] * len(secret)

    groups, logs = [], []
    play = {"tools": {"tools": [guess]}, "rollout_func": {"rollout_func": rollout}, "single_turn": {}}[way]
    trainer = make(policy_path, agent_args(max_steps=1), [other, reward], calls=way == "tools", **play)
    callback = EnvironmentEvalCallback(reward, trainer, **CURVE, dataset=HELD_OUT)
    assert trainer.args.max_steps == 1 and callback.task_names == ["reward"]
    trainer.add_callback(callback)
    trainer.train()
    for metrics in evaluations(trainer, "reward").values():
        assert (metrics["success"], metrics["return"]) == (0.5, 1.0)
    if way == "rollout_func":
        assert groups[0] == (8, 2, 0.5) and (trainer.num_generations_eval, trainer.args.temperature) == (4, 1.0)
    logs.append("a function that knows it")
    assert callback.evaluate()["reward"]["success"] == 1.0


def test_rows_of_ones_own_leave_episodes_which_succeed_where_their_environment_says(policy_path, make_args):
    def half(completions, **columns):
        return [0.5 * (number % 2) for number in range(len(completions))]

    env = DatasetEnvironment(Dataset.from_dict({"prompt": PROMPTS * 3}), half, success_at=0.5, name="mine")
    trainer = SNRFilteredGRPOTrainer(policy_path, env.reward_funcs, make_args(max_steps=1), env.dataset())
    trainer.add_callback(EpisodeCallback(trainer))
    trainer.train()
    (episodes,) = files(trainer, "train")
    assert len(episodes) == trainer.args.generation_batch_size and {one.task for one in episodes} == {"mine"}
    assert [one.success for one in episodes] == [one.episode_return == 0.5 for one in episodes]
    assert sum(one.success for one in episodes) == len(episodes) // 2


def test_each_environment_of_a_dict_has_a_curve_of_its_own(policy_path, agent_args):
    rows = Dataset.from_list(
        [{**row, "environment": name} for name in ("silent", "sure") for row in rows_with(3, 4, 3, 4)]
    )
    factories = {"sure": Sure, "silent": Silent}
    trainer = make(policy_path, agent_args(max_steps=1), rows=rows, environment_factory=factories)
    callback = EnvironmentEvalCallback(factories, trainer, **CURVE, dataset=rows, num_prompts=3)
    assert callback.best_task == "sure"  # the first of the factories, whatever row comes first
    trainer.add_callback(callback)
    trainer.train()
    for task in factories:
        assert [metrics["num_prompts"] for metrics in evaluations(trainer, task).values()] == [3, 3]


@pytest.mark.parametrize(
    ("env", "settings", "named"),
    [
        (Silent, {"dataset": HELD_OUT}, "env must make Sure, as the trainer's environment_factory does, got"),
        (Sure, {}, "dataset must be a datasets.Dataset of held-out rows, like train_dataset, got None"),
        (Sure, {"dataset": HELD_OUT.select([0])}, r"dataset must have at least 2 rows of each .*{'Sure': 1}"),
        (Sure, {"dataset": HELD_OUT, "temperature": 0.0}, "temperature must be above 0 where TRL generates, got 0.0"),
        (Sure, {"dataset": HELD_OUT, "num_samples": 0}, "num_samples must be at least 1, got 0"),
        (Sure, {"dataset": HELD_OUT, "max_turn_tokens": 5}, "max_turn_tokens must be None when env is not an Env"),
        (
            {"a": Sure},
            {"dataset": HELD_OUT},
            r"With dataset=..., the trainer's environment_factory or its reward .*: Sure",
        ),
        (make_env("frozen_lake"), {"dataset": HELD_OUT}, "dataset must be None when env is an Environment"),
    ],
)
def test_what_the_trainer_does_not_play_is_refused(env, settings, named, policy_path, agent_args):
    trainer = make(policy_path, agent_args(), environment_factory=Sure)
    with pytest.raises((TypeError, ValueError), match=named):
        EnvironmentEvalCallback(env, trainer, **settings)


# Episodes


@pytest.mark.parametrize("way", ["environment_factory", "tools"])
def test_episodes_of_an_agent_are_kept_with_calls_observations_and_rewards(way, policy_path, agent_args):
    reward = (lambda secret, **columns: [float(one == 3) for one in secret]) if way == "tools" else None
    play = {"environment_factory": Sure} if way == "environment_factory" else {"tools": [guess]}
    trainer = make(policy_path, agent_args(snr_strategy="all"), reward, **play)
    trainer.add_callback(EpisodeCallback(trainer, every=1))
    trainer.train()
    first, second = files(trainer, "train")
    assert [(one.group, one.sample) for one in first] == [divmod(number, 4) for number in range(16)]
    rows = [row for row in trainer.state.log_history if "reward" in row]
    for row, episodes in zip(rows, (first, second), strict=True):
        assert row["reward"] == pytest.approx(sum(one.episode_return for one in episodes) / 16)
        assert all(one.success == (one.episode_return == 1) for one in episodes)
    called = [one for one in first if one.sample % 2]
    assert all(one.turns[0].actions == ["guess(number=3)"] for one in called)
    assert all("tool" in [message["role"] for message in one.messages] for one in called)
    assert not any(turn.actions for one in first if not one.sample % 2 for turn in one.turns)
    assert "guess" in render_report([run_of(trainer)])


def test_a_mode_that_sampling_changes_makes_no_training_of_an_evaluation(policy_path, prompts, make_args):
    """As TRL's continuous batching does, which ends in training mode."""
    trainer = SNRFilteredGRPOTrainer(
        policy_path, length_reward, make_args(max_steps=2, snr_pilot_generations=2), prompts
    )
    sample, announced = trainer._generate_single_turn, []

    def then_trains(*args, **kwargs):
        completions = sample(*args, **kwargs)
        trainer.model.train()
        return completions

    trainer._generate_single_turn = then_trains
    trainer.add_callback(EnvironmentEvalCallback(length_reward, trainer, every=1, dataset=prompts))
    trainer.add_callback(EpisodeCallback(trainer, every=1))
    listen(trainer, on_rollout=lambda rollout: announced.append(trainer.state.global_step))
    trainer.train()
    assert announced == [0, 1] and list(evaluations(trainer, "length_reward")) == [0, 1, 2]
    assert len(files(trainer, "train")) == 2


def test_an_evaluation_that_fails_leaves_nothing_in_the_logs_of_training(policy_path, prompts, make_args):
    fails = []

    def noted(completions, log_metric, log_extra, **columns):
        log_metric("marked", 100.0 if fails else 1.0)
        log_extra("mark", ["evaluated" if fails else "trained"] * len(completions))
        if fails:
            raise fails[0]
        return length_reward(completions)

    trainer = SNRFilteredGRPOTrainer(policy_path, noted, make_args(max_steps=1), prompts)
    trainer.add_callback(EnvironmentEvalCallback(noted, trainer, dataset=prompts))
    fails.append(ArithmeticError("no judge"))
    with pytest.raises(ArithmeticError, match="no judge"):
        trainer.train()
    fails.clear()
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "marked" in row]
    assert row["marked"] == 1.0 and set(trainer._logs["extra"]["mark"]) == {"trained"}


def test_success_that_is_not_known_is_none(policy_path, prompts, make_args):
    def unsure(completions, log_extra, **columns):
        log_extra("success", [math.nan, 0.3] * (len(completions) // 2))
        return [0.0] * len(completions)

    trainer = GRPOTrainer(policy_path, unsure, make_args(snr=False, max_steps=1), prompts)
    trainer.add_callback(EnvironmentEvalCallback(unsure, trainer, dataset=prompts))
    trainer.train()
    assert {metrics["success"] for metrics in evaluations(trainer, "unsure").values()} == {0.0}


# Mutual information


def test_where_rows_share_one_prompt_the_warning_names_what_measures_from_the_first_observation_on(
    policy_path, agent_args, caplog
):
    args = {"per_device_train_batch_size": 32, "max_steps": 1}
    for scopes in (None, ("trajectory", "answer")):
        trainer = make(policy_path, agent_args(**args), environment_factory=Silent)
        chosen = {} if scopes is None else {"scopes": scopes}
        trainer.add_callback(MutualInformationCallback(trainer, every=1, budget=None, **chosen))
        caplog.clear()
        trainer.train()
        (row,) = [row for row in trainer.state.log_history if "mi/tokens" in row]
        assert row["mi/trajectory/turn_2/num_completions"] > 0
        told = [
            record.getMessage() for record in caplog.records if "(first_turn) is not measured" in record.getMessage()
        ]
        if scopes is None:
            assert len(told) == 1 and "all 8 prompts are the same" in told[0]
            assert "MutualInformationCallback(trainer, scopes=('trajectory', 'answer'))" in told[0]
            assert "reset()" in told[0]
        else:
            assert not told and [key for key in row if key.startswith("mi/regime/")]
