"""What is read back from the folder of a run, whatever is left of it."""

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import TrainerState
from trl import GRPOTrainer

from ragen2_trl.cli.shipped import recipe_path
from ragen2_trl.envs import FrozenLake, make_env
from ragen2_trl.instrument.verdict import Evidence
from ragen2_trl.record.run import Run, read_run
from ragen2_trl.record.saved_measurement import SavedMeasurement, read_measurement
from ragen2_trl.record.settings import public

RECIPE = recipe_path("frozen_lake_tiny")


def row(step):
    return {"step": step, "reward": step / 10, "env/lake/success": 0.5, "entropy": float("nan")}


def measured(step, letter="d", valid=None):
    """A measurement that depends (d; c with low entropy), or is at chance (t; l with low entropy)."""
    return Evidence(
        step=step,
        retrieval_accuracy=0.9 if letter in "dc" else 0.0625,
        retrieval_chance=0.0625,
        num_completions=64.0,
        mi_seq=2.0 if letter in "dc" else 0.0,
        mi_upper_bound=2.77,
        conditional_entropy_token=1.0 if letter in "dt" else 0.1,
        updates=step - 1,
        valid_thinking_rate=valid,
    )


def write_state(folder, step, rows, max_steps=100, ended=False, measurements=()):
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        "ragen2_run": {"ended": ended, "resumed_at": []},
        "ragen2_mutual_information": {"watch": {"measurements": [asdict(one) for one in measurements]}},
    }
    state = TrainerState(global_step=step, max_steps=max_steps, log_history=rows, stateful_callbacks=kept)
    state.save_to_json(str(folder / "trainer_state.json"))


def rows(last):
    return [row(step) for step in range(1, last + 1)]


def collapses_of(run):
    """(regime at its end, first step) of each collapse."""
    return list({one.since: (one.regime, one.since) for one in run.judgements if one.is_collapsed}.values())


def said_of(run):
    """What is found of its reasoning."""
    (finding,) = (one for one in run.findings if one.kind == "reasoning")
    return finding.name


def test_a_run_of_trls_own_trainer_tells_what_its_state_knows_of_the_settings(policy_path, prompts, make_args):
    def length(completions, **kwargs):
        return [float(len(text)) for text in completions]

    args = make_args(False, max_steps=2, save_strategy="steps", save_steps=1)
    GRPOTrainer(policy_path, length, args, prompts).train()
    run = read_run(args.output_dir)
    assert run.settings == {"max_steps": 2, "per_device_train_batch_size": 8}
    (problem,) = run.problems
    assert "run.json" in problem


def test_diagnostics_alone_are_enough(tmp_path):
    """As they come from the Hub."""
    write_state(tmp_path / "diagnostics", 100, rows(100), ended=True, measurements=[measured(50), measured(100)])
    about = {"settings": {"seed": 3}, "versions": {"trl": "1.0"}}
    (tmp_path / "diagnostics" / "run.json").write_text(json.dumps(about))
    run = read_run(tmp_path)
    assert (run.status, said_of(run)) == ("finished 100 steps", "dependent")
    assert (len(run.rows), run.success_metric, run.environment) == (100, "env/lake/success", "lake")
    assert (run.settings, run.versions) == ({"seed": 3}, {"trl": "1.0"})
    assert run.points("entropy") == []
    assert (run.measurements, run.completions, run.evaluations) == ([], [], {})


def test_of_several_checkpoints_the_newest_speaks(tmp_path):
    for step in (9, 20, 100):
        write_state(tmp_path / f"checkpoint-{step}", step, rows(step), max_steps=200)
    (tmp_path / "checkpoint-150").mkdir()
    (tmp_path / "checkpoint-150" / "trainer_state.json").write_text('{"global_step": 150, "log_hi')
    run = read_run(tmp_path)
    assert (run.status, len(run.rows)) == ("unfinished: at step 100 of 200", 100)
    assert read_run(tmp_path / "checkpoint-20").step == 20


def test_diagnostics_outweigh_checkpoints_of_an_earlier_run(tmp_path):
    write_state(tmp_path / "checkpoint-100", 100, [row | {"loss": 1.0} for row in rows(100)], ended=True)
    write_state(tmp_path / "diagnostics", 10, rows(10))
    assert read_run(tmp_path).status == "unfinished: at step 10 of 100"


def test_a_checkpoint_of_the_same_run_that_is_newer_outweighs_diagnostics(tmp_path):
    """Training was resumed by a trainer that keeps none."""
    write_state(tmp_path / "diagnostics", 10, rows(10))
    write_state(tmp_path / "checkpoint-50", 50, rows(50))
    assert read_run(tmp_path).status == "unfinished: at step 50 of 100"


