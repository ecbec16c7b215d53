"""Experiments as files: what is read, what is refused, which runs there are and in which order they run."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen2_trl.cli.typed import read_configs
from research.commands import QueuedRun, command_of, queue, warm_start_command, write_config, write_warm_start
from research.plan import json_text, read_experiment, read_experiments
from research.store import Store

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "research" / "experiments").glob("*.yaml"))
PLAN = {
    "id": "gain",
    "claim": "The filter gains.",
    "source": "Nowhere",
    "base": "base.yaml",
    "axes": {
        "method": {"none": {"snr_strategy": "all"}, "filter": {}},
        "slip": {"0.0": {"env_args": {"slip": 0.0}}, "0.2": {"env_args": {"slip": 0.2}}},
    },
    "seeds": [3, 4],
    "quick": {"max_steps": 2},
    "checks": [{"name": "gain", "kind": "difference", "of": {"method": "filter"}, "against": {"method": "none"}}],
    "settings_fixed": "2026-01-31",
}
BASE = {"algo": "grpo", "max_steps": 9, "env_args": {"size": 4}, "snr_value": 0.9, "seed": 0, "run_name": "own"}


@pytest.fixture
def write(tmp_path):
    """Writes an experiment with changes to `PLAN` and gives its path."""

    def write(**changes) -> Path:
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
        plan = {name: value for name, value in (PLAN | changes).items() if value is not None}
        path = tmp_path / f"{plan.get('id', 'gain')}.yaml"
        text = yaml.safe_dump(plan, sort_keys=False)
        path.write_text(text.replace("'2026-01-31'", "2026-01-31"))
        return path

    return write


# What a file says


def test_a_run_has_base_fields_and_its_levels_in_this_order(write):
    planned_runs = read_experiment(write(fields={"env_args": {"preset": "ragen2"}})).planned_runs()
    assert len(planned_runs) == 8
    (planned,) = [one for one in planned_runs if one.levels == {"method": "none", "slip": "0.2"} and one.seed == 4]
    assert planned.fields == {
        "algo": "grpo",
        "max_steps": 9,
        "env_args": {"size": 4, "preset": "ragen2", "slip": 0.2},
        "snr_value": 0.9,
        "snr_strategy": "all",
    }


def test_quick_runs_are_of_the_first_seed_and_have_its_settings_on_top(write):
    planned_runs = read_experiment(write()).planned_runs(quick=True)
    assert {(one.seed, one.fields["max_steps"]) for one in planned_runs} == {(3, 2)}
    assert not {one.key for one in planned_runs} & {one.key for one in read_experiment(write()).planned_runs()}


def test_settings_of_the_base_can_be_taken_away(write):
    axes = {"method": {"trl": {"algo": "trl_grpo", "unset": ["snr_*"]}}}
    (planned, _) = read_experiment(write(axes=axes, checks=[])).planned_runs()
    assert planned.fields == {"algo": "trl_grpo", "max_steps": 9, "env_args": {"size": 4}}


def test_combinations_can_be_left_out(write):
    planned_runs = read_experiment(write(skip=[{"method": "filter", "slip": 0.2}])).planned_runs()
    assert {tuple(one.levels.values()) for one in planned_runs} == {
        ("none", "0.0"),
        ("none", "0.2"),
        ("filter", "0.0"),
    }


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"claims": "x"}, ["claims is not known", "allowed: axes, base, checks, claim"]),
        ({"claim": None}, ["claim is missing", "required: id, claim"]),
        ({"page": False}, ["page must be left out, or false beside a flaw, got False"]),
        ({"id": "other", "base": "nope.yaml"}, ["base names", "nope.yaml"]),
        ({"seeds": [1, 1]}, ["seeds must be a list of different whole numbers, got [1, 1]"]),
        ({"fields": {"output_dir": "x"}}, ["fields.output_dir is set by the runner"]),
        ({"axes": {"method": {False: {}}}}, ["axes.method has the level False", "quote it"]),
        ({"skip": [{"slip": "0.3"}]}, ["skip[0].slip must be one of ['0.0', '0.2'], got '0.3'"]),
        ({"skip": [{"slip": 0.0}, {"slip": 0.2}]}, ["skip leaves no run"]),
        ({"checks": [{"of": {"method": "filtre"}}]}, ["checks[0].of.method must be one of ['none', 'filter']"]),
        ({"checks": [{"axis": "method"}]}, ["checks[0].axis must have numbers for levels, got 'none'"]),
        ({"figures": [{"where": {"slip": 1}}]}, ["figures[0].where.slip must be one of ['0.0', '0.2'], got '1'"]),
        ({"fields": {"warm_start": 3}}, ["warm_start must be a mapping or a file that holds one, got 3"]),
        ({"fields": {"warm_start": {}, "model": "tiny"}}, ["model must be left out beside warm_start"]),
        ({"settings_fixed": "soon"}, ["settings_fixed must be a day"]),
    ],
)
def test_what_a_file_must_not_say_is_named(changes, parts, write):
    with pytest.raises(ValueError) as error:
        read_experiment(write(**changes))
    for part in parts:
        assert part in str(error.value)


def test_an_id_is_the_name_of_its_file_and_of_no_other(write, tmp_path):
    path = write()
    moved = path.rename(tmp_path / "loss.yaml")
    with pytest.raises(ValueError, match="id must be the name of the file, 'loss', got 'gain'"):
        read_experiment(moved)
    with pytest.raises(ValueError, match="id='gain' is that of"):
        read_experiments([write(), write()])


# Keys


def test_a_key_is_of_settings_and_seed_and_of_nothing_else(write):
    keys = [one.key for one in read_experiment(write()).planned_runs()]
    assert len(set(keys)) == len(keys) and all(len(key) == 12 for key in keys)
    again = read_experiment(
        write(id="other", claim="Another.", seeds=[4, 3], fields={"max_steps": "9"})
    ).planned_runs()
    assert {one.key for one in again} == set(keys)
    assert not {one.key for one in read_experiment(write(fields={"max_steps": 10})).planned_runs()} & set(keys)


def test_numbers_are_the_same_however_they_are_written():
    assert json_text({"a": 1e-4, "b": [1.0, "x"]}) == json_text({"b": [1, "x"], "a": "1e-4"})
    assert json_text({"a": True}) != json_text({"a": 1})


def test_what_a_warm_start_says_is_part_of_the_key_and_where_its_file_is_and_it_writes_is_not(write, tmp_path):
    recipe = {"model_name_or_path": "tiny", "max_steps": 7, "output_dir": "runs/own"}
    (tmp_path / "recipes").mkdir()

    def planned_runs(name="warm.yaml", quick=False, **changes):
        (tmp_path / "recipes" / name).write_text(yaml.safe_dump(recipe | changes))
        path = write(fields={"warm_start": f"recipes/{name}"}, quick={"warm_start": {"max_steps": 1}})
        return read_experiment(path).planned_runs(quick)

    plain = {one.key for one in read_experiment(write()).planned_runs()}
    keys = {one.key for one in planned_runs()}
    assert len(keys) == 8 and not keys & plain
    assert keys == {one.key for one in planned_runs("other.yaml", output_dir="elsewhere")}
    assert not keys & {one.key for one in planned_runs(max_steps=8)}
    (model,) = {one.model_key for one in planned_runs()}
    assert (
        {one.model_key for one in planned_runs(max_steps=8)}
        != {model}
        != {one.model_key for one in planned_runs(quick=True)}
    )
    assert planned_runs(quick=True)[0].fields["warm_start"] == {"model_name_or_path": "tiny", "max_steps": 1}
    assert {one.model_key for one in read_experiment(write()).planned_runs()} == {None}


def test_a_warm_start_is_a_file_of_settings_and_its_runs_train_the_model_it_leaves(write, tmp_path):
    (tmp_path / "warm.yaml").write_text("{model_name_or_path: tiny, output_dir: runs/own, seed: 5}")
    experiment = read_experiment(write(fields={"warm_start": "warm.yaml"}))
    jobs = queue([experiment])
    configs = [write_config(tmp_path / "runs" / job.planned.key, job) for job in jobs]
    (model,) = {yaml.safe_load(config.read_text())["model"] for config in configs}
    assert model == str(tmp_path / "runs" / "models" / jobs[0].planned.model_key)
    assert "warm_start" not in yaml.safe_load(configs[0].read_text())
    config = write_warm_start(Path(model), jobs[0])
    assert yaml.safe_load(config.read_text()) == {"model_name_or_path": "tiny", "seed": 5, "output_dir": model}
    assert warm_start_command(config) == ["python", "-m", "ragen2_trl.cli", "warm-start", "--config", str(config)]


def test_retired_runs_are_planned_for_analysis_alone(write):
    gone = {"method": "filter", "slip": "0.2"}
    experiment = read_experiment(write(retired=[gone]))
    assert [one.levels for one in experiment.planned_runs() if one.retired] == [gone] * 2
    assert len(experiment.planned_runs()) == 8
    assert len(experiment.planned_runs(quick=True)) == 3
    assert len(read_experiment(write(retired=experiment.retired), {"max_steps": 1}).planned_runs()) == 6


# The order of runs


def test_runs_run_seed_by_seed_with_what_is_compared_side_by_side(write):
    jobs = queue([read_experiment(write())])
    assert [job.planned.seed for job in jobs] == [3] * 4 + [4] * 4
    assert [job.planned.levels["method"] for job in jobs] == ["none", "filter"] * 4


def test_the_first_seed_of_all_experiments_runs_before_the_second_and_shared_runs_once(write):
    first, second = read_experiment(write()), read_experiment(write(id="other", seeds=[4, 5]))
    jobs = queue([first, second])
    assert [job.planned.seed for job in jobs] == [3] * 4 + [4] * 4 + [5] * 4
    assert {frozenset(job.experiments) for job in jobs if job.planned.seed == 4} == {frozenset(("gain", "other"))}


def test_runs_can_be_chosen_by_level_and_seed(write):
    experiment = read_experiment(write())
    jobs = queue([experiment], only={"method": ["filter"], "slip": ["0.0", "0.2"]}, seeds=[4])
    assert [(job.planned.levels, job.planned.seed) for job in jobs] == [
        ({"method": "filter", "slip": slip}, 4) for slip in ("0.0", "0.2")
    ]
    for wrong, message in (
        ({"only": {"method": ["filtre"]}}, "only=method=filtre is in no experiment; allowed: ['none', 'filter']"),
        ({"only": {"mode": ["x"]}}, "only=mode=x is in no experiment; allowed: the axes ['method', 'slip']"),
        ({"seeds": [5]}, "seeds must be planned in an experiment ([3, 4]), got 5"),
    ):
        with pytest.raises(ValueError) as error:
            queue([experiment], **wrong)
        assert message in str(error.value)


def test_a_run_is_a_file_of_settings_that_anybody_can_train(write, tmp_path):
    job = queue([read_experiment(write())])[0]
    config = write_config(tmp_path / "run", job)
    settings = yaml.safe_load(config.read_text())
    assert settings.items() >= job.planned.fields.items()
    assert (settings["seed"], settings["resume"], settings["output_dir"]) == (3, True, str(tmp_path / "run"))
    assert command_of(config, job) == ["python", "-m", "ragen2_trl.cli", "train", "--config", str(config)]
    variant = replace(
        job, planned=replace(job.planned, fields={**job.planned.fields, "variant": "SkipsZeroGradients"})
    )
    command = command_of(write_config(tmp_path, variant), variant)
    assert command[:4] == ["python", "-m", "research.variants", "SkipsZeroGradients"]
    assert "variant" not in config.read_text() and variant.planned.key != job.planned.key


def test_at_the_paper_s_scale_a_run_is_launched_by_accelerate(write, tmp_path):
    (tmp_path / "paper.yaml").write_text("model: large\nmax_steps: 1600\n")
    scale = {"base": "paper.yaml", "launch": "paper.yaml", "processes": 8}
    experiment = read_experiment(write(paper_scale=scale))
    job = queue([experiment], scale="paper")[0]
    assert (job.planned.fields["model"], job.planned.fields["max_steps"]) == ("large", 1600)
    command = command_of(tmp_path / "config.yaml", job)
    assert command[:2] == ["accelerate", "launch"] and command[command.index("--num_processes") + 1] == "8"
    with pytest.raises(ValueError, match="scale='paper' needs paper_scale"):
        read_experiment(write()).planned_runs(scale="paper")


# A folder of results is of one configuration


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"axes": {**PLAN["axes"], "slip": {"0.0": {"env_args": {"slip": 0.1}}}}}, "axes.slip.0.0.env_args.slip"),
        ({"fields": {"max_steps": 10}}, "fields.max_steps is 9 in"),
        ({"seeds": [3]}, "seeds is [3, 4] in"),
        ({"checks": []}, "checks is "),
        ({"checks": [{**PLAN["checks"][0], "of": {"method": "none"}}]}, "checks[0].of.method is "),
        (
            {"axes": {**PLAN["axes"], "method": {**PLAN["axes"]["method"], "filter": {"unset": ["snr_value"]}}}},
            "unset",
        ),
    ],
)
def test_results_of_another_configuration_are_refused_by_what_differs(changes, difference, write, tmp_path):
    store = Store(tmp_path / "results")
    store.write_record(read_experiment(write()), "tiny", quick=False)
    with pytest.raises(ValueError) as error:
        store.check(read_experiment(write(**changes)), "tiny", quick=False)
    assert "gain made with another configuration" in str(error.value) and difference in str(error.value)
    assert "--results" in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"claim": "It gains."},
        {"paper": "It does."},
        {"seeds": [3, 4, 5]},
        {"quick": {"max_steps": 1}},
        {"checks": [{**PLAN["checks"][0], "name": "the gain"}, {**PLAN["checks"][0], "kind": "ratio"}]},
    ],
)
def test_prose_may_change_and_seeds_and_checks_may_be_added(changes, write, tmp_path):
    """And the record goes on saying which checks there were before the runs."""
    store = Store(tmp_path / "results")
    first = read_experiment(write())
    assert store.fixed_checks(first) is None
    store.write_record(first, "tiny", quick=False)
    changed = read_experiment(write(**changes))
    store.check(changed, "tiny", quick=False)
    store.write_record(changed, "tiny", quick=False)
    assert store.fixed_checks(changed) == PLAN["checks"]


def test_an_experiment_that_had_no_checks_had_none_however_often_it_runs(write, tmp_path):
    store = Store(tmp_path / "results")
    store.write_record(read_experiment(write(checks=[])), "tiny", quick=False)
    store.write_record(read_experiment(write()), "tiny", quick=False)
    assert store.fixed_checks(read_experiment(write())) == []


# The experiments of this repository


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_experiment_of_the_repository_can_be_read_at_both_scales(path):
    experiment = read_experiment(path)
    assert len(experiment.seeds) >= 5 or not experiment.checks or experiment.flaw
    planned_runs = experiment.planned_runs()
    assert len({planned.key for planned in planned_runs}) == len(planned_runs)
    at_paper_scale = {planned.key for planned in experiment.planned_runs(scale="paper")}
    skipped = (*experiment.larger["paper"].skip, *experiment.retired)
    left = [planned for planned in planned_runs if not any(one.items() <= planned.levels.items() for one in skipped)]
    assert experiment.others or len(at_paper_scale) == len(left)
    assert not at_paper_scale & {planned.key for planned in planned_runs}


def test_runs_of_other_experiments_are_trained_for_both(write):
    write()
    both = {"id": "both", "runs_of": ["gain"], "axes": None, "base": None, "seeds": None, "quick": None}
    experiment = read_experiment(write(**both))
    jobs = queue([experiment], only={"method": ["filter"]})
    assert {job.planned.key for job in jobs} == {
        job.planned.key for job in queue([read_experiment(write())], only={"method": ["filter"]})
    }
    assert {job.experiments for job in jobs} == {("gain", "both")}


PARTS = ["hf_workspace", "sk-experiments", f"hf_{'a' * 34}", f"sk-{'Ab1' * 16}", "me:pass@host", "?token=x&k=5", "~"]
PART = st.sampled_from(PARTS) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=40
).filter(lambda name: name not in (".", ".."))
ADDRESSES = ["http://me:pa/ss@host/search?api_key=x", "postgres://a b:c@d/e"]


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(PART, min_size=1, max_size=4).map("/".join), st.sampled_from(ADDRESSES))
def test_every_path_and_address_comes_back_as_it_was_given(tmp_path_factory, relative, address):
    """Of settings and of records, which training and later commands go on from: nobody else may read them."""
    base = tmp_path_factory.mktemp("store")
    folder = base / relative
    experiment = read_experiment(
        ROOT / "research" / "experiments" / "fig3.yaml", {"model": str(folder), "env_args": {"corpus": address}}
    )
    store = Store(folder / "results")
    store.write_record(experiment, "tiny", quick=False)
    store.check(experiment, "tiny", quick=False)
    planned = experiment.planned_runs()[0]
    config = write_config(folder / planned.key, QueuedRun(planned, (), "a run"))
    read = read_configs([str(config)])
    assert (read["output_dir"], read["model"]) == (str(config.parent), str(folder))
    assert read["env_args"]["corpus"] == address
    files = [path for path in folder.rglob("*.yaml") if path.is_file()]
    assert len(files) == 2 and {path.stat().st_mode & 0o777 for path in files} == {0o600}
