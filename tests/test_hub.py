"""What goes up to the Hub, and what becomes of a training whose uploads fail.

All of it against a fake, and once against the Hub itself, where a repository of one's own is named.
"""

import json
import logging
import os
import re
import shlex

import pytest
import torch
from cards import OURS, STOCK, TOKEN, make, read_card
from cards import without_figures_fixture as without_figures_fixture
from conftest import told_last
from fake_hub import REFUSED
from fake_hub import hub_fixture as hub_fixture
from huggingface_hub import HfApi, ModelCard, snapshot_download
from huggingface_hub.cli.hf import app as hf
from test_ppo import ppo_args
from test_train import arguments as of_recipe
from transformers import AutoModelForCausalLM, TrainerCallback

from ragen2_trl import EpisodeCallback, SNRFilteredPPOTrainer, cli
from ragen2_trl.cli import train
from ragen2_trl.envs import make_env
from ragen2_trl.record.run import read_run
from ragen2_trl.report.card import HEADING
from ragen2_trl.report.hub import publish_metrics

FILES = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "training_args.bin"}
FILES |= {"diagnostics/trainer_state.json", "diagnostics/run.json"}
SHORT = {"max_steps": 2, "save_steps": 1}  # two checkpoints
REPOSITORY = os.environ.get("RAGEN2_HUB_REPO")


def pushing(trainer_class, policy_path, folder, repo_id="tester/model", **overrides):
    """A trainer whose checkpoints go up, none of them left out because the one before is still going up."""
    settings = {"push_to_hub": True, "hub_model_id": repo_id, "hub_always_push": True, **SHORT, **overrides}
    return make(trainer_class, policy_path, folder, make_env("bandit"), **settings)


def warnings_in(caplog, *parts):
    """Warnings that name all of the parts."""
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [text for text in texts if all(part in text for part in parts)]


def test_a_hub_that_cannot_be_reached_ends_no_training(policy_path, tmp_path, caplog):
    """Nothing stands for the Hub here, and the machine is offline."""
    trainer = pushing(OURS, policy_path, tmp_path / "run", max_steps=1)
    assert warnings_in(caplog, "push_to_hub=True", "tester/model")
    trainer.train()
    assert trainer.state.global_step == 1 and (tmp_path / "run" / "checkpoint-1").is_dir()
    assert warnings_in(caplog, "hf upload")


@pytest.mark.slow
def test_each_upload_has_the_card_and_the_figures_of_its_step(hub, policy_path, tmp_path):
    class SlowUpload(TrainerCallback):
        """The first one ends when the second has been asked for."""

        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 2:
                hub.goes_on.set()

    trainer = pushing(OURS, policy_path, tmp_path / "run")
    trainer.add_callback(SlowUpload())
    hub.goes_on.clear()
    trainer.train()
    trainer.push_to_hub()
    assert hub.messages("tester/model")[-1] == "End of training"
    assert len(hub.uploads["tester/model"]) == 3
    for number, (_, files) in enumerate(hub.uploads["tester/model"], 1):
        assert files.keys() >= FILES
        card = files["README.md"].decode()
        assert card.count(HEADING) == 1
        figures = re.findall(r"!\[.+?\]\((.+?)\)", card)
        assert len(figures) >= 4 and set(figures) <= files.keys()
        if number > 1:
            assert "Training finished 2 steps" in card
    pictures = {path for path in hub.files("tester/model") if path.endswith((".png", ".svg"))}
    assert len(pictures) == 8
    assert "README.md" in hub.changed
    assert not pictures & hub.changed  # a picture that is drawn again while it goes up breaks a real upload
    for path in pictures | FILES:
        assert hub.files("tester/model")[path] == (tmp_path / "run" / path).read_bytes(), path


