"""Trainings and data sets on the Hub, end to end against its double, in good times and in bad."""

import json
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hub import Hub
from hub_messages import QUOTA
from hub_repos import card_metadata
from hub_service import TOKEN

from ragen2_trl.reporting.card import HEADING
from ragen2_trl.reporting.hub import publish_metrics
from ragen2_trl.reporting.run import read_run

pytestmark = pytest.mark.slow

SCENARIOS = Path(__file__).with_name("hub_scenarios.py")
RECIPE = Path(__file__).parents[1] / "recipes" / "frozen_lake_tiny.yaml"
ONLINE = {"HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}
FILES = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "training_args.bin"}


class Told:
    """What scenarios came to: `[name]` is their answer, `log[name]` what they logged."""

    def __init__(self, hub, folder, policy_path, *names):
        done = hub.run(SCENARIOS, str(folder), policy_path, *names, environment=ONLINE)
        assert done.returncode == 0, done.stderr[-4000:]
        assert TOKEN not in done.stdout + done.stderr
        self.folder = folder
        self.answers = json.loads(done.stdout.splitlines()[-1])
        parts = re.split(r"^--- (\w+)$", done.stderr, flags=re.MULTILINE)
        self.log = dict(zip(parts[1::2], parts[2::2], strict=True))

    def __getitem__(self, name):
        return self.answers[name]

    def files(self, name):
        return {str(path.relative_to(self.folder / name)): path for path in (self.folder / name).rglob("*")}


NAMES = ("tasks", "healthy", "stock", "checkpoints", "pooled")
NAMES += ("flaky", "dropped", "full", "slow", "foreign", "forbidden")


@pytest.fixture(scope="module")
def world(policy_path, tmp_path_factory):
    """(Hub, what came of the scenarios); all in one process, because the imports of one take as long as they do."""
    folder = tmp_path_factory.mktemp("world")
    with Hub(folder / "hf_home") as hub:
        hub.add_repo("tester/foreign", {"README.md": b"# Mine", "notes.txt": b"mine too"})
        hub.fail("tester/flaky/commit", 500, times=1)
        hub.reset("tester/dropped/commit", times=1)
        hub.fail("tester/full/commit", 403, error=QUOTA)
        hub.slow("tester/slow/preupload", 1.0)
        told = Told(hub, folder, policy_path, *NAMES)
        hub.heal()
        yield hub, told


def test_what_comes_back_from_the_hub_is_the_trained_model_with_its_metrics(world):
    _, told = world
    healthy = told["healthy"]
    assert healthy["same weights"]
    assert healthy["same ids"]
    results = {result["metric_type"]: result for result in healthy["clone"]}
    row = healthy["rows"][-1]
    assert results["retrieval_accuracy"]["metric_value"] == round(row["mi/first_turn/retrieval_accuracy"], 6)
    assert results["mutual_information"]["metric_value"] == round(row["mi/first_turn/mi_seq"], 6)
    assert {"success_rate", "mean_reward", "retrieval_chance"} <= results.keys()
    for result in results.values():
        assert result["verified"] is False
        assert result["dataset_type"] == "tester/tasks"
        assert result["source_url"].endswith("tester/healthy/blob/main/diagnostics/trainer_state.json")
    clone = read_run(told.folder / "clone")
    assert clone.status == "finished 4 steps"
    assert [row["reward"] for row in clone.rows] == [row["reward"] for row in healthy["rows"]]


def test_every_checkpoint_is_pushed_with_its_own_card_and_figures(world):
    hub, _ = world
    history = hub.repo("tester/healthy").branches["main"]
    cards = {
        commit.message: commit.files["README.md"].content.decode()
        for commit in history
        if commit.message.startswith(("Training", "End"))
    }
    messages = ["Training in progress, step 2", "Training in progress, step 4", "End of training"]
    if messages[1] in cards:
        assert "unfinished: at step 2 of 4" in cards[messages[0]]
        assert "Training finished 4 steps" in cards[messages[1]]
    else:  # on a slow machine the first upload still reads when the next is due, takes its files and leaves nothing
        messages.remove("Training in progress, step 4")
    assert list(cards) == messages
    assert "Training finished 4 steps" in cards[messages[-1]]
    for commit in history[1:]:
        card = commit.files["README.md"].content.decode()
        figures = re.findall(r"!\[.+?\]\((.+?)\)", card)
        assert len(figures) == 8
        assert set(figures) <= set(commit.files)
        assert card.count(HEADING) == 1


