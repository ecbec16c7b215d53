"""Runs as processes, through the command line, stopped and resumed."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from experiment_results import write_results
from filelock import FileLock, Timeout

from ragen2_trl.record.files import HISTORY_FILE
from research.__main__ import main
from research.commands import QueuedRun, queue
from research.plan import PlannedRun, read_experiment
from research.runner import KEPT, LOCK, LOG, Runner
from research.store import COSTS, CURVES_SCHEMA, RUNS_SCHEMA, SEVERAL, VERSIONS, Store, host_here, tidy_rows

# Small enough for a test, and long enough to be killed on the way.
BASE = {
    "algo": "grpo",
    "model": "tiny",
    "env_name": "frozen_lake",
    "num_prompts": 64,
    "max_steps": 12,
    "num_generations": 4,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 48,
    "eval_every": 6,
    "eval_prompts": 4,
    "eval_samples": 2,
    "learning_rate": 1e-4,
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}
PLAN = {
    "id": "small",
    "claim": "The filter drops groups.",
    "source": "Nowhere",
    "base": "base.yaml",
    "axes": {"method": {"trl": {"algo": "trl_grpo", "unset": ["snr_*"]}, "filter": {}}},
    "seeds": [1],
    "quick": {"max_steps": 2},
    "checks": [],
}


@pytest.fixture
def plan(tmp_path):
    """Writes `PLAN` with changes and gives its path."""

    def write(base=None, **changes) -> Path:
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE | (base or {})))
        text = yaml.safe_dump(PLAN | changes, sort_keys=False) + "settings_fixed: 2026-01-31\n"
        (tmp_path / "small.yaml").write_text(text)
        return tmp_path / "small.yaml"

    return write


def command(folder: Path, action: str, plan: Path, *more: str) -> list[str]:
    where = ["--results", str(folder / "results"), "--runs", str(folder / "runs")]
    return [action, str(plan), *where, *more]


def begin(folder: Path, plan: Path, *more: str) -> subprocess.Popen:
    """The command in a process of its own, which writes to `folder/output`."""
    folder.mkdir(exist_ok=True)
    with (folder / "output").open("ab") as output:
        args = [sys.executable, "-m", "research", *command(folder, "run", plan, *more)]
        return subprocess.Popen(args, stdout=output, stderr=output, start_new_session=True)


def wait_for(condition, process: subprocess.Popen, folder: Path, seconds: float = 900.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, (folder / "output").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_locked(folder: Path) -> bool:
    try:
        with FileLock(folder / LOCK, blocking=False):
            return False
    except Timeout:
        return True


def history(folder: Path) -> list[dict]:
    return json.loads((folder / HISTORY_FILE).read_text())


@pytest.mark.full
@pytest.mark.parametrize("kill", [pytest.param(signal.SIGINT, id="ctrl-c"), pytest.param(signal.SIGKILL, id="killed")])
def test_runs_that_were_stopped_go_on_and_end_with_the_numbers_of_whole_ones(kill, plan, tmp_path):
    """Ctrl-C ends the trainings; one that a killed command leaves behind is ended here."""
    path = plan(axes={"method": {"filter": {}}})
    (planned,) = read_experiment(path).planned_runs()
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert begin(whole, path).wait(900) == 0, (whole / "output").read_text()

    run = stopped / "runs" / planned.key
    first = begin(stopped, path)
    wait_for(lambda: (run / "checkpoint-4").exists(), first, stopped)
    trainer = int(Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()[0])
    first.send_signal(kill)
    code = first.wait(60)
    if kill == signal.SIGINT:
        begun = json.loads((run / VERSIONS).read_text())
        (run / VERSIONS).write_text(json.dumps({**begun, "host": "another machine"}))
        assert code == 130 and not is_locked(run)
        assert "The same command goes on" in (stopped / "output").read_text()
        assert not Store(stopped / "results").done()
    else:
        os.killpg(trainer, signal.SIGKILL)
    assert begin(stopped, path).wait(900) == 0, (stopped / "output").read_text()

    (where,) = Store(stopped / "results").finished()["versions"]
    assert json.loads(where)["host"] == (SEVERAL if kill == signal.SIGINT else host_here())
    (trained,) = ([row for row in history(whole / "runs" / planned.key) if "reward" in row],)
    resumed = [row for row in history(run) if "reward" in row]
    same = ("step", "loss", "reward", "entropy", "cost/sampled_tokens", "cost/update_tokens")
    assert [[row.get(name) for name in same] for row in resumed] == [
        [row.get(name) for name in same] for row in trained
    ]
    attempts = (run / LOG).read_text().count("tiny on frozen_lake, in")
    assert attempts == 2


@pytest.mark.slow
def test_a_failing_run_is_listed_with_its_command_and_the_others_are_stored(plan, tmp_path):
    path = plan(axes={"method": {"lost": {"model": str(tmp_path / "nowhere")}, **PLAN["axes"]["method"]}})
    process = begin(tmp_path, path, "--quick", "--jobs", "3")
    assert process.wait(900) == 1
    told = " ".join((tmp_path / "output").read_text().split())
    lost, *others = read_experiment(path).planned_runs(quick=True)
    assert lost.levels == {"method": "lost"}
    assert "2 of 3 runs are done" in told
    assert f"python -m ragen2_trl.cli train --config {tmp_path / 'runs' / lost.key}/config.yaml" in told
    assert "nowhere" in told and "(exit code" in told

    # What is in the store
    store = Store(tmp_path / "results")
    assert store.done() == {planned.key for planned in others}
    for name, schema in (("runs", RUNS_SCHEMA), ("curves", CURVES_SCHEMA)):
        assert pq.read_schema(tmp_path / "results" / f"{name}.parquet").names == schema.names
    planned_runs = store.finished().set_index("key")
    assert set(planned_runs["steps"]) == {2} and set(planned_runs["seed"]) == {1}
    assert (planned_runs[["seconds", "cpu_seconds", "sampled_tokens", "update_tokens", "update_flops"]] > 0).all(
        axis=None
    )
    assert {"python", "torch", "trl", "transformers", "host", "processor", "commit"} <= set(
        json.loads(planned_runs["versions"].iloc[0])
    )
    for planned in others:
        assert json.loads(planned_runs.loc[planned.key, "fields"]).items() >= {"algo": planned.fields["algo"]}.items()
        curves = store.curves([planned.key])
        metrics = dict(tuple(curves.groupby("metric", observed=True)))
        assert {"reward", "entropy", "eval/env/frozen_lake/success", "cost/sampled_tokens"} <= set(metrics)
        assert ("snr/kept_fraction" in metrics) == (planned.levels["method"] == "filter")
        assert list(metrics["cost/seconds"]["step"]) == [0, 1, 2]
        assert {entry.name for entry in (tmp_path / "runs" / planned.key).iterdir()} <= set(KEPT)

    # Nothing runs again, also where the trainings' folders are gone, and what was changed is refused by name
    (tmp_path / "output").unlink()
    again = begin(tmp_path, plan(), "--quick", "--runs", str(tmp_path / "elsewhere"))
    assert again.wait(300) == 2
    assert "axes.method.lost" in " ".join((tmp_path / "output").read_text().split())
    (tmp_path / "results" / "experiments" / "small.yaml").unlink()
    assert begin(tmp_path, plan(), "--quick", "--runs", str(tmp_path / "elsewhere")).wait(300) == 0
    assert not list((tmp_path / "elsewhere").glob("*"))


# What needs no training


def log_rows(steps: int) -> list[dict]:
    costs = [{f"cost/{name}": float(10 * step) for name in COSTS} for step in range(1, steps + 1)]
    rows = [
        {"step": step, "reward": step / 2, "clip_ratio/low_mean": 0.0, **cost} for step, cost in enumerate(costs, 1)
    ]
    return [{"step": 0, "eval/env/frozen_lake/success": 0.5}, *rows, {"step": steps, "train_runtime": 3.0}]


@pytest.fixture
def trained(tmp_path):
    """Leaves what a training leaves, of a run with this seed; gives the run and its folder."""

    def leave(seed: int, steps: int = 3) -> tuple[Path, PlannedRun]:
        folder = tmp_path / f"run-{seed}"
        folder.mkdir(exist_ok=True)
        (folder / HISTORY_FILE).write_text(json.dumps(log_rows(steps)))
        (folder / VERSIONS).write_text(json.dumps({"python": "3.12.0"}))
        return folder, PlannedRun({"max_steps": steps}, seed, {})

    return leave


def test_a_store_has_a_row_a_run_and_tidy_curves_that_begin_without_cost(trained, tmp_path):
    store = Store(tmp_path / "results")
    assert len(store.finished()) == len(store.curves()) == 0
    for seed in (1, 2, 1):  # the same run again takes the place of the first
        store.add(*trained(seed, steps=3))
    planned_runs = store.finished()
    assert sorted(planned_runs["seed"]) == [1, 2] and list(planned_runs.columns) == RUNS_SCHEMA.names
    assert set(planned_runs["sampled_tokens"]) == {30}
    key = trained(1)[1].key
    curves = store.curves([key])
    assert set(curves["key"]) == {key} and "clip_ratio/low_mean" not in set(curves["metric"])
    by_metric = curves.groupby("metric", observed=True)
    values = {name: list(zip(part["step"], part["value"], strict=True)) for name, part in by_metric}
    assert values["reward"] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert values["cost/seconds"] == [(0, 0.0), (1, 10.0), (2, 20.0), (3, 30.0)]


def test_what_a_kill_between_the_two_files_leaves_is_not_done(trained, tmp_path):
    store = Store(tmp_path / "results")
    folder, planned = trained(1)
    store.add(folder, planned)
    (tmp_path / "results" / "runs.parquet").unlink()
    assert not store.done() and len(store.curves()) == 0
    store.add(folder, planned)
    assert len(store.curves()) == len(tidy_rows(log_rows(3)))


def test_a_run_without_a_history_or_costs_is_refused(tmp_path):
    store = Store(tmp_path / "results")
    with pytest.raises(ValueError, match=f"no {HISTORY_FILE}"):
        store.add(tmp_path, PlannedRun({}, 1, {}))
    (tmp_path / HISTORY_FILE).write_text(json.dumps([{"step": 1, "reward": 1.0}]))
    with pytest.raises(ValueError, match="has no cost/seconds"):
        store.add(tmp_path, PlannedRun({}, 1, {}))


def test_a_training_that_had_ended_is_taken_over_and_one_that_is_locked_is_left(trained, tmp_path):
    store, added, seen = Store(tmp_path / "results"), [], []
    jobs = []
    for seed in (1, 2):
        folder, planned = trained(seed)
        (folder / "summary.json").write_text("{}")
        (tmp_path / "runs").mkdir(exist_ok=True)
        folder.rename(tmp_path / "runs" / planned.key)
        jobs.append(QueuedRun(planned, ("small",), f"seed {seed}"))
    locked = tmp_path / "runs" / jobs[1].planned.key / LOCK
    with locked.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def tell(progress: str) -> None:
            seen.append(progress)
            if added and len(seen) >= 5:
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(KeyboardInterrupt):
            Runner(store, tmp_path / "runs", 2, added.append, tell).run(jobs)
    assert added == jobs[:1] and store.done() == {jobs[0].planned.key}
    runner = Runner(store, tmp_path / "runs", 2, added.append, lambda progress: None)
    runner.run(jobs)
    assert runner.done == jobs and store.done() == {job.planned.key for job in jobs}


def test_a_run_that_hangs_is_ended_at_the_limit_and_the_next_one_begins(plan, tmp_path, monkeypatch):
    """Also one that a kind signal does not end."""
    hanging = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('hung', flush=True); time.sleep(60)"
    )
    monkeypatch.setattr("research.runner.runnable", lambda command: [sys.executable, "-c", hanging])
    jobs = queue([read_experiment(plan())])
    runner = Runner(Store(tmp_path / "results"), tmp_path / "runs", 1, print, lambda progress: None, limit=0.3)
    runner.run(jobs)
    assert [failure.job for failure in runner.failed] == jobs and len(jobs) == 2
    assert all("0.3 s" in failure.reason and "signal 9" in failure.reason for failure in runner.failed)
    assert not any(is_locked(tmp_path / "runs" / job.planned.key) for job in jobs)


def test_a_command_says_first_what_is_stored_and_how_to_train_it_anew(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Runner, "_train", Runner._end)  # nothing is trained
    path = plan()
    planned = read_experiment(path).planned_runs()
    write_results(tmp_path / "results", planned[:1])
    for more, said in (
        ([], "1 of 2 runs are stored in results and are not trained again"),
        (["--dry"], "1 of 2 runs are stored in results"),
    ):
        main(["run", str(path), "--results", "results", *more])
        first, *others = " ".join(capsys.readouterr().out.split()).partition(" All anew: --fresh, or --results DIR.")
        assert said in first and others[0]
    assert f"python -m ragen2_trl.cli train --config results/runs/{planned[1].key}/config.yaml" in others[1]
    for number in (1, 2):
        main(["run", str(path), "--fresh"])
        told = capsys.readouterr().out
        assert told.startswith(f"0 of 2 runs are stored in runs/fresh-{number}/results.")
        assert f"2 of 2 runs are done, in runs/fresh-{number}/results" in told
    with pytest.raises(SystemExit):
        main(["run", str(path), "--fresh", "--results", "results"])
    assert "fresh makes a folder of its own" in capsys.readouterr().err
