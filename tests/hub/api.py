"""The Hub's API as its clients call it: accounts, repositories, trees, commits, branches and files."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, quote

from .store import LFS_SUFFIXES, Commit, Entry, HubError, Repo, lfs_pointer
from .wire import FILES, REPO, REVISION, Answer, Request, route


def whoami(request: Request) -> Answer:
    user = request.hub.user(request, required=True)
    role = "write" if user["can_write"] else "read"
    auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": role}}
    orgs = [{"type": "org", "name": name, "roleInOrg": "write"} for name in user.get("orgs", ())]
    return Answer({"type": "user", "id": user["user"], "name": user["user"], "orgs": orgs, "auth": auth})


def validate_yaml(request: Request) -> Answer:
    request.body.drain()
    return Answer({"errors": [], "warnings": []})


def auth_check(request: Request) -> Answer:
    request.hub.repo(request, write=bool(request.groups["write"]))
    return Answer({})


def create(request: Request) -> Answer:
    user = request.hub.user(request, required=True)
    payload = request.json()
    name = f"{payload.get('organization') or user['user']}/{payload['name']}"
    kind = f"{payload.get('type') or 'model'}s"
    url = f"{request.hub.endpoint}/{'' if kind == 'models' else kind + '/'}{name}"
    request.hub.require_write(user, name)
    private = payload.get("visibility") == "private" or bool(payload.get("private"))
    try:
        request.hub.repos.create(kind, name, user["user"], private=private)
    except HubError as error:
        error.fields["url"] = url
        raise
    return Answer({"url": url, "name": name, "id": name})


def delete(request: Request) -> Answer:
    user = request.hub.user(request, required=True)
    payload = request.json()
    name = f"{payload.get('organization') or user['user']}/{payload['name']}"
    request.hub.require_write(user, name)
    request.hub.repos.delete(f"{payload.get('type') or 'model'}s", name)
    return Answer({})


def settings(request: Request) -> Answer:
    payload = request.json()
    repo = request.hub.repo(request, write=True)
    if "visibility" in payload or "private" in payload:
        repo.private = payload.get("visibility") == "private" or bool(payload.get("private"))
    repo.gated = payload.get("gated", repo.gated)
    return Answer({"private": repo.private, "gated": repo.gated})


def info(request: Request) -> Answer:
    repo = request.hub.repo(request)
    commit = repo.resolve(request.groups["revision"] or "main")
    siblings = []
    for path, entry in commit.tree.items():
        sibling: dict[str, Any] = {"rfilename": path}
        if request.flag("blobs"):
            sibling |= {"size": entry.size, "blobId": entry.blob_id}
            if entry.content is None:
                pointer = len(lfs_pointer(entry.sha256, entry.size))
                sibling["lfs"] = {"sha256": entry.sha256, "size": entry.size, "pointerSize": pointer}
        siblings.append(sibling)
    return Answer(
        {
            "_id": repo.name,
            "id": repo.name,
            "author": repo.author,
            "sha": commit.id,
            "lastModified": commit.date,
            "createdAt": repo.created_at,
            "private": repo.private,
            "gated": repo.gated,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "usedStorage": sum(entry.size for entry in commit.tree.values()),
            "siblings": siblings,
        }
    )


def _described(request: Request, repo: Repo, path: str, entry: Entry | None, expand: bool) -> dict[str, Any]:
    """Return the description of a file, or of a folder (entry is None), for the tree and paths-info endpoints."""
    if entry is None:
        return {"type": "directory", "oid": "0" * 40, "size": 0, "path": path}
    actual: dict[str, Any] = {"type": "file", "oid": entry.blob_id, "size": entry.size, "path": path}
    if entry.content is None:
        pointer = len(lfs_pointer(entry.sha256, entry.size))
        actual["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": pointer}
        if stored := request.hub.xet_file(entry.sha256):
            actual["xetHash"] = stored.hash
    if expand:
        commit = repo.commits[entry.commit]
        actual["lastCommit"] = {"id": commit.id, "title": commit.title, "date": commit.date}
        actual["securityFileStatus"] = {"status": "safe", "avScan": None, "pickleImportScan": None}
    return actual


def _folders(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def tree(request: Request) -> Answer:
    repo = request.hub.repo(request)
    commit = repo.resolve(request.groups["revision"])
    under = request.groups["path"].strip("/")
    recursive, expand = request.flag("recursive"), request.flag("expand")
    actual: dict[str, Entry | None] = {}
    for path, entry in commit.tree.items():
        if under and not path.startswith(f"{under}/"):
            continue
        for item, value in [*((folder, None) for folder in _folders(path)), (path, entry)]:
            inside = item.removeprefix(f"{under}/") if under else item
            if len(item) > len(under) and (recursive or "/" not in inside):
                actual[item] = value
    if under and not actual:
        raise HubError(404, f"{under} does not exist on {request.groups['revision']}", "EntryNotFound")
    size = min(int(request.first("limit", "1000")), 50 if expand else 1000, request.hub.page_size)
    start = int(request.first("cursor", "0"))
    page = sorted(actual.items())[start : start + size]
    headers = {}
    if start + size < len(actual):
        location = (
            f"{request.hub.endpoint}/api/{repo.kind}/{repo.name}/tree/{quote(request.groups['revision'], safe='')}"
        )
        location += f"/{quote(under, safe='')}" if under else ""
        flags = f"recursive={str(recursive).lower()}&expand={str(expand).lower()}"
        headers["Link"] = f'<{location}?{flags}&limit={size}&cursor={start + size}>; rel="next"'
    return Answer([_described(request, repo, path, entry, expand) for path, entry in page], headers=headers)


def paths_info(request: Request) -> Answer:
    repo = request.hub.repo(request)
    commit = repo.resolve(request.groups["revision"])
    raw = request.body.read().decode()
    requested: dict[str, Any] = json.loads(raw) if raw.startswith("{") else parse_qs(raw)
    expand = requested.get("expand") in (True, ["true"], ["True"])
    folders = {folder for path in commit.tree for folder in _folders(path)}
    paths = [path for path in requested.get("paths", []) if path in commit.tree or path in folders]
    return Answer([_described(request, repo, path, commit.tree.get(path), expand) for path in paths])


def preupload(request: Request) -> Answer:
    payload = request.json()
    repo = request.hub.repo(request, write=True)
    commit = repo.resolve(request.groups["revision"])
    ignored = [line.strip() for line in payload.get("gitIgnore", "").splitlines() if line.strip()]
    files = []
    for file in payload["files"]:
        path, sample, entry = file["path"], base64.b64decode(file["sample"]), commit.tree.get(file["path"])
        large = path.endswith(LFS_SUFFIXES) or file["size"] > request.hub.regular_bytes or b"\0" in sample
        large = large or not re.fullmatch(r"[^\ufffd]*.?", sample.decode(errors="replace"), re.DOTALL)
        oid = None if entry is None else entry.sha256 if entry.content is None else entry.blob_id
        mode = "lfs" if large else "regular"
        files.append({"path": path, "uploadMode": mode, "shouldIgnore": path in ignored, "oid": oid})
    return Answer({"files": files, "commitOid": commit.id})


def commit(request: Request) -> Answer:
    revision = request.groups["revision"]
    repo = request.hub.repo(request, write=True)
    author = request.hub.user(request, required=True)["user"]
    header: dict[str, Any] = {}
    operations = []
    for line in request.body.lines():
        if line.strip():
            operation = json.loads(line)
            key, value = operation["key"], operation["value"]
            if key == "header":
                header = value
            else:
                operations.append((key, _prepared(request, repo, revision, key, value)))
    if not header.get("summary"):
        raise HubError(400, "The commit needs a summary")

    def change(tree: dict[str, Entry]) -> None:
        for key, (path, entry) in operations:
            _apply(tree, key, path, entry)

    created: dict[str, Any] = {}
    with repo.lock:
        if request.flag("create_pr"):
            if header.get("parentCommit", repo.resolve(revision).id) != repo.resolve(revision).id:
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            pull = repo.create_discussion(header["summary"], header.get("description", ""), author, True, revision)
            created["pullRequestUrl"] = f"{request.hub.url(repo)}/discussions/{pull.num}"
            revision, header["parentCommit"], pull.status = f"refs/pr/{pull.num}", None, "open"
        result = repo.commit(
            revision,
            change,
            title=header["summary"],
            message=header.get("description", ""),
            author=author,
            parent=header.get("parentCommit"),
        )
    with request.hub.lock:
        request.hub.counters.commits += 1
    created |= {"success": True, "commitOid": result.id, "commitUrl": f"{request.hub.url(repo)}/commit/{result.id}"}
    return Answer({**created, "hookOutput": ""})


def _prepared(request: Request, repo: Repo, revision: str, key: str, value: Any) -> tuple[str, Entry | None]:
    """Parse one operation of a commit and check it as far as possible without the tree."""
    path = value["path"]
    if key == "file":
        return path, Entry.regular(base64.b64decode(value["content"], validate=True))
    if key == "lfsFile":
        size = request.hub.object_size(repo, value["oid"])
        if size is None or size != value.get("size", size):
            raise HubError(400, f"LFS pointer of {path} points to an object that was not uploaded: {value['oid']}")
        return path, Entry.lfs(value["oid"], size)
    if key == "copyFile":
        source = repo.resolve(value.get("srcRevision") or revision).tree.get(value["srcPath"])
        if source is None:
            raise HubError(404, f"{value['srcPath']} does not exist", "EntryNotFound")
        return path, replace(source, commit="")
    if key not in ("deletedFile", "deletedFolder"):
        raise HubError(400, f"Unknown operation {key}")
    return path, None


def _apply(tree: dict[str, Entry], key: str, path: str, entry: Entry | None) -> None:
    if entry is not None:
        tree[path] = entry
        return
    removed = [p for p in tree if p.startswith(f"{path.rstrip('/')}/")] if key == "deletedFolder" else [path]
    if not removed or removed[0] not in tree:
        raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
    for p in removed:
        del tree[p]


def commits(request: Request) -> Answer:
    repo = request.hub.repo(request)
    history = repo.history(request.groups["revision"])
    start, size = int(request.first("cursor", "0")), min(50, request.hub.page_size)
    headers = {}
    if start + size < len(history):
        revision = quote(request.groups["revision"], safe="")
        location = f"{request.hub.endpoint}/api/{repo.kind}/{repo.name}/commits/{revision}?cursor={start + size}"
        headers["Link"] = f'<{location}>; rel="next"'
    return Answer([_commit_json(c) for c in history[start : start + size]], headers=headers)


def _commit_json(created: Commit) -> dict[str, Any]:
    authors = [{"user": created.author, "avatar": ""}]
    return {
        "id": created.id,
        "title": created.title,
        "message": created.message,
        "authors": authors,
        "date": created.date,
    }


def refs(request: Request) -> Answer:
    repo = request.hub.repo(request)
    listed: dict[str, list[dict[str, str]]] = {"branches": [], "converts": [], "tags": [], "pullRequests": []}
    for name, target in repo.refs.items():
        pull = name.startswith("refs/pr/")
        ref = name if pull else f"refs/heads/{name}"
        item = {"name": name.rsplit("/", 1)[1] if pull else name, "ref": ref, "targetCommit": target}
        listed["pullRequests" if pull else "branches"].append(item)
    if not request.flag("include_prs"):
        del listed["pullRequests"]
    return Answer(listed)


def branch(request: Request) -> Answer:
    payload = request.json()
    repo = request.hub.repo(request, write=True)
    if request.method == "POST":
        repo.create_branch(request.groups["branch"], payload.get("startingPoint"))
    else:
        repo.delete_branch(request.groups["branch"])
    return Answer({})


def resolve(request: Request) -> Answer:
    hub, path = request.hub, request.groups["path"]
    repo = hub.repo(request, content=True)
    position = repo.resolve(request.groups["revision"])
    headers = {"X-Repo-Commit": position.id, "Accept-Ranges": "bytes"}
    entry = position.tree.get(path)
    if entry is None:
        raise HubError(404, f"{path} does not exist", "EntryNotFound", headers=headers)
    if entry.content is not None:
        return hub.slice(request, entry.content, {**headers, "ETag": f'"{entry.blob_id}"'})
    headers |= {"X-Linked-Size": str(entry.size), "X-Linked-ETag": f'"{entry.sha256}"', "ETag": f'"{entry.sha256}"'}
    if stored := hub.xet_file(entry.sha256):
        location = f"{hub.endpoint}/api/{repo.kind}/{repo.name}/xet-read-token/{position.id}"
        headers |= {"X-Xet-Hash": stored.hash, "Link": f'<{location}>; rel="xet-auth"'}
    return Answer(status=302, headers={**headers, "Location": hub.sign(f"/object/{entry.sha256}")})


ROUTES = [
    route("whoami", "GET", r"/api/whoami-v2", whoami),
    route("validate-yaml", "POST", r"/api/validate-yaml", validate_yaml),
    route("create", "POST", r"/api/repos/create", create),
    route("delete", "DELETE", r"/api/repos/delete", delete),
    route("settings", "PUT", REPO + r"/settings", settings),
    route("auth-check", "GET", REPO + r"/auth-check(?P<write>/write)?", auth_check),
    route("tree", "GET", REPO + r"/tree" + REVISION + r"(?:/(?P<path>.*))?", tree),
    route("paths-info", "POST", REPO + r"/paths-info" + REVISION, paths_info),
    route("preupload", "POST", REPO + r"/preupload" + REVISION, preupload),
    route("commit", "POST", REPO + r"/commit" + REVISION, commit),
    route("commits", "GET", REPO + r"/commits" + REVISION, commits),
    route("refs", "GET", REPO + r"/refs", refs),
    route("branch", "POST DELETE", REPO + r"/branch/(?P<branch>[^/]+)", branch),
    route("info", "GET", REPO + r"(?:/revision" + REVISION + r")?", info),
    route("info", "GET", r"/api/(?P<kind>models|datasets|spaces)/(?P<name>[^/]+)(?P<revision>)", info),
    route("resolve", "GET HEAD", FILES + r"/resolve" + REVISION + r"/(?P<path>.+)", resolve),
]