def test_uploads_hold_no_measurement_and_no_token(world):
    hub, told = world
    contents = [
        blob for repo in hub.repos.values() for commit in repo.branches["main"] for blob in commit.files.items()
    ]
    assert not [path for path, _ in contents if "measurement" in path]
    assert not [path for path, blob in contents if TOKEN.encode() in blob.content]
    on_disk = [path for path in told.folder.rglob("*") if path.is_file()]
    assert any("_measurements" in path.parts for path in on_disk)
    assert not [path for path in on_disk if TOKEN.encode() in path.read_bytes()]


def test_a_token_that_only_the_arguments_know_pushes_and_stays_private(world):
    hub, told = world
    assert told["stock"] == "ok"
    repo = hub.repo("tester/stock")
    assert repo.private
    assert {*FILES, "last-checkpoint/training_args.bin", "diagnostics/trainer_state.json"} <= repo.files.keys()
    assert {"ragen2", "trl", "grpo"} <= set(card_metadata(repo.files["README.md"].decode())["tags"])
    saved = torch.load(told.folder / "stock" / "training_args.bin", weights_only=False)
    assert saved.hub_token is None


@pytest.mark.parametrize(
    ("name", "held", "texts"),
    [
        ("checkpoints", "last-checkpoint/snr_state_0.pt", "snr_state_*.pt"),
        ("pooled", "checkpoint-1/_mutual_information_pool.pt", "_mutual_information_pool.pt"),
    ],
)
def test_checkpoints_with_texts_in_them_go_up_only_with_a_warning(name, held, texts, world):
    hub, told = world
    warning = f"uploads checkpoints to tester/{name}: {texts} in them holds prompts and completions"
    assert told[name] == "ok"
    assert held in hub.repo(f"tester/{name}").files
    assert told.log[name].count(warning) == 1


@pytest.mark.parametrize("name", ["healthy", "stock"])  # every_save, and a trainer that keeps no texts
def test_checkpoints_without_texts_go_up_without_a_warning(name, world):
    hub, told = world
    assert "word by word" not in told.log[name]
    assert not [path for path in hub.repo(f"tester/{name}").files if "snr_state" in path or "_pool" in path]


def test_logged_completions_go_to_their_own_repository(world):
    hub, told = world
    assert told["healthy"]["logs"] == 4 * 8
    files = hub.repo("tester/logs", "dataset").files
    assert "TRL" in files["README.md"].decode()


def test_tasks_come_back_as_the_environment_made_them_with_a_card_that_explains_them(world):
    hub, told = world
    assert told["tasks"]["same"] == {"train": True, "test": True}
    assert told["tasks"]["url"].endswith("/datasets/tester/tasks")
    assert told["tasks"]["again"] == 4
    card = hub.repo("tester/tasks", "dataset").files["README.md"].decode()
    data = card_metadata(card)
    assert data["license"] == "apache-2.0"
    assert data["task_categories"] == ["reinforcement-learning"]
    assert [split["num_examples"] for split in data["dataset_info"]["splits"]] == [4, 3]
    for part in (
        "# frozen_lake tasks",
        "## Rules",
        "4 of the split `train`",
        "with seed 0",
        "arxiv.org/abs/2604.06268",
    ):
        assert card.count(part) == 1, part
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    assert 'load_dataset("tester/tasks", split="train")' in code
    compile(code, "card", "exec")


def test_published_metrics_replace_earlier_ones_beside_those_of_training(world):
    hub, told = world
    index = told["healthy"]["index"]
    held_out = [[metric, value] for metric, split, value in index if split == "test"]
    assert held_out == [["success_rate", 0.75], ["mean_return", 0.5], ["pass@2", 0.8]]
    assert ["retrieval_accuracy", "train"] in [entry[:2] for entry in index]
    assert set(told["healthy"]["verified"]) == {False}
    evidence = hub.repo("tester/healthy").files["diagnostics/evaluation_bandit.json"]
    assert json.loads(evidence)["success"] == 0.75
    with pytest.raises(ValueError, match=r"metrics must hold 'success'.*got \['reward'\]"):
        publish_metrics("tester/healthy", "bandit", {"reward": 1.0})


def test_a_failed_push_of_a_checkpoint_is_a_warning_and_the_next_one_brings_all(world):
    hub, told = world
    assert told["flaky"] == 2
    log = told.log["flaky"]
    assert log.count("Upload to the Hub failed with HfHubHTTPError: Server error '500 Internal Server Error'") == 1
    assert log.count("Training goes on.") == 1
    assert f"Everything is in {told.folder / 'flaky'}" in log
    assert hub.repo("tester/flaky").messages == ["initial commit", "Training in progress, step 2"]
    assert hub.repo("tester/flaky").files.keys() >= FILES
    assert read_run(told.folder / "flaky").status == "finished 2 steps"


def test_a_connection_that_breaks_after_the_commit_costs_nothing_at_all(world):
    hub, told = world
    assert told["dropped"] == 2
    assert told.log["dropped"].count("Upload to the Hub failed with ReadError") == 1
    messages = hub.repo("tester/dropped").messages
    assert messages == ["initial commit", "Training in progress, step 1", "Training in progress, step 2"]


