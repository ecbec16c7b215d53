"""Repositories of the Hub's double: files, commits, and the cards that the Hub would refuse."""

import datetime
import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from hub_messages import HubError

LFS_SIZE = 10_000_000  # bytes
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".parquet", ".arrow", ".npz", ".zip", ".gz", ".gguf")
GITATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()


@dataclass(frozen=True)
class Blob:
    content: bytes
    lfs: bool = False

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n"
        return text.encode()

    @cached_property
    def oid(self) -> str:
        """Git's name of the file, or of its pointer where the file itself is in large file storage."""
        stored = self.pointer if self.lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()

    @property
    def lfs_info(self) -> dict[str, Any] | None:
        if not self.lfs:
            return None
        # Listings of a tree call it oid, information on a repository calls it sha256.
        return {"oid": self.sha256, "sha256": self.sha256, "size": len(self.content), "pointerSize": len(self.pointer)}


@dataclass(frozen=True)
class Commit:
    oid: str
    message: str
    description: str
    date: str
    files: dict[str, Blob]


@dataclass
class Repo:
    """A repository. `type` is `model`, `dataset` or `space`; `branches` maps a name to its commits, oldest first."""

    id: str
    type: str = "model"
    private: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, bytes]:
        """Content of every file on `main`."""
        return {path: blob.content for path, blob in self.at("main").files.items()}

    @property
    def messages(self) -> list[str]:
        """Messages of the commits on `main`, oldest first."""
        return [commit.message for commit in self.branches["main"]]

    def commit(self, files: dict[str, Blob], message: str, description: str = "", branch: str = "main") -> Commit:
        """Append a commit whose tree is exactly `files`."""
        past = self.branches.setdefault(branch, [])
        names = sorted((path, blob.oid) for path, blob in files.items())
        oid = hashlib.sha1(repr((self.type, self.id, [c.oid for c in past], message, names)).encode()).hexdigest()
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        past.append(Commit(oid, message, description, date, files))
        return past[-1]

    def history(self, revision: str) -> list[Commit]:
        """Commits up to `revision`, a branch or the name of a commit; oldest first."""
        if revision in self.branches:
            return self.branches[revision]
        for commits in self.branches.values():
            for index, commit in enumerate(commits):
                if commit.oid == revision:
                    return commits[: index + 1]
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def at(self, revision: str) -> Commit:
        return self.history(revision)[-1]


def is_large(path: str, size: int, sample: bytes) -> bool:
    """Whether a file goes to large file storage: by its name, its size in bytes, or because it is binary."""
    return size > 0 and (path.endswith(LFS_SUFFIXES) or size > LFS_SIZE or b"\0" in sample)


def tree_entries(commit: Commit, expand: bool) -> list[dict[str, Any]]:
    """Every file and folder of a commit, as the Hub lists them."""
    last = {"lastCommit": {"id": commit.oid, "title": commit.message, "date": commit.date}} if expand else {}
    folders = {str(parent) for path in commit.files for parent in Path(path).parents} - {"."}
    entries = [{"type": "directory", "path": name, "oid": hash_of(name), "size": 0, **last} for name in folders]
    for path, blob in commit.files.items():
        lfs = {"lfs": blob.lfs_info} if blob.lfs else {}
        entries.append({"type": "file", "path": path, "oid": blob.oid, "size": len(blob.content), **lfs, **last})
    return sorted(entries, key=lambda entry: str(entry["path"]))


def hash_of(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def card_metadata(text: str) -> Any:
    """The YAML block at the top of a card; None without one. Raises `yaml.YAMLError`."""
    block = re.match(r"\s*---[\r\n]+([\S\s]*?)[\r\n]+---(?:[\r\n]|$)", text)
    return yaml.safe_load(block.group(1)) if block else None


def card_errors(text: str) -> list[str]:
    """What the Hub's validation refuses in a card, as far as cards of trainers can run into it."""
    try:
        data = card_metadata(text)
    except yaml.YAMLError as error:
        return [f"YAML parse error: {error}"]
    if data is None:
        return []
    if not isinstance(data, dict):
        return ["YAML metadata must be an object"]
    errors = [
        f'"{key}" must be an array' for key in ("tags", "model-index") if not isinstance(data.get(key, []), list)
    ]
    for key, kind in (("base_model", "model"), ("datasets", "dataset")):
        values = data.get(key) or []
        for value in values if isinstance(values, list) else [values]:
            if not re.fullmatch(r"(?:[\w.-]+/)?[\w.-]+", str(value)):
                errors.append(
                    f'"{key}" with value "{value}" is not valid. Use a {kind} id from https://hf.co/{kind}s.'
                )
    return errors or model_index_errors(data.get("model-index", []))


def model_index_errors(model_index: list[Any]) -> list[str]:
    errors = []
    for i, model in enumerate(model_index):
        needed = {"name": model.get("name")}
        for j, result in enumerate(model.get("results") or []):
            at = f"results[{j}]"
            needed |= {f"{at}.task.type": (result.get("task") or {}).get("type")}
            dataset = result.get("dataset") or {}
            needed |= {f"{at}.dataset.{key}": dataset.get(key) for key in ("name", "type")}
            for k, metric in enumerate(result.get("metrics") or []):
                needed |= {f"{at}.metrics[{k}].{key}": metric.get(key) for key in ("type", "value")}
            if dataset.get("type") and not re.fullmatch(r"(?:[\w-]+/)?[\w.-]+", str(dataset["type"])):
                errors.append(
                    f'"model-index[{i}].{at}.dataset.type" with value "{dataset["type"]}" fails to match the required '
                    r"pattern: /^(?:[\w-]+\/)?[\w-.]+$/"
                )
        errors += [f'"model-index[{i}].{path}" is required' for path, value in needed.items() if value is None]
    return errors
