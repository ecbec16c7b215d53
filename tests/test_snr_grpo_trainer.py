"""Promises 4 to 7 and bad input, through a real `trainer.train()`."""

import copy
import logging

import pytest
import torch
from conftest import PROMPTS, assert_same_parameters, parameters_of
from datasets import Dataset
from peft import LoraConfig
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
        for ids in inputs["prompt_ids"]:
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


def entropy_by_hand(model, tokenizer, prompt, completion) -> float:
    """Mean entropy in nats of the distributions that the completion's tokens were drawn from."""
    prompt_ids = tokenizer(prompt)["input_ids"]
    logits = model(torch.tensor([prompt_ids + completion])).logits[0, len(prompt_ids) - 1 : -1]
    return torch.distributions.Categorical(logits=logits.double()).entropy().mean().item()


@pytest.mark.parametrize("score", ["entropy", "entropy_variance", "length", "reward_std", "reward_sum"])
def test_groups_are_scored_by_the_quantity_that_is_named(score, policy_path, make_args):
    args = make_args(per_device_train_batch_size=32, max_steps=1, snr_score=score, learning_rate=0.0)
    trainer = replaying_trainer(policy_path, args)
    trainer.train()
    replay = Replay(trainer._tokenizer, REWARDS)
    groups = {
        "length": [torch.tensor([float(len(ids)) for ids in replay.completions[p]]).mean() for p in PROMPTS],
        "reward_std": [torch.tensor(REWARDS[p]).std() for p in PROMPTS],
        "reward_sum": [torch.tensor(REWARDS[p]).sum() for p in PROMPTS],
    }
    with torch.no_grad():
        entropies = torch.tensor(
            [
                [entropy_by_hand(trainer.model, trainer._tokenizer, p, ids) for ids in replay.completions[p]]
                for p in PROMPTS
            ]
        )
    groups |= {"entropy": list(entropies.mean(dim=1)), "entropy_variance": list(entropies.std(dim=1))}
    row = log_rows(trainer)[0]
    assert row["snr/score_mean"] == pytest.approx(torch.stack(groups[score]).mean().item(), rel=1e-4)
    assert row["snr/score_max"] == pytest.approx(torch.stack(groups[score]).max().item(), rel=1e-4)


def test_random_scores_choose_among_the_groups_with_signal(policy_path, make_args):
    settings = {"snr_score": "random", "snr_strategy": "top_k_abs", "snr_value": 2, "max_steps": 2}
    trainer = replaying_trainer(policy_path, make_args(per_device_train_batch_size=32, **settings))
    trainer.train()
    first, second = log_rows(trainer)
    assert first["snr/kept_groups"] == second["snr/kept_groups"] == 2
    assert first["snr/score_mean"] != second["snr/score_mean"]


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


def test_an_infinite_reward_neither_spoils_the_batch_nor_the_range_of_rewards(policy_path, make_args):
    def once_infinite(replayed, prompts, **kwargs):
        return [
            float("inf") if prompt == PROMPTS[2] else reward for reward, prompt in zip(replayed, prompts, strict=True)
        ]

    args = make_args(per_device_train_batch_size=32, max_steps=1, snr_strategy="none")
    trainer = replaying_trainer(policy_path, args, reward_funcs=once_infinite)
    trainer.train()
    row = log_rows(trainer)[0]
    assert row["snr/kept_groups"] == 4  # prompts 0, 5, 6 and 7
    assert row["snr/dropped_all_best"] == 1 / 8
    assert trainer._selector.reward_range == (0.0, 1.0)


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


