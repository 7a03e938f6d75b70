"""Commits that can be repeated: the difference between the requested state and the state that the Hub lists.

Each commit is made against the commit that was read. So a lost answer, a commit by another user and a killed run are
all the same case: read again, and commit the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from brim.state.ledger import StoredFile
from brim.storage import hub_private
from brim.storage.hub_client import HubClient, Snapshot
from brim.storage.hub_session import UnexpectedAnswerError, hub_tries, is_transient, status_of, wait_after
from brim.storage.hub_upload import LfsUpload

CONFLICT = (409, 412)
REFUSED = (400, 404, 422)
Operations = Callable[[Snapshot], list[Any]]  # from the present state to the requested one


class UploadsMissing(Exception):
    """A commit names objects that the Hub no longer has."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(*names)
        self.names = names


def pointers(snapshot: Snapshot, shards: Iterable[StoredFile]) -> list[Any]:
    """Return the operations that add shards which a revision does not have."""
    return [hub_private.addition(shard) for shard in shards if not snapshot.contains(shard)]


def texts(snapshot: Snapshot, contents: dict[str, bytes]) -> list[Any]:
    """Return the operations that write small files which a revision does not have."""
    return [hub_private.text(name, data) for name, data in contents.items() if not snapshot.holds_text(name, data)]


class HubCommits:
    """Makes commits and counts them."""

    def __init__(self, client: HubClient, lfs: LfsUpload, on_commit: Callable[[], None]) -> None:
        self.count = 0
        self._client, self._lfs, self._on_commit = client, lfs, on_commit

    def add_count(self) -> None:
        self.count += 1
        self._on_commit()

    def commit(self, revision: str, operations: Operations, message: str, description: str | None = None) -> Snapshot:
        """Commit until no operation is left, even if other users commit or answers are lost."""
        retry = hub_tries()
        while True:
            snapshot = self._client.snapshot(revision)
            if not (pending := operations(snapshot)):
                return snapshot
            try:
                commit = self._client.commit(revision, snapshot.commit, pending, message, description)
            except Exception as error:
                if status_of(error) in REFUSED:
                    self._raise_missing(pending)
                # Another user was quicker, or the commit may have been made: read again at once.
                is_conflict = status_of(error) in CONFLICT or isinstance(error, UnexpectedAnswerError)
                if not is_conflict and not is_transient(error):
                    raise
                if (wait_s := retry.next_s()) is None:
                    snapshot = self._client.snapshot(revision)
                    if operations(snapshot):
                        raise
                    return snapshot  # the commit was made, and its answer was lost
                if not is_conflict:
                    wait_after(error, wait_s)
                continue
            self.add_count()
            return self._client.snapshot(revision, commit)

    def _raise_missing(self, operations: Sequence[Any]) -> None:
        """Raise UploadsMissing if the Hub no longer has an object that a commit names."""
        uploaded = [op for op in operations if hub_private.is_sent(op)]
        shards = [StoredFile(op.path_in_repo, op.upload_info.size, op.upload_info.sha256.hex()) for op in uploaded]
        requested = self._lfs.request(shards)
        if requested:
            raise UploadsMissing([shard.name for shard in shards if shard.sha256 in requested])
