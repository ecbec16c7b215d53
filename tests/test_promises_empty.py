"""Promise 5: an empty selection changes nothing, is counted, and a long row of them ends the run."""

import copy
import logging
from dataclasses import replace

import pytest
import torch
from algorithms import GRPO, PPO, cases, for_each, replay_of, slow
from conftest import PROMPTS, assert_same_parameters, log_rows, parameters_of
from replay import Replay, move_away
from transformers import TrainerCallback


class Signal(Replay):
    """Rewards vary in some steps only."""

    steps = (0,)

    def score(self, prompts, trainer_state, **kwargs):
        rewards = super().score(prompts)
        return rewards if trainer_state.global_step in self.steps else [1.0] * len(rewards)


def signal_in(policy_path, *steps):
    replay = replay_of(policy_path)
    varied = {prompt: [1.0, 0.0, 0.0, 1.0] for prompt in PROMPTS}
    replay = Signal(replay.tokenizer, varied)
    replay.steps = steps
    return replay


class Snapshots(TrainerCallback):
    """Parameters and optimizer state after each step."""

    def __init__(self):
        self.parameters, self.optimizer_states = [], []

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.parameters.append({name: p.detach().clone() for name, p in model.named_parameters()})
        self.optimizer_states.append(copy.deepcopy(optimizer.state_dict()["state"]))


@pytest.mark.parametrize("accumulation", [slow(1), 2])
@cases(
    grpo={"terms": {"beta": 0.1, "entropy_coef": 0.1}},
    rloo={"terms": {"beta": 0.1}},
    ppo={"terms": {"beta": 0.1, "entropy_coef": 0.1}, "separate": {"value_head": "separate"}},
)
def test_an_empty_selection_changes_nothing(algorithm, settings, accumulation, policy_path, tmp_path):
    """Signal in the first step only, so that momentum, weight decay, KL, entropy and values would move the next."""
    args = algorithm.args(tmp_path, gradient_accumulation_steps=accumulation, weight_decay=0.1, **settings)
    snapshots = Snapshots()
    trainer = algorithm.make(policy_path, args, signal_in(policy_path, 0), callbacks=[snapshots])
    move_away(trainer.model)
    start = parameters_of(trainer)
    trainer.train()
    after_signal, *after_empty = snapshots.parameters
    assert not [name for name in start if torch.equal(start[name], after_signal[name])]
    for parameters, state in zip(after_empty, snapshots.optimizer_states[1:], strict=True):
        assert_same_parameters(after_signal, parameters)
        assert len(snapshots.optimizer_states[0]) == len(start)
        for index, values in snapshots.optimizer_states[0].items():
            assert all(torch.equal(values[key], state[index][key]) for key in values)
    first, *empty = log_rows(trainer)
    assert [row["snr/empty_steps"] for row in (first, *empty)] == [0, 1, 2]
    means = {"ppo/return_mean", *(["kl"] if "beta" in settings else [])} if algorithm is PPO else set()
    assert means <= first.keys() and not any(means & row.keys() for row in empty)


@for_each
def test_loss_scaling_survives_empty_steps(algorithm, policy_path, tmp_path):
    """fp16's GradScaler, on the CPU: it asserts that every optimizer step has gradients to check."""
    snapshots = Snapshots()
    args = algorithm.args(tmp_path, max_steps=4)
    trainer = algorithm.make(policy_path, args, signal_in(policy_path, 0, 3), callbacks=[snapshots])
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    trainer.train()
    first, second, third, fourth = snapshots.parameters
    assert_same_parameters(first, second)
    assert_same_parameters(first, third)
    assert any(not torch.equal(third[name], fourth[name]) for name in third)


@for_each
def test_empty_steps_in_a_row_stop_the_run_and_say_why(algorithm, policy_path, tmp_path, caplog):
    args = algorithm.args(tmp_path, max_steps=9, snr_max_empty_steps=3)
    trainer = algorithm.make(policy_path, args, replay_of(policy_path, {p: [0.25] * 4 for p in PROMPTS}))
    start = parameters_of(trainer)
    for _ in range(2):  # a second run counts anew
        with caplog.at_level(logging.WARNING):
            trainer.train()
        assert trainer.state.global_step == 3
    assert_same_parameters(start, parameters_of(trainer))
    for part in ("snr_max_empty_steps=3", "every group got the same reward, 0.25"):
        assert part in caplog.text


