"""The held-out curve of a training: what stands in its rows, what it leaves alone, what is kept, and when it ends."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import RUN, assert_same_parameters, parameters_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import EnvironmentEvalCallback, TextRollout
from ragen2_trl.callbacks.environment_eval import task_names
from ragen2_trl.cli.evaluate import evaluate_model
from ragen2_trl.envs import make_env
from ragen2_trl.record.held_out import curves_of
from ragen2_trl.record.saved_episodes import read_episodes
from ragen2_trl.rollouts.outcomes import summarize
from ragen2_trl.tiny import TINY_MODEL_PATH

SMALL = {"every": 2, "num_prompts": 4, "num_samples": 2, "max_new_tokens": 40}
LAKE = make_env("frozen_lake")


def make(folder, env=LAKE, model=str(TINY_MODEL_PATH), callback=EnvironmentEvalCallback, curve=(), **settings):
    """TRL's own trainer on tasks, with a held-out curve."""
    args = GRPOConfig(**{**RUN, "output_dir": str(folder), "max_completion_length": 24, **settings})
    rollout = TextRollout(env) if env.max_turns > 1 else None
    trainer = GRPOTrainer(model, env.reward_funcs, args, env.dataset(16, seed=0), rollout_func=rollout)
    if rollout:
        rollout.attach(trainer)
    if callback is not None:
        trainer.add_callback(callback(env, trainer, **{**SMALL, **dict(curve)}))
    return trainer


class Scripted(EnvironmentEvalCallback):
    """Has the successes of a list, by step, and plays nothing."""

    def __init__(self, env, trainer, successes=(), **settings):
        super().__init__(env, trainer, **settings)
        self.successes, self.asked = successes, []

    def evaluate(self):
        step = self.trainer.state.global_step
        self.asked.append(step)
        success = [self.successes[step], self.successes[step]] * 2
        return {task: summarize(2, success=success, **{"return": success}) for task in self.tasks}


def scripted(folder, successes, curve=(), **settings):
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": len(successes) - 1}
    curve = {"every": 1, "successes": successes, **dict(curve)}
    return make(folder, callback=Scripted, curve=curve, **{**saving, "max_completion_length": 4, **settings})


def evaluated(trainer) -> dict[int, float]:
    """Step -> success, and each of them once."""
    rows = [row for row in trainer.state.log_history if "eval/env/frozen_lake/success" in row]
    found = {row["step"]: row["eval/env/frozen_lake/success"] for row in rows}
    assert len(found) == len(rows)
    return found


# What it logs and saves


@pytest.fixture(scope="module")
def curved(tmp_path_factory):
    """A run of three steps that would be logged once, of two tasks; and what the model at its start is worth."""
    folder = tmp_path_factory.mktemp("curved")
    args = GRPOConfig(**{**RUN, "output_dir": str(folder), "max_completion_length": 24, "logging_steps": 100})
    trainer = GRPOTrainer(str(TINY_MODEL_PATH), LAKE.reward_funcs, args, LAKE.dataset(16, seed=0))
    small = make_env("frozen_lake", size=3, max_turns=2, max_actions=2)
    trainer.add_callback(EnvironmentEvalCallback([LAKE, small], trainer, **SMALL))
    trainer.train()
    return trainer


@pytest.mark.slow
def test_the_curve_stands_in_the_rows_of_its_steps(curved):
    assert list(evaluated(curved)) == [0, 2, 3]  # before, every second, and the last
    rows = {row["step"]: row for row in curved.state.log_history if "eval/seconds" in row}
    assert "reward" not in rows[0]
    assert "reward" in rows[2] and "env/frozen_lake/success" in rows[2]  # TRL's row of that step
    for task in ("frozen_lake", "frozen_lake:size=3,max_turns=2,max_actions=2"):
        for name in ("success", "return", "pass@1", "pass@2", "turns", "valid_rate", "completion_length"):
            value, low, high = (rows[2][f"eval/env/{task}/{name}{end}"] for end in ("", "_ci_low", "_ci_high"))
            assert low <= value <= high
    assert not [key for row in curved.state.log_history for key in row if key.startswith("eval_")]


def test_a_point_is_what_evaluate_says_of_the_same_weights(curved):
    """So that a checkpoint's number can be had again: the same tasks, and the same draws."""
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL_PATH)
    settings = {name: value for name, value in SMALL.items() if name != "every"}
    expected = evaluate_model(model, tokenizer, LAKE, temperature=0.5, **settings)
    (first, *_) = curved.state.log_history
    assert {name: first[f"eval/env/frozen_lake/{name}"] for name in expected} == expected


