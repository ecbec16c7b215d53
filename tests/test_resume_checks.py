"""What a checkpoint brings is checked before a run goes on with it: each field of another form is a line."""

import json
import shutil
import zipfile

import pytest
import torch
from conftest import RUN, told_last
from datasets import Dataset

from ragen2_trl import CostCallback, MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer

STATE, OWN, POOL = "trainer_state.json", "snr_state_0.pt", "_mutual_information_pool.pt"
CALLBACKS = (STATE, "stateful_callbacks")
SHARED = (OWN, "shared")
WRONG = [  # file and keys, the new value, and what the line names
    ((STATE, "global_step"), -1, "global_step must be at least 0, got -1"),
    ((STATE, "global_step"), 10**9, "has done global_step=1000000000 .* this run ends after 4"),
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
    ((OWN,), [], "must be an object"),
    ((OWN, "layout"), "x", "layout must be an object"),
    ((OWN, "own", "step"), "x", "own.step must be a whole number"),
    ((OWN, "own", "buffered_inputs"), 3, "own.buffered_inputs must be a list"),
    ((OWN, "own", "micro_batches"), {}, r"own\.micro_batches\.\w+ is missing"),
    (
        (OWN, "own", "dynamic_sampling", "numbers"),
        ["x"],
        r"dynamic_sampling\.numbers\[0\] must be a whole number",
    ),
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


def make(policy_path, folder, **settings):
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
    make(policy_path, folder).train()
    return folder / "checkpoint-2"


@pytest.fixture
def checkpoint(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run" / whole.name)


def refused(policy_path, checkpoint, said, **settings):
    trainer = make(policy_path, checkpoint.parent, **settings)
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


@pytest.mark.parametrize("name", [OWN, POOL])
def test_an_archive_of_something_else_is_no_state(name, checkpoint, policy_path):
    (checkpoint / "snr_manifest.json").unlink()
    with zipfile.ZipFile(checkpoint / name, "w") as archive:
        archive.writestr("data.pkl", b"cos\nsystem\n(S'true'\ntR.")
    assert name in refused(policy_path, checkpoint, "cannot be read")


def test_a_run_that_ends_before_its_checkpoint_is_refused(checkpoint, policy_path):
    refused(policy_path, checkpoint, "this run ends after 1", max_steps=1)
