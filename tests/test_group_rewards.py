"""The rewards of all groups: what a run keeps of them, and the table and the figure that are made of it."""

import json
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from measured_runs import length_reward
from plotted import group_rewards, measured_history, stock_history
from reported_runs import make_run, report_of
from reported_runs import words_only_fixture as words_only_fixture

from ragen2_trl import SNRFilteredGRPOTrainer
from ragen2_trl.filtering import group_score
from ragen2_trl.reporting import (
    plot_arrows,
    plot_calibration,
    plot_prompts,
    plot_proxies,
    plot_reward_distribution,
    plot_validity,
)
from ragen2_trl.reporting.gallery import arrows_of
from ragen2_trl.reporting.group_rewards import (
    MAX_ROWS,
    GroupRewards,
    append_group_rewards,
    forget_group_rewards,
    read_group_rewards,
    variance_table,
)
from ragen2_trl.reporting.plots import Arrow, arrow_of, path_of
from ragen2_trl.reporting.run import read_run, run_of

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
    records = read_group_rewards(run_of(trainer))
    assert [one.step for one in records] == [1, 3]  # once for each generation, at the first step that it serves
    rows = {row["step"]: row for row in trainer.state.log_history if "snr/score_mean" in row}
    for one in records:
        row = rows[one.step]
        assert fmean(one.variances) == pytest.approx(row["snr/score_mean"], rel=1e-4)
        assert max(one.variances) == pytest.approx(row["snr/score_max"], rel=1e-4)
        assert sum(one.kept) == row["snr/kept_groups"]
        assert fmean(map(max, one.rewards)) == pytest.approx(row["snr/in_group_max"], rel=1e-4)
        assert fmean(map(fmean, one.rewards)) == pytest.approx(row["snr/in_group_mean"], rel=1e-4)
    # A training that begins anew, in the same folder.
    again = SNRFilteredGRPOTrainer(policy_path, length_reward, make_args(max_steps=1), prompts)
    again.train()
    assert [one.step for one in read_group_rewards(run_of(again))] == [1]


def test_a_step_that_spans_several_generations_keeps_the_rewards_of_all(policy_path, prompts, make_args):
    args = make_args(max_steps=1, steps_per_generation=1, gradient_accumulation_steps=3)
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, args, prompts)
    trainer.train()
    (record,) = read_group_rewards(run_of(trainer))
    assert len(record.rewards) == len(record.kept) == 3 * len(trainer.latest_selection.kept)
    (row,) = [row for row in trainer.state.log_history if "snr/score_mean" in row]
    assert fmean(record.variances) == pytest.approx(row["snr/score_mean"], rel=1e-4)


def test_a_resumed_run_forgets_what_comes_after_its_checkpoint_and_half_a_line(tmp_path):
    records = group_rewards(10)
    run = written(tmp_path / "run", records)
    path = run.folder / FILE
    path.write_text(path.read_text() + '{"step": 11, "rewards": [[1.0, 0.')
    assert read_group_rewards(run) == records
    forget_group_rewards(run.folder, after=4)
    assert read_group_rewards(run) == records[:4]
    assert len(path.read_text().splitlines()) == 4
    forget_group_rewards(run.folder, after=0)
    assert not path.exists()


def test_without_a_filter_measurements_have_the_rewards(tmp_path):
    run = read_run(make_run(tmp_path / "run", steps=10))
    records = read_group_rewards(run)
    assert [one.step for one in records] == [1, 10]
    assert records[0].rewards == [[1.0, 0.0, 0.0]] * 8  # what could not be scored is left out


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
    assert [one.step for one in read_group_rewards(run)] == [1, 2]


def test_the_table_is_that_of_a_loop_over_groups(tmp_path):
    kept = [True, False, True]
    records = [GroupRewards(3, [[1.0, 0.0, 0.5], [2.0, 2.0], []], kept), GroupRewards(4, [[]], None)]
    first, second = variance_table(written(tmp_path / "run", records))
    assert (first.step, first.groups, first.zero, first.kept) == (3, 3, 2, 2)
    assert (first.largest, first.median, first.mean) == pytest.approx((0.25, 0, 0.25 / 3))
    assert (first.best, first.average) == pytest.approx((1.5, 1.25))
    assert (second.zero, second.kept, second.best, second.average) == (1, None, None, None)
    rewards = torch.tensor(group_rewards(1)[0].rewards)
    assert group_rewards(1)[0].variances == pytest.approx(group_score(rewards).tolist())


