"""The repositories of the test Hub: trees, commits, branches and pull requests, without HTTP and large objects."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

GITATTRIBUTES = b"".join(
    b"*.%s filter=lfs diff=lfs merge=lfs -text\n" % name
    for name in (b"arrow", b"bin", b"gz", b"npy", b"parquet", b"tar", b"zip", b"zst")
)
LFS_SUFFIXES = tuple(line.split()[0][1:].decode() for line in GITATTRIBUTES.splitlines())


class HubError(Exception):
    """An answer that reports a failure; clients read `code` from the header X-Error-Code."""

    def __init__(self, status: int, message: str, code: str | None = None, **fields: Any) -> None:
        super().__init__(status, message, code)
        self.status, self.message, self.code, self.fields = status, message, code, fields


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (sha256.encode(), size)


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a tree: its text, or (content is None) a pointer to a large object."""

    size: int
    sha256: str
    blob_id: str
    content: bytes | None
    commit: str = ""

    @classmethod
    def regular(cls, content: bytes) -> Entry:
        return cls(len(content), hashlib.sha256(content).hexdigest(), git_blob_id(content), content)

    @classmethod
    def lfs(cls, sha256: str, size: int) -> Entry:
        return cls(size, sha256, git_blob_id(lfs_pointer(sha256, size)), None)

    def same(self, other: Entry | None) -> bool:
        return other is not None and self.blob_id == other.blob_id


Tree = Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class Commit:
    id: str
    parent: str | None
    title: str
    message: str
    author: str
    date: str
    tree: Tree = field(repr=False)


@dataclass(slots=True)
class Discussion:
    num: int
    title: str
    author: str
    is_pull_request: bool
    status: str
    base: str
    base_commit: str
    created_at: str = field(default_factory=now)
    merge_commit: str | None = None
    events: list[dict[str, Any]] = field(default_factory=list)

    def add_event(self, kind: str, author: str, data: Mapping[str, Any]) -> dict[str, Any]:
        number = f"{self.num:08x}{len(self.events):08x}"
        event = {"id": number, "type": kind, "createdAt": now(), "author": {"name": author}, "data": dict(data)}
        self.events.append(event)
        return event

    def comment(self, author: str, text: str) -> dict[str, Any]:
        latest = {"raw": text, "html": text, "updatedAt": now(), "author": {"name": author}}
        return self.add_event(
            "comment", author, {"edited": False, "hidden": False, "latest": latest, "history": [latest]}
        )


