"""Promise 7: evaluation is never filtered, and a resumed run is the same run."""

from functools import partial

import pytest
import torch
from algorithms import GRPO, cases, for_each, length_reward
from conftest import assert_same_parameters, parameters_of
from peft import LoraConfig

from research.ablations import as_many_at_random, best_and_worst, smallest_half


@for_each
def test_evaluation_is_never_filtered(algorithm, policy_path, prompts, tmp_path):
    reward = lambda prompts, **kwargs: [1.0] * len(prompts)  # noqa: E731 -- no group has variance
    results = []
    for plain in (True, False):
        args = algorithm.args(tmp_path, plain, per_device_eval_batch_size=8, max_completion_length=6)
        trainer = algorithm.make(policy_path, args, reward, prompts, eval_dataset=prompts)
        torch.manual_seed(0)
        results.append(trainer.evaluate())
    measured = {key for key in results[0] if not key.endswith(("time", "per_second"))}
    assert {key: results[0][key] for key in measured} == {key: results[1][key] for key in measured}
    assert not any("snr" in key for key in results[1])


AMID_GENERATION = {"steps_per_generation": 4, "gradient_accumulation_steps": 1}
AMID_ITERATIONS = {"num_iterations": 2, "beta": 0.1}
OUT_OF_STEP = {"steps_per_generation": 4, "gradient_accumulation_steps": 3}
SEPARATE = {"value_head": "separate", "critic_lr": 1e-2}
LORA = {"lora": True}


def log_rows(trainer):
    rows = [row for row in trainer.state.log_history if "loss" in row]
    timed = ("step_time", "cost/seconds", "cost/cpu_seconds")
    return [{key: value for key, value in row.items() if key not in timed} for row in rows]


def assert_same_optimizer_states(first, second):
    states = [trainer.optimizer.state_dict()["state"] for trainer in (first, second)]
    assert states[0].keys() == states[1].keys() and states[0]
    for number, values in states[0].items():
        assert all(torch.equal(values[key], states[1][number][key]) for key in values)


def assert_resumed_run_is_the_same(algorithm, settings, policy_path, prompts, tmp_path):
    settings = {"max_steps": 5, "save_steps": 3, "save_strategy": "steps", "max_completion_length": 6, **settings}
    given = {"selector": settings.pop("selector", None)}
    if settings.pop("lora", False):
        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")

    def trained(folder, resume=None):
        args = algorithm.args(tmp_path / folder, **settings)
        trainer = algorithm.make(policy_path, args, length_reward, prompts, **given)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = trained("whole")
    resumed = trained("resumed", str(tmp_path / "whole" / f"checkpoint-{settings['save_steps']}"))
    assert_same_parameters(parameters_of(whole), parameters_of(resumed))
    assert_same_optimizer_states(whole, resumed)
    assert len(log_rows(whole)) == 5
    assert log_rows(resumed) == log_rows(whole)


@cases(
    slow=("grpo-windows out of step", "rloo-amid two iterations"),
    grpo={
        "amid a generation batch": AMID_GENERATION,
        "lossless, amid a generation batch": {**AMID_GENERATION, "snr_strategy": "lossless", "beta": 0.0},
        "windows out of step": OUT_OF_STEP,
    },
    rloo={"amid a generation batch": AMID_GENERATION, "amid two iterations": AMID_ITERATIONS},
    ppo={
        "shared, amid a generation batch": {**AMID_GENERATION, "critic_lr": 1e-2},
        "separate, critic first, amid two iterations": {**AMID_ITERATIONS, **SEPARATE, "critic_warmup_steps": 4},
        "separate, with an adapter": {**SEPARATE, **LORA},
    },
)
def test_resuming_continues_the_same_run(algorithm, settings, policy_path, prompts, tmp_path):
    assert_resumed_run_is_the_same(algorithm, settings, policy_path, prompts, tmp_path)


MORE = {
    "default": {},
    "random scores": {"snr_score": "random", "snr_value": 0.5},
    "random groups": {"snr_selector": "research.ablations:as_many_at_random", **AMID_GENERATION},
    "random completions": {"selector": partial(as_many_at_random, selector=best_and_worst)},
    "ends of groups amid two iterations": {"snr_selector": "research.ablations:best_and_worst", **AMID_ITERATIONS},
    "a quarter": {"snr_selector": "research.ablations:first_quarter"},
    "the smallest half": {"selector": smallest_half},
    "amid two iterations": AMID_ITERATIONS,
    "windows out of step": OUT_OF_STEP,
    "two iterations": {"num_iterations": 2},
    "second epoch": {"gradient_accumulation_steps": 4, "save_steps": 2},
    "adapter": LORA,
}


@pytest.mark.slow
@cases(
    grpo=MORE,
    rloo=MORE,
    ppo={
        **MORE,
        "separate": SEPARATE,
        "shared, with an adapter, amid a generation batch": {**AMID_GENERATION, **LORA, "critic_lr": 1e-2},
        "separate, with an adapter, amid a generation batch": {**AMID_GENERATION, **LORA, **SEPARATE},
    },
)
def test_resuming_continues_the_same_run_in_more_settings(algorithm, settings, policy_path, prompts, tmp_path):
    assert_resumed_run_is_the_same(algorithm, settings, policy_path, prompts, tmp_path)


def test_another_accumulation_samples_the_generation_batch_in_progress_anew(policy_path, prompts, tmp_path, caplog):
    """Its micro-batches were dealt to optimizer steps of another length."""
    algorithm = GRPO
    settings = {"steps_per_generation": 4, "max_steps": 4, "save_steps": 2, "save_strategy": "steps"}

    def trained(folder, accumulation, resume=None):
        args = algorithm.args(tmp_path / folder, gradient_accumulation_steps=accumulation, **settings)
        trainer = algorithm.make(policy_path, args, length_reward, prompts)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    trained("whole", 1)
    with caplog.at_level("WARNING"):
        resumed = trained("resumed", 2, str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert "the generation batch in progress and surplus groups, if any, are sampled again" in caplog.text
