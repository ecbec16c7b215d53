"""Which checkpoints are complete, and that no other is resumed from: of ours, and of TRL's own trainer."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import RUN, assert_same_parameters, parameters_of, told_last
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import CostCallback, MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, cli
from ragen2_trl.callbacks.pooling import POOL_FILE
from ragen2_trl.saved_state import UNFINISHED
from ragen2_trl.trainers import checkpoints
from ragen2_trl.trainers.backends import check_backend
from ragen2_trl.trainers.checkpoints import MANIFEST, flaw_of, last_complete_checkpoint

PARTS = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
OWN = ("snr_state_0.pt", MANIFEST)
KINDS = {"ours": (SNRFilteredGRPOTrainer, SNRFilteredGRPOConfig), "TRL's": (GRPOTrainer, GRPOConfig)}


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def make(kind, policy_path, folder, **settings):
    trainer, config = KINDS[kind]
    saving = {"max_steps": 3, "save_steps": 1, "save_strategy": "steps", "max_completion_length": 6}
    args = config(**{**RUN, **saving, "output_dir": str(folder), **settings})
    prompts = Dataset.from_dict({"prompt": [f"Go {number}" for number in range(8)]})
    return trainer(policy_path, length, args, prompts)


@pytest.fixture(scope="module")
def runs(policy_path, tmp_path_factory):
    """Folder and trainer of a whole run of each kind."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp("run")
        trainer = make(kind, policy_path, folder)
        trainer.train()
        found[kind] = folder, trainer
    return found


@pytest.fixture
def run(runs, tmp_path):
    """Gives a copy of a run's folder."""

    def copied(kind):
        return shutil.copytree(runs[kind][0], tmp_path / "run", dirs_exist_ok=True)

    return copied


def damage(path, how):
    if how == "cut off":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        return
    path.unlink()
    if how == "a pipe":  # that nobody writes to
        os.mkfifo(path)


@pytest.mark.parametrize("how", ["missing", "cut off", "a pipe"])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in PARTS + OWN * (kind == "ours")])
def test_a_checkpoint_that_lacks_anything_is_told_from_a_complete_one(kind, name, how, run):
    checkpoint = run(kind) / "checkpoint-3"
    assert flaw_of(checkpoint) is None
    if (name, how) == (MANIFEST, "missing"):
        return
    damage(checkpoint / name, how)
    assert name in flaw_of(checkpoint)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_with_bytes_after_their_end_are_damaged(kind, run):
    """Nothing but the header of safetensors tells so where there is no manifest."""
    checkpoint = run(kind) / "checkpoint-3"
    with (checkpoint / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    assert "model.safetensors" in flaw_of(checkpoint)


@pytest.mark.parametrize(
    ("kind", "name", "how"), [("ours", "snr_state_0.pt", "missing"), ("TRL's", "optimizer.pt", "cut off")]
)
def test_a_run_goes_on_from_the_checkpoint_before_an_incomplete_one(kind, name, how, run, runs, policy_path, caplog):
    folder = run(kind)
    damage(folder / "checkpoint-3" / name, how)
    resumed = make("ours", policy_path, folder)
    with caplog.at_level("WARNING"):
        resumed.train(resume_from_checkpoint=True)
    (line,) = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert all(part in line for part in ("checkpoint-2", "checkpoint-3", name))
    rows = [row["step"] for row in resumed.state.log_history if "loss" in row]
    assert rows == [1, 2, 3]
    if kind == "ours":
        assert_same_parameters(parameters_of(resumed), parameters_of(runs[kind][1]))


def test_an_incomplete_checkpoint_is_refused_by_name(run, policy_path):
    folder = run("ours")
    damage(folder / "checkpoint-2" / "scheduler.pt", "missing")
    trainer = make("ours", policy_path, folder)
    before = parameters_of(trainer)
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=.*checkpoint-2.*scheduler\.pt is missing"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    for number in (1, 3):
        damage(folder / f"checkpoint-{number}" / "optimizer.pt", "missing")
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=True finds no complete checkpoint in output_dir="):
        trainer.train(resume_from_checkpoint=True)
    assert_same_parameters(before, parameters_of(trainer))


def test_what_is_only_named_like_a_checkpoint_is_none(run):
    folder = run("ours")
    (folder / "checkpoint-best").mkdir()
    (folder / "checkpoint-99").touch()
    assert last_complete_checkpoint(folder) == folder / "checkpoint-3"
    for content in ("[]", "{}", '{"global_step": 3', '"text"', "[" * 10_000):
        (folder / "checkpoint-3" / "trainer_state.json").write_text(content)
        assert last_complete_checkpoint(folder) == folder / "checkpoint-2"
    (folder / "checkpoint-3" / "trainer_state.json").unlink()
    os.mkfifo(folder / "checkpoint-3" / "trainer_state.json")  # nobody writes to it
    assert last_complete_checkpoint(folder) == folder / "checkpoint-2"
    assert last_complete_checkpoint(folder / "nowhere") is None


def test_a_disk_that_fails_is_a_flaw_and_no_error_of_its_own(run, monkeypatch):
    def fails(path, **kwargs):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(Path, "read_text", fails)
    assert "Input/output error" in flaw_of(run("ours") / "checkpoint-3")
    assert last_complete_checkpoint(run("ours")) is None


def test_checkpoints_are_found_and_named_in_a_process_without_a_trainer(run):
    folder = run("ours")
    damage(folder / "checkpoint-3" / "optimizer.pt", "missing")
    code = (
        "import sys; from pathlib import Path; from ragen2_trl.trainers.checkpoints import last_complete_checkpoint; "
        "print(last_complete_checkpoint(Path(sys.argv[1])).name)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "checkpoint-2" and "checkpoint-3, where optimizer.pt is missing" in done.stderr


@pytest.mark.parametrize("save_only_model", [False, True])
def test_weights_alone_are_no_checkpoint_to_resume_from_and_hold_nothing_that_was_sampled(
    save_only_model, policy_path, tmp_path
):
    trainer = make("ours", policy_path, tmp_path, max_steps=1, save_only_model=save_only_model)
    trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=1000))  # waits for more of them
    trainer.train()
    checkpoint = tmp_path / "checkpoint-1"
    sampled = {path.name for path in checkpoint.iterdir()} & {"snr_state_0.pt", POOL_FILE}
    assert len(sampled) == (0 if save_only_model else 2)
    assert ("optimizer" in str(flaw_of(checkpoint))) == save_only_model


