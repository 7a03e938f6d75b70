"""Single files as destination, beside whatever else lies there: vectors, and the columns that were kept of their rows.

There is no card and no folder of shards. What has a file's name before is replaced when the new one is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from brim.buckets.bucket_address import BucketAddress
from brim.buckets.bucket_client import explained
from brim.buckets.listing import stat_object
from brim.buckets.send_object import delete_objects
from brim.formats.splice import FileSplice, Splice
from brim.state.durable import failures, free_bytes, rename
from brim.state.ledger import Piece
from brim.stores.bucket_store import BucketCarrier
from brim.stores.folder_store import FolderCarrier
from brim.stores.store import Announcement, Publication, Put, PutWatcher


class _Files:
    """What single files need not do of all that a store does."""

    staged = False

    def open(self, fingerprint: str) -> None:
        """Nothing has to be there."""

    def holds_aside(self, piece: Piece) -> bool:
        return False

    def set_aside(self, piece: Piece) -> None:
        """A file that loses its name is made again."""

    def bring_back(self, piece: Piece, name: str) -> str:
        raise AssertionError("nothing is set aside")

    def discard(self, names: Iterable[str]) -> None:
        """They stay until the new ones are there."""

    def begin(self, job: Announcement) -> None:
        """Nobody is told."""

    def checkpoint(self, pieces: Sequence[Piece], oldest: float) -> None:
        """What is there lasts."""

    def close(self) -> None:
        """Nothing is held open."""


class FileStore(_Files):
    """Files in a folder of this machine. `names` are those that would be in the way if brim did not write them."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self._names = folder, names

    def shards(self) -> list[str]:
        return [name for name in self._names if (self.folder / name).exists()]

    def holds(self, piece: Piece) -> bool:
        try:
            return (self.folder / piece.name).stat().st_size == piece.size
        except (FileNotFoundError, NotADirectoryError):
            return False

    def free_bytes(self) -> int | None:
        return free_bytes(self.folder)

    def put(self, name: str, splice: Splice, sha256: str | None, watcher: PutWatcher) -> Put:
        """Give a file of the same disk its name. It keeps its own too where it can: a killed run finds it again."""
        assert isinstance(splice, FileSplice)
        assert sha256 is not None
        second = splice.path.with_name(f".{splice.path.name}.tmp")
        with failures(self.folder):
            second.unlink(missing_ok=True)
            try:
                os.link(splice.path, second)
            except OSError:  # a file system without links
                second = splice.path
            rename(second, self.folder / name)
            if second != splice.path:
                second.unlink(missing_ok=True)  # two names of one file: then the system leaves both as they are
        watcher.sent(splice.size)
        return Put(sha256)

    def carrier(self) -> FolderCarrier:
        return FolderCarrier(self.folder)

    def publish(self, publication: Publication) -> str:
        for name in sorted(publication.gone):
            (self.folder / name).unlink(missing_ok=True)
        return ""


class ObjectFileStore(_Files):
    """Files in a place of a bucket."""

    def __init__(self, folder: BucketAddress, names: Sequence[str]) -> None:
        self.folder, self._names = folder, names

    def shards(self) -> list[str]:
        return [name for name in self._names if stat_object(self.folder.below(name), reading=False) is not None]

    def holds(self, piece: Piece) -> bool:
        there = stat_object(self.folder.below(piece.name), reading=False)
        return there is not None and there.st_size == piece.size and piece.etag in ("", there.etag)

    def free_bytes(self) -> int | None:
        return None

    def put(self, name: str, splice: Splice, sha256: str | None, watcher: PutWatcher) -> Put:
        carrier = self.carrier()
        carrier.drop(name)  # what a killed run began to send
        return carrier.put(name, splice, sha256, watcher)

    def carrier(self) -> BucketCarrier:
        return BucketCarrier(self.folder)

    def publish(self, publication: Publication) -> str:
        with explained(self.folder):
            delete_objects(self.folder, [self.folder.key(name) for name in sorted(publication.gone)])
        return ""