def test_evaluated_episodes_are_saved_as_they_were_played(curved):
    folder = Path(curved.args.output_dir) / "_episodes"
    names = [f"evaluation_0000{step}.jsonl" for step in (0, 2, 3)]
    assert sorted(path.name for path in folder.glob("*.jsonl")) == names
    episodes = read_episodes(folder / "evaluation_00002.jsonl")
    assert [(one.group, one.sample) for one in episodes] == [divmod(number, 2) for number in range(16)]
    assert {one.step for one in episodes} == {2}
    lakes = [one for one in episodes if len(one.boards[0].splitlines()) == 4]
    assert sum(one.success for one in lakes) / len(lakes) == evaluated(curved)[2]
    assert all(one.messages[-1]["role"] == "assistant" and len(one.turns) == 1 for one in lakes)
    assert len({one.seed for one in lakes}) == 4


# What it leaves alone


def states(trainer) -> list:
    """Everything that chance comes from, and the modes of all modules."""
    modes = [module.training for module in trainer.model.modules()]
    name, keys, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), rest, modes]


@pytest.fixture(scope="module")
def dropping_out(tmp_path_factory):
    """The tiny model with dropout, whose draws training depends on."""
    folder = tmp_path_factory.mktemp("dropping_out")
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH, attention_dropout=0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_MODEL_PATH).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("turns", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_training_is_bit_identical_with_and_without_the_curve(turns, dropping_out, tmp_path):
    env = make_env("frozen_lake", size=3, max_turns=turns)
    settings = {"model": dropping_out, "max_completion_length": 24 if turns == 1 else 200, "max_steps": 2}
    with_curve = {"every": 1, "num_prompts": 2, "temperature": 0.7}
    found = []
    for callback in (None, EnvironmentEvalCallback):
        trainer = make(tmp_path, env, callback=callback, curve=with_curve, **settings)
        trainer.train()
        found.append((parameters_of(trainer), states(trainer)))
    assert_same_parameters(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_an_exception_in_an_evaluation_is_an_exception(tmp_path):
    class Broken(EnvironmentEvalCallback):
        def _play(self, *args):
            raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        make(tmp_path, callback=Broken).train()


# What is kept


OF_TRANSFORMERS = {"load_best_model_at_end": True, "metric_for_best_model": "env/frozen_lake/return"}


@pytest.mark.parametrize(
    ("curve", "settings", "kept"),
    [
        ({"load_best": True}, {"save_total_limit": 1}, "checkpoint-2"),
        pytest.param({}, {"save_strategy": "best", **OF_TRANSFORMERS}, "checkpoint-2", marks=pytest.mark.slow),
    ],
)
def test_the_best_checkpoint_is_kept_and_loaded_and_the_first_of_equals_is_the_best(curve, settings, kept, tmp_path):
    """By our setting, or by transformers' own."""
    trainer = scripted(tmp_path, [0.75, 0.25, 0.5, 0.5], curve, **settings)
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.5, 2)
    assert kept in [path.name for path in tmp_path.glob("checkpoint-*")]
    saved = load_file(tmp_path / kept / "model.safetensors")
    found = parameters_of(trainer)
    assert [name for name in saved if not torch.equal(saved[name], found[name])] == []


# When it ends, and goes on


@pytest.mark.slow
def test_training_stops_after_patience_below_the_bound_also_when_it_was_resumed(tmp_path, caplog):
    successes = [0.0, 0.0, 0.5, 0.0, 0.0, 0.0]  # the one before training does not count
    whole = scripted(tmp_path, successes, {"stop_below": 0.1, "stop_patience": 2})
    whole.train()
    assert whole.state.global_step == 4
    assert "held-out success on frozen_lake was below 10.0% in 2 evaluations in a row (now 0.0%)" in caplog.text
    resumed = scripted(tmp_path, successes, {"stop_below": 0.1, "stop_patience": 2})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 4


@pytest.mark.slow
def test_a_resumed_run_neither_repeats_nor_loses_evaluations(tmp_path):
    successes = [0.0, 0.25, 0.5, 0.25, 0.0]
    whole = scripted(tmp_path, successes, {"every": 2})
    whole.train()
    resumed = scripted(tmp_path, successes, {"every": 2})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.callback_handler.callbacks[-1].asked == [4]
    assert evaluated(resumed) == evaluated(whole) == {0: 0.0, 2: 0.5, 4: 0.0}
    assert resumed.state.best_model_checkpoint == whole.state.best_model_checkpoint


# What is refused


@pytest.mark.parametrize(
    ("curve", "settings", "message"),
    [
        ({"every": 0}, {}, "every must be at least 1, got 0"),
        ({"stop_patience": 0}, {}, "stop_patience must be at least 1, got 0"),
        ({"stop_below": 1.5}, {}, "stop_below must be above 0 and at most 1, or None, got 1.5"),
        ({"temperature": 0.0}, {}, "temperature must be above 0, or 0 with num_samples=1, got 0.0"),
        ({"num_prompts": 1}, {}, "num_prompts must be at least 2, got 1"),
        ({"load_best": True}, {}, "load_best=True needs keep_best=True"),
        (
            {},
            {"save_strategy": "steps", "metric_for_best_model": "eval_reward"},
            "metric_for_best_model='eval_reward' is not evaluated; allowed: eval/env/<task>/<metric> with a task of",
        ),
    ],
)
def test_a_bad_setting_is_named(curve, settings, message, tmp_path, lake_trainer):
    for name, value in settings.items():
        setattr(lake_trainer.args, name, value)
    with pytest.raises(ValueError) as error:
        EnvironmentEvalCallback(LAKE, lake_trainer, **{**SMALL, **curve})
    assert message in str(error.value)


@pytest.fixture
def lake_trainer(tmp_path):
    return make(tmp_path, callback=None)


def test_environments_that_cannot_be_played_in_words_and_too_few_tasks_are_refused(lake_trainer, tmp_path):
    with pytest.raises(ValueError, match="env must be text played with protocol='text', got sokoban with pictures"):
        EnvironmentEvalCallback(make_env("sokoban", observation="image"), lake_trainer)
    with pytest.raises(ValueError, match="env must be different tasks, or the same with different options"):
        EnvironmentEvalCallback([LAKE, make_env("frozen_lake")], lake_trainer)
    with pytest.raises(TypeError, match=r"env must be an Environment of ragen2_trl.envs or a list of them, got \[\]"):
        EnvironmentEvalCallback([], lake_trainer)
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps({"nums": [1, 2, n], "target": n + 3}) + "\n" for n in range(3, 40)))
    with pytest.raises(ValueError, match=r"num_prompts must be at most \d+.*got 200"):
        EnvironmentEvalCallback(make_env("countdown"), lake_trainer, num_prompts=200, data=str(few))