def test_a_long_run_has_a_table_of_the_first_the_last_and_some_between(tmp_path):
    run = written(tmp_path / "run", [GroupRewards(step, [[0.0, 1.0]], None) for step in range(1, 1000)])
    run = replace(run, step=999)
    steps = [row.step for row in variance_table(run)]
    assert (len(steps), steps[0], steps[-1]) == (MAX_ROWS, 1, 999)
    assert steps == sorted(set(steps))


def test_the_report_has_the_table(tmp_path, words_only):
    written(tmp_path / "run", group_rewards(5))
    text = report_of(tmp_path / "run").text
    assert "Variance of rewards within groups, 5 steps" in text
    assert "Best reward of a group" in text


def test_rewards_early_midway_and_late_are_shares_of_completions():
    figure = plot_reward_distribution(group_rewards(100))
    labels = [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel()]
    assert labels == ["steps\n1 to 10", "steps\n46 to 55", "steps\n91 to 100"]
    for axes in figure.axes:
        assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(1)
    with pytest.raises(ValueError, match="at least one reward, got 1 generations"):
        plot_reward_distribution([GroupRewards(1, [[]], None)])


def test_a_single_reward_and_a_single_generation_are_drawn():
    figure = plot_reward_distribution([GroupRewards(1, [[1.0, 1.0]], None)])
    assert len(figure.axes) == 2


def test_proxies_are_drawn_of_the_scopes_that_were_measured():
    figure = plot_proxies(measured_history(40, scopes=("first_turn",)))
    assert len(figure.axes) == 6
    accuracy, chance = figure.axes[0].lines
    assert list(accuracy.get_xdata()) == [1, 10, 20, 30, 40]
    assert set(chance.get_ydata()) == {0.125}
    with pytest.raises(ValueError, match="none with a measurement"):
        plot_proxies([{"step": 1, "reward": 0.5}])


def test_validity_is_drawn_where_all_was_measured():
    rows = measured_history(40)
    assert [point[0] for point in path_of(rows)] == [1, 10, 20, 30, 40]
    del rows[9]["mi/valid_thinking_rate"]
    assert [point[0] for point in path_of(rows)] == [1, 20, 30, 40]
    above, below = plot_validity(rows).axes
    assert (
        list(above.lines[0].get_xdata()) == list(below.lines[0].get_xdata()) == [point[1] for point in path_of(rows)]
    )
    with pytest.raises(ValueError, match="valid_thinking_rate"):
        plot_validity([{"step": 1}])


def test_arrows_lead_from_the_first_to_the_last_measurement(tmp_path):
    rows = measured_history(40)
    arrow = arrow_of(rows, [(row["step"], float(row["step"])) for row in rows])
    assert arrow.information == (rows[0]["mi/first_turn/mi_seq"], rows[-1]["mi/first_turn/mi_seq"])
    assert arrow.height == pytest.approx((5.5, 35.5))  # of the ten next steps
    assert arrow_of(rows[:5], [(1, 0.5)]) is None  # a single measurement
    assert arrow_of(rows, []) is None
    runs = {name: read_run(make_run(tmp_path / name, steps=10)) for name in ("one", "other")}
    assert "success" in arrows_of(runs).get_label()
    assert arrows_of({"one": runs["one"]}) is None
    with pytest.raises(ValueError, match="at least one run"):
        plot_arrows({})
    assert len(plot_arrows({"still": Arrow((1, 1), (1, 1), (0, 0))}).axes) == 2


def test_what_was_expected_of_prompts_is_kept_beside_their_rewards(tmp_path):
    folder = tmp_path / "run"
    written(folder, [])
    rewards, kept = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([True, False])
    append_group_rewards(folder, 3, rewards, kept, [0.25, 0.1])
    append_group_rewards(folder, 4, rewards, kept)
    append_group_rewards(folder, 5, rewards, kept, [0.25])  # as another hand may have written it
    forget_group_rewards(folder, after=5)
    records = read_group_rewards(read_run(folder))
    assert [one.predicted for one in records] == [[0.25, 0.1], None, None]


def test_expectations_that_come_true_lie_on_the_dotted_line():
    records = [replace(one, predicted=one.variances) for one in group_rewards(50)]
    (axes,) = plot_calibration(records).axes
    means = axes.containers[0].lines[0].get_xydata()
    assert len(means) == 10 and means[:, 0] == pytest.approx(means[:, 1])
    with pytest.raises(ValueError, match="at least one prediction, got 1 generations without any"):
        plot_calibration(group_rewards(1))


def test_a_history_without_predictions_has_no_figure_of_prompts():
    with pytest.raises(ValueError, match="none has a finite 'snr/predicted_variance'"):
        plot_prompts(stock_history(3))
