"""No two runs in one folder, from the command line or a script; what is left of a killed one is in nobody's way."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import assert_same_parameters, parameters_of
from test_train import arguments
from trl import GRPOTrainer

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOTrainer, cli
from ragen2_trl.callbacks.run_record import keep_record
from ragen2_trl.record.lock import LOCK, alone_in
from ragen2_trl.saved_state import UNFINISHED

HOLDER = """
import sys
from pathlib import Path
from ragen2_trl.record.lock import alone_in
with alone_in(Path(sys.argv[1])):
    print("mine", flush=True)
    sys.stdin.read()
"""
TRY = """
import fcntl, sys
fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A folder with a checkpoint, in which another process trains, and that process."""
    folder = tmp_path_factory.mktemp("held")
    (folder / "checkpoint-7").mkdir()
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "mine\n"
        yield folder, process
        process.stdin.close()


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def others_can_have(folder: Path) -> bool:
    return subprocess.run([sys.executable, "-c", TRY, str(folder / LOCK)], stderr=subprocess.DEVNULL).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("option", [[], ["--resume", "true"], ["--overwrite", "true"]])
def test_a_command_is_refused_while_another_process_trains_in_the_folder(option, held, capsys):
    folder, process = held
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *arguments(folder), *option])
    told = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and "output_dir=" in told
    assert f"process {process.pid} on {socket.gethostname()}" in told
    assert {path.name for path in folder.iterdir()} == {"checkpoint-7", LOCK}


@pytest.mark.parametrize("trainer_class", [SNRFilteredGRPOTrainer, GRPOTrainer])
def test_a_script_is_refused_while_another_process_trains_in_the_folder(
    trainer_class, held, policy_path, make_args, prompts
):
    folder, process = held
    args = make_args(trainer_class is SNRFilteredGRPOTrainer, output_dir=str(folder))
    trainer = trainer_class(policy_path, length, args, prompts)
    trainer.add_callback(MutualInformationCallback(trainer))
    before = parameters_of(trainer)
    with pytest.raises(ValueError, match=f"output_dir=.* process {process.pid} on "):
        trainer.train()
    assert_same_parameters(before, parameters_of(trainer))
    assert {path.name for path in folder.iterdir()} == {"checkpoint-7", LOCK}


def test_a_folder_is_locked_from_the_beginning_of_training_to_its_end(policy_path, make_args, prompts, tmp_path):
    folder, free = tmp_path / "run", []

    def reward(completions, **kwargs):
        free.append(others_can_have(folder))
        return length(completions)

    trainer = SNRFilteredGRPOTrainer(policy_path, reward, make_args(max_steps=1), prompts)
    keep_record(trainer).draws = False
    trainer.train()
    assert free == [False] and others_can_have(folder)
    trainer.model.register_forward_pre_hook(lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert others_can_have(folder)


@pytest.mark.slow
def test_a_lock_goes_with_its_process_and_children_do_not_keep_it(tmp_path):
    orphan = "    import os, time\n    if os.fork() == 0: time.sleep(30); os._exit(0)\n    print("
    command = [sys.executable, "-c", HOLDER.replace("    print(", orphan), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "mine\n"
        assert not others_can_have(tmp_path)
        process.kill()
        process.wait()
        with alone_in(tmp_path):
            assert not others_can_have(tmp_path)


def test_where_nothing_can_be_locked_a_line_says_so_and_training_goes_on(tmp_path, monkeypatch, make_args, caplog):
    make_args()  # accelerate's loggers ask for its state

    def refuse(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level("WARNING"), alone_in(tmp_path), alone_in(tmp_path / "other"):
        pass
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and str(tmp_path) in lines[0] and os.strerror(errno.ENOLCK) in lines[0]


def test_what_a_kill_left_half_written_is_gone_when_training_begins_again(policy_path, make_args, prompts, tmp_path):
    folder = tmp_path / "run"
    left = [folder / place / f"{UNFINISHED}123.x.json" for place in (".", "diagnostics", "_measurements", "_episodes")]
    for path in left:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(json.dumps({}))
    trainer = SNRFilteredGRPOTrainer(policy_path, length, make_args(max_steps=1), prompts)
    keep_record(trainer).draws = False
    trainer.train()
    assert not [path for path in left if path.exists()]
