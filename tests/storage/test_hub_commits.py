"""Commits to the Hub: made once against the revision that was read, despite lost answers and concurrent commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from brim.state.ledger import StoredFile
from brim.storage import hub_commits, hub_private
from brim.storage.hub_client import Snapshot
from brim.storage.hub_commits import HubCommits, UploadsMissing, pointers, texts
from brim.storage.storage import FileInfo

A, B = StoredFile("data/a", 3, "aa" * 32), StoredFile("data/b", 4, "bb" * 32)


class HubError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.response = SimpleNamespace(status_code=status, headers={})


class Client:
    """A Hub with one revision, which applies commits. `before` and `after` contain functions that may raise."""

    def __init__(self) -> None:
        self.trees: list[dict[str, FileInfo]] = [{}]
        self.commits: list[tuple[Any, ...]] = []
        self.before: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []
        self.looks = 0

    @property
    def head(self) -> str:
        return f"commit {len(self.trees) - 1}"

    def put(self, *segments: StoredFile) -> None:
        self.trees.append(self.trees[-1] | {p.name: FileInfo(p.size, sha256=p.sha256) for p in segments})

    def snapshot(self, revision: str, commit: str = "") -> Snapshot:
        assert revision == "main"
        self.looks += not commit
        return Snapshot(revision, commit or self.head, self.trees[int((commit or self.head).split()[1])])

    def commit(self, revision: str, parent: str, operations: Sequence[Any], *arguments: str | None) -> str:
        if self.before:
            self.before.pop(0)()
        if parent != self.head:
            raise HubError(412)
        self.commits.append((revision, [operation.path_in_repo for operation in operations], *arguments))
        self.put(*(StoredFile(op.path_in_repo, op.upload_info.size, op.upload_info.sha256.hex()) for op in operations))
        if self.after:
            self.after.pop(0)()
        return self.head


class Asked:
    """An LFS storage. `gone` are the objects that must be uploaded again."""

    def __init__(self, *gone: str) -> None:
        self.gone = gone
        self.pieces: list[StoredFile] = []

    def request(self, segments: Sequence[StoredFile]) -> dict[str, Any]:
        self.pieces = list(segments)
        return {segment.sha256: {} for segment in segments if segment.sha256 in self.gone}


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    actual: list[float] = []

    def wait_after(error: BaseException, wait_s: float) -> None:
        assert isinstance(error, HubError)
        actual.append(wait_s)

    monkeypatch.setattr(hub_commits, "wait_after", wait_after)
    return actual


def fail(status: int) -> Callable[[], None]:
    def call() -> None:
        raise HubError(status)

    return call


def bring(client: Client, lfs: Asked | None = None, *segments: StoredFile) -> tuple[Snapshot, HubCommits, list[int]]:
    messages: list[int] = []
    commits = HubCommits(client, lfs or Asked(), lambda: messages.append(len(client.commits)))  # type: ignore[arg-type]
    expected = segments or (A, B)
    snapshot = commits.commit("main", lambda position: pointers(position, expected), "title", "more words")
    return snapshot, commits, messages


def test_what_is_missing_is_committed_against_what_was_looked_at() -> None:
    """Only missing files are committed, once, with message and parent revision.

    The result is the new revision, and progress is reported.
    """
    client = Client()
    client.put(A)
    snapshot, commits, reports = bring(client)
    assert client.commits == [("main", ["data/b"], "title", "more words")]
    assert snapshot == Snapshot("main", "commit 2", client.trees[2])
    assert (commits.count, reports) == (1, [1])
    assert snapshot.contains(A)
    assert snapshot.contains(B)


def test_nothing_to_do_is_no_commit() -> None:
    client = Client()
    client.put(A, B)
    snapshot, commits, reports = bring(client)
    assert (client.commits, commits.count, reports) == ([], 0, [])
    assert snapshot.commit == "commit 1"


@pytest.mark.parametrize("status", [409, 412])
def test_somebody_else_was_quicker(delays: list[float], status: int) -> None:
    """After a concurrent commit, the revision is read again at once, and only the remaining files are committed."""
    client = Client()

    def other() -> None:
        client.put(A)
        if status == 409:
            raise HubError(409)

    client.before.append(other)
    _, commits, _ = bring(client)
    assert client.commits == [("main", ["data/b"], "title", "more words")]
    assert (commits.count, client.looks, delays) == (1, 2, [])


def test_a_lost_answer_makes_no_second_commit(delays: list[float]) -> None:
    """If the answer to a commit is lost, reading the revision again shows all files, and no second commit is made."""
    client = Client()
    client.after.append(fail(500))
    snapshot, commits, reports = bring(client)
    assert len(client.commits) == 1
    assert snapshot.commit == client.head
    assert (commits.count, reports, delays) == (0, [], [1.0])


def test_what_passes_is_waited_for(delays: list[float]) -> None:
    """Transient errors are retried with growing waits."""
    client = Client()
    client.before += [fail(503), fail(429), fail(500)]
    _, commits, _ = bring(client)
    assert len(client.commits) == commits.count == 1
    assert delays == [1.0, 2.0, 4.0]


def test_the_tries_have_an_end(delays: list[float]) -> None:
    """After the last retry, the error is raised unless the commit was made."""
    client = Client()
    client.before += [fail(503)] * 6
    with pytest.raises(HubError, match="503"):
        bring(client)
    assert (client.commits, len(delays)) == ([], 5)
    client = Client()
    client.before += [fail(503)] * 5
    client.after.append(fail(503))
    snapshot, commits, _ = bring(client)
    assert (len(client.commits), snapshot.commit, commits.count) == (1, "commit 1", 0)


def test_conflicts_without_end_are_raised(delays: list[float]) -> None:
    client = Client()
    client.before += [fail(409)] * 6
    with pytest.raises(HubError, match="409"):
        bring(client)
    assert (client.looks, delays) == (7, [])


def test_what_does_not_pass_is_raised_at_once(delays: list[float]) -> None:
    client = Client()
    client.before.append(fail(403))
    with pytest.raises(HubError, match="403"):
        bring(client)
    assert (client.looks, delays) == (1, [])


@pytest.mark.parametrize("status", [400, 404, 422])
def test_objects_that_were_collected_are_named(delays: list[float], status: int) -> None:
    """If the Hub refuses a commit because of deleted uploads, exactly those shards are reported for another upload."""
    client, lfs = Client(), Asked(B.sha256)
    client.before.append(fail(status))
    with pytest.raises(UploadsMissing) as caught:
        bring(client, lfs)
    assert caught.value.names == ["data/b"]
    assert lfs.pieces == [A, B]


def test_a_refusal_of_what_is_there_is_an_error() -> None:
    client, lfs = Client(), Asked()
    client.before.append(fail(422))
    with pytest.raises(HubError, match="422"):
        bring(client, lfs)
    assert lfs.pieces == [A, B]


def test_objects_are_asked_for_only_when_a_commit_is_refused(delays: list[float]) -> None:
    client, lfs = Client(), Asked(A.sha256)
    client.before.append(fail(500))
    bring(client, lfs)
    assert lfs.pieces == []


def test_only_what_was_sent_can_be_gone() -> None:
    """Only uploaded objects can be missing, because a commit contains its texts and deletions."""
    lfs = Asked(A.sha256)
    commits = HubCommits(Client(), lfs, lambda: None)  # type: ignore[arg-type]
    todo = [hub_private.text("README.md", b"x"), hub_private.addition(A), hub_private.deletion("old")]
    with pytest.raises(UploadsMissing):
        commits._raise_missing(todo)
    assert lfs.pieces == [A]


def test_texts_that_are_the_same_are_left_alone() -> None:
    """Texts with unchanged content are not committed again, whether the Hub stores them as texts or as objects."""
    import hashlib

    blob = hashlib.sha1(b"blob 3\0one", usedforsecurity=False).hexdigest()
    tree = {"a": FileInfo(3, blob=blob), "b": FileInfo(3, sha256=hashlib.sha256(b"two").hexdigest())}
    expected = {"a": b"one", "b": b"two", "c": b"new"}
    position = Snapshot("main", "commit 1", tree)
    assert [operation.path_in_repo for operation in texts(position, expected)] == ["c"]
    changed = texts(position, {"a": b"two", "b": b"one"})
    assert [(operation.path_in_repo, operation.path_or_fileobj.read()) for operation in changed] == [
        ("a", b"two"),
        ("b", b"one"),
    ]