def test_files_of_steps_are_in_their_order_and_others_are_left_out(tmp_path):
    for name in ("_measurements/measurement_{}.json", "completions/completions_{}.parquet"):
        for number in ("00007", "99990", "100000", "100020", "00007 copy", "last"):
            path = tmp_path / name.format(number)
            path.parent.mkdir(exist_ok=True)
            path.touch()
    run = Run(tmp_path, [], step=100_010)  # what comes later is of an earlier run
    assert [path.stem.split("_")[1] for path in run.measurements] == ["00007", "99990", "100000"]
    assert [path.stem.split("_")[1] for path in run.completions] == ["00007", "99990", "100000"]


@pytest.mark.parametrize(
    ("measured_at", "step", "name"),
    [
        ((5, 15, 25), 45, "dependent"),  # measured every tenth step
        ((5, 15, 25), 46, "stale"),
        ((1,), 8, "dependent"),  # where every step is logged, the next is at step 11
        ((1,), 21, "dependent"),
        ((1,), 22, "stale"),
        ((50,), 150, "dependent"),
        ((1, 2, 3), 6, "stale"),
    ],
)
def test_a_verdict_does_not_outlive_its_measurements(tmp_path, measured_at, step, name):
    write_state(tmp_path / "diagnostics", step, rows(step), measurements=[measured(at) for at in measured_at])
    assert said_of(read_run(tmp_path)) == name


def test_a_log_history_is_enough_and_adds_what_came_after_the_last_checkpoint(tmp_path):
    (tmp_path / "log_history.json").write_text(json.dumps(rows(30)))
    assert (read_run(tmp_path).step, len(read_run(tmp_path).rows)) == (30, 30)
    write_state(tmp_path / "diagnostics", 20, rows(20))
    run = read_run(tmp_path)
    assert (run.status, len(run.rows)) == ("unfinished: at step 30 of 100", 30)


def test_a_log_history_of_another_run_is_passed_over(tmp_path):
    (tmp_path / "log_history.json").write_text(json.dumps(rows(30)))
    write_state(tmp_path / "diagnostics", 1, [{"step": 1, "reward": 0.77}])
    assert read_run(tmp_path).points("reward") == [(1, 0.77)]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '"text"', "\x00\x01", '{"global_step": null}', '{"global_step": 3}']
)
def test_a_state_that_is_no_state_is_passed_over(tmp_path, content):
    write_state(tmp_path / "checkpoint-20", 20, rows(20))
    (tmp_path / "diagnostics").mkdir()
    (tmp_path / "diagnostics" / "trainer_state.json").write_text(content)
    (tmp_path / "diagnostics" / "run.json").write_bytes(b"\xff\xfe")
    (tmp_path / "log_history.json").write_text('{"not": "a list"}')
    (tmp_path / "evaluation_before.json").write_text('{"success": null, "success_ci_low": 0, "success_ci_high": 1}')
    assert (read_run(tmp_path).step, read_run(tmp_path).evaluations) == (20, {})


def test_a_folder_without_a_run_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"holds no log of a run; allowed: .*diagnostics/trainer_state\.json"):
        read_run(tmp_path)
    file = tmp_path / "file.txt"
    file.write_text("")
    for path in (file, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=rf"{path.name}' is not a folder of a run, diagnosis or evaluation"):
            read_run(path)


def test_a_run_that_logged_nothing_is_told_as_far_as_it_came(tmp_path):
    write_state(tmp_path / "diagnostics", 0, [])
    run = read_run(tmp_path)
    assert (run.status, run.rows, run.judgements) == ("unfinished: at step 0 of 100", [], [])
    assert [finding.name for finding in run.findings] == ["too_early", "not_measured", "unreadable", "no_rows"]
    assert (run.success_metric, run.points("reward")) == (None, [])


def test_an_evaluation_after_training_is_shown_only_when_training_is_over(tmp_path):
    metrics = {"success": 0.5, "success_ci_low": 0.4, "success_ci_high": 0.6}
    for when in ("before", "after"):
        (tmp_path / f"evaluation_{when}.json").write_text(json.dumps(metrics))
    write_state(tmp_path / "diagnostics", 50, rows(50))
    assert set(read_run(tmp_path).evaluations) == {"before"}
    write_state(tmp_path / "diagnostics", 50, rows(50), ended=True)
    assert set(read_run(tmp_path).evaluations) == {"before", "after"}
    assert read_run(tmp_path).status == "stopped at step 50 of 100"
    write_state(tmp_path / "diagnostics", 100, rows(100))  # killed after its last step
    assert read_run(tmp_path).status == "finished 100 steps"


def test_a_measurement_comes_back_as_it_was_saved(tmp_path):
    saved = SavedMeasurement(
        step=7,
        metrics={"mi_seq": 0.5},
        regime=None,
        prompts=["é\n", "b"],
        traces=["</script>"],
        prompt_index=torch.tensor([1]),
        lengths=torch.tensor([3]),
        cross_logps=torch.tensor([[-1.5, -2.5]]),
        rewards=torch.tensor([[1.0, float("nan")]]),
        scores=torch.tensor([0.5]),
        kept=None,
    )
    path = saved.save(tmp_path / "_measurements")
    assert [file.name for file in path.parent.iterdir()] == ["measurement_00007.json"]
    assert "NaN" not in path.read_text()
    read = read_measurement(path)
    for name, value in vars(saved).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(getattr(read, name), value, equal_nan=True)
        else:
            assert getattr(read, name) == value
    assert Run(tmp_path, [], step=7).measurements == [path]


