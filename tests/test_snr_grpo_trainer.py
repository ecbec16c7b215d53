"""Promises 4 to 7 and bad input, through a real `trainer.train()`."""

import copy
import logging

import pytest
import torch
from conftest import PROMPTS, assert_same_parameters, parameters_of
from datasets import Dataset
from replay import KEPT, REWARDS, Replay
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer


def length_reward(completions, **kwargs):
    return [len(completion) / 10 for completion in completions]


def log_rows(trainer) -> list[dict]:
    return [row for row in trainer.state.log_history if "loss" in row]


def replaying_trainer(policy_path, args, rewards=None, reward_funcs=Replay.reward, **kwargs):
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), rewards or REWARDS)
    dataset = Dataset.from_dict({"prompt": PROMPTS})
    return SNRFilteredGRPOTrainer(policy_path, reward_funcs, args, dataset, rollout_func=replay.rollout, **kwargs)


# Promise 4


class KeptPrompts(SNRFilteredGRPOTrainer):
    """Remembers which prompts were trained on, and with how many completions each."""

    kept: dict

    def _compute_loss(self, model, inputs):
        for ids in inputs["prompt_ids"] if inputs else []:
            prompt = self._tokenizer.decode(ids, skip_special_tokens=True)
            self.kept[prompt] = self.kept.get(prompt, 0) + 1
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_whole_groups_are_kept_by_their_raw_weighted_rewards(aggregation, scale_rewards, policy_path, make_args):
    """Two reward functions whose weighted sum is REWARDS, with offsets that cancel in it."""

    def first(replayed, prompts, **kwargs):
        return [reward + 0.5 * len(prompt) for reward, prompt in zip(replayed, prompts, strict=True)]

    def second(prompts, **kwargs):
        return [-0.25 * len(prompt) for prompt in prompts]

    args = make_args(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        max_steps=1,
        reward_weights=[1.0, 2.0],
        multi_objective_aggregation=aggregation,
        scale_rewards=scale_rewards,
    )
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    dataset = Dataset.from_dict({"prompt": PROMPTS})
    trainer = KeptPrompts(policy_path, [first, second], args, dataset, rollout_func=replay.rollout)
    trainer.kept = {}
    trainer.train()
    assert trainer.kept == dict.fromkeys(KEPT, 4)


@pytest.mark.parametrize("score", ["entropy", "entropy_variance", "length", "random", "reward_std"])
def test_every_score_ranks_the_groups_with_signal(score, policy_path, make_args):
    args = make_args(
        per_device_train_batch_size=32, max_steps=1, snr_score=score, snr_strategy="top_k_abs", snr_value=2
    )
    trainer = replaying_trainer(policy_path, args)
    trainer.train()
    assert log_rows(trainer)[0]["snr/kept_groups"] == 2
    assert log_rows(trainer)[0]["snr/score_max"] > 0


def test_completions_without_a_reward_are_left_out_of_the_scores(policy_path, make_args):
    def sometimes_none(replayed, prompts, **kwargs):
        return [
            None if prompt == PROMPTS[2] or (prompt == PROMPTS[0] and reward == 1.0) else reward
            for reward, prompt in zip(replayed, prompts, strict=True)
        ]

    args = make_args(per_device_train_batch_size=32, max_steps=1, snr_strategy="none")
    trainer = replaying_trainer(policy_path, args, reward_funcs=sometimes_none)
    trainer.train()
    row = log_rows(trainer)[0]
    assert row["snr/kept_groups"] == 3  # prompts 5, 6 and 7
    assert row["snr/zero_variance_fraction"] == pytest.approx(5 / 8)
    assert all(value == value for value in row.values())


# Promise 5


class Snapshots(TrainerCallback):
    """Parameters and optimizer state after each step."""

    def __init__(self):
        self.parameters, self.optimizer_states = [], []

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.parameters.append({name: p.detach().clone() for name, p in model.named_parameters()})
        self.optimizer_states.append(copy.deepcopy(optimizer.state_dict()["state"]))


