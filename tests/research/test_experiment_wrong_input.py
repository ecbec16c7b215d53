"""What `python -m research` cannot use is told in a line, with code 2, and before anything is trained."""

import shlex

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from experiment_results import write_results

from research.__main__ import main
from research.plan import read_experiment
from research.runner import Runner

BASE = {
    "algo": "grpo",
    "model": "tiny",
    "env_name": "frozen_lake",
    "num_prompts": 64,
    "max_steps": 12,
    "num_generations": 4,
    "per_device_train_batch_size": 16,
    "use_cpu": True,
    "bf16": False,
}
FILTER, NONE = {"method": "filter"}, {"method": "none"}
GAIN = {
    "name": "gain",
    "primary": True,
    "true_effect": 0.1,
    "kind": "difference",
    "statistic": "success/last_fifth",
    "of": FILTER,
    "against": NONE,
    "expects": ">",
}
CORRELATION = {
    "name": "c",
    "primary": True,
    "true_effect": 0.3,
    "kind": "stronger_correlation",
    "x": "mi/mean",
    "than": "entropy/mean",
    "y": "success/last_fifth",
    "expects": ">",
}
PLAN = {
    "id": "small",
    "claim": "The filter gains.",
    "source": "Nowhere",
    "base": "base.yaml",
    "axes": {
        "method": {"none": {"snr_value": 1.0}, "filter": {}},
        "slip": {"0.0": {}, "0.2": {"env_args": {"slip": 0.2}}},
    },
    "seeds": [1, 2, 3],
    "checks": [GAIN],
}
OVER = {
    "id": "over",
    "claim": "It gains more where there is more.",
    "source": "Nowhere",
    "runs_of": ["small"],
    "checks": [{**CORRELATION, "kind": "correlation", "than": None}],
}


def write(folder, plan, day="2026-01-31"):
    """The file of an experiment; what is `None` is left out."""
    plan = {name: value for name, value in plan.items() if value is not None}
    plan["checks"] = [{name: one for name, one in check.items() if one is not None} for check in plan["checks"]]
    path = folder / f"{plan['id']}.yaml"
    path.write_text(f"{yaml.safe_dump(plan, sort_keys=False)}settings_fixed: {day}\n")
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With an experiment and another over its runs; nothing can be trained, and commands run here."""

    def train(*args):
        raise AssertionError("runs are trained for nothing")

    monkeypatch.setattr(Runner, "_train", train)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    write(tmp_path, PLAN)
    write(tmp_path, OVER)
    return tmp_path


@pytest.fixture
def finished(folder):
    """The same, of which all runs have run."""
    write_results(folder / "research" / "results", read_experiment(folder / "small.yaml").planned_runs())
    return folder


@pytest.fixture
def refused(capsys):
    """What a command that is refused says, in one line."""

    def refused(typed):
        with pytest.raises(SystemExit) as ended:
            main([*shlex.split(typed)])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("python -m research: ")
        return " ".join(said.split())

    return refused


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["over"], "over.yaml: runs_of must name experiments without this one's runs, got 'over'"),
        (["small", "back"], "back.yaml: runs_of must name experiments without this one's runs, got 'over'"),
        (["nowhere"], "over.yaml: runs_of must name experiments beside this one, got 'nowhere'"),
        ([], "runs_of must name at least one experiment, got []"),
    ],
)
def test_runs_are_of_other_experiments_that_are_there(names, said, folder, refused):
    write(folder, {**OVER, "id": "back", "runs_of": ["over"]})
    write(folder, {**OVER, "runs_of": names})
    assert said in refused("run --dry over.yaml")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("learning_rate=abc", "with --set learning_rate=abc: learning_rate must be a number"),
        ("learning_rate=[", "set=learning_rate='[' is not valid YAML"),
        ("max_steps=abc", "max_steps must be a whole number, got 'abc'"),
        ("max_steps=", "max_steps must be a whole number, got None"),
        ("snr_dynamic_sampling_rounds=2", "snr_dynamic_sampling_rounds=2 needs snr_pilot_generations"),
        (
            "output_dir=here",
            "set.output_dir is set by the runner; allowed: arguments of `ragen2-trl train` other than",
        ),
        ("env_args=3", "set.env_args must be a mapping, got 3"),
        ("unset=snr_value", "set.unset must be a list of names, got 'snr_value'"),
    ],
)
def test_a_setting_that_was_typed_is_told_with_its_option(typed, said, folder, refused):
    told = refused(f"run small.yaml --set {typed}")
    assert said in told and "usage" not in told
    assert not (folder / "runs").exists()


# Folders and what is in them


@pytest.mark.parametrize("action", ["run", "run --dry", "analyse"])
@pytest.mark.parametrize("file", ["runs.parquet", "curves.parquet"])
def test_damaged_results_are_named(file, action, finished, refused):
    path = finished / "research" / "results" / file
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert f"research/results/{file} cannot be read as results of runs: " in refused(f"{action} small.yaml")
    pq.write_table(pa.table({"other": [1]}), path)
    assert f"research/results/{file} cannot be read as results of runs: " in refused(f"{action} small.yaml")


# What was fixed before the runs


def test_the_day_on_which_settings_were_fixed_stays(finished, refused):
    main(["run", "small.yaml"])
    write(finished, PLAN, day="2026-02-01")
    said = refused("run small.yaml")
    assert (
        'settings_fixed is "2026-01-31" in research/results/experiments/small.yaml and "2026-02-01" in small.yaml'
        in said
    )


def test_what_decides_over_runs_of_others_is_fixed_by_its_own_run_although_they_are_there(finished, refused, capsys):
    """A source that runs on its own leaves no record of it, which the analysis says."""
    record = finished / "research" / "results" / "experiments" / "over.yaml"
    main(["run", "small.yaml"])
    main(["analyse", "over.yaml", "small.yaml"])
    told = " ".join(capsys.readouterr().out.split())
    assert "over has runs and no record of its checks: `python -m research run over.yaml` writes it." in told
    assert "small has runs" not in told and not record.exists()

    main(["run", "over.yaml"])
    assert "first written, maybe after its runs" in record.read_text().splitlines()[0]
    main(["analyse", "over.yaml"])
    assert "no record" not in capsys.readouterr().out
    (check,) = OVER["checks"]
    write(finished, {**OVER, "checks": [{**check, "x": "entropy/mean"}]})
    assert 'checks[0].x is "mi/mean" in research/results/experiments/over.yaml and "entropy/mean"' in refused(
        "run over.yaml"
    )
    further = {**check, "name": "another", "x": "entropy/mean", "primary": None, "true_effect": None}
    write(finished, {**OVER, "checks": [check, further]})
    main(["run", "over.yaml"])
    main(["analyse", "over.yaml"])
    assert "| another (added after the runs) |" in (finished / "research" / "results" / "over.md").read_text()


def test_the_record_over_runs_of_others_is_written_with_the_first_of_them(folder, monkeypatch):
    """Where all run together, and checks can be changed no more once there is a number."""
    planned = read_experiment(folder / "small.yaml").planned_runs()[0]

    def run_one(runner, jobs):
        write_results(folder / "research" / "results", [planned])
        runner.on_added(next(job for job in jobs if job.planned.key == planned.key))

    monkeypatch.setattr(Runner, "run", run_one)
    main(["run", "over.yaml"])
    assert {path.name for path in (folder / "research" / "results" / "experiments").iterdir()} == {
        "small.yaml",
        "over.yaml",
    }
