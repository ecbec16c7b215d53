"""What a person sees of a training: eight metrics of eighty, one line, and a table of what it was good for."""

import io
import re
import shlex
from types import SimpleNamespace

import pytest
from measured_runs import length_reward
from rich.console import Console
from transformers import TrainerCallback, TrainerState
from trl import GRPOTrainer

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOTrainer, cli
from ragen2_trl.callbacks import TrainingProgressCallback

MEASURED = {"mi/first_turn/retrieval_accuracy": 0.97, "mi/first_turn/mi_seq": 2.5}
EIGHT = [
    "mi/first_turn/retrieval_accuracy",
    "mi/first_turn/retrieval_chance",
    "mi/first_turn/mi_seq",
    "mi/first_turn/mi_upper_bound",
    "mi/valid_thinking_rate",
    "snr/kept_fraction",
    "snr/update_compute_fraction",
    "snr/empty_steps",
]
OF_FILTER = [key for key in EIGHT if key.startswith("snr/")]


def progress(**settings):
    handler = SimpleNamespace(callbacks=[])
    trainer = SimpleNamespace(
        args=SimpleNamespace(disable_tqdm=True),
        callback_handler=handler,
        add_callback=handler.callbacks.append,
        remove_callback=lambda kind: None,
    )
    return TrainingProgressCallback(trainer, **settings)


def test_the_line_keeps_the_latest_measurement():
    line = progress()
    assert line.line({"reward": 0.5}) == "reward 0.50"
    assert line.line({"reward": 0.5, "env/sokoban/success": 0.25, **MEASURED}) == (
        "reward 0.50  success 25%  retrieval 97%  I(X;Z) 2.50 nats"
    )
    assert line.line({"reward": 0.75}) == "reward 0.75  retrieval 97%  I(X;Z) 2.50 nats"


def test_the_line_keeps_the_latest_held_out_success_of_the_first_task():
    line = progress()
    line.on_log(
        None, TrainerState(), None, logs={"eval_env/frozen_lake/success": 0.46, "eval_env/sokoban/success": 0.1}
    )
    assert line.line({"reward": 0.5}) == "reward 0.50  held out 46%"
    assert line.line({"reward": 0.75, "env/a/success": 0.25}) == "reward 0.75  success 25%  held out 46%"


def test_where_no_terminal_shows_a_bar_there_is_a_line_at_both_ends_and_each_minute(monkeypatch):
    log, now = io.StringIO(), 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    line = progress(console=Console(file=log, width=80, force_terminal=False), quiet=True)
    (bar,) = line.trainer.callback_handler.callbacks
    for step in (100, 150, 200, 999, 1000):
        now += {200: 61.0}.get(step, 1.0)
        state = TrainerState(max_steps=1000, global_step=step, is_world_process_zero=True)
        if step == 100:
            bar.on_train_begin(None, state, None)
        logs = {"reward": 0.5, "snr/kept_fraction": 0.5, "env/a/success": 0.25, "eval_env/a/success": 0.5, **MEASURED}
        line.on_log(None, state, None, logs=logs)
        bar.on_log(None, state, None, logs=logs)
    line.close()
    lines = log.getvalue().splitlines()
    assert [one.split()[1] for one in lines] == ["100/1000", "200/1000", "1000/1000"] and min(map(len, lines)) > 80


class Rows(TrainerCallback):
    """What trackers and the console get."""

    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            self.rows.append(list(logs))


def trained(policy_path, args, prompts, trainer_class=SNRFilteredGRPOTrainer, **settings):
    trainer = trainer_class(policy_path, length_reward, args, prompts, callbacks=[rows := Rows()])
    trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=2, **settings))
    trainer.train()
    return trainer, rows.rows


def ours(names):
    return [name for name in names if name.startswith(("mi/", "snr/", "health/", "cost/"))]


@pytest.mark.parametrize("trainer_class", [SNRFilteredGRPOTrainer, GRPOTrainer])
def test_trackers_get_eight_metrics_in_their_order_and_the_history_all(
    trainer_class, policy_path, prompts, make_args, tmp_path
):
    is_ours = trainer_class is SNRFilteredGRPOTrainer
    args = make_args(snr=is_ours, per_device_train_batch_size=16, max_steps=2)
    trainer, rows = trained(policy_path, args, prompts, trainer_class)
    shown = EIGHT if is_ours else [name for name in EIGHT if name not in OF_FILTER]
    assert [ours(row) for row in rows] == [shown] * 2
    history = [row for row in trainer.state.log_history if "reward" in row]
    assert all(len(ours(row)) > 3 * len(shown) for row in history)
    for row, whole in zip(rows, history, strict=True):  # of TRL, nothing is missing
        assert set(whole) - set(row) - {"step"} == set(ours(whole)) - set(shown)


@pytest.mark.parametrize("where", ["callback", "trainer"])
def test_with_verbose_trackers_get_all(where, policy_path, prompts, make_args):
    is_of_trainer = where == "trainer"
    args = make_args(per_device_train_batch_size=16, max_steps=1, snr_verbose=is_of_trainer)
    trainer, rows = trained(policy_path, args, prompts, verbose=not is_of_trainer)
    assert set(rows[0]) == set(trainer.state.log_history[0]) - {"step"}


def test_a_training_of_ones_own_ends_with_a_table_and_a_command_that_runs(
    policy_path, prompts, make_args, tmp_path, capfd
):
    args = make_args(per_device_train_batch_size=16, max_steps=2, disable_tqdm=False)
    trained(policy_path, args, prompts)
    shown = capfd.readouterr()
    table = shown.out[shown.out.index("train_runtime") :]
    parts = ("reward in", "completions", "update positions", "completions kept", "I(X;Z)", "Training: ", "prompt")
    places = [table.index(part) for part in parts]
    assert places == sorted(places)
    assert re.search(r"\d/2 .*reward \d", shown.err)  # on transformers' bar
    (command,) = re.findall("ragen2-trl (report .*)", shown.out)
    cli.main([*shlex.split(command), "--output", str(tmp_path / "report.html")])
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("settings", [{"disable_tqdm": True}, {"disable_tqdm": False, "logging_strategy": "no"}])
def test_no_table_where_bars_or_logs_are_off(settings, policy_path, prompts, make_args, capsys):
    args = make_args(max_steps=1, **settings)
    SNRFilteredGRPOTrainer(policy_path, length_reward, args, prompts).train()
    assert "completions kept" not in capsys.readouterr().out