class Repo:
    """One repository. Every method that changes it holds `lock`."""

    def __init__(self, kind: str, name: str, author: str, private: bool) -> None:
        self.kind, self.name, self.author = kind, name, author
        self.private = private
        self.gated: str | bool = False
        self.created_at = now()
        self.lock = threading.RLock()
        self.objects: set[str] = set()
        """SHA-256 of the large objects uploaded to this repository, committed or not."""
        self.commits: dict[str, Commit] = {}
        self.refs: dict[str, str] = {}
        self.discussions: dict[int, Discussion] = {}
        self._count = itertools.count()
        first = self._record({".gitattributes": Entry.regular(GITATTRIBUTES)}, None, "initial commit", "", author)
        self.refs["main"] = first.id

    def _record(self, tree: Tree, parent: str | None, title: str, message: str, author: str) -> Commit:
        seed = f"{self.kind}/{self.name} {parent} {title} {next(self._count)} {now()}"
        commit_id = hashlib.sha1(seed.encode()).hexdigest()
        owned = {path: e if e.commit else replace(e, commit=commit_id) for path, e in sorted(tree.items())}
        commit = Commit(commit_id, parent, title, message, author, now(), owned)
        self.commits[commit_id] = commit
        return commit

    def resolve(self, revision: str) -> Commit:
        """Return the commit of a branch, of a pull request's reference or of a commit OID."""
        actual = self.refs.get(revision.removeprefix("refs/heads/"), revision)
        if actual not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[actual]

    def commit(
        self,
        revision: str,
        change: Callable[[dict[str, Entry]], None],
        *,
        title: str,
        message: str = "",
        author: str = "someone",
        parent: str | None = None,
    ) -> Commit:
        """Apply `change` to the tree of the head and move the reference."""
        with self.lock:
            if revision not in self.refs:
                raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            head = self.commits[self.refs[revision]]
            if parent is not None and parent != head.id:
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            discussion = self.pull_request_of(revision)
            if discussion is not None and discussion.status not in ("draft", "open"):
                raise HubError(403, f"Pull request {discussion.num} is {discussion.status}")
            tree = dict(head.tree)
            change(tree)
            commit = self._record(tree, head.id, title, message, author)
            self.refs[revision] = commit.id
            if discussion is not None:
                discussion.add_event("commit", author, {"subject": title, "oid": commit.id})
            return commit

    def history(self, revision: str) -> list[Commit]:
        commits, position = [], self.resolve(revision).id if revision else None
        while position is not None:
            commits.append(self.commits[position])
            position = commits[-1].parent
        return commits

    def create_branch(self, name: str, start: str | None) -> None:
        with self.lock:
            if name in self.refs:
                raise HubError(409, f"Reference already exists: {name}")
            self.refs[name] = self.resolve(start or "main").id

    def delete_branch(self, name: str) -> None:
        with self.lock:
            if name not in self.refs or name.startswith("refs/"):
                raise HubError(404, f"Reference does not exist: {name}", "RevisionNotFound")
            if name == "main":
                raise HubError(403, "Cannot delete the default branch")
            del self.refs[name]

    def create_discussion(self, title: str, text: str, author: str, pull_request: bool, base: str) -> Discussion:
        if not 3 <= len(title) <= 200:
            raise HubError(400, "The title must have 3 to 200 characters")
        with self.lock:
            head = self.resolve(base)
            status = "draft" if pull_request else "open"
            created = Discussion(len(self.discussions) + 1, title, author, pull_request, status, base, head.id)
            created.comment(author, text)
            self.discussions[created.num] = created
            if pull_request:
                self.refs[f"refs/pr/{created.num}"] = head.id
            return created

    def discussion(self, num: int) -> Discussion:
        if num not in self.discussions:
            raise HubError(404, f"Discussion {num} not found")
        return self.discussions[num]

    def pull_request_of(self, revision: str) -> Discussion | None:
        if not revision.startswith("refs/pr/"):
            return None
        return self.discussions.get(int(revision.rsplit("/", 1)[1]))

    def set_status(self, num: int, status: str, author: str) -> dict[str, Any]:
        with self.lock:
            discussion = self.discussion(num)
            if status not in ("open", "closed") or discussion.status == "merged":
                raise HubError(400, f"Cannot change from {discussion.status} to {status}")
            discussion.status = status
            return discussion.add_event("status-change", author, {"status": status})

    def _pull_request_changes(self, discussion: Discussion) -> tuple[dict[str, Entry | None], list[str]]:
        """Return the changes that a merge would make on the base branch, and the paths that both sides changed."""
        before = self.commits[discussion.base_commit].tree
        expected = self.resolve(f"refs/pr/{discussion.num}").tree
        head = self.resolve(discussion.base).tree
        changes: dict[str, Entry | None] = {}
        conflicts = []
        for path in sorted({*before, *expected}):
            ours, theirs, old = expected.get(path), head.get(path), before.get(path)
            if _same(ours, old):
                continue
            changes[path] = ours
            if not _same(theirs, old) and not _same(theirs, ours):
                conflicts.append(path)
        return changes, conflicts

    def conflicts(self, discussion: Discussion) -> list[str]:
        return [] if discussion.status == "merged" else self._pull_request_changes(discussion)[1]

    def merge(self, num: int, author: str) -> Commit:
        """Squash the pull request onto its base branch."""
        with self.lock:
            discussion = self.discussion(num)
            if not discussion.is_pull_request or discussion.status != "open":
                raise HubError(400, f"This pull request is {discussion.status} and cannot be merged")
            changes, conflicts = self._pull_request_changes(discussion)
            if conflicts:
                raise HubError(409, f"Merge conflicts in {conflicts}")

            def apply(tree: dict[str, Entry]) -> None:
                for path, entry in changes.items():
                    if entry is None:
                        tree.pop(path, None)
                    else:
                        tree[path] = replace(entry, commit="")

            commit = self.commit(discussion.base, apply, title=f"{discussion.title} (#{num})", author=author)
            discussion.status, discussion.merge_commit = "merged", commit.id
            discussion.add_event("status-change", author, {"status": "merged"})
            return commit

    def committed(self) -> set[str]:
        return {e.sha256 for commit in self.commits.values() for e in commit.tree.values() if e.content is None}


def _same(a: Entry | None, b: Entry | None) -> bool:
    return a is b or (a is not None and a.same(b))


class Repos:
    """All repositories, by type ("models", "datasets", "spaces") and name."""

    def __init__(self) -> None:
        self._repos: dict[tuple[str, str], Repo] = {}
        self._lock = threading.Lock()

    def create(self, kind: str, name: str, author: str, *, private: bool) -> Repo:
        with self._lock:
            if (kind, name) in self._repos:
                raise HubError(409, f"You already created this {kind[:-1]} repo: {name}")
            self._repos[kind, name] = Repo(kind, name, author, private)
            return self._repos[kind, name]

    def get(self, kind: str, name: str) -> Repo:
        if (kind, name) not in self._repos:
            raise HubError(404, "Repository not found", "RepoNotFound")
        return self._repos[kind, name]

    def delete(self, kind: str, name: str) -> None:
        self.get(kind, name)
        with self._lock:
            del self._repos[kind, name]

    def rename(self, kind: str, old: str, new: str) -> None:
        repo = self.get(kind, old)
        with self._lock:
            del self._repos[kind, old]
            repo.name, self._repos[kind, new] = new, repo

    def __iter__(self) -> Iterator[Repo]:
        return iter(list(self._repos.values()))
