"""Files in a run's folder may be anybody's: no link is followed when writing, nothing is read without end."""

import json
import os
import stat
import subprocess
import sys

import pytest
from accelerate import PartialState
from played_episodes import lake

from ragen2_trl.record import files, saved_episodes
from ragen2_trl.record.lock import LOCK, alone_in
from ragen2_trl.record.saved_episodes import read_episodes, save_episodes
from ragen2_trl.saved_state import UNFINISHED
from ragen2_trl.trainers.checkpoints import MANIFEST, write_manifest

WRITERS = {
    "json": files.write_json,
    "lines": lambda path, value: files.write_json_lines(path, [value]),
    "text": files.write_text,
    "private": files.write_private,
}


PIPES = (
    *("checkpoint-2/trainer_state.json", "_episodes/train_00001.jsonl", "_measurements/group_rewards.jsonl"),
    *("_measurements/measurement_00001.json", "completions/completions_00001.parquet"),
)


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"


@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(writer, victim, tmp_path):
    path = tmp_path / "run.json"
    path.symlink_to(victim)
    WRITERS[writer](path, "new")
    assert not path.is_symlink() and "new" in path.read_text()


@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_that_waits_where_a_file_is_written_first_is_not_followed(writer, victim, tmp_path):
    path = tmp_path / "run.json"
    (tmp_path / f"{UNFINISHED}{os.getpid()}.{path.name}").symlink_to(victim)
    WRITERS[writer](path, "new")
    assert "new" in path.read_text()


@pytest.mark.parametrize("name", [MANIFEST, f"{MANIFEST}.unfinished"])
def test_a_checkpoints_list_of_files_is_not_written_into_what_a_link_leads_to(name, victim, tmp_path):
    (tmp_path / name).symlink_to(victim)
    write_manifest(str(tmp_path))
    assert json.loads((tmp_path / MANIFEST).read_text()) == {}


def test_lines_are_not_appended_to_what_a_link_leads_to(victim, tmp_path):
    (tmp_path / "log.jsonl").symlink_to(victim)
    with pytest.raises(OSError):
        files.append_json(tmp_path / "log.jsonl", {})


def test_a_lock_that_is_a_link_leaves_what_it_leads_to_alone(victim, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(victim)
    PartialState()
    with alone_in(tmp_path / "run"):
        pass


def test_what_is_private_is_its_owners_alone_whatever_was_there(tmp_path):
    path = tmp_path / "settings.json"
    for place in (path, tmp_path / f"{UNFINISHED}{os.getpid()}.{path.name}"):
        place.write_text("old")
        place.chmod(0o644)
    files.write_private(path, "secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "zero"])
def test_pipes_and_endless_devices_in_a_runs_folder_hold_nothing_up(kind, tmp_path):
    (tmp_path / "diagnostics").mkdir()
    for folder in (tmp_path, tmp_path / "diagnostics"):
        for name in ("trainer_state.json", "log_history.json", "evaluation_before.json", "run.json"):
            os.mkfifo(folder / name) if kind == "pipe" else (folder / name).symlink_to("/dev/zero")
    command = [sys.executable, "-m", "ragen2_trl.cli", "report", str(tmp_path), "--output", str(tmp_path / "r.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "holds no log of a run" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_pipes_beside_a_runs_log_hold_nothing_up(tmp_path):
    (tmp_path / "diagnostics").mkdir()
    rows = [{"step": step, "reward": 0.5, "loss": 0.1} for step in (1, 2)]
    state = {"global_step": 2, "max_steps": 2, "log_history": rows, "stateful_callbacks": {}}
    (tmp_path / "diagnostics" / "trainer_state.json").write_text(json.dumps(state))
    for name in PIPES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    command = [sys.executable, "-m", "ragen2_trl.cli", "report", str(tmp_path), "--output", str(tmp_path / "r.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_more_episodes_than_are_read_are_refused(tmp_path, monkeypatch):
    path = save_episodes(tmp_path, lake(0.5))
    monkeypatch.setattr(saved_episodes, "MAX_EPISODES", 3)
    with pytest.raises(ValueError, match="episodes must be 1 to 3"):
        read_episodes(path)
    monkeypatch.setattr(saved_episodes, "MAX_BYTES", 10)
    with pytest.raises(OSError, match="at most 10 bytes"):
        read_episodes(path)
