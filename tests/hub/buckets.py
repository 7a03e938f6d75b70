"""Storage buckets of the Hub as the client of huggingface_hub uses them: names for Xet objects, without commits."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from .store import HubError, now
from .wire import Answer, Request, route
from .xet import token_answer

BUCKET = r"/api/buckets/(?P<name>[^/]+/[^/]+)"


@dataclass(slots=True)
class Bucket:
    name: str
    private: bool = False
    created_at: str = field(default_factory=now)
    files: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The Xet hash and the date of each."""


def _bucket(request: Request, *, write: bool = False) -> Bucket:
    user = request.hub.user(request, required=write)
    actual = request.hub.buckets.get(request.groups["name"])
    if actual is None or (actual.private and user["user"] is None):
        raise HubError(404, "Bucket not found", "RepoNotFound")
    if write:
        request.hub.require_write(user, actual.name)
    return actual


def create(request: Request) -> Answer:
    payload = request.json()
    user = request.hub.user(request, required=True)
    name = request.groups["name"].replace("me/", f"{user['user']}/", 1)
    request.hub.require_write(user, name)
    if name in request.hub.buckets:
        raise HubError(409, "You already created this bucket", url=f"{request.hub.endpoint}/buckets/{name}")
    private = payload.get("visibility") == "private" or bool(payload.get("private"))
    request.hub.buckets[name] = Bucket(name, private)
    return Answer({"url": f"{request.hub.endpoint}/buckets/{name}", "id": name})


def info(request: Request) -> Answer:
    actual = _bucket(request)
    size = sum(_size(request, hash) for hash, _ in actual.files.values())
    facts = {"id": actual.name, "private": actual.private, "createdAt": actual.created_at}
    return Answer({**facts, "size": size, "totalFiles": len(actual.files)})


def delete(request: Request) -> Answer:
    del request.hub.buckets[_bucket(request, write=True).name]
    return Answer({})


def _size(request: Request, hash: str) -> int:
    assert request.hub.xet is not None
    return request.hub.xet.files[hash].size


def _described(request: Request, path: str, entry: tuple[str, str]) -> dict[str, Any]:
    hash, date = entry
    return {"type": "file", "path": path, "size": _size(request, hash), "xetHash": hash, "mtime": date}


def tree(request: Request) -> Answer:
    """List files by prefix; the prefix is compared as plain text, so `logs` also matches `logs.json`."""
    bucket, prefix = _bucket(request), request.groups["path"].strip("/")
    actual: dict[str, dict[str, Any]] = {}
    for path, entry in bucket.files.items():
        if path.startswith(prefix):
            remainder = path[len(prefix) :].lstrip("/")
            folder, slash, _ = remainder.partition("/")
            if slash and not request.flag("recursive"):
                position = path[: len(path) - len(remainder)] + folder
                actual[position] = {"type": "directory", "path": position}
            else:
                actual[path] = _described(request, path, entry)
    start, size = int(request.first("cursor", "0")), request.hub.page_size
    headers = {}
    if start + size < len(actual):
        location = f"{request.hub.endpoint}{request.path}?recursive={str(request.flag('recursive')).lower()}"
        headers["Link"] = f'<{location}&cursor={start + size}>; rel="next"'
    return Answer([actual[path] for path in sorted(actual)[start : start + size]], headers=headers)


def paths_info(request: Request) -> Answer:
    bucket, payload = _bucket(request), request.json()["paths"]
    return Answer([_described(request, path, bucket.files[path]) for path in payload if path in bucket.files])


def batch(request: Request) -> Answer:
    """Run each operation independently; failed operations are reported and do not stop the others."""
    lines = [json.loads(line) for line in request.body.lines() if line.strip()]
    bucket = _bucket(request, write=True)
    if len(lines) > 1000:
        raise HubError(400, "Too many operations")
    assert request.hub.xet is not None
    failed = []
    for line in lines:
        path = line["path"]
        if line["type"] == "deleteFile":
            error = None if bucket.files.pop(path, None) else "not found"
        elif line["type"] == "copyFile":
            source = request.hub.buckets.get(line["sourceRepoId"])
            retained = source is not None and line["xetHash"] in {hash for hash, _ in source.files.values()}
            error = None if retained and line["sourceRepoType"] == "bucket" else "source not found"
        else:
            error = None if line["xetHash"] in request.hub.xet.files else "unknown Xet hash"
        if error is None and line["type"] != "deleteFile":
            assert isinstance(line["mtime"], int)
            bucket.files[path] = (line["xetHash"], now())
        elif error is not None:
            failed.append({"path": path, "error": error})
    result = {"success": not failed, "processed": len(lines), "succeeded": len(lines) - len(failed), "failed": failed}
    return Answer(result, 422 if failed and len(failed) == len(lines) else 200)


def token(request: Request) -> Answer:
    _bucket(request, write=request.groups["access"] == "write")
    return token_answer(request)


def resolve(request: Request) -> Answer:
    bucket, path = _bucket(request), request.groups["path"]
    if path not in bucket.files:
        raise HubError(404, f"{path} does not exist", "EntryNotFound")
    hash, _ = bucket.files[path]
    headers = {
        "Location": request.hub.sign(f"/object/{hash}"),
        "X-Xet-Hash": hash,
        "X-Xet-Refresh-Route": f"{request.hub.endpoint}/api/buckets/{quote(bucket.name)}/xet-read-token",
        "X-Linked-Size": str(_size(request, hash)),
        "ETag": f'"{hash}"',
    }
    return Answer(status=302, headers=headers)


ROUTES = [
    route("bucket-create", "POST", BUCKET, create),
    route("bucket-info", "GET", BUCKET, info),
    route("bucket-delete", "DELETE", BUCKET, delete),
    route("bucket-tree", "GET", BUCKET + r"/tree(?:/(?P<path>.*))?", tree),
    route("bucket-paths", "POST", BUCKET + r"/paths-info", paths_info),
    route("bucket-batch", "POST", BUCKET + r"/batch", batch),
    route("bucket-token", "GET", BUCKET + r"/xet-(?P<access>read|write)-token", token),
    route("bucket-resolve", "GET HEAD", r"/buckets/(?P<name>[^/]+/[^/]+)/resolve/(?P<path>.+)", resolve),
]
