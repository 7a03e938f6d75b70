"""The test Hub: two listeners (the Hub on 127.0.0.1, its storage host on 127.0.0.2) and their shared state.

    with TestHub(folder, tokens={"hf_write": {"user": "ada", "can_write": True}}) as hub:
        subprocess.run(..., env={"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_write"})
        hub.files("ada/data")

The real clients of `huggingface_hub`, `datasets` and hf_xet work with it. Rate limits, the dataset viewer and
quotas are not implemented; `hub.faults` adds failures.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from . import api, buckets, discussions, lfs
from . import xet as cas
from .faults import Faults
from .objects import Counters, Intake, Objects
from .store import Entry, HubError, Repo, Repos
from .wire import Answer, Listener, Request

# A different host makes redirects and the removal of credentials real; only Linux has all of 127/8 on loopback.
STORAGE_HOST = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
TOKENS = {"hf_write": {"user": "ada", "can_write": True}, "hf_read": {"user": "bob", "can_write": False}}


class TestHub:
    """A Hub in threads of this process. After `stop` and `start`, addresses and content are the same."""

    __test__ = False

    def __init__(
        self,
        folder: Path,
        tokens: Mapping[str, Mapping[str, Any]] = TOKENS,
        *,
        keep: bool = True,
        tail_bytes: int = 0,
        multipart_bytes: int = 64 << 20,
        part_bytes: int = 16 << 20,
        regular_bytes: int = 10 << 20,
        page_size: int = 1000,
        url_lifetime_s: float = 3600,
        xet: bool = False,
    ) -> None:
        self.tokens = dict(tokens)
        self.multipart_bytes, self.part_bytes, self.regular_bytes = multipart_bytes, part_bytes, regular_bytes
        self.page_size, self.url_lifetime_s = page_size, url_lifetime_s
        self.counters = Counters()
        self.faults = Faults()
        self.errors: list[BaseException] = []
        self.log: list[str] = []
        """Method and path of every request, in the order in which they came."""
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.repos = Repos()
        self.moved: dict[str, str] = {}
        """Repositories with another name now, by the old one: requests are redirected, as the Hub does."""
        self.buckets: dict[str, buckets.Bucket] = {}
        self.objects = Objects(Path(folder), self.counters, keep=keep, tail_bytes=tail_bytes)
        self.xet = cas.XetStore(Path(folder), keep=keep) if xet else None
        self._listeners: list[Listener] = []
        self._addresses = [("127.0.0.1", 0), (STORAGE_HOST, 0)]

    @property
    def endpoint(self) -> str:
        return "http://{}:{}".format(*self._addresses[0])

    @property
    def storage(self) -> str:
        return "http://{}:{}".format(*self._addresses[1])

    def start(self) -> None:
        self.stopping.clear()
        hub_routes = [*buckets.ROUTES, *cas.HUB_ROUTES, *lfs.HUB_ROUTES, *discussions.ROUTES, *api.ROUTES]
        for i, routes in enumerate([hub_routes, [*lfs.STORAGE_ROUTES, *cas.STORAGE_ROUTES]]):
            self._listeners.append(Listener(self._addresses[i], self, routes))
            host, port = self._listeners[i].server_address[:2]
            self._addresses[i] = (str(host), int(port))

    def stop(self) -> None:
        """Close both listeners and every open connection."""
        self.stopping.set()
        while self._listeners:
            self._listeners.pop().close()

    def restart(self, pause_s: float = 0.0) -> None:
        self.stop()
        time.sleep(pause_s)
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop()
        if self.errors and kind is None:
            raise AssertionError("the test Hub failed") from self.errors[0]

    def files(self, repo: str, revision: str = "main", *, kind: str = "datasets") -> dict[str, tuple[int, str]]:
        """Return the size and SHA-256 of every file of a revision."""
        tree = self.repos.get(kind, repo).resolve(revision).tree
        return {path: (entry.size, entry.sha256) for path, entry in tree.items()}

    def read(self, repo: str, path: str, revision: str = "main", *, kind: str = "datasets") -> bytes:
        entry = self.repos.get(kind, repo).resolve(revision).tree[path]
        if entry.content is not None:
            return entry.content
        self._materialize(entry.sha256)
        file, _ = self.objects.readable(entry.sha256, 0)
        return file.read_bytes()

    def head(self, repo: str, revision: str = "main", *, kind: str = "datasets") -> str:
        return self.repos.get(kind, repo).resolve(revision).id

    def history(self, repo: str, revision: str = "main", *, kind: str = "datasets") -> list[str]:
        """Return the titles of the commits, newest first."""
        return [commit.title for commit in self.repos.get(kind, repo).history(revision)]

    def create(self, repo: str, *, private: bool = False, kind: str = "datasets") -> Repo:
        return self.repos.create(kind, repo, repo.split("/")[0], private=private)

    def move(self, old: str, new: str, *, kind: str = "datasets") -> None:
        self.repos.rename(kind, old, new)
        self.moved[old] = new

    def commit_as_someone_else(self, groups: Mapping[str, str]) -> None:
        """Add one file to that revision, as a concurrent commit of another user does."""
        repo = self.repos.get(groups.get("kind") or "datasets", groups["name"])
        entry = Entry.regular(f"{len(repo.commits)}\n".encode())
        revision = groups.get("revision") or "main"
        repo.commit(revision, lambda tree: tree.update({"someone-else.txt": entry}), title="someone else's commit")

    def collect_garbage(self, repo: str, *, kind: str = "datasets") -> set[str]:
        """Delete uploaded objects that no commit refers to, as the Hub does after about 20 hours."""
        actual = self.repos.get(kind, repo)
        with actual.lock:
            lost = actual.objects - actual.committed()
            actual.objects -= lost
        for oid in lost:
            self.objects.forget(oid)
        return lost

    def user(self, request: Request, *, required: bool = False) -> Mapping[str, Any]:
        """Return the user of the request's token, or None without a token."""
        header = request.headers.get("Authorization")
        if header is None:
            if required:
                raise HubError(401, "Invalid username or password.")
            return {"user": None, "can_write": False}
        if header.removeprefix("Bearer ") not in self.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.tokens[header.removeprefix("Bearer ")]

    def require_write(self, user: Mapping[str, Any], name: str) -> None:
        allowed = user["can_write"]
        if not (allowed is True or (allowed and name.split("/")[0] in allowed)):
            raise HubError(403, f"You don't have the rights to write to {name}")

    def repo(self, request: Request, *, write: bool = False, content: bool = False) -> Repo:
        """Return the repository of a request if its user has the permission that the request needs."""
        user = self.user(request, required=write)
        repo = self.repos.get(request.groups["kind"] or "models", request.groups["name"])
        if repo.private and user["user"] is None:
            raise HubError(404, "Repository not found", "RepoNotFound")
        if write:
            self.require_write(user, repo.name)
        if content and repo.gated and not user["can_write"] and repo.name not in user.get("granted", ()):
            raise HubError(401 if user["user"] is None else 403, "Access to this dataset is restricted.", "GatedRepo")
        return repo

    def url(self, repo: Repo) -> str:
        return f"{self.endpoint}/{'' if repo.kind == 'models' else repo.kind + '/'}{repo.name}"

    def sign(self, path: str) -> str:
        """Return a URL on the storage host that needs no token and expires."""
        expires = f"{time.time() + self.url_lifetime_s:.3f}"
        return f"{self.storage}{path}?expires={expires}&signature={_signature(path, expires)}"

    def check_signature(self, request: Request) -> None:
        if "Authorization" in request.headers:
            raise HubError(400, "Only one auth mechanism allowed: the token must not go to the storage host")
        expires = request.first("expires", "0")
        if request.first("signature") != _signature(request.path, expires) or float(expires) < time.time():
            raise HubError(403, "Request has expired", "AccessDenied")

    def xet_file(self, sha256: str) -> cas.XetFile | None:
        return self.xet.by_sha256.get(sha256) if self.xet is not None else None

    def read_bucket(self, name: str, path: str) -> bytes:
        """Return the object of a bucket."""
        hash, _ = self.buckets[name].files[path]
        self._materialize(hash)
        return self.objects.readable(hash, 0)[0].read_bytes()

    def object_size(self, repo: Repo, oid: str) -> int | None:
        """Return the size of an object that was uploaded to this repository."""
        if oid in repo.objects:
            return self.objects.sizes.get(oid)
        stored = self.xet_file(oid)
        return None if stored is None else stored.size

    def _materialize(self, oid: str) -> None:
        """Make an object that was uploaded in chunks readable as one file."""
        stored = self.xet_file(oid) or (self.xet.files.get(oid) if self.xet is not None else None)
        if stored is None or oid in self.objects.sizes:
            return
        # Imported in this function, because the server without Xet needs only the standard library.
        import hf_xet  # type: ignore[import-untyped]

        target = self.objects.folder / "incoming" / f"{oid}-{threading.get_ident()}"
        session = hf_xet.XetSession()
        with session.new_file_download_group(
            endpoint=f"{self.storage}/cas", token="xet", token_expiry_unix_secs=2**40
        ) as group:
            group.start_download_file(hf_xet.XetFileInfo(stored.hash, stored.size), str(target))
        with open(target, "rb") as file:
            if oid not in (stored.hash, hashlib.file_digest(file, "sha256").hexdigest()):
                raise AssertionError(f"xet object {oid} has another SHA-256 than its shard says")
        self.objects.adopt(oid, target)

    def slice(self, request: Request, label: bytes | str, headers: dict[str, str]) -> Answer:
        """Return the requested bytes of a text or of the object with that SHA-256."""
        if isinstance(label, str):
            self._materialize(label)
            if label not in self.objects.sizes:
                raise HubError(404, "No such object")
        size = len(label) if isinstance(label, bytes) else self.objects.sizes[label]
        requested = request.range(size)
        start, length = requested or (0, size)
        headers["Content-Length"] = str(length)
        headers["Accept-Ranges"] = "bytes"
        if requested:
            headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{size}"
        answer = Answer(status=206 if requested else 200, headers=headers)
        if request.method != "HEAD":
            if isinstance(label, bytes):
                answer.body = label[start : start + length]
            else:
                file, first = self.objects.readable(label, start)
                answer.file = (file, start - first, length)
        return answer

    def intake(self, route: str, request: Request) -> contextlib.AbstractContextManager[object]:
        """Count the bytes of requests that upload objects."""
        if route not in ("put", "part", "xorb"):
            return contextlib.nullcontext()
        intake = Intake(self.objects, request.groups["oid"], int(request.groups.get("part", 0)))
        request.body.on_bytes = intake.count
        return intake


def _signature(path: str, expires: str) -> str:
    return hmac.new(b"test hub", f"{path} {expires}".encode(), hashlib.sha256).hexdigest()