def test_what_a_kill_left_half_written_is_gone_when_a_checkpoint_is_written_again(tmp_path):
    """It holds prompts and completions, and no upload leaves it out."""
    left = tmp_path / f"{UNFINISHED}1.snr_state_0.pt"
    left.touch()
    checkpoints.open_checkpoint(str(tmp_path))
    assert not left.exists()


@pytest.mark.parametrize("last", ["_save_optimizer_and_scheduler", "_save_rng_state"])
def test_a_checkpoint_is_complete_only_when_all_of_it_is_written(last, run, runs, policy_path, monkeypatch):
    """Also where one of the same name was complete before."""
    folder = run("ours")
    listed = json.loads((folder / "checkpoint-3" / MANIFEST).read_text())
    files = {path.name for path in (folder / "checkpoint-3").iterdir()}
    assert {*PARTS, *OWN} - {MANIFEST, "trainer_state.json"} <= listed.keys() <= files
    trainer = make("ours", policy_path, folder)

    def killed(output_dir):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, last, killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert "trainer_state.json" in flaw_of(folder / "checkpoint-3")
    assert last_complete_checkpoint(folder) == folder / "checkpoint-2"


def ended_by(error, at_step, policy_path, folder, **settings):
    """What a training raises whose reward function raises `error` at a step."""
    trainer = make("ours", policy_path, folder, **settings)

    def failing(*args, **kwargs):
        if trainer.state.global_step == at_step:
            raise error
        return [0.0, 1.0] * (len(kwargs["completions"]) // 2)

    trainer.reward_funcs = [failing]
    with pytest.raises(type(error)) as raised:
        trainer.train()
    return raised.value


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("a reward")], ids=["interrupt", "error"])
def test_a_training_that_ends_early_names_the_checkpoint_that_it_goes_on_from(error, policy_path, tmp_path):
    ended = ended_by(error, 2, policy_path, tmp_path / "run")
    (told,) = [line for line in told_last(ended) if "resume_from_checkpoint=True" in line]
    assert "checkpoint-2" in told and "step 2" in told


