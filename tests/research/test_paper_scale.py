"""Every experiment at the paper's scale: settings, the lines that launch them, and both with the model cut down."""

import json
import shutil
from functools import wraps
from pathlib import Path
from random import Random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from ragen2_trl import cli
from ragen2_trl.cli import train
from ragen2_trl.cli.typed import InputError
from ragen2_trl.columns import SUCCESS
from ragen2_trl.envs import environment
from ragen2_trl.record.files import HISTORY_FILE
from research import variants
from research.__main__ import _check_settings, main
from research.commands import QueuedRun, command_of, queue, write_config
from research.plan import read_experiments
from research.store import Store

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "research" / "experiments").glob("*.yaml"))
# With a small model, on top of a run's settings: two generations of the same prompts, on a CPU and without the Hub,
# with room for pilots of two in a group.
CUT = {
    "dtype": "float32",
    "use_cpu": True,
    "bf16": False,
    "data": None,
    "num_prompts": 8,
    "generation_batch_size": 16,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_steps": 4,
    "max_turn_tokens": 4,
    "max_completion_length": 600,
    "eval_every": 4,
    "eval_prompts": 2,
    "logging_steps": 1,
}


@pytest.fixture(scope="session")
def model(policy_path, tmp_path_factory):
    """The random policy with room for the longest episodes."""
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=32768).save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy_path).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def rewards_by_lot(monkeypatch):
    """Rewards and success that differ within a group, as a random model's do not: else nothing would be trained on."""
    made, lot = environment.reward_func, Random(0)

    def make(*args):
        func = made(*args)

        @wraps(func)
        def by_lot(*args, log_extra=None, **columns):
            if log_extra is not None:
                columns["log_extra"] = lambda name, values: log_extra(
                    name, [float(lot.random() < 0.5) for _ in values] if name == SUCCESS else values
                )
            return [value + lot.random() for value in func(*args, **columns)]

        return by_lot

    monkeypatch.setattr(environment, "reward_func", make)


def covering(jobs: list[QueuedRun]) -> list[QueuedRun]:
    """Few runs that have each value of each setting."""
    values = {
        job.planned.key: {(name, json.dumps(value)) for name, value in job.planned.fields.items()} for job in jobs
    }
    left, chosen = set().union(*values.values()), []
    while left:
        chosen.append(max(jobs, key=lambda job: len(left & values[job.planned.key])))
        left -= values[chosen[-1].planned.key]
    return chosen


def paper_jobs(overrides=None, *paths: Path) -> list[QueuedRun]:
    experiments = read_experiments(paths or FILES, overrides)
    first = sorted({min(one.seeds) for one in experiments})
    return queue(experiments, scale="paper", seeds=first)


# Of the log: what is there if, and only if, a run has the setting.
TRACES = {
    "beta": "kl",
    "value_head": "ppo/value_loss",
    "variant": "grad/bucket_1/task/norm",
    "snr_dynamic_sampling_rounds": "snr/sampling_rounds",
    "snr_prompt_selection": "snr/predicted_variance",
}


@pytest.mark.slow
def test_each_run_has_the_paper_s_size_and_settings_that_its_processes_accept(monkeypatch):
    jobs = paper_jobs()
    for job in jobs:
        own, processes = job.planned.fields, job.launch.processes
        rows = processes * own["per_device_train_batch_size"] * own["gradient_accumulation_steps"]
        assert (own["model"], own["generation_batch_size"]) == ("Qwen/Qwen2.5-3B", 8 * 16)
        assert rows * own["max_steps"] == 400 * 8 * 16
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: processes))
    _check_settings(jobs)
    with pytest.raises(InputError, match="num_generations"):
        _check_settings(paper_jobs({"num_generations": 3}, ROOT / "research" / "experiments" / "tab7.yaml"))


def test_the_middle_scale_has_the_paper_s_batches_and_takes_one_gpu_a_day_for_each_of_its_claims():
    claims = ("tab6", "fig5", "tab7", "fig8")
    with_scale = [one for one in read_experiments(FILES) if "middle" in one.larger]
    assert {*claims} <= {one.id for one in with_scale} and all(
        one.larger["middle"].processes == 1 for one in with_scale
    )
    for experiment in (one for one in with_scale if one.id in claims):
        jobs = queue([experiment], scale="middle")
        assert 12 <= sum(job.gpu_hours for job in jobs) <= 24
        for job in jobs:
            own = job.planned.fields
            assert (own["model"], own["generation_batch_size"]) == ("Qwen/Qwen2.5-0.5B", 8 * 16)
            assert own["per_device_train_batch_size"] * own["gradient_accumulation_steps"] == 32
        _check_settings(jobs)


@pytest.mark.full
def test_each_value_of_a_setting_trains_with_the_model_cut_down(model, tmp_path, rewards_by_lot):
    for job in covering(paper_jobs({**CUT, "model": model})):
        own, folder = job.planned.fields, tmp_path / job.planned.key
        command = command_of(write_config(folder, job), job)
        module, *arguments = command[command.index("-m") + 1 :]
        with pytest.MonkeyPatch.context() as patch:  # a variant stands in place of the trainers
            patch.setattr(train, "ALGORITHMS", dict(train.ALGORITHMS))
            (variants if module == "research.variants" else cli).main(arguments)
        rows = json.loads((folder / HISTORY_FILE).read_text())
        logged = {key for row in rows for key in row}
        losses = [row["loss"] for row in rows if "loss" in row]
        assert losses.count(0.0) < CUT["max_steps"] == rows[-1]["step"], job.name
        assert ("snr/kept_fraction" in logged) == (own["algo"] != "trl_grpo"), job.name
        assert {row["entropy_coef"] for row in rows if "entropy_coef" in row} <= {own.get("entropy_coef")}, job.name
        for name, trace in TRACES.items():
            assert (trace in logged) == bool(own.get(name)), (job.name, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("tab4", ["algorithm=PPO", "env=sokoban"]),
        pytest.param("tab4", ["algorithm=GRPO", "env=frozen_lake"], marks=pytest.mark.full),
        pytest.param("tab4", ["algorithm=RLOO", "env=countdown"], marks=pytest.mark.full),
        pytest.param("ours2", ["method=TRL", "prompts=countdown"], marks=pytest.mark.full),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value,
)
def test_a_run_of_each_trainer_is_launched_by_accelerate_with_the_model_cut_down(
    name, levels, model, tmp_path, capsys
):
    """Only the file of `accelerate launch` and the number of processes are others."""
    for folder in ("research/experiments", "ragen2_trl/recipes", "ragen2_trl/accelerate_configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    path = tmp_path / "research" / "experiments" / f"{name}.yaml"
    path.write_text(path.read_text().replace("zero2.yaml", "cpu_ddp.yaml").replace("processes: 4", "processes: 1"))
    only = [*levels, *(["method=none"] if name == "tab4" else [])]
    sets = [f"{field}={json.dumps(value)}" for field, value in {**CUT, "model": model}.items()]
    where = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    main(["run", str(path), "--scale", "paper", "--only", *only, "--seeds", "1", *where, "--set", *sets])
    told = capsys.readouterr().out
    launch = tmp_path / "ragen2_trl" / "accelerate_configs" / "cpu_ddp.yaml"
    assert f"accelerate launch --config_file {launch} --num_processes 1 -m ragen2_trl.cli train --config" in told
    assert "GPU hours, an estimate: nothing of it was run" in told.splitlines()[0]
    assert list(Store(tmp_path / "results").finished()["steps"]) == [CUT["max_steps"]]
