"""The settings of a run that left nothing but TRL's files, read from a pickle that may be anybody's."""

import contextlib
import dataclasses
import os
import pickle
import struct
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reported_runs import make_run, report_of
from reported_runs import words_only_fixture as words_only_fixture
from transformers import TrainerState
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import SNRFilteredGRPOConfig
from ragen2_trl.redaction import with_hidden_credentials
from ragen2_trl.reporting.files import UNREADABLE
from ragen2_trl.reporting.run import read_run
from ragen2_trl.reporting.saved_arguments import MAX_FILE, MAX_PICKLE, read_arguments

FILE = "training_args.bin"


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def test_a_run_of_trls_own_trainer_shows_its_settings(policy_path, prompts, make_args, words_only):
    args = make_args(
        False,
        max_steps=2,
        save_strategy="steps",
        save_steps=1,
        learning_rate=3e-4,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        top_p=0.9,
        reward_weights=[0.5],
        run_name="secret hf_" + 40 * "a",
    )
    GRPOTrainer(policy_path, length, args, prompts).train()
    run = read_run(args.output_dir)
    expected = {
        "config": "GRPOConfig",
        "learning_rate": 3e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "optim": args.optim.value,
        "num_generations": 4,
        "reward_weights": [0.5],
        "epsilon": 0.2,
        "scale_rewards": "group",
        "bf16": False,
        "steps_per_generation": 1,
    }
    assert run.settings.items() >= expected.items() and run.problems == []
    text = f"{report_of(args.output_dir).text} "
    for name, value in {**expected, "top_p": 0.9, "reward_weights": 0.5}.items():
        assert f"{name} {value} " in text, name
    assert "vllm" not in text and "weight_decay" not in text  # which do nothing here
    assert "hf_a" not in text


def test_arguments_are_read_as_they_were_saved(tmp_path, make_args):
    for args in (make_args(), make_args(False), make_args(model_init_kwargs={"token": "secret"})):
        torch.save(with_hidden_credentials(args), tmp_path / FILE)
        kind, values = read_arguments(tmp_path / FILE)
        assert kind == type(args).__name__
        saved = torch.load(tmp_path / FILE, weights_only=False)
        assert isinstance(saved, GRPOConfig | SNRFilteredGRPOConfig)
        fields = values.keys() & {field.name for field in dataclasses.fields(saved)}
        assert {name: getattr(saved, name) for name in fields} == {name: values[name] for name in fields}
        assert {"seed", "optim", "logging_steps", "beta", "save_strategy"} <= fields


def test_of_several_checkpoints_the_newest_tells_the_settings(tmp_path, make_args):
    for step in (9, 20):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        TrainerState(global_step=step, log_history=[{"step": step}]).save_to_json(str(folder / "trainer_state.json"))
        torch.save(make_args(seed=step, snr_value=0.5), folder / FILE)
    settings = read_run(tmp_path).settings
    assert (settings["config"], settings["seed"], settings["snr_value"]) == ("SNRFilteredGRPOConfig", 20, 0.5)


def test_a_later_run_in_the_folder_shows_its_own_settings(tmp_path, make_args):
    """Though an earlier one, in other words, left a checkpoint of a later step."""
    for folder, steps, reward in ((tmp_path / "checkpoint-9", 9, 0.5), (tmp_path, 3, 0.7)):
        folder.mkdir(exist_ok=True)
        log = [{"step": step, "reward": reward} for step in range(1, steps + 1)]
        TrainerState(global_step=steps, log_history=log).save_to_json(str(folder / "trainer_state.json"))
        torch.save(make_args(seed=steps), folder / FILE)
    run = read_run(tmp_path)
    assert (run.step, run.settings["seed"]) == (3, 3)


# Files that are no such arguments


class Calls:
    """What a pickle of it calls when it is unpickled."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def archive(path, data, compression=zipfile.ZIP_STORED, declared=None):
    """A file as torch.save makes it, but for what is in it."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("training_args/data.pkl", data)
        if declared is not None:
            file.infolist()[0].file_size = declared


def runs_a_command(path, marker):
    archive(path, pickle.dumps(Calls(os.system, f"touch {marker}"), 2))


def evaluates(path, marker):
    archive(path, pickle.dumps(Calls(eval, f"open({str(marker)!r}, 'w').close()"), 2))