@pytest.mark.parametrize("mode", ["drop", "mask", "soft"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_empty_selection_changes_nothing(mode, accumulation, policy_path, prompts, make_args):
    """Signal in the first step only, so that momentum, weight decay, KL and entropy all would move the second."""

    def reward(completions, trainer_state, **kwargs):
        return length_reward(completions) if trainer_state.global_step == 0 else [1.0] * len(completions)

    args = make_args(
        snr_mode=mode,
        gradient_accumulation_steps=accumulation,
        max_steps=3,
        weight_decay=0.1,
        beta=0.1,
        entropy_coef=0.1,
        logging_steps=1,
    )
    snapshots = Snapshots()
    trainer = SNRFilteredGRPOTrainer(policy_path, reward, args, prompts, callbacks=[snapshots])
    start = parameters_of(trainer)
    trainer.train()
    after_signal, *after_empty = snapshots.parameters
    assert any(not torch.equal(start[name], after_signal[name]) for name in start)
    for parameters, state in zip(after_empty, snapshots.optimizer_states[1:], strict=True):
        assert_same_parameters(after_signal, parameters)
        for index, values in snapshots.optimizer_states[0].items():
            assert all(torch.equal(values[key], state[index][key]) for key in values)
    assert [row["snr/empty_steps"] for row in log_rows(trainer)] == [0, 1, 2]


def test_loss_scaling_survives_empty_steps(policy_path, prompts, make_args):
    """fp16's GradScaler, on the CPU: it asserts that every optimizer step has gradients to check."""

    def reward(completions, trainer_state, **kwargs):
        signal = trainer_state.global_step in (0, 3)
        return length_reward(completions) if signal else [1.0] * len(completions)

    snapshots = Snapshots()
    trainer = SNRFilteredGRPOTrainer(policy_path, reward, make_args(max_steps=4), prompts, callbacks=[snapshots])
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    trainer.train()
    first, second, third, fourth = snapshots.parameters
    assert_same_parameters(first, second)
    assert_same_parameters(first, third)
    assert any(not torch.equal(third[name], fourth[name]) for name in third)


def test_empty_steps_in_a_row_stop_the_run_and_say_why(policy_path, prompts, make_args, caplog):
    args = make_args(max_steps=9, snr_max_empty_steps=3)
    trainer = SNRFilteredGRPOTrainer(policy_path, lambda completions, **_: [0.25] * len(completions), args, prompts)
    start = parameters_of(trainer)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 3
    assert_same_parameters(start, parameters_of(trainer))
    for part in ("snr_max_empty_steps=3", "snr_selection_eps=0.0", "(0.25, 0.25)"):
        assert part in caplog.text


def test_signal_in_between_keeps_the_run_going(policy_path, prompts, make_args):
    def every_third_step(completions, trainer_state, **kwargs):
        signal = trainer_state.global_step % 3 == 2
        return length_reward(completions) if signal else [0.0] * len(completions)

    args = make_args(max_steps=7, snr_max_empty_steps=3)
    trainer = SNRFilteredGRPOTrainer(policy_path, every_third_step, args, prompts)
    trainer.train()
    assert trainer.state.global_step == 7
    assert log_rows(trainer)[-1]["snr/empty_steps"] == 5


# Promise 6

METRICS = {
    "kept_groups",
    "kept_fraction",
    "kept_tokens_fraction",
    "score_mean",
    "score_max",
    "score_std_over_mean",
    "zero_variance_fraction",
    "dropped_all_best",
    "dropped_all_worst",
    "empty_steps",
    "update_compute_fraction",
}


@pytest.mark.parametrize("steps_per_generation", [2, 4])
@pytest.mark.parametrize("mode", ["drop", "mask", "soft"])
def test_nothing_hides(mode, steps_per_generation, policy_path, prompts, make_args):
    args = make_args(
        gradient_accumulation_steps=2, steps_per_generation=steps_per_generation, max_steps=4, snr_mode=mode
    )
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, args, prompts)
    trainer.train()
    for row in log_rows(trainer):
        assert {key for key in row if key.startswith("snr/")} == {f"snr/{name}" for name in METRICS}


def test_metrics_describe_the_selection(policy_path, make_args):
    trainer = replaying_trainer(policy_path, make_args(per_device_train_batch_size=32, max_steps=1))
    trainer.train()
    row = log_rows(trainer)[0]
    scores = torch.tensor([torch.tensor(rewards, dtype=torch.float64).var().item() for rewards in REWARDS.values()])
    scores[4] = 0.0  # 0.1 + 0.2 is 0.3
    assert row["snr/kept_groups"] == 4
    assert row["snr/kept_fraction"] == 0.5
    assert row["snr/score_mean"] == pytest.approx(scores.mean().item(), abs=1e-6)
    assert row["snr/score_max"] == pytest.approx(scores.max().item(), abs=1e-6)
    assert row["snr/score_std_over_mean"] == pytest.approx((scores.std() / scores.mean()).item(), abs=1e-5)
    assert row["snr/zero_variance_fraction"] == 3 / 8
    assert row["snr/dropped_all_best"] == 1 / 8
    assert row["snr/dropped_all_worst"] == 1 / 8
    assert 0 < row["snr/update_compute_fraction"] < 0.6


# Promise 7


def test_evaluation_is_never_filtered(policy_path, prompts, make_args):
    reward = lambda prompts, **kwargs: [1.0] * len(prompts)  # noqa: E731 -- no group has variance
    settings = {"per_device_eval_batch_size": 8, "max_steps": 1}
    results = []
    for trainer_class, snr in ((GRPOTrainer, False), (SNRFilteredGRPOTrainer, True)):
        trainer = trainer_class(policy_path, reward, make_args(snr, **settings), prompts, eval_dataset=prompts)
        torch.manual_seed(0)
        results.append(trainer.evaluate())
    measured = {key for key in results[0] if not key.endswith(("runtime", "per_second", "step_time"))}
    assert {key: results[0][key] for key in measured} == {key: results[1][key] for key in measured}
    assert not any("snr" in key for key in results[1])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="default"),
        pytest.param({"snr_score": "random", "snr_value": 0.5}, id="random scores"),
        pytest.param({"steps_per_generation": 4, "gradient_accumulation_steps": 1}, id="amid a generation batch"),
        pytest.param({"num_iterations": 2}, id="amid two iterations"),
        pytest.param({"steps_per_generation": 4, "gradient_accumulation_steps": 3}, id="windows out of step"),
        pytest.param({"snr_mode": "mask", "num_iterations": 2}, id="mask"),
        pytest.param({"gradient_accumulation_steps": 4, "save_steps": 1}, id="second epoch"),
    ],
)
def test_resuming_continues_the_same_run(settings, policy_path, prompts, make_args, tmp_path):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, **settings}

    def make_trainer(folder):
        args = make_args(output_dir=str(tmp_path / folder), **settings)
        return SNRFilteredGRPOTrainer(policy_path, length_reward, args, prompts)

    uninterrupted = make_trainer("whole")
    uninterrupted.train()
    resumed = make_trainer("resumed")
    checkpoint = settings["save_steps"]
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{checkpoint}"))
    assert_same_parameters(parameters_of(uninterrupted), parameters_of(resumed))
    assert len(log_rows(uninterrupted)) == 6
    for ours, theirs in zip(log_rows(resumed), log_rows(uninterrupted), strict=True):
        assert {k: v for k, v in ours.items() if k != "step_time"} == {
            k: v for k, v in theirs.items() if k != "step_time"
        }


