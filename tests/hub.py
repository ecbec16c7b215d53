"""A double of the Hugging Face Hub for tests: an HTTP server that the real clients talk to through `HF_ENDPOINT`.

It speaks what huggingface_hub, transformers, trl and datasets need to create repositories, to push and to load back,
keeps everything in memory, and answers wrongly when a test asks for it (`Hub.fail`, `slow`, `reset`, `hang_up`). Left
out: Xet, multipart uploads, pull requests, tags, discussions, `.gitignore`; a path nobody wrote here answers 501.

    def test_it(hub):
        hub.fail("POST .*/commit/", status=500, times=1)
        done = hub.run("from huggingface_hub import create_repo; create_repo('tester/model')")
        assert done.returncode == 0 and hub.repo("tester/model").messages == ["initial commit"]

huggingface_hub reads its environment when it is imported, therefore clients run in processes of their own.
"""

import base64
import datetime
import hashlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml

TOKEN = "hf_test_token_never_in_logs"
USER = "tester"
ORGANIZATION = "team"

QUOTA = "Private repository storage limit reached, please upgrade your plan to increase your private storage limit."
MESSAGES = {
    400: "Bad request",
    401: "Invalid credentials in Authorization header",
    403: "Forbidden: you must use a write token to upload to a repository.",
    413: "Payload too large",
    429: "Too many requests",
    500: "Internal Error - We're working hard to fix this as soon as possible!",
    502: "Bad gateway",
    503: "Service unavailable",
    504: "Gateway timeout",
}
LFS_SIZE = 10_000_000  # bytes
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".parquet", ".arrow", ".npz", ".zip", ".gz", ".gguf")
GITATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()


class HubError(Exception):
    """An answer with an error status. `code` goes into `X-Error-Code`, by which the client picks its exception."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        self.answer = error_answer(status, message, code, headers)


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})


def error_answer(status: int, message: str, code: str | None, headers: Mapping[str, str]) -> Answer:
    named = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
    return as_json({"error": message}, status, {**named, **headers})


@dataclass
class Request:
    """What a client asked. `path` is still percent-encoded and has no query. `status` is 0 where none was answered."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: Message
    body: bytes
    status: int = 0

    @property
    def authorized(self) -> bool:
        """Whether the request carries an Authorization header, valid or not."""
        return "Authorization" in self.headers

    @property
    def json(self) -> Any:
        return json.loads(self.body)


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


@dataclass
class Fault:
    """What to do to requests whose `METHOD /path` matches. `times` counts down; None never ends."""

    pattern: re.Pattern[str]
    times: int | None
    answer: Answer | None = None
    seconds: float = 0.0
    cut: str = (
        ""  # how the connection ends: "before" the work is done, "reset" or "hang up" in the middle of the answer
    )


TYPE = r"(?P<type>models|datasets|spaces)"
ID = r"(?P<id>[\w.-]+(?:/(?!(?:resolve|revision|tree)/)[\w.-]+)?)"
REVISION = r"(?P<revision>[^/]+)"
Route = tuple[str, re.Pattern[str], Callable[..., Answer]]
ROUTES: list[Route] = []


def route(methods: str, path: str) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    def register(function: Callable[..., Answer]) -> Callable[..., Answer]:
        ROUTES.append((methods, re.compile(path), function))
        return function

    return register


