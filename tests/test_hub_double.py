"""The double of the Hub, asked by the real clients: what they write comes back, and its faults reach them."""

import json
from pathlib import Path

import pytest
from hub import hub_double as hub_double
from hub_messages import QUOTA
from hub_service import TOKEN

pytestmark = pytest.mark.slow

HELPERS = """
import json, sys, time
from pathlib import Path
from huggingface_hub import HfApi, HfFileSystem, ModelCard, hf_hub_download, metadata_update, snapshot_download

api = HfApi()
told = {}

def attempt(name, function, *args, **kwargs):
    started = time.monotonic()
    try:
        result = function(*args, **kwargs)
        told[name] = ["ok", str(result), time.monotonic() - started]
    except Exception as error:
        told[name] = [type(error).__name__, str(error), time.monotonic() - started]
"""


def told_by(hub, code, *args, **keywords):
    """Run a client; what it left in `told`."""
    done = hub.run(f"{HELPERS}\n{code}\nprint(json.dumps(told))", *args, **keywords)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_folder_comes_back_as_it_was_pushed(hub, tmp_path):
    folder = tmp_path / "folder"
    (folder / "diagnostics").mkdir(parents=True)
    (folder / "config.json").write_text('{"text": "é"}')
    (folder / "empty.txt").write_text("")
    (folder / "diagnostics" / "figure.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0binary")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 43_000)  # 11 MB
    (folder / "log.txt").write_text("long " * 2_200_000)  # 11 MB of text: large by its size
    told = told_by(
        hub,
        """
folder = Path(sys.argv[1])
told["name"] = api.whoami()["name"]
told["exists before"] = api.repo_exists("tester/run")
told["url"] = api.create_repo("run", private=True)
told["url again"] = api.create_repo("tester/run", exist_ok=True)
attempt("again", api.create_repo, "tester/run")
told["commit"] = api.upload_folder(repo_id="tester/run", folder_path=folder, commit_message="First").oid
api.upload_folder(repo_id="tester/run", folder_path=folder, commit_message="Nothing new")
(folder / "config.json").write_text("{}")
api.upload_folder(
    repo_id="tester/run", folder_path=folder, commit_message="Second", run_as_future=True, delete_patterns="*.txt",
    ignore_patterns="*.txt",
).result()
api.upload_file(repo_id="tester/run", path_or_fileobj=b"3", path_in_repo="deep/er/file.txt", commit_message="Third")
told["files"] = api.list_repo_files("tester/run")
told["exists"] = api.repo_exists("tester/run")
told["titles"] = [commit.title for commit in api.list_repo_commits("tester/run")]
told["first"] = snapshot_download("tester/run", revision=told["commit"])
told["last"] = snapshot_download("tester/run")
told["one"] = hf_hub_download("tester/run", "deep/er/file.txt", local_dir=folder.parent / "one")
told["info"] = api.model_info("tester/run", files_metadata=True).private
api.create_branch("tester/run", branch="side")
api.upload_file(repo_id="tester/run", path_or_fileobj=b"x", path_in_repo="x", revision="side", commit_message="Side")
told["refs"] = [branch.name for branch in api.list_repo_refs("tester/run").branches]
attempt("stale", api.upload_file, repo_id="tester/run", path_or_fileobj=b"y", path_in_repo="y",
        parent_commit=told["commit"])
""",
        str(folder),
    )
    assert told["name"] == "tester"
    assert (told["exists before"], told["exists"], told["info"]) == (False, True, True)
    assert told["url"] == told["url again"] == f"{hub.url}/tester/run"
    assert told["again"][0] == "HfHubHTTPError"
    assert "409" in told["again"][1]
    assert "You already created this model repo" in told["again"][1]
    repo = hub.repo("tester/run")
    assert repo.messages == ["initial commit", "First", "Second", "Third"] == told["titles"][::-1]
    assert set(told["files"]) == set(repo.files)
    assert set(repo.files) == {
        ".gitattributes",
        "config.json",
        "deep/er/file.txt",
        "diagnostics/figure.png",
        "model.safetensors",
    }
    first, last = Path(told["first"]), Path(told["last"])
    assert (first / "config.json").read_text() == '{"text": "é"}'
    assert (first / "log.txt").read_bytes() == (folder / "log.txt").read_bytes()
    assert (first / "empty.txt").read_bytes() == b""
    for path, content in repo.files.items():
        assert (last / path).read_bytes() == content
    for path in ("model.safetensors", "diagnostics/figure.png", "config.json"):
        assert repo.files[path] == (folder / path).read_bytes()
    assert Path(told["one"]).read_bytes() == b"3"
    assert told["refs"] == ["main", "side"]
    assert [commit.message for commit in repo.branches["side"]][-1] == "Side"
    assert told["stale"][0] == "HfHubHTTPError"
    assert "412" in told["stale"][1]
    large = {path for path, blob in repo.at(told["commit"]).files.items() if blob.lfs}
    assert large == {"model.safetensors", "diagnostics/figure.png", "log.txt"}
    assert len(hub.seen("PUT /storage/")) == 3  # nothing is uploaded twice
    assert not any(request.authorized for request in hub.seen("/storage/"))
    assert all(request.authorized for request in hub.seen("/api/"))