@pytest.mark.parametrize("trainer_class", [OURS, STOCK])
def test_nothing_private_goes_up(trainer_class, hub, policy_path, tmp_path, without_figures):
    folder, tokens = tmp_path / "run", {"token": TOKEN}
    trainer = pushing(
        trainer_class, policy_path, folder, hub_private_repo=True, hub_strategy="checkpoint", model_init_kwargs=tokens
    )
    trainer.add_callback(EpisodeCallback(trainer, every=1))
    trainer.train()
    trainer.push_to_hub()
    assert hub.private == {"tester/model"}
    assert any((folder / "_measurements").iterdir()) and any((folder / "_episodes").iterdir())
    uploaded = hub.files("tester/model")
    assert {*FILES, "last-checkpoint/training_args.bin"} <= uploaded.keys()
    assert not [path for path in uploaded if path.startswith(("_", "checkpoint-"))]
    assert not [path for path, content in uploaded.items() if TOKEN.encode() in content]
    assert not [path for path in folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert torch.load(folder / "training_args.bin", weights_only=False).hub_token is None
    assert (trainer.args.hub_token, tokens) == (TOKEN, {"token": TOKEN})
    (measurement, *_) = (folder / "_measurements").glob("measurement_*.json")
    prompts = json.loads(measurement.read_text())["prompts"]
    texts = "".join(content.decode() for path, content in uploaded.items() if path.endswith((".md", "run.json")))
    assert prompts and not any(prompt in texts for prompt in prompts)


def test_the_critic_stays_here_with_the_upload_of_the_policy(hub, policy_path, make_args, prompts, tmp_path):
    settings = {"push_to_hub": True, "hub_model_id": "tester/model", "hub_token": TOKEN, "max_steps": 1}
    args = ppo_args(make_args, save_strategy="steps", save_steps=1, **settings)
    trainer = SNRFilteredPPOTrainer(policy_path, lambda completions, **kwargs: [1.0] * len(completions), args, prompts)
    trainer.train()
    trainer.push_to_hub()
    assert any((tmp_path / "run" / "_critic").iterdir())
    assert "model.safetensors" in hub.files("tester/model")
    assert not [path for path in hub.files("tester/model") if "critic" in path]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer_class", "strategy", "held", "settings"),
    [
        (OURS, "checkpoint", "last-checkpoint/snr_state_0.pt", {}),
        (STOCK, "all_checkpoints", "checkpoint-1/_mutual_information_pool.pt", {"min_prompts": 4}),
        (OURS, "every_save", None, {}),
        (STOCK, "checkpoint", None, {}),
    ],
)
def test_checkpoints_with_texts_in_them_go_up_only_with_a_warning(
    trainer_class, strategy, held, settings, hub, policy_path, tmp_path, without_figures, caplog
):
    trainer = pushing(trainer_class, policy_path, tmp_path / "run", hub_strategy=strategy, **settings)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    texts = [path for path in hub.files("tester/model") if "snr_state" in path or "_pool" in path]
    warned = warnings_in(caplog, f"hub_strategy={strategy!r}", "tester/model", "every_save")
    assert len(warned) == (held is not None)
    if held is None:
        assert texts == []
    else:
        # What a callback adds to a checkpoint may come after its upload has begun.
        assert held in texts or (trainer_class is STOCK and (tmp_path / "run" / held).is_file())
        assert held.split("/")[-1].replace("_0", "_*") in warned[0]