def test_steps_without_a_row_of_a_kept_group_are_not_counted_as_empty(policy_path, make_args):
    """Four kept rows for eight optimizer steps: half of the steps move nothing, but a group was kept for them all."""
    rewards = {prompt: [0.0, 1.0, 0.0, 1.0] if prompt == PROMPTS[0] else [0.0] * 4 for prompt in PROMPTS}
    args = make_args(per_device_train_batch_size=4, steps_per_generation=8, max_steps=8, snr_max_empty_steps=1)
    snapshots = Snapshots()
    trainer = replaying_trainer(policy_path, args, rewards, callbacks=[snapshots])
    start = parameters_of(trainer)
    trainer.train()
    assert trainer.state.global_step == 8
    assert log_rows(trainer)[-1]["snr/empty_steps"] == 0
    before_and_after = zip([start, *snapshots.parameters], snapshots.parameters, strict=False)
    moved = sum(any(not torch.equal(old[name], new[name]) for name in old) for old, new in before_and_after)
    assert moved == 4


def test_adaptive_entropy_closes_its_books_when_the_last_generation_batch_is_empty(policy_path, prompts, make_args):
    def reward(completions, trainer_state, **kwargs):
        reward.calls += 1
        return length_reward(completions) if reward.calls % 2 else [1.0] * len(completions)

    reward.calls = 0
    args = make_args(
        gradient_accumulation_steps=2, steps_per_generation=1, use_adaptive_entropy=True, entropy_target=9.0
    )
    trainer = SNRFilteredGRPOTrainer(policy_path, reward, args, prompts)
    trainer.train()
    assert trainer._entropy_window_stats is None
    coefficients = [row["entropy_coef"] for row in log_rows(trainer)]
    assert coefficients == pytest.approx([args.entropy_coef_delta * step for step in (1, 2, 3)])


def test_a_second_run_of_the_same_trainer_starts_its_counts_anew(policy_path, prompts, make_args):
    args = make_args(max_steps=9, snr_max_empty_steps=3)
    trainer = SNRFilteredGRPOTrainer(policy_path, lambda completions, **_: [0.25] * len(completions), args, prompts)
    for _ in range(2):
        trainer.train()
        assert trainer.state.global_step == 3


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
    scores[4] = 0.0  # float noise
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
    measured = {key for key in results[0] if not key.endswith(("time", "per_second"))}
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
    with pytest.raises(ValueError, match=r"reward_funcs=\['broken'\].*allowed: a finite number"):
        trainer.train()
    assert_same_parameters(start, parameters_of(trainer))


def test_a_dataset_without_prompts_is_refused(policy_path, make_args):
    dataset = Dataset.from_dict({"question": PROMPTS})
    with pytest.raises(ValueError, match=r"'question'.*'prompt'"):
        SNRFilteredGRPOTrainer(policy_path, length_reward, make_args(), dataset)


def test_prompts_made_by_a_transform_are_welcome(policy_path, make_args):
    dataset = Dataset.from_dict({"question": PROMPTS}).with_transform(lambda rows: {"prompt": rows["question"]})
    args = make_args(max_steps=1, remove_unused_columns=False)
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, args, dataset)
    trainer.train()
    assert trainer.state.global_step == 1


def test_subclasses_that_read_their_inputs_never_see_a_step_without_rows(policy_path, prompts, make_args):
    class Reader(SNRFilteredGRPOTrainer):
        def _compute_loss(self, model, inputs):
            assert len(inputs["advantages"])
            return super()._compute_loss(model, inputs)

    Reader(policy_path, lambda completions, **_: [1.0] * len(completions), make_args(), prompts).train()


@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": 3, "steps_per_generation": 2}, {}], ids=str)
def test_iterable_datasets_train(settings, policy_path, prompts, make_args):
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, make_args(**settings), prompts.to_iterable_dataset())
    trainer.train()
    assert trainer.state.global_step == 3


def test_lora_trains_the_adapter_alone(policy_path, prompts, make_args):
    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    args = make_args(gradient_accumulation_steps=2, beta=0.1)
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, args, prompts, peft_config=adapter)
    start = parameters_of(trainer)
    trainer.train()
    moved = {name for name, value in parameters_of(trainer).items() if not torch.equal(value, start[name])}
    assert moved and all("lora_" in name for name in moved)


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


def test_a_group_size_that_does_not_divide_the_batch_is_refused_with_its_numbers(make_args):
    with pytest.raises(ValueError, match=r"6.*4"):
        make_args(per_device_train_batch_size=6, num_generations=4)
