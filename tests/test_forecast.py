"""Would filtering help here: from the rewards of one batch to numbers and a sentence."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trl import TrlParser

from ragen2_trl import cli
from ragen2_trl.cli import one_batch
from ragen2_trl.cli.arguments import DiagnoseArguments
from ragen2_trl.filtering import group_score, select_groups
from ragen2_trl.instrument.forecast import OURS, advice, forecast_filter
from ragen2_trl.reporting.saved_gradients import read_gradients
from research.checks import evaluate
from research.measures import read_finished
from research.page import read_grid
from research.plan import read_experiment
from research.store import Store

EXPERIMENTS = Path(__file__).parents[1] / "research" / "experiments"

EASY, HARD, SOME = [1.0] * 4, [0.0] * 4, [1.0, 0.0, 0.0, 0.0]


def test_spreads_are_of_standard_deviations_and_of_variances():
    rewards = torch.tensor([EASY, HARD, SOME, [1.0, 0.0, 1.0, 0.0]])
    forecast = forecast_filter(rewards)
    for found, values in (
        (forecast.reward_std_spread, rewards.double().std(dim=1)),
        (forecast.reward_variance_spread, rewards.double().var(dim=1)),
    ):
        assert found == pytest.approx((values.std() / values.mean()).item())
    assert forecast.reward_variance_spread > forecast.reward_std_spread


def test_groups_without_variance_are_told_apart_by_difficulty():
    forecast = forecast_filter(torch.tensor([EASY, HARD, HARD, SOME, [0.3] * 4]))
    assert (forecast.zero_variance, forecast.too_easy, forecast.too_hard) == (0.8, 0.2, 0.4)


def test_kept_fractions_are_those_of_the_filter_and_save_their_part_of_a_step():
    rewards = torch.rand(32, 8, generator=torch.Generator().manual_seed(0)).round()
    rewards[:10] = 1.0
    forecast = forecast_filter(rewards, (0.5, 0.9), update_share=0.4)
    for value, kept in forecast.kept.items():
        assert kept == select_groups(group_score(rewards), value=value).double().mean()
        assert forecast.step_saved(value) == pytest.approx(0.4 * (1 - kept))
    assert forecast.kept[0.5] < forecast.kept[0.9] < 1


@pytest.mark.parametrize("spread", [0.2, 0.7, 1.3])
def test_the_advice_gives_the_ratio_and_that_what_it_predicts_is_inconclusive(spread):
    forecast = forecast_filter(torch.tensor([SOME, SOME, SOME, EASY]))
    said = advice(replace(forecast, reward_std_spread=spread))
    assert f"{spread:.2f}" in said and "Table 8" in said and "inconclusive" in said


def test_the_interval_of_the_advice_is_the_one_of_the_results():
    experiment = read_experiment(EXPERIMENTS / "tab8.yaml")
    store = Store(EXPERIMENTS.parent / "results")
    finished = read_finished(store, [planned.key for planned in experiment.planned_runs()])
    grid = read_grid(experiment, finished, scale="tiny", quick=False)
    (found,) = [one.estimate for one in evaluate(grid, store.fixed_checks(experiment)) if one.counts]
    assert f"{found.value:.2f}, 95 % interval {found.low:.2f} to {found.high:.2f}" in OURS


@pytest.mark.parametrize(("group", "words"), [(EASY, "too easy"), (HARD, "too hard")])
def test_a_batch_that_teaches_nothing_is_called_so(group, words):
    mostly = [group, group, group, SOME]
    assert words in advice(forecast_filter(torch.tensor(mostly)))
    assert "nothing to learn" in advice(forecast_filter(torch.tensor([group] * 4)))


@pytest.mark.slow
def test_the_command_shows_gradients_and_forecast_of_a_checkpoint(tmp_path, capsys):
    arguments = "diagnose --model tiny --num_prompts 4 --num_samples 2 --max_new_tokens 24 --gradients true"
    cli.main([*arguments.split(), "--predict_filter", "true", "--output_dir", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"forecast.json", "gradients_00000.json", "gradients.png"}
    shown = capsys.readouterr().out
    forecast = json.loads((tmp_path / "forecast.json").read_text())
    assert " ".join(forecast["advice"].split()) in " ".join(shown.split())
    assert 0 < forecast["update_share"] < 1
    assert set(forecast["kept"]) == {"0.5", "0.8", "0.9", "0.95", "1.0"}
    measured = read_gradients(tmp_path / "gradients_00000.json")
    assert len(measured.buckets) == 4 and set(measured.whole.parts) == {"task", "entropy"}
    assert measured.coefficients == {"entropy": 0.001}
    assert "bucket 4" in shown and "all: attention" in shown


@pytest.mark.parametrize(("task", "longest"), [
    ("--env_name frozen_lake", 128),
    ("--env_name frozen_lake --max_turn_tokens 400", 400),
    ("--env_name sokoban --multi_turn true --max_turn_tokens 40", 2 * 40 * 5),
    ("--env_name sokoban --multi_turn true --max_new_tokens 90", 90),
])  # fmt: skip
def test_episodes_are_as_long_as_their_turns_may_be_and_what_is_answered(task, longest, tmp_path):
    parser = TrlParser(DiagnoseArguments)
    (arguments,) = parser.parse_args_and_config(["--num_prompts", "4", "--num_samples", "2", *task.split()])
    trainer, _ = one_batch._make_trainer(arguments, str(tmp_path))
    assert trainer.max_completion_length == longest


@pytest.mark.slow
def test_the_command_plays_several_turns(tmp_path):
    arguments = "diagnose --model tiny-sokoban --env_name sokoban --multi_turn true --num_prompts 4 --num_samples 2"
    cli.main([*arguments.split(), "--predict_filter", "true", "--output_dir", str(tmp_path)])
    assert (tmp_path / "forecast.json").exists()


def test_saved_completions_have_no_rewards_to_forecast_from(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["diagnose", "--predict_filter", "true", "--completions", str(tmp_path)])
    assert "without rewards" in " ".join(capsys.readouterr().err.split())
