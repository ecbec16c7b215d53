"""A fake of the Hub: what transformers, huggingface_hub and we would upload through `HfApi` is kept in memory."""

import threading
from pathlib import Path

import pytest
from huggingface_hub import HfApi, RepoUrl, repocard
from huggingface_hub.utils import filter_repo_objects

from ragen2_trl.callbacks import run_record

REFUSED = "403 Forbidden: private storage limit reached"


class FakeHub:
    """Repositories by their id, models and data sets alike.

    Attributes:
        uploads: (message, all files of the repository after it) of each upload.
        private: Repositories that were made private.
        refusals: How many of the next uploads are refused.
        goes_on: Cleared, it holds up uploads of folders between their first look at the files and their second.
        changed: Files that were not the same in both looks, which a real upload of a picture does not survive.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.uploads: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.private: set[str] = set()
        self.refusals: dict[str, int] = {}
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.changed: set[str] = set()

    def files(self, repo_id: str) -> dict[str, bytes]:
        return self.uploads[repo_id][-1][1] if self.uploads[repo_id] else {}

    def messages(self, repo_id: str) -> list[str]:
        return [message for message, _ in self.uploads[repo_id]]

    def add(self, repo_id: str, message: str, files: dict[str, bytes]) -> str:
        if self.refusals.get(repo_id, 0) > 0:
            self.refusals[repo_id] -= 1
            raise OSError(REFUSED)  # as HfHubHTTPError is
        self.uploads.setdefault(repo_id, [])
        self.uploads[repo_id].append((message, self.files(repo_id) | files))
        return f"https://huggingface.co/{repo_id}"

    # In place of methods and functions of huggingface_hub

    def create_repo(self, repo_id, *, private=None, **kwargs):
        repo_id = repo_id if "/" in repo_id else f"me/{repo_id}"
        if repo_id not in self.uploads:
            self.uploads[repo_id] = []
            self.private |= {repo_id} if private else set()
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self, api, *, repo_id, folder_path, run_as_future=False, **kwargs):
        def upload() -> str:
            paths = [path.relative_to(folder_path) for path in Path(folder_path).rglob("*") if path.is_file()]
            chosen = filter_repo_objects(map(str, paths), ignore_patterns=kwargs.get("ignore_patterns"))
            files = {name: Path(folder_path, name).read_bytes() for name in chosen}
            self.goes_on.wait(timeout=60)
            self.changed |= {
                name for name, content in files.items() if Path(folder_path, name).read_bytes() != content
            }
            inside = Path(kwargs.get("path_in_repo") or ".")
            named = {(inside / name).as_posix(): content for name, content in files.items()}
            return self.add(repo_id, kwargs.get("commit_message") or "", named)

        return api.run_as_future(upload) if run_as_future else upload()

    def upload_file(self, *, repo_id, path_or_fileobj, path_in_repo, commit_message="", **kwargs):
        given = path_or_fileobj
        content = given if isinstance(given, bytes) else Path(given).read_bytes()
        return self.add(repo_id, commit_message, {path_in_repo: content})

    def list_repo_files(self, repo_id, **kwargs):
        return list(self.files(repo_id))

    def hf_hub_download(self, repo_id, filename, **kwargs):
        path = self.folder / repo_id / filename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.files(repo_id)[filename])
        return str(path)


@pytest.fixture(name="hub")
def hub_fixture(monkeypatch, tmp_path):
    fake = FakeHub(tmp_path / "downloads")
    monkeypatch.setattr(HfApi, "create_repo", lambda api, repo_id, **kwargs: fake.create_repo(repo_id, **kwargs))
    monkeypatch.setattr(HfApi, "upload_folder", lambda api, **kwargs: fake.upload_folder(api, **kwargs))
    monkeypatch.setattr(HfApi, "upload_file", lambda api, **kwargs: fake.upload_file(**kwargs))
    monkeypatch.setattr(run_record, "list_repo_files", fake.list_repo_files)
    for module in (run_record, repocard):
        monkeypatch.setattr(module, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(repocard, "upload_file", fake.upload_file)
    monkeypatch.setattr(repocard.RepoCard, "validate", lambda card, **kwargs: None)
    return fake