def test_with_vllm_a_line_says_who_plays(lake_trainer, caplog):
    lake_trainer.use_vllm = True
    EnvironmentEvalCallback(LAKE, lake_trainer, **SMALL)
    assert "Held-out tasks are sampled by transformers, from the model that trains, and not by vLLM." in caplog.text


def test_tasks_of_the_same_name_are_told_apart_by_their_options():
    envs = [LAKE, make_env("sokoban"), make_env("frozen_lake", size=5)]
    assert task_names(envs) == ["frozen_lake", "sokoban", "frozen_lake:size=5"]
    assert task_names(envs[::-1]) == ["frozen_lake", "sokoban", "frozen_lake:default"]


# What becomes of the numbers


def rows_of(successes, task="frozen_lake"):
    bounds = {"": 0.0, "_ci_low": -0.1, "_ci_high": 0.1}
    return [
        {"step": step, **{f"eval/env/{task}/success{name}": value + off for name, off in bounds.items()}}
        for step, value in successes.items()
    ]


def test_the_area_under_a_curve_is_the_mean_of_success_over_the_steps():
    values = {0: 0.2, 10: 0.4, 30: 0.8, 35: 0.3}
    curve = curves_of(rows_of(values))["frozen_lake"]
    by_step = [np.interp(step, list(values), list(values.values())) for step in np.linspace(0, 35, 3_501)]
    assert curve.area == pytest.approx(np.mean(by_step), abs=1e-4)
    assert (curve.first.step, curve.peak.step, curve.last.step) == (0, 30, 35)
    assert curves_of(rows_of({5: 0.3}))["frozen_lake"].area == 0.3
    assert curve.end(10).success == 0.4 and curve.end(None).success == 0.3


def test_rows_that_are_no_evaluations_make_no_curve():
    rows = [*rows_of({0: 0.5}), *rows_of({1: 5.0}), *rows_of({"2": 0.5})]
    rows += [{"step": 3, "eval/env/frozen_lake/success": 0.5}]
    rows += [{"step": 4, "eval/env/frozen_lake/success": "high"}, {"eval/env/a/b/success": 0.5}, {}]
    assert [point.step for point in curves_of(rows)["frozen_lake"].points] == [0]


def test_the_best_weights_are_not_promised_where_a_sharded_checkpoint_has_none_to_load(tmp_path):
    trainer = make(tmp_path, callback=None, save_strategy="steps", save_only_model=True)
    EnvironmentEvalCallback(LAKE, trainer, **SMALL, load_best=True)  # whole weights can be loaded
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match=r"load_best=True .*save_only_model=True"):
        EnvironmentEvalCallback(LAKE, trainer, **SMALL, load_best=True)
