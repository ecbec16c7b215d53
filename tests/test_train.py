"""The train command: what it leaves behind, what it refuses, and that a killed run can go on."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ragen2_trl import cli
from ragen2_trl.cli import train
from ragen2_trl.cli.shipped import recipe_path
from ragen2_trl.cli.train import last_complete_checkpoint
from ragen2_trl.messages import stopped_by_signals
from ragen2_trl.record.run import read_run
from ragen2_trl.report.page import NO_COMPLETIONS, render_report

TRAIN = [sys.executable, "-m", "ragen2_trl.cli", "train"]
RECIPE = recipe_path("frozen_lake_tiny")


def arguments(folder: Path, **overrides) -> list[str]:
    """A short run of the tiny model, written to `folder`."""
    settings = {
        "config": RECIPE,
        "env_args": "{}",  # the recipe's are FrozenLake's, and some tests play another task
        "output_dir": folder,
        "max_steps": 4,
        "save_steps": 2,
        "num_prompts": 64,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": overrides.get("gradient_accumulation_steps", 2),
        "max_completion_length": 48,
        "logging_steps": 1,
        "eval_prompts": 0,
        "learning_rate": 1e-3,
        **overrides,
    }
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["rloo", "ppo"])
def test_other_algorithms_have_settings_of_their_own(algo, tmp_path):
    recipe = RECIPE.with_name(f"frozen_lake_tiny_{algo}.yaml")
    train.main(arguments(tmp_path / "run", config=recipe, max_steps=1, eval_prompts=2, eval_samples=1))
    history = json.loads((tmp_path / "run" / "log_history.json").read_text())
    row = next(row for row in history if "reward" in row)  # after the evaluation before training
    assert row["snr/kept_fraction"] >= 0
    assert ("ppo/value_loss" in row) == (algo == "ppo")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["after"] is not None


@pytest.mark.slow
def test_a_run_leaves_model_history_summary_and_plot(tmp_path, capsys):
    train.main(arguments(tmp_path / "run", eval_prompts=4, eval_samples=2))
    run = tmp_path / "run"
    history = json.loads((run / "log_history.json").read_text())
    assert [row["step"] for row in history if "snr/kept_fraction" in row] == [1, 2, 3, 4]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 4
    told = {fact["key"]: fact for fact in summary["facts"]}
    assert 0 < told["update_positions"]["last"]["number"] <= 1 and told["completions_sampled"]["last"]["number"] == 1
    for when in ("before", "after"):
        metrics = summary[when]
        assert 0 <= metrics["success_ci_low"] <= metrics["success"] <= metrics["success_ci_high"] <= 1
    measured = told["mi/first_turn/retrieval_accuracy"]["last"]
    assert measured["step"] == 2  # two generations of four prompts
    assert measured["number"] > 2 / 8  # of eight prompts: the tiny model reads its map
    assert (run / "training.png").stat().st_size > 10_000
    assert NO_COMPLETIONS not in render_report([read_run(run)])  # the demo's recipe saves them
    assert load_file(run / "model.safetensors")
    shown = capsys.readouterr().out
    for part in ("held-out success", "random baseline", "update positions", "I(X;Z)", "Training: "):
        assert part in shown
    assert "Completions" not in shown and "'grad_norm'" not in shown  # the live line in place of both


@pytest.mark.slow
def test_a_run_with_a_held_out_curve_leaves_curve_episodes_and_the_best_checkpoint(tmp_path, capsys):
    run, curve = tmp_path / "run", {"eval_every": 2, "eval_prompts": 4, "eval_samples": 2}
    further = ["--eval_envs", "frozen_lake size=3 multi_turn=true", "--load_best", "true"]
    train.main([*arguments(run, max_steps=3, **curve), *further])
    summary = json.loads((run / "summary.json").read_text())
    curves = {fact["key"]: fact for fact in summary["facts"] if fact["key"].startswith("held_out_success/")}
    names = ["frozen_lake", "frozen_lake:size=3,multi_turn=True"]
    assert list(curves) == [f"held_out_success/{name}" for name in names]
    first, peak, last = (curves["held_out_success/frozen_lake"][name] for name in ("first", "best", "last"))
    assert [first["step"], last["step"]] == [0, 3] and peak["number"] >= max(first["number"], last["number"])
    assert summary["before"]["success"] == first["number"]
    best = json.loads((run / "diagnostics" / "trainer_state.json").read_text())["best_global_step"]
    history = json.loads((run / "log_history.json").read_text())
    (row,) = [row for row in history if row["step"] == best and "eval/seconds" in row]
    assert summary["after"]["success"] == row["eval/env/frozen_lake/success"]
    saved, kept = (load_file(folder / "model.safetensors") for folder in (run, run / f"checkpoint-{best}"))
    assert [name for name in kept if not torch.equal(kept[name], saved[name])] == []
    assert not list(run.glob("evaluation_*.json"))  # the curve has both
    episodes = [path.name for path in sorted((run / "_episodes").glob("evaluation_*.jsonl"))]
    assert episodes == [f"evaluation_0000{step}.jsonl" for step in (0, 2, 3)]
    shown = " ".join(capsys.readouterr().out.split())
    assert "held-out success" in shown and "mean over" in shown
    assert "held out " in shown  # in the live line
    assert shown.count("update positions") == shown.count("To look at it: ragen2-trl report") == 1
    assert "mean over the steps" in render_report([read_run(run)])


@pytest.mark.parametrize("every", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_fewer_held_out_tasks_than_asked_for_are_a_line_before_training(every, tmp_path, capsys):
    data = tmp_path / "few.jsonl"
    data.write_text("".join(json.dumps({"nums": [1, 2, n], "target": n + 3}) + "\n" for n in range(3, 60)))
    settings = {"env_name": "countdown", "data": data, "num_prompts": 8, "eval_prompts": 99, "eval_every": every}
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *arguments(tmp_path / "run", **settings)])
    told = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2
    assert "num_prompts must be at most 16" in told and "got 99" in told
    assert "Traceback" not in told and not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.slow
def test_steps_between_measurements_can_be_chosen(tmp_path):
    train.main(arguments(tmp_path / "run", eval_prompts=0, mi_every=3, max_steps=3))
    history = json.loads((tmp_path / "run" / "log_history.json").read_text())
    assert [row["step"] for row in history if "mi/first_turn/mi_seq" in row] == [3]


@pytest.mark.slow
def test_measuring_can_be_left_out(tmp_path):
    train.main(arguments(tmp_path / "run", eval_prompts=0, mutual_information=False))
    history = json.loads((tmp_path / "run" / "log_history.json").read_text())
    assert not [key for row in history for key in row if key.startswith("mi/")]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "not_measured" in [finding["name"] for finding in summary["findings"]]


@pytest.mark.slow
def test_a_run_killed_at_any_moment_ends_with_the_same_parameters(tmp_path):
    train.main(arguments(tmp_path / "whole", max_steps=6))

    killed = tmp_path / "killed"
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen([*TRAIN, *arguments(killed, max_steps=6)], stdout=output, stderr=output)
        deadline = time.monotonic() + 240
        # The folder appears before its files: this may well hit the checkpoint while it is being written.
        while not (killed / "checkpoint-4").exists():
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (killed / "summary.json").exists()
    assert last_complete_checkpoint(killed) is not None

    train.main([*arguments(killed, max_steps=6), "--resume", "true"])
    whole, resumed = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", killed))
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["SIGTERM", *(pytest.param(name, marks=pytest.mark.full) for name in ("SIGHUP", "SIGUSR1"))]
)
def test_a_run_that_a_signal_ends_names_its_last_checkpoint_and_how_to_go_on(name, tmp_path):
    with (tmp_path / "output").open("w") as output:
        command = [*TRAIN, *arguments(tmp_path / "run", max_steps=400, figures=False)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        while last_complete_checkpoint(tmp_path / "run") is None:
            assert process.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.01)
        process.send_signal(getattr(signal, name))
        assert process.wait(120) == 128 + getattr(signal, name)
    said = "".join((tmp_path / "output").read_text().split())  # wherever lines were broken
    assert f"Interruptedby{name}" in said and "checkpoint-" in said and "--resumetrue" in said


def test_signals_that_somebody_handles_or_ignores_are_left_alone():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` has it
    try:
        with stopped_by_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_run_killed_after_its_last_step_takes_none_more(tmp_path):
    run = tmp_path / "run"
    train.main(arguments(run))
    whole, summary = load_file(run / "model.safetensors"), json.loads((run / "summary.json").read_text())
    for name in ("model.safetensors", "summary.json"):
        (run / name).unlink()
    train.main([*arguments(run), "--resume", "true"])
    resumed = load_file(run / "model.safetensors")
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    again = json.loads((run / "summary.json").read_text())
    assert again["steps"] == 4 and again["facts"] == summary["facts"]


def test_an_earlier_run_is_neither_continued_nor_replaced_by_accident(tmp_path):
    (tmp_path / "checkpoint-7").mkdir()
    with pytest.raises(ValueError, match=r"output_dir=.*checkpoint-7.*--resume.*--overwrite.*--run_name"):
        train.main(arguments(tmp_path))
    assert (tmp_path / "checkpoint-7").exists()


def test_interrupted_runs_say_how_to_go_on(tmp_path, monkeypatch, capsys):
    def interrupt(self, model, inputs):
        raise KeyboardInterrupt

    monkeypatch.setattr(train.SNRFilteredGRPOTrainer, "_compute_loss", interrupt)
    with pytest.raises(SystemExit) as stopped:
        train.main(arguments(tmp_path / "run"))
    assert stopped.value.code == 130
    assert "--resume true" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.needs("smollm2")
def test_a_real_instruct_model_trains_through_the_script(tmp_path):
    run = tmp_path / "run"
    rows = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "num_generations": 2}
    command = arguments(run, model="smollm2", max_steps=1, max_completion_length=16, save_strategy="no", **rows)
    subprocess.run([*TRAIN, *command], check=True, timeout=1500)
    rows = [row for row in json.loads((run / "log_history.json").read_text()) if "loss" in row]
    assert len(rows) == 1
    assert rows[0]["completions/mean_length"] > 1
    assert "snr/kept_fraction" in rows[0]