def test_settings_that_anyone_may_read_tell_nothing_of_the_machine():
    class Retriever:
        pass

    settings = {
        "corpus": "/home/someone/secret/wiki",
        "folder": Path("/home/someone/data"),
        "server": "https://someone:pass@host:8000/search?key=SECRET&k=5#part",
        "object": Retriever(),
        "nested": {"paths": ["/home/someone/a", 3, None, True, 0.5]},
        "text": "and/or",
    }
    shown = public(settings)
    assert shown == {
        "corpus": "wiki",
        "folder": "data",
        "server": "https://host:8000/search",
        "object": "Retriever",
        "nested": {"paths": ["a", 3, None, True, 0.5]},
        "text": "and/or",
    }
    json.dumps(shown)


def test_an_environment_tells_what_it_was_made_with():
    given = {"size": 5, "slip": 0.1, "max_actions": 4}
    for env in (make_env("frozen_lake", **given), FrozenLake(**given), FrozenLake(5, slip=0.1, max_actions=4)):
        assert env.summary["options"] == given
        assert copy.deepcopy(env).summary == pickle.loads(pickle.dumps(env)).summary == env.summary


def arguments(run, *more):
    small = {
        "num_prompts": 8,
        "eval_prompts": 0,
        "max_steps": 6,
        "save_steps": 2,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 8,
        "logging_steps": 1,
        "output_dir": str(run),
    }
    options = [str(part) for name, value in small.items() for part in (f"--{name}", value)]
    return ["--config", str(RECIPE), *options, *more]


@pytest.mark.slow
def test_a_run_killed_in_its_first_step_can_be_read(tmp_path):
    code = f"""
import os, signal
from ragen2_trl.cli import train
train.SNRFilteredGRPOTrainer.training_step = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
train.main({arguments(tmp_path / "run")!r})
"""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    read = read_run(tmp_path / "run")
    assert (read.status, read.rows) == ("unfinished: at step 0 of 6", [])
    assert read.settings["environment"]["name"] == "frozen_lake"


def logged(step, letter="d", valid=None):
    """The row of a measurement, as trackers and state hold it."""
    values = asdict(measured(step, letter))
    metrics = {f"mi/first_turn/{name}": values[name] for name in Evidence.METRICS}
    return {"reward": 0.5, "step": step, **metrics} | ({} if valid is None else {"mi/valid_thinking_rate": valid})


def test_a_log_alone_tells_its_regimes(tmp_path):
    rows = [logged(step, letter) for step, letter in ((10, "d"), (20, "t"), (30, "t"), (40, "t"))]
    del rows[3]["mi/first_turn/num_completions"]
    (tmp_path / "log_history.json").write_text(json.dumps([{"reward": 0.5, "step": 1}, *rows]))
    run = read_run(tmp_path)
    assert [one.regime for one in run.judgements] == ["diverse", "weaker", "template_collapse"]
    assert said_of(run) == "template_collapse"


def test_a_log_tells_what_qualifies_its_verdict(tmp_path):
    row = logged(10, valid=0.0) | {
        "env/lake/success": 0.02,
        "env/lake/successes": 1,
        "completions/clipped_ratio": 0.875,
    }
    (tmp_path / "log_history.json").write_text(json.dumps([row]))
    run = read_run(tmp_path)
    (finding,) = (one for one in run.findings if one.kind == "reasoning")
    assert finding.name == "dependent" and "no closed think tag" in finding.sentence
    qualifiers = {"valid_thinking_rate": 0.0, "success": 0.02, "clipped_ratio": 0.875}
    assert qualifiers.items() <= finding.numbers.items()


def test_a_run_whose_steps_were_all_empty_has_not_collapsed(tmp_path):
    rows = [logged(step, letter) | {"snr/empty_steps": step} for step, letter in ((1, "d"), (2, "t"), (3, "t"))]
    (tmp_path / "log_history.json").write_text(json.dumps(rows))
    assert collapses_of(read_run(tmp_path)) == []
    (tmp_path / "log_history.json").write_text(json.dumps([row | {"snr/empty_steps": 0} for row in rows]))
    assert collapses_of(read_run(tmp_path)) == [("template_collapse", 2)]


def test_a_run_that_had_no_group_to_train_on_has_learnt_nothing():
    def run(*shares):
        return Run(
            Path("run"), [{"reward": 1.0, "step": i, "snr/kept_fraction": kept} for i, kept in enumerate(shares)]
        )

    def has_learnt_nothing(run):
        return "nothing_learnt" in [finding.name for finding in run.findings]

    assert has_learnt_nothing(run(0.0, 0.0))
    assert not has_learnt_nothing(run(0.0, 0.25))
    assert not has_learnt_nothing(Run(Path("run"), [{"reward": 1.0, "step": 1}]))  # TRL's own trainer keeps all
