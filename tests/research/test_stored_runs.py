"""The runs in the store are those of the experiments, although settings have other names today than when they ran."""

import json
from pathlib import Path

import pytest

from ragen2_trl import SNRFilteredGRPOConfig
from ragen2_trl.names import named_object
from ragen2_trl.record.files import HISTORY_FILE
from research.commands import queue
from research.plan import question, read_experiments
from research.settings import STORED_VALUES, digest
from research.store import COSTS, Store, host_here, where_it_ran

RESEARCH = Path(__file__).parents[2] / "research"
STORE = Store(RESEARCH / "results")


@pytest.fixture(scope="module")
def experiments():
    """Those of which runs are there: others are registered and wait."""
    registered = read_experiments(sorted((RESEARCH / "experiments").glob("*.yaml")))
    return [one for one in registered if STORE.fixed_checks(one) is not None]


def test_every_stored_run_is_one_that_an_experiment_plans(experiments):
    """Some of which still run. A setting with another name would leave stored runs without an experiment."""
    planned = {one.key for experiment in experiments for one in experiment.planned_runs()}
    assert planned >= STORE.done() > set()


def test_a_key_is_the_digest_of_what_the_store_says_of_the_run():
    rows = STORE.finished()[["key", "fields", "seed"]].itertuples(index=False)
    assert all(key == digest({"fields": json.loads(fields), "seed": seed}) for key, fields, seed in rows)


@pytest.mark.parametrize("git", [True, False])
def test_every_new_row_has_machine_cpu_and_commit(experiments, tmp_path, monkeypatch, git):
    """Also of a checkout without git, and of a run that went on from a record without them."""
    if not git:
        monkeypatch.setenv("PATH", "")
    costs = {f"cost/{name}": 1.0 for name in COSTS}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / HISTORY_FILE).write_text(json.dumps([{"step": 1, **costs}]))
    planned = experiments[0].planned_runs()[0]
    store = Store(tmp_path / "results")
    store.add(tmp_path / "run", planned)
    (row,) = map(json.loads, store.finished()["versions"])
    assert row["host"] == host_here() and row["processor"] not in ("", "unknown")
    assert (len(row["commit"].removesuffix("-dirty")) == 40) == git and row["commit"]
    gone_on = where_it_ran({"python": "3.11"}, row)
    assert {"host", "processor", "commit"} <= gone_on.keys()


def test_runs_whose_settings_are_gone_are_in_the_store_and_are_not_trained(experiments):
    known = {name for name in SNRFilteredGRPOConfig.__dataclass_fields__ if name.startswith("snr_")}
    gone = {
        planned.key
        for one in experiments
        for planned in one.planned_runs()
        if any(name.startswith("snr_") and name not in known for name in planned.fields)
    }
    assert set() < gone <= STORE.done()
    assert gone == {planned.key for one in experiments for planned in one.planned_runs() if planned.retired}
    assert not [one for one in queue(experiments, quick=True) if "snr_mode" in one.planned.fields]


@pytest.mark.parametrize("name", STORED_VALUES["snr_selector"])
def test_each_selector_that_is_translated_is_one_that_settings_can_name(name):
    assert callable(named_object(name, "snr_selector"))


def test_each_experiment_is_still_what_its_record_says(experiments):
    for one in experiments:
        STORE.check(one, "tiny", quick=False)
        fixed = {question(check) for check in STORE.fixed_checks(one)}
        assert fixed <= {question(check) for check in one.checks}