# Drop-in


def test_a_plain_grpo_config_gets_the_default_filter(policy_path, prompts, make_args):
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, make_args(snr=False, max_steps=1), prompts)
    assert trainer.args.snr_strategy == "top_p"
    assert trainer.args.snr_value == 0.9
    trainer.train()
    assert "snr/kept_fraction" in log_rows(trainer)[0]


def test_a_config_of_another_trainer_is_refused(policy_path, prompts, make_args):
    class OtherConfig(GRPOConfig):
        pass

    with pytest.raises(TypeError, match=r"OtherConfig.*SNRFilteredGRPOConfig"):
        SNRFilteredGRPOTrainer(policy_path, length_reward, OtherConfig(use_cpu=True, bf16=False), prompts)


# Bad input


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"snr_strategy": "top-p"}, ["snr_strategy", "'top-p'", "top_p", "min_p", "none"]),
        ({"snr_score": "variance"}, ["snr_score", "'variance'", "reward_variance", "random"]),
        ({"snr_keep": "best"}, ["snr_keep", "'best'", "largest", "smallest"]),
        ({"snr_mode": "skip"}, ["snr_mode", "'skip'", "drop", "mask", "soft"]),
        ({"snr_loss_scaling": "log"}, ["snr_loss_scaling", "'log'", "none", "linear", "sqrt"]),
        ({"snr_value": 1.5}, ["snr_value", "1.5", "0 < value <= 1"]),
        ({"snr_strategy": "top_k_abs"}, ["snr_value", "0.9", "whole number"]),
        ({"snr_selection_eps": -0.1}, ["snr_selection_eps", "-0.1", ">= 0"]),
        ({"snr_selection_eps": float("nan")}, ["snr_selection_eps", "nan", ">= 0"]),
        ({"num_generations": 1}, ["num_generations", "1", ">= 2"]),
        (
            {"snr_mode": "mask", "entropy_coef": 0.1, "loss_type": "grpo"},
            ["snr_mode", "'mask'", "entropy_coef", "0.1", "dapo", "drop"],
        ),
    ],
)
def test_settings_out_of_range_are_refused_by_name_value_and_allowed_set(settings, parts, make_args):
    with pytest.raises(ValueError) as error:
        make_args(**settings)
    for part in parts:
        assert part in str(error.value)


def test_rewards_that_are_nan_everywhere_stop_before_the_first_update(policy_path, prompts, make_args):
    def broken(completions, **kwargs):
        return [float("nan")] * len(completions)

    trainer = SNRFilteredGRPOTrainer(policy_path, broken, make_args(), prompts)
    start = parameters_of(trainer)
    with pytest.raises(ValueError, match=r"reward_funcs=\['broken'\].*allowed: a number"):
        trainer.train()
    assert_same_parameters(start, parameters_of(trainer))


def test_a_dataset_without_prompts_is_refused(policy_path, make_args):
    dataset = Dataset.from_dict({"question": PROMPTS})
    with pytest.raises(ValueError, match=r"'question'.*'prompt'"):
        SNRFilteredGRPOTrainer(policy_path, length_reward, make_args(), dataset)


def test_the_card_names_the_method_and_the_paper(policy_path, prompts, make_args, tmp_path):
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, make_args(max_steps=1), prompts)
    trainer.create_model_card(model_name="lake")
    card = (tmp_path / "run" / "README.md").read_text()
    for part in ("SNR-filtered GRPO", "2604.06268", "snr-filter"):
        assert part in card


def test_defaults_are_the_papers():
    config = SNRFilteredGRPOConfig(use_cpu=True, bf16=False)
    assert (config.snr_strategy, config.snr_value, config.snr_score) == ("top_p", 0.9, "reward_variance")
    assert (config.snr_include_zero, config.snr_mode, config.snr_loss_scaling) == (False, "drop", "none")