def test_cards_and_their_metrics_come_back_and_broken_ones_are_refused(hub):
    told = told_by(
        hub,
        r"""
from huggingface_hub import EvalResult, ModelCardData
api.create_repo("tester/card")
result = EvalResult(task_type="text-generation", dataset_type="frozen-lake", dataset_name="FrozenLake",
                    metric_type="success", metric_value=0.5, verified=False)
card = ModelCard("---\ntags:\n- ragen2\n---\n# Title\n")
card.data.model_name = "card"
card.data.eval_results = [result]
card.validate()
card.push_to_hub("tester/card", commit_message="Card")
told["loaded tags"] = ModelCard.load("tester/card").data.tags
result.metric_value = 0.75
metadata_update("tester/card", {"model_name": "card", "eval_results": [result]}, overwrite=True)
told["value"] = ModelCard.load("tester/card").data.eval_results[0].metric_value
told["listed"] = api.model_info("tester/card").model_index[0]["results"][0]["metrics"][0]["value"]
task = "model-index:\n- name: x\n  results:\n  - task: {type: t}\n    dataset: "
for name, text in {
    "yaml": "a: [1\nb: 2",
    "list": "- a\n- b",
    "tags": "tags: ragen2",
    "path": "base_model: /tmp/policy",
    "index": task + "{name: FrozenLake}",
    "dataset": task + "{name: FrozenLake, type: frozen lake}",
}.items():
    content = f"---\n{text}\n---\n# Title\n".encode()
    attempt(name, api.upload_file, repo_id="tester/card", path_or_fileobj=content, path_in_repo="README.md")
class Broken(ModelCard):
    def __init__(self): pass
    def __str__(self): return "---\na: [1\nb: 2\n---\n"
attempt("validate", Broken().validate)
""",
    )
    assert told["loaded tags"] == ["ragen2"]
    assert told["value"] == told["listed"] == 0.75
    refused = ("yaml", "list", "tags", "path", "index", "dataset", "validate")
    assert {name: told[name][0] for name in refused} == dict.fromkeys(refused, "ValueError")
    assert "YAML" in told["yaml"][1]
    assert "YAML" in told["validate"][1]
    assert '"tags" must be an array' in told["tags"][1]
    assert "/tmp/policy" in told["path"][1]
    assert '"model-index[0].results[0].dataset.type" is required' in told["index"][1]
    assert "frozen lake" in told["dataset"][1]
    assert hub.repo("tester/card").messages[1:] == ["Card", "Update metadata with huggingface_hub"]


def test_a_dataset_comes_back_and_is_replaced_by_the_next(hub):
    told = told_by(
        hub,
        """
from datasets import Dataset, DatasetDict, load_dataset
rows = {"prompt": ["left", "right"], "answer": [1.0, 2.0]}
Dataset.from_dict(rows).push_to_hub("tester/tasks", split="train")
told["rows"] = load_dataset("tester/tasks", split="train").to_dict() == rows
Dataset.from_dict({"prompt": ["up"], "answer": [3.0]}).push_to_hub("tester/tasks", split="train")
told["new rows"] = load_dataset("tester/tasks", split="train").to_dict()
DatasetDict({"test": Dataset.from_dict(rows)}).push_to_hub("tester/other", private=True)
told["other"] = load_dataset("tester/other")["test"].to_dict() == rows
""",
    )
    assert told == {"rows": True, "new rows": {"prompt": ["up"], "answer": [3.0]}, "other": True}
    assert hub.repo("tester/other", "dataset").private
    files = hub.repo("tester/tasks", "dataset").files
    assert set(files) == {".gitattributes", "README.md", "data/train-00000-of-00001.parquet"}


def test_a_commit_scheduler_pushes_what_was_written(hub, tmp_path):
    told_by(
        hub,
        """
from huggingface_hub import CommitScheduler
folder = Path(sys.argv[1])
scheduler = CommitScheduler(repo_id="tester/logs", folder_path=folder, repo_type="dataset", every=100)
with scheduler.lock:
    (folder / "rows.jsonl").write_text("{}\\n")
scheduler.trigger().result()
scheduler.stop()
""",
        str(tmp_path),
    )
    assert hub.repo("tester/logs", "dataset").files["rows.jsonl"] == b"{}\n"


