"""`ragen2-trl check-sandbox`, and control groups, as far as this machine lets us have them."""

import os
import struct
import subprocess

import pytest

from ragen2_trl import cli
from ragen2_trl.envs.deepcoder import sandbox_cgroup, sandbox_process
from ragen2_trl.envs.deepcoder.sandbox_defences import find_defences

EVERYWHERE = ("system calls", "processes", "rights", "network", "files", "size of /tmp", "limits")


def rows(text):
    cells = [[cell.strip() for cell in line.strip("│ \n").split("│")] for line in text.splitlines() if "│" in line]
    return {name: (active, detail) for name, active, detail in cells if name}


@pytest.mark.needs("bubblewrap")
def test_the_table_shows_what_holds_here(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    cli.main(["check-sandbox"])
    shown = rows(capsys.readouterr().out)
    assert {name: shown[name][0] for name in EVERYWHERE} == dict.fromkeys(EVERYWHERE, "yes")
    parent = sandbox_cgroup.find_parent()
    assert shown["control group"][0] == ("yes" if parent else "no")
    for name in ("memory", "pids") if parent else ():
        assert shown[f"control group: {name}"][0] == ("yes" if name in parent.controllers else "no")


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize("missing", ["system calls", "size of /tmp"])
def test_a_defence_that_does_not_hold_is_told(monkeypatch, missing):
    """What is seen inside decides, not what was asked for."""
    task = sandbox_process._task

    def lax(isolation, limits):
        found = task(isolation, limits)
        found["isolation"] |= {
            "system calls": {"filter": struct.pack("HBBI", 6, 0, 0, 0x7FFF0000).hex()},  # allows every call
            "size of /tmp": {"inodes": 5000},
        }[missing]
        return found

    assert {defence.name: defence.active for defence in find_defences()}[missing]
    monkeypatch.setattr(sandbox_process, "_task", lax)
    active = {defence.name: defence.active for defence in find_defences()}
    assert [name for name in EVERYWHERE if not active[name]] == [missing]


def test_a_machine_without_bubblewrap_is_told_without_a_traceback(capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["check-sandbox"])
    told = " ".join(capsys.readouterr().err.split())  # a terminal ends lines where it likes
    assert "bubblewrap (`bwrap`) is not on PATH" in told


@pytest.fixture(name="parent")
def parent_fixture():
    found = sandbox_cgroup.find_parent()
    if found is None:
        pytest.skip("no cgroup v2 in which this user may make groups")
    return found


def test_what_a_killed_trainer_left_in_a_control_group_ends_with_the_next_run(parent):
    place = 100_000 + os.getpid()  # nobody else's
    group = sandbox_cgroup.Cgroup(parent.path / f"ragen2-trl-{os.getuid()}-{place}")
    group.path.mkdir()
    left = subprocess.Popen(group.entering(["/bin/sleep", "60"]), start_new_session=True)
    while left.pid not in map(int, (group.path / "cgroup.procs").read_text().split()):
        assert left.poll() is None
    with sandbox_cgroup.cgroup(parent, place + 1_000_000, 1 << 30, 100):
        assert left.poll() is None  # others are let alone
    with sandbox_cgroup.cgroup(parent, place, 1 << 30, 100):
        assert left.wait(60) == -9
    assert not group.path.exists()