def hides_a_command_in_arguments(path, marker):
    args = GRPOConfig("run", use_cpu=True, bf16=False, report_to="none")
    args.learning_rate = Calls(os.system, f"touch {marker}")
    torch.save(args, path)


def is_cut(path, marker):
    torch.save(GRPOConfig("run", use_cpu=True, bf16=False), path)
    path.write_bytes(path.read_bytes()[:4000])


def has_a_pickle_that_is_cut(path, marker):
    archive(path, pickle.dumps({"seed": 1}, 2)[:-5])


BINUNICODE, LONG_BINPUT, TUPLE1, TUPLE2, BINGET, BINPUT = b"X", b"r", b"\x85", b"\x86", b"h", b"q"

# A text of two gigabytes, a place in a table of billions, a key whose hash takes 2^60 steps, one nested without end.
PICKLES = {
    "long text": BINUNICODE + struct.pack("<I", 2**31 - 1) + b"short.",
    "far place": b"}" + LONG_BINPUT + struct.pack("<I", 2**32 - 1) + b".",
    "slow hash": b"})" + b"".join(BINPUT + bytes([n]) + BINGET + bytes([n]) + TUPLE2 for n in range(60)) + b"Ns.",
    "deep key": b"})" + TUPLE1 * 200_000 + b"Ns.",
    "nothing on its stack": b"b.",
    "no class to call": b"K\x01)R.",
    "large number": b"\x8b" + struct.pack("<i", 100_000) + b"\xff" * 100_000 + b".",
    "no opcode": b"\xff.",
    "a number": b"K\x01.",
}


def opaque(name):
    return lambda path, marker: archive(path, b"\x80\x02" + PICKLES[name])


HOSTILE = {
    "command": runs_a_command,
    "eval": evaluates,
    "cut": is_cut,
    "cut pickle": has_a_pickle_that_is_cut,
    "no zip": lambda path, marker: path.write_bytes(b"not a zip"),
    "other zip": lambda path, marker: zipfile.ZipFile(path, "w").close(),
    "declared size": lambda path, marker: archive(path, b"\x80\x02N.", declared=2**31 - 1),
    "compressed": lambda path, marker: archive(path, bytes(2**24), zipfile.ZIP_DEFLATED),
    "long pickle": lambda path, marker: archive(path, bytes(MAX_PICKLE + 1)),
    "large file": lambda path, marker: path.write_bytes(bytes(MAX_FILE + 1)),
    **{name: opaque(name) for name in PICKLES},
}


@pytest.mark.parametrize("spoil", [pytest.param(spoil, id=name) for name, spoil in HOSTILE.items()])
def test_what_holds_no_arguments_is_named_and_nothing_of_it_is_run(tmp_path, spoil, words_only):
    folder, marker = make_run(tmp_path / "run", steps=1), tmp_path / "executed"
    (folder / "diagnostics" / "run.json").unlink()
    spoil(folder / FILE, marker)
    text = report_of(folder).text
    assert f"settings of this run are not shown: {FILE} cannot be read" in text
    assert "finished" in text or "stopped" in text or "unfinished" in text
    assert not marker.exists()


@pytest.mark.parametrize("spoil", [runs_a_command, evaluates, hides_a_command_in_arguments])
def test_a_command_in_a_pickle_is_not_run_and_would_be_by_who_unpickles_it(tmp_path, spoil):
    path, marker = tmp_path / FILE, tmp_path / "executed"
    spoil(path, marker)
    with contextlib.suppress(ValueError):
        read_arguments(path)
    assert not marker.exists()
    with zipfile.ZipFile(path) as file:
        name = next(one for one in file.namelist() if one.endswith("data.pkl"))
        pickle.loads(file.read(name))
    assert marker.exists()


@pytest.fixture(scope="module")
def saved_arguments(tmp_path_factory):
    path = tmp_path_factory.mktemp("arguments") / FILE
    torch.save(GRPOConfig("run", use_cpu=True, bf16=False, report_to="none"), path)
    return path.read_bytes()


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=20))
def test_changed_bytes_end_in_no_other_error_than_files_that_cannot_be_read(
    saved_arguments, tmp_path_factory, changes
):
    changed = bytearray(saved_arguments)
    for place, byte in changes:
        changed[place % len(changed)] = byte
    path = tmp_path_factory.getbasetemp() / "changed.bin"
    path.write_bytes(changed)
    try:
        _, values = read_arguments(path)
    except UNREADABLE:
        return
    assert all(isinstance(name, str) for name in values)
