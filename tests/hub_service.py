"""What the Hub's double does with a request: accounts, repositories, writing and reading."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, unquote

from hub_messages import MESSAGES, Answer, HubError, Request, as_json, error_answer, is_true, ranged
from hub_repos import GITATTRIBUTES, Blob, Repo, card_errors, card_metadata, is_large, tree_entries

TOKEN = "hf_test_token_never_in_logs"
USER = "tester"
ORGANIZATION = "team"

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


def writable(repo_id: str) -> bool:
    return repo_id.split("/")[0] in (USER, ORGANIZATION)


class Service:
    """Repositories in memory, and the answers to requests for them.

    Args:
        url: Where clients find it.
        storage_url: Where they find large files.
    """

    def __init__(self, url: str, storage_url: str):
        self.url = url
        self.storage_url = storage_url
        self.repos: dict[tuple[str, str], Repo] = {}
        self.storage: dict[str, bytes] = {}  # large files by sha256
        self.bugs: list[BaseException] = []  # exceptions of the double itself

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

    def answer(self, request: Request) -> Answer:
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