@pytest.mark.parametrize(("at_step", "settings"), [(0, {}), (1, {"save_strategy": "no"})])
def test_an_error_names_no_checkpoint_where_the_run_has_none(at_step, settings, run, policy_path, tmp_path):
    """Not one of an earlier run either, which a new one has not gone past its first step to replace."""
    folder = run("ours") if at_step == 0 else tmp_path / "new"
    ended = ended_by(ZeroDivisionError("a reward"), at_step, policy_path, folder, **settings)
    assert not [line for line in told_last(ended) if "resume_from_checkpoint" in line]


def test_the_latest_checkpoint_is_the_one_of_the_largest_number(run):
    source = last_complete_checkpoint(run("ours"))
    folder = source.parent.parent / "numbered"
    for number in (9, 10):
        shutil.copytree(source, folder / f"checkpoint-{number}")
    assert last_complete_checkpoint(folder).name == "checkpoint-10"


def test_files_that_resuming_does_not_read_may_go(run):
    checkpoint = last_complete_checkpoint(run("ours"))
    listed = set(json.loads((checkpoint / MANIFEST).read_text()))
    others = {path for path in checkpoint.iterdir() if path.is_file() and path.name not in listed}
    assert {"config.json", "tokenizer.json"} <= {path.name for path in others}
    for path in others - {checkpoint / MANIFEST, checkpoint / "trainer_state.json"}:
        path.unlink()
    assert flaw_of(checkpoint) is None


def test_the_checkpoint_that_sigterm_saves_can_be_resumed(policy_path, tmp_path):
    """transformers' answer to preemption: it marks the folder, saves, and takes the mark away."""

    class Preempted(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(4)  # as long as transformers waits for a second signal, and a little more

    handler = signal.getsignal(signal.SIGTERM)
    try:
        trainer = make("ours", policy_path, tmp_path, enable_jit_checkpoint=True, max_steps=6, save_strategy="no")
        trainer.add_callback(Preempted())
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, handler)
    checkpoint = last_complete_checkpoint(tmp_path)
    assert checkpoint is not None and trainer.state.global_step < 6
    again = make("ours", policy_path, tmp_path, max_steps=6, save_strategy="no")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6


# A checkpoint resumes only under the backend that saved it; any other is refused, and the error names both.


PLAIN = ("model.safetensors", "optimizer.pt", "scheduler.pt")


def zero(processes, weights="mp_rank_00_model_states.pt", prefix=""):
    shards = [f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(processes)]
    return ("model.safetensors", "latest", *(f"global_step2/{name}" for name in (*shards, weights)))


def accelerator_of(processes=1, stage=None, fsdp=None, universal=False):
    """The accelerator of a run."""
    config = SimpleNamespace(get_value=lambda name, default: universal if "universal" in name else default)
    deepspeed = None if stage is None else SimpleNamespace(zero_stage=stage, hf_ds_config=config)
    state = SimpleNamespace(deepspeed_plugin=deepspeed)
    if fsdp is not None:
        state.fsdp_plugin = SimpleNamespace(state_dict_type=SimpleNamespace(name=fsdp))
    return SimpleNamespace(state=state, num_processes=processes)


