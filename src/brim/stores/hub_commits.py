"""Commits that are safe to repeat: the difference between what shall be and what the Hub lists.

Each is made against the commit that was looked at. So a lost answer, a commit by someone else and a run
that was killed are all the same case: look again, and do what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from brim.state.ledger import Piece
from brim.storage import hub_private
from brim.storage.hub_client import HubClient, Snapshot
from brim.storage.hub_session import UnexpectedAnswerError, hub_tries, is_transient, status_of, wait_after
from brim.stores.hub_upload import Lfs
from brim.stores.store import ObjectsGone

CONFLICT = (409, 412)
REFUSED = (400, 404, 422)

OperationsAt = Callable[[Snapshot], list[Any]]


def pointers(at: Snapshot, pieces: Iterable[Piece]) -> list[Any]:
    """What names these shards at a revision that does not yet."""
    return [hub_private.addition(piece) for piece in pieces if not at.holds(piece)]


def texts(at: Snapshot, wanted: dict[str, bytes]) -> list[Any]:
    return [hub_private.text(name, data) for name, data in wanted.items() if not at.holds_text(name, data)]


class Commits:
    """Makes commits and counts them."""

    def __init__(self, client: HubClient, lfs: Lfs, committed: Callable[[], None]) -> None:
        self.count = 0
        self._client, self._lfs, self._committed = client, lfs, committed

    def made(self) -> None:
        self.count += 1
        self._committed()

    def bring(
        self, revision: str, operations_at: OperationsAt, message: str, description: str | None = None
    ) -> Snapshot:
        """Bring a revision to where no operation is left, whoever else commits and whatever answer is lost."""
        retry = hub_tries()
        while True:
            at = self._client.snapshot(revision)
            if not (todo := operations_at(at)):
                return at
            try:
                made = self._client.commit(revision, at.commit, todo, message, description)
            except Exception as error:
                if status_of(error) in REFUSED:
                    self._raise_gone(todo)
                # Somebody else was quicker, or nobody knows whether it was made: look again at once.
                conflict = status_of(error) in CONFLICT or isinstance(error, UnexpectedAnswerError)
                if not conflict and not is_transient(error):
                    raise
                if (wait_s := retry.next_s()) is None:
                    at = self._client.snapshot(revision)
                    if operations_at(at):
                        raise
                    return at  # the answer was lost, and not the commit
                if not conflict:
                    wait_after(error, wait_s)
                continue
            self.made()
            return self._client.snapshot(revision, made)

    def _raise_gone(self, todo: Sequence[Any]) -> None:
        """ObjectsGone if the Hub no longer has what a commit points to."""
        sent = [op for op in todo if hub_private.is_sent(op)]
        pieces = [Piece(op.path_in_repo, op.upload_info.size, op.upload_info.sha256.hex()) for op in sent]
        asked = self._lfs.asked(pieces)
        if asked:
            raise ObjectsGone([piece.name for piece in pieces if piece.sha256 in asked])