FAULTS = """
def push(name, content=b"text", path="file.txt"):
    return api.upload_file(repo_id=f"tester/{name}", path_or_fileobj=content, path_in_repo=path)

for name in sys.argv[1:]:
    attempt(name, push, name, *([b"\\0", "a.bin"] if name in ("quota", "flaky") else []))
attempt("nowhere", api.model_info, "tester/nowhere")
attempt("push nowhere", push, "nowhere")
attempt("revision", api.model_info, "tester/there", revision="none")
attempt("file", hf_hub_download, "tester/there", "none.txt")
attempt("anonymous", HfApi(token=False).model_info, "tester/secret")
attempt("wrong token", HfApi(token="hf_wrong").model_info, "tester/there")
attempt("namespace", api.create_repo, "others/new")
attempt("read only", api.create_repo, "others/model", exist_ok=True)
attempt("push read only", api.upload_file, repo_id="others/model", path_or_fileobj=b"x", path_in_repo="x")
attempt("slow", api.model_info, "tester/slow", timeout=0.2)
attempt("cut", hf_hub_download, "tester/cut", "a.bin")
attempt("short", lambda: Path(hf_hub_download("tester/short", "a.txt")).read_text())
attempt("part", HfFileSystem().cat_file, "tester/short/a.txt", start=3, end=6)
attempt("refused", HfApi(endpoint="http://127.0.0.1:9").create_repo, "tester/new")
attempt("gateway", push, "gateway", b"# Title", "README.md")
"""


def test_every_fault_reaches_the_client_as_its_own_error(hub):
    pushed = ["unauthorized", "forbidden", "quota", "large", "limited", "broken", "lost", "dropped", "flaky"]
    for name in (*pushed, "there", "slow", "gateway"):
        hub.add_repo(f"tester/{name}")
    hub.add_repo("tester/secret", private=True)
    hub.add_repo("others/model")
    hub.add_repo("tester/cut", {"a.bin": bytes(1_000_000)})
    hub.add_repo("tester/short", {"a.txt": b"0123456789"})
    hub.fail("unauthorized/preupload", 401)
    hub.fail("forbidden/preupload", 403)
    hub.fail(r"quota\.git/info/lfs", 403, error=QUOTA)
    hub.fail("large/commit", 413)
    hub.fail("limited/commit", 429, headers={"RateLimit": '"api";r=0;t=55'})
    hub.fail("broken/commit", 500)
    hub.reset("lost/commit")
    hub.reset("dropped/commit", before=True)
    hub.fail("PUT /storage", 500, times=1)
    hub.slow("tester/slow", 5)
    hub.reset("GET /storage")
    hub.hang_up("GET .*a.txt", times=1)
    hub.fail("validate-yaml", 502, html=True)

    told = told_by(hub, FAULTS, *pushed)

    errors = {name: error for name, (error, _, _) in told.items()}
    assert errors == {
        "unauthorized": "HfHubHTTPError",
        "forbidden": "HfHubHTTPError",
        "quota": "HfHubHTTPError",
        "large": "HfHubHTTPError",
        "limited": "HfHubHTTPError",
        "broken": "HfHubHTTPError",
        "lost": "ReadError",
        "dropped": "ReadError",
        "flaky": "ok",
        "nowhere": "RepositoryNotFoundError",
        "push nowhere": "RepositoryNotFoundError",
        "revision": "RevisionNotFoundError",
        "file": "RemoteEntryNotFoundError",
        "anonymous": "RepositoryNotFoundError",
        "wrong token": "HfHubHTTPError",
        "namespace": "HfHubHTTPError",
        "read only": "ok",
        "push read only": "HfHubHTTPError",
        "slow": "ReadTimeout",
        "cut": "ReadError",  # a reset ends a download
        "short": "ok",  # an early end does not: it is asked for again
        "part": "ok",
        "refused": "ConnectError",
        "gateway": "JSONDecodeError",
    }
    said = {name: text for name, (_, text, _) in told.items()}
    assert QUOTA in said["quota"]
    assert "401" in said["unauthorized"]
    assert "413" in said["large"]
    assert "Retry after 55 seconds" in said["limited"]
    assert "500" in said["broken"]
    assert "don't have the rights to create a model under the namespace" in said["namespace"]
    assert len(hub.repo("tester/lost").messages) == 2  # the commit is there, only the client does not know
    assert len(hub.repo("tester/dropped").messages) == 1
    assert told["slow"][2] < 2
    assert said["short"] == "0123456789"
    assert [request.status for request in hub.seen("GET .*a.txt")] == [0, 200, 206]
    assert said["part"] == "b'345'"
    assert [request.status for request in hub.seen("PUT /storage")] == [500, 200]
    assert len(hub.seen("broken/commit")) == 1  # commits are not tried again


def test_a_closed_hub_refuses_connections_and_heals_no_more(hub):
    hub.fail("whoami", 500)
    hub.heal()
    assert told_by(hub, "attempt('whoami', api.whoami)")["whoami"][0] == "ok"
    hub.close()
    assert told_by(hub, "attempt('whoami', api.whoami)")["whoami"][0] == "ConnectError"


def test_no_setting_of_this_machine_reaches_the_client(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_a_real_one")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", "/nonexistent")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid:1")
    assert not {"HF_HUB_OFFLINE", "HF_HUB_CACHE", "HTTPS_PROXY"} & set(hub.environment)
    assert hub.environment["HF_TOKEN"] == TOKEN