def test_a_failed_upload_of_a_checkpoint_is_a_warning_and_the_next_one_brings_all(
    hub, policy_path, tmp_path, without_figures, caplog
):
    hub.refusals["tester/model"] = 1
    trainer = pushing(OURS, policy_path, tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 2
    assert len(warnings_in(caplog, "OSError", REFUSED, str(tmp_path / "run"), "hf upload tester/model")) == 1
    assert hub.messages("tester/model") == ["Training in progress, step 2"]
    assert hub.files("tester/model").keys() >= FILES
    assert read_run(tmp_path / "run").status == "finished 2 steps"


def test_an_upload_that_was_asked_for_raises_and_the_command_that_it_names_works(
    hub, policy_path, tmp_path, without_figures
):
    hub.refusals["tester/model"] = 3
    trainer = pushing(OURS, policy_path, tmp_path / "a run", hub_private_repo=True)
    trainer.train()
    with pytest.raises(OSError, match=REFUSED) as error:
        trainer.push_to_hub()
    assert hub.messages("tester/model") == []
    errors = told_last(error.value)
    (said,) = [text for text in errors if REFUSED in text]
    assert str(tmp_path / "a run") in said
    program, *command = shlex.split(said[said.index("hf upload") :])
    assert program == "hf"
    del hub.uploads["tester/model"]  # it has to be made again, and again private
    hub.private.clear()
    hf(command, standalone_mode=False)
    assert hub.private == {"tester/model"}
    assert hub.files("tester/model").keys() >= FILES
    assert not [path for path in hub.files("tester/model") if path.startswith(("_", "checkpoint-"))]
    assert hub.files("tester/model")["README.md"].decode() == read_card(tmp_path / "a run")


def test_what_others_wrote_is_named_before_it_is_replaced(hub, policy_path, tmp_path, without_figures, caplog):
    hub.add("tester/model", "Mine", {"README.md": b"# Mine", "notes.txt": b"mine too"})
    with caplog.at_level(logging.WARNING):
        pushing(OURS, policy_path, tmp_path / "run").train()
    assert len(warnings_in(caplog, "tester/model", "README.md, notes.txt")) == 1
    assert hub.files("tester/model")["notes.txt"] == b"mine too"
    assert HEADING in hub.files("tester/model")["README.md"].decode()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        pushing(OURS, policy_path, tmp_path / "run").train()  # now they are a trainer's
    assert warnings_in(caplog, "README.md") == []


def test_published_metrics_replace_earlier_ones_beside_those_of_training(hub, policy_path, tmp_path, without_figures):
    trainer = pushing(OURS, policy_path, tmp_path / "run")
    trainer.train()
    trainer.push_to_hub()
    for success in (0.25, 0.75):
        metrics = {"success": success, "return": 0.5, "pass@2": 0.8, "pass@2_ci_low": 0}
        publish_metrics("tester/model", "bandit", metrics)
    results = ModelCard.load("tester/model").data.eval_results
    held_out = [(result.metric_type, result.metric_value) for result in results if result.dataset_split == "test"]
    assert held_out == [("success_rate", 0.75), ("mean_return", 0.5), ("pass@2", 0.8)]
    assert "retrieval_accuracy" in [result.metric_type for result in results if result.dataset_split == "train"]
    assert {result.verified for result in results} == {False}
    assert json.loads(hub.files("tester/model")["diagnostics/evaluation_bandit.json"])["success"] == 0.75
    with pytest.raises(ValueError, match=r"'success'.*got \['reward'\]"):
        publish_metrics("tester/model", "bandit", {"reward": 1.0})


def test_an_evaluation_goes_to_the_card_of_its_model(hub, capsys):
    hub.add("tester/model", "Mine", {"README.md": b"---\n---\n# Mine"})
    command = ["evaluate", "--model", "random", "--num_prompts", "4", "--num_samples", "2"]
    cli.main([*command, "--push_to_hub", "tester/model"])
    card = ModelCard.load("tester/model")
    measured = json.loads(hub.files("tester/model")["diagnostics/evaluation_frozen_lake.json"])
    (success,) = [result.metric_value for result in card.data.eval_results if result.metric_type == "success_rate"]
    assert success == pytest.approx(measured["success"], abs=1e-6) and "# Mine" in card.text
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--push_to_hub", "no such/name"])
    assert ended.value.code == 2 and "no such/name" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_line_uploads_what_it_trained(hub, tmp_path, without_figures):
    options = {"push_to_hub": "true", "hub_model_id": "tester/x", "hub_token": TOKEN, "max_steps": 2, "save_steps": 1}
    train.main(of_recipe(tmp_path / "run", **options, eval_prompts=4, eval_samples=2, eval_every=0))
    files = hub.files("tester/x")
    assert {*FILES, "log_history.json", "summary.json", "evaluation_after.json"} <= files.keys()
    data = ModelCard.load("tester/x").data
    success = [result.metric_value for result in data.eval_results if result.dataset_split == "test"]
    assert success == [pytest.approx(json.loads(files["evaluation_after.json"])["success"], abs=1e-6)]
    assert {"ragen2", "snr-filter", "trl"} <= set(data.tags)


@pytest.mark.slow
def test_the_command_line_ends_with_how_to_upload_what_the_hub_refused(hub, tmp_path, without_figures):
    """In place of a traceback through two libraries."""
    hub.refusals["tester/x"] = 9
    options = {"push_to_hub": "true", "hub_model_id": "tester/x", "hub_token": TOKEN, "max_steps": 1}
    with pytest.raises(SystemExit) as ended:
        train.main(of_recipe(tmp_path / "run", **options, eval_every=0))
    told = str(ended.value.code)
    assert REFUSED in told and "hf upload tester/x" in told and TOKEN not in told
    assert ended.value.__suppress_context__
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left >= {"model.safetensors", "log_history.json", "summary.json"}


@pytest.mark.skipif(
    REPOSITORY is None,
    reason="to the Hub: HF_HUB_OFFLINE=0 HF_TOKEN=hf_... RAGEN2_HUB_REPO=me/scratch pytest tests/test_hub.py",
)
def test_a_run_comes_back_from_the_hub_itself(policy_path, tmp_path, without_figures):
    """Leaves the private repository behind."""
    trainer = pushing(OURS, policy_path, tmp_path / "run", REPOSITORY, hub_token=None, hub_private_repo=True)
    trainer.train()
    trainer.push_to_hub()
    publish_metrics(REPOSITORY, "bandit", {"success": 0.75})
    files = HfApi().list_repo_files(REPOSITORY)
    assert {*FILES, "diagnostics/evaluation_bandit.json"} <= set(files)
    assert not [path for path in files if path.startswith(("_", "checkpoint-"))]
    clone = snapshot_download(REPOSITORY, local_dir=tmp_path / "clone")
    trained = trainer.model.state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(clone).state_dict().items():
        assert torch.equal(value, trained[name])
    assert read_run(tmp_path / "clone").status == "finished 2 steps"
    listed = HfApi().model_info(REPOSITORY).model_index[0]["results"]  # as the Hub has read it
    assert {"retrieval_accuracy", "success_rate"} <= {m["type"] for result in listed for m in result["metrics"]}
