"""One line in place of a row of fifty numbers, also where reasoning is measured, and where there is no reward."""

import io

import pytest
from rich.console import Console
from transformers import TrainerState

from ragen2_trl import cli
from ragen2_trl.callbacks import LiveLineCallback
from ragen2_trl.cli.shipped import recipe_path

MEASURED = {"mi/first_turn/retrieval_accuracy": 0.97, "mi/first_turn/mi_seq": 2.5}


def test_the_line_keeps_the_latest_measurement():
    line = LiveLineCallback("success")
    assert line.line({"reward": 0.5}) == "reward 0.50"
    assert line.line({"reward": 0.5, "success": 0.25, **MEASURED}) == (
        "reward 0.50  success 25%  retrieval 97%  information 2.50 nats"
    )
    assert line.line({"reward": 0.75}) == "reward 0.75  retrieval 97%  information 2.50 nats"


def test_the_line_keeps_the_latest_held_out_success_of_the_first_task():
    line = LiveLineCallback("success")
    line.on_log(None, None, None, logs={"eval_env/frozen_lake/success": 0.46, "eval_env/sokoban/success": 0.1})
    assert line.line({"reward": 0.5}) == "reward 0.50  held out 46%"
    assert line.line({"reward": 0.75, "success": 0.25}) == "reward 0.75  success 25%  held out 46%"


def test_a_line_of_a_log_is_one_line(tmp_path):
    log = io.StringIO()
    line = LiveLineCallback("success", Console(file=log, width=80, force_terminal=False))
    state = TrainerState(max_steps=1000, global_step=100)
    line.on_train_begin(None, state, None)
    logs = {"reward": 0.5, "snr/kept_fraction": 0.5, "success": 0.25, "eval_env/sokoban/success": 0.5, **MEASURED}
    line.on_log(None, state, None, logs=logs)
    assert "step 100/1000" in log.getvalue() and log.getvalue().count("\n") == 1 and len(log.getvalue()) > 80


@pytest.mark.slow
def test_a_warm_start_shows_the_line_and_no_wall_of_numbers(tmp_path, capsys):
    recipe = recipe_path("warm_start_tiny")
    settings = {"config": recipe, "output_dir": tmp_path / "warm", "max_steps": 3, "num_demonstrations": 16}
    settings |= {"per_device_train_batch_size": 4, "logging_steps": 1}
    cli.main(["warm-start", *(part for name, value in settings.items() for part in (f"--{name}", str(value)))])
    shown = capsys.readouterr().out
    assert "step 3/3  loss " in shown and "right tokens" in shown
    assert "'grad_norm'" not in shown and "{'" not in shown