class Hub:
    """The double. Use it as a context manager or by the fixture `hub`; `home` is the clients' `HF_HOME`."""

    def __init__(self, home: Path):
        self.home = home
        self.repos: dict[tuple[str, str], Repo] = {}
        self.storage: dict[str, bytes] = {}  # large files by sha256
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.bugs: list[BaseException] = []  # exceptions of the double itself
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.hub = self
        port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{port}"
        # Like the real storage it is another origin: the client must not send its token there.
        self.storage_url = f"http://localhost:{port}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        if self.bugs:
            raise self.bugs[0]

    def close(self) -> None:
        """Stop: from now on connections are refused."""
        if not self._closed.is_set():
            self._closed.set()
            self._server.shutdown()
            self._server.server_close()

    # --- For tests ---

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a client process. No other Hub setting, token or proxy of this machine is passed on."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING")) and not name.lower().endswith(("_proxy", "_offline"))
        }
        return kept | {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # load_dataset counts at an address of its own
        }

    def run(
        self, source: str | Path, *args: str, timeout: float = 300, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run Python code (str) or a script (Path) as a client of this Hub; output is captured."""
        command = [str(source)] if isinstance(source, Path) else ["-c", textwrap.dedent(source)]
        return subprocess.run(
            [sys.executable, *command, *args],
            env=self.environment | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def repo(self, repo_id: str, repo_type: str = "model") -> Repo:
        return self.repos[repo_type, repo_id]

    def add_repo(
        self, repo_id: str, files: Mapping[str, bytes] | None = None, repo_type: str = "model", private: bool = False
    ) -> Repo:
        """A repository that is there before the client comes. Only namespaces `tester` and `team` are writable."""
        repo = Repo(repo_id, repo_type, private)
        repo.commit({".gitattributes": Blob(GITATTRIBUTES)}, "initial commit")
        if files:
            blobs = {
                path: Blob(content, is_large(path, len(content), content[:512])) for path, content in files.items()
            }
            self.storage |= {blob.sha256: blob.content for blob in blobs.values() if blob.lfs}
            repo.commit(repo.at("main").files | blobs, "Add files")
        self.repos[repo_type, repo_id] = repo
        return repo

    def seen(self, pattern: str) -> list[Request]:
        """Requests so far whose `METHOD /path` matches."""
        return [request for request in self.requests if re.search(pattern, f"{request.method} {request.path}")]

    def fail(
        self,
        pattern: str,
        status: int = 500,
        *,
        times: int | None = None,
        error: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        html: bool = False,
    ) -> None:
        """Answer with `status` and the Hub's JSON error, or as a gateway in front of it does (`html`).

        Args:
            pattern: regular expression, searched in `METHOD /path`.
            times: how many requests it hits; None is all of them, until `heal`.
            error: the message; by default one that goes with the status.
            code: value of `X-Error-Code`, for instance `RepoNotFound`, `GatedRepo`.
            headers: for instance `{"Retry-After": "0"}` or `{"RateLimit": '"api";r=0;t=0'}` with 429.
        """
        error = MESSAGES.get(status, "Error") if error is None else error
        answer = error_answer(status, error, code, headers or {})
        if html:
            page = f"<html><body><h1>{status} {error}</h1></body></html>".encode()
            answer = Answer(status, page, {"Content-Type": "text/html", **(headers or {})})
        self.faults.append(Fault(re.compile(pattern), times, answer=answer))

    def slow(self, pattern: str, seconds: float, *, times: int | None = None) -> None:
        """Answer rightly, but only after `seconds`."""
        self.faults.append(Fault(re.compile(pattern), times, seconds=seconds))

    def reset(self, pattern: str, *, times: int | None = None, before: bool = False) -> None:
        """Reset the connection after half of the answer's body: the work is done, but the client does not learn it.

        With `before` nothing is done and nothing is answered.
        """
        self.faults.append(Fault(re.compile(pattern), times, cut="before" if before else "reset"))

    def hang_up(self, pattern: str, *, times: int | None = None) -> None:
        """Like `reset`, but the connection ends in good order, only too early. Downloads go on after that."""
        self.faults.append(Fault(re.compile(pattern), times, cut="hang up"))

    def heal(self) -> None:
        """Forget all faults."""
        self.faults.clear()

    # --- Serving ---

    def receive(self, request: Request) -> tuple[Answer, str]:
        """The answer to a request and how to cut the connection (`Fault.cut`), if at all."""
        with self._lock:
            self.requests.append(request)
            hit = self._take_faults(f"{request.method} {request.path}")
        self._closed.wait(sum(fault.seconds for fault in hit))
        cut = next((fault.cut for fault in hit if fault.cut), "")
        answer = next((fault.answer for fault in hit if fault.answer), None)
        if answer is None and cut != "before":
            with self._lock:
                answer = self._answer(request)
        request.status = answer.status if answer and not cut else 0
        return answer or Answer(), cut

    def _take_faults(self, line: str) -> list[Fault]:
        hit = [fault for fault in self.faults if fault.times != 0 and fault.pattern.search(line)]
        for fault in hit:
            if fault.times is not None:
                fault.times -= 1
        return hit

    def _answer(self, request: Request) -> Answer:
        try:
            for methods, path, function in ROUTES:
                match = path.fullmatch(request.path)
                if match and request.method in methods.split():
                    self._check_token(request)
                    groups = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                    return function(self, request, **groups)
            raise HubError(501, f"The double of the Hub does not know {request.method} {request.path}")
        except HubError as error:
            return error.answer
        except Exception as error:  # noqa: BLE001 - a bug of the double: raised when it is closed
            self.bugs.append(error)
            return error_answer(501, f"Bug of the double: {error!r}", None, {})

    def _check_token(self, request: Request) -> None:
        if request.authorized and request.headers["Authorization"] != f"Bearer {TOKEN}":
            raise HubError(401, MESSAGES[401])

    def _find(self, request: Request, repo_type: str, repo_id: str) -> Repo:
        """The repository to read. What is private to others looks as if it did not exist."""
        repo = self.repos.get((repo_type, repo_id))
        if repo is None or (repo.private and not (request.authorized and writable(repo_id))):
            if request.authorized:
                raise HubError(404, "Repository not found", "RepoNotFound")
            raise HubError(401, "Invalid username or password.", "RepoNotFound")
        return repo

    def _find_to_write(self, request: Request, repo_type: str, repo_id: str) -> Repo:
        repo = self._find(request, repo_type, repo_id)
        if not request.authorized:
            raise HubError(401, "Invalid username or password.")
        if not writable(repo_id):
            raise HubError(403, MESSAGES[403])
        return repo

    def _url_of(self, repo: Repo) -> str:
        return f"{self.url}/{'' if repo.type == 'model' else repo.type + 's/'}{repo.id}"

    # --- Account and repositories ---

    @route("GET", "/api/whoami-v2")
    def _whoami(self, request: Request) -> Answer:
        if not request.authorized:
            raise HubError(401, "Invalid username or password.")
        token = {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}
        organizations = [{"type": "org", "id": "1", "name": ORGANIZATION, "fullname": ORGANIZATION}]
        return as_json(
            {"type": "user", "id": "0", "name": USER, "fullname": USER, "orgs": organizations, "auth": token}
        )

    @route("POST", "/api/repos/create")
    def _create_repo(self, request: Request) -> Answer:
        wish = request.json
        repo_type, namespace = wish.get("type") or "model", wish.get("organization") or USER
        repo_id = f"{namespace}/{wish['name']}"
        if not request.authorized:
            raise HubError(401, "Invalid username or password.")
        if not writable(repo_id):
            raise HubError(
                403, f'You don\'t have the rights to create a {repo_type} under the namespace "{namespace}"'
            )
        if (repo_type, repo_id) in self.repos:
            answer = {
                "error": f"You already created this {repo_type} repo",
                "url": self._url_of(Repo(repo_id, repo_type)),
            }
            return as_json(answer, 409, {"X-Error-Message": answer["error"]})
        private = wish.get("visibility") == "private" or wish.get("private") is True  # the latter before version 1.1
        repo = self.add_repo(repo_id, repo_type=repo_type, private=private)
        return as_json({"url": self._url_of(repo), "name": repo_id, "id": repo_id})

    @route("DELETE", "/api/repos/delete")
    def _delete_repo(self, request: Request) -> Answer:
        wish = request.json
        repo_type = wish.get("type") or "model"
        repo = self._find_to_write(request, repo_type, f"{wish.get('organization') or USER}/{wish['name']}")
        del self.repos[repo_type, repo.id]
        return as_json({})

    @route("POST", "/api/validate-yaml")
    def _validate_yaml(self, request: Request) -> Answer:
        text = request.json["content"]
        errors = [{"message": message} for message in card_errors(text)]
        warnings = []
        if not errors and not card_metadata(text):
            warnings = [{"message": "empty or missing yaml metadata in repo card"}]
        return as_json({"errors": errors, "warnings": warnings}, 400 if errors else 200)

    # --- Writing ---

    @route("POST", f"/api/{TYPE}/{ID}/preupload/{REVISION}")
    def _preupload(self, request: Request, type: str, id: str, revision: str) -> Answer:
        present = self._find_to_write(request, type[:-1], id).at(revision).files
        files = []
        for file in request.json["files"]:
            path, blob = file["path"], present.get(file["path"])
            large = is_large(path, file["size"], base64.b64decode(file["sample"]))
            known = {"oid": blob.sha256 if blob.lfs else blob.oid} if blob and blob.lfs == large else {}
            files.append({"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, **known})
        return as_json({"files": files})

    @route("POST", rf"/(?:{TYPE}/)?{ID}\.git/info/lfs/objects/batch")
    def _lfs_batch(self, request: Request, id: str, type: str = "models") -> Answer:
        self._find_to_write(request, type[:-1], id)
        objects = []
        for wish in request.json["objects"]:
            upload = {"href": f"{self.storage_url}/storage/{wish['oid']}"}
            verify = {"href": f"{self.url}/lfs-verify"}
            wanted = {} if wish["oid"] in self.storage else {"actions": {"upload": upload, "verify": verify}}
            objects.append({"oid": wish["oid"], "size": wish["size"], **wanted})
        return as_json({"transfer": "basic", "objects": objects})

    @route("PUT", "/storage/(?P<oid>[0-9a-f]{64})")
    def _lfs_put(self, request: Request, oid: str) -> Answer:
        if hashlib.sha256(request.body).hexdigest() != oid:
            raise HubError(400, "The content does not have the sha256 under which it was announced")
        self.storage[oid] = request.body
        return Answer(headers={"ETag": f'"{oid}"'})

    @route("POST", "/lfs-verify")
    def _lfs_verify(self, request: Request) -> Answer:
        wish = request.json
        if len(self.storage.get(wish["oid"], b"")) != wish["size"]:
            raise HubError(404, "Object not found in storage, or of another size")
        return as_json({})

    @route("POST", f"/api/{TYPE}/{ID}/commit/{REVISION}")
    def _commit(self, request: Request, type: str, id: str, revision: str) -> Answer:
        repo = self._find_to_write(request, type[:-1], id)
        if revision not in repo.branches:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        operations = [json.loads(line) for line in request.body.splitlines()]
        header = operations[0]["value"]
        if header.get("parentCommit") not in (None, repo.at(revision).oid):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repo.at(revision).files)
        for operation in operations[1:]:
            self._apply(files, operation["key"], operation["value"])
        if errors := card_errors(files.get("README.md", Blob(b"")).content.decode()):
            raise HubError(400, f"Invalid metadata in README.md: {errors[0]}".replace("\n", " "))
        commit = repo.commit(files, header["summary"], header.get("description", ""), revision)
        url = f"{self._url_of(repo)}/commit/{commit.oid}"
        return as_json({"success": True, "commitUrl": url, "commitOid": commit.oid, "hookOutput": ""})

    def _apply(self, files: dict[str, Blob], key: str, value: dict[str, Any]) -> None:
        path = value["path"]
        if key == "file":
            files[path] = Blob(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            if value["oid"] not in self.storage:
                raise HubError(400, f"LFS pointer of {path} points to a file that does not exist")
            files[path] = Blob(self.storage[value["oid"]], lfs=True)
        elif key in ("deletedFile", "deletedFolder"):
            gone = (
                [path] if key == "deletedFile" else [name for name in files if name.startswith(f"{path.strip('/')}/")]
            )
            if not gone or gone[0] not in files:
                raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
            for name in gone:
                del files[name]
        else:
            raise HubError(400, f"Unknown operation {key} in a commit")

    @route("POST", f"/api/{TYPE}/{ID}/branch/{REVISION}")
    def _create_branch(self, request: Request, type: str, id: str, revision: str) -> Answer:
        repo = self._find_to_write(request, type[:-1], id)
        if revision in repo.branches:
            raise HubError(409, f"Reference already exists: {revision}")
        start = request.json.get("startingPoint") or "main"
        repo.branches[revision] = list(repo.history(start))
        return as_json({})

    # --- Reading ---

    @route("GET", f"/api/{TYPE}/{ID}(?:/revision/{REVISION})?")
    def _info(self, request: Request, type: str, id: str, revision: str = "main") -> Answer:
        repo = self._find(request, type[:-1], id)
        commit = repo.at(revision)
        card = commit.files.get("README.md")
        data = (card_metadata(card.content.decode()) if card else None) or {}
        siblings = [
            {"rfilename": path, "size": len(blob.content), "blobId": blob.oid, "lfs": blob.lfs_info}
            for path, blob in sorted(commit.files.items())
        ]
        times = {"createdAt": repo.branches["main"][0].date, "lastModified": commit.date}
        told = {key: data[key] for key in ("model-index", "pipeline_tag", "library_name") if key in data}
        return as_json(
            {
                "_id": "0",
                "id": id,
                "author": id.split("/")[0],
                "sha": commit.oid,
                "private": repo.private,
                "gated": False,
            }
            | {"disabled": False, "downloads": 0, "likes": 0, "tags": data.get("tags", []), "siblings": siblings}
            | {"cardData": data, **times, **told}
        )

    @route("GET", f"/api/{TYPE}/{ID}/tree/{REVISION}(?:/(?P<path>.+))?")
    def _tree(self, request: Request, type: str, id: str, revision: str, path: str = "") -> Answer:
        commit = self._find(request, type[:-1], id).at(revision)
        folder = f"{path.strip('/')}/" if path else ""
        entries = tree_entries(commit, expand=is_true(request.query, "expand"))
        inside = [entry for entry in entries if entry["path"].startswith(folder)]
        if folder and not inside:
            raise HubError(404, f"{path} does not exist on {revision}", "EntryNotFound")
        if not is_true(request.query, "recursive"):
            inside = [entry for entry in inside if "/" not in entry["path"][len(folder) :]]
        return as_json(inside)

    @route("POST", f"/api/{TYPE}/{ID}/paths-info/{REVISION}")
    def _paths_info(self, request: Request, type: str, id: str, revision: str) -> Answer:
        commit = self._find(request, type[:-1], id).at(revision)
        form = parse_qs(request.body.decode())
        wanted = {path.strip("/") for path in form.get("paths", [])}
        return as_json([entry for entry in tree_entries(commit, is_true(form, "expand")) if entry["path"] in wanted])

    @route("GET", f"/api/{TYPE}/{ID}/commits/{REVISION}")
    def _commits(self, request: Request, type: str, id: str, revision: str) -> Answer:
        history = self._find(request, type[:-1], id).history(revision)
        texts = [{"id": c.oid, "title": c.message, "message": c.description, "date": c.date} for c in history]
        return as_json([{**text, "authors": [{"user": USER}]} for text in reversed(texts)])

    @route("GET", f"/api/{TYPE}/{ID}/refs")
    def _refs(self, request: Request, type: str, id: str) -> Answer:
        branches = self._find(request, type[:-1], id).branches
        heads = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c[-1].oid} for n, c in branches.items()]
        return as_json({"branches": heads, "converts": [], "tags": [], "pullRequests": []})

    @route("GET HEAD", f"/(?:{TYPE}/)?{ID}/resolve/{REVISION}/(?P<path>.+)")
    def _resolve(self, request: Request, id: str, revision: str, path: str, type: str = "models") -> Answer:
        commit = self._find(request, type[:-1], id).at(revision)
        headers = {"X-Repo-Commit": commit.oid}
        blob = commit.files.get(path)
        if blob is None:
            raise HubError(404, "Entry not found", "EntryNotFound", **headers)
        if not blob.lfs:
            return ranged(Answer(200, blob.content, {**headers, "ETag": f'"{blob.oid}"'}), request)
        linked = {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.content))}
        location = f"{self.storage_url}/storage/{blob.sha256}"
        return Answer(302, b"Found", {**headers, **linked, "Location": location})

    @route("GET HEAD", "/storage/(?P<oid>[0-9a-f]{64})")
    def _lfs_get(self, request: Request, oid: str) -> Answer:
        if oid not in self.storage:
            raise HubError(404, "Not in storage")
        return ranged(Answer(200, self.storage[oid], {"ETag": f'"{oid}"'}), request)


def writable(repo_id: str) -> bool:
    return repo_id.split("/")[0] in (USER, ORGANIZATION)


def is_large(path: str, size: int, sample: bytes) -> bool:
    """Whether a file goes to large file storage: by its name, its size in bytes, or because it is binary."""
    return size > 0 and (path.endswith(LFS_SUFFIXES) or size > LFS_SIZE or b"\0" in sample)


def is_true(values: Mapping[str, list[str]], key: str) -> bool:
    return values.get(key, ["false"])[0].lower() in ("true", "1")


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


def ranged(answer: Answer, request: Request) -> Answer:
    """The part of the body that `Range` asks for: clients resume interrupted downloads."""
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
    if not wanted:
        return answer
    size, start = len(answer.body), int(wanted[1])
    if start >= size:
        raise HubError(416, "Range not satisfiable", **{"Content-Range": f"bytes */{size}"})
    part = answer.body[start : int(wanted[2]) + 1 if wanted[2] else size]
    span = f"bytes {start}-{start + len(part) - 1}/{size}"
    return Answer(206, part, {**answer.headers, "Content-Range": span})


class Server(ThreadingHTTPServer):
    hub: Hub
    daemon_threads = True
    block_on_close = False  # a slow answer must not keep the test waiting

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, ConnectionError):  # clients may hang up
            self.hub.bugs.append(error)


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        url = urlsplit(self.path)
        request = Request(self.command, url.path, parse_qs(url.query), self.headers, self._read_body())
        answer, cut = self.server.hub.receive(request)
        body = b"" if self.command == "HEAD" else answer.body
        if body or not cut:
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True
        if cut in ("before", "reset"):
            self._reset()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _reset(self) -> None:
        """Close without lingering, which the other side sees as a reset rather than as an end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: requests are in `Hub.requests`."""


@pytest.fixture(name="hub")
def hub_double(tmp_path: Path) -> Iterator[Hub]:
    """A Hub of this test alone: user `tester`, organization `team`, token `TOKEN`."""
    with Hub(tmp_path / "hf_home") as double:
        yield double