SAVED = {
    "plain": PLAIN,
    "ZeRO-0": zero(0),
    "ZeRO-1 or 2 on 2": zero(2),
    "ZeRO-1 or 2 on 4, in bfloat16": zero(4, prefix="bf16_"),
    "ZeRO-3 on 2": zero(2, "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    "FSDP, whole": ("pytorch_model_fsdp.bin", "optimizer.bin"),
    "FSDP, in shards": ("pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/__0_0.distcp"),
}
RUNS = {
    "plain": (accelerator_of(), accelerator_of(2), accelerator_of(8)),
    "ZeRO-0": (accelerator_of(2, 0), accelerator_of(4, 0)),
    "ZeRO-1 or 2 on 2": (accelerator_of(2, 1), accelerator_of(2, 2)),
    "ZeRO-1 or 2 on 4, in bfloat16": (accelerator_of(4, 2),),
    "ZeRO-3 on 2": (accelerator_of(2, 3),),
    "FSDP, whole": (accelerator_of(2, fsdp="FULL_STATE_DICT"), accelerator_of(4, fsdp="FULL_STATE_DICT")),
    "FSDP, in shards": (accelerator_of(2, fsdp="SHARDED_STATE_DICT"), accelerator_of(4, fsdp="SHARDED_STATE_DICT")),
}


def checkpoint_of(files, folder):
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not (folder / name).exists():
            torch.save({}, folder / name)
    return folder


@pytest.mark.parametrize("saved", SAVED)
def test_a_checkpoint_resumes_under_its_own_backend_alone(saved, tmp_path):
    checkpoint = checkpoint_of(SAVED[saved], tmp_path)
    for backend, runs in RUNS.items():
        for accelerator in runs:
            if backend == saved:
                check_backend(checkpoint, accelerator)
            else:
                with pytest.raises(ValueError, match=r"was saved with .*\. This run has .*allowed: a run with "):
                    check_backend(checkpoint, accelerator)


def test_a_converted_checkpoint_resumes_under_any_stage_and_number_of_processes(tmp_path):
    check_backend(checkpoint_of(zero(2), tmp_path), accelerator_of(4, 3, universal=True))


def test_a_checkpoint_of_trl_with_zero_is_refused_in_a_plain_run(policy_path, tmp_path, capsys):
    prompts = Dataset.from_dict({"prompt": [f"Go {number}" for number in range(8)]})
    saving = {**RUN, "max_steps": 1, "save_steps": 1, "save_strategy": "steps", "output_dir": str(tmp_path)}

    def reward(completions, **columns):
        return [float(len(text)) for text in completions]

    GRPOTrainer(policy_path, reward, GRPOConfig(**saving), prompts).train()
    checkpoint = tmp_path / "checkpoint-1"
    for name in ("optimizer.pt", "scheduler.pt"):
        (checkpoint / name).unlink()
    checkpoint_of(zero(2), checkpoint)
    again = SNRFilteredGRPOTrainer(policy_path, reward, SNRFilteredGRPOConfig(**{**saving, "max_steps": 2}), prompts)
    for asked in (True, str(checkpoint)):
        with pytest.raises(ValueError, match=r"was saved with DeepSpeed ZeRO.* on 2 processes\. This run has .*DDP"):
            again.train(resume_from_checkpoint=asked)
    command = ["--algo", "trl_grpo", "--model", "tiny", "--env_name", "bandit", "--eval_prompts", "0"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *command, "--output_dir", str(tmp_path), "--resume_from_checkpoint", str(checkpoint)])
    assert ended.value.code == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "was saved with DeepSpeed ZeRO-1 or ZeRO-2 on 2 processes. This run has no sharding" in told


# What a checkpoint brings is checked before a run goes on with it: each field of another form is a line.


STATE, RANK, POOL = "trainer_state.json", "snr_state_0.pt", "_mutual_information_pool.pt"
CALLBACKS = (STATE, "stateful_callbacks")
SHARED = (RANK, "shared")
WRONG = [  # file and keys, the new value, and what the line names
    ((STATE, "global_step"), -1, "global_step must be at least 0, got -1"),
    ((STATE, "global_step"), 10**9, "is at global_step=1000000000 .* this run ends after 4"),
    ((STATE, "global_step"), 2.5, "global_step must be a whole number, got 2.5"),
    ((STATE, "epoch"), "x", "epoch must be a number, got 'x'"),
    ((STATE, "epoch"), 10**12, "epoch must be between 0 and global_step=2"),
    ((STATE, "epoch"), float("nan"), "epoch must be between 0 and global_step=2"),
    ((STATE, "log_history"), "x", "log_history must be a list"),
    ((STATE, "log_history", 0), 3, r"log_history\[0\] must be an object"),
    ((STATE, "total_flos"), None, "total_flos must be a number"),
    (CALLBACKS, [], "stateful_callbacks must be an object"),
    ((*CALLBACKS, "ragen2_run"), 3, "ragen2_run must be an object"),
    ((*CALLBACKS, "ragen2_health"), [], "ragen2_health must be an object"),
    ((*CALLBACKS, "ragen2_health", "health", "step"), "x", r"ragen2_health\.health\.step must be a whole number"),
    ((*CALLBACKS, "ragen2_health", "health", "history"), [{}], r"ragen2_health\.health\.history\[0\]\.\w+ is missing"),
    ((*CALLBACKS, "ragen2_health", "closes"), 1, r"ragen2_health\.closes must be true or false"),
    ((*CALLBACKS, "ragen2_costs", "seconds"), "x", r"ragen2_costs\.seconds must be a number"),
    ((*CALLBACKS, "ragen2_mutual_information", "ema"), 1, r"ragen2_mutual_information\.ema must be an object"),
    ((*CALLBACKS, "ragen2_mutual_information", "last_step"), "x", "last_step must be a whole number"),
    ((*CALLBACKS, "ragen2_mutual_information", "watch", "measurements"), [{"step": 1}], r"measurements\[0\]"),
    ((RANK,), [], "must be an object"),
    ((RANK, "layout"), "x", "layout must be an object"),
    ((RANK, "own", "step"), "x", "own.step must be a whole number"),
    ((RANK, "own", "buffered_inputs"), 3, "own.buffered_inputs must be a list"),
    ((RANK, "own", "micro_batches"), {}, r"own\.micro_batches\.\w+ is missing"),
    ((RANK, "own", "dynamic_sampling", "numbers"), ["x"], r"dynamic_sampling\.numbers\[0\] must be a whole number"),
    ((*SHARED, "filter", "reward_range"), [1.0], r"shared\.filter\.reward_range must be a list of 2"),
    ((*SHARED, "filter", "recent"), "x", r"shared\.filter\.recent must be an object"),
    ((*SHARED, "steps", "empty_streak"), True, r"shared\.steps\.empty_streak must be a whole number, got True"),
    ((*SHARED, "steps", "latest"), {1: 2.0}, r"a key of .*shared\.steps\.latest must be a text"),
    ((*SHARED, "prompts", "drawn"), None, r"shared\.prompts\.drawn must be a whole number"),
    ((*SHARED, "prompts", "posterior", "rows"), torch.tensor([99]), r"shared\.prompts cannot be loaded"),
    ((*SHARED, "prompts", "posterior", "evidence"), 3.0, r"posterior\.evidence must be a tensor"),
    ((POOL, 0, "rollout", "completion_ids"), "x", r"\[0\]\.rollout\.completion_ids must be a list"),
    ((POOL, 0, "unknown"), 1, r"\[0\] has a field 'unknown'"),
]