def test_a_full_account_costs_nothing_but_the_upload_and_the_retry_command_works(world):
    hub, told = world
    assert told["full"] == [2, "HfHubHTTPError"]
    log = told.log["full"]
    assert log.count("Upload to the Hub failed with HfHubHTTPError: 403 Forbidden") == 3  # two checkpoints, the end
    assert log.count(QUOTA) >= 3
    assert log.count("ERROR ragen2_trl.callbacks.run_record [RANK 0] Upload") == 1
    assert told.files("full").keys() >= FILES
    (command,) = set(re.findall(r"To upload it, .*?: (hf upload .*)", log))
    del hub.repos["model", "tester/full"]  # it has to be made anew, and again private
    arguments = shlex.split(command)
    program = Path(sys.executable).with_name("hf")
    done = subprocess.run(
        [program, *arguments[1:]], env=hub.environment | ONLINE, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    repo = hub.repo("tester/full")
    assert repo.private
    assert repo.files["README.md"] == (told.folder / "full" / "README.md").read_bytes()
    assert repo.files.keys() >= FILES
    assert not [path for path in repo.files if path.startswith(("_", "checkpoint-"))]


def test_figures_that_change_during_a_slow_upload_do_not_break_it(world):
    hub, told = world
    assert told["slow"] == "ok"
    assert "failed" not in told.log["slow"]
    files = hub.repo("tester/slow").files
    pictures = {path for path in files if path.endswith((".png", ".svg"))}
    assert len(pictures) == 16
    for path in {*pictures, "README.md", "diagnostics/trainer_state.json"}:
        assert files[path] == (told.folder / "slow" / path).read_bytes(), path
    assert "Training finished 2 steps" in files["README.md"].decode()


def test_a_repository_of_someone_else_is_spoken_of_before_it_is_written_to(world):
    hub, told = world
    warning = "tester/foreign on the Hub holds README.md, notes.txt, which no trainer has written"
    assert told.log["foreign"].count(warning) == 1
    assert all("which no trainer has written" not in log for name, log in told.log.items() if name != "foreign")
    repo = hub.repo("tester/foreign")
    assert repo.files["notes.txt"] == b"mine too"
    assert HEADING in repo.files["README.md"].decode()
    assert repo.branches["main"][1].files["README.md"].content == b"# Mine"


def test_a_namespace_of_others_is_refused_before_training(world):
    _, told = world
    name, message = told["forbidden"]
    assert name == "HfHubHTTPError"
    assert 'create a model under the namespace "others"' in message
    assert not (told.folder / "forbidden").exists()


@pytest.mark.slow
def test_a_hub_that_goes_away_for_good_costs_nothing_but_the_upload(hub, policy_path, tmp_path):
    done = threading.Event()

    def close_when_asked():
        while not (tmp_path / "close").exists() and not done.wait(0.05):
            pass
        hub.close()

    closing = threading.Thread(target=close_when_asked)
    closing.start()
    try:
        told = Told(hub, tmp_path, policy_path, "offline")
    finally:
        done.set()
        closing.join()
    assert told["offline"] == [4, "ConnectError"]
    assert "Upload to the Hub failed with ConnectError" in told.log["offline"]
    assert "hf upload tester/offline" in told.log["offline"]
    assert told.files("offline").keys() >= FILES
    assert read_run(tmp_path / "offline").status == "finished 4 steps"


@pytest.mark.slow
def test_the_command_line_pushes_what_it_trained(hub, tmp_path):
    run = tmp_path / "run"
    small = {
        "num_prompts": 8,
        "eval_prompts": 4,
        "eval_samples": 2,
        "eval_every": 0,
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "output_dir": str(run),
        "push_to_hub": "true",
        "hub_model_id": "tester/x",
        "save_steps": 1,
    }
    options = [str(part) for name, value in small.items() for part in (f"--{name}", value)]
    code = f"from ragen2_trl.cli import train; train.main({['--config', str(RECIPE), *options]!r})"
    done = hub.run(code, environment=ONLINE)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    files = hub.repo("tester/x").files
    assert {*FILES, "log_history.json", "summary.json", "evaluation_after.json"} <= files.keys()
    data = card_metadata(files["README.md"].decode())
    after = json.loads(files["evaluation_after.json"])
    (held_out,) = [
        metric["value"]
        for result in data["model-index"][0]["results"]
        for metric in result["metrics"]
        if metric["name"] == "Held-out success rate"
    ]
    assert held_out == pytest.approx(after["success"], abs=1e-6)
    assert {"ragen2", "snr-filter", "trl"} <= set(data["tags"])
