"""The rewards of all groups that a run keeps, and figures of its measurements."""

import json
from statistics import fmean, variance

import pytest
import torch
from algorithms import GRPO, replay_of
from dynamic_samplings import WORDS
from measured_runs import length_reward
from plotted import group_rewards
from reported_runs import make_run

from ragen2_trl import SNRFilteredGRPOTrainer
from ragen2_trl.record.group_rewards import append_group_rewards, forget_group_rewards, read_group_rewards
from ragen2_trl.record.run import read_run, run_of

FILE = "_measurements/group_rewards.jsonl"


def written(folder, records):
    """A run's folder with these records."""
    make_run(folder, steps=10)
    lines = [json.dumps(vars(one)) + "\n" for one in records]
    (folder / FILE).write_text("".join(lines))
    return read_run(folder)


def test_a_run_with_a_filter_keeps_the_rewards_of_all_groups(policy_path, prompts, make_args, tmp_path):
    trainer = SNRFilteredGRPOTrainer(
        policy_path, length_reward, make_args(max_steps=4, steps_per_generation=2), prompts
    )
    trainer.train()
    records = read_group_rewards(run_of(trainer).folder)
    assert [one.step for one in records] == [1, 3]  # once for each generation, at the first step that it serves
    rows = {row["step"]: row for row in trainer.state.log_history if "snr/score_mean" in row}
    for one in records:
        row = rows[one.step]
        variances = [variance(group) for group in one.rewards]
        assert fmean(variances) == pytest.approx(row["snr/score_mean"], rel=1e-4)
        assert max(variances) == pytest.approx(row["snr/score_max"], rel=1e-4)
        assert sum(one.kept) == row["snr/kept_groups"]
        assert fmean(map(max, one.rewards)) == pytest.approx(row["snr/in_group_max"], rel=1e-4)
        assert fmean(map(fmean, one.rewards)) == pytest.approx(row["snr/in_group_mean"], rel=1e-4)
    # A training that begins anew, in the same folder.
    again = SNRFilteredGRPOTrainer(policy_path, length_reward, make_args(max_steps=1), prompts)
    again.train()
    assert [one.step for one in read_group_rewards(run_of(again).folder)] == [1]


@pytest.mark.parametrize("pilots", [0, 2])
def test_a_step_of_several_rounds_keeps_the_rewards_of_all(pilots, policy_path, tmp_path):
    """Four prompts first, three of them live, and then more."""
    rewards = {word: [0.0] * 4 if n == 3 else [0.0, 1.0, 0.0, 1.0] for n, word in enumerate(WORDS)}
    settings = {"per_device_train_batch_size": 16, "max_steps": 1, "shuffle_dataset": False}
    rounds = {"snr_strategy": "nonzero", "snr_dynamic_sampling_rounds": 1, "snr_pilot_generations": pilots}
    trainer = GRPO.make(policy_path, GRPO.args(tmp_path, **settings, **rounds), replay_of(policy_path, rewards))
    trainer.train()
    (record,) = read_group_rewards(tmp_path)
    (row,) = [row for row in trainer.state.log_history if "snr/prompts_used" in row]
    used = list(rewards.values())[: int(row["snr/prompts_used"])]
    assert len(used) > 4
    assert record.rewards == used


def test_a_step_that_spans_several_generations_keeps_the_rewards_of_all(policy_path, prompts, make_args):
    args = make_args(max_steps=1, steps_per_generation=1, gradient_accumulation_steps=3)
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, args, prompts)
    trainer.train()
    (record,) = read_group_rewards(run_of(trainer).folder)
    assert len(record.rewards) == len(record.kept) == 3 * len(trainer.latest_selection.kept)
    (row,) = [row for row in trainer.state.log_history if "snr/score_mean" in row]
    assert fmean(map(variance, record.rewards)) == pytest.approx(row["snr/score_mean"], rel=1e-4)


def test_a_resumed_run_forgets_what_comes_after_its_checkpoint_and_half_a_line(tmp_path):
    records = group_rewards(10)
    run = written(tmp_path / "run", records)
    path = run.folder / FILE
    path.write_text(path.read_text() + '{"step": 11, "rewards": [[1.0, 0.')
    assert read_group_rewards(run.folder) == records
    forget_group_rewards(run.folder, after=4)
    assert read_group_rewards(run.folder) == records[:4]
    assert len(path.read_text().splitlines()) == 4
    forget_group_rewards(run.folder, after=0)
    assert not path.exists()


@pytest.mark.parametrize(
    "line",
    [
        "no JSON",
        "[]",
        '{"step": "1", "rewards": [[1.0]]}',
        '{"step": 1, "rewards": []}',
        '{"step": 1, "rewards": [1.0]}',
        '{"step": 1}',
        "[" * 100_000,
    ],
)
def test_lines_of_another_form_are_left_out(tmp_path, line):
    run = written(tmp_path / "run", group_rewards(2))
    (run.folder / FILE).write_text(f"{line}\n" + (run.folder / FILE).read_text())
    assert [one.step for one in read_group_rewards(run.folder)] == [1, 2]


def test_what_was_expected_of_prompts_is_kept_beside_their_rewards(tmp_path):
    folder = tmp_path / "run"
    written(folder, [])
    rewards, kept = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([True, False])
    append_group_rewards(folder, 3, rewards, kept, [0.25, 0.1])
    append_group_rewards(folder, 4, rewards, kept)
    append_group_rewards(folder, 5, rewards, kept, [0.25])  # as another hand may have written it
    forget_group_rewards(folder, after=5)
    records = read_group_rewards(folder)
    assert [one.predicted for one in records] == [[0.25, 0.1], None, None]