def made(policy_path, folder, **settings):
    chosen = {"snr_prompt_selection": True, "snr_dynamic_sampling_rounds": 1, "snr_strategy": "nonzero"}
    saving = {"max_steps": 4, "save_steps": 2, "save_strategy": "steps", "max_completion_length": 6}
    args = SNRFilteredGRPOConfig(**{**RUN, **saving, **chosen, "output_dir": str(folder), **settings})
    prompts = Dataset.from_dict({"prompt": [f"Go {number}" for number in range(8)]})
    trainer = SNRFilteredGRPOTrainer(
        policy_path, lambda completions, **kwargs: [float(len(text)) for text in completions], args, prompts
    )
    trainer.add_callback(CostCallback(trainer))
    trainer.add_callback(MutualInformationCallback(trainer, min_prompts=8))
    return trainer


@pytest.fixture(scope="module")
def whole(policy_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    made(policy_path, folder).train()
    return folder / "checkpoint-2"


@pytest.fixture
def checkpoint(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run" / whole.name)


def refused(policy_path, checkpoint, said, **settings):
    trainer = made(policy_path, checkpoint.parent, **settings)
    with pytest.raises(ValueError, match=said) as raised:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    message = str(raised.value)
    assert "\n" not in message and "allowed: " in message
    assert not [line for line in told_last(raised.value) if "goes on from" in line]
    return message


@pytest.mark.parametrize(("place", "value", "said"), WRONG, ids=[".".join(map(str, place)) for place, *_ in WRONG])
def test_a_field_of_another_form_is_a_line_that_names_file_and_field(place, value, said, checkpoint, policy_path):
    name, *keys = place
    path = checkpoint / name
    read = json.loads(path.read_text()) if path.suffix == ".json" else torch.load(path, weights_only=True)
    within = {"all": read}
    *way, last = ["all", *keys]
    for key in way:
        within = within[key]
    within[last] = value
    read = value if not keys else read
    path.write_text(json.dumps(read)) if path.suffix == ".json" else torch.save(read, path)
    (checkpoint / "snr_manifest.json").unlink()  # it lists the file sizes
    assert name in refused(policy_path, checkpoint, said)


@pytest.mark.parametrize("name", [RANK, POOL])
def test_an_archive_of_something_else_is_no_state(name, checkpoint, policy_path):
    (checkpoint / "snr_manifest.json").unlink()
    with zipfile.ZipFile(checkpoint / name, "w") as archive:
        archive.writestr("data.pkl", b"cos\nsystem\n(S'true'\ntR.")
    assert name in refused(policy_path, checkpoint, "cannot be read")


def test_a_run_that_ends_before_its_checkpoint_is_refused(checkpoint, policy_path):
    refused(policy_path, checkpoint, "this run ends after 1", max_steps=1)