@pytest.mark.slow
def test_nor_are_they_where_the_kept_group_was_sampled_further(policy_path, tmp_path):
    """Of the four prompts of the first generation none has variance, and of those sampled further one."""
    layout = {"per_device_train_batch_size": 4, "steps_per_generation": 4, "max_steps": 4, "num_generations": 4}
    settings = {
        "snr_dynamic_sampling_rounds": 1,
        "snr_strategy": "nonzero",
        "snr_max_empty_steps": 1,
        "scale_rewards": "group",
    }
    args = GRPO.args(tmp_path, **settings, **layout)
    trainer = GRPO.make(policy_path, args, replay_of(policy_path, {prompt: [0.0] * 4 for prompt in PROMPTS}))
    sampled, select = [], trainer._select

    def first_group_varies(*given):
        selection, number = select(*given), len(trainer._rounds)
        if number == 0:
            return selection
        sampled.append(number)
        kept = torch.zeros_like(selection.kept)
        kept[0] = True
        return replace(selection, kept=kept)

    trainer._select = first_group_varies
    trainer.train()
    assert sampled == [1] and trainer.state.global_step == 4
    (row, *_) = log_rows(trainer)
    assert (row["snr/kept_groups"], row["snr/trained_groups"]) == (1, 1)
    assert log_rows(trainer)[-1]["snr/empty_steps"] == 0


@for_each
def test_steps_without_a_row_of_a_kept_group_are_not_counted_as_empty(algorithm, policy_path, tmp_path):
    """Four kept rows for eight optimizer steps: half of the steps move nothing, but a group was kept for them all."""
    rewards = {prompt: [0.0, 1.0, 0.0, 1.0] if prompt == PROMPTS[0] else [0.0] * 4 for prompt in PROMPTS}
    layout = {"per_device_train_batch_size": 4, "steps_per_generation": 8, "max_steps": 8}
    args = algorithm.args(tmp_path, snr_max_empty_steps=1, **layout)
    snapshots = Snapshots()
    trainer = algorithm.make(policy_path, args, replay_of(policy_path, rewards), callbacks=[snapshots])
    start = parameters_of(trainer)
    trainer.train()
    assert trainer.state.global_step == 8
    assert log_rows(trainer)[-1]["snr/empty_steps"] == 0
    before_and_after = zip([start, *snapshots.parameters], snapshots.parameters, strict=False)
    moved = sum(any(not torch.equal(old[name], new[name]) for name in old) for old, new in before_and_after)
    assert moved == 4


@pytest.mark.slow
@for_each
def test_signal_in_between_keeps_the_run_going(algorithm, policy_path, tmp_path):
    args = algorithm.args(tmp_path, max_steps=7, snr_max_empty_steps=3)
    trainer = algorithm.make(policy_path, args, signal_in(policy_path, 2, 5))
    trainer.train()
    assert trainer.state.global_step == 7
    assert log_rows(trainer)[-1]["snr/empty_steps"] == 5


def test_adaptive_entropy_closes_its_books_when_the_last_generation_batch_is_empty(policy_path, tmp_path):
    class EverySecond(Replay):
        calls = 0

        def score(self, prompts, **kwargs):
            self.calls += 1
            return super().score(prompts) if self.calls % 2 else [1.0] * len(prompts)

    replay = EverySecond(replay_of(policy_path).tokenizer, {prompt: [1.0, 0.0, 0.0, 1.0] for prompt in PROMPTS})
    args = GRPO.args(
        tmp_path, gradient_accumulation_steps=2, steps_per_generation=1, use_adaptive_entropy=True, entropy_target=9.0
    )
    trainer = GRPO.make(policy_path, args, replay)
    trainer.train()
    assert trainer._entropy_window_stats is None
    coefficients = [row["entropy_coef"] for row in log_rows(trainer)]
    assert coefficients == pytest.approx([args.entropy_coef_delta * step for step in (1, 2, 3)])


def test_an_empty_step_logs_nothing_of_an_update(policy_path, tmp_path):
    args = GRPO.args(tmp_path, gradient_accumulation_steps=1, beta=0.1)
    trainer = GRPO.make(policy_path, args, signal_in(policy_path, 0))
    trainer.train()
    first, *empty = log_rows(trainer)
    assert {"entropy", "kl", "grad_norm", "clip_ratio/high_max"} <= set(first) and len(empty) == 2
    for row in empty:
        assert not {key for key in row if key in ("entropy", "grad_norm", "kl") or key.startswith("clip_ratio")}


@pytest.mark.parametrize(("logging_steps", "norms"), [(1, [True, False, False]), (3, [True])])
def test_a_gradient_norm_is_of_a_step_of_its_row_that_moved_something(logging_steps, norms, policy_path, tmp_path):
    """An empty step at the end of a row does not make it look dead, and a row of empty ones has none."""
    trainer = GRPO.make(policy_path, GRPO.args(tmp_path, logging_steps=logging_steps), signal_in(policy_path, 0))
    trainer.train()
    rows = log_rows(trainer)
    assert [row.get("grad_norm", 0) > 0 for row in rows] == ["grad_norm" in row for row in rows] == norms
    assert [row["snr/kept_fraction"] > 0 for row in rows] == norms
